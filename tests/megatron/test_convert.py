"""Checkpoints converted to the other format and back: every tensor is bitwise equal, and a single changed bit is found."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fuligo.checkpoint.location import resolve
from fuligo.cli.convert import main as convert
from fuligo.convert.dist_to_hf import dist_to_hf
from fuligo.convert.hf_to_dist import hf_to_dist
from fuligo.errors import CheckpointError, ConfigError
from fuligo.formats.checkpoint_files import TRACKER
from fuligo.trainer.ranks.world import World
from tests import tiny
from tests.megatron.checkpoints import uneven_model
from tests.megatron.ranks import RankPool


def save_published(directory: Path, family: str, *, num_prediction_layers: int = 0, **overrides: object) -> Path:
    """Save a tiny bf16 checkpoint with its tokenizer; the router's correction stays float32, as in published files."""
    model = uneven_model(family, layers=3, **overrides).bfloat16()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = buffer.data.float()
    tiny.save_as_published(model, directory, family)
    tiny.tokenizer().save_pretrained(directory)
    if num_prediction_layers:
        add_prediction_layer(directory)
    return directory


def add_prediction_layer(directory: Path) -> None:
    """Add an MTP layer as in published files of DeepSeek-V3 and GLM: after the last layer, with copies of embedding and head."""
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    tensors = load_file(directory / "model.safetensors")
    last, new = (f"model.layers.{config['num_hidden_layers'] + i}." for i in (-1, 0))
    hidden = config["hidden_size"]
    added = {new + name.removeprefix(last): tensor.flip(0).contiguous() for name, tensor in tensors.items() if name.startswith(last)}
    added |= {new + name: torch.randn(hidden).bfloat16() for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
    added |= {
        new + "eh_proj.weight": torch.randn(hidden, 2 * hidden).bfloat16(),
        new + "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        new + "shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    save_file(tensors | added, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Path] = {}

    def checkpoint(family: str) -> Path:
        if family not in made:
            directory = tmp_path_factory.mktemp(family)
            made[family] = save_published(directory, family, **SHAPES[family])
        return made[family]

    return checkpoint


SHAPES: dict[str, dict] = {
    "qwen3": {"vocab_size": 397, "tie_word_embeddings": True},
    "glm4": {},
    "mistral": {},
    "gemma3_text": {},
    "kimi_k2": {},
    "qwen3_moe": {},
    "glm4_moe_lite": {"num_prediction_layers": 1},
    "deepseek_v32": {"num_prediction_layers": 1},
    "glm_moe_dsa": {"num_prediction_layers": 1, "indexer_types": ["full", "shared", "full"]},
}


def test_families_come_back_to_the_bit(checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for family in SHAPES:
        source, dist, back = checkpoints(family), tmp_path / family / "dist", tmp_path / family / "back"
        assert convert(["hf-to-dist", "--hf-checkpoint", str(source), "--save", str(dist)]) == 0
        assert convert(["dist-to-hf", str(dist), "--save", str(back)]) == 0
        capsys.readouterr()
        assert convert(["compare", str(source), str(back)]) == 0, capsys.readouterr().out
        assert convert(["compare", str(dist), str(source)]) == 0, capsys.readouterr().out
        assert "tensors are bitwise equal" in capsys.readouterr().out
        assert json.loads((back / "config.json").read_text()) == json.loads((source / "config.json").read_text())
        assert (back / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def share_of(world: World, source: Path, target: Path) -> int:
    hf_to_dist(source, target, world)
    return world.size


def test_processes_share_the_work(pool: RankPool, checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = checkpoints("qwen3_moe")
    assert pool.run(2, share_of, source, tmp_path) == [2, 2]
    written = {file.name.split("_")[2]: file.stat().st_size for file in (tmp_path / "release").glob("*.distcp")}
    assert max(written.values()) < 2 * min(written.values())
    assert convert(["compare", str(tmp_path), str(source)]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_the_tool_runs_under_torchrun(checkpoints, tmp_path: Path):
    tool = Path(__file__).parents[2] / "tools" / "convert_hf_to_torch_dist.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(tool)]
    model_args = ["--num-layers", "3", "--hidden-size", "64", "--swiglu"]
    source = checkpoints("qwen3")
    result = subprocess.run(
        [*torchrun, *model_args, "--hf-checkpoint", str(source), "--save", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("is complete") == 1
    assert convert(["compare", str(tmp_path), str(source)]) == 0


def test_a_changed_bit_is_found(checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = checkpoints("glm4")
    hf_to_dist(source, tmp_path / "dist", World())
    dist_to_hf(tmp_path / "dist" / "release", tmp_path / "back")
    file = tmp_path / "back" / "model-00001-of-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert convert(["compare", str(tmp_path / "dist"), str(tmp_path / "back")]) == 1
    *differing, summary = capsys.readouterr().out.splitlines()
    assert len(differing) == 1 and "1 of " in differing[0] and "values differs, by up to" in differing[0]
    assert summary.startswith("1 of ") and "tensors differs, by up to" in summary


def test_what_else_may_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    one, other = (
        {"a": torch.ones(3), "b": torch.ones(2), "c": torch.ones(2)},
        {"a": torch.ones(3).bfloat16(), "b": torch.ones(4), "d": torch.ones(1)},
    )
    for name, tensors in (("one", one), ("other", other)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    assert convert(["compare", str(tmp_path / "one"), str(tmp_path / "other")]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "a: float32 and bfloat16, equal values",
        "b: shape [2] and [4]",
        f"c: only in {tmp_path / 'one'}",
        f"d: only in {tmp_path / 'other'}",
        "4 of 4 tensors differ",
    ]


def test_weights_are_written_file_by_file(checkpoints, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("fuligo.convert.dist_to_hf.FILE_BYTES", 2**17)
    source = checkpoints("qwen3_moe")
    hf_to_dist(source, tmp_path / "dist", World())
    dist_to_hf(tmp_path / "dist" / "release", tmp_path / "back")
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 2 and files[-1].name == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    assert convert(["compare", str(source), str(tmp_path / "back")]) == 0, capsys.readouterr().out


def test_a_conversion_that_cannot_be_done_leaves_nothing(checkpoints, tmp_path: Path):
    source, dist = checkpoints("qwen3"), tmp_path / "dist"
    (tmp_path / "no weights").mkdir()
    (tmp_path / "no weights" / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"has no \*\.safetensors files"):
        hf_to_dist(tmp_path / "no weights", dist, World())
    assert not dist.exists()
    hf_to_dist(source, dist, World())
    shutil.rmtree(dist / "release")
    hf_to_dist(source, dist, World())  # an export that its own tracker names may be replaced
    assert resolve(dist) is not None
    with pytest.raises(CheckpointError, match="release: it already exists"):
        hf_to_dist(source, dist, World())
    with pytest.raises(CheckpointError, match="is a Hugging Face directory; use another directory with --save"):
        hf_to_dist(source, source, World())
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / TRACKER).write_text("20")
    with pytest.raises(CheckpointError, match="it holds a run's checkpoints"):
        hf_to_dist(source, tmp_path / "run", World())
    assert (tmp_path / "run" / TRACKER).read_text() == "20", "the run still resumes from its own checkpoint"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=r"full: it holds other files \(notes\.txt\); use another directory with --save"):
        hf_to_dist(source, tmp_path / "full", World())
    with pytest.raises(CheckpointError, match="is a file"):
        hf_to_dist(source, tmp_path / "full" / "notes.txt", World())
    with pytest.raises(CheckpointError, match="is not an empty directory"):
        dist_to_hf(dist / "release", tmp_path / "full")
    with pytest.raises(ConfigError, match="is not a distributed checkpoint"):
        convert(["dist-to-hf", str(source), "--save", str(tmp_path / "back")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dist", "full", "no weights", "run"]


@pytest.mark.parametrize("damage", ["missing", "cut short", "overwritten"])
def test_damage_is_named(checkpoints, tmp_path: Path, damage: str):
    hf_to_dist(checkpoints("qwen3"), tmp_path, World())
    file = max((tmp_path / "release").glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(
            content[:-100] if damage == "cut short" else content[: len(content) // 2] + bytes(len(content) - len(content) // 2)
        )
    with pytest.raises(CheckpointError, match=file.name):
        dist_to_hf(tmp_path / "release", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_megatron_reads_it(pool: RankPool, checkpoints, tmp_path: Path):
    """The oracle is Megatron's reader of torch_dist checkpoints."""
    source = checkpoints("qwen3")
    hf_to_dist(source, tmp_path, World())
    (tensors,) = pool.run(1, plain_tensors, tmp_path / "release")
    stored = load_file(source / "model.safetensors")
    assert torch.equal(tensors["embedding.word_embeddings.weight"], stored["model.embed_tokens.weight"])
    gate_up = torch.cat([stored[f"model.layers.2.mlp.{kind}_proj.weight"] for kind in ("gate", "up")])
    assert torch.equal(tensors["decoder.layers.2.mlp.linear_fc1.weight"], gate_up)


def plain_tensors(world: World, directory: Path) -> dict[str, torch.Tensor]:
    from megatron.core.dist_checkpointing.serialization import load_plain_tensors

    from fuligo.trainer.megatron_backend.cpu import run_on_cpu

    run_on_cpu()
    return {name: tensor for name, tensor in load_plain_tensors(str(directory)).items() if isinstance(tensor, torch.Tensor)}
