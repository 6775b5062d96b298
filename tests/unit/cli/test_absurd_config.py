"""A config.json with absurd content: every command that reads it answers with one sentence, before it takes memory or time."""

import json
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuligo.cli import main
from fuligo.models.config_json import ConfigJson
from tests import tiny
from tests.e2e.command import train_command

SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads")
TEXTS = {
    "deep": '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "list": "[]",
    "digits": '{"model_type": "qwen3", "num_hidden_layers": ' + "9" * 5000 + "}",
    "binary": "\x00\x01",
    "empty": "",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Let a model of 10^30 layers fail this process instead of the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def answers(directory: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[tuple[int, str]]:
    """Yield exit code and last line on standard error of each command that reads the directory."""
    flags = train_command(directory, place / "prompts.jsonl", run_dir=place / "run")[1:]
    for command in (
        ["plan", *flags],
        ["train", *flags],
        ["convert", "hf-to-dist", "--hf-checkpoint", directory, "--save", place / "dist"],
        ["convert", "fp8", "--model-dir", directory, "--save-dir", place / "fp8"],
    ):
        code = main([str(part) for part in command])
        yield code, capsys.readouterr().err.strip()


@pytest.mark.parametrize("value", [10**30, -1, 0, "many", 1.5, True, [2]], ids=str)
@pytest.mark.parametrize("key", SIZES)
def test_a_size_that_no_model_has_is_one_sentence(
    key: str, value: object, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Path(shutil.copytree(model, tmp_path / "model"))
    content = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(content | {key: value}))
    for code, errors in answers(directory, tmp_path, capsys):
        assert code == 2
        assert f"config.json: {key} is {value!r}; it must be an integer from 1 to " in errors


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_file_that_is_no_description_of_a_model_is_one_sentence(
    text: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Path(shutil.copytree(model, tmp_path / "model"))
    (directory / "config.json").write_text(text)
    for code, errors in answers(directory, tmp_path, capsys):
        assert code == 2
        assert "config.json" in errors and len(errors) < 2000


def test_sizes_in_the_part_of_a_language_model_are_read(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "x", "text_config": {"model_type": "qwen3", "num_hidden_layers": 10**9}}))
    assert main(["plan", "--model-config-file", str(file)]) == 2
    assert "num_hidden_layers is 1000000000; it must be an integer from 1 to 10,000" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more", [[], ["--moe-layer-freq", "2", "--num-experts", "8", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "64"]]
)
def test_layers_given_by_flags_are_bounded(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("hidden-size", "ffn-hidden-size", "vocab-size", "max-position-embeddings")
    given = [part for name in sizes for part in (f"--{name}", "64")]
    assert main(["plan", "--num-layers", str(10**10), "--num-attention-heads", "4", *given, *more]) == 2
    assert "MODEL_ARGS: num_hidden_layers is 10000000000; it must be an integer from 1 to 10,000" in capsys.readouterr().err


@pytest.mark.parametrize(("key", "value"), [("num_experts", 10**10), ("num_nextn_predict_layers", 10**5), ("rope_theta", 10**400)])
def test_other_numbers_are_bounded(key: str, value: int) -> None:
    values = ConfigJson({key: value})
    with pytest.raises(Exception, match=f"config.json: {key} is {str(value)[:20]}"):
        values.number(key, 1.0) if key == "rope_theta" else values.count(key)
    with pytest.raises(Exception, match="must be a number between"):
        ConfigJson({key: float("nan")}).number(key, 1.0)
