"""Uploads to a Hub on this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny
from tests.fake_hub import serve_hub

PROGRAM = """
import logging, sys
from pathlib import Path
from fuligo.convert.export import push, push_problem
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
print(push_problem(sys.argv[2]))
push(Path(sys.argv[1]), sys.argv[2], title="After rollout 3")
"""


@pytest.mark.parametrize("token", ["hf_secret", ""])
def test_an_export_becomes_a_private_repository(tmp_path: Path, token: str) -> None:
    exported = tiny.save_checkpoint(tmp_path / "exported")
    (tmp_path / "hub").mkdir()
    with serve_hub(tmp_path / "hub") as hub:
        environment = {**os.environ, **hub.environment(tmp_path / "home", HF_TOKEN=token)}
        command = [sys.executable, "-c", PROGRAM, str(exported), "acme/trained"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=True)
    if not token:
        assert "log in with `hf auth login`" in done.stdout
        return
    assert done.stdout == "None\n"
    assert [(body["name"], body.get("organization"), body["visibility"]) for body in hub.created] == [("trained", "acme", "private")]
    uploaded = {path.name: path.read_bytes() for path in hub.files("models/acme/trained")}
    assert uploaded == {path.name: path.read_bytes() for path in exported.iterdir()}


def test_a_failed_upload_says_how_to_repeat_it(tmp_path: Path) -> None:
    exported = tiny.save_checkpoint(tmp_path / "exported")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", PROGRAM, str(exported), "acme/trained"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=True)
    assert f"ERROR cannot upload {exported} to acme/trained" in done.stderr
    assert f"repeat it with: hf upload acme/trained {exported}" in done.stderr
