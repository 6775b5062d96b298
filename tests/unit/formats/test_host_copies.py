import torch

from fuligo.formats.host_copies import host_copies, joined_copies


def test_joined_copies_are_equal_and_independent() -> None:
    tensors = [torch.randn(3, 5).T, torch.tensor(2.0), torch.empty(0, 4), torch.randn(7)]
    copies = joined_copies(tensors)
    for tensor, copy in zip(tensors, copies, strict=True):
        torch.testing.assert_close(copy, tensor, rtol=0, atol=0)
    before = copies[3].clone()
    tensors[3].zero_()
    assert torch.equal(copies[3], before)


def test_tensors_in_host_memory_are_not_copied() -> None:
    tensors = [("a", torch.ones(2)), ("b", torch.ones(3, dtype=torch.bfloat16))]
    copies = host_copies(tensors)
    assert [name for name, _ in copies] == ["a", "b"]
    assert all(copy.data_ptr() == tensor.data_ptr() for (_, copy), (_, tensor) in zip(copies, tensors, strict=True))
