"""Tests that need a CUDA device; `make test-gpu` runs them."""

from pathlib import Path

import pytest
import torch

from tests import tiny


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue  # this hook sees the items of all folders
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", params=["qwen3", "llama", "glm4"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint with heads of 64, which flash kernels support."""
    head = {} if request.param == "llama" else {"head_dim": 64}
    return tiny.save_checkpoint(tmp_path_factory.mktemp(request.param), request.param, hidden=256, layers=3, **head)
