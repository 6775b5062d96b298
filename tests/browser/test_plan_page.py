"""The page of `fuligo plan --html` in a real browser: it draws, answers to mouse and keyboard, loads nothing, and runs nothing foreign."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Page

from fuligo.config import Config
from fuligo.planner.html import plan_page
from fuligo.planner.plan import Plan, plan_document
from tests.browser.conftest import OpenPage
from tests.unit.planner.hand_made_plans import broken_plan, plan_of_8, plan_of_64, plan_of_256

HOSTILE = "</script><script>window.hacked = true</script><img src=x onerror='window.hacked = true'>\u2028${hacked}"
OpenPlan = Callable[..., Page]


@pytest.fixture
def open_plan(open_page: OpenPage, tmp_path: Path) -> OpenPlan:
    """Open a plan's page from its file."""
    numbers = itertools.count()

    def open_it(plan: Plan, width: int = 1280, scheme: str = "light", config: Config | None = None) -> Page:
        file = tmp_path / f"{next(numbers)}.html"
        file.write_text(plan_page(plan_document(plan, config or Config())), encoding="utf-8")
        return open_page(file.as_uri(), width, scheme)

    return open_it


def gpu(page: Page, index: int):
    return page.locator(f'[data-index="{index}"]')


def color_by(page: Page, dimension: str) -> None:
    page.locator(f"input[value={dimension}] + span").click()


def with_class(page: Page, name: str) -> set[int]:
    return {int(index) for index in page.locator(f".cell.{name}").evaluate_all("cells => cells.map(cell => cell.dataset.index)")}


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("make", [plan_of_8, plan_of_64, plan_of_256])
def test_every_gpu_is_drawn_and_large_enough_to_be_hit(open_plan: OpenPlan, make: Callable[[], Plan], width: int):
    plan = make()
    page = open_plan(plan, width)
    assert plan.layout is not None
    boxes = page.locator(".cell .outline").evaluate_all(
        "cells => cells.map(cell => cell.getBoundingClientRect()).map(box => [box.left, box.right, box.width, box.height])"
    )
    assert len(boxes) == len(plan.layout.gpus)
    assert all(left >= 0 and right <= width and box_width >= 14 and box_height >= 24 for left, right, box_width, box_height in boxes)
    assert page.evaluate("document.documentElement.scrollWidth") == width, "the page does not scroll sideways"


