"""Random models of newer families, served by a real SGLang engine and held by the trainer: their scores, and what a weight sync changes."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from fuligo.engines.client import EngineClient
from fuligo.engines.generation import SamplingParams
from fuligo.engines.sglang.server import ServerSettings, SGLangServer
from fuligo.formats.weight_manifest import EngineAddress, EngineFormat, Undelivered, WeightManifest, WeightTarget
from fuligo.models.registry import experts_in
from fuligo.models.transformers_types import model_class, register_types
from fuligo.trainer.objective import LossSettings
from fuligo.trainer.packing import Capacity
from fuligo.trainer.ranks.settings import LearningRateSchedule, OptimizerSettings
from fuligo.trainer.ranks.world import World
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from fuligo.trainer.torch_backend.weights import named_weights, weight_tensors
from fuligo.trainer.torch_backend.worker import TorchRankWorker
from fuligo.types import TrainSample
from fuligo.weights.senders import WeightSender
from tests import shares, tiny, tiny_vision

DEEPSEEK_KEYS = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
GPT_OSS_KEYS = {"swiglu_limit": 7.0}
MINIMAX_KEYS = {"use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_routing_bias": True}
"""Keys of published config.json files that SGLang reads and transformers does not write."""
QWEN_PROCESSOR = {
    "preprocessor_config.json": {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
}
GEMMA_TOKENS = {
    **{"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"},
    **{"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"},
}
"""Keys of tokenizer_config.json that its processor reads."""
GEMMA_CONSTANTS = (
    r"(v_norm\.weight|router\.norm\.weight|root_size|pre_projection_norm\.weight|vision_tower\..*layer_scalar|gradient_clipping|softcap)$"
)
GEMMA_PROCESSOR = {
    "processor_config.json": {
        "processor_class": "Gemma4Processor",
        "image_processor": {"image_processor_type": "Gemma4ImageProcessor"},
        "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
        "video_processor": {"video_processor_type": "Gemma4VideoProcessor"},
    }
}
QWEN3_5_IN_FLOAT32 = ("linear_attn.A_log", "linear_attn.norm.weight")
BUCKET_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class ServedFamily:
    """Random model of a family."""

    shape: Mapping[str, Any]
    """Arguments of transformers' config."""
    served: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the language model in config.json that transformers does not write."""
    whole: Mapping[str, Any] | None = None
    """Arguments of the config of a model with towers, besides its language model, which has the `shape`."""
    processor: Mapping[str, Any] = field(default_factory=dict)
    """Files of the processor of images, without which SGLang does not start a model with towers."""
    constants: str = "^$"
    """Regular expression of the names of SGLang's tensors that no checkpoint has, or that only layers without own keys have."""
    in_float32: tuple[str, ...] = ()
    """Ends of the names of weights that published checkpoints have in float32."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """SGLang's arguments."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """SGLang's environment variables."""
    is_trained: bool = True
    """The torch trainer can train it; False: transformers' own forward pass takes its place."""
    lengths: tuple[int, ...] = (700, 90, 333, 64, 517, 250)
    """Tokens of the sequences; some are longer than a window."""
    prompt_length: int = 60
    num_new_tokens: int = 48
    """Sampled after the first `prompt_length` tokens of each sequence."""

    def save(self, directory: Path, family: str, *, device: str, dtype: torch.dtype) -> Path:
        """Save a Hugging Face directory with random weights and a tokenizer that decodes none of its larger ids; return `directory`."""
        register_types()
        torch.manual_seed(0)
        tokens = {"pad_token_id": tiny.PAD_ID, "bos_token_id": tiny.BOS_ID, "eos_token_id": tiny.EOS_ID}
        config = AutoConfig.for_model(family, **self._arguments(tokens))
        with torch.device(device):
            model = model_class(config).from_config(config, dtype=dtype)
            tiny.spread(model)
        for name, tensor in (*model.named_buffers(), *model.named_parameters()):
            if name.endswith(("e_score_correction_bias", *self.in_float32)):  # as in published checkpoints
                tensor.data = tensor.float()
        model.generation_config.eos_token_id = tiny.EOS_ID
        if self.whole is None:
            tiny.save_as_published(model, directory, family)
        else:  # published Qwen3.5 has all experts of a layer in one tensor, as the model in memory
            model.save_pretrained(directory, save_original_format=False)
        self._complete(directory / "config.json")
        (tiny if self.whole is None else tiny_vision).tokenizer().save_pretrained(directory)
        if family == "gemma4":
            file = directory / "tokenizer_config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | GEMMA_TOKENS))
        for name, content in self.processor.items():
            (directory / name).write_text(json.dumps(content))
        return directory

    def _complete(self, config: Path) -> None:
        """Add `served` to config.json, or to its part of the language model."""
        written = json.loads(config.read_text())
        (written if self.whole is None else written["text_config"]).update(self.served)
        config.write_text(json.dumps(written))

    def _arguments(self, tokens: Mapping[str, int]) -> dict[str, Any]:
        """Return the arguments of transformers' config; those of the language model in a part of its own if there is a tower."""
        language = {**tokens, **self.shape}
        if self.whole is None:
            return language
        tied = {"tie_word_embeddings": language["tie_word_embeddings"]} if "tie_word_embeddings" in language else {}
        return {**tiny_vision.token_ids(), **tied, **self.whole, "text_config": language}

    def sequences(self) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        first = 3 if self.whole is None else len(tiny_vision.tokenizer())  # no tokens of images
        return [rng.integers(first, self.shape["vocab_size"], length, dtype=np.int32) for length in self.lengths]


