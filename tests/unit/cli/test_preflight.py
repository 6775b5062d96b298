"""Tests of the checks of files and directories before a start."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from fuligo.cli import adapter_problems
from fuligo.cli.preflight import preflight_problems
from fuligo.config.command_line import parse
from fuligo.errors import CheckpointError, ConfigError
from fuligo.formats.adapter_config import AdapterConfig
from fuligo.formats.checkpoint_files import TRACKER
from fuligo.formats.disk import replace_text, write_manifest
from fuligo.formats.quantized_base import BASE_PRECISION, QuantizedBase
from fuligo.models.adapter import adapter_tensors, add_adapter, write_adapter_config, write_adapter_weights
from fuligo.models.directory import load_tokenizer
from fuligo.trainer.torch_backend.model import load_model
from tests import tiny, tiny_vision


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_checkpoint(tmp_path_factory.mktemp("model"))


def problems(model: Path, *more: object) -> list[str]:
    sound = ["--debug-train-only", "--load-debug-rollout-data", "data", "--num-rollout", "1", "--run-dir", str(model.parent / "run")]
    return preflight_problems(parse(["--hf-checkpoint", str(model), *sound, *map(str, more)]).config)


def test_a_temporary_directory_that_cannot_be_used_is_the_only_problem(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Other checks write to it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    (problem,) = problems(model, "--ref-load", "nowhere")
    assert problem.startswith(f"cannot use TMPDIR {tmp_path / 'missing'}: No such file or directory")


def test_an_export_replaces_neither_what_the_run_reads_nor_what_is_no_export(model: Path, tmp_path: Path):
    (problem,) = problems(model, "--save-hf", model)
    assert f"--save-hf {model} would replace {model} of --hf-checkpoint" in problem
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "notes.txt").touch()
    (problem,) = problems(model, "--save-hf", tmp_path / "home")
    assert f"{tmp_path / 'home'}: it is not a Hugging Face directory" in problem
    assert problems(model, "--save-hf", tmp_path / "new") == []


@pytest.mark.parametrize(
    ("save_hf", "reads"),
    [
        ("link", ["--ref-load", "whole"]),
        ("whole", ["--ref-load", "link"]),
        ("out/{rollout_id}", ["--ref-load", "out/7"]),
        ("out/{rollout_id}", ["--ref-load", "out/8"]),
        ("whole", ["--eval-prompt-data", "mine", "whole/eval.jsonl@[0:1]"]),
        ("whole", ["--critic-load", "whole", "--advantage-estimator", "ppo"]),
        ("whole", ["--run-dir", "whole/run"]),
        ("whole", ["--save", "whole/checkpoints"]),
        ("whole/part", ["--ref-load", "whole"]),
    ],
)
def test_an_export_replaces_nothing_that_the_flags_name(
    save_hf: str, reads: list[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for copy in ("whole", "whole/part", "out/7"):
        shutil.copytree(model, copy)
    Path("whole/eval.jsonl").write_text('{"input": "a", "label": "b"}\n')
    Path("link").symlink_to("whole")
    Path("out/8").symlink_to("../whole")
    assert [problem for problem in problems(model, "--save-hf", save_hf, *reads) if f"--save-hf {save_hf} would replace" in problem]
    assert not [problem for problem in problems(model, "--save-hf", "free/{rollout_id}", *reads) if "would replace" in problem]


@pytest.fixture
def with_code(model: Path, tmp_path: Path) -> Path:
    """Return a checkpoint whose tokenizer and model name Python code that leaves a trace when it runs."""
    directory = Path(shutil.copytree(model, tmp_path / "with-code"))
    (directory / "code.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast\n"
        "class Own(PreTrainedTokenizerFast): pass\n"
    )
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["code.Own", "code.Own"]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | own))
    return directory


def change_config(directory: Path, **changes: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


def test_code_of_a_checkpoint_runs_only_with_a_flag(with_code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))  # a question on standard input would be answered with yes
    change_config(with_code, model_type="odd", auto_map={"AutoConfig": "code.Odd", "AutoModelForCausalLM": "code.Odd"})
    (problem,) = [text for text in problems(with_code) if "code" in text]
    assert "transformers has no model type 'odd', and fuligo does not run a checkpoint's model code" in problem
    with pytest.raises(CheckpointError, match="cannot load"):
        load_model(with_code)
    (with_code / "config.json").write_text('{"model_type": "arcee"}')  # transformers has no tokenizer for it
    with pytest.raises(ConfigError, match="it needs the Python code in that directory; read the code, then use --trust-remote-code"):
        load_tokenizer(with_code, runs_its_code=False)
    assert [text for text in problems(with_code) if "then use --trust-remote-code" in text]
    assert not (tmp_path / "ran").exists()
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    assert load_tokenizer(with_code, runs_its_code=True).encode("a")
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("tokenizer.json", '{"model": {"vocab": {"a": 1,', "tokenizer.json is not valid JSON"),
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json is not valid JSON"),
        ("config.json", '{"model_type": "qwen3", "vocab_size": ' + "9" * 5000 + "}", "config.json is not valid JSON"),
    ],
)
def test_damaged_files_of_a_checkpoint_are_one_sentence(file: str, text: str, said: str, model: Path, tmp_path: Path):
    directory = Path(shutil.copytree(model, tmp_path / "damaged"))
    (directory / file).write_text(text)
    assert [problem for problem in problems(directory) if said in problem]


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads"])
@pytest.mark.parametrize("value", [10**10, -1, 0, "28", True, 2.5, [1]])
def test_absurd_sizes_are_one_sentence(key: str, value: object, model: Path, tmp_path: Path):
    directory = Path(shutil.copytree(model, tmp_path / "absurd"))
    change_config(directory, **{key: value})
    assert [problem for problem in problems(directory) if f"config.json: {key} is {value!r}; it must be an integer" in problem]


def test_a_template_that_the_tokenizer_lacks_is_missed_before_any_engine_starts(model: Path, tmp_path: Path):
    bare = Path(shutil.copytree(model, tmp_path / "bare"))
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    (bare / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": None}))
    assert problems(model, "--apply-chat-template") == problems(bare) == []
    (problem,) = problems(bare, "--apply-chat-template")
    assert f"--apply-chat-template: the tokenizer of {bare} has no chat template; use a chat model" in problem
    (bare / "chat_template.jinja").write_text("{{ messages }}")
    assert problems(bare, "--apply-chat-template") == []
    (bare / "chat_template.jinja").unlink()
    assert problems(bare, "--apply-chat-template", "--apply-chat-template-kwargs", '{"chat_template": "{{ messages }}"}') == []
    (bare / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": None, "auto_map": {"AutoTokenizer": "own.py"}}))
    assert problems(bare, "--apply-chat-template") == [], "code of its own may bring one"


def engine_problems(model: Path, *more: object) -> list[str]:
    config = parse(["--hf-checkpoint", str(model), "--num-rollout", "1", "--run-dir", str(model.parent / "run"), *map(str, more)]).config
    return preflight_problems(config)


def test_engines_that_cannot_start_for_want_of_sglang(model: Path, tmp_path: Path):
    python = tmp_path / "python"
    engines = ["--rollout-num-gpus", 1, "--actor-num-gpus-per-node", 1, "--engine-python", python]
    python.write_text('#!/bin/sh\necho \'{"sglang": "0.5", "sglang-router": null}\'\n')
    python.chmod(0o755)
    (problem,) = engine_problems(model, *engines)
    assert f"{python} has no sglang-router; install" in problem and "--engine-python" in problem
    assert engine_problems(model, *engines, "--launcher", "ray") == [], "nodes of a cluster have their own"
    python.unlink()
    (problem,) = engine_problems(model, *engines)
    assert f"{python} has no sglang and no sglang-router" in problem


def test_a_model_whose_class_sglang_could_not_find(model: Path, tmp_path: Path):
    engines = ["--rollout-num-gpus", 1, "--actor-num-gpus-per-node", 1, "--launcher", "ray"]
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({name: value for name, value in settings.items() if name != "architectures"}))
    (problem,) = engine_problems(model, *engines)
    assert f"{model}/config.json does not name the class of the model" in problem and '"architectures": ["..."]' in problem
    assert engine_problems(model) == [], "the embedded engine goes by the model_type"


def saved(model: Path, directory: Path, iteration: int) -> Path:
    """Write the parts of a torch trainer's checkpoint that the checks read."""
    directory = directory / f"iter_{iteration:07d}"
    shutil.copytree(model, directory / "hf")
    write_manifest(directory)
    replace_text(directory.parent / TRACKER, str(iteration))
    return directory


