"""Trainer that several runs share: their commands interleave, and each run gets the same results as alone."""

import pickle
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from fuligo.errors import TrainerError
from fuligo.formats.adapter_config import AdapterConfig
from fuligo.models.adapter import adapter_tensors, base_tensors
from fuligo.trainer.objective import LossSettings
from fuligo.trainer.ranks import shared
from fuligo.trainer.ranks.commands import Command, call, call_rank
from fuligo.trainer.ranks.connected import answer_commands
from fuligo.trainer.ranks.executor import RankExecutor
from fuligo.trainer.ranks.handle import LEAVE, PING
from fuligo.trainer.ranks.rank import Rank
from fuligo.trainer.ranks.settings import LearningRateSchedule, LoraSettings, OptimizerSettings
from fuligo.trainer.ranks.shared import RunShare, SharedTrainer, TurnThread
from fuligo.trainer.ranks.worker import RankWorker
from fuligo.trainer.torch_backend.compiled_layers import COMPILED_KINDS, compile_layers
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from tests import shares, train_batches

LENGTHS = [(4, 9), (1, 3), (6, 9), (2, 4)]


@pytest.fixture
def settings(checkpoint) -> list[TorchTrainerSettings]:
    """Return the settings of two runs; dropout reads the global random state in every step."""
    optimizer = OptimizerSettings(LearningRateSchedule(peak=1e-2))
    wide = AdapterConfig(rank=4, alpha=8.0, dropout=0.5)
    narrow = AdapterConfig(rank=2, alpha=8.0, target_modules=("q_proj",), dropout=0.2)
    first = TorchTrainerSettings(checkpoint, checkpoint, optimizer, lora=LoraSettings(wide), loss=LossSettings(loss_type="sft_loss"))
    return [first, replace(first, lora=LoraSettings(narrow), seed=7)]


@pytest.fixture
def trainer() -> Iterator[SharedTrainer]:
    trainer = SharedTrainer()
    yield trainer
    trainer.stop()


class LargeAnswer(Command[bytes]):
    def run(self, rank: Rank) -> bytes:
        return bytes(1 << 24)


def run(executor: RankExecutor, command: Command[Any]) -> Any:
    answer = executor.answer(lambda: command, is_queued=True).result(30)
    if answer.error is not None:
        raise answer.error
    return answer.value


def train(executor: RankExecutor, seed: int) -> None:
    worker: Any = executor.rank.worker
    run(executor, call(RankWorker.train, shares.to_train(worker, train_batches.batch(train_batches.samples(LENGTHS, seed=seed)))))


def adapter(executor: RankExecutor) -> dict[str, torch.Tensor]:
    worker: Any = executor.rank.worker
    return {name: tensor.detach().clone() for name, tensor in adapter_tensors(worker.policy.model).items()}


@pytest.mark.long
def test_runs_in_turns_train_as_alone(
    trainer: SharedTrainer, settings: list[TorchTrainerSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "KEEP_TURN_S", 0.05)  # no run syncs weights, for which each turn would be kept
    alone = []
    for each in settings:
        executor = RankExecutor(Rank(0, 1))
        run(executor, call_rank(Rank.load, each, None))
        for seed in range(3):
            train(executor, seed)
        alone.append(adapter(executor))
        executor.stop()
    together = [trainer.executor() for _ in settings]
    for executor, each in zip(together, settings, strict=True):
        run(executor, call_rank(Rank.load, each, None))
    for seed in range(3):
        for executor in together:
            train(executor, seed)
    for executor, expected in zip(together, alone, strict=True):
        for name, tensor in adapter(executor).items():
            assert torch.equal(tensor, expected[name]), name


def test_the_base_is_in_memory_once(trainer: SharedTrainer, settings: list[TorchTrainerSettings]) -> None:
    executors = [trainer.executor() for _ in settings]
    for executor, each in zip(executors, settings, strict=True):
        run(executor, call_rank(Rank.load, each, None))
    workers: list[Any] = [executor.rank.worker for executor in executors]
    first, second = ({tensor.data_ptr() for tensor in base_tensors(worker.policy.model).values()} for worker in workers)
    assert first == second


def test_layers_of_every_run_may_be_compiled(trainer: SharedTrainer, settings: list[TorchTrainerSettings]) -> None:
    """torch compares its limits with the number of compiled variants of a layer's code, which all runs have in common."""
    executors: list[Any] = [trainer.executor() for _ in range(10)]

    def limits() -> tuple[int, int]:
        compile_layers([])  # a model that loads later keeps them
        return torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit

    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256):
        run(executors[0], call_rank(Rank.load, settings[0], None))
        in_thread = executors[0]._share.submit(limits).result(30)  # each thread has limits of its own
    assert in_thread == (10 * COMPILED_KINDS, 10 * COMPILED_KINDS)


