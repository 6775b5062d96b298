"""gpt-oss: what differs from other MoE models in training, sync and adapters; parity of its passes is tested with the other families."""

import contextlib
import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig

from fuligo.cli.convert import main as convert
from fuligo.config.command_line import parse
from fuligo.config.topology import engine_groups
from fuligo.convert.fp8_plan import plan_hf_to_fp8
from fuligo.convert.mxfp4 import mxfp4_to_bf16
from fuligo.engines.embedded.model import EngineModel
from fuligo.errors import CheckpointError, ConfigError
from fuligo.formats.adapter_config import AdapterConfig
from fuligo.formats.checkpoint_files import TENSORS, record_dtypes
from fuligo.formats.hugging_face import is_trainable, read_config_json
from fuligo.formats.quantization import EngineQuantization
from fuligo.formats.weight_manifest import EngineAddress, EngineFormat, WeightTarget
from fuligo.layout.flops import forward_flops
from fuligo.models.adapter import add_adapter, linear_layers
from fuligo.models.registry import architecture_of, names_of, stored_experts
from fuligo.planner.memory.engine import engine_memory
from fuligo.planner.subject import read_subject
from fuligo.trainer.torch_backend.model import Policy, check_packed_forward, load_model
from fuligo.trainer.torch_backend.weights import named_weights
from fuligo.weights import colocated, senders
from fuligo.weights.senders import WeightSender
from tests import tiny

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_checkpoint(tmp_path_factory.mktemp("gpt_oss"), "gpt_oss")


def test_engines_are_sent_the_tensors_of_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    """Experts of a layer are one tensor, [experts, inputs, outputs], with gate and up projection interleaved."""
    engine_format = EngineFormat(experts=stored_experts(read_config_json(checkpoint)))
    target = WeightTarget("disk", version=1, bucket_bytes=2**30, directory=str(tmp_path))
    WeightSender(engine_format).send(named_weights(load_model(checkpoint)), target)
    given, sent = load_file(checkpoint / "model.safetensors"), load_file(tmp_path / "model-00000.safetensors")
    assert sent.keys() == given.keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in given.items())


class OnGpu:
    """Tensor on a GPU, whose memory an engine's rank opens."""

    is_cuda = True

    def clone(self) -> "OnGpu":
        return OnGpu()


class Client:
    """Client of an engine that keeps what each rank was given."""

    received: ClassVar[list[dict[str, OnGpu]]] = []

    def __init__(self, *_: object, **__: object) -> None: ...

    async def update_weights_from_tensor(self, payloads: list[list[tuple[str, OnGpu]]], _version: int) -> None:
        self.received.extend(dict(payload) for payload in payloads)

    async def close(self) -> None: ...


