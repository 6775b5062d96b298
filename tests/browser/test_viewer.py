"""The page of `fuligo view` in a real browser, over a recorded run and over one that is being written."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, expect

from fuligo.cli.view import bind
from fuligo.observability.viewer.api import address as address_of
from fuligo.observability.viewer.api import make_app
from fuligo.observability.viewer.report import write_report
from fuligo.observability.viewer.run import RunReader, Watcher
from tests.browser.conftest import DEADLINE_MS
from tests.unit.observability.viewer.recorded_run import FAILED, HOSTILE, NUM_STEPS, SCRIPT, TRUNCATED, begin_run, write_run
from tests.unit.observability.viewer.test_hostile import put_scripts

OpenView = Callable[..., Page]
Serve = Callable[[list[Path]], str]
NUM_SAMPLES = 16 * NUM_STEPS
SIGNS = {
    "overview": '.chart[data-key="rollout/reward_mean"] path.line',
    "samples": ".line.sample",
    "samples?sample=4.3": ".token",
    "time": ".phase",
    "health": ".alarm.error",
}
"""Selectors of elements that show that a view is ready."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "recorded")


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    """Serve run directories on a free port of this machine; return the address."""
    servers: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(paths: list[Path]) -> str:
        runs = [RunReader(path, path.name) for path in paths]
        watcher = Watcher(runs)
        watcher.start()
        listener = bind("127.0.0.1", 0)
        server = uvicorn.Server(
            uvicorn.Config(make_app(runs, token="secret", watcher=watcher), log_level="warning", timeout_graceful_shutdown=1)
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        servers.append((server, thread))
        return address_of("127.0.0.1", listener.getsockname()[1], "secret")

    yield start
    for server, thread in servers:
        server.should_exit = True
        thread.join(120)


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenView]:
    """Open an address; fail the test if the page logs an error or asks any server but its own."""
    complaints: list[str] = []
    foreign: list[str] = []
    pages: list[Page] = []

    def open_it(address: str, width: int = 1280, scheme: str = "light") -> Page:
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)  # pyright: ignore[reportArgumentType]
        page.set_default_timeout(DEADLINE_MS)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        home = address.partition("#")[0].partition("?")[0]
        page.on("request", lambda request: None if request.url.startswith(home) else foreign.append(request.url))
        page.goto(address)
        pages.append(page)
        return page

    yield open_it
    for page in pages:
        page.close()
    assert complaints == []
    assert foreign == []


@pytest.fixture(scope="module")
def address(serve: Serve, recorded: Path) -> str:
    """Serve the recorded run; return its address."""
    return serve([recorded])


@pytest.fixture
def open_view(open_page: OpenView, address: str) -> OpenView:
    """Open the recorded run at `#...`."""

    def open_it(fragment: str = "", width: int = 1280, scheme: str = "light") -> Page:
        return open_page(f"{address}#{fragment}", width, scheme)

    return open_it


def chart(page: Page, key: str):
    return page.locator(f'.chart[data-key="{key}"]')


def found(page: Page, number: int, what: str = "sample") -> None:
    expect(page.locator(".found")).to_have_text(f"{number} {what}{'' if number == 1 else 's'}")


def test_scripts_in_every_text_of_a_run_never_run(serve: Serve, open_page: OpenView, recorded: Path, tmp_path: Path) -> None:
    """In keys and values of metrics, settings, phases and samples; on a page and in a report."""
    run = Path(shutil.copytree(recorded, tmp_path / "run"))
    put_scripts(run)
    write_report([RunReader(run, "run")], tmp_path / "report.html")
    for address in (serve([run]), (tmp_path / "report.html").as_uri()):
        for view in (*SIGNS, "samples?sample=3.5"):
            page = open_page(f"{address}#{view}")
            page.locator("main").wait_for()
            page.wait_for_timeout(300)
            assert page.evaluate("window.hacked") is None
            assert page.locator("main img").count() == 0


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_fits_every_screen(open_view: OpenView, scheme: str, width: int) -> None:
    page = open_view(width=width, scheme=scheme)
    for fragment, sign in SIGNS.items():
        page.goto(page.url.partition("#")[0] + f"#{fragment}")
        page.locator(sign).first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") == width, f"{fragment} does not scroll sideways"


