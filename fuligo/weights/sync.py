"""Weight sync on the driver, which holds versions and handles but never a tensor."""

import asyncio
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fuligo.engines.backend import SharedDevices
from fuligo.engines.engine import InferenceEngine
from fuligo.engines.group import WAIT_S, EngineGroup
from fuligo.errors import EngineError, TrainerError, WeightSyncError
from fuligo.formats.private import filling, scratch_directory
from fuligo.formats.weight_manifest import EngineAddress, Transport, WeightManifest, WeightTarget
from fuligo.weights.adapter import AdapterRecord
from fuligo.weights.proof import ChecksumProof, EqualityProof
from fuligo.weights.source import WeightSource

logger = logging.getLogger(__name__)
FEW_CHANGED = 0.1
"""Share of the elements of adapted matrices; where a merge changes fewer, most of the adapter's update is smaller than a rounding step."""


@dataclass(slots=True, frozen=True)
class WeightSyncSettings:
    """Settings of the weight sync."""

    transport: Transport
    bucket_bytes: int
    changes_only: bool
    """Send only tensors that changed since the last sync."""
    model_files: Path
    """disk: Hugging Face directory whose config and tokenizer are copied next to the weights."""
    scratch: Path
    """disk: parent of the directories in which weights are written for the engines."""
    trainer_ranks: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """tensor: trainer ranks that share GPUs with each engine, by engine number; see `EngineAddress`."""


