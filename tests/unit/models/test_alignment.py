"""Alignment of weights, which MKL needs for bitwise equal results from run to run."""

import torch
from transformers import AutoModelForCausalLM

from fuligo.models.modules import ALIGNMENT_BYTES, align_weights
from tests import tiny


def test_weights_of_a_mapped_file_are_aligned_and_unchanged(tmp_path) -> None:
    directory = tiny.save_checkpoint(tmp_path, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    align_weights(model)
    assert all(parameter.data_ptr() % ALIGNMENT_BYTES == 0 for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_a_view_at_an_odd_address_is_moved() -> None:
    linear = torch.nn.Linear(4, 4)
    linear.weight.data = torch.arange(17.0)[1:].view(4, 4)
    align_weights(linear)
    assert linear.weight.data_ptr() % ALIGNMENT_BYTES == 0
    assert torch.equal(linear.weight, torch.arange(1.0, 17.0).view(4, 4))
