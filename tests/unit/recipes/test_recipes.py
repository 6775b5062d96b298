"""Tests that every recipe of `examples/` plans without errors on its GPUs, without a download."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuligo.config.command_line import parse
from fuligo.planner.make_plan import make_plan
from tests.cluster_recipes import CLUSTER_RECIPES as FOUND
from tests.cluster_recipes import gpu_of
from tests.config_files import load_yaml

REPOSITORY = Path(__file__).parents[3]
EXAMPLES = REPOSITORY / "examples"
CLUSTER_RECIPES = {
    "deepseek-v3.2/config.yaml": 128,
    "gemma3-1b/config.yaml": 8,
    "gemma4-26b/config.yaml": 8,
    "glm4-9b/separate.yaml": 8,
    "glm4-9b/colocated.yaml": 8,
    "glm4.7-flash/8gpus.yaml": 8,
    "glm4.7-flash/2x8.yaml": 16,
    "glm4.7-flash/24gpus.yaml": 24,
    "glm4.5-355b/bf16.yaml": 64,
    "glm4.5-355b/fp8.yaml": 64,
    "glm5.2-744b/config.yaml": 256,
    "gpt-oss-20b/config.yaml": 8,
    "kimi-k2/config.yaml": 256,
    "minimax-m2/config.yaml": 128,
    "qwen3-next-80b/config.yaml": 32,
    "qwen3-4b/config.yaml": 8,
    "qwen3-vl-8b/config.yaml": 8,
    "qwen3.5-35b/config.yaml": 8,
    "mimo-7b/config.yaml": 8,
}
KNOWN_WARNINGS = {"glm4-9b/separate.yaml": ["PLAN-SPLIT-GPUS"]}
"""Recipe with 4 trainer GPUs and 4 engine GPUs, which idle in turns; the folder has the colocated layout as well."""
RUN_SCRIPTS = {
    "run-glm4-9B.sh": "glm4-9b/separate.yaml",
    "run-glm4.7-30B-A3B-8gpus.sh": "glm4.7-flash/8gpus.yaml",
    "run-glm4.7-30B-A3B.sh": "glm4.7-flash/2x8.yaml",
    "run-glm4.5-355B-A32B.sh": "glm4.5-355b/bf16.yaml",
    "run-glm5.2-744B-A40B.sh": "glm5.2-744b/config.yaml",
    "run-qwen3-4B.sh": "qwen3-4b/config.yaml",
    "run-mimo-7B-rl-eagle.sh": "mimo-7b/config.yaml",
}


def test_these_are_all_recipes_of_clusters():
    assert {str(file.relative_to(EXAMPLES)) for file in FOUND} == set(CLUSTER_RECIPES)


@pytest.mark.parametrize(("recipe", "num_gpus"), CLUSTER_RECIPES.items())
def test_plans_without_findings_and_fits(recipe: str, num_gpus: int):
    config = load_yaml(EXAMPLES / recipe)
    plan = make_plan(config, gpu_of(EXAMPLES / recipe), recipe)
    assert [finding.id for finding in plan.findings] == KNOWN_WARNINGS.get(recipe, [])
    assert plan.layout is not None
    assert len(plan.layout.gpus) == config.total_num_gpus == num_gpus
    assert [bar.owner for bar in plan.memory if not bar.fits] == []


@pytest.mark.parametrize("recipe", CLUSTER_RECIPES)
def test_the_folder_has_a_page(recipe: str):
    page = (EXAMPLES / recipe).parent / "README.md"
    assert Path(recipe).name in page.read_text()


def planned(script: str, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `PLAN=1 bash scripts/run-...sh` with a minimal PATH."""
    return subprocess.run(
        ["bash", str(REPOSITORY / "scripts" / script), *flags],
        env={"PATH": "/usr/bin:/bin", "PLAN": "1", "PYTHON": sys.executable, "HOME": os.environ.get("HOME", "/"), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_these_are_all_scripts():
    assert {file.name for file in (REPOSITORY / "scripts").glob("run-*.sh")} == set(RUN_SCRIPTS)


# The test below compares what the scripts start with the recipes, which a test above plans.
@pytest.mark.parametrize(
    "script", [script if number == 0 else pytest.param(script, marks=pytest.mark.slow) for number, script in enumerate(RUN_SCRIPTS)]
)
def test_scripts_plan_instead_of_running(script: str):
    result = planned(script)
    assert result.returncode == 0, result.stderr + result.stdout


@pytest.mark.parametrize(("script", "recipe"), RUN_SCRIPTS.items())
def test_scripts_start_the_recipe_and_nothing_else(script: str, recipe: str, tmp_path: Path):
    """Compare the arguments, recorded by a stand-in for Python, with the recipe."""
    recorder = tmp_path / "python"
    recorder.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    recorder.chmod(0o755)
    arguments = planned(script, PYTHON=str(recorder)).stdout.splitlines()
    assert arguments[:3] == ["-m", "fuligo", "plan"]
    assert parse(arguments[3:]).config == load_yaml(EXAMPLES / recipe)


def test_what_the_user_sets_reaches_the_job(tmp_path: Path):
    recorder = tmp_path / "python"
    recorder.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    recorder.chmod(0o755)
    result = planned(
        "run-glm5.2-744B-A40B.sh",
        "--num-rollout",
        "5",
        PYTHON=str(recorder),
        BASE_DIR="/data",
        SOCKET_IFNAME="ib0",
        MODEL_ARGS="--rotary-base 5 --override-model-config",
    )
    config = parse(result.stdout.splitlines()[3:]).config
    assert config.model.hf_checkpoint == "/data/GLM-5.2-FP8"
    assert config.checkpoint.save == "/data/GLM-5.2_fuligo"
    assert config.data.num_rollout == 5
    assert (
        config.cluster.env.reveal()["NCCL_SOCKET_IFNAME"]
        == config.cluster.env.reveal()["GLOO_SOCKET_IFNAME"]
        == config.cluster.env.reveal()["TP_SOCKET_IFNAME"]
        == "ib0"
    )
    assert config.cluster.env.reveal()["NVSHMEM_DISABLE_NCCL"] == "1"
    assert config.megatron.get("rotary_base") == 5


@pytest.mark.parametrize(
    ("given", "command"),
    [
        ({"HOSTFILE": "/shared/hosts", "SLURM_JOB_NODELIST": "node[1-2]"}, ["launch", "--hostfile", "/shared/hosts", "--"]),
        ({"SLURM_JOB_NODELIST": "node[1-2]"}, ["launch", "--"]),
        ({}, ["train"]),
    ],
    ids=["host file", "Slurm", "one machine"],
)
def test_scripts_start_the_recipe_on_the_nodes_that_are_given(given: dict[str, str], command: list[str], tmp_path: Path):
    recorder = tmp_path / "python"
    recorder.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    recorder.chmod(0o755)
    result = planned("run-glm4.7-30B-A3B.sh", PLAN="0", PYTHON=str(recorder), **given)
    arguments = result.stdout.splitlines()
    assert arguments[: len(command) + 3] == ["-m", "fuligo", *command, "--config"], result.stderr
    assert parse(arguments[len(command) + 2 :]).config == load_yaml(EXAMPLES / "glm4.7-flash/2x8.yaml")


def test_a_script_with_a_bad_host_file_starts_nothing(tmp_path: Path):
    """The line is an option of ssh that would run a command."""
    (tmp_path / "hosts").write_text(f"# two nodes\n\n127.0.0.1 slots=8\n-oProxyCommand=touch${{IFS}}{tmp_path}/owned slots=8\n")
    result = planned("run-glm4.7-30B-A3B.sh", PLAN="0", HOSTFILE=str(tmp_path / "hosts"))
    assert result.returncode == 2
    assert "line 4: '-oProxyCommand=touch${IFS}" in result.stderr
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("script", [*RUN_SCRIPTS, "launch.sh"])
def test_scripts_end_no_process_of_others(script: str):
    code = [line.partition("#")[0] for line in (REPOSITORY / "scripts" / script).read_text().splitlines()]
    assert not {"pkill", "kill", "killall", "rm", "stop", "ssh", "ray"} & set(" ".join(code).split())
    assert subprocess.run(["bash", "-n", str(REPOSITORY / "scripts" / script)], check=False).returncode == 0


def test_train_py_is_fuligo_train():
    command = [sys.executable, str(REPOSITORY / "train.py"), "--actor-num-nodes", "1", "--rolout-batch-size", "3"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert result.returncode == 2
    assert "did you mean --rollout-batch-size" in result.stderr
