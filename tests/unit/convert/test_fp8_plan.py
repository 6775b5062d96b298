"""Plan of `fuligo convert fp8`: arguments, tensors to quantize, and refusals before any work."""

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fuligo.convert.fp8_plan import describe, plan_hf_to_fp8
from fuligo.errors import ConfigError
from fuligo.formats.quantization import is_quantized_matrix
from fuligo.models.registry import read_architecture
from tests import tiny
from tests.fp8 import FAMILIES, save_family

REPOSITORY = Path(__file__).parents[3]
GLM45 = REPOSITORY / "examples" / "glm4.5-355b" / "model"


def arguments(*more: str, model: Path = GLM45, save: Path | str = "out") -> list[str]:
    return ["--model-dir", str(model), "--save-dir", str(save), *more]


def refusal(*more: str, model: Path, save: Path | str = "out") -> str:
    with pytest.raises(ConfigError) as refused:
        plan_hf_to_fp8(arguments(*more, model=model, save=save))
    return str(refused.value)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("dense"), "qwen3")


@pytest.fixture
def model(dense: Path, tmp_path: Path) -> Path:
    """Return a copy of the model that a test may damage."""
    return Path(shutil.copytree(dense, tmp_path / "model"))


class TestWithoutWeights:
    """A plan needs only a config.json."""

    def test_every_parameter_is_quantized_or_kept(self):
        plan = plan_hf_to_fp8(arguments("--strategy", "block", "--block-size", "128", "128", "--max-workers", "4"))
        architecture = read_architecture(GLM45)
        assert plan.num_quantized + plan.num_kept == architecture.num_parameters + architecture.num_mtp_parameters
        assert architecture.head is not None
        assert plan.num_kept > architecture.embedding.num_parameters + architecture.head.num_parameters
        assert (plan.quantization.block_size, plan.num_workers) == ((128, 128), 4)

    def test_half_the_bytes_and_a_scale_a_block(self):
        plan = plan_hf_to_fp8(arguments())
        assert plan.target_bytes == plan.num_quantized + plan.num_quantized // 128**2 * 4 + 2 * plan.num_kept
        assert "block: one scale per block of 128 x 128" in "\n".join(describe(plan))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_names_in_files_and_the_shapes_of_the_family_agree(family: str, tmp_path: Path):
    """Tensors to quantize are chosen by name if there are files and by kind of parameter if there is only a config.json; both agree."""
    model = save_family(tmp_path / "model", family)
    (tmp_path / "bare").mkdir()
    shutil.copy(model / "config.json", tmp_path / "bare")
    of_files, estimate = plan_hf_to_fp8(arguments(model=model)), plan_hf_to_fp8(arguments(model=tmp_path / "bare"))
    mtp_layers = read_architecture(model).mtp_layers  # transformers saves none of them
    mtp = [sum(part.num_parameters for layer in mtp_layers for part in layer.parts if part.quantizable is kind) for kind in (True, False)]
    buffers = sum(layer.num_buffer_elements for layer in read_architecture(model).layers)
    assert of_files.num_quantized == estimate.num_quantized - mtp[0]
    assert of_files.num_kept == estimate.num_kept - mtp[1] + buffers


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.shared_expert_gate.weight",
        "model.layers.92.eh_proj.weight",
        "model.layers.92.shared_head.head.weight",
        "model.layers.92.embed_tokens.weight",
        "model.mtp_layers.0.input_proj.weight",
        "model.layers.3.self_attn.indexer.weights_proj.weight",
    ],
)
def test_these_matrices_stay_as_they_are(name: str):
    assert not is_quantized_matrix(name, (256, 256))


