"""Names that can be imported, and raise when used."""

from typing import Any


def absent(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def raises(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"torchvision's {name}: this is a stand-in for text models")

    return raises
