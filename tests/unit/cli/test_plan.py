"""Tests of `fuligo plan`: arguments, output, exit codes and imports."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from unittest.mock import Mock

import jsonschema
import pytest

from fuligo import cli
from fuligo.cli import chosen
from fuligo.cli.plan import STANDARD_OUTPUT, plan_name, split_options
from fuligo.config.command_line import parse
from fuligo.errors import ConfigError
from tests import tiny

EXAMPLES = Path(__file__).parents[3] / "examples"
SMALL = ("--config", str(EXAMPLES / "qwen3-4b" / "config.yaml"))
LARGE = ("--config", str(EXAMPLES / "glm5.2-744b" / "config.yaml"))
BROKEN = (*SMALL, "--tensor-model-parallel-size", "3")
RunPlan = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_plan(capsys: pytest.CaptureFixture[str]) -> RunPlan:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["plan", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_valid_config(run_plan: RunPlan):
    code, output, errors = run_plan(*LARGE)
    assert code == 0
    assert "256 x h100-80 on 32 nodes" in output
    assert "valid" in output.splitlines()[-1]
    assert "no GPU: planned for h100-80; name yours with --gpu" in output
    assert len(output.splitlines()) <= 44, "it fits a screen"
    assert errors == ""


@pytest.mark.parametrize("gpu", [(), ("--gpu", "h200-141")])
def test_a_plan_for_another_machine_assumes_sglang_and_says_so(run_plan: RunPlan, gpu: tuple[str, ...]):
    model = EXAMPLES / "qwen3-4b" / "model"
    job = f"--hf-checkpoint {model} --prompt-data d.jsonl --label-key label --rm-type math --num-rollout 2 --num-gpus-per-node 1"
    code, output, errors = run_plan(*job.split(), *gpu, "--gradient-checkpointing", "--lora-rank", "8")
    said = " ".join(output.split())
    assert code == 0, output + errors
    assert "note: --rollout-backend sglang --colocate: assumed, as fuligo train chooses where SGLang is installed, with 1 GPU" in said
    assert "--sglang-max-running-requests" in said, "the choices are those of SGLang engines"


def test_a_plan_for_this_machine_says_if_its_gpus_are_too_few(run_plan: RunPlan, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    job = (*SMALL, "--actor-num-gpus-per-node", "2")
    for num_gpus, is_short in ((1, True), (2, False)):
        text = "".join(f"{index}, NVIDIA H200, 143771, 580.159, 4\n" for index in range(num_gpus))
        monkeypatch.setattr(chosen, "nvidia_smi", lambda *arguments, text=text: text)
        code, output, _ = run_plan(*job)
        assert code == 0 and "h200-141" in output
        assert ("note: the run needs 2 GPUs like this machine's, which has 1" in output) is is_short


def test_a_config_json_on_this_machine_completes_model_args(run_plan: RunPlan, tmp_path: Path):
    """Launch scripts for Megatron give no --max-position-embeddings, for example."""
    size = "--num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 --group-query-attention"
    size += " --num-query-groups 8 --kv-channels 128 --qk-layernorm --vocab-size 151936 --normalization RMSNorm --norm-epsilon 1e-6"
    job = f"--prompt-data d.jsonl --label-key label --rm-type math --num-rollout 2 --colocate --rollout-backend sglang {size} --swiglu"
    arguments = f"--hf-checkpoint {tmp_path} {job} --disable-bias-linear --rotary-base 1000000 --gpu h100-80".split()
    code, _, errors = run_plan(*arguments)
    assert code == 2 and "MODEL_ARGS: they lack --max-position-embeddings" in errors
    (tmp_path / "config.json").write_bytes((EXAMPLES / "qwen3-4b" / "model" / "config.json").read_bytes())
    code, output, errors = run_plan(*arguments)
    assert code == 0 and "qwen3, 4.02 B parameters" in output, output + errors


def test_a_model_that_megatron_cannot_train_is_one_error(run_plan: RunPlan, tmp_path: Path):
    """slime's scripts give a --spec and switches that no other model has."""
    tiny.model_config("qwen3_next").save_pretrained(tmp_path)
    size = "--num-layers 2 --hidden-size 64 --swiglu --use-gated-attention --attention-output-gate --moe-shared-expert-gate --seq-length 9"
    job = "--prompt-data d.jsonl --label-key label --rm-type math --num-rollout 2 --rollout-backend sglang --rollout-max-response-len 64"
    gpus = "--actor-num-gpus-per-node 1 --rollout-num-gpus 1 --train-backend megatron --gpu h100-80"
    spec = "--spec slime_plugins.models.qwen3_next get_qwen3_next_spec"
    code, output, _ = run_plan(*f"--hf-checkpoint {tmp_path} {job} {size} {gpus} {spec}".split())
    said = " ".join(output.split())
    assert code == 2 and said.count(" error PLAN") == 1, output
    assert "error PLAN-TORCH-ONLY --train-backend megatron cannot train a qwen3_next model: the gated delta net" in said
    assert "use --train-backend torch, without MODEL_ARGS and flags of parallelism" in said


