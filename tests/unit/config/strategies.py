"""Strategies for configs whose single values are valid but need not fit together."""

from typing import Any

from hypothesis import strategies as st

from fuligo.config import Config
from fuligo.config.assignments import Assignment, build_config
from fuligo.config.flag import Flag, Kind
from fuligo.config.flags import flags, passthrough_flags
from fuligo.config.passthrough import SglangArguments
from fuligo.config.schemas import BACKENDS
from fuligo.config.server_groups import ModelServers, ServerGroup

TEXTS = st.text(alphabet=st.characters(codec="utf-8"), min_size=1, max_size=20)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)


PATHS = TEXTS.filter(lambda text: not text.startswith(("./", "../")))
"""Paths that do not begin with a dot; a file stores the others resolved."""
REFERENCES = st.sampled_from(["${MY_KEY}", "${_1}"])
"""Secrets that a file stores as they are given."""
VARIABLES = st.sampled_from(["NCCL_DEBUG", "SGLANG_A", "OMP_NUM_THREADS"])
"""Environment variables whose values a file stores."""
LAYERS = st.lists(st.integers(0, 3), min_size=1, max_size=80)


def values(flag: Flag) -> st.SearchStrategy[Any]:
    """Return a strategy for values of the flag."""
    if flag.optional and flag.default is None:
        return st.none() | _given(flag)
    return _given(flag)


def _given(flag: Flag) -> st.SearchStrategy[Any]:
    text = st.sampled_from(flag.choices) if flag.choices else PATHS if flag.is_path else REFERENCES if flag.is_secret else TEXTS
    match flag.kind:
        case Kind.BOOL:
            return st.booleans()
        case Kind.INT | Kind.SIZE:
            return text.map(int) if flag.choices else _integers(flag, 2)
        case Kind.FLOAT:
            return _floats(flag)
        case Kind.TEXT | Kind.CHOICE:
            return text
        case Kind.TEXT_LIST:
            return st.lists(text, max_size=3)
        case Kind.INT_LIST:
            return st.lists(_integers(flag, -(10**6)), max_size=3)
        case Kind.FLOAT_LIST:
            return st.lists(_floats(flag), max_size=3)
        case Kind.JSON:
            variables = st.dictionaries(VARIABLES, TEXTS, max_size=2)
            return variables if flag.name.endswith(("env", "_keys")) else st.dictionaries(TEXTS, JSON_VALUES, max_size=3)
        case Kind.JSON_LIST:
            return st.lists(JSON_VALUES, max_size=3)
        case Kind.LAYERS:
            return st.integers(1, 100) | LAYERS
        case Kind.TOPOLOGY:
            return st.lists(model_servers(), min_size=1, max_size=2)


def _integers(flag: Flag, least: int) -> st.SearchStrategy[int]:
    limits = dict(bound.split() for bound in flag.bounds.split(" and ") if bound)
    return st.integers(max(least, int(limits.get(">=", least))), int(limits.get("<=", 10**6)))


def _floats(flag: Flag) -> st.SearchStrategy[float]:
    """Return a number within the bounds of every flag: some exclude 1, probabilities end at 1."""
    if flag.bounds == "> 1":
        return st.floats(1.0, 1e6, exclude_min=True)
    return st.floats(0.0, 1.0, exclude_min=True, exclude_max=True)


@st.composite
def arguments(draw: st.DrawFn, group: str) -> dict[str, Any]:
    """Return a strategy for pass-through arguments of a group."""
    known = passthrough_flags(group)
    names = draw(st.sets(st.sampled_from(sorted(known)), max_size=8))
    return {name: draw(values(known[name])) for name in sorted(names)}


@st.composite
def model_servers(draw: st.DrawFn) -> ModelServers:
    count = st.none() | st.integers(1, 64)
    groups = st.builds(
        ServerGroup,
        worker_type=st.sampled_from(["regular", "prefill", "decode", "placeholder"]),
        num_gpus=st.integers(0, 64),
        num_gpus_per_engine=count,
        overrides=arguments("sglang").map(SglangArguments),
    )
    return ModelServers(
        name=draw(TEXTS),
        model_path=draw(st.none() | PATHS),
        update_weights=draw(st.none() | st.booleans()),
        num_gpus_per_engine=draw(count),
        server_groups=draw(st.lists(groups, min_size=1, max_size=2)),
    )


@st.composite
def configs(draw: st.DrawFn) -> Config:
    known = [*flags().values(), *(flag for group in BACKENDS for flag in passthrough_flags(group).values())]
    by_name = {flag.flat_name: flag for flag in known}
    names = draw(st.sets(st.sampled_from(sorted(by_name)), max_size=25))
    return build_config(Assignment(by_name[name], draw(values(by_name[name])), name) for name in sorted(names))
