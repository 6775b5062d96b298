"""Tests of the choices that follow from this machine's GPUs and packages, with a driver that reports given GPUs."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from fuligo.cli import chosen
from fuligo.cli.chosen import Checked, checked, with_assumed_engine, with_installed_engine
from fuligo.config.command_line import parse
from fuligo.config.findings import Severity
from fuligo.config.validate import described
from tests import tiny

EXAMPLES = Path(__file__).parents[3] / "examples"
JOB = "--prompt-data prompts.jsonl --label-key label --rm-type math --num-rollout 2 --rollout-max-response-len 64"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Return a function that gives the machine GPUs and packages."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def has(num_gpus: int, name: str = "NVIDIA H200, 143771", *, sglang: bool = True, used_mib: Sequence[int] = ()) -> None:
        text = "".join(f"{index}, {name}, 580.159, {dict(enumerate(used_mib)).get(index, 4)}\n" for index in range(num_gpus))
        monkeypatch.setattr(chosen, "nvidia_smi", lambda *arguments: text)
        monkeypatch.setattr(chosen, "package_versions", lambda names, *rest: dict.fromkeys(names, "1" if sglang else None))

    return has


def plan(model: Path, flags: str = "") -> Checked:
    return checked(parse(["--hf-checkpoint", str(model), *JOB.split(), *flags.split()]).config)


def errors(found: Checked) -> list[str]:
    return [finding.id for finding in found.findings if finding.severity is Severity.ERROR]


@pytest.mark.parametrize("num_gpus, shares", [(1, True), (2, False)])
def test_gpus_without_flags_sample_with_sglang_where_it_is_installed(model: Path, machine, num_gpus: int, shares: bool) -> None:
    machine(num_gpus)
    found = plan(model)
    assert found.config.resolved_rollout_backend == "sglang" and found.config.cluster.colocate is shares
    assert found.choices[0].endswith("SGLang is installed")
    assert errors(found) == []


@pytest.mark.parametrize("num_gpus", [1, 2])
@pytest.mark.parametrize(
    "flags",
    [
        "", "--colocate", "--colocate --offload-train", "--async-mode one-step", "--rollout-backend embedded",
        "--device cpu", "--debug-rollout-only", "--debug-train-only --load-debug-rollout-data rollouts", "--launcher ray",
    ],
)  # fmt: skip
def test_a_plan_elsewhere_has_the_engine_of_a_machine_with_sglang(model: Path, machine, num_gpus: int, flags: str) -> None:
    machine(num_gpus)
    gpus = f"--num-gpus-per-node {num_gpus} --actor-num-gpus-per-node 1"
    config = parse(["--hf-checkpoint", str(model), *JOB.split(), *gpus.split(), *flags.split()]).config
    there, _ = with_installed_engine(config, 0 if config.cluster.device == "cpu" else num_gpus)
    planned, notes = with_assumed_engine(config)
    assert planned == there
    assert bool(notes) is (planned != config)
    assert all("where SGLang is installed" in note and f"{num_gpus} GPU" in note for note in notes)


def test_colocated_engines_get_no_gpus_of_their_own(model: Path, machine) -> None:
    machine(8)
    found = plan(model, "--colocate")
    assert found.choices[0] == "--rollout-backend sglang: SGLang is installed"
    assert found.config.cluster.rollout_num_gpus is None


def test_gpus_that_others_use_are_named(model: Path, machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(4, used_mib=(4, 71234, 0, 50000))
    warnings = plan(model, "--actor-num-gpus-per-node 1 --rollout-num-gpus 1").warnings
    assert len(warnings) == 1, "GPU 3 belongs to no part of the run"
    assert warnings[0].startswith("GPU 1: 69.6 of its 140.4 GiB are in use") and "CUDA_VISIBLE_DEVICES" in warnings[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert plan(model, "--actor-num-gpus-per-node 1 --rollout-num-gpus 1").warnings == ()
    assert plan(model, "--device cpu").warnings == ()


def test_runs_that_share_engines_choose_the_same_arguments(model: Path, machine) -> None:
    machine(2)
    one, other = (parse(["--hf-checkpoint", str(model), *JOB.split(), "--rollout-batch-size", size]).config for size in ("24", "72"))
    found = [checked(one, [other]), checked(other, [one])]
    assert {each.config.sglang.get("max_running_requests") for each in found} == {(24 + 72) * one.rollout.n_samples_per_prompt + 1}


def test_without_sglang_a_line_says_what_that_costs(model: Path, machine) -> None:
    machine(1, sglang=False)
    found = plan(model)
    assert found.config.resolved_rollout_backend == "embedded"
    assert "4 x slower than SGLang" in found.choices[0] and "pip install sglang==" in found.choices[0]


@pytest.mark.parametrize("flags", ["--rollout-backend embedded", "--device cpu"])
def test_given_flags_and_cpus_keep_the_embedded_engine(model: Path, machine, flags: str) -> None:
    machine(1)
    found = plan(model, flags)
    assert found.config.resolved_rollout_backend == "embedded"
    assert all(choice.startswith(("--no-torch-compile", "--use-dynamic-batch-size")) for choice in found.choices)


def test_a_machine_without_gpus_chooses_nothing(model: Path, machine) -> None:
    machine(0)
    found = plan(model)
    assert found.choices == () and found.config.rollout.rollout_concurrency is None


def test_one_gpu_is_shared_also_where_a_flag_asks_for_sglang(model: Path, machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    found = plan(model, "--sglang-attention-backend triton --rollout-num-gpus-per-engine 1")
    assert found.config.cluster.colocate
    assert found.choices[0] == "--colocate: trainer and engines need 2 separate GPUs, but this machine has 1"


def test_a_run_that_does_not_fit_is_refused_with_a_fix(machine) -> None:
    machine(1, "NVIDIA GeForce RTX 4090, 24564")
    path = EXAMPLES / "qwen3-4b" / "model"
    found = checked(parse(["--hf-checkpoint", str(path), *JOB.split(), "--rollout-backend", "sglang", "--colocate"]).config)
    assert "PLAN-MEMORY-TRAINER" in errors(found)
    (refusal,) = (finding for finding in found.findings if finding.id == "PLAN-MEMORY-TRAINER")
    assert "--ignore-memory-plan" in described(refusal, found.config)


def test_a_run_that_does_not_fit_by_the_plan_starts_if_a_flag_says_so(machine) -> None:
    machine(1, "NVIDIA GeForce RTX 4090, 24564")
    path = EXAMPLES / "qwen3-4b" / "model"
    flags = [*JOB.split(), "--rollout-backend", "sglang", "--colocate", "--ignore-memory-plan"]
    found = checked(parse(["--hf-checkpoint", str(path), *flags]).config)
    assert errors(found) == []
    assert any(finding.id == "PLAN-MEMORY-TRAINER" for finding in found.findings)


def test_an_unknown_gpu_is_not_planned_for(model: Path, machine) -> None:
    machine(1, "NVIDIA T4, 15360")
    assert plan(model).config.rollout.rollout_concurrency is None


def test_engines_alone_need_no_gpus_of_a_trainer(model: Path, machine) -> None:
    machine(1)
    found = plan(model, "--rollout-backend sglang --debug-rollout-only")
    assert errors(found) == [] and found.config.total_num_gpus == 1 and not found.config.cluster.colocate


def test_a_run_that_cannot_be_planned_says_so(machine, tmp_path: Path) -> None:
    machine(1)
    (tmp_path / "config.json").write_text('{"model_type": "gpt_neo"}')
    found = plan(tmp_path, "--rollout-backend embedded")
    (line,) = found.choices
    assert line.startswith("starting without a plan of memory and time: ")
