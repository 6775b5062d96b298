"""Reinforcement-learning post-training of language models. Importing the package imports none of its modules."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fuligo.api import configure as configure
    from fuligo.api import train as train
    from fuligo.api import train_async as train_async
    from fuligo.api import train_many as train_many

__all__ = ["configure", "train", "train_async", "train_many"]


def __dir__() -> list[str]:
    """List the names of the package, including the functions that are imported on first use, so that notebooks complete them."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fuligo' has no attribute {name!r}")
    from fuligo import api

    return getattr(api, name)
