"""Tests of the text of token ids, against transformers' own decoding."""

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from fuligo.data.template import rendered_ids, response_decoder


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


@pytest.mark.parametrize("insists", [False, True])
def test_response_decoder_cleans_up_where_transformers_does(
    tokenizer: PreTrainedTokenizerFast, insists: bool, monkeypatch: pytest.MonkeyPatch
):
    """transformers ignores the setting for BPE unless a second one insists."""
    monkeypatch.setattr(tokenizer, "clean_up_tokenization_spaces", True)
    monkeypatch.setattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", insists, raising=False)
    ids = tokenizer("one two , three .", add_special_tokens=False)["input_ids"]
    decoded = response_decoder(tokenizer)(ids)
    assert decoded == tokenizer.decode(ids, skip_special_tokens=True)
    assert ("two ," in decoded) != insists


def test_rendered_ids_are_those_of_a_call(tokenizer: PreTrainedTokenizerFast):
    texts = ["", "one two", f"{tokenizer.eos_token}\n<think>é🙂", " a" * 3000]
    for text in texts:
        assert rendered_ids(tokenizer, text) == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("left_by", [{"truncation": True, "max_length": 2}, {"padding": "max_length", "max_length": 9}])
def test_rendered_ids_ignore_what_another_call_left(tokenizer: PreTrainedTokenizerFast, left_by: dict[str, object]):
    expected = tokenizer("one two three", add_special_tokens=False)["input_ids"]
    tokenizer("one two three", **left_by)
    assert rendered_ids(tokenizer, "one two three") == expected


def test_rendered_ids_split_special_tokens_if_the_tokenizer_does(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch):
    text = f"one{tokenizer.eos_token}"
    assert tokenizer.eos_token_id in rendered_ids(tokenizer, text)
    monkeypatch.setattr(tokenizer, "split_special_tokens", True)
    assert tokenizer.eos_token_id not in rendered_ids(tokenizer, text)
    monkeypatch.setattr(tokenizer, "split_special_tokens", False)
    assert tokenizer.eos_token_id in rendered_ids(tokenizer, text)
