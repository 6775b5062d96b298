"""The page of `fuligo view` in a real browser, over a recorded run and over one that is being written."""

import json
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import expect

from fuligo.observability.viewer.report import write_report
from fuligo.observability.viewer.run import RunReader
from tests.browser.conftest import OpenPage, Serve, chart, found
from tests.unit.observability.viewer.recorded_run import HOSTILE, NUM_STEPS, begin_run, write_run
from tests.unit.observability.viewer.test_hostile import put_scripts

SIGNS = {
    "overview": '.chart[data-key="rollout/reward_mean"] path.line',
    "samples": ".line.sample",
    "samples?sample=4.3": ".token",
    "time": ".phase",
    "health": ".alarm.error",
}
"""Selectors of elements that show that a view is ready."""


def test_scripts_in_every_text_of_a_run_never_run(serve: Serve, open_page: OpenPage, recorded: Path, tmp_path: Path) -> None:
    """In keys and values of metrics, settings, phases and samples; on a page and in a report."""
    run = Path(shutil.copytree(recorded, tmp_path / "run"))
    put_scripts(run)
    write_report([RunReader(run, "run")], tmp_path / "report.html")
    signs = {**SIGNS, "overview": ".card", "time": "#step h2", "health": "pre.log", "samples?sample=3.5": ".token"}
    for address in (serve([run]), (tmp_path / "report.html").as_uri()):
        page = open_page(address)
        for view, sign in signs.items():
            page.goto(f"{address}#{view}")
            page.locator(sign).first.wait_for()
            page.wait_for_timeout(300)
            assert page.evaluate("window.hacked") is None
            assert page.locator("main img").count() == 0


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_fits_every_screen(open_view: OpenPage, scheme: str, width: int) -> None:
    page = open_view(width=width, scheme=scheme)
    for fragment, sign in SIGNS.items():
        page.goto(page.url.partition("#")[0] + f"#{fragment}")
        page.locator(sign).first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") == width, f"{fragment} does not scroll sideways"


@pytest.mark.parametrize(("scheme", "other"), [("light", "Dark"), ("dark", "Light")])
def test_light_and_dark(open_view: OpenPage, scheme: str, other: str) -> None:
    page = open_view(scheme=scheme)
    paper = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(paper)
    page.get_by_role("button", name=other).click()
    assert page.evaluate(paper) != before


