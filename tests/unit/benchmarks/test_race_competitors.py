"""Command lines of `benchmarks/race_competitors.py` and the steps that it reads from the competitors' logs."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fuligo.config.command_line import parse

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def race(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("FULIGO_RACE_FLAGS", "SKYRL_RACE_FLAGS", "VERL_RACE_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    import race_competitors

    yield race_competitors
    for name in ("race_competitors", "race_work"):
        sys.modules.pop(name)


def make_work(race: Any, directory: Path, num_gpus: int) -> Any:
    prompts = directory / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": [{"role": "user", "content": "Say hello."}], "label": "punctuation:no_comma"}) + "\n")
    return race.Work(
        model="/models/small",
        prompts=str(prompts),
        num_prompts=64,
        num_samples=16,
        max_prompt_tokens=256,
        max_tokens=320,
        num_steps=8,
        lr=2e-5,
        device="cuda",
        num_gpus=num_gpus,
        micro_batch=32,
    )


def settings(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words if "=" in word)


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_every_competitor_has_a_command_in_its_own_python(race: Any, tmp_path: Path, num_gpus: int):
    work = make_work(race, tmp_path, num_gpus)
    for name, competitor in race.COMPETITORS.items():
        command = competitor.command(work, tmp_path, "/env/bin/python")
        assert command[0] == "/env/bin/python", name
        for script in (word for word in command if word.endswith(".py") and "=" not in word):
            assert Path(script).is_file(), name


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_skyrl_does_one_optimizer_step_per_batch_on_all_gpus(race: Any, tmp_path: Path, num_gpus: int):
    given = settings(race.COMPETITORS["skyrl"].command(make_work(race, tmp_path, num_gpus), tmp_path, "python"))
    assert given["trainer.train_batch_size"] == given["trainer.policy_mini_batch_size"] == "64"
    assert given["trainer.placement.policy_num_gpus_per_node"] == given["generator.inference_engine.num_engines"] == str(num_gpus)
    assert int(given["generator.inference_engine.max_num_seqs"]) * num_gpus == 64 * 16


def test_skyrl_and_verl_pack_the_same_number_of_tokens(race: Any, tmp_path: Path):
    work = make_work(race, tmp_path, 1)
    skyrl, verl = (settings(race.COMPETITORS[name].command(work, tmp_path, "python")) for name in ("skyrl", "verl-sglang"))
    assert skyrl["trainer.max_tokens_per_microbatch"] == verl["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"]
    assert skyrl["trainer.policy.optimizer_config.lr"] == verl["actor_rollout_ref.actor.optim.lr"] == "2e-05"


@pytest.mark.parametrize("name", ["fuligo", "fuligo-lora"])
def test_fuligo_trains_every_sample_like_the_others(race: Any, tmp_path: Path, name: str):
    python, _, _, command, *words = race.COMPETITORS[name].command(make_work(race, tmp_path, 1), tmp_path, "python")
    assert (python, command) == ("python", "train")
    assert not parse(words).config.resolved_skip_zero_advantages


def test_flags_of_the_environment_come_last(race: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SKYRL_RACE_FLAGS", "generator.batched=false")
    assert race.COMPETITORS["skyrl"].command(make_work(race, tmp_path, 1), tmp_path, "python")[-1] == "generator.batched=false"


def test_skyrl_steps_are_read_in_samples_of_the_batch(race: Any, tmp_path: Path):
    line = {"reward/avg_raw_reward": 0.25, "generate/avg_num_tokens": 100.0}
    assert race.COMPETITORS["skyrl"].read(line, make_work(race, tmp_path, 1)) == (0.25, 100.0 * 64 * 16)
