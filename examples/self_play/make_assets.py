"""Make model and data of the self-play example: python -m examples.self_play.make_assets --work-dir /tmp/self-play

The model is trained on games of players who make the best move, then briefly on games of players who make random legal moves (the habit
that self-play has to break).
"""

import argparse
import random
from pathlib import Path
from typing import Any

from examples.self_play.environment import MOST, Nim
from examples.warm_start import make_model, make_tokenizer, sft, ship, write_rows

HERE = Path(__file__).parent
HEAPS = range(5, 10)
NUM_SKILL, NUM_HABIT = 25_600, 1_920


def one_side(rng: random.Random, share_best: float) -> dict[str, Any]:
    """Return a game as one of its players sees it. Where there is a best move, both players make it with probability `share_best`."""
    game, player = Nim(rng.choice(HEAPS)), rng.randrange(2)
    messages: list[dict[str, str]] = []
    mover = 0
    while game.winner is None:
        number = game.best if game.best and rng.random() < share_best else rng.randint(1, min(MOST, game.stones))
        if mover == player:
            messages += [{"role": "user", "content": f"{game.stones} stones"}, {"role": "assistant", "content": str(number)}]
        game.take(mover, number)
        mover = 1 - mover
    return {"prompt": messages, "tools": []}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, required=True)
    work_dir: Path = parser.parse_args().work_dir
    work_dir.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    skill = [one_side(rng, 1.0) for _ in range(NUM_SKILL)]
    habit = [one_side(rng, 0.0) for _ in range(NUM_HABIT)]
    initial = make_model(make_tokenizer(skill[:2000], 288), work_dir / "initial")
    able = sft(400, 5e-3, initial, write_rows(work_dir / "skill.jsonl", skill), work_dir / "run-skill")
    ship(sft(30, 1e-3, able, write_rows(work_dir / "habit.jsonl", habit), work_dir / "run-habit"), HERE / "model")
    write_rows(HERE / "train.jsonl", ({"prompt": f"Nim with {heap} stones", "stones": heap, "metadata": {}} for heap in HEAPS))
    won = [heap for heap in HEAPS if Nim(heap).best]
    write_rows(
        HERE / "test.jsonl", ({"prompt": f"Nim with {heap} stones", "stones": heap, "metadata": {"opponent": "perfect"}} for heap in won)
    )


if __name__ == "__main__":
    main()
