"""Two ranks (FSDP2 over gloo) against one: the same gradients, scores and checkpoints; and what happens when a rank is lost."""

import asyncio
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from fuligo.errors import EngineError, TrainerError
from fuligo.formats.weight_manifest import EngineAddress, WeightTarget
from fuligo.trainer.objective import KlLoss, LossSettings
from fuligo.trainer.packing import Capacity
from fuligo.trainer.ranks import supervision
from fuligo.trainer.ranks.settings import CriticSettings, LearningRateSchedule, OptimizerSettings
from fuligo.trainer.ranks.trainer import LocalTrainer
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from fuligo.types import StepResult, TrainBatch, TrainSample
from tests import tiny, train_batches

LENGTHS = [(4, 9), (1, 3), (6, 9), (2, 1), (5, 14), (3, 9), (7, 6), (8, 2), (4, 30)]
SHAPE = {"tie_word_embeddings": True, "initializer_range": 0.05}


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> TorchTrainerSettings:
    checkpoint = tiny.save_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", **SHAPE)
    reference = tiny.save_checkpoint(tmp_path_factory.mktemp("reference"), "qwen3", seed=1, **SHAPE)
    return TorchTrainerSettings(
        hf_checkpoint=checkpoint,
        initial_weights=checkpoint,
        reference_weights=reference,
        needs_old_logprobs=True,
        optimizer=OptimizerSettings(LearningRateSchedule(peak=1e-3), clip_grad=0.0),
        loss=LossSettings(entropy_coef=0.01, kl_loss=KlLoss(0.1, "k3")),
        capacity=Capacity(max_tokens=40),
        balance_data=True,
        command_timeout_s=120.0,
    )


async def trainer_of(settings: TorchTrainerSettings, num_ranks: int) -> LocalTrainer:
    trainer = LocalTrainer(replace(settings, num_ranks=num_ranks))
    await trainer.load()
    return trainer


def tensors(directory: Path) -> dict[str, np.ndarray]:
    return {f"{file.parent.name}/{name}": t for file in directory.rglob("*-00000.safetensors") for name, t in load_file(file).items()}


@dataclass(frozen=True, slots=True)
class Pair:
    """Trainer of one rank and trainer of two ranks that do the same."""

    one: LocalTrainer
    two: LocalTrainer

    async def assert_same_scores(self, samples: list[TrainSample]) -> list[TrainSample]:
        """Score on both; return the samples scored by one rank."""
        by_one, by_two = await self.one.score(samples), await self.two.score(samples)
        for a, b in zip(by_one, by_two, strict=True):
            np.testing.assert_allclose(a.old_logprobs, b.old_logprobs, atol=1e-5)
            np.testing.assert_allclose(a.ref_logprobs, b.ref_logprobs, atol=1e-5)
            np.testing.assert_allclose(a.values, b.values, atol=1e-5)
        return by_one

    async def assert_same_step(self, batch: TrainBatch) -> StepResult:
        """Train on both; return the result of two ranks."""
        by_one, by_two = await self.one.train(batch), await self.two.train(batch)
        assert by_two.num_tokens == by_one.num_tokens
        assert by_two.scores.keys() == by_one.scores.keys() == set(range(len(batch.samples)))
        for index, scores in by_one.scores.items():
            np.testing.assert_allclose(by_two.scores[index].logprobs, scores.logprobs, atol=1e-5)
        for name in by_one.metrics.keys() - {"train/tokens_per_s", "train/num_micro_batches"}:
            assert by_two.metrics[name] == pytest.approx(by_one.metrics[name], rel=1e-5, abs=1e-7), name
        return by_two

    async def assert_same_gradients(self, directory: Path) -> None:
        """Save both after one step, two ranks after they have moved to the CPU and back; compare the first moments."""
        await self.two.offload()
        await self.two.onload()
        await self.one.save(directory / "one")
        await self.two.save(directory / "two")
        state_one, state_two = tensors(directory / "one"), tensors(directory / "two")
        gradients = {name: t for name, t in state_one.items() if name.endswith(".exp_avg")}  # after one step: (1 - beta1) x gradient
        for model in ("optimizer", "critic_optimizer"):
            of_model = {name: gradient for name, gradient in gradients.items() if name.startswith(f"{model}/")}
            largest = max(np.abs(g).max() for g in of_model.values())
            for name, gradient in of_model.items():
                assert np.abs(state_two[name] - gradient).max() <= 1e-6 * largest, name

    async def assert_resharded(self, directory: Path) -> None:
        """Have each load what the other has saved and save it again, bit for bit."""
        await self.one.restore(directory / "two")
        await self.two.restore(directory / "one")
        await self.one.save(directory / "two-by-one")
        await self.two.save(directory / "one-by-two")
        await self.two.save(directory / "one-by-two")
        for written, copied in (("one", "one-by-two"), ("two", "two-by-one")):
            expected, got = tensors(directory / written), tensors(directory / copied)
            assert expected.keys() == got.keys()
            assert all(np.array_equal(expected[name], got[name]) for name in expected)
        await self.one.restore(directory / "one")

    async def assert_same_weights_sent(self, directory: Path) -> None:
        """Send to an engine that is gone, which is not a failure of a rank: all can send again."""
        gone = (EngineAddress("http://127.0.0.1:9"),)
        for trainer, transport in itertools.product((self.one, self.two), ("tensor", "gloo")):
            with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9"):
                await trainer.send_weights(WeightTarget(transport, 1, bucket_bytes=10_000, engines=gone))
        manifests = []
        for name, trainer in (("one", self.one), ("two", self.two)):
            (sent := directory / f"sent-by-{name}").mkdir()
            manifests.append(await trainer.send_weights(WeightTarget("disk", 1, bucket_bytes=10_000, directory=str(sent))))
        assert manifests[0] == manifests[1]


