"""Exactness of the rendering around sampled tokens, over the chat templates of all families."""

import re
from importlib.resources import files
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuligo.data.template import ChatTemplate
from fuligo.environments.environment import ToolCall
from fuligo.environments.rendering import Renderer
from fuligo.environments.response_format import _FORMATS, ResponseFormat
from fuligo.errors import DataError
from tests import tiny
from tests.unit.environments.conversations import (
    ADD,
    CALLS,
    ENDS,
    TEMPLATES,
    as_read,
    end_ids,
    ids,
    renderer,
    template,
    text,
    tokenizer,
    written,
)

EXAMPLES = max(15, settings().max_examples // 4)
"""Examples per template; the nineteen templates have much in common."""
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
    """Extended ids equal the rendering of canonical turns; they are `None` only if the template changes earlier text."""
    render = renderer(name)
    tools = [ADD] if with_tools and render.shows_tools else []
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
        except DataError:  # Llama allows one call per turn
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
    ends = end_ids() | frozenset(ids("<|end|>"))  # in history, turns of gpt-oss do not end with the token that it stops at
    assert any(token in ends for token in [*sampled[-1:], *more]), "the model reads where its turn ended"


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
WRITTEN |= {
    "kimi-k2": ("KIMI_K2", "<think>t</think>hi" + CALLS["kimi-k2"]),
    "minimax-m2": ("MINIMAX_M2", "t\n</think>\n\nhi\n" + CALLS["minimax-m2"]),
}
HARMONY_THOUGHT = "<|channel|>analysis<|message|>t<|end|><|start|>assistant"
HARMONY_CALLS = [
    '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}',
    ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}',
    '<|channel|>commentary<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add<|message|>{"a": 1}',
]
"""As gpt-oss writes calls, and as its template does; with words for the user before."""


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
        ("MINIMAX_M2", '<invoke name="add">{}</invoke>', '<parameter name="{}">{}</parameter>'),
    ],
)
def test_arguments_written_as_text_have_the_types_that_the_tool_declares(name: str, call: str, argument: str) -> None:
    """`note` is a string, whatever it looks like; what no tool declares is read as JSON."""
    tag = "minimax:tool_call" if name == "MINIMAX_M2" else "tool_call"
    said = f"</think><{tag}>{call.format(argument.format('a', 1) + argument.format('note', 1) + argument.format('other', 1))}</{tag}>"
    (parsed,) = renderer(name).parse(ids(said), tools=[ADD]).tool_calls
    assert parsed.arguments == {"a": 1, "note": "1", "other": 1}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen3_5_nothink", "<tool_call><function=add>" + "<parameter=a>" * 20_000),
        ("gptoss", "<|channel|>commentary to=functions.add" * 20_000),
        ("gptoss", "to=functions.add<|message|>" * 20_000),
        ("glm4moe", "<tool_call>add" + "<arg_key>" * 20_000),
        ("llama3_1", " " * 50_000),
        ("KIMI_K2", "<|tool_call_begin|>functions.add" * 20_000),
        ("KIMI_K2", "<|tool_calls_section_begin|>" * 20_000),
        ("MINIMAX_M2", '</think><invoke name="add">' + '<parameter name="a">' * 20_000),
        ("MINIMAX_M2", "</think>" + "<minimax:tool_call><invoke " * 20_000),
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
        ("MINIMAX_M2", '</think><invoke name="add"><parameter name="a">1</parameter><parameter name="note">b</invoke>'),
        ("KIMI_K2", '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1'),
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


@pytest.mark.parametrize("kind", [each for each in _FORMATS if each.is_tagged], ids=lambda kind: kind.name)
@given(
    said=st.text(st.sampled_from('ab {}[]"\n>|/=é🙂:0'))
    | st.sampled_from(['{"name": "add", "arguments": {}}', "add\n{}", "think>a</think>"])
)
def test_text_without_a_tag_is_content_in_tagged_formats(kind: ResponseFormat, said: str) -> None:
    said = said.replace("<", "")
    parsed = tokenizer().parse_response(said, schema=kind.schema) or {}
    assert {key: value for key, value in parsed.items() if value not in (None, "")} == ({"content": said} if said else {})


def test_the_schema_of_a_tokenizer_comes_first() -> None:
    own = tiny.tokenizer.__wrapped__()
    own.response_schema = {"type": "object", "properties": {"content": {"type": "string", "x-regex": r"answer: (.*)"}}}
    turn = Renderer(own, ChatTemplate(own, {}), frozenset([tiny.EOS_ID])).parse(own("answer: 7")["input_ids"])
    assert turn.content == "7"


def test_prompt_refuses_tools_that_the_template_does_not_show() -> None:
    with pytest.raises(DataError, match="cannot offer the tools add: the chat template does not show tools"):
        renderer("llama3").prompt([{"role": "user", "content": "q"}], [ADD])


