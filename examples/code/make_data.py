"""Write questions that a short program answers and a model cannot compute. python examples/code/make_data.py"""

import json
import math
import random
from pathlib import Path

FOLDER = Path(__file__).parent


def question(generator: random.Random) -> dict[str, str]:
    """Return a question and its answer."""
    low, high = sorted(generator.sample(range(100, 5000), 2))
    numbers = range(low, high + 1)
    kind = generator.randrange(4)
    if kind == 0:
        text, answer = (
            f"How many primes are between {low} and {high}?",
            sum(all(n % d for d in range(2, math.isqrt(n) + 1)) for n in numbers),
        )
    elif kind == 1:
        text, answer = (
            f"What is the sum of the digits of {low} to the power of {high % 50 + 10}?",
            sum(map(int, str(low ** (high % 50 + 10)))),
        )
    elif kind == 2:
        text, answer = f"How many numbers from {low} to {high} are palindromes?", sum(str(n) == str(n)[::-1] for n in numbers)
    else:
        text, answer = f"What is {low} factorial modulo {high + 1000003}?", math.factorial(low) % (high + 1000003)
    return {"question": text + " Answer with the number alone.", "answer": str(answer)}


def main() -> None:
    generator = random.Random(1)
    for name, size in (("train", 400), ("test", 50)):
        rows = [question(generator) for _ in range(size)]
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
