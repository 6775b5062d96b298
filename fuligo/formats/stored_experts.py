"""Forms of routed experts in checkpoints and engines. Pure Python."""

from enum import StrEnum


class StoredExperts(StrEnum):
    """Form of routed experts in checkpoints and engines."""

    APART = "apart"
    """A tensor for each expert and projection."""
    WHOLE = "whole"
    """A tensor for all experts of a layer."""
    MIXTRAL = "mixtral"
    """As `APART`, with Mixtral's names (`block_sparse_moe.experts.0.w1`), which transformers' model does not have."""


_MIXTRAL_MODULE = {".mlp.": ".block_sparse_moe."}
_MIXTRAL_MATRICES = {".gate_proj.": ".w1.", ".down_proj.": ".w2.", ".up_proj.": ".w3."}


def mixtral_name(name: str) -> str:
    """Return the name that files of Mixtral's kind have for a weight of transformers 5; other names are returned unchanged."""
    pairs = {**_MIXTRAL_MODULE, **(_MIXTRAL_MATRICES if ".experts." in name else {})}
    for ours, theirs in pairs.items():
        name = name.replace(ours, theirs)
    return name