def test_a_run_that_has_nothing_left_to_do_ends_before_anything_starts(model: Path, tmp_path: Path):
    done = saved(model, tmp_path, 2)
    assert problems(model, "--load", tmp_path, "--num-rollout", 3) == []
    (problem,) = problems(model, "--load", tmp_path, "--num-rollout", 2)
    assert problem == f"cannot resume {done}: the run is complete (2 of 2 rollouts); raise --num-rollout to continue"


def test_rows_that_the_reward_cannot_judge_are_refused_unless_a_hook_judges(model: Path, tmp_path: Path):
    file = tmp_path / "choices.jsonl"
    file.write_text('{"input": "Which?", "label": "A"}\n{"input": "Which?", "label": "green"}\n')

    def found(*more: str) -> list[str]:
        common = ["--hf-checkpoint", str(model), "--num-rollout", "1", "--run-dir", str(tmp_path / "run"), "--label-key", "label"]
        return preflight_problems(parse([*common, *more]).config)

    refused = "choices.jsonl, line 2: --rm-type gpqa: the label is 'green', but it must be one of A, B"
    (problem,) = found("--prompt-data", str(file), "--rm-type", "gpqa")
    assert problem.startswith("--prompt-data: ") and refused in problem and "--skip-bad-rows" in problem
    (problem,) = found("--prompt-data", f"{file}@[:1]", "--rm-type", "gpqa", "--eval-prompt-data", str(file))
    assert problem.startswith("evaluation dataset aime: ") and refused in problem
    for more in (["--rm-type", "f1"], ["--rm-type", "gpqa", "--skip-bad-rows"], ["--rm-type", "gpqa", "--loss-type", "sft_loss"]):
        assert found("--prompt-data", str(file), *more) == []


