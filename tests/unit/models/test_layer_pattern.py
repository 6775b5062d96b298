import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuligo.config.values import layers_text, read_layers


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("[0]*3+[1]*2", [0, 0, 0, 1, 1]),
        ("[0] * 1 + [1] * 2", [0, 1, 1]),
        ("3*[1]", [1, 1, 1]),
        ("([0]+[1]*2)*2", [0, 1, 1, 0, 1, 1]),
        ("[0, 1, 1]", [0, 1, 1]),
        ("[]", []),
        ("[1]*0", []),
    ],
)
def test_sums_and_products_of_lists(text: str, layers: list[int]) -> None:
    assert read_layers(text) == layers


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3",
        "[1]+2",
        "[1]*[2]",
        "[1]-[1]",
        "[[1]]",
        "[1.5]",
        "['1']",
        "[True]",
        "[-1]",
        "[1",
        "x",
        "__import__('os').getcwd()",
        "[1 for _ in [1]]",
        "[1]*10**9",
        "[1]*999999999",
        "[1]*5000+[1]*5001",
        "(" * 5000 + "[1]" + ")" * 5000,
        "[1]+" * 200_000 + "[1]",
    ],
    ids=lambda text: text[:30],
)
def test_nothing_else_is_read_and_nothing_grows_without_end(text: str) -> None:
    with pytest.raises(ValueError):
        read_layers(text)


@given(st.lists(st.integers(0, 9), max_size=300))
def test_the_short_text_means_the_same(layers: list[int]) -> None:
    assert read_layers(layers_text(layers)) == layers


def test_the_text_of_a_mixture_is_as_its_authors_write_it() -> None:
    assert layers_text([0] * 3 + [1] * 89) == "[0]*3+[1]*89"
    assert layers_text([0, 1, 1]) == "[0,1,1]"
