from pathlib import Path

import pytest

from tests import tiny

SHAPE = {"tie_word_embeddings": True, "initializer_range": 0.05}
"""Scale of the weights, about that of real ones, because float32 noise grows with it."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """Save a two-layer Qwen3 of 64 hidden units."""
    return tiny.save_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", **SHAPE)


@pytest.fixture(scope="session")
def reference_checkpoint(tmp_path_factory) -> Path:
    """Save the same architecture with other weights."""
    return tiny.save_checkpoint(tmp_path_factory.mktemp("reference"), "qwen3", seed=1, **SHAPE)
