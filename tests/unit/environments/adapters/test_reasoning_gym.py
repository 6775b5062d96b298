import json
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from fuligo.environments.adapters import reasoning_gym as adapter
from fuligo.errors import ConfigError, RewardError
from fuligo.types import Sample

pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="`make install-dev` installs reasoning-gym")

CONFIGS: dict[str, dict[str, Any]] = {
    "leg_counting": {},
    "countdown": {},
    "sudoku": {"min_empty": 4, "max_empty": 8},
    "game_of_life": {"grid_size_x": 4, "grid_size_y": 4},
}


def sample(row: dict[str, Any], response: str) -> Sample:
    return Sample(0, 0, row["prompt"], np.zeros(1, np.int32), row["label"], row["metadata"], response=response)


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_are_the_data_sets_and_the_reward_is_its_verifier(name: str):
    config = CONFIGS[name] | {"size": 3, "seed": 7}
    import reasoning_gym  # only where needed: the import takes a second

    dataset = reasoning_gym.create_dataset(name, **config)
    rows = json.loads(json.dumps(list(adapter.rows(name, config))))  # as they come back from a prompt file
    assert len(rows) == 3
    for row, entry in zip(rows, dataset, strict=True):
        assert row["prompt"][1] == {"role": "user", "content": entry["question"]}
        for answer in (str(entry["answer"]), "wrong", "1 + 1", ""):
            expected = dataset.score_answer(answer, entry)
            assert adapter.reward(None, sample(row, f"Well. <answer>{answer}</answer>")) == expected
        assert adapter.reward(None, sample(row, f"<answer>{entry['answer']}</answer>")) == 1.0


def test_answer_without_tags_scores_as_no_answer():
    (row,) = adapter.rows("leg_counting", {"size": 1, "seed": 1})
    assert adapter.reward(None, sample(row, row["label"])) == 0.0


def test_mistakes_are_refused_with_the_fix():
    with pytest.raises(ConfigError, match=r"cannot create the reasoning-gym dataset 'leg_countin'"):
        next(adapter.rows("leg_countin", {}))
    with pytest.raises(ConfigError, match=r"cannot create the reasoning-gym dataset 'leg_counting' with .*legs"):
        next(adapter.rows("leg_counting", {"legs": 1}))
    with pytest.raises(ConfigError, match="choose DeepSeekZero, default"):
        next(adapter.rows("leg_counting", {"size": 1}, style="x"))
    with pytest.raises(RewardError, match="its metadata holds no reasoning-gym task"):
        adapter.reward(None, sample({"prompt": "", "label": "", "metadata": {}}, ""))


def test_command_prints_a_prompt_file(capsys: pytest.CaptureFixture[str]):
    adapter.main(["leg_counting", "--size", "2", "--seed", "3", "--config", '{"max_animals": 4}', "--style", "direct"])
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == list(adapter.rows("leg_counting", {"max_animals": 4, "size": 2, "seed": 3 * adapter.SEED_STRIDE}, style="direct"))
    with pytest.raises(SystemExit, match="cannot create"):
        adapter.main(["nothing"])


@pytest.mark.parametrize("name", ["leg_counting", "gsm_symbolic", "letter_counting"])
def test_tasks_of_neighboring_seeds_differ(capsys: pytest.CaptureFixture[str], name: str):
    """The package itself gives task i + 1 of seed 1 as task i of seed 2."""
    prompts: list[set[str]] = []
    for seed in ("1", "2"):
        adapter.main([name, "--size", "20", "--seed", seed])
        prompts.append({json.dumps(json.loads(line)["prompt"]) for line in capsys.readouterr().out.splitlines()})
    assert prompts[0].isdisjoint(prompts[1])
