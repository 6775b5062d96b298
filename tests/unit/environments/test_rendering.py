"""Exactness of the rendering around sampled tokens, over the chat templates of all families."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuligo.data.template import ChatTemplate
from fuligo.environments.environment import ToolCall
from fuligo.environments.rendering import Renderer
from fuligo.errors import DataError
from tests import tiny
from tests.unit.environments.conversations import ADD, ENDS, TEMPLATES, as_read, end_ids, ids, renderer, template, text, tokenizer, written

EXAMPLES = max(15, settings().max_examples // 4)
"""Per template; the nineteen templates share most of their ways."""
SHOWS_TOOLS = [name for name in TEMPLATES if renderer(name).shows_tools]
WORDS = st.text(st.sampled_from("ab 7\n{}<>\"'é漢🙂\u200b"), max_size=12)
SAFE = st.text(st.sampled_from("ab7é漢🙂"), min_size=1, max_size=6)
ARGUMENTS = st.fixed_dictionaries({"a": st.integers(-9, 99)}, optional={"note": SAFE})


@st.composite
def assistant(draw: st.DrawFn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": draw(SAFE | st.just(""))}
    if draw(st.booleans()):
        message["reasoning_content"] = draw(SAFE)
    calls = draw(st.lists(ARGUMENTS, max_size=2))
    if calls:
        message["tool_calls"] = [ToolCall("add", call, f"call0000{i}").to_json() for i, call in enumerate(calls)]
    return message


def answers(message: dict[str, Any], words: str) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    if not calls:
        return [{"role": "user", "content": words}]
    return [{"role": "tool", "content": f"{words}{number}", "tool_call_id": call["id"], "name": "add"} for number, call in enumerate(calls)]


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=EXAMPLES)
@given(turns=st.lists(st.tuples(assistant(), WORDS), min_size=1, max_size=4), question=WORDS, with_tools=st.booleans())
def test_extended_ids_are_the_templates_own_rendering(
    name: str, turns: list[tuple[dict[str, Any], str]], question: str, with_tools: bool
) -> None:
    """Holds for what the model writes canonically; `None` only where the template changes what is there."""
    render, tools = renderer(name), [ADD] if with_tools and name in SHOWS_TOOLS else []
    shown = [tool.to_json() for tool in tools] or None
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    meant = messages
    seen = render.prompt(messages, tools)
    for drawn, words in turns:
        message = {"reasoning_content": "t"} | drawn if text(seen).endswith("<think>\n") else drawn
        sampled = written(name, meant, as_read(name, message), tools)
        if sampled is None:
            return
        turn = render.parse(sampled, seen)
        assert not turn.truncated
        messages, meant = [*messages, turn.message()], [*meant, as_read(name, message)]
        new = answers(message, words)
        try:
            whole = template(name).prompt([*meant, *new], shown)
        except DataError:  # Llama allows one call a turn
            return
        more = render.extension(messages, tools, sampled, new)
        before = [*seen, *sampled]
        if more is None:
            assert not whole.startswith(text(before))
            seen = render.prompt([*messages, *new], tools)
        else:
            seen = [*before, *more]
        assert text(seen) == whole
        messages, meant = [*messages, *new], [*meant, *new]


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=EXAMPLES)
@given(
    said=st.text(st.sampled_from('ab {}":\né漢🙂<>'), max_size=20) | st.sampled_from(["<tool_call>", "<think>a", "a</think>", '{"name": ']),
    cut=st.integers(0, 3),
    end=st.sampled_from([*ENDS, None]),
    words=WORDS,
)
def test_any_turn_is_kept_and_answered_in_its_meaning(name: str, said: str, cut: int, end: str | None, words: str) -> None:
    """Whatever is sampled, cut inside a character or ended anywhere, the extension continues it and says what the template says."""
    render = renderer(name)
    body = ids(said)[: max(0, len(ids(said)) - cut)]
    sampled = [*body, *(ids(end) if end else [])]
    question = [{"role": "user", "content": "q"}]
    prompt = render.prompt(question)
    turn = render.parse(sampled, prompt)
    assert turn.num_tokens == len(sampled) and turn.truncated == (end is None)
    messages = [*question, turn.message()]
    new = answers(turn.message(), words)
    more = render.extension(messages, [], sampled, new)
    whole = text(render.prompt([*messages, *new]))
    if more is None:
        assert not whole.startswith(text([*prompt, *sampled]))
        return
    # What follows the turn is the template's own text to its end, from the turn's end token on.
    assert whole.endswith(text([*(ids(end) if end else []), *more]))
    assert any(token in end_ids() for token in [*sampled[-1:], *more]), "the model reads where its turn ended"


WRITTEN: dict[str, tuple[str, str]] = {
    "qwen": ("qwen2_5", '<think>\nt\n</think>\n\nhi\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "note": "é"}}\n</tool_call>'),
    "hermes, no line breaks": ("CHATML", '<think>t</think>hi<tool_call>{"arguments":{"note":"é","a":1},"name":"add"}</tool_call>'),
    "qwen3-coder": (
        "qwen3_5_nothink",
        "<think>\nt\n</think>\n\nhi\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\né\n</parameter>\n"
        "</function>\n</tool_call>",
    ),
    "glm-4.5": (
        "glm4moe",
        "\n<think>t</think>\nhi\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>note</arg_key>\n"
        "<arg_value>é</arg_value>\n</tool_call>",
    ),
    "deepseek-v3": (
        "deepseekv3",
        "t\n</think>\n\nhi<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 1, "note": "é"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    "deepseek-v3.1": (
        "deepseekv3",
        "t</think>hi<｜tool▁calls▁begin｜>"
        '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "note": "é"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
}


@pytest.mark.parametrize("family", WRITTEN)
def test_parse_reads_thinking_text_and_calls_of_each_family(family: str) -> None:
    name, said = WRITTEN[family]
    turn = renderer(name).parse(ids(said))
    assert (turn.reasoning, turn.content, turn.problems) == ("t", "hi", ())
    assert [(call.name, call.arguments) for call in turn.tool_calls] == [("add", {"a": 1, "note": "é"})]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama3_1", '{"name": "add", "parameters": {"a": 1}}'),
        ("llama3_1", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}'),
        ("GLM4", 'add\n{"a": 1}'),
        ("llama3", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'),  # renders no calls: read as Hermes writes them
    ],
)
def test_parse_reads_calls_without_text(name: str, said: str) -> None:
    turn = renderer(name).parse(ids(said))
    assert turn.content == "" and [(call.name, call.arguments) for call in turn.tool_calls] == [("add", {"a": 1})]


@pytest.mark.parametrize(
    "said",
    [
        '<tool_call>{"name": "add", "arguments": {"a": 1}',
        "<tool_call>add(1)</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {}}</tool_call><tool_call></tool_call>',
    ],
)
def test_parse_reports_a_bad_call_and_keeps_the_text(said: str) -> None:
    turn = renderer("qwen3").parse(ids("<think>\nt\n</think>\n\nso " + said))
    assert len(turn.problems) == 1 and turn.problems[0].startswith("tool call")
    assert (turn.reasoning, turn.content, turn.tool_calls) == ("t", "so " + said, ())


@pytest.mark.parametrize(
    ("name", "call", "argument"),
    [
        ("qwen3_5_nothink", "<function=add>{}</function>", "<parameter={}>\n{}\n</parameter>"),
        ("glm4moe", "add{}", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>"),
    ],
)
def test_arguments_written_as_text_have_the_types_that_the_tool_declares(name: str, call: str, argument: str) -> None:
    """`note` is a string, whatever it looks like; what no tool declares is read as JSON."""
    said = f"<tool_call>{call.format(argument.format('a', 1) + argument.format('note', 1) + argument.format('other', 1))}</tool_call>"
    (parsed,) = renderer(name).parse(ids(said), tools=[ADD]).tool_calls
    assert parsed.arguments == {"a": 1, "note": "1", "other": 1}


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen3_5_nothink", "<tool_call><function=add>" + "<parameter=a>" * 20_000),
        ("glm4moe", "<tool_call>add" + "<arg_key>" * 20_000),
        ("llama3_1", " " * 50_000),
    ],
)
def test_a_turn_that_repeats_itself_is_read_at_once(name: str, said: str) -> None:
    """Reading in quadratic time would hold up all episodes, for minutes."""
    assert renderer(name).parse(ids(said)).tool_calls == ()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen3_5_nothink", "<function=add><parameter=a>1</parameter><parameter=note>b"),
        ("qwen3_5_nothink", "<function=add><parameter=a>1</parameter><parameter=note</function>"),
        ("glm4moe", "add<arg_key>a</arg_key><arg_value>1"),
        ("glm4moe", "add<arg_key>a</arg_key>"),
        ("qwen3", '{"name": "add", "arguments": {"a": 99999999999999999999999}}'),
        ("qwen3", '{"name": "add", "arguments": {"a": 1e999}}'),
        ("qwen3", '{"name": "add", "arguments": {"note": "\\ud800"}}'),
        ("qwen3", '{"name": "add", "arguments": ' + "[" * 30_000),
        ("qwen3", '{"name": "add", "arguments": {"a": ' + "[" * 600 + "]" * 600 + "}}"),
    ],
)
def test_a_call_that_cannot_be_read_whole_is_a_problem_and_is_not_run(name: str, said: str) -> None:
    """An argument that is cut off must not be left out; what no record can hold must not fail the episode."""
    turn = renderer(name).parse(ids("<tool_call>" + said + "</tool_call>"), tools=[ADD], recorded=True)
    assert turn.tool_calls == () and len(turn.problems) == 1, turn


def test_extension_is_none_once_the_template_drops_thinking() -> None:
    messages = [{"role": "user", "content": "q"}]
    sampled = ids("<think>\nt\n</think>\n\na<|im_end|>")
    messages = [*messages, renderer("qwen3").parse(sampled).message()]
    assert renderer("qwen3").extension(messages, [], sampled, [{"role": "user", "content": "r"}]) is None
    more = renderer("qwen3").extension(messages, [], sampled, [{"role": "tool", "content": "r"}])
    assert more == ids("\n<|im_start|>user\n<tool_response>\nr\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_extension_ends_a_truncated_turn() -> None:
    sampled = ids("a b")
    messages = [{"role": "user", "content": "q"}, renderer("CHATML").parse(sampled).message()]
    more = renderer("CHATML").extension(messages, [], sampled, [{"role": "user", "content": "r"}])
    assert more == ids("<|im_end|>\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n")


def test_the_schema_of_a_tokenizer_comes_first() -> None:
    own = tiny.tokenizer.__wrapped__()
    own.response_schema = {"type": "object", "properties": {"content": {"type": "string", "x-regex": r"answer: (.*)"}}}
    turn = Renderer(own, ChatTemplate(own, {}), frozenset([tiny.EOS_ID])).parse(own("answer: 7")["input_ids"])
    assert turn.content == "7"


def test_prompt_refuses_tools_that_the_template_does_not_show() -> None:
    with pytest.raises(DataError, match="cannot offer the tools add: the chat template does not show tools"):
        renderer("llama3").prompt([{"role": "user", "content": "q"}], [ADD])


def test_prompt_is_the_templates() -> None:
    messages = [{"role": "user", "content": "q"}]
    assert renderer("qwen3").prompt(messages, [ADD]) == tokenizer()(template("qwen3").prompt(messages, [ADD.to_json()]))["input_ids"]
