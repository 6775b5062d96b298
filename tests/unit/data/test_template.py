"""Tests of the text of token ids, against transformers' own decoding."""

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from fuligo.data.template import response_decoder


@pytest.mark.parametrize("cleans_up", [False, True])
def test_response_decoder_agrees_with_transformers(tokenizer: PreTrainedTokenizerFast, cleans_up: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenizer, "clean_up_tokenization_spaces", cleans_up)
    monkeypatch.setattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", cleans_up, raising=False)
    decode = response_decoder(tokenizer)
    draw = np.random.default_rng(0)
    ends_in_a_space = [*tokenizer("one two , three .", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    for ids in (ends_in_a_space, *(draw.integers(0, len(tokenizer), 40).tolist() for _ in range(50))):
        assert decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)
    assert ("two ," in decode(ends_in_a_space)) != cleans_up


def test_response_decoder_uses_a_decode_method_of_its_own(tokenizer: PreTrainedTokenizerFast):
    class Loud(PreTrainedTokenizerFast):
        def _decode(self, *args, **kwargs):
            return super()._decode(*args, **kwargs).upper()

    loud = Loud(tokenizer_object=tokenizer.backend_tokenizer)
    assert response_decoder(loud)(loud("one", add_special_tokens=False)["input_ids"]) == "ONE"
