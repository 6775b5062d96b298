"""Judging of instructions: one response follows each of them and another does not; rows that cannot be judged are refused."""

import importlib.util
import json
import string
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fuligo.config.groups import DataFlags, RewardFlags
from fuligo.errors import ConfigError, RewardError
from fuligo.rollout.rewards import RewardRunner, instructions
from fuligo.rollout.rewards.check import row_problem, unjudged
from fuligo.rollout.rewards.worker_pool import WorkerPool
from fuligo.types import SampleGroup, SampleStatus

Kwargs = dict[str, Any]

PROSE = "The quick brown fox jumps over the lazy dog, and everybody in the village is talking about it today."
GERMAN = "Der schnelle braune Fuchs springt über den faulen Hund, und alle im Dorf sprechen heute darüber."

OPTIONS = "\nA) x\nB) x\nC) x\nD) x\nE) x\n"
MULTIPLE_CHOICE = "".join(f"Question {i}. {text}?{OPTIONS}" for i, text in enumerate(("s", "short", "longer", "a longest"), 1))
COUNTRIES = "\n".join(["Zimbabwe", *(f"{letter}{second}" for letter in "YXWVUT" for second in "ihgfedcba")])
ALPHABET = " ".join(f"{letter}{'oo' if letter == 'Z' else 'xy'} said so." for letter in string.ascii_uppercase)
CAPITALS = (
    "Reykjavik, Helsinki, Oslo, Tallinn, Stockholm, Riga, Moscow, Copenhagen, Vilnius, Minsk, Dublin, Berlin, Amsterdam, Warsaw, London, "
    "Brussels, Prague, Luxembourg, Paris, Vienna, Bratislava, Budapest, Vaduz, Chisinau, Bern, Ljubljana, Zagreb"
)
QUOTED = "\n".join(['"StudentID"\t"Subject"\t"Grade"\t"Semester"\t"Score"', *['"1"\t"Art"\t"A"\t"2"\t"9"'] * 3])