HOOKS = """
class Source:
    def __init__(self, args): ...
    def get_samples(self, num_samples): ...
    def add_samples(self, samples): ...
    def save(self, rollout_id): ...
    def load(self, rollout_id): ...
    def __len__(self): ...

def evaluate(args, rollout_id, data_source, evaluation=True): ...
"""


def test_rows_that_a_hook_reads_need_no_label_that_the_reward_can_judge(model: Path, tmp_path: Path):
    file, hooks = tmp_path / "prompts.jsonl", tmp_path / "hooks.py"
    file.write_text('{"input": "1 + 1", "label": {"answer": 2}}\n')
    hooks.write_text(HOOKS)
    common = ["--hf-checkpoint", model, "--num-rollout", "1", "--run-dir", tmp_path / "run", "--rm-type", "math", "--label-key", "label"]

    def found(*more: object) -> list[str]:
        return preflight_problems(parse([*map(str, common), *map(str, more)]).config)

    (problem,) = found("--prompt-data", file)
    assert "a label must be a string, a number or a list of these" in problem
    assert found("--prompt-data", file, "--data-source-path", f"{hooks}:Source") == []
    (problem,) = found("--eval-prompt-data", "mine", file)
    assert problem.startswith("evaluation dataset mine: ")
    assert found("--eval-prompt-data", "mine", file, "--eval-function-path", f"{hooks}:evaluate") == []


def test_stop_tokens_are_the_models(model: Path):
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    assert problems(model, "--rollout-stop-token-ids", size - 1) == []
    (problem,) = problems(model, "--rollout-stop-token-ids", 0, size)
    assert problem == f"--rollout-stop-token-ids {size}: the model's token ids end at {size - 1}; use ids of the vocabulary"


def test_a_served_teacher_has_the_vocabulary_of_the_student(model: Path, tmp_path: Path):
    other = tiny.save_checkpoint(tmp_path / "other", vocab_size=399)
    (tmp_path / "engines.yaml").write_text(
        f"sglang: [{{server_groups: [{{num_gpus: 1}}]}}, {{name: teacher, model_path: {other}, server_groups: [{{num_gpus: 1}}]}}]"
    )
    served = ("--sglang-config", tmp_path / "engines.yaml", "--rollout-backend", "sglang", "--rollout-num-gpus", 2)
    config = parse(["--hf-checkpoint", str(model), "--num-rollout", "1", "--use-opd", *map(str, served)]).config
    assert [problem for problem in preflight_problems(config) if problem.startswith("the model teacher of --sglang-config: ")]


def test_an_evaluation_has_rewards_of_its_own_if_training_has_only_a_teacher(model: Path, tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"input": "1 + 1", "label": "2"}\n')
    judged = {"name": "judged", "path": str(prompts), "rm_type": "math", "label_key": "label"}
    (tmp_path / "eval.yaml").write_text(json.dumps({"eval": {"datasets": [judged, {"name": "open", "path": str(prompts)}]}}))
    (problem,) = problems(model, "--use-opd", "--opd-teacher-load", model, "--eval-config", tmp_path / "eval.yaml")
    assert problem.startswith("evaluation dataset open: its responses have no reward")


