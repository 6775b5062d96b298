"""Rewards and generate functions that fail, one that needs a worker process, and a hook that changes a log-probability."""

import asyncio
import math
import subprocess
from pathlib import Path

import numpy as np

from fuligo.rollout.custom_generate import continue_sample
from fuligo.types import Sample, SampleStatus, TrainBatch
from tests.small_disk import SmallDisk


async def fails_on_some(args, sample: Sample) -> float:
    """Raise, hang or return NaN for one sample of each group of 4."""
    position = sample.index % 12
    if position == 0:
        raise ValueError(f"cannot judge {sample.response_length} tokens")
    if position == 4:
        await asyncio.sleep(3600)
    return math.nan if position == 8 else float(sample.index % 3)


def always_wrong(args, sample: Sample) -> float:
    return 0.0


def without_first_group(args, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """Return advantages of 0 for the first group of a rollout, and of 1 and -1 for the samples of the others."""
    rewards = [sample.reward_value() for sample in samples]
    first = min(sample.group_index for sample in samples)
    return rewards, [0.0 if sample.group_index == first else (-1.0) ** sample.index for sample in samples]


def fails_on_all(args, sample: Sample) -> float:
    raise ValueError("the judge is out for lunch")


async def algebra(args, sample: Sample, sampling_params: dict) -> Sample:
    """Replace the response by an answer that only a worker process can compare with the label."""
    sample = await continue_sample(sample, sampling_params)
    if sample.status is not SampleStatus.ABORTED:
        sample.response = f"\\boxed{{(x+{sample.index})^2 - x^2}}"
    return sample


async def fills_the_disk(args, sample: Sample) -> float:
    """Fill the disk of the run directory in rollout 1."""
    if sample.metadata["start_rollout_id"] == 1:
        SmallDisk(Path(args.run_dir).parent).fill()
    return float(sample.index % 2)


def leaves_an_orphan(args, sample: Sample) -> float:
    """Start a program that ends after the process that started it."""
    subprocess.run(["sh", "-c", "sleep 0.2 &"], check=True)
    return float(sample.index % 2)


def change_one_bit(args, rollout_id: int, batch: TrainBatch) -> None:
    """Move a log-probability of the fourth sample to the next float32."""
    logprobs = batch.samples[3].engine_logprobs
    logprobs[0] = np.nextafter(logprobs[0], np.float32(0))