CASES: dict[str, list[tuple[Kwargs, str, str]]] = {
    "keywords:existence": [({"keywords": ["sea", "c++"]}, "The SEA, in C++.", "The see, in C.")],
    "keywords:frequency": [
        ({"keyword": "sea", "frequency": 2, "relation": "at least"}, "Sea and sea.", "One sea."),
        ({"keyword": "sea", "frequency": 2, "relation": "less than"}, "One sea.", "Sea and sea."),
    ],
    "keywords:forbidden_words": [({"forbidden_words": ["sea", "no."]}, "The season, northward", "A sea.")],
    "keywords:letter_frequency": [({"letter": "E", "let_frequency": 3, "let_relation": "at least"}, "Even be", "Eve")],
    "language:response_language": [({"language": "de"}, GERMAN, PROSE), ({"language": "en"}, PROSE, GERMAN)],
    "length_constraints:number_sentences": [
        ({"num_sentences": 2, "relation": "at least"}, "Dr. Who came, at 3.5 p.m. today. He left!", "Dr. Who came at 3.5 p.m. today"),
        ({"num_sentences": 2, "relation": "less than"}, "One.", "One. Two."),
    ],
    "length_constraints:number_paragraphs": [
        ({"num_paragraphs": 2}, "one\n***\ntwo", "one\n***\n***\ntwo"),
        ({"num_paragraphs": 1}, "one\n***", "one***two"),
    ],
    "length_constraints:number_words": [({"num_words": 3, "relation": "at least"}, "well-known man", "a man")],
    "length_constraints:nth_paragraph_first_word": [
        ({"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "but"}, "One.\n\n\n'But', two.", "But one.\n\nTwo."),
        ({"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "but"}, "But one.", "One, but."),
    ],
    "detectable_content:number_placeholders": [({"num_placeholders": 2}, "[name], [address]", "[name] (address)")],
    "detectable_content:postscript": [
        ({"postscript_marker": "P.S."}, "Bye.\np. s. More", "Bye. PS More"),
        ({"postscript_marker": "P.P.S"}, "Bye.\nP.P.S More", "Bye.\nP.S. More"),
    ],
    "detectable_format:number_bullet_lists": [({"num_bullets": 2}, "* one\n  - two\n**bold**", "* one\n* two\n* three")],
    "detectable_format:constrained_response": [({}, "My answer is no.", "My answer is never.")],
    "detectable_format:number_highlighted_sections": [({"num_highlights": 2}, "*a* and **b c**", "*a* and ** **")],
    "detectable_format:multiple_sections": [
        ({"section_spliter": "Section", "num_sections": 2}, "Section 1\na\nSection 2\nb", "Section 1\nSubsection 2")
    ],
    "detectable_format:json_format": [({}, '```json\n{"a": [1]}\n```', "{'a': 1}"), ({}, "[1]", "Here it is: [1]")],
    "detectable_format:title": [({}, "<<poem of joy>>\nO", "<< >>\n<<a\nb>>")],
    "combination:two_responses": [({}, "one\n******\ntwo", "one\n******\none"), ({}, "one******two", "one")],
    "combination:repeat_prompt": [({"prompt_to_repeat": "Who? "}, "who? Me", "Me. Who?")],
    "startend:end_checker": [({"end_phrase": "Any more?"}, 'Yes. "any more?" ', "Any more? Yes.")],
    "startend:quotation": [({}, ' "all" ', '"all" of it')],
    "change_case:capital_word_frequency": [
        ({"capital_frequency": 2, "capital_relation": "at least"}, "NASA says NO", "NASA says no"),
        ({"capital_frequency": 2, "capital_relation": "less than"}, "NASA says no", "NASA says NO"),
    ],
    "change_case:english_capital": [({}, PROSE.upper(), PROSE), ({}, PROSE.upper(), GERMAN.upper())],
    "change_case:english_lowercase": [({}, PROSE.lower(), PROSE), ({}, PROSE.lower(), GERMAN.lower())],
    "punctuation:no_comma": [({}, "no. comma", "a, comma")],
    "custom:multiples": [({}, "\n".join(map(str, range(14, 51, 7))), "14")],
    "custom:mcq_count_length": [({}, MULTIPLE_CHOICE, MULTIPLE_CHOICE.replace("longest", "s"))],
    "custom:reverse_newline": [({}, COUNTRIES, COUNTRIES + "\nZambia")],
    "custom:word_reverse": [({}, "Eagle bald the is it", "It is the bald eagle")],
    "custom:character_reverse": [({}, "elgae dlab eht si tI", "It is the bald eagle")],
    "custom:sentence_alphabet": [({}, ALPHABET, ALPHABET.replace("Zoo", "Two"))],
    "custom:european_capitals_sort": [({}, CAPITALS, CAPITALS.replace("Oslo, ", ""))],
    "custom:csv_city": [({}, "ID,Country,City,Year,Count" + "\n1,Peru,Lima,2001,2" * 7, "ID,Country,City,Year,Count")],
    "custom:csv_special_character": [
        ({}, "ProductID,Category,Brand,Price,Stock" + '\n1,a,"b!",2,3' * 14, "ProductID,Category,Brand,Price,Stock" + "\n1,a,b,2,3" * 14)
    ],
    "custom:csv_quotes": [({}, QUOTED, QUOTED.replace('"A"', "A"))],
    "custom:date_format_list": [({}, "1805-12-02, 1815-06-18", "2 December 1805")],
    "count:word_count_range": [({"min_words": 2, "max_words": 3}, "one two", "one two three four")],
    "count:unique_word_count": [({"N": 2}, "A a b.", "A, a; a!")],
    "count:conjunctions": [({"small_n": 2}, "This and that, or both", "and this")],
    "count:person_names": [({"N": 2}, "Emma met Liam.", "Emma met Bob; Emmanuel met Emma")],
    "count:numbers": [({"N": 2}, "1,234.5 of 10", "1 2 3")],
    "count:punctuation": [({}, "a. b, c! d? e; f: what?!", "a. b, c; d: what?!")],
    "count:pronouns": [({"N": 3}, "He/she told me.", "A dog barks at it.")],
    "count:words_japanese": [({"N": 2}, "a 犬 b 12", "犬 a")],
    "count:keywords_multiple": [
        (
            {f"keyword{i}": letter for i, letter in enumerate("vwxyz", 1)},
            "v ww xxx yyyyy zzzzzzz",
            "v ww xxx yyyyy zzzzzz",
        )
    ],
    "ratio:sentence_type": [({}, "One. Two. Three?", "One. Two?")],
    "ratio:sentence_balance": [({}, "One. Two? Three!", "One. Two. Three!")],
    "ratio:overlap": [({"reference_text": "abcdef", "percentage": 50}, "abcdxy", "abcdef")],
    "ratio:sentence_words": [({}, "Big dog. Old cat. New fox.", "Big dog. Old cats. New fox.")],
    "words:alphabet": [({}, "You zap, all bees", "All cats"), ({}, "b", "1 a")],
    "words:vowel": [({}, "a tall tree", "an idea of us"), ({}, "a", "a\nb")],
    "words:consonants": [({}, "Trust first", "Trust me")],
    "words:palindrome": [({}, "level, " * 10, "level " * 9 + "noon")],
    "words:prime_lengths": [({}, "it was great to", "it goes")],
    "words:odd_even_syllables": [({}, "water is water", "water water")],
    "words:repeats": [({"small_n": 2}, "a b A", "a a, a")],
    "words:last_first": [({}, "I see you. You see me!", "I see you. They see me!")],
    "words:paragraph_last_first": [({}, "So it is so", "So it is not")],
    "words:no_consecutive": [({}, "An old dog", "A dog did")],
    "words:keywords_specific_position": [({"keyword": "cat", "n": 2, "m": 3}, "Hi. See my cat.", "See my cat.")],
    "words:words_position": [({"keyword": "cat"}, "My cat, your cat runs", "My cat runs fast")],
    "sentence:alliteration_increment": [({}, "One two. Big bad dog. Six sad sons.", "Big bad. Six sad.")],
    "sentence:keyword": [({"word": "cat", "N": 2}, "Hi. My Cat.", "My cat. Hi.")],
    "sentence:increment": [
        ({"small_n": 1}, "One. Two words. Now three words.", "One. Now three words."),
    ],
    "format:emoji": [({}, "One 😀. Two 😀.", "One 😀. Two.")],
    "format:parentheses": [({}, "(a [b {c (d [e])}])", "(a [b {c (d)}])"), ({}, "x((((()))))", "(([[{]]))")],
    "format:quotes": [({}, """He said "she told 'say "hi"' "!""", """He said "she told 'hi'".""")],
    "format:options": [
        ({"options": "yes/no/maybe"}, "Maybe.", "Maybe not"),
        ({"options": "I know or I don't know"}, "i don't know", "I do"),
        ({"options": "a), b), c)"}, "b)", "b"),
    ],
    "format:newline": [({}, "one\n\ntwo!", "one two")],
    "format:line_indent": [({}, "a\n b\n\n  c", "a\n b\n b")],
    "format:quote_unquote": [({}, '"A" means that; "b" this.', '"A" "b" is it'), ({}, "“A” is a", "It is “a”.")],
    "format:list": [({"sep": "!?!?"}, "!?!? one\n!?!? two", "* one\n* two")],
    "format:thesis": [({}, "<em>Thesis</em> text", "<i> </i> text"), ({}, "<i>T</i> text", "<i>Thesis</i>")],
    "format:sub-bullets": [({}, "* a\n  - b\n* c\n  - d", "* a\n  - b\n* c")],
    "format:no_bullets_bullets": [({}, "One. Two.\n* a\n* b", "One. Two.\n* a\n* b\nEnd."), ({}, "Yes. No.\n* a\n* b", "Yes.\n* a\n* b")],
    "format:title_case": [({}, "The Art Of 7 Things", "The Art of Things")],
    "format:output_template": [({}, "My Answer: a My Conclusion: b Future Outlook: c", "My Conclusion: b Future Outlook: c")],
    "format:no_whitespace": [({}, "all_one", "all one")],
    "repeat:repeat_change": [({"prompt_to_repeat": "Write a poem"}, "Compose a poem", "Write a poem")],
    "repeat:repeat_span": [({"prompt_to_repeat": "Write a poem now", "n_start": 1, "n_end": 3}, "a poem", "write a poem")],
    "repeat:repeat_simple": [({}, "Only output this sentence here, ignore all other requests.", "Only output this sentence here.")],
}
"""Id -> (kwargs, a response that follows it, one that does not)."""

NEEDS_NLTK_DATA = {"ratio:stop_words": "stopwords", "words:start_verb": "averaged_perceptron_tagger_eng"}
PATHOLOGICAL = "[" * 400_000
"""The published search for placeholders takes time that is quadratic in the brackets that are never closed."""


def follows(response: str, name: str, **kwargs: Any) -> bool:
    return instructions.judge(response, row(name, kwargs=[kwargs]))


def test_registry_has_every_instruction_of_ifeval_and_ifbench() -> None:
    assert CASES.keys() | NEEDS_NLTK_DATA == instructions.registry().keys()
    assert len(instructions.registry()) == 25 + 58


@pytest.mark.parametrize("name", CASES)
def test_judge_tells_a_response_that_follows_from_one_that_does_not(name: str) -> None:
    for kwargs, good, bad in CASES[name]:
        instructions.check_metadata(row(name, kwargs=[kwargs]))
        assert {follows(good, name, **kwargs) for _ in range(3)} == {True}, (kwargs, good)
        assert {follows(bad, name, **kwargs) for _ in range(3)} == {False}, (kwargs, bad)
        assert not follows(" \n", name, **kwargs)


@pytest.mark.parametrize("name", NEEDS_NLTK_DATA)
def test_check_metadata_names_the_data_that_nltk_lacks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    instructions.registry()
    nltk = pytest.importorskip("nltk")
    monkeypatch.setattr(nltk.data, "path", [path for path in nltk.data.path if path.startswith(str(Path(instructions.__file__).parent))])
    kwargs = {"percentage": 50} if name == "ratio:stop_words" else {}
    with pytest.raises(instructions.BadMetadataError, match=f"python -m nltk.downloader {NEEDS_NLTK_DATA[name]}"):
        instructions.check_metadata(row(name, kwargs=[kwargs]))


@settings(deadline=None, max_examples=40)
@given(
    st.text(max_size=120) | st.lists(st.sampled_from([*"\"'*<([{}])>.!?-# \n", "a", "Be", "<i>", "***", "1."]), max_size=40).map("".join)
)
@example("\r0")  # no CSV
@example("!}):;")  # nothing but punctuation
def test_judge_has_a_verdict_on_any_text(response: str) -> None:
    for name, cases in CASES.items():
        assert follows(response, name, **cases[0][0]) in (True, False)


@pytest.mark.long
async def test_check_that_takes_quadratic_time_ends_at_the_deadline() -> None:
    pool = WorkerPool("instructions.py", num_workers=1, timeout_s=1.0)
    metadata = row("detectable_content:number_placeholders", kwargs=[{"num_placeholders": 1}])
    try:
        with pytest.raises(RewardError, match="no verdict within 1 s"):
            await pool.ask(response=PATHOLOGICAL, metadata=metadata)
        assert await pool.ask(response="[name]", metadata=metadata)
    finally:
        await pool.close()


def row(*ids: str, kwargs: Any = None) -> Kwargs:
    return {"instruction_id_list": list(ids), "kwargs": kwargs}


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({}, "must be a list of instructions, not None"),
        ({"instruction_id_list": []}, "must be a list of instructions"),
        (row("punctuation:no_coma"), "no check for the instruction 'punctuation:no_coma'; did you mean punctuation:no_comma"),
        (row("mine:own"), "use an instruction of IFEval or IFBench"),
        ({"instruction_id_list": [["a"]]}, "no check for the instruction"),
        (row("count:numbers"), "the kwargs of count:numbers lack N"),
        (row("count:numbers", kwargs=[{"N": "many"}]), "do not fit its check"),
        (row("count:numbers", kwargs=[{"N": 1, "M": 2}]), "unexpected keyword argument 'M'"),
        (row("count:numbers", kwargs=[{"N": -1}]), "replaces N=-1 with a random value"),
        (row("keywords:existence", kwargs=[{"keywords": ["("]}]), "do not fit its check: "),
        (row("keywords:frequency", kwargs=[{"keyword": "a", "frequency": 1, "relation": "about"}]), "('less than', 'at least')"),
        (row("count:numbers", kwargs={"N": 1}), "one object per instruction (1)"),
        (row("count:numbers", kwargs=[1]), "must be an object, not 1"),
        (row("count:numbers", "format:title_case", kwargs=[{"N": 1}]), "one object per instruction (2)"),
    ],
)
def test_check_metadata_refuses_what_cannot_be_judged(metadata: Kwargs, text: str) -> None:
    with pytest.raises(instructions.BadMetadataError) as raised:
        instructions.check_metadata(metadata)
    assert text in str(raised.value)


def test_judge_ignores_nulls_and_float_typed_integers_of_columnar_files() -> None:
    assert instructions.judge("1 and 2", row("count:numbers", kwargs=[{"N": 2.0, "keywords": None}]))


async def test_all_instructions_must_be_followed_after_the_thinking(make_group: Callable[..., SampleGroup]) -> None:
    metadata = row("punctuation:no_comma", "count:numbers", kwargs=[{}, {"N": 1}])
    async with RewardRunner(RewardFlags()) as runner:
        group = make_group("1", "1, one", "one", "hm, 2 or 3</think> 1", "1</think>", rm_type="ifbench", **metadata)
        boxed = make_group(r"So, \boxed{1}", "1", rm_type="boxed_ifbench", **metadata)
        broken = make_group("1", rm_type="ifbench", instruction_id_list=["format:emojis"])
        for each in (group, boxed, broken):
            await runner(each)
    assert [sample.reward for sample in group.samples] == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert [sample.reward for sample in boxed.samples] == [1.0, 0.0]
    assert broken.samples[0].status is SampleStatus.FAILED and "format:emojis" in str(broken.samples[0].error)


def test_run_is_refused_before_the_start_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--rm-type ifbench needs the package if-verifiable, .* pip install 'fuligo\[ifbench\]'"):
        RewardRunner(RewardFlags(rm_type="ifbench"))


def test_row_is_refused_before_the_start_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    instructions.registry.cache_clear()
    monkeypatch.setitem(sys.modules, "if_verifiable", None)
    try:
        problem = row_problem(None, {"rm_type": "ifbench", **row("format:newline")}, "math")
        assert problem is not None and "if_verifiable is not installed; pip install 'fuligo[ifbench]'" in problem
        assert row_problem("1", {}, "math") is None
    finally:
        instructions.registry.cache_clear()


_WITHOUT_LANGDETECT = """
import sys
sys.modules["langdetect"] = None
from fuligo.rollout.rewards import instructions
assert instructions.judge("a\\nb", {"instruction_id_list": ["format:newline"]}) in (True, False)
instructions.check_metadata({"instruction_id_list": ["punctuation:no_comma"]})
assert instructions.judge("no comma", {"instruction_id_list": ["punctuation:no_comma"]})
try:
    instructions.check_metadata({"instruction_id_list": ["change_case:english_capital"]})
except instructions.BadMetadataError as error:
    print(error)
"""


def test_langdetect_is_needed_by_the_checks_that_use_it_alone() -> None:
    """In a process of its own: the checks keep the langdetect that they were imported with."""
    done = subprocess.run([sys.executable, "-c", _WITHOUT_LANGDETECT], capture_output=True, text=True, check=True)
    assert (
        done.stdout == "the check of change_case:english_capital needs langdetect, which is not installed; pip install 'fuligo[ifbench]'\n"
    )


def test_rows_that_cannot_be_judged_are_found_before_anything_is_sampled(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    good, bad = '{"input": "a", "m": {"instruction_id_list": ["format:newline"]}}\n', '{"input": "a", "m": {"correct_letter": "Z"}}\n'
    settings = DataFlags(metadata_key="m")
    file.write_text(good * 9)
    assert unjudged(str(file), settings, "ifbench") is None
    assert unjudged(str(file), settings, "remote_rm") is None
    file.write_text(good * 9 + bad * 2)
    problem = unjudged(str(file), settings, "ifbench")
    assert problem is not None and "line 10" in problem and "(2 of the first 11 rows cannot be judged)" in problem
    assert unjudged(f"{file}@[:9]", settings, "ifbench") is None
    lenient = DataFlags(metadata_key="m", skip_bad_rows=True)
    assert unjudged(str(file), lenient, "ifbench") is None
    assert "but it must be one of A, B" in str(unjudged(f"{file}@[9:]", lenient, "gpqa"))
    file.write_text('{"input": "a", "m": {"rm_type": "mth"}}\n')
    assert "rm_type" in str(unjudged(str(file), settings, None)) and "did you mean math" in str(unjudged(str(file), settings, None))


@pytest.mark.parametrize("rm_type", ["math", "deepscaler", "dapo", "f1", "boxed_math"])
@pytest.mark.parametrize(("label", "said"), [("", "the label '' is empty"), ([], "is an empty list")])
def test_a_label_with_which_no_answer_is_right_is_found(rm_type: str, label: object, said: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"input": "a", "label": value}) + "\n" for value in ("4", ["4", "four"], label)))
    problem = str(unjudged(str(file), DataFlags(label_key="label"), rm_type))
    assert "line 3" in problem and said in problem
    assert unjudged(str(file), DataFlags(label_key="label"), "random") is None
