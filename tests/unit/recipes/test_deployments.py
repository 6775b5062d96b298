"""Dockerfiles, Slurm scripts and Kubernetes manifests: their syntax, and that they start what exists."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from fuligo.config import Config
from fuligo.config.command_line import parse
from tests.unit.recipes.test_recipes import REPOSITORY

SLURM = sorted((REPOSITORY / "examples/slurm").glob("*.sbatch"))
DOCKERFILES = sorted((REPOSITORY / "docker").glob("*.Dockerfile"))
COMPLETE = ("ray.txt", "gpu.txt", "megatron-gpu.txt", "sglang-cpu.txt", "sglang-gpu.txt")


def pinned(name: str) -> dict[str, str]:
    """Return the versions of a file of requirements/, by package."""
    lines = (REPOSITORY / "requirements" / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


PINS = pinned("constraints.txt")


def hashed(name: str) -> dict[str, str]:
    """Return the versions of a file with hashes, by package."""
    return dict(re.findall(r"^([\w.-]+)==(\S+) \\$", (REPOSITORY / "requirements/hashed" / name).read_text(), re.MULTILINE))


def canonical(pins: dict[str, str]) -> dict[str, str]:
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}


def job_config(script: Path, directory: Path) -> tuple[list[str], Config]:
    """Run a Slurm script with a stand-in for fuligo; return the words before the flags, and the flags as a configuration."""
    environment = directory / "environment/bin"
    environment.mkdir(parents=True)
    (environment / "activate").write_text(f"PATH={environment}:$PATH\n")
    (environment / "fuligo").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (environment / "fuligo").chmod(0o755)
    variables = {"VENV": str(environment.parent), "SLURM_SUBMIT_DIR": str(REPOSITORY), "SLURM_JOB_ID": "7", "PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", str(script)], env=variables, capture_output=True, text=True, check=True)
    arguments = done.stdout.splitlines()
    start = arguments.index("--config")
    return arguments[:start], parse(arguments[start:]).config


@pytest.mark.parametrize("script", SLURM, ids=lambda path: path.name)
def test_slurm_scripts_save_before_their_time_limit(script: Path, tmp_path: Path) -> None:
    """Slurm's signal reaches fuligo, since `exec` replaces the shell, early enough for the checkpoint."""
    command, config = job_config(script, tmp_path)
    text = script.read_text()
    assert command == (["launch", "--"] if "--nodes=2" in text else ["train"])
    [seconds] = re.findall(r"^#SBATCH --signal=B:TERM@(\d+)", text, re.MULTILINE)
    assert config.checkpoint.save_on_sigterm is not None
    assert config.checkpoint.save_on_sigterm < int(seconds)
    assert "\nexec fuligo " in text


def test_the_slurm_script_of_two_nodes_asks_for_the_gpus_of_its_recipe(tmp_path: Path) -> None:
    _, config = job_config(REPOSITORY / "examples/slurm/two-nodes.sbatch", tmp_path)
    assert config.total_num_gpus == 2 * 8


@pytest.fixture(scope="module")
def ray_job() -> dict[str, Any]:
    return yaml.safe_load((REPOSITORY / "examples/kubernetes/two-nodes.yaml").read_text())


def test_the_pods_of_the_ray_job_follow_the_schema_of_kubernetes(ray_job: dict[str, Any]) -> None:
    cluster = ray_job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert len(groups) == 2
    for group in groups:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, "spec": group["template"]["spec"]}
        kubernetes_validate.validate(json.loads(json.dumps(pod)), "1.37", strict=True)
        assert pod["spec"]["securityContext"]["runAsNonRoot"]


