"""Sync of a LoRA adapter to engines that load adapters by name (SGLang), and the record of the adapters that were sent."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

from fuligo.engines.shared_client import client_of
from fuligo.errors import EngineError, WeightSyncError
from fuligo.formats.adapter_config import AdapterConfig, adapted_weight
from fuligo.formats.payload import NamedTensors, SharedCopies
from fuligo.formats.weight_manifest import (
    DIGEST_SCHEME,
    AdapterPayload,
    Undelivered,
    WeightManifest,
    WeightsDigest,
    WeightTarget,
    weights_checksum,
)
from fuligo.observability.jsonl import JsonLines, read_json_lines


def send_adapter(tensors: NamedTensors, config: AdapterConfig, target: WeightTarget, copies: SharedCopies) -> WeightManifest | Undelivered:
    """Load an adapter into all engines of `target`, replacing the previous one.

    Args:
        tensors: the adapter's tensors, under their names in PEFT's files.
        copies: shared memory for the tensors; pass the same object at every sync, and to no other sender.

    Returns:
        Manifest of the sync; `Undelivered` with the reason if an engine did not load the adapter.
    """
    names = {adapted_weight(name).removesuffix(".weight").rpartition(".")[2] for name, _ in tensors}
    # SGLang 0.5.15.post1 scales by alpha / r and does not read use_rslora.
    fields = {"peft_type": "LORA", "r": config.rank, "lora_alpha": config.scaling * config.rank, "target_modules": sorted(names)}
    try:
        digest = asyncio.run(_load(tensors, fields, target, copies))
    except EngineError as error:
        return Undelivered(str(error))
    num_bytes = digest.num_bytes
    return WeightManifest(
        target.version, digest.num_tensors, num_bytes, None, num_bytes_sent=num_bytes, adapter=digest.checksum, trained=digest
    )


async def _load(tensors: NamedTensors, fields: dict[str, Any], target: WeightTarget, copies: SharedCopies) -> WeightsDigest:
    """Load the adapter into the engines and return its digest.

    The tensors are written while engines unload their previous adapters; the digest is computed while they load the new one.
    """
    # An engine outside of this sync may still read the file of an earlier one.
    receivers = frozenset((engine.url, engine.start) for engine in target.engines)
    written = asyncio.ensure_future(asyncio.to_thread(copies.write, tensors, receivers))

    async def payload() -> str:
        return (await written)[1]

    async def digest() -> WeightsDigest:
        return await asyncio.to_thread(weights_checksum, (await written)[0])

    digesting = asyncio.ensure_future(digest())

    async def checksum() -> str:
        return (await digesting).checksum

    adapter = AdapterPayload(fields, asyncio.ensure_future(payload()), asyncio.ensure_future(checksum()))
    clients = [client_of(engine) for engine in target.engines]
    loads = [client.load_adapter(adapter, target.version) for client in clients]
    try:
        outcomes = await asyncio.gather(adapter.tensors, adapter.digest, *loads, return_exceptions=True)
    finally:
        await asyncio.gather(*(client.close() for client in clients))
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return await digesting


class AdapterRecord:
    """File `adapters.jsonl`: for each policy version that engines received (as in the `versions` of samples), the digest of its adapter.

    Unless the run `continues` from a checkpoint, the file of an earlier attempt, which trained no step, is deleted.
    """

    def __init__(self, path: Path, *, continues: bool) -> None:
        self._path = path
        if not continues:
            path.unlink(missing_ok=True)
        records = read_json_lines(path) if path.exists() else []
        self._known = {record["version"]: WeightsDigest(**record["adapter"]) for record in records}

    def add(self, version: int, adapter: WeightsDigest) -> None:
        """Record a new version; remove records of this and later versions, left from before the run resumed from an earlier checkpoint."""
        with closing(JsonLines(self._path)) as file:
            if any(known >= version for known in self._known):
                file.cut_back(lambda record: record["version"] < version)
            file.append({"version": version, "adapter": adapter._asdict()})
        self._known = {known: digest for known, digest in self._known.items() if known < version} | {version: adapter}

    def check(self, version: int, adapter: WeightsDigest) -> None:
        """Check that a version that is sent again, for example after a resume, has the recorded adapter; record it if it is new.

        Digests of another data type (after a change of --precision) or hash function are not compared. If this is the only version on
        record, it is replaced: an attempt with another checkpoint ended before its first step and left no samples. Raises WeightSyncError
        if the recorded adapter is another one.
        """
        known = self._known.get(version)
        if known is None or self._known.keys() == {version}:
            self.add(version, adapter)
        elif known != adapter and known.num_bytes == adapter.num_bytes and known.checksum.startswith(DIGEST_SCHEME):
            raise WeightSyncError(
                f"cannot resume: {self._path} has adapter {known.checksum} as policy version {version}, but the checkpoint has "
                f"{adapter.checksum}, so the recorded samples come from another adapter; resume from a checkpoint of this run, or use "
                "another --run-dir"
            )
