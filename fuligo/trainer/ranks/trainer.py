"""Trainer that the loop drives, on ranks in this process, in other processes or on Ray."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from fuligo.errors import EngineError, TrainerError
from fuligo.formats.weight_manifest import Undelivered, WeightManifest, WeightTarget
from fuligo.trainer.objective import value_metrics
from fuligo.trainer.packing import Cost
from fuligo.trainer.precision_noise import MAX_TOKENS, Unmeasured, mean_difference, noise_samples
from fuligo.trainer.ranks import supervision
from fuligo.trainer.ranks.commands import Command, R, SharedCommand, call, call_rank
from fuligo.trainer.ranks.connected import start_process
from fuligo.trainer.ranks.executor import RankExecutor
from fuligo.trainer.ranks.handle import END_SAVE, InProcessRank, RankHandle
from fuligo.trainer.ranks.rank import Rank
from fuligo.trainer.ranks.settings import TrainerSettings
from fuligo.trainer.ranks.standby import StandbyRanks
from fuligo.trainer.ranks.torchrun import connect_ranks, torchrun_place
from fuligo.trainer.ranks.worker import RankWorker
from fuligo.trainer.shares import score_shares, skip_metrics, step_shares
from fuligo.types import FloatArray, StepResult, TrainBatch, TrainSample

logger = logging.getLogger(__name__)

T = TypeVar("T")
S = TypeVar("S")
START_TIMEOUT_S = 120.0
"""Seconds for rank 0 to open the rendezvous, including the import of torch."""


class RankedTrainer:
    """Trainer that runs each call as a command on all ranks. Implements `trainer.protocol.Trainer`.

    Micro-batches are planned here, so that each data-parallel replica is sent only the samples it computes.

    Args:
        start_ranks: function that starts the ranks and returns their handles in order.
    """

    def __init__(self, settings: TrainerSettings, start_ranks: Callable[[], Awaitable[Sequence[RankHandle]]]) -> None:
        self.ranks: Sequence[RankHandle] = ()
        """Handles of the ranks, in order; empty before `load`."""
        self.num_updates = 0
        self._settings = settings
        self._start_ranks = start_ranks
        self._balance_by: Cost | None = None
        """`RankWorker.balance_by` of rank 0; None before `load`."""
        self._is_first_rollout = True
        """True until the first rollout or `restore`: resumed runs measure no noise, so their metrics equal an uninterrupted run's."""
        self._commands = asyncio.Lock()
        self._failed = False
        self._phase = "during start"

    async def load(self) -> None:
        try:
            self.ranks = await self._start_ranks()
            rendezvous = None
            if len(self.ranks) > 1:
                start = call_rank(Rank.start)
                opened = self.ranks[0].run(SharedCommand(start))
                rendezvous = await supervision.finish(start.name, self.ranks[:1], [opened], timeout_s=START_TIMEOUT_S)
        except BaseException:
            self._failed = True
            raise
        self._balance_by = await self._run(call_rank(Rank.load, self._settings, rendezvous))

    async def warm_up(self) -> None:
        """Compile the kernels of a step with made-up samples. Weights, optimizer and random state stay as they are."""
        await self._run(call(RankWorker.warm_up))

    async def score(self, samples: list[TrainSample]) -> list[TrainSample]:
        if not samples or not self._settings.scores:
            return samples
        scores = await self._run_by_replica([call(RankWorker.score, share) for share in await self._planned(score_shares, samples)])
        return [of_sample.filled_into(sample) for of_sample, sample in zip(scores, samples, strict=True)]

    async def logprobs(self, samples: list[TrainSample]) -> list[FloatArray]:
        """Return the [R] log-probabilities of each sample's response tokens under the current policy. At least one sample is needed."""
        return await self._run_by_replica([call(RankWorker.logprobs, share) for share in await self._planned(score_shares, samples)])

    async def train(self, batch: TrainBatch) -> StepResult:
        self.num_updates += 1
        noise = await self._precision_noise(batch)
        skipped = skip_metrics(batch) if self._settings.skips_zero_advantages else {}
        if skipped.get("train/skipped_share") == 1:
            skipped |= await self._difference(batch)
        result = await self._run_by_replica([call(RankWorker.train, steps) for steps in await self._planned(step_shares, batch)])
        return replace(result, metrics=result.metrics | noise | value_metrics(batch.samples) | skipped)

    async def send_weights(self, target: WeightTarget) -> WeightManifest:
        sent = await self._run(call(RankWorker.send_weights, target))
        if isinstance(sent, Undelivered):
            raise EngineError(sent.reason)
        return sent

    async def save(self, directory: Path) -> None:
        await self._run(call(RankWorker.save, _for_ranks(directory)))

    async def begin_save(self, directory: Path) -> None:
        await self._run(call_rank(Rank.begin_save, _for_ranks(directory)))

    async def end_save(self) -> None:
        writer = self.ranks[:1]  # rank 0's save is done when all ranks have written
        calls = [rank.run(SharedCommand(END_SAVE)) for rank in writer]
        await supervision.finish(END_SAVE.name, writer, calls, timeout_s=self._settings.command_timeout_s)

    async def restore(self, directory: Path) -> None:
        self._is_first_rollout = False
        await self._run(call(RankWorker.restore, _for_ranks(directory)))

    async def offload(self) -> None:
        await self._run(call(RankWorker.offload))

    async def onload(self) -> None:
        await self._run(call(RankWorker.onload))

    async def close(self) -> None:
        ranks, self.ranks = self.ranks, ()
        if self._failed:  # stop the others first, which ends a collective that rank 0 may hang in
            await asyncio.gather(*(rank.close(failed=True) for rank in ranks[1:]))
            ranks = ranks[:1]
        await asyncio.gather(*(rank.close(failed=self._failed) for rank in ranks))

    async def watch(self) -> None:
        """Ping every rank periodically until canceled.

        Raises RankError if a rank is gone or has stopped answering, naming the rank, its host and the phase.
        """
        answering: set[int] = set()
        while True:
            await asyncio.sleep(supervision.HEARTBEAT_S)
            ranks = self.ranks
            pings = [supervision.heartbeat(rank, self._phase, has_answered=rank.rank in answering) for rank in ranks]
            try:
                answers = await asyncio.gather(*pings)
            except TrainerError:
                self._failed = True
                raise
            answering |= {rank.rank for rank, answered in zip(ranks, answers, strict=True) if answered}

    async def _precision_noise(self, batch: TrainBatch) -> dict[str, float]:
        """Measure the policy's precision noise on a few samples of the run's first rollout; return its metric, or no metric otherwise."""
        is_first, self._is_first_rollout = self._is_first_rollout, False
        if not is_first or not self._settings.measures_precision_noise:
            return {}
        noise = Unmeasured(f"no sample has a trained token among its first {self._max_compared:,} tokens")
        if samples := noise_samples(batch.samples, self._max_compared):
            noise = await self._run(call(RankWorker.precision_noise, samples))
        if isinstance(noise, Unmeasured):
            logger.warning(f"cannot measure the model's precision noise: {noise.reason}; the health page uses a fixed limit instead")
        return {"train/precision_noise": noise} if isinstance(noise, float) else {}

    async def _difference(self, batch: TrainBatch) -> dict[str, float]:
        """Return how far trainer and engine differ on a few samples of a rollout that is not trained.

        Engines that compute something wrong often earn no reward at all: no optimizer step would then ever show the difference. Return
        nothing if no token can be compared, or if the routing of experts is replayed, which this pass does not do.
        """
        samples = noise_samples(batch.samples, self._max_compared)
        if not samples or any(sample.routed_experts is not None for sample in batch.samples):
            return {}
        own, of_engine = np.concatenate(await self.logprobs(samples)), np.concatenate([sample.engine_logprobs for sample in samples])
        return {"train/logprob_abs_diff": mean_difference(samples, own, of_engine, per_token=self._settings.loss.per_token)}

    @property
    def _max_compared(self) -> int:
        """Maximum number of tokens on which log-probabilities are compared."""
        return min(MAX_TOKENS, self._settings.capacity.max_tokens or MAX_TOKENS)

    async def _planned(self, shares: Callable[[T, TrainerSettings, Cost | None], Sequence[S]], of: T) -> Sequence[S]:
        """Plan the replicas' shares in a thread, because packing 8,192 samples takes over a second and would block rollouts."""
        return await asyncio.to_thread(shares, of, self._settings, self._balance_by)

    async def _run(self, command: Command[R]) -> R:
        """Run a command on every rank and return rank 0's result. Raises RankError if a rank is lost, or FuligoError if one raised it."""
        shared = SharedCommand(command)
        return await self._run_on_ranks(command.name, [shared for _ in self.ranks])

    async def _run_by_replica(self, commands: Sequence[Command[R]]) -> R:
        """Run `commands[i]` on all ranks of data-parallel replica i; otherwise like `_run`."""
        shared = [SharedCommand(command) for command in commands]
        return await self._run_on_ranks(commands[0].name, [shared[self._settings.replica_of(rank.rank)] for rank in self.ranks])

    async def _run_on_ranks(self, name: str, commands: Sequence[SharedCommand[R]]) -> R:
        async with self._commands:  # one at a time, so that all ranks run them in the same order
            if self._failed:
                raise TrainerError(f"cannot {name}: the trainer has already failed")
            self._phase = f"during `{name}`"
            try:
                calls = [rank.run(command) for rank, command in zip(self.ranks, commands, strict=True)]
                return await supervision.finish(name, self.ranks, calls, timeout_s=self._settings.command_timeout_s)
            except BaseException:
                self._failed = True
                raise
            finally:
                self._phase = f"after `{name}`"


