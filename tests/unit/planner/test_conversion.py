"""Arguments of tools/convert_hf_to_torch_dist.py, and the resulting layout."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fuligo.cli.convert import hf_to_dist as main
from fuligo.errors import ConfigError
from fuligo.models.registry import read_architecture
from fuligo.planner.conversion import describe, plan_hf_to_dist

REPOSITORY = Path(__file__).parents[3]
FLASH, GLM4, GLM5 = (REPOSITORY / "examples" / name / "model" for name in ("glm4.7-flash", "glm4-9b", "glm5.2-744b"))
TOOL = REPOSITORY / "tools" / "convert_hf_to_torch_dist.py"


def paths(model: Path) -> list[str]:
    return ["--hf-checkpoint", str(model), "--save", "out"]


def problems_of(arguments: list[str], world_size: int = 1) -> str:
    with pytest.raises(ConfigError) as refused:
        plan_hf_to_dist(arguments, world_size)
    return str(refused.value)


@pytest.mark.parametrize("model", [FLASH, GLM4, GLM5], ids=lambda path: path.parent.name)
@pytest.mark.parametrize("world_size", [1, 2, 7, 8, 32])
def test_without_a_layout_every_process_is_a_stage(model: Path, world_size: int):
    plan = plan_hf_to_dist(paths(model), world_size)
    counts = [stage.num_layers for stage in plan.stages]
    assert plan.is_chosen
    assert len(counts) == plan.shape.pp == world_size
    assert sum(counts) == read_architecture(model).num_layers
    assert len(set(counts[:-1])) <= 1
    assert counts[-1] >= counts[0] > 0


def test_more_processes_than_layers_need_a_layout():
    assert "64 processes exceed the model's 40 layers" in problems_of(paths(GLM4), 64)
    assert plan_hf_to_dist([*paths(GLM4), "--tensor-model-parallel-size", "2"], 64).shape.dp == 32


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            "--tensor-model-parallel-size 3",
            "= 3 does not divide the number of processes of the conversion (32); change either",
        ),
        (
            "--expert-model-parallel-size 16 --expert-tensor-parallel-size 1 --pipeline-model-parallel-size 4",
            "does not divide the number of processes",
        ),
        ("--expert-model-parallel-size 32 --expert-tensor-parallel-size 2", "does not divide the number of processes"),
        (
            "--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 40 --decoder-first-pipeline-num-layers 8",
            "the given stages",
        ),
        ("--pipeline-model-parallel-size 4", "cannot share"),
    ],
)
def test_layouts_that_do_not_fit(flags: str, problem: str):
    assert problem in problems_of([*paths(GLM5), *flags.split()], 32)


def test_experts_are_spread_evenly():
    assert "does not divide the model's 64 experts" in problems_of([*paths(FLASH), "--expert-model-parallel-size", "3"], 3)


def test_a_model_of_its_flags_alone_and_gathered_context(tmp_path: Path):
    """MODEL_ARGS describe the model if the checkpoint is not on this machine; --allgather-cp changes nothing."""
    model = REPOSITORY / "scripts" / "models" / "glm5.2-744B-A40B.sh"
    arguments = [word.strip('"') for line in model.read_text().splitlines() if line.strip().startswith("--") for word in line.split()]
    assert "--allgather-cp" in arguments
    plan = plan_hf_to_dist([*arguments, *paths(GLM5)], 2)
    assert [stage.num_layers for stage in plan.stages] == [39, 39]


def test_flags_that_disagree_with_the_checkpoint():
    problems = problems_of([*paths(GLM4), "--rotary-base", "5", "--qk-layernorm"])
    assert re.search(r"--rotary-base 5\.0 contradicts \S+config\.json: the model has 10000(\.0)?; correct it, or use --override", problems)
    assert re.search(r"--qk-layernorm contradicts \S+config\.json: the model does not use it; correct it", problems)
    spec = ["slime_plugins.models.glm5.glm5", "get_glm5_spec"]
    assert "contradicts" in (of_spec := problems_of([*paths(GLM4), "--spec", *spec])) and "another family" in of_spec
    assert plan_hf_to_dist([*paths(GLM4), "--rotary-base", "5", "--override-model-config"], 1).shape.num_ranks == 1


def test_what_a_conversion_does_not_use_is_refused():
    problems = problems_of(["--hf-checkpoint", str(GLM4), "--lr", "1", "--colocate"])
    assert "--lr has no effect" in problems
    assert "--colocate has no effect" in problems
    assert "--save must be given" in problems


STORE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def run_tool(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), *arguments], capture_output=True, text=True, check=False, env={**os.environ, **environment}, timeout=240
    )


def test_the_tool_plans_for_the_processes_of_torchrun_and_prints_once():
    first = run_tool(*paths(FLASH), "--plan", WORLD_SIZE="4", RANK="0", **STORE)
    assert first.returncode == 0
    assert first.stdout.splitlines() == list(describe(plan_hf_to_dist(paths(FLASH), 4)))
    other = run_tool(*paths(FLASH), "--plan", WORLD_SIZE="4", RANK="3", **STORE)
    assert (other.returncode, other.stdout, other.stderr) == (0, "", "")


def test_the_plan_counts_in_words_and_units_that_fit():
    _, model, layout, size = describe(plan_hf_to_dist(paths(GLM4), 1))
    assert model == "glm4, 9.40 B parameters in 40 layers"
    assert layout.startswith("1 process: TP 1, PP 1, ") and size.startswith("each writes about 17.5 GiB; ")
    _, model, layout, size = describe(plan_hf_to_dist(paths(GLM4), 4))
    assert layout.startswith("4 processes: ") and size.startswith("each writes about 4.4 GiB; ")


@pytest.mark.long
def test_a_checkpoint_without_weights_is_not_converted(tmp_path: Path):
    result = run_tool("--hf-checkpoint", str(GLM4), "--save", str(tmp_path / "out"))
    assert result.returncode == 2
    assert "has no *.safetensors files" in result.stderr
    assert not list((tmp_path / "out").glob("*"))
    assert run_tool(*paths(GLM4), "--lr", "1").returncode == 2


def test_a_number_of_processes_is_for_plans(tmp_path: Path):
    """A conversion runs on the processes that torchrun started."""
    with pytest.raises(ConfigError, match="--world-size 8 has no effect without --plan"):
        main(["--hf-checkpoint", str(GLM4), "--save", str(tmp_path / "out"), "--world-size", "8"])


def test_planning_imports_no_torch():
    code = f"""import sys
from fuligo.planner.conversion import plan_hf_to_dist
plan_hf_to_dist({paths(FLASH)!r}, 8)
print([name for name in ("torch", "transformers", "numpy", "ray", "megatron") if name in sys.modules])"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
