"""DAPO's reward: the answer line, normalized as text and compared character by character.

Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale"; the normalization is that of Minerva (Lewkowycz et al.
2022, appendix D.1) in the variant that DAPO's released reward uses.
"""

import re

from fuligo.rollout.rewards.extraction import DAPO_TAIL_CHARS

_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    (r"\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
"""Replacements in this order; later ones apply to the result of earlier ones."""
_UNITS = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points", "feet", "minutes",
    "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students", "childrentickets", "multiples",
)  # fmt: skip
_MARKUP = (
    r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}", r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}",
    r"\;", r",\!", "{,}", '"', r"\dots",
)  # fmt: skip
_WRAPPERS = tuple(re.compile(pattern) for pattern in (r"\\text\{(.*?)\}", r"\\textbf\{(.*?)\}", r"\\overline\{(.*?)\}", r"\\boxed\{(.*)\}"))
_INLINE_MATH = re.compile(r".*?(\$.*?\$).*")
_NUMBER = re.compile(r"[+-]?[\d,]*\d(?:\.\d*)?")
_ZEROS = re.compile(r"(?<=\d)\.0*$")
"""End of `42.0`: DAPO's labels are integers, even where a file has them as floats."""
_SHORT_FRACTION = re.compile(r"frac([^{])(.)")
_SHORT_ROOT = re.compile(r"sqrt([^{])")


def normalize(answer: str) -> str:
    """Normalize an answer for comparison: keep the right-hand side of an equation, and remove units, spaces and markup."""
    answer = answer.rsplit("=", 1)[-1]
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    for removed in (*_UNITS, *_MARKUP):
        answer = answer.replace(removed, "")
    answer = _INLINE_MATH.sub(r"\1", answer)
    for wrapper in _WRAPPERS:
        answer = wrapper.sub(r"\1", answer)
    answer = _SHORT_FRACTION.sub(r"frac{\1}{\2}", answer)
    answer = _SHORT_ROOT.sub(r"sqrt{\1}", answer)
    answer = answer.replace("$", "")
    if _NUMBER.fullmatch(answer := answer.strip()):
        answer = answer.replace(",", "")
    return _ZEROS.sub("", answer)


def dapo_reward(answer: str | None, golds: list[str]) -> dict[str, float | str]:
    """Return `score` (1 or -1, the reward that DAPO trains on), `acc` (1 or 0) and `pred` (the normalized answer)."""
    pred = "[INVALID]" if answer is None else normalize(answer[-DAPO_TAIL_CHARS:])
    correct = answer is not None and any(_equal(answer, pred, gold) for gold in golds)
    return {"score": 1.0 if correct else -1.0, "acc": float(correct), "pred": pred}


def _equal(answer: str, pred: str, gold: str) -> bool:
    """Compare the normalized texts, or the original ones if normalization leaves nothing of the label (`cents` is a unit)."""
    return pred == normal if (normal := normalize(gold)) else answer.strip() == gold.strip()