class WeightSync:
    """Weight sync that sends the trainer's weights to the engines and counts `policy_version`: pause, send, flush, check, resume.

    Args:
        proof: checks after each weight sync that the engines hold what was sent
        devices: None if trainer and engines have their own
        adapters: record of each version's adapter; None without one
    """

    def __init__(
        self,
        trainer: WeightSource,
        engines: EngineGroup,
        settings: WeightSyncSettings,
        *,
        version: int = 0,
        proof: EqualityProof | None = None,
        devices: SharedDevices | None = None,
        adapters: AdapterRecord | None = None,
    ) -> None:
        self._trainer = trainer
        self._engines = engines
        self._settings = settings
        self._proof = proof
        self._devices = devices
        self._adapters = adapters
        self._sending = asyncio.Lock()
        self._num_loads: dict[str, int] = {}
        """Weight updates that each engine counted when the last sync to it was complete, by URL."""
        self._num_updates = -1
        """The trainer's `num_updates` when `version` was sent."""
        self._warned_of_rounding = False
        self.metrics: dict[str, float] = {}
        """Metrics of the last sync."""
        self.version = version

    async def sync(self) -> int:
        """Send the weights as the next version, and return it.

        If an engine is lost on the way (--use-fault-tolerance), the others get all weights again.

        Raises:
            EngineError: a live engine did not load them
            WeightSyncError: an engine reports a version or weights other than those sent; the run must end
        """
        await self._send_to_all(self.version + 1)
        return self.version

    async def resync(self) -> None:
        """Send the weights under the current version, at the start and after a resume."""
        await self._send_to_all(self.version)

    async def sync_restarted(self, engine: InferenceEngine) -> bool:
        """Send the current version to all restarted engines and return them to service.

        Returns:
            False if the trainer has changed its weights since, or has failed: `engine` gets them at the next weight sync.

        Raises:
            EngineError: `engine` did not load them
        """
        async with self._sending:
            while engine in self._engines.joining and self._still_current():
                waiting = list(self._engines.joining)
                try:
                    await self._send(EngineGroup(waiting, split=self._engines.split), self.version)
                except EngineError:
                    others = EngineGroup([other for other in waiting if other is not engine], membership=self._engines.membership)
                    if not await others.drop_lost():
                        raise
                except TrainerError:
                    return False  # its supervision ends the run, or restarts the trainer
                except WeightSyncError:
                    if self._still_current():
                        raise
                else:
                    if self._still_current():  # else newer weights may have been sent, under the version of the old ones
                        await self._admit(waiting)
            return engine in self._engines.clients

    def _still_current(self) -> bool:
        """Return whether the trainer's weights are those of `version`: it may begin to train whenever this waits."""
        return self._trainer.num_updates == self._num_updates

    async def _send_to_all(self, version: int) -> None:
        async with self._sending:
            num_updates = self._trainer.num_updates
            while True:
                everyone = await self._available_engines()
                try:
                    await self._send(everyone, version)
                    break
                except EngineError as error:
                    if not await everyone.drop_lost():
                        raise
                    logger.warning("resending version %d without the engines that were lost: %s", version, error)
            self.version, self._num_updates = version, num_updates
            await self._admit(everyone.clients)

    async def _admit(self, engines: Sequence[InferenceEngine]) -> None:
        """Return restarted engines to service, unless they were lost again."""
        await self._engines.admit([engine for engine in self._engines.joining if engine in engines])

    async def _available_engines(self) -> EngineGroup:
        """Return the engines that serve or wait for weights; if all are restarting, wait for the first."""
        own = self._engines
        while not own.clients and not own.joining:  # the fleet's supervision raises if none comes back
            if self._devices is not None:
                await self._devices.make_room()
            await asyncio.sleep(WAIT_S)
        return own.everyone

    async def _send(self, engines: EngineGroup, version: int) -> None:
        """Send a version. The change is atomic for rollouts: no token is sampled between the first bucket and the check."""
        await engines.pause("abort")
        await self._check_untouched(engines)
        if self._settings.transport == "disk":
            manifest = await self._send_by_disk(engines, version)
        else:
            manifest = await self._trainer.send_weights(self._target(engines, version, directory=""))
        await self._check_received(engines, manifest)
        if self._devices is not None:
            await self._devices.to_engines()
        await engines.resume()
        if self._proof is not None:
            await self._proof.check(engines, manifest)
        self._report(manifest)
        self._record(manifest)

    def _record(self, manifest: WeightManifest) -> None:
        if self._adapters is None or manifest.trained is None:
            return
        if manifest.version > self.version:
            self._adapters.add(manifest.version, manifest.trained)
        else:
            self._adapters.check(manifest.version, manifest.trained)

    def _report(self, manifest: WeightManifest) -> None:
        """Log what was sent; warn once if rounding undoes most of a merged adapter."""
        logger.info(
            "synced version %d: %d tensors, %d bytes, %d of them sent%s",
            manifest.version,
            manifest.num_tensors,
            manifest.num_bytes,
            manifest.num_bytes_sent,
            "" if manifest.adapter is None else f", adapter {manifest.adapter}",
        )
        self.metrics = {}
        if manifest.merged.num_elements:
            share = manifest.merged.share_changed
            self.metrics = {"train/lora_merged_share": share}
            if share < FEW_CHANGED and not self._warned_of_rounding:
                self._warned_of_rounding = True
                logger.warning(
                    "version %d: merged and rounded for the engines, the adapter changes %.1f%% of the elements of the matrices that it "
                    "adapts; the engines sample from nearly the base model. Sync the adapter itself (--lora-sync adapter), or let the "
                    "engines compute in float32",
                    manifest.version,
                    100 * share,
                )

    async def _check_untouched(self, engines: EngineGroup) -> None:
        """Check that the engines have loaded nothing since the last sync: foreign weights under the same version would go unnoticed.

        The embedded engine counts its updates; SGLang does not.
        """
        known = {url: self._num_loads.pop(url) for url in engines.urls if url in self._num_loads}
        if not known:
            return
        for url, info in await engines.model_infos():
            if info.num_weight_loads is not None and info.num_weight_loads > known.get(url, info.num_weight_loads):
                raise WeightSyncError(
                    f"engine {url} has loaded weights that this run did not send since version {self.version}: samples since then may be "
                    "wrong; find out who has its key, then resume from a checkpoint of that version or earlier"
                )

    async def _check_received(self, engines: EngineGroup, manifest: WeightManifest) -> None:
        """Check that every engine reports the version that was sent, and the adapter if one was sent by itself."""
        version = manifest.version
        for url, info in await engines.model_infos():
            if info.weight_version != version:
                raise WeightSyncError(
                    f"engine {url} reports weight version {info.weight_version} after version {version} was sent; "
                    "it must not be sampled from; restart the run from the last checkpoint"
                )
            if manifest.adapter is not None and info.adapter_digest != manifest.adapter:
                raise WeightSyncError(
                    f"engine {url} holds adapter {info.adapter_digest} after adapter {manifest.adapter} was sent as version {version}; "
                    "it must not be sampled from; restart the run from the last checkpoint"
                )
            if info.num_weight_loads is not None:
                self._num_loads[url] = info.num_weight_loads

    async def _send_by_disk(self, engines: EngineGroup, version: int) -> WeightManifest:
        with scratch_directory(self._settings.scratch) as directory:
            with filling(directory):
                for file in self._settings.model_files.glob("*.json"):
                    if not file.name.endswith(".index.json"):
                        shutil.copy(file, directory)
            manifest = await self._trainer.send_weights(self._target(engines, version, str(directory)))
            await engines.update_weights_from_disk(str(directory), version=version)
        return manifest

    def _target(self, engines: EngineGroup, version: int, directory: str) -> WeightTarget:
        return WeightTarget(
            transport=self._settings.transport,
            version=version,
            bucket_bytes=self._settings.bucket_bytes,
            engines=tuple(self._address(client) for client in engines.clients),
            directory=directory,
            changes_only=self._settings.changes_only,
            with_checksum=isinstance(self._proof, ChecksumProof),
        )

    def _address(self, client: InferenceEngine) -> EngineAddress:
        ranks = () if client.number is None else self._settings.trainer_ranks.get(client.number, ())
        return EngineAddress(client.url, client.num_ranks, client.start, client.number, client.keys, ranks, client.run)


class VersionCounter:
    """Replacement for `WeightSync` in runs without engines or trainer, which only counts versions."""

    def __init__(self, version: int = 0) -> None:
        self.metrics: dict[str, float] = {}
        """Metrics of the last sync."""
        self.version = version

    async def sync(self) -> int:
        self.version += 1
        return self.version

    async def resync(self) -> None:
        return