@pytest.mark.parametrize(
    ("name", "shape"), [("model.layers.0.self_attn.q_proj.bias", (256,)), ("model.layers.0.self_attn.q_proj.weight", (256,))]
)
def test_vectors_stay_as_they_are(name: str, shape: tuple[int, ...]):
    assert not is_quantized_matrix(name, shape)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["--strategy", "channel", "--block-size", "128", "128"], "--block-size has no effect with --strategy channel"),
        (["--block-size", "0", "128"], "both numbers must be at least 1"),
        (["--max-workers", "0"], "--max-workers 0 is invalid: it must be at least 1"),
        (["--save-dir", str(GLM45)], "is the model's own directory"),
        (["--save-dir", str(GLM45 / "fp8")], "are nested"),
        (["--save-dir", str(GLM45.parent)], "are nested"),
        (["--model-dir", "nowhere"], "has no config.json"),
        (["--model-dir", str(GLM45.with_name("model-fp8"))], "is already quantized"),
    ],
)
def test_what_does_not_go_together(given: list[str], problem: str):
    assert problem in refusal(*given, model=GLM45)


@pytest.mark.parametrize("wrong", [["--strategy", "blocks"], ["--block-size", "128"], ["--workers", "4"], ["--max-workers", "many"]])
def test_wrong_options_are_named(wrong: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        plan_hf_to_fp8(arguments(*wrong))
    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err


class TestUnfitSources:
    def test_a_missing_file(self, tmp_path: Path):
        model = save_family(tmp_path / "model", "qwen3", num_files=3)
        next(iter(sorted(model.glob("*.safetensors")))).unlink()
        assert "model-00001-of-0000" in refusal(model=model)

    def test_a_truncated_file(self, model: Path):
        file = model / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        assert "is truncated" in refusal(model=model)

    def test_tensors_in_fp8_under_a_config_that_does_not_say_so(self, model: Path):
        weights = load_file(model / "model.safetensors")
        name = "model.layers.0.mlp.up_proj.weight"
        save_file({**weights, name: weights[name].to(torch.float8_e4m3fn)}, model / "model.safetensors")
        assert "already quantized" in refusal(model=model)

    def test_matrices_that_are_no_floats(self, model: Path):
        weights = load_file(model / "model.safetensors")
        name = "model.layers.0.mlp.up_proj.weight"
        save_file({**weights, name: weights[name].to(torch.int8)}, model / "model.safetensors")
        assert f"{name} (I8): the dtype must be one of BF16, F16, F32" in refusal(model=model)

    def test_blocks_that_span_two_joined_matrices(self, tmp_path: Path):
        """Two key-value heads of 16 have 32 rows; engines stack queries, keys and values along rows."""
        model = tiny.save_checkpoint(tmp_path / "model")
        assert "blocks of 128 rows do not divide model.layers.0.self_attn.k_proj.weight [32, 64]" in refusal(model=model)
        for fitting in (["--strategy", "channel"], ["--block-size", "32", "32"]):
            assert plan_hf_to_fp8(arguments(*fitting, model=model)).num_quantized

    def test_a_scale_a_tensor_with_latent_attention(self, tmp_path: Path):
        model = save_family(tmp_path / "model", "deepseek_v3")
        assert "SGLang fuses q_a_proj and kv_a_proj_with_mqa" in refusal("--strategy", "tensor", model=model)


class TestUnfitTargets:
    def test_something_else_is_there(self, dense: Path, tmp_path: Path):
        (tmp_path / "notes.txt").write_text("mine")
        assert "holds notes.txt; use a new or empty directory" in refusal(model=dense, save=tmp_path)

    def test_another_conversion_is_there(self, dense: Path, tmp_path: Path):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
        assert "holds the config.json of another model" in refusal(model=dense, save=tmp_path)

    def test_a_file(self, dense: Path, tmp_path: Path):
        (tmp_path / "out").write_text("")
        assert "is a file" in refusal(model=dense, save=tmp_path / "out")

    def test_a_full_disk(self, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        usage = namedtuple("usage", ["free"])
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(free=1000))
        assert "but only 0.0 MiB are free" in refusal(model=dense, save=tmp_path / "out")
