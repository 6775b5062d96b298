"""Samples in the page of `fuligo view`: filters, order, the tokens of one and its group."""

import math
from pathlib import Path
from urllib.parse import parse_qsl

import numpy as np
import pytest
from playwright.sync_api import Browser, expect

from fuligo.observability.samples import prompt_key
from fuligo.observability.viewer.report import write_report
from fuligo.observability.viewer.run import RunReader
from fuligo.observability.viewer.sample_query import SampleFilter, TextSearch, matching
from fuligo.types import Sample, SampleGroup
from tests.browser.conftest import NUM_SAMPLES, OpenPage, Serve, found
from tests.unit.observability.viewer.recorded_run import FAILED, HOSTILE, NUM_STEPS, PROMPTS, SCRIPT, TRUNCATED, begin_run

FILTERS = {
    "": NUM_SAMPLES,
    "step_min=3&step_max=4": 32,
    "status=failed": 1,
    "status=truncated": 1,
    "kept=false": 4,
    "group=9": 4,
    "staleness_min=1": 8 * 4,
    "engine=1&step_max=1": 16,
    "reward_min=1&step_max=0": 2,
    "text=ROW+11<": NUM_SAMPLES // 16,
    "text=add+70": NUM_SAMPLES // 4,
}
"""Number of samples found, by filter."""
PROMPT = prompt_key(f'[{{"role":"user","content":"{PROMPTS[2]}"}}]')
REPORTED = {
    "recorded": (
        *(*FILTERS, "reward_max=0", "length_min=21&length_max=21", "advantage_min=0.1&reward_min=1", "advantage_max=-0.1"),
        *(f"prompt={PROMPT}", "of=eval&dataset=long_sums"),
    ),
    "graded": ("part=acc", "part=acc&part_min=0.5", "part=acc&part_max=0.5", "part=format&part_min=0.25&part_max=0.25", "part_min=0.5"),
}
"""Filters by run; every field of `SampleFilter` occurs at least once."""


@pytest.mark.parametrize(("filters", "number"), FILTERS.items())
def test_filters(open_view: OpenPage, filters: str, number: int) -> None:
    found(open_view(f"samples?{filters}"), number)


def test_a_report_filters_like_the_server(open_page: OpenPage, recorded: Path, tmp_path: Path) -> None:
    """A report filters in the browser (`passes` in front/source.js). These reports contain all samples of their runs."""
    graded = begin_run(tmp_path / "graded")
    rewards: list[float | dict] = [{"acc": 1.0, "format": 0.5}, {"acc": 0.0}, {"format": 0.25}, 1.0]
    samples = [Sample(at, 0, "p", np.ones(1, np.int32), reward=reward) for at, reward in enumerate(rewards)]
    graded.directory.write_samples(0, [SampleGroup(0, 0, samples)], reward_key="acc")
    graded.directory.close()
    asked = {name for queries in REPORTED.values() for query in queries for name, _ in parse_qsl(query)}
    assert asked == {*SampleFilter.model_fields, "of"}
    for path in (recorded, tmp_path / "graded"):
        run, report = RunReader(path, path.name), tmp_path / f"{path.name}.html"
        write_report([run], report)
        page = open_page(report.as_uri())
        for query in REPORTED[path.name]:
            page.goto(f"{report.as_uri()}#samples?step_min=99")
            expect(page.locator(".found")).to_have_text("No sample matches.")
            given = dict(parse_qsl(query))
            index, wanted = run.index("eval" if "of" in given else "train"), SampleFilter.model_validate(given)
            rows = matching(index.table(), wanted)
            if wanted.text:
                rows, _ = TextSearch(wanted.text).advance(index, rows, math.inf)
            assert rows.num_rows, query
            page.goto(f"{report.as_uri()}#samples?{query}")
            expect(page.locator(".found"), query).to_have_text(f"{rows.num_rows} sample{'s' * (rows.num_rows != 1)} in this report")


