"""Requests are matched with what a session said."""

from typing import Any

import numpy as np
import pytest

from fuligo.gateway.conversation import Conversation, Place, Sampled, Turn
from tests.unit.environments.conversations import ADD

QUESTION = {"role": "user", "content": "q"}
NO_TOKENS = np.empty(0, np.int32)
CALLS = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]


def say(conversation: Conversation, messages: list[dict[str, Any]], answer: dict[str, Any], stop: str = "") -> Turn:
    place = conversation.find(messages, ())
    sampled = Sampled(NO_TOKENS, np.empty(0, np.float32), NO_TOKENS, "stop")
    turn = Turn(len(conversation.turns), place.parent, [*messages, answer], NO_TOKENS, sampled)
    conversation.add(place, turn, answer, stop)
    return turn


def find(conversation: Conversation, *messages: dict[str, Any], tools: tuple = ()) -> Place:
    return conversation.find(list(messages), tools)


def said(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


@pytest.mark.parametrize(
    "returned",
    [
        said("yes"),
        said(" yes\n"),
        said("yes", reasoning_content="because"),
        said("yes", refusal=None, annotations=[], audio=None),
        said("yes</code>"),
    ],
)
def test_an_answer_is_known_in_every_spelling_of_a_client(returned: dict[str, Any]) -> None:
    conversation = Conversation()
    turn = say(conversation, [QUESTION], said("yes", reasoning_content="because"), stop="</code>")
    place = find(conversation, QUESTION, returned, QUESTION)
    assert place.parent is turn and place.new == [QUESTION]


@pytest.mark.parametrize(
    "messages",
    [
        [QUESTION, said("no")],
        [QUESTION, said("yes", reasoning_content="other")],
        [{"role": "system", "content": "q"}, said("yes")],
        [{"role": "user", "content": "q "}, said("yes")],
        [said("yes")],
        [QUESTION, {"role": "user", "content": "yes"}],
        [QUESTION, said("yes", tool_calls=CALLS)],
    ],
)
def test_a_rewritten_history_is_not_known(messages: list[dict[str, Any]]) -> None:
    conversation = Conversation()
    say(conversation, [QUESTION], said("yes", reasoning_content="because"))
    place = find(conversation, *messages)
    assert place.parent is None and place.new == messages


def test_other_tools_are_another_conversation() -> None:
    conversation = Conversation()
    say(conversation, [QUESTION], said("yes"))
    assert find(conversation, QUESTION, said("yes"), tools=(ADD,)).parent is None


def test_calls_are_equal_by_their_arguments() -> None:
    conversation = Conversation()
    turn = say(conversation, [QUESTION], said("", tool_calls=CALLS))
    reordered = [{**CALLS[0], "function": {"name": "add", "arguments": {"b": 2, "a": 1}}}]
    assert find(conversation, QUESTION, said(None, tool_calls=reordered)).parent is turn
    other = [{**CALLS[0], "function": {"name": "add", "arguments": {"b": 2, "a": 3}}}]
    assert find(conversation, QUESTION, said(None, tool_calls=other)).parent is None


def test_the_longest_beginning_counts_and_a_dropped_turn_branches() -> None:
    conversation = Conversation()
    first = say(conversation, [QUESTION], said("one"))
    history = [QUESTION, said("one"), QUESTION]
    second = say(conversation, history, said("two"))
    assert second.parent is first
    assert find(conversation, *history, said("two"), QUESTION).parent is second
    dropped = say(conversation, [QUESTION, said("one"), {"role": "user", "content": "instead"}], said("three"))
    assert dropped.parent is first
    paths = [[(turn.number, is_first) for turn, is_first in path] for path in conversation.branches()]
    assert paths == [[(0, True), (1, True)], [(0, False), (2, True)]]


def test_a_turn_after_a_known_spelling_is_found_by_every_other() -> None:
    conversation = Conversation()
    say(conversation, [QUESTION], said("one", reasoning_content="r"))
    turn = say(conversation, [QUESTION, said("one"), QUESTION], said("two"))
    assert find(conversation, QUESTION, said("one", reasoning_content="r"), QUESTION, said("two")).parent is turn


def test_equal_requests_have_equal_states_and_others_do_not() -> None:
    conversation = Conversation()
    say(conversation, [QUESTION], said("one"))
    once, again = find(conversation, QUESTION), find(conversation, QUESTION)
    assert once.state == again.state != find(conversation, QUESTION, said("one"), QUESTION).state
