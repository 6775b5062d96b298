"""Task of the quickstart: sums in words, answered in a box, with or without the steps.

A *worked* answer adds digit by digit inside `<think>`; a *careless* one forgets the carries; a *guess* boxes a number without
thinking, which is usually wrong. The warm-start checkpoint can work out a sum but seldom does so carefully; GRPO reinforces the
careful answers.
"""

import random

WORDINGS = ("What is {a} + {b}?", "Add {a} and {b}.", "{a} plus {b} is what?", "Find the sum of {a} and {b}.")


def problem(rng: random.Random) -> tuple[int, int, str]:
    """Draw two numbers of two or three digits, and return them with the question in one of four wordings."""
    a, b = (rng.randint(10, 99) if rng.random() < 0.5 else rng.randint(100, 999) for _ in range(2))
    return a, b, rng.choice(WORDINGS).format(a=a, b=b)


def worked(a: int, b: int, *, carry_forward: bool = True) -> str:
    """Return the steps (`7+8=15, 3+4+1=8`: digits from the right, with the carry as a third summand) and the boxed sum."""
    digits_a, digits_b = str(a)[::-1], str(b)[::-1]
    total, columns, result = 0, [], ""
    for column in range(max(len(digits_a), len(digits_b))):
        summands = [int(digits[column]) for digits in (digits_a, digits_b) if column < len(digits)]
        summands += [1] if carry_forward and total > 9 else []
        total = sum(summands)
        columns.append("+".join(map(str, summands)) + f"={total}")
        result = str(total % 10) + result
    if total > 9:
        result = "1" + result
    return f"<think>{', '.join(columns)}</think>\\boxed{{{result}}}"


def careless(a: int, b: int) -> str:
    """Return the worked answer without carries; it is right if no column except the leftmost has a carry."""
    return worked(a, b, carry_forward=False)


def guess(a: int, b: int, rng: random.Random) -> str:
    """Return an answer without steps: a number near the sum, right one time in ten."""
    error = 0 if rng.random() < 0.1 else rng.choice([-100, -20, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 20, 100])
    return f"<think></think>\\boxed{{{a + b + error}}}"
