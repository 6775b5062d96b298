"""Write questions that a short program answers and a model cannot compute. python examples/code/make_data.py"""

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(slots=True, frozen=True)
class Question:
    """Question with a program that answers it."""

    question: str
    program: str
    answer: Callable[[], int]


def draw(generator: random.Random) -> Question:
    """Draw a question of one of four kinds."""
    low, high = sorted(generator.sample(range(100, 5000), 2))
    numbers = range(low, high + 1)
    exponent, modulus = high % 50 + 10, high + 1000003
    kind = generator.randrange(4)
    if kind == 0:
        text = f"How many primes are between {low} and {high}?"
        program = f"print(sum(all(n % d for d in range(2, 72) if d < n) for n in range({low}, {high} + 1)))"
        answer = lambda: sum(all(n % d for d in range(2, math.isqrt(n) + 1)) for n in numbers)  # noqa: E731
    elif kind == 1:
        text = f"What is the sum of the digits of {low} to the power of {exponent}?"
        program = f"print(sum(map(int, str({low} ** {exponent}))))"
        answer = lambda: sum(map(int, str(low**exponent)))  # noqa: E731
    elif kind == 2:
        text = f"How many numbers from {low} to {high} are palindromes?"
        program = f"print(sum(str(n) == str(n)[::-1] for n in range({low}, {high} + 1)))"
        answer = lambda: sum(str(n) == str(n)[::-1] for n in numbers)  # noqa: E731
    else:
        text = f"What is {low} factorial modulo {modulus}?"
        program = f"import math\nprint(math.factorial({low}) % {modulus})"
        answer = lambda: math.factorial(low) % modulus  # noqa: E731
    return Question(text + " Answer with the number alone.", program, answer)


def main() -> None:
    generator = random.Random(1)
    for name, size in (("train", 400), ("test", 50)):
        drawn = [draw(generator) for _ in range(size)]
        rows = [{"question": each.question, "answer": str(each.answer())} for each in drawn]
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
