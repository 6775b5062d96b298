"""GSM8K: every gold answer is right and every other number wrong, in any spelling."""

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from fuligo.answers.algebra import equal_expressions
from fuligo.answers.equality import equal_answers
from fuligo.answers.statement import stated_answer
from fuligo.config.groups import DataFlags, RewardFlags
from fuligo.data.dataset import PromptDataset
from fuligo.rollout.rewards import RewardRunner
from fuligo.types import SampleGroup
from tests import tiny
from tests.gsm8k import REAL, save_problems

REPOSITORY = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_problems(tmp_path_factory.mktemp("gsm8k"))


@pytest.fixture(scope="module")
def convert() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gsm8k_convert", REPOSITORY / "examples" / "gsm8k" / "convert.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def labels(convert: ModuleType, problems: Path) -> list[str]:
    rows: Iterator[str] = (line for name in ("train.jsonl", "test.jsonl") for line in (problems / name).open(encoding="utf-8"))
    return [convert.gold_number(json.loads(row)["answer"]) for row in rows]


SPELLINGS: dict[str, tuple[str, ...]] = {
    "math": ("so \\boxed{%s}", "so $\\boxed{%s}$.", "%s"),
    "deepscaler": ("</think> so \\boxed{%s}", "</think> $\\boxed{%s}$ it is"),
    "dapo": ("so\nAnswer: %s", "Answer: $%s$"),
}


@pytest.mark.parametrize("rm_type", SPELLINGS)
async def test_gold_answers_are_right_and_other_numbers_wrong(
    make_group: Callable[..., SampleGroup], labels: list[str], rm_type: str
) -> None:
    assert len(labels) == (8792 if REAL else 120)
    wrong = {"math": 0.0, "deepscaler": 0.0, "dapo": -1.0}[rm_type]
    async with RewardRunner(RewardFlags(rm_type=rm_type, reward_key="score")) as runner:
        for position, label in enumerate(labels):
            number = float(label)
            others = [
                str(other)
                for other in (int(number) + 1, -int(number) - 1, f"{number * 10 + 1:g}", labels[position - 1])
                if float(other) != number
            ]
            golds = [label, f"{int(label):,}"] if label.lstrip("-").isdigit() else [label]
            answers = [*golds, *others]
            responses = [spelling % answer for spelling in SPELLINGS[rm_type] for answer in answers]
            group = make_group(*responses, label=label)
            await runner(group)
            assert all(sample.error is None for sample in group.samples)
            expected = ([1.0] * len(golds) + [wrong] * len(others)) * len(SPELLINGS[rm_type])
            assert [sample.reward_value("score") for sample in group.samples] == expected, (label, responses)


@pytest.mark.skipif(
    not REAL or not (Path(REAL) / "example_model_solutions.jsonl").exists(),
    reason="FULIGO_GSM8K_DIR names no folder with example_model_solutions.jsonl of github.com/openai/grade-school-math",
)
def test_every_graded_solution_is_judged_as_it_was_graded() -> None:
    """5,276 solutions of four models, which end in `A: number`."""
    num_solutions = 0
    for line in (Path(str(REAL)) / "example_model_solutions.jsonl").open(encoding="utf-8"):
        row = json.loads(line)
        gold = row["ground_truth"].rpartition("A:")[2]
        for graded in (value for value in row.values() if isinstance(value, dict)):
            answer = stated_answer(graded["solution"])
            assert (answer is not None and equal_answers(answer, gold, equal_expressions)) == graded["is_correct"], graded
            num_solutions += 1
    assert num_solutions == 5276


def test_the_converted_files_are_prompt_files(convert: ModuleType, labels: list[str], problems: Path, tmp_path: Path) -> None:
    num_rows = 1319 if REAL else 20
    assert convert.convert_file(problems / "test.jsonl", tmp_path / "test.jsonl") == num_rows
    settings = DataFlags(input_key="prompt", label_key="label", apply_chat_template=True)
    dataset = PromptDataset.open(tmp_path / "test.jsonl", settings, tiny.tokenizer())
    assert [dataset[row].label for row in range(len(dataset))] == labels[-num_rows:]
    assert dataset[0].prompt[0]["content"].endswith(convert.INSTRUCTION)
    assert dataset[num_rows - 1].metadata == {}


@pytest.mark.parametrize(("answer", "number"), [("x\n#### 1,234", "1234"), ("####  -5 ", "-5"), ("#### 1\n#### 2.5", "2.5")])
def test_the_number_after_the_hashes_is_the_label(convert: ModuleType, answer: str, number: str) -> None:
    assert convert.gold_number(answer) == number


def test_an_answer_without_a_number_is_refused(convert: ModuleType) -> None:
    with pytest.raises(ValueError, match="must end in '#### number'"):
        convert.gold_number("it is four")


def test_the_solution_has_the_steps_and_the_boxed_number(convert: ModuleType):
    answer = "Sold 48/2 = <<48/2=24>>24 clips.\nIn all <<1000+24=1024>>1,024.\n#### 1,024"
    assert convert.solution(answer) == "Sold 48/2 = 24 clips.\nIn all 1,024.\nThe answer is \\boxed{1024}."
