"""Sources of tokens, on texts that templates of several families write."""

import pytest

from fuligo.observability.viewer.sources import prompt_segments, sampled_tokens, token_sources


def parts(rendered: str | None, *messages: tuple[str, str]) -> list[tuple[str, str]]:
    return [(segment.name, segment.text) for segment in prompt_segments(rendered, messages)]


def test_a_prompt_is_its_messages_and_what_the_template_put_around_them() -> None:
    rendered = "<|im_start|>system\nTools: []<|im_end|>\n<|im_start|>user\nhi\n<|im_end|>\n<|im_start|>assistant\n"
    assert parts(rendered, ("user", "  hi\n")) == [
        ("template", "<|im_start|>system\nTools: []<|im_end|>\n<|im_start|>user\n"),
        ("user", "hi"),
        ("template", "\n<|im_end|>\n<|im_start|>assistant\n"),
    ]


def test_the_parts_of_a_prompt_are_its_text() -> None:
    rendered = "<s>a b a c</s>"
    for messages in ([("user", "a"), ("user", "a")], [("user", "c"), ("user", "a")], [("user", "")], [("user", "rewritten")]):
        assert "".join(segment.text for segment in prompt_segments(rendered, messages)) == rendered
    assert parts(None, ("user", "hi")) == [("user", "hi")]


TURNS = {
    "qwen": (
        "calc|<end>|\n|<start>|user|\n|<tool_response>|\n|4|2|\n|</tool_response>|<end>|\n|<start>|assistant|\n|It| is",
        "stttttttaaattttttss",
    ),
    "llama": ("calc|<eot>|<start_header>|ipython|<end_header>|\n\n|42|<eot>|So", "stttttats"),
    "plain text of a hook": ("calc|=|42|So", "saas"),
    "a word as the result": ("calc|<tool_response>|Paris|</tool_response>|So", "stats"),
    "nothing after a tool": ("calc|<end>|42", "sta"),
}


@pytest.mark.parametrize("family", TURNS)
def test_given_tokens_are_of_the_template_or_of_tools(family: str) -> None:
    joined, expected = TURNS[family]
    texts = joined.split("|")
    sampled = [letter == "s" for letter in expected]
    markers = [text.startswith("<") for text in texts]
    found = token_sources(texts, markers, sampled, [int(by_engine) for by_engine in sampled])
    assert "".join({"sampled": "s", "appended": "a", "template": "t"}[source] for source in found) == expected
    assert set(token_sources(None, markers, sampled, None)) <= {"sampled", "appended"}


def test_sampled_tokens_are_those_of_requests_else_those_with_a_probability() -> None:
    spans = [{"name": "generate", "first_token": 0, "num_tokens": 2}, {"name": "generate", "first_token": 3, "num_tokens": 9}]
    assert sampled_tokens(5, spans, [0.0] * 5) == [True, True, False, True, True]
    assert sampled_tokens(3, [{"name": "reward", "first_token": 0, "num_tokens": 0}], [-1.0, 0.0, -2.0]) == [True, False, True]
    assert sampled_tokens(2, [], None) == [True, True]
