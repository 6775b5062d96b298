"""Trainer side of a weight sync: splits a stream of named tensors into buckets and sends them to the engines.

This runs on every trainer rank. Rank 0 sends weights; with --colocate, so does every rank that shares its GPU with an engine.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from traceback import clear_frames

from fuligo.engines.host import own_address
from fuligo.errors import EngineError
from fuligo.formats.buckets import Bucket, Changes, Counted, NamedTensors, cut_into_buckets, send_each
from fuligo.formats.checkpoint_files import checkpoint_weights
from fuligo.formats.fp8 import quantized_weights
from fuligo.formats.payload import shared_payload
from fuligo.formats.private import filling
from fuligo.formats.weight_manifest import AS_CHECKPOINT, EngineAddress, EngineFormat, Undelivered, WeightManifest, WeightTarget
from fuligo.weights.broadcast import BroadcastGroup
from fuligo.weights.colocated import TrainerRanks, own_engine, post_payloads


class WeightSender:
    """Sender of weights on a trainer rank. Between syncs it keeps the process group, and digests of the tensors that the engines have."""

    def __init__(self, engine_format: EngineFormat = AS_CHECKPOINT, ranks: TrainerRanks = TrainerRanks()) -> None:  # noqa: B008  # frozen
        self._format = engine_format
        self._ranks = ranks
        self._group: BroadcastGroup | None = None
        self._changes = Changes()
        self._receivers: tuple[EngineAddress, ...] = ()
        """Engines that have all tensors recorded in `_changes`."""

    def send(self, named_weights: NamedTensors, target: WeightTarget) -> WeightManifest | Undelivered | None:
        """Send the weights to `target`; return when all engines that this rank sends to have loaded them (disk: when they are written).

        Args:
            named_weights: Hugging Face names and full tensors, each once; consumed to the end, bucket by bucket, on every rank.

        Returns:
            Manifest of the sync; `Undelivered` with the reason if an engine, of this or another rank, did not load the weights; None on a
            rank that sends nothing.
        """
        sent = self._send(named_weights, target)
        if any(engine.trainer_ranks for engine in target.engines):
            reasons = self._ranks.gather(sent.reason if isinstance(sent, Undelivered) else "")
            if any(reasons):
                self._changes.forget()
                return Undelivered("; ".join(dict.fromkeys(filter(None, reasons))))  # all ranks of an engine report the same error
        return sent

    def _send(self, named_weights: NamedTensors, target: WeightTarget) -> WeightManifest | Undelivered | None:
        """Do this rank's part of `send`, regardless of failures on other ranks."""
        if self._ranks.rank > 0 and (target.transport != "tensor" or own_engine(target.engines, self._ranks) is None):
            for _ in named_weights:
                pass  # gathering is a collective
            return None
        counted = Counted(with_checksum=target.with_checksum and self._ranks.rank == 0)
        used = ((name, weight) for name, weight in named_weights if not name.startswith(self._format.left_out))
        quantization, experts = self._format.quantization, self._format.experts
        as_stored = checkpoint_weights(used, experts) if quantization is None else quantized_weights(used, quantization, experts)
        weights = counted.observe(as_stored)
        if target.changes_only:
            if self._receivers != target.engines:  # new engines have no weights yet
                self._changes.forget()
                self._receivers = target.engines
            weights = self._changes.only(weights)
        buckets = counted.observe_sent(cut_into_buckets(weights, target.bucket_bytes))
        try:
            if target.transport == "disk":
                with filling(Path(target.directory)):
                    _write_shards(buckets, Path(target.directory))
            else:
                send_each(buckets, self._bucket_sender(target))
        except EngineError as error:
            self._changes.forget()
            self.close()
            clear_frames(error.__traceback__)  # the frames keep the bucket alive in a reference cycle until the next garbage collection
            return Undelivered(str(error))
        except BaseException:
            self._changes.forget()
            if self._group is not None and self._group.is_streaming:
                self.close()  # engines wait for the next bucket
            raise
        return replace(counted.manifest(target.version), unconfirmed=self._unconfirmed(target))

    def _unconfirmed(self, target: WeightTarget) -> tuple[str, ...]:
        """Return the URLs of engines in which a rank other than the first may have failed to load the weights, unnoticed.

        SGLang answers a call with the outcome of an engine's first rank. Streams report every rank, and an error while a rank loads shared
        memory ends the engine.
        """
        if target.transport == "tensor" or (self._group is not None and self._group.streams):
            return ()
        return tuple(engine.url for engine in target.engines if engine.num_ranks > 1)

    def close(self) -> None:
        """Leave the process group of a broadcast, if there is one."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _bucket_sender(self, target: WeightTarget) -> Callable[[Bucket, bool], None]:
        """Return a function (bucket, is_last) that sends a bucket; the last carries the version, which engines report from then on."""
        if target.transport != "tensor":
            # Join the group with the first bucket, so that an engine that fails to join does not interrupt the gathering of weights.
            return lambda bucket, is_last: self._group_with(target).broadcast(bucket, target.version, is_last=is_last)
        # Each rank shares a bucket's memory with the engine on its GPU, and rank 0 also with engines that have separate GPUs.
        own = own_engine(target.engines, self._ranks)
        apart = tuple(engine for engine in target.engines if not engine.trainer_ranks) if self._ranks.rank == 0 else ()

        def share(bucket: Bucket, is_last: bool) -> None:
            version = target.version if is_last else None
            if own is not None:
                own.share(bucket, version)
            if apart:
                _share(bucket, apart, version)

        return share

    def _group_with(self, target: WeightTarget) -> BroadcastGroup:
        """Return the process group with the target's engines; create a new one if the engines have changed."""
        if self._group is not None and self._group.engines != target.engines:
            self.close()
        if self._group is None:
            assert target.transport in ("gloo", "nccl")
            urls = [engine.url for engine in target.engines]
            try:
                host = own_address(urls)
            except OSError as error:
                raise EngineError(
                    f"cannot reach one of the engines {', '.join(urls)} from this machine: {error}; check their addresses and the network"
                ) from error
            self._group = BroadcastGroup(target.engines, target.transport, host)
        return self._group


