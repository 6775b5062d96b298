"""Make the model and the data of the calculator example.

    python -m examples.calculator.make_assets --work-dir /tmp/calculator-assets

The model is trained on answers that use the tool (the skill), then briefly on answers that are mostly guesses (the habit that GRPO has to
break). The result, in bfloat16, replaces `examples/calculator/model`, `train.jsonl` and `test.jsonl`.
"""

import argparse
import random
import shutil
from pathlib import Path

from examples.warm_start import Row, conversation, make_model, make_tokenizer, sft, ship, tool_answer, tool_definition, write_rows

HERE = Path(__file__).parent
NUM_TRAIN, NUM_TEST = 1_600, 64
NUM_SKILL, NUM_HABIT = 20_480, 1_920
WORDINGS = ("What is {a} * {b}?", "Multiply {a} by {b}.", "{a} times {b} is what?")
TOOL = tool_definition("calculator", "expression")


def problem(rng: random.Random) -> tuple[int, int, str]:
    """Draw two numbers of two digits, and return them with the question in one of three wordings."""
    a, b = (rng.randint(10, 99) for _ in range(2))
    return a, b, rng.choice(WORDINGS).format(a=a, b=b)


def with_tool(a: int, b: int) -> list[Row]:
    """Return the turns of an answer that calls the tool and copies its result."""
    return tool_answer("calculator", {"expression": f"{a} * {b}"}, str(a * b), str(a * b))


def guess(a: int, b: int, rng: random.Random) -> list[Row]:
    """Return an answer without the tool: a number of the right size, which is seldom right."""
    return [{"role": "assistant", "content": str(round(a * b * rng.uniform(0.8, 1.2)))}]


def write_data(work_dir: Path, rng: random.Random) -> None:
    """Write training and held-out questions, and conversations that share no product with the held-out ones."""
    task: dict[tuple[int, int], Row] = {}
    while len(task) < NUM_TRAIN + NUM_TEST:
        a, b, question = problem(rng)
        task.setdefault((a, b), {"question": question, "answer": str(a * b)})
    pairs, rows = list(task), list(task.values())
    write_rows(work_dir / "train.jsonl", rows[:NUM_TRAIN])
    write_rows(work_dir / "test.jsonl", rows[NUM_TRAIN:])
    held_out = set(pairs[NUM_TRAIN:])

    def conversations(count: int, share_with_tool: float) -> list[Row]:
        out: list[Row] = []
        while len(out) < count:
            a, b, question = problem(rng)
            if (a, b) not in held_out:
                answer = with_tool(a, b) if rng.random() < share_with_tool else guess(a, b, rng)
                out.append(conversation(question, answer, [TOOL]))
        return out

    write_rows(work_dir / "skill.jsonl", conversations(NUM_SKILL, 1.0))
    write_rows(work_dir / "habit.jsonl", conversations(NUM_HABIT, 0.2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, required=True)
    work_dir: Path = parser.parse_args().work_dir
    work_dir.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)

    problems = (problem(rng) for _ in range(2_000))
    shown = (conversation(question, with_tool(a, b)[:1], [TOOL]) for a, b, question in problems)
    initial = make_model(make_tokenizer(shown, 352), work_dir / "initial")
    write_data(work_dir, rng)
    half = sft(320, 5e-3, initial, work_dir / "skill.jsonl", work_dir / "run-half")
    skill = sft(150, 3e-3, half, work_dir / "skill.jsonl", work_dir / "run-skill")
    ship(sft(15, 3e-4, skill, work_dir / "habit.jsonl", work_dir / "run-habit"), HERE / "model")
    for name in ("train.jsonl", "test.jsonl"):
        shutil.copy(work_dir / name, HERE / name)


if __name__ == "__main__":
    main()
