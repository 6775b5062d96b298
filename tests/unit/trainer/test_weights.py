"""Weights that the torch trainer sends to engines: parameters in the engines' data type, the routers' correction bias in float32."""

import torch

from fuligo.trainer.torch_backend.weights import named_weights, weight_tensors
from tests import tiny


def test_parameters_are_cast_and_the_correction_of_scores_is_not() -> None:
    model = tiny.model("glm4_moe")
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer)
    sent = dict(named_weights(model, dtype=torch.bfloat16))
    corrections = {name for name in sent if name.endswith("e_score_correction_bias")}
    assert corrections
    for name, tensor in weight_tensors(model).items():
        expected = tensor if name in corrections else tensor.bfloat16()
        assert torch.equal(sent[name], expected), name
        assert sent[name].dtype == expected.dtype, name
