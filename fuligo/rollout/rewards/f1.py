"""Token F1 of SQuAD (Rajpurkar et al. 2016)."""

from __future__ import annotations

import re
import string
from collections import Counter

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def squad_tokens(text: str) -> list[str]:
    """Split a text at white space, in lower case and without ASCII punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split()


def f1_score(answer: str, gold: str) -> float:
    """Return the harmonic mean of precision and recall over the multisets of tokens; 1 if both are empty."""
    answer_tokens, gold_tokens = squad_tokens(answer), squad_tokens(gold)
    if not answer_tokens or not gold_tokens:
        return float(answer_tokens == gold_tokens)
    common = (Counter(answer_tokens) & Counter(gold_tokens)).total()
    return 2 * common / (len(answer_tokens) + len(gold_tokens))
