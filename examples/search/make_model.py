"""Make the model of the search example: python -m examples.search.make_model --work-dir /tmp/search-model

The model is trained on answers that search, then briefly on answers that are mostly guesses. The result replaces `examples/search/model`.
"""

import argparse
import random
from pathlib import Path
from typing import Any

from examples.search.make_data import BEGINNINGS, ENDINGS, GOODS, RIVERS
from examples.warm_start import conversation, make_model, make_tokenizer, mixed, sft, ship, tool_answer, tool_definition, write_rows

HERE = Path(__file__).parent
NUM_SKILL, NUM_HABIT = 16_000, 1_920
TOOL = tool_definition("search", "query")
TOWNS = [first + last for first in BEGINNINGS for last in ENDINGS]


def shown(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw a town whose properties differ from those in the corpus; return an answer that searches, and one that guesses."""
    town, river, goods, year = rng.choice(TOWNS), rng.choice(RIVERS), rng.choice(GOODS), str(rng.randrange(900, 1900))
    result = f"[1] {town}\n{town} lies on the river {river}. It was founded in {year} and is known for its {goods}."
    question, answer, guess = rng.choice(
        [
            (f"On which river does {town} lie?", river, rng.choice(RIVERS)),
            (f"In which year was {town} founded?", year, str(rng.randrange(900, 1900))),
            (f"What is {town} known for?", goods, rng.choice(GOODS)),
        ]
    )
    searches = tool_answer("search", {"query": town}, result, answer)
    return conversation(question, searches, [TOOL]), conversation(question, [{"role": "assistant", "content": guess}], [TOOL])


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
    able = sft(350, 4e-3, half, data, work_dir / "run-skill")
    ship(sft(15, 3e-4, able, write_rows(work_dir / "habit.jsonl", habit), work_dir / "run-habit"), HERE / "model")


if __name__ == "__main__":
    main()
