"""Checks that the engines' weights equal those that the trainer sent (--check-weight-update-equal)."""

import asyncio
from dataclasses import dataclass

import numpy as np

from fuligo.engines.engine import InferenceEngine
from fuligo.engines.generation import SamplingParams
from fuligo.engines.group import EngineGroup
from fuligo.errors import WeightSyncError
from fuligo.formats.weight_manifest import WeightManifest, WeightsDigest
from fuligo.types import SampleStatus, TrainSample
from fuligo.weights.source import WeightSource

NUM_PROBES = 8
"""Number of prompts per engine that `LogprobProof` samples from."""


class ChecksumProof:
    """Check of the engines' weights by a checksum over all tensors, for engines that keep tensors as they were sent."""

    async def check(self, engines: EngineGroup, manifest: WeightManifest) -> None:
        """Check every engine after a weight sync. Raises WeightSyncError if an engine's weights differ from those that were sent."""
        sent = WeightsDigest(manifest.num_tensors, manifest.num_bytes, manifest.checksum or "")
        for url, held in await engines.weights_checksums():
            if held != sent:
                raise WeightSyncError(
                    f"--check-weight-update-equal: engine {url} holds {held}, but the trainer sent {sent}; restart the run from the last "
                    "checkpoint"
                )


@dataclass(slots=True, frozen=True)
class LogprobProof:
    """Check of the engines' weights by log-probabilities: each engine continues random prompts, and the trainer scores the same tokens.

    SGLang fuses, splits and renames tensors, so bytes cannot be compared. A wrong tensor on any rank changes the log-probabilities of most
    tokens far more than rounding does. If prefill and decode are disaggregated, the router chooses the pairs of engines that answer, and a
    restarted engine is checked at the next weight sync.
    """

    trainer: WeightSource
    temperature: float
    vocab_size: int
    tolerance: float
    """Largest accepted mean absolute difference of log-probabilities, in nats; rounding in both data types explains this much."""
    num_replicas: int = 1
    """Number of the trainer's data-parallel replicas; each must score at least one probe."""
    num_tokens: int = 32
    """Number of tokens of a probe's prompt, and of its response."""

    async def check(self, engines: EngineGroup, manifest: WeightManifest) -> None:
        """Check the engines. Raises WeightSyncError if log-probabilities differ from the trainer's by more than `tolerance` on average."""
        num_probes = max(NUM_PROBES * (len(engines.clients) if engines.split else 1), self.num_replicas)
        for client in engines.answering:
            samples = await self._sample(client, manifest.version, num_probes)
            scored = await self.trainer.logprobs(samples)
            sampled = np.concatenate([sample.engine_logprobs for sample in samples])
            difference = float(np.abs(np.concatenate(scored) - sampled).mean())
            if not difference <= self.tolerance:
                raise WeightSyncError(
                    f"--check-weight-update-equal: after version {manifest.version} was sent, log-probabilities of engine {client.url} and "
                    f"of the trainer differ by {difference:.2g} on average over {len(sampled)} tokens; rounding explains at most "
                    f"{self.tolerance:g}. The engine has other weights, or computes another model; check its flags and the model's "
                    "checkpoint."
                )

    async def _sample(self, client: InferenceEngine, version: int, num_probes: int) -> list[TrainSample]:
        prompts = np.random.default_rng(version).integers(0, self.vocab_size, (num_probes, self.num_tokens), dtype=np.int32)
        params = SamplingParams(max_new_tokens=self.num_tokens, temperature=self.temperature, ignore_eos=True)
        calls = [client.generate(prompt, params, rid=f"proof-{version}-{number}") for number, prompt in enumerate(prompts)]
        return [
            TrainSample(
                index=number,
                group_index=number,
                tokens=np.concatenate([prompt, generation.output_ids]),
                prompt_length=len(prompt),
                loss_mask=np.ones(len(generation.output_ids), np.int8),
                reward=0.0,
                engine_logprobs=generation.logprobs,
                versions=np.full(len(generation.output_ids), version, np.int32),
                mask_sum=float(len(generation.output_ids)),
                status=SampleStatus.TRUNCATED,
            )
            for number, (prompt, generation) in enumerate(zip(prompts, await asyncio.gather(*calls)))
        ]


EqualityProof = ChecksumProof | LogprobProof
