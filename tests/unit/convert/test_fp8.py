"""Conversion to FP8: compared with its source tensors, interrupted and resumed, and loaded by transformers."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fuligo.convert import fp8 as fp8_conversion
from fuligo.convert.fp8 import convert
from fuligo.convert.fp8_plan import plan_hf_to_fp8
from fuligo.errors import CheckpointError, ConfigError
from fuligo.formats.buckets import as_bytes
from fuligo.formats.checkpoint_files import checkpoint_weights
from fuligo.formats.fp8 import quantize, quantized_weights
from fuligo.formats.quantization import EngineQuantization, Quantization, is_quantized_matrix
from fuligo.formats.weight_manifest import EngineFormat, WeightTarget
from fuligo.trainer.torch_backend.weights import named_weights
from fuligo.weights.senders import WeightSender
from tests.fp8 import FAMILIES, dequantize, save_family

Tensors = dict[str, torch.Tensor]
STRATEGIES = {
    "block": Quantization("block", (128, 128)),
    "channel": Quantization("channel"),
    "tensor": Quantization("tensor"),
}


def converted(model: Path, save: Path, *more: str) -> list[str]:
    """Convert and return the reported lines."""
    reports: list[str] = []
    convert(plan_hf_to_fp8(["--model-dir", str(model), "--save-dir", str(save), *more]), reports.append)
    return reports


def tensors_of(directory: Path) -> Tensors:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def differing(left: Tensors, right: Tensors) -> list[str]:
    """Return the names of tensors that are missing on one side or differ in dtype, shape or bytes."""
    one, other = _described(left), _described(right)
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _described(tensors: Tensors) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    return {name: (tensor.dtype, tensor.shape, as_bytes(tensor).numpy().tobytes()) for name, tensor in tensors.items()}


def expected(original: Tensors, quantization: Quantization) -> Tensors:
    """Quantize each tensor in one piece."""
    made: Tensors = {}
    for name, tensor in original.items():
        if is_quantized_matrix(name, tuple(tensor.shape)):
            made[name], made[quantization.scale_name(name)] = quantize(tensor, quantization)
        else:
            made[name] = tensor
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model with dense and expert layers in several files."""
    return save_family(tmp_path_factory.mktemp("model"), "glm4_moe", num_files=4)


class TestResult:
    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_matrices_are_quantized_and_all_else_is_as_it_was(
        self, model: Path, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        """Tensors are read in pieces of one or two rows of blocks; a per-tensor scale covers all pieces."""
        monkeypatch.setattr(fp8_conversion, "_CHUNK_BYTES", 2**16)
        converted(model, tmp_path, "--strategy", strategy, "--max-workers", "3")
        assert differing(tensors_of(tmp_path), expected(tensors_of(model), STRATEGIES[strategy])) == []

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    def test_other_types_of_weights(self, model: Path, dtype: torch.dtype, tmp_path: Path):
        (source := tmp_path / "source").mkdir()
        original = {name: tensor.to(dtype) for name, tensor in tensors_of(model).items()}
        save_file(original, source / "model.safetensors")
        (source / "config.json").write_text((model / "config.json").read_text())
        converted(source, tmp_path / "out")
        assert differing(tensors_of(tmp_path / "out"), expected(original, STRATEGIES["block"])) == []

    def test_the_index_names_every_tensor(self, model: Path, tmp_path: Path):
        converted(model, tmp_path)
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        held = {name: file.name for file in tmp_path.glob("*.safetensors") for name in load_file(file)}
        assert index["weight_map"] == held
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors_of(tmp_path).values())

    def test_what_else_belongs_to_the_model_is_there(self, model: Path, tmp_path: Path):
        converted(model, tmp_path)
        others = {name: data for name, data in contents(model).items() if not name.endswith((".safetensors", "index.json"))}
        others.pop("config.json")
        assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= others.keys()
        assert others.items() <= contents(tmp_path).items()
        assert AutoTokenizer.from_pretrained(tmp_path)("2 + 2").input_ids == AutoTokenizer.from_pretrained(model)("2 + 2").input_ids

    def test_config_json_says_how_and_what_not(self, model: Path, tmp_path: Path):
        converted(model, tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        assert config.pop("quantization_config") == {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.embed_tokens", "model.layers.1.mlp.gate"],
        }
        assert config == json.loads((model / "config.json").read_text())

    def test_experts_that_are_one_tensor_come_out_one_by_one(self, model: Path, tmp_path: Path):
        """Experts may be stored fused under transformers' names, as a trainer saves them."""
        (source := tmp_path / "source").mkdir()
        weights = dict(named_weights(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), dtype=torch.bfloat16))
        assert "model.layers.1.mlp.experts.gate_up_proj" in weights
        save_file(weights, source / "model.safetensors")
        (source / "config.json").write_text((model / "config.json").read_text())
        converted(source, tmp_path / "out")
        assert differing(tensors_of(tmp_path / "out"), expected(tensors_of(model), STRATEGIES["block"])) == []

    def test_a_converted_checkpoint_is_not_converted_again(self, model: Path, tmp_path: Path):
        converted(model, tmp_path / "once")
        with pytest.raises(ConfigError, match="is already quantized"):
            converted(tmp_path / "once", tmp_path / "twice")