@pytest.mark.parametrize(("scheme", "other"), [("light", "Dark"), ("dark", "Light")])
def test_light_and_dark(open_view: OpenView, scheme: str, other: str) -> None:
    page = open_view(scheme=scheme)
    paper = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(paper)
    page.get_by_role("button", name=other).click()
    assert page.evaluate(paper) != before


class TestOverview:
    def test_cards_show_the_state_of_the_run(self, open_view: OpenView) -> None:
        page = open_view()
        cards = page.locator(".card")
        expect(page.locator("h1")).to_have_text("recorded")
        expect(page.locator("h1 + .pill")).to_have_text("finished, 1 alarm")
        expect(cards.nth(0)).to_contain_text(f"{NUM_STEPS} of {NUM_STEPS}")
        expect(cards.nth(3)).to_contain_text("10 s per step")

    def test_hovering_shows_the_values_of_curves(self, open_view: OpenView) -> None:
        page = open_view()
        curve = chart(page, "train/loss")
        expect(curve.locator(".chart-value")).to_have_text("0.008333")  # the latest: 0.1 / 12
        box = curve.locator("svg").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 46, box["y"] + 60)
        expect(curve.locator(".chart-value")).to_have_text("0.1")
        expect(page.locator("#tooltip")).to_contain_text("step 0")
        assert chart(page, "rollout/reward_mean").locator(".marker line").count() == 1, "all charts mark the place"

    def test_curves_are_read_by_keyboard(self, open_view: OpenView) -> None:
        page = open_view()
        curve = chart(page, "train/loss")
        curve.focus()
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        expect(curve.locator(".chart-value")).to_have_text("0.05")
        assert "step 1" in (curve.get_attribute("aria-label") or "")
        page.keyboard.press("Escape")
        expect(page.locator("#tooltip")).to_be_hidden()

    @pytest.mark.parametrize(("axis", "text"), [("Time", "time since start 10 s"), ("Tokens", "sampled tokens")])
    def test_curves_by_time_and_tokens(self, open_view: OpenView, axis: str, text: str) -> None:
        page = open_view()
        page.locator(".choice").get_by_text(axis, exact=True).click()
        assert f"x={axis.lower()}" in page.url
        curve = chart(page, "train/loss")
        curve.focus()
        page.keyboard.press("Home")
        expect(page.locator("#tooltip")).to_contain_text(text)

    def test_a_link_restores_the_view(self, open_view: OpenView) -> None:
        page = open_view("overview?x=tokens&smooth=0.6&log=1&find=loss")
        chart(page, "train/loss").locator("path.faint").wait_for()
        assert page.locator(".chart").count() == 1
        assert page.get_by_label("Smoothing").input_value() == "0.6"
        assert page.get_by_label("Log scale").is_checked()
        assert page.locator("input[value=tokens]").is_checked()

    def test_dragging_zooms_all_charts(self, open_view: OpenView) -> None:
        page = open_view()
        box = chart(page, "train/loss").locator("svg").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 100, box["y"] + 60)
        page.mouse.down()
        page.mouse.move(box["x"] + 200, box["y"] + 60)
        page.mouse.up()
        assert "from=" in page.url
        page.get_by_role("button", name="Show all").click()
        assert "from=" not in page.url

    def test_more_metrics_are_fetched_when_they_are_opened(self, open_view: OpenView) -> None:
        page = open_view()
        chart(page, "rollout/reward_mean").locator("path.line").wait_for()
        with page.expect_request(lambda request: "rollout%2Fnum_tokens" in request.url):
            page.locator("details.group summary").click()
        chart(page, "rollout/num_tokens").locator("path.line").wait_for()

    def test_several_runs_are_laid_over_each_other(self, serve: Serve, open_page: OpenView, recorded: Path, tmp_path: Path) -> None:
        other = write_run(tmp_path / "other", lr=5e-5, num_steps=6, name="other")
        page = open_page(serve([recorded, other]))
        expect(chart(page, "train/loss").locator("path.line")).to_have_count(2)
        rows = page.locator("#settings tbody tr")
        expect(rows).to_have_count(2)  # the name and the learning rate
        expect(rows.filter(has_text="lr")).to_contain_text("5.0e-05" if "5.0e-05" in rows.filter(has_text="lr").inner_text() else "5e-05")
        page.get_by_label("other").uncheck()
        expect(chart(page, "train/loss").locator("path.line")).to_have_count(1)
        assert "hide=other" in page.url

    def test_settings_of_a_run(self, open_view: OpenView) -> None:
        page = open_view()
        page.get_by_text("Settings of this run").click()
        expect(page.locator("#settings tr", has_text="num_rollout").first).to_contain_text(str(NUM_STEPS))

    def test_a_run_is_followed_while_it_writes(self, serve: Serve, open_page: OpenView, tmp_path: Path) -> None:
        run = begin_run(tmp_path / "live")
        page = open_page(serve([tmp_path / "live"]))
        expect(page.locator(".card").nth(0)).to_contain_text(f"0 of {NUM_STEPS}")
        run.step(0)
        expect(page.locator(".card").nth(0)).to_contain_text(f"1 of {NUM_STEPS}")
        run.step(1)
        expect(chart(page, "train/loss").locator(".chart-value")).to_have_text("0.05")
        expect(page.locator(".pill.running")).to_be_visible()
        expect(page.locator(".card").nth(4)).to_contain_text("in 1:40")  # ten steps of 10 s
        page.get_by_role("link", name="Samples").click()
        found(page, 32)
        run.step(2)
        found(page, 48)
        run.directory.close()


