"""Write prompt files of questions with one instruction each, whose answers --rm-type ifbench can check.

    python examples/smollm2/make_tasks.py data/smollm2

It writes four files. `short-train.jsonl` and `short-test.jsonl` ask for one thing, such as "Do not use any commas", which an
answer of three words also satisfies. `long-train.jsonl` and `long-test.jsonl` have the same questions and also ask for at least
40 words. The subjects of the test questions are in no training question. The same command writes the same files.
"""

import json
import random
import sys
from itertools import product
from pathlib import Path
from typing import NamedTuple

SUBJECTS = (
    "volcanoes bees bridges chess tea deserts violins glaciers bread lighthouses spiders satellites rice windmills whales "
    "libraries acorns cherries onions earthquakes pianos pears soap plums rabbits telescopes coffee walnuts ducks "
    "mushrooms trains honey mathematics clouds bicycles cheese dolphins poetry magnets gardens penguins airports chocolate "
    "tides theatre salt elephants clocks coral maps photography olives thunder kites museums wolves paper football islands "
    "vaccines candles horses comets jazz potatoes submarines dreams wheat elevators butterflies glass markets ants radio "
    "swimming snow cotton planets parrots mirrors batteries sculpture rain camels printing oranges robots tunnels language "
    "turtles"
)
QUESTIONS = (
    "Tell me something interesting about {}.",
    "Why do people care about {}?",
    "Explain {} to a child.",
    "What should everyone know about {}?",
    "How have {} changed over the last century?",
    "Write a short paragraph about {}.",
    "What is the most common mistake people make about {}?",
    "Describe a day that has to do with {}.",
)
NUM_TEST_SUBJECTS = 16
MIN_WORDS = 40


class Instruction(NamedTuple):
    text: str
    name: str
    arguments: dict[str, object]


INSTRUCTIONS = (
    Instruction("Do not use any commas.", "punctuation:no_comma", {}),
    Instruction("Put your whole answer in double quotation marks.", "startend:quotation", {}),
    Instruction(
        "Write exactly 3 bullet points, each on a line that begins with *.", "detectable_format:number_bullet_lists", {"num_bullets": 3}
    ),
    Instruction("Give your answer a title in double angular brackets, such as <<title>>.", "detectable_format:title", {}),
    Instruction('End with a postscript that begins with "P.S.".', "detectable_content:postscript", {"postscript_marker": "P.S."}),
)
LONG_ENOUGH = Instruction(
    f"Write at least {MIN_WORDS} words.", "length_constraints:number_words", {"relation": "at least", "num_words": MIN_WORDS}
)


def row(question: str, *instructions: Instruction) -> dict[str, object]:
    return {
        "prompt": " ".join([question, *(instruction.text for instruction in instructions)]),
        "metadata": {
            "instruction_id_list": [instruction.name for instruction in instructions],
            "kwargs": [instruction.arguments for instruction in instructions],
        },
    }


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    subjects = SUBJECTS.split()
    rng.shuffle(subjects)
    for split, chosen in (("test", subjects[:NUM_TEST_SUBJECTS]), ("train", subjects[NUM_TEST_SUBJECTS:])):
        asked = [(question.format(subject), rng.choice(INSTRUCTIONS)) for subject, question in product(chosen, QUESTIONS)]
        rng.shuffle(asked)
        for length, more in (("short", ()), ("long", (LONG_ENOUGH,))):
            file = directory / f"{length}-{split}.jsonl"
            file.write_text("".join(json.dumps(row(question, instruction, *more)) + "\n" for question, instruction in asked))
            print(f"{file}: {len(asked)} questions")


if __name__ == "__main__":
    main()