def _share(bucket: Bucket, engines: tuple[EngineAddress, ...], version: int | None) -> None:
    """Share a bucket's memory with every rank of every engine. Raises EngineError if an engine does not load it."""
    num_receivers = sum(engine.num_ranks for engine in engines)
    with ExitStack() as shared:
        if any(tensor.is_cuda for _, tensor in bucket):  # a CUDA IPC handle can be opened only once
            # All ranks of an engine except the first set these biases to zero in place (SGLang 0.5.15.post1, `models/gpt_oss.py`).
            copies = [
                [(name, tensor.clone() if name.endswith(".experts.down_proj_bias") else tensor) for name, tensor in bucket]
                for _ in range(num_receivers)
            ]
            payloads = [shared.enter_context(shared_payload(copy)) for copy in copies]
        else:
            payloads = [shared.enter_context(shared_payload(bucket))] * num_receivers
        waiting = iter(payloads)
        asyncio.run(post_payloads([(engine, [next(waiting) for _ in range(engine.num_ranks)]) for engine in engines], version))


def _write_shards(buckets: Iterator[Bucket], directory: Path) -> None:
    """Write one safetensors file per bucket, and the index of a Hugging Face directory."""
    from safetensors.torch import save_file

    weight_map: dict[str, str] = {}
    num_bytes = 0
    for number, bucket in enumerate(buckets):
        shard = f"model-{number:05d}.safetensors"
        save_file({name: tensor.contiguous().cpu() for name, tensor in bucket}, directory / shard, metadata={"format": "pt"})
        weight_map |= {name: shard for name, _ in bucket}
        num_bytes += sum(tensor.nbytes for _, tensor in bucket)
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
