"""`fuligo convert`: a checkpoint from one format to another."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from fuligo.errors import ConfigError

CONVERSIONS = {
    "hf-to-dist": ("fuligo.cli.convert_hf_to_dist", "a Hugging Face checkpoint to a distributed one, also under torchrun"),
    "dist-to-hf": ("fuligo.cli.convert_dist_to_hf", "a distributed checkpoint to a Hugging Face directory"),
    "value-to-hf": ("fuligo.cli.convert_value_to_hf", "a checkpoint's value model to a Hugging Face token classifier"),
    "compare": ("fuligo.cli.convert_compare", "whether two checkpoints hold the same tensors, to the bit"),
    "fp8": ("fuligo.cli.convert_fp8", "a Hugging Face checkpoint to FP8, which engines load: blocks, channels or tensors"),
}
"""Name -> a module with `main(arguments) -> exit code`, imported when it is asked for, and what the conversion does."""


def main(arguments: Sequence[str]) -> int:
    """Run one conversion; its exit code.

    Raises:
        ConfigError: there is no such conversion.
    """
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    name, *rest = arguments
    if name not in CONVERSIONS:
        raise ConfigError(f"fuligo convert: there is no conversion {name!r}; they are {', '.join(CONVERSIONS)}")
    module, _ = CONVERSIONS[name]
    return importlib.import_module(module).main(rest)


def overview() -> str:
    """The conversions, one line each."""
    width = max(map(len, CONVERSIONS))
    lines = [f"  fuligo convert {name:<{width}}  {text}" for name, (_, text) in CONVERSIONS.items()]
    return "\n".join(["fuligo convert: a checkpoint from one format to another", "", *lines])