class TestOverview:
    def test_cards_show_the_state_of_the_run(self, open_view: OpenPage) -> None:
        page = open_view()
        cards = page.locator(".card")
        expect(page.locator("h1")).to_have_text("recorded")
        expect(page.locator("h1 + .pill")).to_have_text("finished, 1 alarm")
        expect(cards.nth(0)).to_contain_text(f"{NUM_STEPS} of {NUM_STEPS}")
        expect(cards.nth(3)).to_contain_text("10 s per step")

    def test_hovering_shows_the_values_of_curves(self, open_view: OpenPage) -> None:
        page = open_view()
        curve = chart(page, "train/loss")
        expect(curve.locator(".chart-value")).to_have_text("0.008333")  # the latest: 0.1 / 12
        box = curve.locator("svg").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 46, box["y"] + 60)
        expect(curve.locator(".chart-value")).to_have_text("0.1")
        expect(page.locator("#tooltip")).to_contain_text("step 0")
        assert chart(page, "rollout/reward_mean").locator(".marker line").count() == 1, "all charts mark the place"

    def test_curves_are_read_by_keyboard(self, open_view: OpenPage) -> None:
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
    def test_curves_by_time_and_tokens(self, open_view: OpenPage, axis: str, text: str) -> None:
        page = open_view()
        page.locator(".choice").get_by_text(axis, exact=True).click()
        assert f"x={axis.lower()}" in page.url
        curve = chart(page, "train/loss")
        curve.focus()
        page.keyboard.press("Home")
        expect(page.locator("#tooltip")).to_contain_text(text)

    def test_a_link_restores_the_view(self, open_view: OpenPage) -> None:
        page = open_view("overview?x=tokens&smooth=0.6&log=1&find=loss")
        chart(page, "train/loss").locator("path.faint").wait_for()
        assert page.locator(".chart").count() == 1
        assert page.get_by_label("Smoothing").input_value() == "0.6"
        assert page.get_by_label("Log scale").is_checked()
        assert page.locator("input[value=tokens]").is_checked()

    def test_dragging_zooms_all_charts(self, open_view: OpenPage) -> None:
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

    def test_more_metrics_are_fetched_when_they_are_opened(self, open_view: OpenPage) -> None:
        page = open_view()
        chart(page, "rollout/reward_mean").locator("path.line").wait_for()
        with page.expect_request(lambda request: "rollout%2Fnum_tokens" in request.url):
            page.locator("details.group summary").click()
        chart(page, "rollout/num_tokens").locator("path.line").wait_for()

    def test_several_runs_are_laid_over_each_other(self, serve: Serve, open_page: OpenPage, recorded: Path, tmp_path: Path) -> None:
        other = write_run(tmp_path / "other", lr=5e-5, num_steps=6, name="other")
        page = open_page(serve([recorded, other]))
        expect(chart(page, "train/loss").locator("path.line")).to_have_count(2)
        rows = page.locator("#settings tbody tr")
        expect(rows).to_have_count(2)  # the name and the learning rate
        expect(rows.filter(has_text="lr")).to_contain_text("5.0e-05" if "5.0e-05" in rows.filter(has_text="lr").inner_text() else "5e-05")
        page.get_by_label("other").uncheck()
        expect(chart(page, "train/loss").locator("path.line")).to_have_count(1)
        assert "hide=other" in page.url

    def test_settings_of_a_run(self, open_view: OpenPage) -> None:
        page = open_view()
        page.get_by_text("Settings of this run").click()
        expect(page.locator("#settings tr", has_text="num_rollout").first).to_contain_text(str(NUM_STEPS))

    def test_a_run_is_followed_while_it_writes(self, serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
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


class TestTime:
    def test_the_causes_of_a_step_sum_to_its_duration(self, open_view: OpenPage) -> None:
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

    def test_idle_shares(self, open_view: OpenPage) -> None:
        cards = open_view("time?step=4").locator("#step .card")
        expect(cards.nth(2)).to_contain_text("70%")
        expect(cards.nth(3)).to_contain_text("55%")

    def test_the_last_samples_link_to_their_view(self, open_view: OpenPage) -> None:
        page = open_view("time?step=4")
        last = page.locator(".last-samples tbody tr").first
        expect(last).to_contain_text("sample 79")
        expect(last).to_contain_text("0.28 s")  # a sixteenth of 4.5 s
        last.get_by_role("link").click()
        expect(page.locator(".sample-view h2")).to_have_text("Sample 79")

    def test_steps_are_selected_by_keyboard(self, open_view: OpenPage) -> None:
        page = open_view("time")
        expect(page.locator("#step h2")).to_have_text(f"Step {NUM_STEPS - 1}")
        page.locator(".bars").focus()
        page.keyboard.press("ArrowLeft")
        expect(page.locator("#step h2")).to_have_text(f"Step {NUM_STEPS - 2}")
        assert f"step={NUM_STEPS - 2}" in page.url

    def test_the_timeline_is_to_scale(self, open_view: OpenPage) -> None:
        page = open_view("time?step=4")
        phases = "[...document.querySelectorAll('.lane:first-child .phase')]"
        measure = phases + ".map(phase => (phase.offsetLeft + phase.offsetWidth) / phase.parentNode.clientWidth)"
        # The layout changes while answers arrive, so wait for the final positions.
        page.wait_for_function(
            f"ends => {{ const seen = {measure};"
            " return seen.length === ends.length && seen.every((x, i) => Math.abs(x - ends[i]) <= 0.004) }",
            arg=[0.6, 0.65, 0.9, 0.95, 0.99],
        )

    def test_engines_and_ranks_have_lanes(self, open_view: OpenPage) -> None:
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

    def test_the_trace_can_be_downloaded(self, open_view: OpenPage, recorded: Path) -> None:
        page = open_view("time")
        with page.expect_download() as download:
            page.get_by_role("link", name="trace.json").click()
        assert download.value.path().read_bytes() == (recorded / "trace.json").read_bytes()


class TestHealth:
    def test_an_alarm_names_step_version_and_engine(self, open_view: OpenPage) -> None:
        alarm = open_view("health").locator(".alarm.error")
        expect(alarm.locator("h3")).to_have_text("Engine and trainer disagree since step 8: weight version 7 still served by engine 1")
        expect(alarm).to_contain_text("that version 7 sampled differ by 0.5 nats and the others by 0.01")

    @pytest.mark.parametrize("view", ["overview", "samples", "time", "health"])
    def test_ongoing_alarms_are_counted_on_every_tab(self, open_view: OpenPage, view: str) -> None:
        page = open_view(view)
        expect(page.locator("#alarm-badge .badge.error")).to_have_text("1")
        assert page.title().startswith("(1) ")

    def test_the_heading_counts_alarms_as_the_badge_does_and_notes_apart(self, serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
        run = begin_run(tmp_path / "zero")
        for step in range(4):
            metrics = {"rollout/reward_mean": 0.0, "rollout/truncated_ratio": 0.7, "rollout/zero_std_ratio": 1.0, "rollout/num_tokens": 9.0}
            run.directory.record({"step": step, "policy_version": step, "time": 1e9 + step, "perf/step_s": 1.0, **metrics})
        run.directory.close()
        page = open_page(serve([tmp_path / "zero"]) + "#health")
        expect(page.locator("h1")).to_have_text("2 ongoing alarms, 1 note")
        expect(page.locator("#alarm-badge .badge.error")).to_have_text("2")

    def test_labels_of_an_axis_differ(self, open_view: OpenPage) -> None:
        plots = open_view("overview").locator(".chart .plot")
        for labels in plots.evaluate_all("plots => plots.map(plot => [...plot.querySelectorAll('.tick-y')].map(tick => tick.textContent))"):
            assert len(set(labels)) == len(labels)

    def test_a_run_with_an_alarm_is_not_green(self, open_view: OpenPage) -> None:
        expect(open_view("overview").locator("h1 + .pill")).to_have_class("pill failed")

    def test_an_alarm_links_to_its_samples(self, open_view: OpenPage) -> None:
        page = open_view("health")
        page.locator(".alarm.error").get_by_role("link", name="samples of these steps").click()
        found(page, 16 * 4)

    def test_past_alarms_are_marked(self, open_view: OpenPage) -> None:
        over = open_view("health").locator(".alarm.over")
        expect(over).to_contain_text("Samples failed in step 3")

    def test_curves_mark_the_alarm(self, open_view: OpenPage) -> None:
        page = open_view("health")
        expect(chart(page, "train/logprob_abs_diff").locator("rect.band.error")).to_have_count(1)
        compared = "nats; the model's own precision noise was not measured. The alarm's limit is 0.1 nats, or three times the usual value"
        expect(page.locator(".headline")).to_contain_text(compared)


class TestDamage:
    def test_missing_files_are_reported_and_the_rest_is_shown(self, serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
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
        expect(problems).to_contain_text("cannot read the samples of step 2")
        expect(page.locator(".card").nth(0)).to_contain_text("4")
        page.get_by_role("link", name="Samples").click()
        found(page, 48)
        page.locator(".line.sample").first.click()
        expect(page.locator(".token-view")).to_contain_text("shown by their ids")
        page.get_by_role("link", name="Time").click()
        expect(page.locator("#step")).to_contain_text("trace.json has no phases of this step")
        expect(page.locator(".causes tfoot")).to_contain_text("100.0%")

    def test_an_empty_directory(self, serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").touch()
        page = open_page(serve([tmp_path]))
        expect(page.locator("main")).to_contain_text("No step is complete yet")
        for view in ("Samples", "Time", "Health"):
            page.get_by_role("link", name=view).click()
        expect(page.locator("h1")).to_have_text("No step is complete yet")


class TestReport:
    @pytest.fixture(scope="class")
    def report(self, recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
        file = tmp_path_factory.mktemp("report") / "report.html"
        write_report([RunReader(recorded, "recorded")], file)
        return file.as_uri()

    @pytest.mark.parametrize("fragment", ["overview", "samples", "samples?sample=11.3", "time?step=11", "health"])
    def test_every_view_needs_no_server(self, open_page: OpenPage, report: str, fragment: str) -> None:
        page = open_page(f"{report}#{fragment}")
        page.locator(SIGNS[fragment.replace("?step=11", "").replace("11.3", "4.3")]).first.wait_for()

    def test_filters_work_in_a_report(self, open_page: OpenPage, report: str) -> None:
        page = open_page(f"{report}#samples?status=failed")
        expect(page.locator(".found")).to_have_text("1 sample in this report")
        page.locator(".line.sample").click()
        expect(page.locator(".sample-view .notes")).to_contain_text("Failed: the reward server answered 500")

    def test_a_script_in_a_report_is_shown_and_never_run(self, open_page: OpenPage, report: str) -> None:
        page = open_page(f"{report}#samples?sample={HOSTILE[0]}.{HOSTILE[1]}")
        expect(page.locator(".member.current")).to_contain_text("<script>window.hacked")
        assert page.evaluate("window.hacked") is None

    def test_a_report_loads_nothing(self, report: str, open_page: OpenPage) -> None:
        page = open_page(report)
        page.locator("path.line").first.wait_for()
        names = page.evaluate("JSON.stringify(performance.getEntriesByType('resource').map(entry => entry.name))")
        assert [name for name in json.loads(names) if not name.startswith("data:")] == []
