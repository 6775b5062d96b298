"""Tests of the choices that follow from this machine's GPUs and packages, with a driver that reports given GPUs."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from fuligo.cli import chosen
from fuligo.cli.chosen import Checked, checked, with_assumed_engine, with_installed_engine
from fuligo.config.command_line import parse
from fuligo.config.findings import Severity
from fuligo.config.flags import flags
from fuligo.config.validate import described
from fuligo.machine.nvidia import GIB
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

    def has(
        num_gpus: int, name: str = "NVIDIA H200, 143771", *, sglang: bool = True, used_mib: Sequence[int] = (), host_gib: int = 2048
    ) -> None:
        text = "".join(f"{index}, {name}, 580.159, {dict(enumerate(used_mib)).get(index, 4)}\n" for index in range(num_gpus))
        monkeypatch.setattr(chosen, "nvidia_smi", lambda *arguments: text)
        monkeypatch.setattr(chosen, "memory_bytes", lambda: host_gib * GIB)
        monkeypatch.setattr(chosen, "package_versions", lambda names, *rest: dict.fromkeys(names, "1" if sglang else None))

    return has


def plan(model: Path, flags: str = "") -> Checked:
    return checked(parse(["--hf-checkpoint", str(model), *JOB.split(), *flags.split()]).config)


def errors(found: Checked) -> list[str]:
    return [finding.id for finding in found.findings if finding.severity is Severity.ERROR]


def warned(found: Checked) -> bool:
    """Return whether a warning says that trainer and engines take turns idling."""
    return any(finding.id == "PLAN-SPLIT-GPUS" for finding in found.findings)


@pytest.mark.parametrize("num_gpus", [1, 2, 8])
def test_gpus_without_flags_sample_with_sglang_where_it_is_installed(model: Path, machine, num_gpus: int) -> None:
    """The run uses up to two GPUs, and none idles."""
    machine(num_gpus)
    found = plan(model)
    assert found.config.resolved_rollout_backend == "sglang" and found.config.cluster.colocate
    assert found.config.num_train_gpus == found.config.total_num_gpus == min(num_gpus, 2)
    assert "SGLang is installed" in found.choices[0] and ("--rollout-num-gpus 1" in found.choices[0]) is (num_gpus > 1)
    assert errors(found) == [] and not warned(found)


@pytest.mark.parametrize(
    ("flags", "engine_gpus"),
    [
        ("--async-mode one-step", 1), ("--async-mode full --max-staleness 1", 1), ("--rollout-num-gpus 1", 1),
        ("--actor-num-gpus-per-node 1", 1), ("--rollout-num-gpus-per-engine 2 --rollout-num-gpus 2", 2),
        ("--lora-rank 8 --lora-sync adapter", 1),
    ],
)  # fmt: skip
def test_trainer_and_engine_have_separate_gpus_if_a_flag_or_a_rule_says_so(model: Path, machine, flags: str, engine_gpus: int) -> None:
    machine(4)
    found = plan(model, flags)
    assert errors(found) == [] and found.config.resolved_rollout_backend == "sglang" and not found.config.cluster.colocate
    assert (found.config.num_train_gpus, found.config.num_rollout_only_gpus) == (1, engine_gpus)
    assert warned(found) is ("--async-mode" not in flags)


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
    there, _ = with_installed_engine(config, 0 if config.cluster.device == "cpu" else num_gpus, "h200-141")
    planned, notes = with_assumed_engine(config, "h200-141")
    assert planned == there
    assert bool(notes) is (planned != config)
    assert all("where SGLang is installed" in note and f"{num_gpus} GPU" in note for note in notes)


@pytest.mark.parametrize(("num_gpus", "engine", "num_used"), [(1, "embedded", 1), (2, "sglang", 2)])
def test_no_colocate_keeps_trainer_and_engines_apart(model: Path, machine, num_gpus: int, engine: str, num_used: int) -> None:
    """Without the flag, they share both GPUs, or the only one."""
    machine(num_gpus)
    found, default = (checked(parse(["--hf-checkpoint", str(model), *JOB.split(), *each]).config) for each in (["--no-colocate"], []))
    assert default.config.cluster.colocate and default.config.resolved_rollout_backend == "sglang"
    assert found.config.cluster.colocate is False and errors(found) == []
    assert (found.config.resolved_rollout_backend, found.config.total_num_gpus) == (engine, num_used)


def test_a_line_says_that_no_gpu_is_left_for_sglang(model: Path, machine) -> None:
    machine(1)
    assert plan(model, "--no-colocate").choices[0].endswith("4 x slower than SGLang; --no-colocate leaves no GPU for SGLang")


@pytest.mark.parametrize(("num_gpus", "colocate", "engine_gpus"), [(2, True, None), (3, True, None), (4, None, 2)])
def test_engines_of_several_groups_get_the_gpus_of_all(
    model: Path, machine, tmp_path: Path, num_gpus: int, colocate: bool | None, engine_gpus: int | None
) -> None:
    """Two engines and a trainer of two GPUs need four, or share two."""
    machine(num_gpus)
    (tmp_path / "servers.yaml").write_text("sglang: [{name: default, server_groups: [{num_gpus: 1}, {num_gpus: 1}]}]")
    found = plan(model, f"--actor-num-gpus-per-node 2 --sglang-config {tmp_path / 'servers.yaml'}")
    assert errors(found) == []
    assert (found.config.cluster.colocate, found.config.cluster.rollout_num_gpus) == (colocate, engine_gpus)
    assert ("need 4 separate GPUs" in found.choices[0]) is (num_gpus < 4)


@pytest.mark.parametrize("flags", ["", "--async-mode one-step", "--no-colocate", "--rollout-num-gpus 1"])
@pytest.mark.parametrize("engine", ["--rollout-backend sglang", "--sglang-attention-backend triton", "--engine-python python3"])
def test_engines_that_a_flag_chooses_are_placed_as_those_chosen_by_default(model: Path, machine, engine: str, flags: str) -> None:
    machine(2)
    found, default = plan(model, f"{engine} {flags}"), plan(model, flags)
    assert errors(found) == []
    planned, _ = with_assumed_engine(
        parse(["--hf-checkpoint", str(model), *JOB.split(), *engine.split(), *flags.split(), "--num-gpus-per-node", "2"]).config, "h200-141"
    )
    placed = [(of.cluster.colocate, of.cluster.rollout_num_gpus, of.total_num_gpus) for of in (found.config, planned, default.config)]
    assert placed == [({"": True, "--no-colocate": False}.get(flags), 1 if flags else None, 2)] * 3


@pytest.mark.parametrize(("gpu", "name"), [("NVIDIA GeForce RTX 4090, 24564", "qwen3-4b"), ("NVIDIA T4, 15360", "smollm2")])
def test_two_gpus_are_not_shared_without_a_plan_that_fits(machine, gpu: str, name: str) -> None:
    machine(2, gpu)
    found = checked(parse(["--hf-checkpoint", str(EXAMPLES / name / "model"), *JOB.split()]).config)
    assert found.config.cluster.rollout_num_gpus == 1 and not found.config.cluster.colocate
    assert errors(found) == (["PLAN-MEMORY-TRAINER"] if name == "qwen3-4b" else [])


@pytest.mark.parametrize(("host_gib", "shares"), [(32, False), (256, True)])
def test_two_gpus_are_shared_if_the_host_has_room_for_the_trainer(machine, host_gib: int, shares: bool) -> None:
    """A container may have less memory than a GPU, and the kernel would kill a run that moves its trainer to the host."""
    machine(2, "NVIDIA A100-SXM4-80GB, 81920", host_gib=host_gib)
    model = str(EXAMPLES / "qwen3-4b" / "model")
    config = parse(["--hf-checkpoint", model, *JOB.split(), "--rollout-max-response-len", "16384"]).config
    found = checked(config)
    assert errors(found) == [] and bool(found.config.cluster.colocate) is shares
    planned, _ = with_assumed_engine(config, "a100-80", host_gib * GIB)
    assert bool(planned.cluster.colocate) is shares, "fuligo plan --host-memory"


def test_gpus_of_two_models_are_not_shared(model: Path, machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan knows one model, and the other's memory may be smaller."""
    machine(2)
    names = ("NVIDIA H200, 143771", "NVIDIA GeForce RTX 4090, 24564")
    text = "".join(f"{index}, {name}, 580.159, 4\n" for index, name in enumerate(names))
    monkeypatch.setattr(chosen, "nvidia_smi", lambda *arguments: text)
    found = plan(model)
    assert found.config.cluster.rollout_num_gpus == 1 and not found.config.cluster.colocate


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
    assert not any(each.config.cluster.colocate for each in found), "trainers of several runs would take turns with the same engines"


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
    assert found.choices[0] == "--colocate: trainer and engines need 2 separate GPUs, but the machine has 1"


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ("--rollout-backend sglang --colocate", "PLAN-MEMORY-TRAINER", "of one rtx-4090 GPU"),
        ("--train-backend megatron --colocate", "PLAN-MEMORY-TRAINER", "--actor-num-nodes"),
        ("--rollout-num-gpus 1 --lora-rank 8 --sglang-mem-fraction-static 0.1", "PLAN-MEMORY-ENGINE", "--sglang-mem-fraction-static"),
    ],
)
def test_a_run_that_does_not_fit_is_refused_with_a_fix(machine, given: str, error: str, said: str) -> None:
    """The fix names only flags of `fuligo train`, which has no --gpu: its GPUs are this machine's."""
    machine(2, "NVIDIA GeForce RTX 4090, 24564")
    path = EXAMPLES / "qwen3-4b" / "model"
    found = checked(parse(["--hf-checkpoint", str(path), *JOB.split(), *given.split()]).config)
    (refusal,) = (finding for finding in found.findings if finding.id == error)
    text = described(refusal, found.config)
    assert "--ignore-memory-plan" in text and said in text
    named = {*re.findall(r"--[a-z][a-z0-9-]*", text), *refusal.flags}
    assert named <= {flag.option for flag in flags().values()} | {"--sglang-mem-fraction-static", "--sglang-kv-cache-dtype"}


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
