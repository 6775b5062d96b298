"""Write a corpus about the towns of an invented country, and questions that can be answered only from it.

python examples/search/make_data.py
"""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
NUM_TOWNS = 200
BEGINNINGS = [
    "Al", "Bren", "Cor", "Dun", "El", "Fal", "Gor", "Hal", "Ist", "Kel",
    "Lor", "Mar", "Nor", "Os", "Pel", "Quen", "Ros", "Sel", "Tor", "Wen",
]  # fmt: skip
ENDINGS = ["bury", "dale", "ford", "gate", "ham", "leigh", "mere", "ness", "stow", "wick"]
RIVERS = ["Ambra", "Belisk", "Corvane", "Drusk", "Esmer", "Fallow", "Grent", "Hollin"]
GOODS = ["bells", "cheese", "cloth", "glass", "honey", "paper", "salt", "violins"]


def main() -> None:
    generator = random.Random(1)
    towns = [first + last for first in BEGINNINGS for last in ENDINGS]
    generator.shuffle(towns)
    documents, questions = [], []
    for town in towns[:NUM_TOWNS]:
        river, goods, year = generator.choice(RIVERS), generator.choice(GOODS), str(generator.randrange(900, 1900))
        text = f"{town} lies on the river {river}. It was founded in {year} and is known for its {goods}."
        documents.append({"title": town, "text": text})
        questions += [
            {"question": f"On which river does {town} lie?", "answer": river},
            {"question": f"In which year was {town} founded?", "answer": year},
            {"question": f"What is {town} known for?", "answer": goods},
        ]
    generator.shuffle(questions)
    for name, rows in (("corpus", documents), ("train", questions[:-60]), ("test", questions[-60:])):
        write(name, rows)


def write(name: str, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