def test_images_need_a_model_that_sees_them_and_what_reads_them(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given = ("--multimodal-keys", '{"image": "images"}', "--apply-chat-template")
    (problem,) = problems(model, *given)
    assert problem == f"--multimodal-keys: {model} is a qwen3 model; images in prompts need one of the type qwen3_5, qwen3_5_moe, qwen3_vl"
    seeing = tiny_vision.save_checkpoint(tmp_path / "seeing")
    assert problems(seeing, *given) == []
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "PIL.Image", None)
        (problem,) = problems(seeing, *given)
    assert "cannot process images: Pillow is not installed; pip install 'fuligo[vision]'" in problem
    file = seeing / "preprocessor_config.json"
    file.write_text(json.dumps({"image_processor_type": "CLIPImageProcessor"}))
    (problem,) = problems(seeing, *given)
    assert (
        f"cannot process images: image_processor_type of {file} is 'CLIPImageProcessor'; use a model with Qwen2VLImageProcessor or"
        in problem
    )
    file.unlink()
    (problem,) = problems(seeing, *given)
    assert f"cannot read {file}" in problem


def test_experts_that_sglang_would_not_find_are_refused(tmp_path: Path):
    """Mixtral's files name them block_sparse_moe.experts.0.w1; of MiniMax-M2, whose files do too, fuligo knows that."""
    engines = ["--rollout-num-gpus", 1, "--actor-num-gpus-per-node", 1, "--launcher", "ray", "--train-backend", "torch"]
    mixtral = tiny.save_checkpoint(tmp_path / "mixtral", "mixtral", num_local_experts=4, num_experts_per_tok=2)
    (problem,) = engine_problems(mixtral, *engines)
    assert "(mixtral) have no tensors model.layers.0.mlp.experts.*, and SGLang would skip" in problem
    assert engine_problems(mixtral) == [], "the embedded engine has the trainer's names"
    assert engine_problems(tiny.save_checkpoint(tmp_path / "minimax", "minimax_m2"), *engines) == []
    olmoe = tiny.save_checkpoint(tmp_path / "olmoe", "olmoe", num_experts=4, num_experts_per_tok=2)
    assert engine_problems(olmoe, *engines) == []


def test_sglang_is_sent_no_adapter_of_layers_with_names_of_experts_matrices(tmp_path: Path):
    mixture = tiny.save_checkpoint(tmp_path / "mixture", "glm4_moe")
    flags = ["--prompt-data", "prompts.jsonl", "--rm-type", "random", "--num-rollout", "1", "--rollout-backend", "sglang"]
    lora = ["--lora-rank", "4", "--lora-sync", "adapter", "--train-backend", "torch"]

    def told(*more: str) -> list[str]:
        config = parse(["--hf-checkpoint", str(mixture), *flags, *lora, *more]).config
        return [problem for problem in preflight_problems(config) if "--lora-sync" in problem]

    (problem,) = told()
    assert "SGLang may take down_proj, gate_proj, up_proj of dense layers and shared experts for the experts' matrices" in problem
    assert told("--lora-target-modules", "q_proj", "o_proj") == []


def test_what_a_quantized_base_lacks_is_reported_before_the_start(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lora = ["--lora-rank", "2", "--lora-target-modules", "q_proj"]
    quantized = [*lora, "--lora-base-precision", "nf4"]
    record = tmp_path / "adapter"
    adapted = load_model(model)
    add_adapter(adapted, AdapterConfig(rank=2, alpha=4.0, target_modules=("q_proj",)), seed=0)
    write_adapter_config(adapted.peft_config["default"], record)
    write_adapter_weights(adapter_tensors(adapted), record)
    QuantizedBase("nf4", "bfloat16").write(record)
    trained_on = ["--lora-adapter", record]
    versions = {"bitsandbytes": None}
    monkeypatch.setattr(adapter_problems, "package_version", lambda name: versions.get(name, "1.0"))
    for flags, option in ((quantized, "--lora-base-precision nf4"), (trained_on, f"--lora-adapter {record}, trained on a base in nf4")):
        (problem,) = problems(model, *flags)
        assert problem == f"{option}: the package bitsandbytes is not installed; pip install 'fuligo[qlora]'"
    assert problems(model, *lora) == []
    versions["bitsandbytes"] = "0.50.2"
    assert problems(model, *quantized) == problems(model, *trained_on) == []
    mixture = tiny.save_checkpoint(tmp_path / "mixture", "qwen3_moe", moe_intermediate_size=32)
    (problem,) = problems(mixture, *quantized)
    assert problem.startswith("--lora-base-precision cannot quantize model.layers.0.mlp.experts of Qwen3MoeForCausalLM: it needs matrices")
    (record / BASE_PRECISION).write_text("{}")
    (problem,) = problems(model, *trained_on)
    assert f"cannot read {record / BASE_PRECISION}" in problem
