"""Routing of tokens to experts: shapes of families, and checks of an engine's answer."""

import base64

import numpy as np
import pytest

from fuligo.errors import ConfigError
from fuligo.models.registry import architecture_of
from fuligo.models.routing import RoutingShape
from tests import tiny

SHAPE = RoutingShape(num_layers=3, moe_layers=(1, 2), num_experts=8, top_k=2)


def encoded(experts: np.ndarray) -> str:
    return base64.b64encode(experts.astype(np.int32).tobytes()).decode()


def answered(num_tokens: int) -> np.ndarray:
    """[tokens, 3, 2]; the dense layer's numbers mean nothing."""
    return np.array([[[9, 9], [token % 8, (token + 1) % 8], [7, token % 7]] for token in range(num_tokens)])


@pytest.mark.parametrize(("family", "moe_layers"), [("qwen3_moe", (0, 1, 2)), ("glm4_moe", (1, 2))])
def test_the_shape_is_that_of_the_layers_with_experts(family: str, moe_layers: tuple[int, ...]) -> None:
    shape = RoutingShape.of(architecture_of(tiny.model_config(family, layers=3).to_dict()))
    assert shape == RoutingShape(num_layers=3, moe_layers=moe_layers, num_experts=8, top_k=3)
    assert shape.bytes_per_token == len(moe_layers) * 3


def test_a_dense_model_has_none() -> None:
    with pytest.raises(ConfigError, match="of a qwen3 model: it has no experts"):
        RoutingShape.of(architecture_of(tiny.model_config("qwen3").to_dict()))


def test_an_answer_becomes_the_experts_of_tokens_and_layers() -> None:
    experts = SHAPE.decode(encoded(answered(9)), 9)
    assert experts.dtype == np.uint8
    assert np.array_equal(experts, answered(9)[:, 1:])
    assert RoutingShape(3, (1, 2), 300, 2).decode(encoded(answered(9) + 290), 9).dtype == np.uint16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "start the engine with --enable-return-routed-experts"),
        ("?", "as base64"),
        (encoded(answered(8)), "has 48 numbers instead of 9 x 3 x 2"),
        (encoded(answered(9) + 4), "experts from 4 to 11, but the model has 8"),
        (encoded(answered(9) - 1), "experts from -1 to"),
        (encoded(np.where(np.arange(9)[:, None, None] == 4, 0, answered(9))), "one expert twice"),
    ],
    ids=["missing", "malformed", "short", "too large", "negative", "not recorded"],
)
def test_an_answer_that_cannot_be_is_refused(text: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SHAPE.decode(text, 9)
