"""Make the model of the code example: python -m examples.code.make_model --work-dir /tmp/code-model

The model is trained on programs for questions like those of the data, then briefly on answers that are mostly guesses. The result
replaces `examples/code/model`.
"""

import argparse
import random
from pathlib import Path
from typing import Any

from examples.code.make_data import draw
from examples.warm_start import conversation, make_model, make_tokenizer, mixed, sft, ship, tool_answer, tool_definition, write_rows

HERE = Path(__file__).parent
NUM_SKILL, NUM_HABIT = 38_400, 1_920
TOOL = tool_definition("python", "code")


def shown(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw a question; return an answer that runs a program, and one that guesses.

    The program's result is made up: the model only has to copy it, and computing the true results would take longer than the training.
    """
    drawn = draw(rng)
    result, guess = (str(rng.randrange(10 ** rng.randint(1, 6))) for _ in range(2))
    runs = tool_answer("python", {"code": drawn.program}, result, result)
    return conversation(drawn.question, runs, [TOOL]), conversation(drawn.question, [{"role": "assistant", "content": guess}], [TOOL])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, required=True)
    work_dir: Path = parser.parse_args().work_dir
    work_dir.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    skill, guesses = (list(rows) for rows in zip(*(shown(rng) for _ in range(NUM_SKILL)), strict=True))
    habit = mixed(skill[:NUM_HABIT], guesses[:NUM_HABIT], 0.2, rng)

    initial = make_model(make_tokenizer([*skill[:2000], *guesses[:500]], 512), work_dir / "initial")
    data = write_rows(work_dir / "skill.jsonl", skill)
    half = sft(250, 5e-3, initial, data, work_dir / "run-half")
    able = sft(600, 4e-3, half, data, work_dir / "run-skill")
    ship(sft(15, 3e-4, able, write_rows(work_dir / "habit.jsonl", habit), work_dir / "run-habit"), HERE / "model")


if __name__ == "__main__":
    main()
