"""Directories of others with pipes, devices and endless files: a command names the file instead of waiting or filling the memory."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fuligo.cli import main
from fuligo.convert.hf_to_dist import hf_to_dist
from fuligo.formats.checkpoint_files import TRACKER
from fuligo.trainer.ranks.world import World
from tests import tiny
from tests.e2e.command import train_command

WAIT_S = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def not_held_up() -> Iterator[None]:
    """Fail where a command waits."""

    def fail(*_: object) -> None:
        raise AssertionError(f"held up for {WAIT_S} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(WAIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _pipe(file: Path) -> None:
    os.mkfifo(file)


def _device(file: Path) -> None:
    file.symlink_to("/dev/zero")


def _endless(file: Path) -> None:
    file.touch()
    os.truncate(file, 2**40)


MAKERS = {"a pipe": _pipe, "a device": _device, "1,099,511,627,776 bytes": _endless}


def replaced(file: Path, make: Callable[[Path], None]) -> None:
    file.unlink(missing_ok=True)
    make(file)


@pytest.mark.parametrize(("kind", "make"), MAKERS.items(), ids=MAKERS)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_model_is_refused_by_its_file(
    name: str, kind: str, make: Callable[[Path], None], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Path(shutil.copytree(model, tmp_path / "model"))
    replaced(directory / name, make)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1 + 1", "label": "2"}\n')
    train = [str(part) for part in train_command(directory, prompts, run_dir=tmp_path / "run")]
    for command in (train, ["serve", "--model-path", str(directory), "--device", "cpu"]):
        assert main(command) == 2
        errors = capsys.readouterr().err
        assert (f"{directory / name} " in errors and kind in errors) or f"{directory}: there is no config.json" in errors, errors


def test_weights_that_are_a_pipe_are_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = Path(shutil.copytree(model, tmp_path / "model"))
    replaced(directory / "model.safetensors", _pipe)
    for command in (
        train_command(directory, tmp_path / "prompts.jsonl", run_dir=tmp_path / "run"),
        ["serve", "--model-path", directory, "--device", "cpu"],
        ["convert", "hf-to-dist", "--hf-checkpoint", directory, "--save", tmp_path / "dist"],
        ["convert", "fp8", "--model-dir", directory, "--save-dir", tmp_path / "fp8"],
    ):
        assert main([str(part) for part in command]) != 0
        assert "is a pipe, not a plain file" in capsys.readouterr().err


@pytest.mark.parametrize("name", [TRACKER, "release/.metadata", "release/metadata.json", "release/__0_0.distcp"])
def test_a_checkpoint_is_refused_by_its_file(name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf_to_dist(model, tmp_path / "dist", World())
    replaced(tmp_path / "dist" / name, _pipe)
    changes = {"load": tmp_path / "dist", "train_backend": "megatron", "embedded_num_threads": None}
    load = train_command(model, tmp_path / "prompts.jsonl", run_dir=tmp_path / "run", **changes)
    for command in (load, ["convert", "dist-to-hf", tmp_path / "dist", "--save", tmp_path / "hf"]):
        assert main([str(part) for part in command]) != 0
        errors = capsys.readouterr().err
        assert str(tmp_path / "dist") in errors
        assert any(reason in errors for reason in ("not a plain file", "is missing", "is not a")), errors


@pytest.mark.parametrize(("kind", "make"), MAKERS.items(), ids=MAKERS)
def test_an_adapter_is_refused_by_its_file(
    kind: str, make: Callable[[Path], None], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    make(adapter / "adapter_config.json")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1 + 1", "label": "2"}\n')
    assert main([str(part) for part in train_command(model, prompts, run_dir=tmp_path / "run", lora_adapter=adapter)]) == 2
    assert "adapter_config.json" in capsys.readouterr().err