@pytest.mark.usefixtures("warm_children")
async def test_two_ranks_score_train_save_reshard_and_fail_as_one(settings, tmp_path):
    """One pair of ranks for everything that works, since starting one takes seconds; with a value model, which is all that can be there."""
    values = tiny.save_value_model(tmp_path / "values", "qwen3", seed=2, **SHAPE)
    settings = replace(settings, critic=CriticSettings(values, settings.optimizer))
    pair = Pair(await trainer_of(settings, 1), await trainer_of(settings, 2))
    samples = train_batches.samples(LENGTHS)

    scored = await pair.assert_same_scores(samples)
    with_old = train_batches.with_old_logprobs(scored, noise=0.2, logprobs=[s.old_logprobs for s in scored])
    batch = train_batches.batch(train_batches.with_returns(with_old, noise=0.2))
    by_two = await pair.assert_same_step(batch)
    assert by_two.num_tokens == sum(len(s.tokens) - 1 for s in samples)
    assert [[span.name for span in spans] for spans in by_two.rank_spans] == [["score", *["forward, backward", "optimizer"] * 2]] * 2

    await pair.assert_same_gradients(tmp_path)
    await pair.assert_resharded(tmp_path)
    await pair.assert_same_weights_sent(tmp_path)

    # One sample on two ranks: the other rank repeats it with weight 0.
    await pair.assert_same_scores(samples[:1])
    await pair.assert_same_step(train_batches.batch(batch.samples[:1]))
    await pair.one.close()
    await pair.two.close()


@pytest.mark.usefixtures("warm_children")
async def test_a_killed_rank_ends_the_step_and_is_named(settings):
    two = await trainer_of(settings, 2)
    os.kill(two.ranks[1].pid, signal.SIGKILL)
    with pytest.raises(TrainerError, match=r"trainer rank 1 on .* ended with exit code -9 \(killed, .*\) during `train`"):
        await two.train(train_batches.batch(train_batches.samples(LENGTHS)))
    await two.close()


@pytest.mark.usefixtures("warm_children")
async def test_a_stopped_rank_is_named_while_all_others_wait_for_it(settings, monkeypatch):
    """Its connections stay open, so only missing heartbeats reveal it."""
    monkeypatch.setattr(supervision, "HEARTBEAT_TIMEOUT_S", 5.0)
    monkeypatch.setattr(supervision, "HEARTBEAT_S", 0.1)
    two = await trainer_of(settings, 2)
    watching = asyncio.create_task(two.watch())
    batch = train_batches.batch(await two.score(train_batches.samples(LENGTHS)))
    for _ in range(3):
        await two.train(batch)
    assert not watching.done()
    stopped = two.ranks[1].pid
    os.kill(stopped, signal.SIGSTOP)
    training = asyncio.create_task(two.train(batch))
    with pytest.raises(TrainerError, match=rf"trainer rank 1 on {socket.gethostname()} has not answered for 5 s .* (during|after) `train`"):
        await asyncio.wait_for(watching, 60)
    assert not training.done()
    training.cancel()
    await two.close()
    with pytest.raises(ProcessLookupError):
        os.kill(stopped, 0)


@pytest.mark.usefixtures("warm_children")
def test_ranks_end_with_a_killed_driver(settings, tmp_path):
    (tmp_path / "settings").write_bytes(pickle.dumps(replace(settings, num_ranks=2)))
    command = [sys.executable, "-m", "tests.parity.rank_driver", str(tmp_path / "settings")]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    follower = int(driver.stdout.readline())
    assert Path(f"/proc/{follower}").exists()
    driver.kill()
    driver.wait()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{follower}").exists() and "Z" not in Path(f"/proc/{follower}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the rank outlived its driver"
        time.sleep(0.1)
