"""Write word problems for a calculator, conversations for the warm start, and a model whose chat template shows tools.

    python -m examples.word_problems.make_data models/smollm2 data/word_problems

`shown.jsonl` has answers to imitate: one in five calls the calculator, the others guess. `train.jsonl` and `test.jsonl` have problems with
their results, of the four kinds in `shown.jsonl` and of two more. The names and objects in the test problems are in no other file. `model`
is a copy of the given model with a chat template that shows tools (that of the other examples), for models whose own template does not. The
same command writes the same files.
"""

import ast
import json
import random
import shutil
import sys
from pathlib import Path

from examples.calculator.environment import value
from examples.warm_start import CHAT_TEMPLATE, Row, conversation, mixed, tool_answer, tool_definition, write_rows

NUM_SHOWN, NUM_TRAIN, NUM_TEST = 384, 2_000, 128
SHARE_WITH_TOOL = 0.2
TOOL = tool_definition("calculator", "expression")
NAMES = "Ada Ben Clara David Elena Felix Grace Hugo Ines Jonas Karim Lena Mateo Nora Oskar Priya Rosa Samir Tara Viktor"
THINGS = "apples books candles coins cups eggs flowers lamps letters marbles nails onions pears pencils plates rolls shells stamps tickets"
NUM_TEST_WORDS = 5
"""Number of names and objects, at the end of each list, that occur only in the test problems."""
PROBLEMS = (
    ("{name} fills {a} boxes with {b} {things} each and finds {c} more. How many {things} does {name} have?", "{a} * {b} + {c}"),
    ("{name} has {a} shelves with {b} {things} each and gives {c} of them away. How many {things} are left?", "{a} * {b} - {c}"),
    ("{name} has {a} {things} and buys {b} bags of {c} {things}. How many {things} does {name} have now?", "{a} + {b} * {c}"),
    ("A box of {things} costs {a} coins. {name} buys {b} boxes on Monday and {c} on Friday. What do they cost?", "{a} * ({b} + {c})"),
    ("{name} packs {a} bags of {b} {things} and {c} bags of {d} {things}. How many {things} are packed?", "{a} * {b} + {c} * {d}"),
    ("{name} brings {a} {things} to each of {b} friends, of whom {c} do not want any. How many {things} are taken?", "{a} * ({b} - {c})"),
)
"""Problems, and the expressions that solve them."""
NUM_SHOWN_KINDS = 4
"""Number of kinds of problems in the conversations; calls for the other kinds are learned from rewards."""


def problem(rng: random.Random, *, is_test: bool, num_kinds: int = len(PROBLEMS)) -> tuple[str, str, int]:
    """Draw a problem of one of the first `num_kinds` kinds; return it with its expression and result."""
    words = slice(-NUM_TEST_WORDS, None) if is_test else slice(None, -NUM_TEST_WORDS)
    text, expression = rng.choice(PROBLEMS[:num_kinds])
    numbers = {key: rng.randint(12, 97) for key in "abd"} | {"c": rng.randint(2, 11)}
    solution = expression.format(**numbers)
    question = text.format(name=rng.choice(NAMES.split()[words]), things=rng.choice(THINGS.split()[words]), **numbers)
    return question, solution, value(ast.parse(solution, mode="eval").body)


def shown(rng: random.Random) -> tuple[Row, Row]:
    """Draw a problem; return an answer that calls the calculator, and one that guesses a number of the right size."""
    question, expression, result = problem(rng, is_test=False, num_kinds=NUM_SHOWN_KINDS)
    guess = str(round(result * rng.uniform(0.8, 1.2)))
    calls = tool_answer("calculator", {"expression": expression}, str(result), str(result))
    return conversation(question, calls, [TOOL]), conversation(question, [{"role": "assistant", "content": guess}], [TOOL])


def problems(rng: random.Random, count: int, *, is_test: bool) -> list[Row]:
    """Draw different problems with their results."""
    drawn: dict[str, Row] = {}
    while len(drawn) < count:
        question, _, result = problem(rng, is_test=is_test)
        drawn[question] = {"question": question, "answer": str(result)}
    return list(drawn.values())


def write_model(source: Path, folder: Path) -> None:
    """Copy a model, with the chat template that shows tools."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    source, directory = Path(sys.argv[1]), Path(sys.argv[2])
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    skill, guesses = (list(rows) for rows in zip(*(shown(rng) for _ in range(NUM_SHOWN)), strict=True))
    write_rows(directory / "shown.jsonl", mixed(skill, guesses, SHARE_WITH_TOOL, rng))
    write_rows(directory / "train.jsonl", problems(rng, NUM_TRAIN, is_test=False))
    write_rows(directory / "test.jsonl", problems(rng, NUM_TEST, is_test=True))
    write_model(source, directory / "model")
    print(f"{directory}: {NUM_SHOWN} conversations, {NUM_TRAIN} training and {NUM_TEST} test problems, a model")


if __name__ == "__main__":
    main()
