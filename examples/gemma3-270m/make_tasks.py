"""Write prompt files of short completions, which --rm-type f1 can score.

    python examples/gemma3-270m/make_tasks.py data/gemma3-270m

Each prompt shows three solved examples and asks for one more, since a base model has no chat template. There are three kinds: the
last of four words, the longest of three, the largest of three numbers. The words of `test.jsonl` are in no prompt of `train.jsonl`.
Repeated runs write identical files.
"""

import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

TRAIN_WORDS = (
    "river stone cloud apple garden window mountain paper silver horse table winter candle bridge forest kitchen yellow doctor "
    "music ocean island ladder pencil valley engine butter castle dragon feather hammer jacket lantern market needle orange "
    "pocket rabbit saddle tunnel umbrella village wagon blanket cousin dinner elephant"
)
TEST_WORDS = (
    "meadow anchor basket carpet desert farmer glove helmet insect jungle kettle lemon mirror nephew oyster planet quilt rocket "
    "spider turtle violin whistle zebra autumn bottle"
)
NUM_TRAIN, NUM_TEST = 1024, 128

Task = Callable[[random.Random, Sequence[str]], tuple[str, str]]


def last_word(rng: random.Random, words: Sequence[str]) -> tuple[str, str]:
    chosen = rng.sample(words, 4)
    return f'The last word of "{" ".join(chosen)}" is', chosen[-1]


def longest_word(rng: random.Random, words: Sequence[str]) -> tuple[str, str]:
    while True:
        chosen = sorted(rng.sample(words, 3), key=len)
        if len(chosen[1]) < len(chosen[2]):
            break
    shown = rng.sample(chosen, 3)
    return f"The longest word of {shown[0]}, {shown[1]} and {shown[2]} is", chosen[2]


def largest_number(rng: random.Random, _: Sequence[str]) -> tuple[str, str]:
    numbers = rng.sample(range(10, 100), 3)
    return f"The largest of {numbers[0]}, {numbers[1]} and {numbers[2]} is", str(max(numbers))


TASKS: tuple[Task, ...] = (last_word, longest_word, largest_number)


def rows(number: int, words: Sequence[str], seed: int) -> list[dict[str, str]]:
    rng = random.Random(seed)
    found = []
    for index in range(number):
        task = TASKS[index % len(TASKS)]
        shown = "".join(f"{question} {answer}\n" for question, answer in (task(rng, words) for _ in range(3)))
        question, answer = task(rng, words)
        found.append({"prompt": shown + question, "label": answer})
    return found


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for name, number, words, seed in (("train", NUM_TRAIN, TRAIN_WORDS, 1), ("test", NUM_TEST, TEST_WORDS, 2)):
        lines = [json.dumps(row) for row in rows(number, words.split(), seed)]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{directory / name}.jsonl: {number} prompts")


if __name__ == "__main__":
    main()
