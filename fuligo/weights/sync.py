"""Driver's side of the weight sync: versions and engines, but no tensors."""

import asyncio
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fuligo.engines.backend import SharedDevices
from fuligo.engines.engine import InferenceEngine, PauseMode
from fuligo.engines.group import WAIT_S, EngineGroup
from fuligo.errors import EngineError, TrainerError, WeightSyncError
from fuligo.formats.private import filling, scratch_directory
from fuligo.formats.weight_manifest import EngineAddress, Transport, WeightManifest, WeightTarget
from fuligo.weights.adapter import AdapterRecord
from fuligo.weights.proof import ChecksumProof, EqualityProof
from fuligo.weights.source import WeightSource

logger = logging.getLogger(__name__)
FEW_CHANGED = 0.1
"""Smallest share of the elements of adapted matrices that a merge should change; below it, most of the update is lost to rounding."""


@dataclass(slots=True, frozen=True)
class WeightSyncSettings:
    """Settings of the weight sync."""

    transport: Transport
    bucket_bytes: int
    changes_only: bool
    """True to send only tensors that changed since the last sync."""
    model_files: Path
    """Hugging Face directory whose JSON files (config, tokenizer) are copied next to the weights (disk transport)."""
    scratch: Path
    """Parent of the directories in which weights are written for the engines (disk transport)."""
    trainer_ranks: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Trainer ranks that share GPUs with each engine, by engine number (tensor transport); see `EngineAddress`."""
    pause: PauseMode = "abort"
    """Mode in which engines pause: `abort`, or `in_place` to keep requests in flight."""


class WeightSync:
    """Weight sync that sends the trainer's weights to the engines and counts the policy version.

    A sync pauses the engines, sends the weights, checks that they were received, and resumes the engines.

    Args:
        version: policy version of the trainer's weights.
        proof: check after each sync that the engines hold the weights that were sent; None: no check.
        devices: devices that trainer and engines share; None if they have separate devices.
        adapters: record of each version's adapter; None to keep no record.
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
        """Number of weight updates that each engine, by URL, reported after its last sync."""
        self._num_updates = -1
        """Trainer's `num_updates` when `version` was sent."""
        self._warned_of_rounding = False
        self._warned_of_unconfirmed_ranks = False
        self.metrics: dict[str, float] = {}
        """Metrics of the last sync."""
        self.version = version

    async def sync(self) -> int:
        """Send the weights as the next version, and return the version.

        If an engine is lost during the sync (--use-fault-tolerance), all weights are sent again to the other engines. Raises EngineError if
        a live engine did not load the weights, and WeightSyncError, which must end the run, if one reports weights that were not sent.
        """
        await self._send_to_all(self.version + 1)
        return self.version

    async def resync(self) -> None:
        """Send the weights as the current version, at the start of a run or after a resume."""
        await self._send_to_all(self.version)

    async def sync_restarted(self, engine: InferenceEngine) -> bool:
        """Send the current version to all restarted engines, and return whether `engine` is back in service.

        It is not if the trainer has since changed its weights, or has failed; it then gets weights at the next sync. Raises EngineError if
        `engine` did not load the weights, and WeightSyncError as `sync` does.
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
                    return False  # the trainer's supervision ends the run or restarts the trainer
                except WeightSyncError:
                    if self._still_current():
                        raise
                else:
                    if self._still_current():  # otherwise newer weights may have been sent as the old version
                        await self._admit(waiting)
            return engine in self._engines.clients

    def _still_current(self) -> bool:
        """Return whether the trainer's weights are still those of `version`. Training may begin whenever the driver awaits."""
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
        """Put the restarted engines among `engines` back into service, unless they were lost again."""
        await self._engines.admit([engine for engine in self._engines.joining if engine in engines])

    async def _available_engines(self) -> EngineGroup:
        """Return the engines that serve requests or wait for weights; if all engines are restarting, wait until one is ready."""
        own = self._engines
        while not own.clients and not own.joining:  # the engines' supervision raises if none comes back
            if self._devices is not None:
                await self._devices.make_room()
            await asyncio.sleep(WAIT_S)
        return own.everyone

    async def _send(self, engines: EngineGroup, version: int) -> None:
        """Send a version. For rollouts the change is atomic: no token is sampled between the first bucket and the check."""
        await engines.pause(self._settings.pause)
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
        """Log the sync; warn once of errors that it may have missed, and once if rounding undoes most of a merged adapter."""
        logger.info(
            "synced version %d: %d tensors, %d bytes, %d of them sent%s",
            manifest.version,
            manifest.num_tensors,
            manifest.num_bytes,
            manifest.num_bytes_sent,
            "" if manifest.adapter is None else f", adapter {manifest.adapter}",
        )
        if manifest.unconfirmed and self._proof is None and not self._warned_of_unconfirmed_ranks:
            self._warned_of_unconfirmed_ranks = True
            logger.warning(
                "%s: SGLang reports only whether the first rank of an engine loaded the weights; an error on another rank is only in the "
                "engine's log; set --check-weight-update-equal to compare each sync on all ranks",
                ", ".join(manifest.unconfirmed),
            )
        self.metrics = {}
        if manifest.merged.num_elements:
            share = manifest.merged.share_changed
            self.metrics = {"train/lora_merged_share": share}
            if share < FEW_CHANGED and not self._warned_of_rounding:
                self._warned_of_rounding = True
                logger.warning(
                    "version %d: after rounding, the merged adapter changes only %.1f%% of the elements of the adapted matrices: engines "
                    "sample from nearly the base model; sync the adapter itself (--lora-sync adapter), or let engines compute in float32",
                    manifest.version,
                    100 * share,
                )

    async def _check_untouched(self, engines: EngineGroup) -> None:
        """Check that the engines have loaded no weights since the last sync, because weights from elsewhere could have the same version.

        The embedded engine counts its weight updates; SGLang does not. Raises WeightSyncError if an engine has loaded other weights.
        """
        known = {url: self._num_loads.pop(url) for url in engines.urls if url in self._num_loads}
        if not known:
            return
        for url, info in await engines.model_infos():
            if info.num_weight_loads is not None and info.num_weight_loads > known.get(url, info.num_weight_loads):
                raise WeightSyncError(
                    f"engine {url} has loaded weights since version {self.version} that this run did not send, so later samples may be "
                    "wrong; find out who else has the engine's key, then resume from a checkpoint of that version or earlier"
                )

    async def _check_received(self, engines: EngineGroup, manifest: WeightManifest) -> None:
        """Check that every engine reports the version that was sent, and the adapter if only an adapter was sent."""
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
    """Replacement for `WeightSync` in runs without engines or without trainer; it only counts versions."""

    def __init__(self, version: int = 0) -> None:
        self.metrics: dict[str, float] = {}
        """Always empty."""
        self.version = version

    async def sync(self) -> int:
        self.version += 1
        return self.version

    async def resync(self) -> None:
        return
