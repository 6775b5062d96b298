"""Environments of verifiers, played by its own harness through the gateway."""

import asyncio
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fuligo.engines.generation import Generation, SamplingParams
from fuligo.environments.adapters import verifiers
from fuligo.environments.environment import Row
from fuligo.errors import ConfigError
from fuligo.gateway.server import Gateway
from fuligo.rollout.agents import branches
from fuligo.types import IntArray
from tests.unit.environments.conversations import ENDS, ids, tokenizer
from tests.unit.gateway.world import PARAMS, RandomEngine, check_exact, policy
from tests.unit.rollout.episode_world import fresh

CONFIG = {"taskset": {"id": "sums_taskset"}, "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}


class Two(RandomEngine):
    """Engine that always says 2."""

    async def generate(self, input_ids: IntArray, params: SamplingParams, **more: Any) -> Generation:
        generation = await super().generate(input_ids, params, **more)
        said = np.array(ids("2" + ENDS[0]), np.int32)
        answer = replace(generation, output_ids=said, logprobs=np.full(len(said), -0.5, np.float32), finish_reason="stop")
        self.requests[-1] = (self.requests[-1][0], answer)
        return answer


UV = """#!/bin/sh
case "$*" in
*--help) echo --script ;;
"python find"*) echo "{python}" ;;
esac
"""
"""uv that gives harnesses this environment, instead of installing what they need without hashes."""


@pytest.fixture
def taskset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("verifiers", reason="verifiers pins mcp 2.0.0 and openai 2: `make test-verifiers` runs this in its own environment")
    monkeypatch.syspath_prepend(Path(__file__).parent)
    (tmp_path / "uv").write_text(UV.format(python=sys.executable))
    (tmp_path / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("HOME", str(tmp_path))  # verifiers prefers $HOME/.local/bin


async def test_its_harness_plays_and_its_tasks_reward(taskset: None) -> None:
    """Two episodes at once, each with a session of its own; what the engine sampled is what would be trained."""
    engine = Two(random.Random(0))
    gateway = Gateway(policy(engine))
    try:
        sessions = [await gateway.open(PARAMS, label=f"{number}") for number in range(2)]
        tasks = list(verifiers.rows(CONFIG, first=1))
        assert [row["prompt"] for row in tasks] == ["what is 1 + 1", "what is 1 + 2"]
        played = [Row(row["prompt"], "", row["metadata"], number) for number, row in enumerate(tasks)]
        rewards = await asyncio.gather(*(verifiers.play(session, row) for session, row in zip(sessions, played, strict=True)))
        assert rewards == [1.0, 0.0]
        check_exact([part for session in sessions for part in branches(fresh(), session, tokenizer())], engine)
    finally:
        await gateway.close()


async def test_an_episode_that_fails_says_why(taskset: None) -> None:
    gateway = Gateway(policy(Two(random.Random(0))))
    session = await gateway.open(PARAMS, label="0")
    (row,) = verifiers.rows(CONFIG, count=1)
    await gateway.close()
    with pytest.raises(RuntimeError, match="Error"):
        await verifiers.play(session, Row("", "", row["metadata"], 0))


def test_an_unknown_taskset_is_refused(taskset: None) -> None:
    with pytest.raises(ConfigError, match=r"cannot create the verifiers environment .*no_such_taskset"):
        list(verifiers.rows({"taskset": {"id": "no_such_taskset"}}))


async def test_a_row_without_a_task_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot play sample 3: its metadata holds no task of verifiers"):
        await verifiers.play(None, Row("", "", {}, 3))


def test_without_verifiers_the_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    monkeypatch.setitem(sys.modules, "verifiers.v1.utils.loaders", None)
    with pytest.raises(ConfigError, match="pip install verifiers"):
        list(verifiers.rows({"taskset": {"id": "not_asked_before"}}))
