"""Memory of rendered conversations: correct, bounded, and large enough to render each turn once."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuligo.data.template import ChatTemplate
from fuligo.environments.rendered_texts import RenderedTexts
from fuligo.environments.rendering import Renderer
from tests.unit.environments.conversations import ADD, TEMPLATES, end_ids, ids, tokenizer


def said(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text} for text in texts]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 12)), max_size=40))
def test_it_holds_what_was_added_and_not_taken_within_its_limit(steps: list[tuple[bool, int, int]]) -> None:
    texts = RenderedTexts(max_chars=24)
    for adds, name, length in steps:
        if adds:
            texts.add(said(str(name)), (), str(name) * length)
        else:
            taken = texts.take(said(str(name)), ())
            assert taken is None or set(taken) <= {str(name)}
        held = [text for text, _ in texts._texts.values()]
        assert sum(map(len, held)) == texts._num_chars <= 24


def test_each_of_several_equal_conversations_takes_the_text_once() -> None:
    texts = RenderedTexts()
    texts.add(said("q"), (ADD,), "text")
    texts.add(said("q"), (ADD,), "text")
    assert [texts.take(said("q"), (ADD,)) for _ in range(3)] == ["text", "text", None]
    assert texts._num_chars == 0


def test_finding_a_text_does_not_take_it() -> None:
    texts = RenderedTexts()
    texts.add(said("q"), (), "text")
    assert [texts.find(said("q"), ()), texts.find(said("other"), ()), texts.take(said("q"), ())] == ["text", None, "text"]
    assert texts.find(said("q"), ()) is None


def test_tools_and_the_order_of_keys_distinguish_conversations() -> None:
    texts = RenderedTexts()
    texts.add([{"role": "user", "content": "q"}], (), "text")
    assert texts.take([{"role": "user", "content": "q"}], (ADD,)) is None
    assert texts.take([{"content": "q", "role": "user"}], ()) is None


def test_what_json_does_not_hold_is_not_remembered() -> None:
    texts = RenderedTexts()
    huge = [{"role": "tool", "content": 2**70}]
    texts.add(huge, (), "text")
    assert texts.take(huge, ()) is None


@pytest.mark.parametrize("name", ["qwen2_5", "CHATML"])
def test_a_turn_renders_its_conversation_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    render = Renderer(tokenizer(), ChatTemplate(tokenizer(), {"chat_template": TEMPLATES[name]}), end_ids())
    calls: list[int] = []
    original = ChatTemplate.prompt

    def counted(self: ChatTemplate, *args: Any) -> str:
        calls.append(1)
        return original(self, *args)

    monkeypatch.setattr(ChatTemplate, "prompt", counted)
    messages = said("q")
    render.prompt(messages)
    for number in range(3):
        messages = [*messages, {"role": "assistant", "content": "a"}]
        assert render.extension(messages, (), ids("a<|im_end|>"), said(f"{number}")) is not None
        messages = [*messages, *said(f"{number}")]
    assert len(calls) == 4
