"""Weight sync to an engine on the trainer's GPUs: each trainer rank shares memory of its GPU, and the first of them calls the engine.

SGLang takes one payload per tensor-parallel rank (`serialized_named_tensors`), and a CUDA IPC handle is valid only on the GPU on which it
was created. The payload for an engine's rank therefore comes from the trainer rank on the same GPU.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from fuligo.engines.shared_client import client_of
from fuligo.errors import EngineError
from fuligo.formats.buckets import Bucket
from fuligo.formats.payload import shared_payload
from fuligo.formats.weight_manifest import EngineAddress

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class TrainerRanks:
    """This trainer rank and the process group of all trainer ranks."""

    rank: int = 0
    objects: dist.ProcessGroup | None = None
    """Gloo group of all ranks for Python objects; None if there is only one rank."""

    def gather(self, text: str) -> list[str]:
        """Return the texts of all ranks, in order of rank, on every rank. A collective."""
        if self.objects is None:
            return [text]
        texts = [""] * dist.get_world_size(self.objects)
        dist.all_gather_object(texts, text, group=self.objects)
        return texts


@dataclass(slots=True, frozen=True)
class OwnEngine:
    """Engine that shares GPUs with this trainer rank and possibly others."""

    engine: EngineAddress
    ranks: TrainerRanks

    @property
    def caller(self) -> int:
        """Trainer rank that calls the engine."""
        return self.engine.trainer_ranks[0]

    def share(self, bucket: Bucket, version: int | None) -> None:
        """Share one bucket with the engine; return when the engine has loaded it. Call it on all trainer ranks of the engine.

        The tensors are the same on all these ranks, each on the rank's GPU; only the last bucket has a version. Raises EngineError on all
        these ranks if the engine refused the bucket or did not answer.
        """
        with shared_payload(bucket) as payload:
            if self.ranks.rank == self.caller:
                self._call(payload, version)
            else:
                self._send(payload, self.caller)
                if refusal := self._receive(self.caller):
                    raise EngineError(refusal)

    def _call(self, payload: str, version: int | None) -> None:
        others = [rank for rank in self.engine.trainer_ranks if rank != self.caller]
        payloads = [payload, *(self._receive(rank) for rank in others)]
        refusal = ""
        try:
            asyncio.run(post_payloads([(self.engine, payloads)], version))
        except EngineError as error:
            refusal = str(error)
            raise
        finally:
            for rank in others:
                self._send(refusal, rank)

    def _send(self, text: str, rank: int) -> None:
        dist.send_object_list([text], dst=rank, group=self.ranks.objects)

    def _receive(self, rank: int) -> str:
        received = [""]
        dist.recv_object_list(received, src=rank, group=self.ranks.objects)
        return received[0]


async def post_payloads(payloads: Sequence[tuple[EngineAddress, list[str]]], version: int | None) -> None:
    """Load a bucket into engines, given a payload for each of their ranks. Raises EngineError if an engine does not load it."""
    clients = [client_of(engine) for engine, _ in payloads]
    try:
        calls = [client.update_weights_from_tensor(own, version) for client, (_, own) in zip(clients, payloads)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    finally:
        await asyncio.gather(*(client.close() for client in clients))
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


def own_engine(engines: tuple[EngineAddress, ...], ranks: TrainerRanks) -> OwnEngine | None:
    """Return the engine that shares a GPU with this trainer rank; None if there is none."""
    return next((OwnEngine(engine, ranks) for engine in engines if ranks.rank in engine.trainer_ranks), None)