def test_an_invalid_config_ends_with_2_and_names_the_flag(run_plan: RunPlan):
    code, output, _ = run_plan(*BROKEN)
    assert code == 2
    assert "--tensor-model-parallel-size 3" in output
    assert "flags of the Megatron trainer" in " ".join(output.split()), "the flags that chose the trainer may be the mistake"
    assert "Megatron trainer" not in run_plan(*SMALL)[1]


def test_what_cannot_be_read_is_an_error_as_in_train(run_plan: RunPlan):
    code, output, errors = run_plan(*SMALL, "--tensor-model-paralel-size", "2")
    assert (code, output) == (2, "")
    assert "--tensor-model-parallel-size" in errors


def test_what_train_refuses_of_features_and_prompts_on_this_machine_is_an_error(run_plan: RunPlan, tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question": "q", "label": "1"}\n')
    code, output, _ = run_plan(*SMALL, "--prompt-data", f"{prompts}@[:1]")
    assert code == 2 and "PLAN-DATA" in output and "the row has 'question', 'label'" in " ".join(output.split())
    code, output, _ = run_plan(*SMALL, "--hostfile", "hosts")
    assert code == 2 and "CFG-HOSTFILE  --hostfile hosts" in output
    assert run_plan(*SMALL, "--prompt-data", str(tmp_path / "elsewhere.jsonl"))[0] == 0


def test_flags_override_the_file(run_plan: RunPlan):
    _, output, _ = run_plan(*SMALL, "--tensor-model-parallel-size", "4", "--sequence-parallel")
    assert "TP 4" in output


def test_another_gpu(run_plan: RunPlan):
    _, output, _ = run_plan(*SMALL, "--gpu", "h200-141")
    assert "8 x h200-141" in output
    code, _, errors = run_plan(*SMALL, "--gpu", "h100")
    assert code == 2
    assert "h100-80" in errors


def test_host_memory_is_judged_where_it_is_known(run_plan: RunPlan):
    offload = ("--config", str(EXAMPLES / "glm4.7-flash" / "8gpus.yaml"))
    assert run_plan(*offload)[0] == 0
    code, output, _ = run_plan(*offload, "--host-memory", "100")
    assert code == 2
    assert "host" in output
    assert "100.0 GiB" in output


def test_json_is_all_of_the_output(run_plan: RunPlan):
    code, output, _ = run_plan(*LARGE, "--json")
    document = json.loads(output)
    schema = json.loads(resources.files("fuligo.planner").joinpath("plan.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    assert code == 0
    assert document["valid"] is True
    assert len(document["layout"]["gpus"]) == 256


def test_json_of_an_invalid_config(run_plan: RunPlan):
    code, output, _ = run_plan("--json", *BROKEN)
    document = json.loads(output)
    assert code == 2
    assert document["valid"] is False
    assert "--tensor-model-parallel-size 3" in document["findings"][0]["text"]


def test_files_beside_the_report(run_plan: RunPlan, tmp_path: Path):
    document, page = tmp_path / "plan.json", tmp_path / "plan.html"
    code, output, _ = run_plan(*SMALL, "--json", str(document), f"--html={page}")
    assert code == 0
    assert output.endswith(f"wrote {document}\nwrote {page}\n")
    assert json.loads(document.read_text())["schema_version"] == 1
    assert page.read_text().startswith("<!doctype html>")


def test_a_file_that_cannot_be_written(run_plan: RunPlan, tmp_path: Path):
    code, _, errors = run_plan(*SMALL, "--html", str(tmp_path / "missing" / "plan.html"))
    assert code == 2
    assert "--html" in errors
    assert "No such file or directory" in errors


def test_no_model_facts(run_plan: RunPlan):
    code, _, errors = run_plan("--hf-checkpoint", "/nowhere/model")
    assert code == 2
    assert "--model-config-file" in errors


def test_notes_of_the_command_line_are_told(run_plan: RunPlan):
    _, output, _ = run_plan(*SMALL, "--lr", "1e-6", "--lr", "2e-6")
    assert "note: " in output
    assert "--lr" in output


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help(run_plan: RunPlan, option: str):
    code, output, _ = run_plan(option)
    assert code == 0
    assert "--html" in output
    assert "h200-141" in output


def test_help_on_a_flag_of_the_job(run_plan: RunPlan):
    assert "tensor_model_parallel_size" in run_plan("--help", "tensor-model-parallel-size")[1]


def test_own_options_may_stand_anywhere():
    arguments = ["--gpu", "b200", "--config", "run.yaml", "--json", "--lr", "1e-6", "--html=p.html", "--host-memory", "512"]
    options, job = split_options([*arguments, "--kept-share", "0.6", "--accept-length=2.4"])
    assert job == ["--config", "run.yaml", "--lr", "1e-6"]
    assert vars(options) == {
        **{"gpu": "b200", "host_memory": 512, "kept_share": 0.6, "accept_length": 2.4},
        **{"json": STANDARD_OUTPUT, "html": "p.html"},
    }


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--gpu"], ["--html", "--lr", "1e-6"], ["--host-memory", "much"], ["--host-memory", "-1"]),
        *(["--kept-share"], ["--kept-share", "0"], ["--kept-share", "1.2"], ["--kept-share", "half"]),
        *(["--accept-length"], ["--accept-length", "0.9"], ["--accept-length", "inf"], ["--accept-length", "nan"]),
    ],
)
def test_own_options_need_values(arguments: list[str]):
    with pytest.raises(ConfigError, match=arguments[0]):
        split_options(arguments)


def test_figures_that_the_job_does_not_use_are_noted(run_plan: RunPlan):
    own = ("--kept-share", "0.3", "--accept-length", "2")
    used = ("--dynamic-sampling-filter-path", "filters.keep", "--sglang-speculative-algorithm", "NGRAM")
    assert [run_plan(*SMALL, *own, *job)[1].count("has no effect without") for job in ((), used[:2], used)] == [2, 1, 0]


@pytest.mark.parametrize(
    ("job", "name"),
    [(["--config", "glm4-9b/config.yaml"], "glm4-9b"), (["--config=a/colocated.yaml"], "colocated"), ([], "plan")],
)
def test_a_plan_is_named_after_its_config_file(job: list[str], name: str):
    assert plan_name(parse([]).config, job) == name


def test_a_plan_is_named_by_the_job():
    assert plan_name(parse(["--name", "mine"]).config, ["--config", "glm4-9b/config.yaml"]) == "mine"


HEAVY = ("torch", "ray", "transformers", "sglang", "megatron", "numpy", "pyarrow", "aiohttp", "fastapi")


def test_planning_256_gpus_imports_nothing_heavy(tmp_path: Path):
    """Run the command in a new process for every output, because this one has imported everything."""
    program = f"""
import sys
from fuligo.cli import main
code = main(["plan", *{[*LARGE, "--html", str(tmp_path / "plan.html"), "--json", str(tmp_path / "plan.json")]!r}])
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr.strip()) == (0, "[]")
    assert "\x1b" not in ran.stdout, "no color codes where no terminal is"


def test_other_findings_are_reported_for_an_unknown_model(run_plan: RunPlan):
    code, _, said = run_plan("--rm-type", "deepscalr")
    assert code == 2
    assert "--model-config-file" in said and "use --rm-type deepscaler" in said and "--hf-checkpoint is missing" not in said


def test_a_disk_that_is_too_small_is_warned_of_where_the_model_is(run_plan: RunPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fuligo.cli.plan.shutil.disk_usage", lambda path: Mock(free=2**30))
    model = str(EXAMPLES / "qwen3-4b" / "model")
    here = (*SMALL, "--hf-checkpoint", model, "--save", str(tmp_path / "new" / "checkpoints"))
    code, output, _ = run_plan(*here)
    words = " ".join(output.split())
    assert code == 0 and "PLAN-DISK" in words and f"{tmp_path} has only 1.0 GiB free" in words
    assert "PLAN-DISK" not in run_plan(*here, "--hf-checkpoint", "/of/another/machine", "--model-config-file", model)[1]
