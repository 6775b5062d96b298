"""Problems in the format of GSM8K. FULIGO_GSM8K_DIR names a folder with the real ones, which the same tests then read."""

import json
import os
import random
from pathlib import Path

REAL = os.environ.get("FULIGO_GSM8K_DIR")


def save_problems(directory: Path) -> Path:
    """Write train.jsonl and test.jsonl, or return the folder of the real ones."""
    if REAL:
        return Path(REAL)
    for name, seed, num_rows in (("train.jsonl", 0, 100), ("test.jsonl", 1, 20)):
        rng = random.Random(seed)
        rows = [_problem(rng, position) for position in range(num_rows)]
        (directory / name).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return directory


def _problem(rng: random.Random, position: int) -> dict[str, str]:
    """Return a problem whose answer has up to seven digits, with separators of thousands, a sign or a fraction now and then."""
    total = rng.randrange(10 ** (1 + position % 7)) if position % 11 else -rng.randrange(1, 1000)
    number = f"{total}.{rng.randrange(1, 10)}" if position % 13 == 0 else f"{total:,}" if position % 3 else str(total)
    return {
        "question": f"A café has {number} cups and buys none. How many cups does it have?",
        "answer": f"It has {number} + 0 = <<{number}+0={number}>>{number} cups.\n#### {number}",
    }
