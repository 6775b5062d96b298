"""Tensors return from host memory unchanged, and take no memory of the device meanwhile."""

import pytest
import torch
from torch import nn

from fuligo.trainer.host_memory import HostMemory

CPU = torch.device("cpu")


def state() -> dict[str, torch.Tensor]:
    """Return tensors of several types, a view of another tensor, and tensors larger than a chunk."""
    torch.manual_seed(0)
    whole = torch.randn(100)
    return {
        "whole": whole,
        "part": whole[10:20],
        "half": torch.randn(33).bfloat16(),
        "step": torch.tensor(7),
        "parameter": nn.Parameter(torch.randn(64, 9)),
        "empty": torch.empty(0),
    }


@pytest.mark.parametrize("chunk_bytes", [64, 256, 1 << 20])
def test_contents_come_back_to_the_same_tensors(chunk_bytes: int) -> None:
    tensors, expected = state(), {name: tensor.detach().clone() for name, tensor in state().items()}
    memory = HostMemory(CPU, chunk_bytes)
    for _ in range(3):
        memory.take(tensors.values())
        assert memory.num_bytes_away == 4 * 100 + 2 * 33 + 8 + 4 * 64 * 9, "a view is not counted again"
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors.values())
        num_chunks = len(memory._chunks)
        memory.give_back()
        assert memory.num_bytes_away == 0
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    assert len(memory._chunks) == num_chunks, "allocated once"
    tensors["whole"][15] = -1.0
    assert tensors["part"][5] == -1.0, "still a view"


def test_tensors_may_be_added_later() -> None:
    """An optimizer has no state before its first step."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    memory = HostMemory(CPU, 128)
    memory.take(model.parameters())
    memory.give_back()
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    moments = [value for values in optimizer.state.values() for value in values.values()]
    before = [value.clone() for value in moments]
    memory.take([*model.parameters(), *moments])
    memory.give_back()
    assert all(torch.equal(value, old) for value, old in zip(moments, before))
    optimizer.step()


def test_gradients_come_back_as_zeros() -> None:
    weight, gradient = torch.ones(5), torch.ones(5)
    memory = HostMemory(CPU, 64)
    memory.take([weight], dropped=[gradient])
    assert memory.num_bytes_away == weight.numel() * 4 and gradient.untyped_storage().nbytes() == 0
    memory.give_back()
    assert torch.equal(weight, torch.ones(5)) and torch.equal(gradient, torch.zeros(5))
