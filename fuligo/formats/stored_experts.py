"""Layouts of routed experts in checkpoints and engines. Pure Python."""

from enum import StrEnum


class StoredExperts(StrEnum):
    """Layout of routed experts in checkpoints and engines."""

    APART = "apart"
    """One tensor for each expert and projection."""
    WHOLE = "whole"
    """One tensor for all experts of a layer, per matrix (`experts.gate_up_proj`, `experts.down_proj`)."""
    MIXTRAL = "mixtral"
    """Tensors as with `APART`, but with Mixtral's names (`block_sparse_moe.experts.0.w1`), which transformers' modules do not have."""


_MIXTRAL_MODULE = {".mlp.": ".block_sparse_moe."}
_MIXTRAL_MATRICES = {".gate_proj.": ".w1.", ".down_proj.": ".w2.", ".up_proj.": ".w3."}


def mixtral_name(name: str) -> str:
    """Return the Mixtral-style name of a weight of transformers 5: `mlp` becomes `block_sparse_moe`, experts' projections w1, w2, w3."""
    pairs = {**_MIXTRAL_MODULE, **(_MIXTRAL_MATRICES if ".experts." in name else {})}
    for ours, theirs in pairs.items():
        name = name.replace(ours, theirs)
    return name
