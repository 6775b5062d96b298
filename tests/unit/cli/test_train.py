"""Tests that bad input ends with exit code 2 and a clear text before any model loads."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file

from fuligo import cli
from fuligo.checkpoint.state import RunState
from fuligo.checkpoint.store import CheckpointStore
from fuligo.cli.chosen import trainer_choice
from fuligo.config import Config
from fuligo.config.command_line import parse
from fuligo.rollout.protocol import RolloutState
from tests import tiny, tiny_mtp
from tests.config_files import load_yaml

Train = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Record the configs of started jobs, and run none."""
    configs: list[Config] = []
    job = ModuleType("fuligo.job")
    job.run_job = lambda config: configs.append(config) or 0
    monkeypatch.setitem(sys.modules, "fuligo.job", job)
    return configs


@pytest.fixture
def train(model: Path, started: list[Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Train:
    """Return a function that runs `fuligo train` on valid input with overriding flags, and returns exit code and stderr."""
    monkeypatch.chdir(tmp_path)
    rows = [{"input": f"What is {n} + {n}?", "label": str(2 * n)} for n in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sound = {
        "hf-checkpoint": str(model),
        "prompt-data": "prompts.jsonl",
        "apply-chat-template": "true",
        "label-key": "label",
        "rm-type": "deepscaler",
        "num-rollout": "2",
        "rollout-max-response-len": "64",
    }

    def run(**changed: str) -> tuple[int, str]:
        flags = {**sound, **{name.replace("_", "-"): value for name, value in changed.items()}}
        code = cli.main(["train", *(part for name, value in flags.items() for part in (f"--{name}", *value.split(" ")))])
        return code, capsys.readouterr().err

    return run


def test_sound_input_starts_the_job(train: Train, started: list[Config]) -> None:
    assert train(rollout_batch_size="4", run_dir="runs/first") == (0, "")
    (config,) = started
    assert config.rollout.rollout_batch_size == 4


def test_warnings_are_shown_and_the_job_starts(train: Train, started: list[Config]) -> None:
    code, shown = train(n_samples_per_prompt="1")
    assert code == 0 and len(started) == 1
    assert shown.startswith("warning: --n-samples-per-prompt 1")


@pytest.mark.parametrize(
    ("changed", "texts"),
    [
        ({"hf_checkpoint": "nowhere"}, ["--hf-checkpoint: nowhere does not exist", "on the Hub (ORG/NAME)"]),
        ({"ref_load": "nowhere"}, ["--ref-load: nowhere does not exist"]),
        ({"prompt_data": "nowhere.jsonl"}, ["--prompt-data", "nowhere.jsonl"]),
        ({"label_key": "answer"}, ["--prompt-data", "answer", "prompts.jsonl"]),
        ({"input_key": "question"}, ["--prompt-data", "question"]),
        ({"eval_prompt_data": "held-out nowhere.jsonl"}, ["evaluation dataset held-out", "nowhere.jsonl"]),
        ({"eval_config": "nowhere.yaml"}, ["--eval-config", "nowhere.yaml"]),
        ({"custom_rm_path": "nowhere.reward", "rm_type": ""}, ["--custom-rm-path nowhere.reward", "there is no module nowhere"]),
        ({"rm_type": "dapo"}, ["--reward-key"]),
        ({"global_batch_size": "100"}, ["--global-batch-size 100"]),
        ({"run_dir": "prompts.jsonl"}, ["cannot write --run-dir prompts.jsonl", "is a file"]),
        ({"run_dir": "prompts.jsonl/below"}, ["--run-dir", "prompts.jsonl is a file"]),
        ({"run_dir": "/proc/run"}, ["cannot write --run-dir /proc/run"]),
        ({"save": "/proc/save"}, ["cannot write --save /proc/save"]),
        ({"save_hf": "/proc/export/{rollout_id}"}, ["cannot write --save-hf /proc/export/{rollout_id}"]),
        ({"ckpt_step": "3", "load": "empty"}, ["--ckpt-step 3"]),
        ({"load": "."}, ["--load .: it has no", "is not a Hugging Face directory"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_bad_input_is_refused(train: Train, started: list[Config], changed: dict[str, str], texts: list[str]) -> None:
    code, shown = train(**changed)
    assert code == 2 and not started
    assert shown.count("error:") == 1 and "problems" not in shown
    for text in texts:
        assert text in shown


@pytest.mark.parametrize(
    ("changed", "texts"),
    [
        ({"rollout_max_response_len": "4096"}, ["--rollout-max-response-len 4096", "1024 tokens of the engines' context"]),
        ({"hostfile": "hosts"}, ["--hostfile hosts: fuligo train does not start the nodes"]),
    ],
    ids=" ".join,
)
def test_a_run_that_a_rule_refuses_starts_nothing(train: Train, started: list[Config], changed: dict[str, str], texts: list[str]) -> None:
    code, shown = train(**changed)
    assert code == 2 and not started
    for text in texts:
        assert text in shown


def test_a_model_that_the_planner_does_not_know_is_checked_by_its_flags(
    train: Train, started: list[Config], model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "other")
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "model_type": "some_new_family"}))
    assert train(hf_checkpoint="other", rollout_max_response_len="4096") == (0, "")
    code, shown = train(hf_checkpoint="other", kl_loss_coef="0.1")
    assert code == 2 and "--kl-loss-coef 0.1 has no effect without --use-kl-loss" in shown and len(started) == 1


def test_the_environment_block_is_that_of_the_process(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULIGO_TEST_VARIABLE", "before")
    assert train(env='{"FULIGO_TEST_VARIABLE":"1"}') == (0, "")
    assert os.environ["FULIGO_TEST_VARIABLE"] == "1"


def test_a_malformed_line_is_named_by_its_number(train: Train, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"input": "a", "label": "b"}\n{"input": \n')
    code, shown = train(prompt_data="bad.jsonl")
    assert code == 2 and "bad.jsonl" in shown and "line 2" in shown


def test_the_data_sets_of_an_eval_config_are_checked(train: Train, tmp_path: Path) -> None:
    entries = "{name: lost, path: lost.jsonl}, {name: other, path: prompts.jsonl, label_key: answer}"
    entries += ", {name: odd, path: prompts.jsonl, custom_rm_path: nowhere.reward}"
    (tmp_path / "eval.yaml").write_text(f"eval: {{datasets: [{entries}, {{name: fine, path: prompts.jsonl}}]}}")
    code, shown = train(eval_config="eval.yaml")
    assert code == 2 and shown.startswith("error: 3 problems\n")
    assert all(text in shown for text in ("dataset lost: ", "dataset other: ", "--custom-rm-path nowhere.reward"))


def test_everything_wrong_on_disk_is_reported_at_once(train: Train) -> None:
    code, shown = train(hf_checkpoint="nowhere", prompt_data="nowhere.jsonl", run_dir="prompts.jsonl", save="/proc/save")
    assert code == 2 and shown.startswith("error: 4 problems\n")


def test_a_truncated_checkpoint_is_named(train: Train, model: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(model, tmp_path / "damaged"))
    file = damaged / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    for flag in ("hf_checkpoint", "ref_load", "load"):
        code, shown = train(**{flag: "damaged"})
        assert code == 2 and f"--{flag.replace('_', '-')}: damaged/model.safetensors is truncated" in shown


def test_a_checkpoint_of_another_architecture_is_refused(train: Train, tmp_path: Path) -> None:
    tiny.save_checkpoint(tmp_path / "other", layers=3)
    for flag in ("ref_load", "load"):
        code, shown = train(**{flag: "other"})
        assert code == 2 and f"--{flag.replace('_', '-')}: " in shown
        assert "different models: num_hidden_layers" in shown


@pytest.mark.parametrize("damage", ["none", "truncated", "other model"])
async def test_the_checkpoint_of_a_run_is_checked(train: Train, tmp_path: Path, damage: str) -> None:
    async def write(directory: Path) -> None:
        tiny.save_checkpoint(directory / "hf", layers=3 if damage == "other model" else 2)

    state = RunState(step=1, policy_version=1, rollout=RolloutState({"epoch": 0, "offset": 0}), config="")
    saved = await CheckpointStore(tmp_path / "checkpoints").save(1, write, state)
    if damage == "truncated":
        file = saved / "hf" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
    code, shown = train(load="checkpoints")
    assert code == (0 if damage == "none" else 2)
    assert {"none": "", "truncated": "model.safetensors", "other model": "different models: num_hidden_layers 3 and 2"}[damage] in shown


def quantized_copy(model: Path, directory: Path, **described: object) -> str:
    """Copy the model with a config.json that declares FP8."""
    shutil.copytree(model, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8", **described}}))
    return directory.name


def test_training_does_not_start_from_quantized_weights(train: Train, model: Path, tmp_path: Path) -> None:
    quantized = quantized_copy(model, tmp_path / "quantized")
    code, shown = train(hf_checkpoint=quantized)
    assert code == 2 and "FP8 weights" in shown and "--ref-load" in shown
    assert train(hf_checkpoint=quantized, ref_load=str(model))[0] == 0
    for flag in ("ref_load", "load"):
        code, shown = train(**{flag: quantized})
        assert code == 2 and f"--{flag.replace('_', '-')} quantized is quantized, and training cannot start from it" in shown


@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_a_config_json_that_is_not_supported_is_refused_before_the_start(backend: str, train: Train, tmp_path: Path) -> None:
    windowed = tiny.save_checkpoint(tmp_path / "windowed", "mistral", sliding_window=24)
    code, shown = train(hf_checkpoint=str(windowed), train_backend=backend, rollout_backend="embedded")
    assert code == 2 and f"--hf-checkpoint: {windowed / 'config.json'}: sliding_window is 24" in shown


def test_an_mtp_layer_to_load_is_looked_for_in_the_files(train: Train, tmp_path: Path) -> None:
    hybrid = tiny.save_checkpoint(tmp_path / "hybrid", "qwen3_next")
    loading = {"train_backend": "torch", "rollout_backend": "embedded", "mtp_num_layers": "1"}
    code, shown = train(hf_checkpoint=str(hybrid), **loading)
    assert code == 2 and f"--mtp-num-layers 1: --hf-checkpoint {hybrid} has no MTP layer (no tensors mtp.*)" in shown
    assert train(hf_checkpoint=str(tiny_mtp.add_mtp(hybrid)), **loading)[0] == 0
    assert train(hf_checkpoint=str(tiny.save_checkpoint(tmp_path / "other", "qwen3_next")), ref_load=str(hybrid), **loading)[0] == 0


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        ("mtp.fc.weight", None, "mtp.fc.weight is missing"),
        ("mtp.layers.1.mlp.gate.weight", torch.zeros(8, 64), "unknown tensors mtp.layers.1"),
    ],
)
def test_an_incomplete_mtp_layer_is_refused_before_the_start(
    name: str, tensor: torch.Tensor | None, problem: str, train: Train, tmp_path: Path
) -> None:
    hybrid = tiny_mtp.add_mtp(tiny.save_checkpoint(tmp_path / "hybrid", "qwen3_next"))
    tensors = {each: held for each, held in tiny_mtp.tensors_of(hybrid).items() if each != name}
    save_file(tensors | ({} if tensor is None else {name: tensor}), hybrid / "model.safetensors", metadata={"format": "pt"})
    code, shown = train(hf_checkpoint=str(hybrid), train_backend="torch", rollout_backend="embedded", mtp_num_layers="1")
    assert code == 2 and f"--hf-checkpoint: cannot load the MTP layer of {hybrid}: {problem}" in shown
    assert train(hf_checkpoint=str(hybrid), train_backend="torch", rollout_backend="embedded")[0] == 0, "it is kept as it is"


def test_engines_do_not_draft_with_a_layer_that_the_files_lack(train: Train, tmp_path: Path) -> None:
    bare = tiny.save_checkpoint(tmp_path / "bare", "qwen3_next")
    drafting = {"train_backend": "torch", "rollout_backend": "sglang", "rollout_num_gpus": "1", "sglang_speculative_algorithm": "EAGLE"}
    code, shown = train(hf_checkpoint=str(bare), **drafting)
    assert code == 2 and f"{bare} has no MTP layer to draft with" in shown
    _, shown = train(hf_checkpoint=str(tiny_mtp.add_mtp(bare)), **drafting)
    assert "to draft with" not in shown


def test_engines_take_new_weights_only_in_fp8_blocks(train: Train, model: Path, tmp_path: Path) -> None:
    quantized = quantized_copy(model, tmp_path / "quantized", quant_method="compressed-tensors")
    code, shown = train(hf_checkpoint=quantized, ref_load=str(model), rollout_backend="sglang", rollout_num_gpus="1", device="cpu")
    assert (
        code == 2
        and "quantized in a way that engines cannot update (quant_method compressed-tensors" in shown
        and "fuligo convert fp8 --strategy block" in shown
    )


def test_checks_leave_nothing_behind(train: Train, tmp_path: Path) -> None:
    assert train(run_dir="runs/new", save="checkpoints", save_hf="export/{rollout_id}")[0] == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_print_config_prints_what_config_reads_and_starts_nothing(
    train: Train, started: list[Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "--lr", "3e-5", "--rollout-batch-size", "7", "--print-config"]) == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    config = load_yaml(tmp_path / "printed.yaml")
    assert (config.optimizer.lr, config.rollout.rollout_batch_size) == (3e-5, 7)
    assert started == []


def test_print_config_shows_on_stderr_what_is_replaced_and_chosen(
    train: Train, started: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "--lr", "3e-5", "--lr", "1e-5", "--bf16", "--print-config"]) == 0
    shown = capsys.readouterr()
    assert "warning: given twice: --lr 3e-5, then --lr 1e-5; the last one is used" in shown.err
    assert "chosen: --train-backend megatron: --bf16" in shown.err
    assert "warning" not in shown.out and "chosen" not in shown.out
    assert started == []


def test_env_holds_before_hooks_are_imported(train: Train, started: list[Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("JUDGE_SCALE", raising=False)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "scaled_rewards.py").write_text(
        "import os\nSCALE = float(os.environ['JUDGE_SCALE'])\n\ndef reward(args, sample):\n    return SCALE\n"
    )
    variables = json.dumps({"PYTHONPATH": str(tmp_path / "elsewhere"), "JUDGE_SCALE": "2"}, separators=(",", ":"))
    code, errors = train(rm_type="none", custom_rm_path="scaled_rewards.reward", env=variables)
    assert (code, len(started)) == (0, 1), errors
    monkeypatch.delenv("JUDGE_SCALE")
    monkeypatch.delenv("PYTHONPATH", raising=False)


def test_flags_that_select_megatron_are_named() -> None:
    config = parse(["--bf16", "--swiglu"]).config
    (line,) = trainer_choice(config)
    assert line == (
        "--train-backend megatron: --bf16, --swiglu are flags of the Megatron trainer (for the torch trainer use --precision bf16)"
    )
    assert list(trainer_choice(parse(["--bf16", "--train-backend", "megatron"]).config)) == []
    assert list(trainer_choice(Config())) == []


def test_an_error_of_a_run_that_got_the_megatron_trainer_by_a_flag_names_the_flag(train: Train) -> None:
    code, errors = train(bf16="true")
    assert code == 2 and "engines need GPUs" in errors
    assert "--train-backend megatron: --bf16 is a flag of the Megatron trainer (for the torch trainer use --precision bf16)" in errors
