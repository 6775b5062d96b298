"""Tests of the text of token ids by tables of bytes, against the Rust tokenizer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from fuligo.data.decoding import ByteDecoder, backend_decoder

ADDED = [
    AddedToken("<|end|>", special=True),
    AddedToken("<tool>", special=False),
    AddedToken("two words", special=False),
    AddedToken("<0x41>", special=False),
    AddedToken("▁", special=False),
    AddedToken("naïve🙂", special=True),
]
FROM_GGUF = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.ByteLevel()]
NUM_IDS = 256 + 3 + len(ADDED)


def byte_level(decoder: decoders.Decoder) -> Tokenizer:
    """Return a tokenizer of the bytes, three merges and added tokens."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {each: id for id, each in enumerate([*characters, "Ġa", "Ã©", "ðŁ"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ġ", "a"), ("Ã", "©"), ("ð", "Ł")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoder
    tokenizer.add_tokens(ADDED)
    return tokenizer


DECODERS = {"plain": decoders.ByteLevel(), "from GGUF": decoders.Sequence(FROM_GGUF)}
TOKENIZERS = {name: byte_level(decoder) for name, decoder in DECODERS.items()}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip", [False, True])
@given(ids=st.lists(st.integers(0, NUM_IDS + 5), max_size=40), plain=st.booleans())
def test_byte_decoder_agrees_with_the_tokenizer(name: str, skip: bool, ids: list[int], plain: bool) -> None:
    tokenizer = TOKENIZERS[name]
    ids = [id % 259 for id in ids] if plain else ids
    decode = backend_decoder(tokenizer, skip_special_tokens=skip)
    assert isinstance(decode, ByteDecoder)
    assert decode(ids) == decode(ids) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=st.text())
def test_byte_decoder_returns_the_text_that_was_tokenized(text: str) -> None:
    tokenizer = TOKENIZERS["plain"]
    assert backend_decoder(tokenizer, skip_special_tokens=False)(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence([decoders.Replace("a", "b"), decoders.ByteLevel()]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
        decoders.WordPiece(),
        decoders.Metaspace(),
    ],
)
def test_other_decoders_are_left_to_the_tokenizer(decoder: decoders.Decoder) -> None:
    tokenizer = byte_level(decoder)
    decode = backend_decoder(tokenizer, skip_special_tokens=True)
    assert not isinstance(decode, ByteDecoder)
    ids = tokenizer.encode(" a banana").ids
    assert decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)