@pytest.mark.long
class TestCutOff:
    def test_a_killed_conversion_resumes_to_the_same_bytes(self, model: Path, tmp_path: Path):
        """The conversion is killed after one file; another is unfinished, and the finished one is damaged afterwards."""
        converted(model, tmp_path / "whole")
        script = (
            "import os, signal, sys\n"
            "from fuligo.convert import fp8 as fp8_conversion\n"
            "from fuligo.convert.fp8_plan import plan_hf_to_fp8\n"
            "fp8_conversion._CHUNK_BYTES = 2**14\n"
            "reports = []\n"
            "def report(line):\n"
            "    reports.append(line)\n"
            "    if len(reports) == 2:\n"
            "        os.kill(os.getpid(), signal.SIGKILL)\n"
            "fp8_conversion.convert(plan_hf_to_fp8(sys.argv[1:]), report)\n"
        )
        save = tmp_path / "killed"
        command = [sys.executable, "-c", script, "--model-dir", str(model), "--save-dir", str(save), "--max-workers", "2"]
        killed = subprocess.run(command, check=False, capture_output=True, timeout=240)
        assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
        ready = sorted(path.name for path in save.glob("[!.]*.safetensors"))
        assert 2 <= len(ready) < len(list(model.glob("*.safetensors"))) and not (save / "config.json").exists()
        (save / f".tmp_{ready[0]}").write_bytes(b"half of a file")
        damaged = bytearray((save / ready[0]).read_bytes())
        damaged[-1] ^= 1
        (save / ready[0]).write_bytes(damaged)
        reports = converted(model, save)
        assert contents(save) == contents(tmp_path / "whole")
        assert sum("already exists and is correct" in report for report in reports) == len(ready) - 1
        assert any(report.startswith(ready[0]) and "replaced a file with wrong content" in report for report in reports)

    def test_what_another_strategy_left_is_written_again(self, model: Path, tmp_path: Path):
        converted(model, tmp_path / "out", "--strategy", "channel")
        (tmp_path / "out" / "config.json").unlink()
        converted(model, tmp_path / "out")
        assert differing(tensors_of(tmp_path / "out"), expected(tensors_of(model), STRATEGIES["block"])) == []

    def test_a_weight_that_is_not_finite_ends_it_and_is_named(self, model: Path, tmp_path: Path):
        (source := tmp_path / "source").mkdir()
        weights = tensors_of(model)
        weights["model.layers.0.mlp.up_proj.weight"][3, 4] = torch.inf
        save_file(weights, source / "model.safetensors")
        (source / "config.json").write_text((model / "config.json").read_text())
        with pytest.raises(CheckpointError, match=r"cannot quantize model\.layers\.0\.mlp\.up_proj\.weight in .* NaN"):
            converted(source, tmp_path / "out")
        assert not list((tmp_path / "out").glob("[!.]*"))


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="/proc says how much memory a process had at most")
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path):
    """Converting files of 64 MiB takes less than one file's size more memory than converting a tiny one."""
    tiny = save_family(tmp_path / "tiny", "qwen3")
    (large := tmp_path / "large").mkdir()
    (large / "config.json").write_text((tiny / "config.json").read_text())
    for file in range(2):
        matrix = torch.ones(4096, 8192, dtype=torch.bfloat16)
        save_file({f"model.layers.{file}.mlp.down_proj.weight": matrix}, large / f"model-{file}.safetensors")

    code = (
        "import sys\n"
        "from fuligo.cli import main\n"
        "for model in sys.argv[1:]:\n"
        "    assert main(['convert', 'fp8', '--model-dir', model, '--save-dir', f'{model}-fp8']) == 0\n"
        "    print(open('/proc/self/status').read())\n"
    )
    command = [sys.executable, "-c", code, str(tiny), str(large)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    of_tiny, of_large = (1024 * int(kib) for kib in re.findall(r"VmHWM:\s*(\d+) kB", shown))
    assert of_large - of_tiny < 64 * 2**20


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_and_a_weight_sync(family: str, tmp_path: Path):
    """transformers loads the result (on a CPU as values times scales), and a weight sync of transformers' model, whose experts are fused,
    gives the bytes of the files."""
    model = save_family(tmp_path / "model", family)
    converted(model, tmp_path / "fp8")
    held, blocks = tensors_of(tmp_path / "fp8"), STRATEGIES["block"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", dtype=torch.float32)
    meant = {
        name: dequantize(tensor, held[f"{name}_scale_inv"], blocks) if f"{name}_scale_inv" in held else tensor.float()
        for name, tensor in held.items()
        if not name.endswith("_scale_inv")
    }
    assert differing(dict(checkpoint_weights(loaded.state_dict().items())), meant) == []

    engine = EngineQuantization.read(tmp_path / "fp8")
    assert engine is not None and engine.quantization == blocks
    trainer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    sent = quantized_weights(named_weights(trainer, dtype=torch.bfloat16), engine)
    assert differing(dict(sent), held) == []


def test_a_sync_by_disk_is_an_fp8_checkpoint(model: Path, tmp_path: Path):
    """Run a sender's whole path, including its counter."""
    converted(model, tmp_path / "fp8")
    (sent := tmp_path / "sent").mkdir()
    engine_format = EngineFormat(quantization=EngineQuantization.read(tmp_path / "fp8"))
    weights = named_weights(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), dtype=torch.bfloat16)
    manifest = WeightSender(engine_format).send(weights, WeightTarget("disk", version=1, bucket_bytes=2**18, directory=str(sent)))
    held = tensors_of(tmp_path / "fp8")
    assert differing(tensors_of(sent), held) == []
    assert (manifest.num_tensors, manifest.num_bytes) == (len(held), sum(tensor.nbytes for tensor in held.values()))