def test_samples_of_evaluations(open_view: OpenPage) -> None:
    page = open_view("samples?advantage_min=0.1")
    page.locator(".choice").get_by_text("Evaluations").click()
    found(page, 16)  # the advantage filter is gone, because evaluations are not trained on
    assert "of=eval" in page.url and "advantage" not in page.url
    page.get_by_label("Dataset").select_option("long_sums")
    found(page, 8)
    page.locator(".line.sample").first.click()
    expect(page.locator(".sample-facts")).to_contain_text(f"after{NUM_STEPS} rollouts")
    expect(page.locator(".sample-facts")).to_contain_text("datasetlong_sums")
    expect(page.locator(".member")).to_have_count(4)
    expect(page.locator(".history button")).to_have_text(["after 0: 0.25", f"after {NUM_STEPS}: 0.75"])
    page.reload()
    expect(page.locator(".sample-facts")).to_contain_text("long_sums")


def test_filter_by_engine(open_view: OpenPage) -> None:
    page = open_view("samples?sample=9.12&color=engines")
    page.get_by_role("combobox", name="Engine").select_option("1")
    found(page, NUM_SAMPLES // 2)
    expect(page.locator(".token-legend")).to_contain_text("engine 1: ")
    page.get_by_label("Order").select_option("engine")
    page.get_by_role("button", name="Clear").click()
    found(page, NUM_SAMPLES)


def test_a_search_continues_when_a_step_is_added(serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
    run = begin_run(tmp_path / "live")
    run.step(0)
    page = open_page(serve([tmp_path / "live"]) + "#samples?text=row+3<")
    found(page, 1)
    run.step(1)
    found(page, 2)
    run.directory.close()


def test_typed_filters_are_in_the_link(open_view: OpenPage) -> None:
    page = open_view("samples")
    found(page, NUM_SAMPLES)
    page.get_by_label("Step from").fill("11")
    found(page, 16)
    page.get_by_placeholder("prompt or response").fill("row 3<")
    found(page, 1)
    assert "step_min=11" in page.url
    assert "text=row" in page.url
    page.reload()
    found(page, 1)
    page.get_by_role("button", name="Clear").click()
    found(page, NUM_SAMPLES)


def test_order(open_view: OpenPage) -> None:
    page = open_view("samples")
    first = page.locator(".line.sample").first
    expect(first.locator(".line-step")).to_have_text(str(NUM_STEPS - 1))
    page.get_by_label("Order").select_option("oldest")
    expect(first.locator(".line-step")).to_have_text("0")
    page.get_by_label("Order").select_option("-length")
    lengths = [int(text) for text in page.locator(".line-number[title=tokens]").all_inner_texts()]
    assert lengths == sorted(lengths, reverse=True)


def test_only_visible_lines_exist(open_view: OpenPage) -> None:
    page = open_view("samples?order=oldest")
    found(page, NUM_SAMPLES)
    assert page.locator(".line").count() < 40
    page.locator(".sample-list").evaluate("list => list.scrollTop = list.scrollHeight")
    expect(page.locator(".line.sample").last.locator(".line-step")).to_have_text(str(NUM_STEPS - 1))


def test_samples_are_selected_by_keyboard(open_view: OpenPage) -> None:
    page = open_view("samples?order=oldest")
    found(page, NUM_SAMPLES)
    page.locator(".sample-list").focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator(".sample-view h2")).to_have_text("Sample 0")
    page.keyboard.press("ArrowDown")
    expect(page.locator(".sample-view h2")).to_have_text("Sample 1")
    page.keyboard.press("End")
    expect(page.locator(".sample-view h2")).to_have_text(f"Sample {NUM_SAMPLES - 1}")
    page.keyboard.press("Escape")
    expect(page.locator(".sample-view")).to_be_hidden()


def test_tokens_show_values_of_engine_and_trainer(open_view: OpenPage) -> None:
    page = open_view("samples?sample=9.12")  # group 3 of step 9: sampled by an old version
    page.locator(".tokens").focus()
    page.keyboard.press("Home")
    facts = page.locator(".token-facts")
    expect(facts).to_contain_text("engine-2")
    expect(facts).to_contain_text("trainer-2.5")
    expect(facts).to_contain_text("difference+0.5")
    expect(facts).to_contain_text("entropy0.25")
    expect(facts).to_contain_text("value0.5")
    expect(facts).to_contain_text("teacher-2.75")
    expect(facts).to_contain_text("trained onno")
    expect(facts).to_contain_text("version8")
    expect(facts).to_contain_text("served byengine 1")
    page.keyboard.press("ArrowRight")
    expect(facts).to_contain_text("trained onyes")
    shown = "".join(page.locator(".token").all_text_contents())
    assert shown == "<think>step 9, row 12</think>\\boxed{7}"


@pytest.mark.parametrize(
    "color",
    ["diff", "engine_logprobs", "trainer_logprobs", "entropy", "advantages", "values", "teacher", "mask", "versions", "engines"],
)
def test_tokens_are_colored(open_view: OpenPage, color: str) -> None:
    page = open_view(f"samples?sample=9.12&color={color}")
    page.locator(f'.tokens[data-color="{color}"]').wait_for()
    background = "token => getComputedStyle(token).backgroundColor"
    colors = page.locator(".token").evaluate_all(f"tokens => tokens.map({background})")
    graded = len(colors) - 1  # the two strongest have full color
    # The first token is gray, because it is not trained on; the values of the others are equal.
    assert len(set(colors)) == {"engine_logprobs": graded, "trainer_logprobs": graded, "versions": 1, "engines": 1}.get(color, 2)
    assert page.locator(".token.given").count() == (0 if color in ("mask", "versions", "engines") else 1)


def test_the_selected_color_is_in_the_link(open_view: OpenPage) -> None:
    page = open_view("samples?sample=9.12")
    page.get_by_text("Entropy", exact=True).click()
    assert "color=entropy" in page.url


def test_the_group_side_by_side(open_view: OpenPage) -> None:
    page = open_view("samples?sample=4.5")
    members = page.locator(".member")
    expect(members).to_have_count(4)
    expect(page.locator(".member.current")).to_contain_text("step 4, row 5")
    members.nth(3).click()
    expect(page.locator(".member.current")).to_contain_text("step 4, row 7")
    assert "sample=4.7" in page.url
    page.go_back()
    expect(page.locator(".member.current")).to_contain_text("step 4, row 5")


def test_the_same_prompt_over_time(open_view: OpenPage) -> None:
    page = open_view("samples?sample=4.5")
    steps = page.locator(".history button")
    expect(steps).to_have_count(NUM_STEPS)
    steps.nth(0).click()
    expect(page.locator(".member.current")).to_contain_text("step 0, row 4")


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (FAILED, "Failed: the reward server answered 500"),
        (TRUNCATED, "Truncated at the maximum length"),
        ((2, 13), "group was dropped: zero_std"),
        ((9, 12), "1 version older than the newest"),
    ],
)
def test_a_sample_shows_its_problem(open_view: OpenPage, place: tuple[int, int], reason: str) -> None:
    page = open_view(f"samples?sample={place[0]}.{place[1]}")
    expect(page.locator(".sample-view .notes")).to_contain_text(reason)


def test_a_script_in_a_sample_is_shown_and_never_run(open_view: OpenPage) -> None:
    page = open_view(f"samples?sample={HOSTILE[0]}.{HOSTILE[1]}&step_min={HOSTILE[0]}&step_max={HOSTILE[0]}")
    expect(page.locator(".member.current")).to_contain_text("<script>window.hacked")
    assert "".join(page.locator(".token").all_text_contents()).replace("⋯", "") == SCRIPT
    expect(page.locator(".line-response", has_text="<script>")).to_have_count(1)
    assert page.evaluate("window.hacked") is None
    assert page.locator("main img").count() == 0


def test_a_missing_sample_is_reported(serve: Serve, open_page: OpenPage, recorded: Path, browser: Browser) -> None:
    page = browser.new_page()  # the browser itself notes the 404 on its console
    page.goto(f"{serve([recorded])}#samples?sample=99.0")
    expect(page.locator(".sample-view .notes")).to_contain_text("no row 0 in the samples of step 99")
    page.close()