@pytest.mark.parametrize("width", [1280, 400])
def test_nodes_of_many_gpus_take_several_lines(open_plan: OpenPlan, width: int):
    plan = plan_of_256()
    assert plan.layout is not None
    gpus = tuple(replace(gpu, node=index // 32, local_index=index % 32) for index, gpu in enumerate(plan.layout.gpus))
    page = open_plan(replace(plan, layout=replace(plan.layout, gpus=gpus, num_nodes=8, num_gpus_per_node=32)), width)
    widths = page.locator(".cell .outline").evaluate_all("cells => cells.map(cell => cell.getBoundingClientRect().width)")
    assert min(widths) >= 14
    gpu(page, 3).focus()
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.index") == "11", "eight GPUs per line"


def test_cells_do_not_overlap(open_plan: OpenPlan):
    page = open_plan(plan_of_256(), 400)
    places = page.locator(".cell .outline").evaluate_all(
        "cells => cells.map(cell => cell.getBoundingClientRect()).map(box => [Math.round(box.left), Math.round(box.top)])"
    )
    assert len({tuple(place) for place in places}) == 256


PEERS = {
    "tp": {40, 41, 42, 43},
    "cp": set(range(33, 64, 4)),
    "pp": set(range(9, 256, 32)),
    "ep": set(range(32, 64)),
    "engine": set(range(64)),
}
"""Ranks in the groups of GPU 41, by dimension, under TP 4, CP 8, PP 8 on 256 GPUs, tp innermost; engines of 64."""


def test_pointing_at_a_gpu_shows_its_peers_in_the_chosen_dimension(open_plan: OpenPlan):
    page = open_plan(plan_of_256())
    for dimension, peers in PEERS.items():
        color_by(page, dimension)
        gpu(page, 41).hover()
        assert with_class(page, "peer") == peers, dimension
        assert with_class(page, "dim") == set(range(256)) - peers, dimension
        assert with_class(page, "chosen") == {41}
        page.mouse.move(5, 5)
        assert with_class(page, "dim") == set()


def test_the_switch_changes_colors(open_plan: OpenPlan):
    page = open_plan(plan_of_256())
    fill = "index => getComputedStyle(document.querySelector(`[data-index='${index}'] .face`)).fill"
    by_role = [page.evaluate(fill, index) for index in (0, 1, 64)]
    assert by_role[0] == by_role[1]
    color_by(page, "tp")
    by_tp = [page.evaluate(fill, index) for index in range(5)]
    assert len(set(by_tp)) == 4
    assert by_tp[0] == by_tp[4], "rank 4 is the first of the next tensor-parallel group"


def test_dimensions_of_one_rank_are_not_offered(open_plan: OpenPlan):
    page = open_plan(plan_of_8())
    offered = page.locator(".switch input").evaluate_all("inputs => inputs.map(input => input.value)")
    assert offered == ["role", "tp", "cp", "dp", "engine"]


def test_the_inspector_tells_ranks_layers_engine_and_memory(open_plan: OpenPlan):
    page = open_plan(plan_of_256())
    gpu(page, 41).click()
    text = page.locator("#inspector").inner_text()
    assert "Node 5 · GPU 1" in text
    assert "trainer rank 41" in text
    assert "14–21 (8)" in text, "the layers of stage 1"
    assert "14, 18" in text, "those of them that compute their index"
    assert "prefill 0, rank 41 of 64" in text
    assert "trainer stage 1" in text
    assert "engines: prefill" in text
    assert "engines: decode" not in text


def test_one_bar_for_a_gpu_that_trainer_and_engine_share_in_one_process(open_plan: OpenPlan):
    plan = plan_of_8()
    trainer, engine = plan.memory
    together = replace(trainer, owner="trainer and engine", engine_group=0)
    page = open_plan(replace(plan, memory=(together, trainer, engine)))
    assert page.locator(".inspector-memory h4").all_inner_texts() == ["trainer and engine\n31.9 GiB free"]


def test_a_rank_chip_shows_that_group(open_plan: OpenPlan):
    page = open_plan(plan_of_256())
    gpu(page, 41).click()
    page.locator("#inspector .chip", has_text="PP").click()
    page.mouse.move(5, 5)
    assert with_class(page, "peer") == set(range(9, 256, 32))
    assert page.locator("polyline.path").count() == 1, "a pipeline is drawn as a line through its stages"


def test_keyboard(open_plan: OpenPlan):
    page = open_plan(plan_of_64())
    page.locator(".switch input:checked").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".switch input:checked").get_attribute("value") == "tp"
    gpu(page, 0).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    columns = page.evaluate("new Set([...document.querySelectorAll('.node rect')].map(rect => rect.getAttribute('x'))).size")
    expected = 1 + 8 * columns
    assert page.evaluate("document.activeElement.dataset.index") == str(expected)
    assert f"Node {columns} · GPU 1" in page.locator("#inspector").inner_text()
    page.keyboard.press("Enter")
    assert gpu(page, expected).get_attribute("aria-pressed") == "true"
    page.keyboard.press("Escape")
    assert gpu(page, expected).get_attribute("aria-pressed") == "false"
    page.keyboard.press("Escape")
    assert with_class(page, "dim") != set(), "the focused GPU's peers stand out, kept or not"
    assert page.locator('.cell[aria-pressed="true"]').count() == 0
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.dataset.index") == "63"
    assert page.locator('.cell[tabindex="0"]').count() == 1, "Tab leaves the cluster at once"


def test_tapping_keeps_a_gpu_until_it_is_let_go(open_plan: OpenPlan):
    page = open_plan(plan_of_256(), 400)
    gpu(page, 200).click()
    box = gpu(page, 200).bounding_box()
    inspector = page.locator("#inspector").bounding_box()
    assert box is not None
    assert inspector is not None
    assert box["y"] + box["height"] <= inspector["y"], "the inspector does not hide the tapped GPU"
    page.get_by_label("Close").click()
    page.mouse.move(5, 5)
    assert with_class(page, "dim") == set()


def test_stages_mark_the_layers_that_compute_their_index(open_plan: OpenPlan):
    page = open_plan(plan_of_256())
    marked = page.locator(".chunk .layer.computing").all_inner_texts()
    assert marked == [str(layer) for layer in (0, 1, *range(2, 78, 4))]
    assert page.locator(".stage").nth(1).locator(".layer").all_inner_texts() == [str(layer) for layer in range(14, 22)]


def test_memory_that_does_not_fit_is_drawn_beyond_the_limit(open_plan: OpenPlan):
    page = open_plan(plan_of_64())
    bars = page.locator(".memory-row .bar")
    assert "8.0 GiB too much" in (bars.nth(0).get_attribute("aria-label") or "")
    last_part = bars.nth(0).locator(".segment").last.bounding_box()
    line = bars.nth(0).locator(".capacity").bounding_box()
    assert last_part is not None
    assert line is not None
    assert last_part["x"] + last_part["width"] > line["x"] + 20
    assert page.locator(".bar.over").count() == 2, "in the section and in the inspector"


def test_timeline_is_to_scale(open_plan: OpenPlan):
    page = open_plan(plan_of_8())
    spans = page.locator(".phase").evaluate_all(
        "phases => phases.map(phase => [phase.offsetLeft, phase.getBoundingClientRect().width, phase.parentNode.clientWidth])"
    )
    by_start = sorted(spans)
    ends = [(start + width) / track for start, width, track in by_start]
    assert ends == pytest.approx([212 / 348.5, 243 / 348.5, 339 / 348.5, 342.5 / 348.5, 1], abs=0.004)


def test_findings_stand_first_where_there_are_errors(open_plan: OpenPlan):
    page = open_plan(plan_of_64())
    sections = page.locator("main > section").evaluate_all("sections => sections.map(section => section.id)")
    assert sections.index("findings") < sections.index("cluster")
    error = page.locator(".finding.error").inner_text()
    assert "PLAN-MEMORY-TRAINER" in error
    assert "--max-tokens-per-gpu 8192" in error


def test_a_plan_without_layout(open_plan: OpenPlan):
    page = open_plan(broken_plan(), 400)
    assert "--tensor-model-parallel-size 3" in page.locator("#findings").inner_text()
    assert page.locator("#cluster").count() == 0


def test_config_table_is_filtered(open_plan: OpenPlan):
    config = Config.model_validate({"rollout": {"rollout_batch_size": 48}})
    page = open_plan(plan_of_8(), config=config)
    rows = page.locator(".settings tbody tr")
    assert rows.all_inner_texts() == ["rollout\trollout_batch_size\t48"]
    page.get_by_label("show defaults too").check()
    assert rows.count() == len(plan_document(plan_of_8(), config)["settings"])
    page.get_by_label("Filter the settings").fill("--rollout-batch-size")
    assert all("rollout_batch_size" in text for text in rows.all_inner_texts())


@pytest.mark.parametrize(("scheme", "other"), [("light", "Dark"), ("dark", "Light")])
def test_light_and_dark(open_plan: OpenPlan, scheme: str, other: str):
    page = open_plan(plan_of_8(), scheme=scheme)
    paper = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(paper)
    page.get_by_role("button", name=other).click()
    assert page.evaluate(paper) != before


def test_hostile_names_are_shown_and_never_run(open_plan: OpenPlan):
    plan = plan_of_256()
    assert plan.layout is not None
    groups = tuple(replace(group, model=HOSTILE) for group in plan.layout.engine_groups)
    memory = tuple(
        replace(bar, owner=HOSTILE, items=tuple(replace(item, name=HOSTILE, note=HOSTILE) for item in bar.items)) for bar in plan.memory
    )
    phases = tuple(replace(phase, name=HOSTILE, lane=HOSTILE, note=HOSTILE) for phase in plan.phases)
    hostile = replace(
        plan,
        name=HOSTILE,
        model_type=HOSTILE,
        gpu=HOSTILE,
        layout=replace(plan.layout, engine_groups=groups),
        memory=memory,
        phases=phases,
        assumptions=(HOSTILE,),
        findings=broken_plan(HOSTILE).findings,
    )
    page = open_plan(hostile)
    gpu(page, 3).click()
    assert page.evaluate("window.hacked") is None
    assert page.locator("h1").inner_text() == HOSTILE.replace("\u2028", "\n") or page.locator("h1").text_content() == HOSTILE
    assert page.title().startswith("</script>")
    assert page.locator("img").count() == 0