class TestSamples:
    @pytest.mark.parametrize(
        ("filters", "number"),
        [
            ("", NUM_SAMPLES),
            ("step_min=3&step_max=4", 32),
            ("status=failed", 1),
            ("status=truncated", 1),
            ("kept=false", 4),
            ("group=9", 4),
            ("staleness_min=1", 8 * 4),
            ("engine=1&step_max=1", 16),
            ("reward_min=1&step_max=0", 2),
            ("text=ROW+11<", NUM_SAMPLES // 16),
            ("text=add+70", NUM_SAMPLES // 4),
        ],
    )
    def test_filters(self, open_view: OpenView, filters: str, number: int) -> None:
        found(open_view(f"samples?{filters}"), number)

    def test_samples_of_evaluations(self, open_view: OpenView) -> None:
        page = open_view("samples?advantage_min=0.1")
        page.locator(".choice").get_by_text("Evaluations").click()
        found(page, 16)  # the advantage filter is gone, because evaluations are not trained on
        assert "of=eval" in page.url and "advantage" not in page.url
        page.get_by_label("Data set").select_option("long_sums")
        found(page, 8)
        page.locator(".line.sample").first.click()
        expect(page.locator(".sample-facts")).to_contain_text(f"after{NUM_STEPS} rollouts")
        expect(page.locator(".sample-facts")).to_contain_text("data setlong_sums")
        expect(page.locator(".member")).to_have_count(4)
        expect(page.locator(".history button")).to_have_text(["after 0: 0.25", f"after {NUM_STEPS}: 0.75"])
        page.reload()
        expect(page.locator(".sample-facts")).to_contain_text("long_sums")

    def test_filter_by_engine(self, open_view: OpenView) -> None:
        page = open_view("samples?sample=9.12&colour=engines")
        page.get_by_role("combobox", name="Engine").select_option("1")
        found(page, NUM_SAMPLES // 2)
        expect(page.locator(".token-legend")).to_contain_text("engine 1: ")
        page.get_by_label("Order").select_option("engine")
        page.get_by_role("button", name="Clear").click()
        found(page, NUM_SAMPLES)

    def test_a_search_continues_when_a_step_is_added(self, serve: Serve, open_page: OpenView, tmp_path: Path) -> None:
        run = begin_run(tmp_path / "live")
        run.step(0)
        page = open_page(serve([tmp_path / "live"]) + "#samples?text=row+3<")
        found(page, 1)
        run.step(1)
        found(page, 2)
        run.directory.close()

    def test_typed_filters_are_in_the_link(self, open_view: OpenView) -> None:
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

    def test_order(self, open_view: OpenView) -> None:
        page = open_view("samples")
        first = page.locator(".line.sample").first
        expect(first.locator(".line-step")).to_have_text(str(NUM_STEPS - 1))
        page.get_by_label("Order").select_option("oldest")
        expect(first.locator(".line-step")).to_have_text("0")
        page.get_by_label("Order").select_option("-length")
        lengths = [int(text) for text in page.locator(".line-number[title=tokens]").all_inner_texts()]
        assert lengths == sorted(lengths, reverse=True)

    def test_only_visible_lines_exist(self, open_view: OpenView) -> None:
        page = open_view("samples?order=oldest")
        found(page, NUM_SAMPLES)
        assert page.locator(".line").count() < 40
        page.locator(".sample-list").evaluate("list => list.scrollTop = list.scrollHeight")
        expect(page.locator(".line.sample").last.locator(".line-step")).to_have_text(str(NUM_STEPS - 1))

    def test_samples_are_selected_by_keyboard(self, open_view: OpenView) -> None:
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

    def test_tokens_show_values_of_engine_and_trainer(self, open_view: OpenView) -> None:
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
        expect(facts).to_contain_text("trainedno")
        expect(facts).to_contain_text("version8")
        expect(facts).to_contain_text("served byengine 1")
        page.keyboard.press("ArrowRight")
        expect(facts).to_contain_text("trainedyes")
        shown = "".join(page.locator(".token").all_text_contents())
        assert shown == "<think>step 9, row 12</think>\\boxed{7}"

    @pytest.mark.parametrize(
        "colour",
        ["diff", "engine_logprobs", "trainer_logprobs", "entropy", "advantages", "values", "teacher", "mask", "versions", "engines"],
    )
    def test_tokens_are_coloured(self, open_view: OpenView, colour: str) -> None:
        page = open_view(f"samples?sample=9.12&colour={colour}")
        page.locator(f'.tokens[data-colour="{colour}"]').wait_for()
        background = "token => getComputedStyle(token).backgroundColor"
        colours = page.locator(".token").evaluate_all(f"tokens => tokens.map({background})")
        graded = len(colours) - 1  # the two strongest have full colour
        # The first token is not trained, and grey; the values of the others are equal.
        assert len(set(colours)) == {"engine_logprobs": graded, "trainer_logprobs": graded, "versions": 1, "engines": 1}.get(colour, 2)
        assert page.locator(".token.given").count() == (0 if colour in ("mask", "versions", "engines") else 1)

    def test_the_selected_colour_is_in_the_link(self, open_view: OpenView) -> None:
        page = open_view("samples?sample=9.12")
        page.get_by_text("Entropy", exact=True).click()
        assert "colour=entropy" in page.url

    def test_the_group_side_by_side(self, open_view: OpenView) -> None:
        page = open_view("samples?sample=4.5")
        members = page.locator(".member")
        expect(members).to_have_count(4)
        expect(page.locator(".member.current")).to_contain_text("step 4, row 5")
        members.nth(3).click()
        expect(page.locator(".member.current")).to_contain_text("step 4, row 7")
        assert "sample=4.7" in page.url
        page.go_back()
        expect(page.locator(".member.current")).to_contain_text("step 4, row 5")

    def test_the_same_prompt_over_time(self, open_view: OpenView) -> None:
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
    def test_a_sample_shows_its_problem(self, open_view: OpenView, place: tuple[int, int], reason: str) -> None:
        page = open_view(f"samples?sample={place[0]}.{place[1]}")
        expect(page.locator(".sample-view .notes")).to_contain_text(reason)

    def test_a_script_in_a_sample_is_shown_and_never_run(self, open_view: OpenView) -> None:
        page = open_view(f"samples?sample={HOSTILE[0]}.{HOSTILE[1]}&step_min={HOSTILE[0]}&step_max={HOSTILE[0]}")
        expect(page.locator(".member.current")).to_contain_text("<script>window.hacked")
        assert "".join(page.locator(".token").all_text_contents()).replace("⋯", "") == SCRIPT
        expect(page.locator(".line-response", has_text="<script>")).to_have_count(1)
        assert page.evaluate("window.hacked") is None
        assert page.locator("main img").count() == 0

    def test_a_missing_sample_is_reported(self, serve: Serve, open_page: OpenView, recorded: Path, browser: Browser) -> None:
        page = browser.new_page()  # the browser itself notes the 404 on its console
        page.goto(f"{serve([recorded])}#samples?sample=99.0")
        expect(page.locator(".sample-view .notes")).to_contain_text("no row 0 in the samples of step 99")
        page.close()


class TestTime:
    def test_the_causes_of_a_step_sum_to_its_duration(self, open_view: OpenView) -> None:
        page = open_view("time?step=4")
        rows = page.locator(".causes tbody tr")
        rows.first.wait_for()
        texts = {row.locator("th").inner_text().strip(): row.locator("td").nth(1).inner_text() for row in rows.all()}
        # generation from 1 s to 5.5 s, by fewer than a quarter of 16 samples (three) after the 13th is done; rewards up to 5.75 s
        assert texts["train"] == "25.0%"
        assert texts["sync"] == texts["score"] == "5.0%"
        assert texts["record"] == "4.0%"
        assert texts["between phases"] == "1.0%"
        assert texts["last samples"] == "8.4%"
        assert texts["sampling"] == "36.6%"
        assert texts["reward"] == "2.5%"
        assert texts["rollout"] == "12.5%"
        assert page.locator(".causes tfoot td").nth(1).inner_text() == "100.0%"

    def test_idle_shares(self, open_view: OpenView) -> None:
        cards = open_view("time?step=4").locator("#step .card")
        expect(cards.nth(2)).to_contain_text("70%")
        expect(cards.nth(3)).to_contain_text("55%")

    def test_the_last_samples_link_to_their_view(self, open_view: OpenView) -> None:
        page = open_view("time?step=4")
        last = page.locator(".last-samples tbody tr").first
        expect(last).to_contain_text("sample 79")
        expect(last).to_contain_text("0.28 s")  # a sixteenth of 4.5 s
        last.get_by_role("link").click()
        expect(page.locator(".sample-view h2")).to_have_text("Sample 79")

    def test_steps_are_selected_by_keyboard(self, open_view: OpenView) -> None:
        page = open_view("time")
        expect(page.locator("#step h2")).to_have_text(f"Step {NUM_STEPS - 1}")
        page.locator(".bars").focus()
        page.keyboard.press("ArrowLeft")
        expect(page.locator("#step h2")).to_have_text(f"Step {NUM_STEPS - 2}")
        assert f"step={NUM_STEPS - 2}" in page.url

    def test_the_timeline_is_to_scale(self, open_view: OpenView) -> None:
        page = open_view("time?step=4")
        phases = "[...document.querySelectorAll('.lane:first-child .phase')]"
        measure = phases + ".map(phase => (phase.offsetLeft + phase.offsetWidth) / phase.parentNode.clientWidth)"
        # The layout changes while answers arrive, so wait for the final positions.
        page.wait_for_function(
            f"ends => {{ const seen = {measure};"
            " return seen.length === ends.length && seen.every((x, i) => Math.abs(x - ends[i]) <= 0.004) }",
            arg=[0.6, 0.65, 0.9, 0.95, 0.99],
        )

    def test_engines_and_ranks_have_lanes(self, open_view: OpenView) -> None:
        page = open_view("time?step=4")
        labels = page.locator(".lane-label:not(.axis *)")
        expect(labels).to_have_text(["driver", "samples", "engine 0", "engine 1", "rank 0", "rank 1"])
        engines = page.locator(".lane", has_text="engine")
        expect(engines.nth(0)).to_contain_text("up to 8 at a time, 78% idle")
        expect(engines.nth(1)).to_contain_text("up to 8 at a time, 55% idle")
        ranks = page.locator(".lane", has_text="rank")
        expect(ranks.nth(0).locator(".phase")).to_have_count(4)  # score; forward, backward; optimizer; send
        expect(ranks.nth(1).locator(".phase")).to_have_count(3)
        ranks.nth(1).locator(".phase").nth(1).hover()
        expect(page.locator("#tooltip")).to_contain_text("forward, backward: 2.0 s")

    def test_the_trace_can_be_downloaded(self, open_view: OpenView, recorded: Path) -> None:
        page = open_view("time")
        with page.expect_download() as download:
            page.get_by_role("link", name="trace.json").click()
        assert download.value.path().read_bytes() == (recorded / "trace.json").read_bytes()


class TestHealth:
    def test_an_alarm_names_step_version_and_engine(self, open_view: OpenView) -> None:
        alarm = open_view("health").locator(".alarm.error")
        expect(alarm.locator("h3")).to_have_text("Engine and trainer disagree since step 8: weight version 7 still served by engine 1")
        expect(alarm).to_contain_text("that version 7 sampled differ by 0.5 nats, the others by 0.01")

    @pytest.mark.parametrize("view", ["overview", "samples", "time", "health"])
    def test_ongoing_alarms_are_counted_on_every_tab(self, open_view: OpenView, view: str) -> None:
        page = open_view(view)
        expect(page.locator("#alarm-badge .badge.error")).to_have_text("1")
        assert page.title().startswith("(1) ")

    def test_labels_of_an_axis_differ(self, open_view: OpenView) -> None:
        plots = open_view("overview").locator(".chart .plot")
        for labels in plots.evaluate_all("plots => plots.map(plot => [...plot.querySelectorAll('.tick-y')].map(tick => tick.textContent))"):
            assert len(set(labels)) == len(labels)

    def test_a_run_with_an_alarm_is_not_green(self, open_view: OpenView) -> None:
        expect(open_view("overview").locator("h1 + .pill")).to_have_class("pill failed")

    def test_an_alarm_links_to_its_samples(self, open_view: OpenView) -> None:
        page = open_view("health")
        page.locator(".alarm.error").get_by_role("link", name="its samples").click()
        found(page, 16 * 4)

    def test_past_alarms_are_marked(self, open_view: OpenView) -> None:
        over = open_view("health").locator(".alarm.over")
        expect(over).to_contain_text("Samples failed in step 3")

    def test_curves_mark_the_alarm(self, open_view: OpenView) -> None:
        page = open_view("health")
        expect(chart(page, "train/logprob_abs_diff").locator("rect.band.error")).to_have_count(1)


class TestDamage:
    def test_missing_files_are_reported_and_the_rest_is_shown(self, serve: Serve, open_page: OpenView, tmp_path: Path) -> None:
        run = write_run(tmp_path / "damaged", num_steps=4)
        (run / "trace.json").unlink()
        (run / "config.yaml").unlink()
        (run / "samples" / "rollout_000002.parquet").write_bytes(b"PAR1 cut off")
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(b'{"step": 4, "rollout/rew')
        page = open_page(serve([run]))
        problems = page.locator(".notes")
        expect(problems).to_contain_text("trace.json is missing")
        expect(problems).to_contain_text("config.yaml is missing")
        expect(problems).to_contain_text("samples of step 2 cannot be read")
        expect(page.locator(".card").nth(0)).to_contain_text("4")
        page.get_by_role("link", name="Samples").click()
        found(page, 48)
        page.locator(".line.sample").first.click()
        expect(page.locator(".token-view")).to_contain_text("shown by their ids")
        page.get_by_role("link", name="Time").click()
        expect(page.locator("#step")).to_contain_text("trace.json has no phases of this step")
        expect(page.locator(".causes tfoot")).to_contain_text("100.0%")

    def test_an_empty_directory(self, serve: Serve, open_page: OpenView, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").touch()
        page = open_page(serve([tmp_path]))
        expect(page.locator("main")).to_contain_text("No step is complete yet")
        for view in ("Samples", "Time", "Health"):
            page.get_by_role("link", name=view).click()
        expect(page.locator("h1")).to_have_text("No step is complete yet")


class TestReport:
    @pytest.fixture
    def report(self, recorded: Path, tmp_path: Path) -> str:
        file = tmp_path / "report.html"
        write_report([RunReader(recorded, "recorded")], file)
        return file.as_uri()

    @pytest.mark.parametrize("fragment", ["overview", "samples", "samples?sample=11.3", "time?step=11", "health"])
    def test_every_view_needs_no_server(self, open_page: OpenView, report: str, fragment: str) -> None:
        page = open_page(f"{report}#{fragment}")
        page.locator(SIGNS[fragment.replace("?step=11", "").replace("11.3", "4.3")]).first.wait_for()

    def test_filters_work_in_a_report(self, open_page: OpenView, report: str) -> None:
        page = open_page(f"{report}#samples?status=failed")
        expect(page.locator(".found")).to_have_text("1 sample in this report")
        page.locator(".line.sample").click()
        expect(page.locator(".sample-view .notes")).to_contain_text("Failed: the reward server answered 500")

    def test_a_script_in_a_report_is_shown_and_never_run(self, open_page: OpenView, report: str) -> None:
        page = open_page(f"{report}#samples?sample={HOSTILE[0]}.{HOSTILE[1]}")
        expect(page.locator(".member.current")).to_contain_text("<script>window.hacked")
        assert page.evaluate("window.hacked") is None

    def test_a_report_loads_nothing(self, report: str, open_page: OpenView) -> None:
        page = open_page(report)
        page.locator("path.line").first.wait_for()
        names = page.evaluate("JSON.stringify(performance.getEntriesByType('resource').map(entry => entry.name))")
        assert [name for name in json.loads(names) if not name.startswith("data:")] == []
