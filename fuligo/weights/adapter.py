"""Sync of a LoRA adapter to engines that know adapters by name (SGLang), and the record of what was sent."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from fuligo.engines.client import EngineClient
from fuligo.engines.shared_client import RunRequests, SharedEngineClient
from fuligo.errors import EngineError
from fuligo.formats.adapter_config import AdapterConfig, adapted_weight
from fuligo.formats.payload import named_payload
from fuligo.formats.weight_manifest import AdapterPayload, EngineAddress, Undelivered, WeightManifest, WeightTarget, weights_checksum


def send_adapter(tensors: list[tuple[str, Tensor]], config: AdapterConfig, target: WeightTarget) -> WeightManifest | Undelivered:
    """Load an adapter into all engines of `target` in place of the one before.

    Args:
        tensors: CPU tensors by their names in PEFT's files

    Returns:
        What was sent, or why an engine did not load it.

    Raises:
        WeightSyncError: shared memory is full
    """
    names = {adapted_weight(name).removesuffix(".weight").rpartition(".")[2] for name, _ in tensors}
    # SGLang 0.5.15.post1 scales by alpha / r and does not read use_rslora.
    fields = {"peft_type": "LORA", "r": config.rank, "lora_alpha": config.scaling * config.rank, "target_modules": sorted(names)}
    with ThreadPoolExecutor(1, thread_name_prefix="digest") as thread:
        digesting = thread.submit(weights_checksum, tensors)  # while the payload is written; both leave Python's lock
        with named_payload(tensors) as payload:
            digest = digesting.result()
            try:
                asyncio.run(_load(AdapterPayload(fields, payload, digest.checksum), target))
            except EngineError as error:
                return Undelivered(str(error))
    num_bytes = digest.num_bytes
    return WeightManifest(
        target.version, digest.num_tensors, num_bytes, None, num_bytes_sent=num_bytes, adapter=digest.checksum, trained=digest
    )


def _client(engine: EngineAddress) -> EngineClient:
    if engine.run is None:
        return EngineClient(engine.url, engine.keys, number=engine.number)
    return SharedEngineClient(engine.url, RunRequests(engine.run), keys=engine.keys, number=engine.number)


async def _load(adapter: AdapterPayload, target: WeightTarget) -> None:
    clients = [_client(engine) for engine in target.engines]
    try:
        outcomes = await asyncio.gather(*(client.load_adapter(adapter, target.version) for client in clients), return_exceptions=True)
    finally:
        await asyncio.gather(*(client.close() for client in clients))
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
