"""Random configs whose single values are valid (they need not fit together)."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from fuligo.config import Config
from fuligo.config.assignments import Assignment, build_config
from fuligo.config.flags import Flag, Kind, flags

TEXTS = st.text(alphabet=st.characters(codec="utf-8"), min_size=1, max_size=20)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)


def values(flag: Flag) -> st.SearchStrategy[Any]:
    """Values that the flag takes."""
    if flag.optional and flag.default is None:
        return st.none() | _given(flag)
    return _given(flag)


def _given(flag: Flag) -> st.SearchStrategy[Any]:
    match flag.kind:
        case Kind.BOOL:
            return st.booleans()
        case Kind.INT:
            return st.integers(2, 10**6)
        case Kind.FLOAT:
            return _floats(flag)
        case Kind.TEXT:
            return TEXTS
        case Kind.CHOICE:
            return st.sampled_from(flag.choices)
        case Kind.TEXT_LIST:
            return st.lists(TEXTS, max_size=3)
        case Kind.INT_LIST:
            return st.lists(st.integers(-(10**6), 10**6), max_size=3)
        case Kind.JSON:
            return st.dictionaries(TEXTS, TEXTS if flag.name == "env" else JSON_VALUES, max_size=3)


def _floats(flag: Flag) -> st.SearchStrategy[float]:
    """Inside the bounds of every flag: those above 1 exclude 1, those of probabilities end there."""
    if flag.bounds == "> 1":
        return st.floats(1.0, 1e6, exclude_min=True)
    return st.floats(0.0, 1.0, exclude_min=True, exclude_max=True)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    names = draw(st.sets(st.sampled_from(sorted(flags())), max_size=25))
    return build_config(Assignment(flags()[name], draw(values(flags()[name])), name) for name in sorted(names))
