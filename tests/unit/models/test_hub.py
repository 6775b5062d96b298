"""Models of the Hub, from a server on this machine and then only from the cache."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tiny
from tests.fake_hub import COMMIT, FakeHub, serve_hub

PROGRAM = """
import json, sys
from pathlib import Path
from fuligo.config.command_line import parse
from fuligo.errors import ConfigError
from fuligo.models.hub import located, with_weights
shown = []
try:
    config = located(parse(sys.argv[1:]).config)
    for step in (lambda: config, lambda: with_weights(config)):
        path = Path(step().model.hf_checkpoint)
        shown.append([str(path), sorted(file.name for file in path.iterdir())])
except ConfigError as error:
    shown.append(list(error.problems))
print(json.dumps(shown))
"""

COMMANDS = """
import contextlib, io, json, sys
from fuligo.cli import main
shown = []
for arguments in sys.argv[1:]:
    with io.StringIO() as said, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(arguments.split())
        shown.append([said.getvalue(), code])
print(json.dumps(shown))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """Hub with the model acme/tiny, which also has files that fuligo does not read."""
    model = tmp_path / "hub/models/acme/tiny"
    model.parent.mkdir(parents=True)
    tiny.save_checkpoint(model)
    (model / "original").mkdir()
    (model / "original/consolidated.00.pth").touch()
    (model / "pytorch_model.bin").touch()
    with serve_hub(tmp_path / "hub") as server:
        yield server


def run(environment: dict[str, str], *arguments: str, directory: Path | None = None, program: str = PROGRAM) -> list:
    """Run the program in a process of its own, since the library reads its settings when it is imported."""
    command = [sys.executable, "-c", program, *arguments]
    whole = {**os.environ, **environment}
    done = subprocess.run(command, env=whole, cwd=directory, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_config_json_comes_first_and_the_weights_before_the_run(hub: FakeHub, tmp_path: Path) -> None:
    environment = hub.environment(tmp_path / "home")
    (path, first), (same, then) = run(environment, "--hf-checkpoint", "acme/tiny")
    assert path == same == str(tmp_path / f"home/hub/models--acme--tiny/snapshots/{COMMIT}")
    assert first == ["config.json"], "all that a plan reads"
    assert {"model.safetensors", "tokenizer.json"} <= set(then) and not {"original", "pytorch_model.bin"} & set(then)
    hub.requests.clear()
    offline = run({**environment, "HF_HUB_OFFLINE": "1"}, "--hf-checkpoint", "acme/tiny@main")
    assert offline == [[path, then], [path, then]]
    assert not hub.requests


def test_the_directory_in_a_config_of_another_machine_is_found_again(hub: FakeHub, tmp_path: Path) -> None:
    elsewhere = f"/home/other/hub/models--acme--tiny/snapshots/{COMMIT}"
    _, (path, files) = run(hub.environment(tmp_path / "home"), "--hf-checkpoint", elsewhere)
    assert path.startswith(str(tmp_path)) and "model.safetensors" in files


def test_every_model_that_the_hub_does_not_give_is_named(hub: FakeHub, tmp_path: Path) -> None:
    ((of_policy, of_reference),) = run(hub.environment(tmp_path / "home"), "--hf-checkpoint", "acme/tinny", "--ref-load", "acme/other@v2")
    assert of_policy.startswith("--hf-checkpoint: acme/tinny is not a directory here") and "RepositoryNotFoundError" in of_policy
    assert of_policy.endswith(": hf download acme/tinny")
    assert of_reference.startswith("--ref-load: acme/other@v2 is not a directory here")
    assert of_reference.endswith(": hf download acme/other --revision v2")


@pytest.mark.long
def test_groups_of_engines_name_models_of_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    topology = tmp_path / "engines.yaml"
    group = "server_groups: [{worker_type: regular, num_gpus: 1}]"
    topology.write_text(f"sglang:\n- {{name: policy, {group}}}\n- {{name: judge, model_path: acme/tiny, update_weights: false, {group}}}\n")
    program = PROGRAM.replace("step().model.hf_checkpoint", "step().engine.sglang_config[1].model_path")
    arguments = ("--sglang-config", str(topology), "--rollout-num-gpus", "2", "--rollout-backend", "sglang")
    (path, first), (same, then) = run(hub.environment(tmp_path / "home"), *arguments, program=program)
    assert path == same == str(tmp_path / f"home/hub/models--acme--tiny/snapshots/{COMMIT}")
    assert first == ["config.json"] and "model.safetensors" in then
    topology.write_text(topology.read_text().replace("acme/tiny", "acme/none"))
    ((problem,),) = run(hub.environment(tmp_path / "home"), *arguments, program=program)
    assert problem.startswith("--sglang-config, model_path of judge: acme/none is not a directory here")


@pytest.mark.long
def test_conversions_and_the_doctor_take_models_of_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    commands = (
        "convert compare acme/tiny hub/models/acme/tiny",
        "convert hf-to-dist --plan --hf-checkpoint acme/tiny --save dist",
        "convert fp8 --model-dir acme/none --save-dir fp8",
        "doctor --hf-checkpoint acme/none --loss-type sft_loss",
    )
    answers = run(hub.environment(tmp_path / "home"), *commands, directory=tmp_path, program=COMMANDS)
    (compared, code), (planned, code_of_plan), (converted, _), (examined, _) = answers
    assert "all " in compared and code == 0, compared
    assert f"snapshots/{COMMIT} -> dist" in planned and code_of_plan == 0, planned
    assert "acme/none is not a directory here" in converted
    assert "acme/none is not a directory here" in examined


def test_a_directory_of_this_name_wins(hub: FakeHub, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "hub/models/acme/tiny", tmp_path / "acme/tiny")
    (path, _), _ = run(hub.environment(tmp_path / "home"), "--hf-checkpoint", "acme/tiny", directory=tmp_path)
    assert path == "acme/tiny"
    assert not hub.requests