def test_a_run_that_ends_leaves_the_others(trainer: SharedTrainer, settings: list[TorchTrainerSettings]) -> None:
    """With `LEAVE`, or without it because its process was killed."""
    executors = [trainer.executor() for _ in range(3)]
    for executor in executors:
        run(executor, call_rank(Rank.load, settings[0], None))
    run(executors[0], LEAVE)
    executors[0].stop()
    trainer.release(executors[1])
    train(executors[2], seed=0)
    assert all(executor.rank.has_left for executor in executors[:2])


def test_other_base_weights_and_full_training_are_refused(
    trainer: SharedTrainer, settings: list[TorchTrainerSettings], reference_checkpoint
) -> None:
    run(trainer.executor(), call_rank(Rank.load, settings[0], None))
    with pytest.raises(TrainerError, match="does not train a LoRA adapter"):
        run(trainer.executor(), call_rank(Rank.load, replace(settings[0], lora=None), None))
    with pytest.raises(Exception, match="give all runs the same --hf-checkpoint"):
        run(trainer.executor(), call_rank(Rank.load, replace(settings[0], initial_weights=reference_checkpoint), None))


def test_a_run_keeps_its_turn_from_training_to_its_sync() -> None:
    """It does so although another run is waiting; after the sync, the first in the queue is next."""
    thread = TurnThread()
    first, second = RunShare(thread), RunShare(thread)
    order: list[str] = []
    trained = threading.Event()

    def train(share: RunShare, name: str) -> None:
        share.is_in_step = True
        order.append(f"train {name}")
        if name == "first":
            trained.wait(60)

    def sync(share: RunShare, name: str) -> None:
        share.is_in_step = False
        order.append(f"sync {name}")

    training = first.submit(lambda: train(first, "first"))
    waiting = second.submit(lambda: train(second, "second"))
    trained.set()
    training.result(60)
    done = [first.submit(lambda: sync(first, "first")), waiting, second.submit(lambda: sync(second, "second"))]
    for future in done:
        future.result(60)
    thread.stop()
    assert order == ["train first", "sync first", "train second", "sync second"]


def test_a_run_that_does_not_come_back_loses_its_turn() -> None:
    thread = TurnThread()
    gone, other = RunShare(thread), RunShare(thread)
    gone.is_in_step = True
    gone.submit(lambda: None).result(60)
    assert other.submit(lambda: "next").result(60) == "next"
    thread.stop()


def test_work_that_waits_for_a_turn_is_done_before_the_thread_ends() -> None:
    thread = TurnThread()
    keeper, other = RunShare(thread), RunShare(thread)
    keeper.is_in_step = True
    keeper.submit(lambda: None).result(60)
    waiting = other.submit(lambda: "done")
    thread.stop()
    assert waiting.result(10) == "done"


def test_a_run_that_is_stopped_does_not_stop_the_others(trainer: SharedTrainer) -> None:
    """The stopped run reads no answers, and these are larger than the buffer of its connection."""
    stopped, other = trainer.executor(), trainer.executor()
    ours, theirs = (Connection(end.detach()) for end in socket.socketpair())
    threading.Thread(target=answer_commands, args=(theirs, stopped), daemon=True).start()
    ours.send_bytes(struct.pack("!q?", 0, True))
    ours.send_bytes(pickle.dumps(LargeAnswer("large")))
    assert ours.poll(60), "the answer has begun"
    assert run(other, LargeAnswer("large")) == LargeAnswer("large").run(other.rank)
    number, answer = pickle.loads(ours.recv_bytes())
    assert (number, answer.value) == (0, LargeAnswer("large").run(other.rank))
    ours.close()


def test_which_commands_another_follows(trainer: SharedTrainer, settings: list[TorchTrainerSettings], tmp_path) -> None:
    executor: Any = trainer.executor()
    run(executor, call_rank(Rank.load, settings[0], None))
    assert not executor._share.is_in_step
    train(executor, seed=0)
    assert executor._share.is_in_step
    executor.answer(lambda: PING, is_queued=False).result(60)
    assert executor._share.is_in_step
    run(executor, call(RankWorker.save, tmp_path / "saved"))
    assert not executor._share.is_in_step