@pytest.mark.parametrize("name", ["gemma4_v5", "lfm2"])
def test_prompt_refuses_tools_whose_calls_cannot_be_read_back(name: str) -> None:
    """The model would write calls in its template's format, and none of them would be run."""
    source = (files("trl") / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    render = Renderer(tokenizer(), ChatTemplate(tokenizer(), {"chat_template": source}), end_ids())
    with pytest.raises(DataError, match="cannot offer the tools add: calls in the format of the chat template cannot be parsed"):
        render.prompt([{"role": "user", "content": "q"}], [ADD])


def test_kimis_ids_of_calls_are_kept_and_lead_to_their_results() -> None:
    """Its template shows a call by its id, in which the model wrote the name."""
    render, question = renderer("KIMI_K2"), [{"role": "user", "content": "q"}]
    call = '<|tool_call_begin|>functions.add:{}<|tool_call_argument_begin|>{{"a": {}}}<|tool_call_end|>'
    sampled = ids(f"<|tool_calls_section_begin|>{call.format(3, 1)}{call.format(4, 2)}<|tool_calls_section_end|><|im_end|>")
    turn = render.parse(sampled)
    assert [(each.id, each.name, each.arguments) for each in turn.tool_calls] == [
        ("functions.add:3", "add", {"a": 1}),
        ("functions.add:4", "add", {"a": 2}),
    ]
    more = render.extension([*question, turn.message()], [ADD], sampled, answers(turn.message(), "r"))
    shown = [f"<|im_system|>add<|im_middle|>## Return of functions.add:{number}\nr{at}<|im_end|>" for at, number in enumerate((3, 4))]
    assert more is not None and text(more) == "".join(shown) + "<|im_assistant|>assistant<|im_middle|>"


XML_CALLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}\n<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n"
    "</function>\n</tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>\n<function={{ c.function.name }}>\n{% for key, value in c.function.arguments.items() %}<parameter={{ key }}>\n"
    "{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def test_calls_are_read_where_the_prompt_opens_the_thinking() -> None:
    """`<think>` and `<tool_call>` begin with the same characters."""
    render = Renderer(tokenizer(), ChatTemplate(tokenizer(), {"chat_template": XML_CALLS}), end_ids())
    seen = render.prompt([{"role": "user", "content": "q"}], [ADD])
    call = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    turn = render.parse(ids(f"t\n</think>\n\n{call}<|im_end|>"), seen, [ADD])
    assert [(each.name, each.arguments) for each in turn.tool_calls] == [("add", {"a": 1})]


@pytest.mark.parametrize("id", ['"\\ud800"', '""', '"two words"', f'"{"x" * 200}"', "7"])
def test_an_id_that_cannot_be_shown_is_replaced(id: str) -> None:
    turn = renderer("qwen3").parse(ids(f'<tool_call>\n{{"name": "add", "arguments": {{"a": 1}}, "id": {id}}}\n</tool_call><|im_end|>'))
    (call,) = turn.tool_calls
    assert re.fullmatch(r"[0-9a-f]{9}", call.id)


def test_calls_of_one_turn_have_different_ids() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}, "id": "one"}\n</tool_call>'
    first, second = renderer("qwen3").parse(ids(f"{call}\n{call}<|im_end|>")).tool_calls
    assert first.id == "one" and re.fullmatch(r"[0-9a-f]{9}", second.id)


def test_prompt_is_the_templates() -> None:
    messages = [{"role": "user", "content": "q"}]
    assert renderer("qwen3").prompt(messages, [ADD]) == tokenizer()(template("qwen3").prompt(messages, [ADD.to_json()]))["input_ids"]


@pytest.mark.parametrize("call", HARMONY_CALLS)
def test_harmony_calls_come_after_thinking_and_without_content(call: str) -> None:
    render, question = renderer("gptoss"), [{"role": "user", "content": "q"}]
    sampled = ids(f"{HARMONY_THOUGHT}{call}<|call|>")
    turn = render.parse(sampled)
    assert (turn.reasoning, turn.content, turn.problems, turn.truncated) == ("t", "", (), False)
    assert [(call.name, call.arguments) for call in turn.tool_calls] == [("add", {"a": 1})]
    new = answers(turn.message(), "3")
    more = render.extension([*question, turn.message()], [ADD], sampled, new)
    assert more is not None, "the template writes the call in other words that mean the same"
    assert text(more) == '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"30"<|end|><|start|>assistant'


def test_harmony_content_is_the_final_channel() -> None:
    render = renderer("gptoss")
    turn = render.parse(ids(f"{HARMONY_THOUGHT}<|channel|>final<|message|>hi<|return|>"))
    assert (turn.reasoning, turn.content, turn.tool_calls) == ("t", "hi", ())
    cut = render.parse(ids("<|channel|>analysis<|message|>thinking on"))
    assert (cut.reasoning, cut.content, cut.truncated) == ("thinking on", "", True)
    call = render.parse(ids('<|channel|>analysis to=functions.add <|message|>{"a": 1}<|call|>'))
    assert (call.reasoning, [each.arguments for each in call.tool_calls]) == (None, [{"a": 1}]), "a call on this channel is no thinking"
    broken = render.parse(ids(f'{HARMONY_THOUGHT} to=functions.add<|channel|>commentary json<|message|>{{"a": <|call|>'))
    assert broken.tool_calls == () and len(broken.problems) == 1