class Trained(Protocol):
    """Model of the trainer."""

    def logprobs(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return log-probabilities [T - 1] of all tokens but the first of each sequence."""
        ...

    def tensors(self) -> dict[str, Tensor]: ...

    def send(self, target: WeightTarget) -> WeightManifest | Undelivered | None: ...


class TorchTrained:
    """The torch trainer's worker."""

    def __init__(self, checkpoint: Path, device: str, *, is_exact: bool) -> None:
        settings = TorchTrainerSettings(
            hf_checkpoint=checkpoint,
            initial_weights=checkpoint,
            optimizer=OptimizerSettings(LearningRateSchedule(peak=1e-3)),
            loss=LossSettings(),
            capacity=Capacity(max_tokens=4096),
            device="cuda" if device == "cuda" else "cpu",
            precision="fp32" if is_exact else "bf16",
            takes_images=False,
            engine_format=engine_format(checkpoint),
        )
        self._worker = TorchRankWorker(settings, World(device=torch.device(device)))

    def logprobs(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        found = self._worker.logprobs(shares.to_score(self._worker, [_sample(ids) for ids in sequences]))
        assert found is not None
        return found

    def tensors(self) -> dict[str, Tensor]:
        return weight_tensors(self._worker.policy.model)

    def send(self, target: WeightTarget) -> WeightManifest | Undelivered | None:
        return self._worker.send_weights(target)


class TransformersTrained:
    """A model that only transformers computes, one sequence at a time."""

    def __init__(self, checkpoint: Path, device: str, *, is_exact: bool) -> None:
        dtype = torch.float32 if is_exact else torch.bfloat16
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, attn_implementation="eager").to(device).eval()
        self._sender = WeightSender(engine_format(checkpoint))

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        found: list[np.ndarray] = []
        for ids in sequences:
            row = torch.from_numpy(ids).long().to(self._model.device)
            scores = self._model(row[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
            found.append(scores.gather(1, row[1:, None])[:, 0].cpu().numpy())
        return found

    def tensors(self) -> dict[str, Tensor]:
        return weight_tensors(self._model)

    def send(self, target: WeightTarget) -> WeightManifest | Undelivered | None:
        return self._sender.send(named_weights(self._model), target)


def engine_format(checkpoint: Path) -> EngineFormat:
    return EngineFormat(experts=experts_in(checkpoint))


def _sample(ids: np.ndarray) -> TrainSample:
    length = len(ids) - 1
    zeros = np.zeros(length, np.float32)
    return TrainSample(0, 0, ids, 1, np.ones(length, np.int8), 0.0, zeros, np.zeros(length, np.int32), float(length))


@torch.no_grad()
def change(tensors: Mapping[str, Tensor], *, seed: int) -> None:
    """Change every weight by about a third of the tensor's size, and a scalar by more than the rounding of bfloat16, to such values."""
    for number, name in enumerate(sorted(tensors)):
        local = _local(tensors[name])
        if not local.is_floating_point():
            continue
        generator = torch.Generator(local.device).manual_seed(1000 * seed + number)
        noise = torch.randn(local.shape, generator=generator, device=local.device)
        size = local.float().square().mean().sqrt().item() or 0.1
        local.copy_((local + 0.3 * size * (noise + 0.1 * noise.sign())).to(torch.bfloat16))


def _local(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


@dataclass(slots=True)
class Scores:
    """Mean absolute differences from the float32 model, in nats."""

    prefill: float
    """Difference of the engine, for tokens that it was given."""
    decode: float
    """Difference of the engine, for tokens that it sampled."""
    noise: float
    """Difference of the trainer's own bfloat16 model, for all of these tokens."""
    exact: np.ndarray
    """Log-probabilities of the given tokens by the float32 model."""

    def __str__(self) -> str:
        return f"prefill {self.prefill:.2e}, decode {self.decode:.2e}, the trainer's own bf16 {self.noise:.2e}"


@dataclass(slots=True)
class Comparison:
    """Result of `compare`."""

    loaded: Scores
    synced: Scores
    """After all weights have changed."""
    moved: float
    """Mean absolute change of the float32 model's log-probabilities by that."""
    num_tensors: int = 0
    """Tensors of SGLang's model; 0: not counted."""
    unchanged: Sequence[str] = ()
    """Names of those that the sync did not change."""
    not_restored: Sequence[str] = ()
    """Tensors that differ from those first loaded after the trainer has sent the first weights again."""
    seconds: dict[str, float] = field(default_factory=dict)


async def compare(family: ServedFamily, settings: ServerSettings, *, counts_tensors: bool) -> Comparison:
    """Start an engine and the trainer's models on `settings.model_path` and compare them, before and after a sync of changed weights.

    Args:
        counts_tensors: ask SGLang for the checksum of each tensor, which it computes on GPUs only.
    """
    started, seconds = time.monotonic(), {}
    server = SGLangServer(settings)
    client = EngineClient(server.url, settings.keys, timeout_s=240.0)

    def lap(name: str) -> None:
        seconds[name] = round(time.monotonic() - started, 1)
        print(f"  {seconds[name]:6.1f} s {name}", flush=True)

    try:
        checkpoint, device = Path(settings.model_path), settings.device
        exact, half = await asyncio.to_thread(_trained, family, checkpoint, device)
        lap("trainer loaded")
        await server.wait_ready()
        lap("engine ready")
        first = await _checksums(client) if counts_tensors else {}
        loaded = await _scores(family, client, exact, half)
        lap(f"scored: {loaded}")
        kept = {name: _local(tensor).to(_stored_dtype(family, name), copy=True) for name, tensor in half.tensors().items()}
        for model in {id(exact): exact, id(half): half}.values():
            change(model.tensors(), seed=1)
        await _sync(client, settings, half, version=1)
        lap("changed and synced")
        second = await _checksums(client) if counts_tensors else {}
        synced = await _scores(family, client, exact, half)
        lap(f"scored: {synced}")
        result = Comparison(loaded, synced, float(np.abs(synced.exact - loaded.exact).mean()), len(first), seconds=seconds)
        if counts_tensors:
            for name, tensor in half.tensors().items():
                _local(tensor).copy_(kept[name])
            await _sync(client, settings, half, version=2)
            third = await _checksums(client)
            lap("first weights synced again")
            result.unchanged = [name for name in first if first[name] == second[name]]
            result.not_restored = [name for name in first if first[name] != third[name]]
        return result
    finally:
        await client.close()
        await server.stop()


def _trained(family: ServedFamily, checkpoint: Path, device: str) -> tuple[Trained, Trained]:
    """Return the trainer's models of float32 and of bfloat16; on a CPU both are the one of float32."""
    build = TorchTrained if family.is_trained else TransformersTrained
    exact = build(checkpoint, device, is_exact=True)
    return exact, exact if device == "cpu" else build(checkpoint, device, is_exact=False)


async def _scores(family: ServedFamily, client: EngineClient, exact: Trained, half: Trained) -> Scores:
    given = family.sequences()
    prefilled = await asyncio.gather(*(client.score(ids, 1, rid=f"given-{number}") for number, ids in enumerate(given)))
    params = SamplingParams(max_new_tokens=family.num_new_tokens, temperature=1.0, ignore_eos=True)
    prompts = [ids[: family.prompt_length] for ids in given]
    sampled = await asyncio.gather(*(client.generate(ids, params, rid=f"sampled-{number}") for number, ids in enumerate(prompts)))
    sequences = [*given, *(np.concatenate([ids, of.output_ids]) for ids, of in zip(prompts, sampled, strict=True))]
    right = await asyncio.to_thread(exact.logprobs, sequences)
    rounded = right if half is exact else await asyncio.to_thread(half.logprobs, sequences)
    of_given, of_sampled = right[: len(given)], [each[-family.num_new_tokens :] for each in right[len(given) :]]
    return Scores(
        _difference(prefilled, of_given),
        _difference([generation.logprobs for generation in sampled], of_sampled),
        _difference(rounded, right),
        np.concatenate(of_given),
    )


def _stored_dtype(family: ServedFamily, name: str) -> torch.dtype:
    return torch.float32 if name.endswith(family.in_float32) else torch.bfloat16


def _difference(found: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> float:
    return float(np.abs(np.concatenate(list(found)) - np.concatenate(list(right))).mean())


async def _sync(client: EngineClient, settings: ServerSettings, trained: Trained, *, version: int) -> None:
    """Send the weights through shared memory, as a trainer on the engine's GPU does."""
    target = WeightTarget("tensor", version, BUCKET_BYTES, engines=(EngineAddress(client.url, keys=settings.keys),))
    await client.pause("abort")
    manifest = await asyncio.to_thread(trained.send, target)
    assert isinstance(manifest, WeightManifest), manifest
    await client.resume()
    assert (await client.model_info()).weight_version == version


async def _checksums(client: EngineClient) -> dict[str, str]:
    """Return SGLang's checksum of each tensor that it has loaded or made of loaded ones, tables of positions left out."""
    answer = await client._call("/weights_checker", {"action": "checksum"})
    [rank] = answer["ranks"]
    return {name: value for name, value in rank["checksums"].items() if not name.endswith(("cos_sin_cache", "inv_freq"))}
