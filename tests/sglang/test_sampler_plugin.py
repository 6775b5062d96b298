"""The plugin that draws tokens in one pass: SGLang finds it and has the sampler that it expects; its kernels draw from the softmax."""

import pytest

from fuligo.engines.sglang.server import SAMPLER_PLUGIN
from tests.sglang.engines import run_program


@pytest.mark.parametrize(("switch", "is_replaced"), [({}, "True"), pytest.param({"FULIGO_SAMPLER": "0"}, "False", marks=pytest.mark.slow)])
def test_sglangs_sampler_is_replaced_unless_switched_off(switch: dict[str, str], is_replaced: str) -> None:
    assert run_program("sampler_hook", SAMPLER_PLUGIN, **switch)[-1] == is_replaced


def test_draws_are_from_the_softmax_with_its_log_probabilities() -> None:
    run_program("interpreted_draws")