def test_ranks_that_share_memory_get_biases_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank sets them to zero where they lie. On CPUs, what a rank writes is private to it."""
    bias, matrix = "model.layers.0.mlp.experts.down_proj_bias", "model.layers.0.mlp.experts.down_proj"
    monkeypatch.setattr(colocated, "client_of", Client)
    monkeypatch.setattr(senders, "shared_payload", contextlib.nullcontext)
    monkeypatch.setattr(Client, "received", [])
    bucket: Any = [(bias, OnGpu()), (matrix, OnGpu())]
    senders._share(bucket, (EngineAddress("http://host:30000", num_ranks=2),), 1)
    first, second = Client.received
    assert len({id(each[bias]) for each in (first, second, dict(bucket))}) == 3
    assert first[matrix] is second[matrix]


def test_rows_may_share_prefixes(checkpoint: Path) -> None:
    check_packed_forward(Policy(load_model(checkpoint), temperature=1.0, chunk_tokens=64), shares_prefixes=True)


def test_an_adapter_takes_the_linear_layers_and_no_experts(checkpoint: Path) -> None:
    model = load_model(checkpoint)
    assert {name.rpartition(".")[2] for name in linear_layers(model)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with pytest.raises(ConfigError, match="transposed matrices and biases"):
        add_adapter(model, AdapterConfig(rank=2, alpha=4.0, adapts_experts=True), seed=0)


PUBLISHED: dict[str, Any] = read_config_json(EXAMPLES / "gpt-oss-20b" / "model")


@pytest.mark.parametrize(("layers", "experts", "parameters"), [(24, 32, 20_914_757_184), (36, 128, 116_829_156_672)])
def test_both_published_models_have_their_parameters(layers: int, experts: int, parameters: int) -> None:
    """The model card (arXiv 2508.10925, table 1) has 20.91 and 116.83 billion."""
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    config = PUBLISHED | {"num_hidden_layers": layers, "num_local_experts": experts, "layer_types": kinds}
    assert architecture_of(config).num_parameters == parameters


@pytest.mark.parametrize("kinds", [None, ["full_attention", "sliding_attention", "full_attention"]])
def test_windows_are_those_of_transformers(kinds: list[str] | None) -> None:
    theirs = GptOssConfig(num_hidden_layers=3, layer_types=kinds, sliding_window=96)
    layers = architecture_of(PUBLISHED | {"num_hidden_layers": 3, "layer_types": kinds, "sliding_window": 96}).layers
    assert [layer.window for layer in layers] == [96 if kind == "sliding_attention" else None for kind in theirs.layer_types]


def test_layers_with_windows_cost_no_more_for_longer_samples() -> None:
    forward = forward_flops(architecture_of(PUBLISHED))
    assert forward.per_pair == forward.per_window_pair == 12 * 4 * 64 * 64
    per_token, length = forward.per_token, 10_000
    assert forward.sequence(length, length**2, 0) - per_token * length == forward.per_pair * (length**2 / 2 + 128 * length)
    assert forward.sequence(100, 100**2, 0) - per_token * 100 == 2 * forward.per_pair * 100**2 / 2


def test_what_transformers_does_not_read_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"swiglu_limit is 5; only 7 is supported"):
        architecture_of(PUBLISHED | {"swiglu_limit": 5.0})
    with pytest.raises(ConfigError, match=r"Megatron.*use --train-backend torch"):
        names_of(PUBLISHED)


@pytest.fixture(scope="module")
def mxfp4(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint as published: random experts of four bits, everything else in bfloat16."""
    directory, gen = tmp_path_factory.mktemp("mxfp4"), torch.Generator().manual_seed(0)
    for file in checkpoint.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if name.endswith("_proj"):
            num_experts, inputs, outputs = tensor.shape
            shape = (num_experts, outputs, inputs // 32)
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=gen)
            tensors[f"{name}_scales"] = torch.randint(118, 125, shape, dtype=torch.uint8, generator=gen)
        else:
            tensors[name] = tensor.bfloat16()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = read_config_json(checkpoint) | {"quantization_config": {"quant_method": "mxfp4"}}
    del config["dtype"]  # the published file names none
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def dequantized(blocks: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """Return [experts, inputs, outputs] as the format defines them: e2m1 numbers, the lower half of a byte first, times 2^(s - 127)."""
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    bits = np.stack([blocks.numpy() & 15, blocks.numpy() >> 4], axis=-1).reshape(*blocks.shape[:3], 32)
    numbers = np.where(bits & 8, -1.0, 1.0) * e2m1[bits & 7] * 2.0 ** (scales.numpy()[..., None].astype(float) - 127)
    return numbers.reshape(*blocks.shape[:2], -1).swapaxes(1, 2)


def test_mxfp4_becomes_bfloat16_as_the_format_defines_it(mxfp4: Path, tmp_path: Path) -> None:
    assert convert(["mxfp4-to-bf16", "--hf-checkpoint", str(mxfp4), "--save", str(tmp_path / "bf16")]) == 0
    stored, written = load_file(mxfp4 / "model.safetensors"), {}
    for file in (tmp_path / "bf16").glob("*.safetensors"):
        written |= load_file(file)
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    for name, tensor in written.items():
        if name in stored:
            assert torch.equal(tensor, stored[name])
        else:  # four bits and a power of two are exact in bfloat16
            assert (tensor.double().numpy() == dequantized(stored[f"{name}_blocks"], stored[f"{name}_scales"])).all()
    config = read_config_json(tmp_path / "bf16")
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    with pytest.raises(CheckpointError, match="states no quantization"):
        mxfp4_to_bf16(tmp_path / "bf16", tmp_path / "again")

    for directory in (mxfp4, tmp_path / "bf16"):  # loaded by itself, it is the same
        model = load_model(directory)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert all(torch.equal(parameter, written[name].float()) for name, parameter in model.named_parameters())
    served = EngineModel(str(mxfp4), torch.device("cpu"), torch.float32).module
    assert all(torch.equal(parameter, written[name].float()) for name, parameter in served.named_parameters())
    record_dtypes(mxfp4, tmp_path)
    assert json.loads((tmp_path / TENSORS).read_text()) == dict.fromkeys(written, "BF16")


def test_mxfp4_is_trained_from_but_not_synced_to(mxfp4: Path, checkpoint: Path, tmp_path: Path) -> None:
    assert is_trainable(mxfp4) and architecture_of(read_config_json(mxfp4)).is_mxfp4
    with pytest.raises(ConfigError, match=r"let them serve bfloat16: fuligo convert mxfp4-to-bf16 --hf-checkpoint .* --save DIR"):
        EngineQuantization.read(mxfp4)
    with pytest.raises(ConfigError, match="experts of a gpt_oss model are not supported in FP8"):
        plan_hf_to_fp8(["--model-dir", str(checkpoint), "--save-dir", str(tmp_path / "fp8")])


def test_scales_that_do_not_belong_to_their_blocks_are_refused(mxfp4: Path, tmp_path: Path) -> None:
    tensors = load_file(mxfp4 / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((mxfp4 / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj has blocks .* and scales absent"):
        mxfp4_to_bf16(tmp_path, tmp_path / "out")


def test_engines_keep_a_share_of_the_tokens_of_layers_with_windows() -> None:
    """SGLang 0.5.15.post1 gives these layers a pool of their own, with `swa_full_tokens_ratio` 0.8 of the tokens."""
    given = ["--config", str(EXAMPLES / "gpt-oss-20b" / "config.yaml")]
    caches: list[tuple[int, int]] = []
    for more in ([], ["--sglang-disable-hybrid-swa-memory"]):
        subject = read_subject(parse([*given, *more]).config, "h100-80")
        memory = engine_memory(engine_groups(subject.config)[0], subject.rollout_architecture, subject.gpu, 0, subject.config)
        caches.append((memory.bytes_per_token, memory.kv_tokens))
    heads_bytes = 2 * (8 // 2) * 64 * 2
    assert [size for size, _ in caches] == [round(heads_bytes * (12 + 0.8 * 12)), heads_bytes * 24]
    assert caches[0][1] > caches[1][1]
