"""Processes of torchrun, by the variables that it sets."""

import pytest

from fuligo.cli import main
from fuligo.config.launcher import world_size
from fuligo.errors import ConfigError

TORCHRUN = {"WORLD_SIZE": "4", "RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(("environment", "number"), [({}, 1), ({"WORLD_SIZE": ""}, 1), ({"WORLD_SIZE": " 1 "}, 1), (TORCHRUN, 4)])
def test_world_size_counts_torchruns_processes(environment: dict[str, str], number: int) -> None:
    assert world_size(environment) == number


@pytest.mark.parametrize("given", ["0", "-1", "many", "2.0", "²"])
def test_world_size_must_be_a_number(given: str) -> None:
    with pytest.raises(ConfigError, match="in the environment is not a number of processes; unset it, or start fuligo with torchrun"):
        world_size({**TORCHRUN, "WORLD_SIZE": given})


def test_world_size_without_its_companions_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert main(["train", "--hf-checkpoint", "m", "--prompt-data", "d.jsonl", "--num-rollout", "1", "--rm-type", "random"]) == 2
    printed = " ".join("".join(capfd.readouterr()).split())
    assert "WORLD_SIZE=2 is set in the environment without RANK, MASTER_ADDR, MASTER_PORT; unset WORLD_SIZE, or start" in printed