def test_the_ray_job_has_a_token_and_the_gpus_of_its_recipe(ray_job: dict[str, Any]) -> None:
    """The path of the recipe in the pods is that of a checkout."""
    cluster = ray_job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["rayVersion"] == PINS["ray"]
    entrypoint = ray_job["spec"]["entrypoint"].replace("/shared/examples", str(REPOSITORY / "examples"))
    program, command, *arguments = shlex.split(entrypoint)
    assert (program, command) == ("fuligo", "train")
    config = parse(arguments).config
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    limits = [int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) for group in groups]
    assert config.total_num_gpus == sum(limits)
    container = groups[0]["template"]["spec"]["containers"][0]
    [stop_wait] = [int(entry["value"]) for entry in container["env"] if entry["name"] == "RAY_JOB_STOP_WAIT_TIME_S"]
    assert config.checkpoint.save_on_sigterm is not None
    assert config.checkpoint.save_on_sigterm < stop_wait


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_copy_what_exists_and_pin_what_they_install(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    allowed = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for sources in re.findall(r"^COPY ((?!--from)[^\n]*) \S+$", text, re.MULTILINE):
        for source in sources.split():
            assert (REPOSITORY / source).exists()
            assert source.strip("/") in allowed, f"{source} is in .dockerignore"
    assert all("@sha256:" in base for base in re.findall(r"^FROM (\S+)", text, re.MULTILINE))
    assert text.count("USER 1000") == 1 and 'ENTRYPOINT ["tini", "--"]' in text
    for name, version in re.findall(r"(ray|megatron-core|transformers)(?:\[\w+\])?==([\d.]+)", text):
        assert version == PINS[name]


def test_the_files_with_hashes_hold_the_pins() -> None:
    base, dev = hashed("base.txt"), hashed("dev.txt")
    assert not base.keys() & dev.keys()
    assert {**base, **dev} == canonical(PINS), "run `make lock`"
    for name in COMPLETE:
        assert hashed(name) == canonical(pinned(name)), "run `make lock`"


@pytest.mark.parametrize("name", [*COMPLETE, "base.txt", "dev.txt"])
def test_every_pin_has_a_hash(name: str) -> None:
    for block in re.split(r"\n(?=\S)", (REPOSITORY / "requirements/hashed" / name).read_text().strip()):
        assert re.search(r"\n +--hash=sha256:[0-9a-f]{64}", block), block


def test_packages_on_gpus_have_the_versions_of_the_tests() -> None:
    """The environment of fuligo on GPUs has its own torch; Ray and Megatron-Core are those that run on CPUs here."""
    gpu = {**pinned("ray.txt"), **pinned("gpu.txt"), **pinned("megatron-gpu.txt")}
    differing = {name: version for name, version in canonical(gpu).items() if canonical(PINS).get(name, version) != version}
    assert not differing
    assert {"torch", "ray", "megatron-core", "transformer-engine-torch"} <= canonical(gpu).keys()
    assert not canonical(gpu).keys() & hashed("base.txt").keys()
    on_gpus, on_cpus = pinned("sglang-gpu.txt"), pinned("sglang-cpu.txt")
    assert {name: on_gpus[name] for name in ("sglang", "sglang-router", "transformers")} == {
        name: on_cpus[name] for name in ("sglang", "sglang-router", "transformers")
    }


def test_no_command_installs_a_package_without_a_hash() -> None:
    """Except torch for CPUs, whose index is another one, fuligo itself, and the tool that writes the hashes."""
    commands: list[str] = []
    for path in (REPOSITORY / "Makefile", *DOCKERFILES):
        text = path.read_text().replace("\\\n", " ").replace("$(HASHED)", "pip install --no-deps --require-hashes --requirement hashed")
        found = re.findall(r"(?:\$\(PIP\)|pip install)([^\n;&]*)", text.partition("\nPIP :=")[0] + text.partition("\nHASHED :=")[2])
        assert found
        commands += [command for command in found if "--require-hashes" not in command]
    without = [sorted(word for word in command.split() if "==" in word or word == ".") for command in commands]
    assert sorted(without) == [["."]] * 4 + [["torch==$(TORCH)"]] * 2 + [["torch==2.13.0"], ["uv==0.13.9"]]


def test_every_requirement_has_an_upper_bound() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    requirements = re.findall(r'"([\w-]+(?:\[\w+\])?[<>=!~][^"]*)"', text.partition("[project.scripts]")[0])
    assert len(requirements) > 30
    assert [requirement for requirement in requirements if not re.search(r"==|<\d", requirement)] == []