class LocalTrainer(RankedTrainer):
    """Trainer whose rank 0 computes in this process; the other ranks are child processes or were started by torchrun.

    Args:
        standbys: source of rank processes, which allows any rank to be replaced; rank 0 is then a child process too.
    """

    def __init__(self, settings: TrainerSettings, standbys: StandbyRanks | None = None) -> None:
        super().__init__(settings, lambda: _start_local_ranks(settings.num_ranks, standbys))
        self._standbys = standbys
        self._has_trained = False

    async def train(self, batch: TrainBatch) -> StepResult:
        result = await super().train(batch)
        if self._standbys is not None and not self._has_trained:  # not earlier, because the start of a run needs all cores
            self._standbys.prepare(self._settings)
        self._has_trained = True
        return result

    @property
    def worker(self) -> RankWorker:
        first = self.ranks[0]
        assert isinstance(first, InProcessRank)
        return first.worker


def _for_ranks(directory: Path) -> Path:
    """Return the absolute path, because ranks may have another working directory."""
    return directory.absolute()


async def _start_local_ranks(size: int, standbys: StandbyRanks | None) -> Sequence[RankHandle]:
    if (place := torchrun_place()) is not None:
        return await connect_ranks(place, size)
    if standbys is not None:
        return standbys.take(size)
    host = socket.gethostname()
    first = InProcessRank(RankExecutor(Rank(0, size)), host)
    return [first, *(start_process(rank, size, host) for rank in range(1, size))]
