"""Prompts by pass rate, the same prompt in two runs, the sources of tokens, and charts without repetition."""

from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import expect

from fuligo.observability.run_directory import RunDirectory
from fuligo.observability.viewer.report import write_report
from fuligo.observability.viewer.run import RunReader
from fuligo.types import Sample, SampleGroup, SampleStatus, Span
from tests.browser.conftest import NUM_SAMPLES, OpenPage, Serve, chart, found
from tests.unit.observability.viewer.recorded_run import PROMPTS, begin_run, rendered_ids, tokenizer, write_run

CALL, RESULT, END = "<think>6*7", "<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n", "</think>42"

ROUNDED = 1 + 4.44e-16
"""Factor of a mean that is summed in another order."""
RANGES = [[0.5, 6.53], [0, 1e-9], [0.9996, 1.0001], [-3, 7], [4, 4.2], [99.5, 100.5], [-2e-8, 1e-8], [12, 4e6], [5, 5], [0, 0]]
"""Ends of curves whose round labels are hard to find."""


def write_turns(run: RunDirectory, reward: float = 1.0) -> None:
    """Write a step with one sample: a turn, the result of a tool as the template renders it, another turn; pass rates that never change."""
    parts = [np.array(tokenizer().encode(text, add_special_tokens=False).ids, np.int32) for text in (CALL, RESULT, END)]
    mask = np.concatenate([np.full(len(part), at != 1, np.int8) for at, part in enumerate(parts)])
    first, between, _ = (len(part) for part in parts)
    sample = Sample(
        index=0,
        group_index=0,
        prompt=[{"role": "user", "content": PROMPTS[0]}],
        prompt_ids=rendered_ids(PROMPTS[0]),
        response_ids=np.concatenate(parts),
        loss_mask=mask,
        engine_logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        versions=np.zeros(len(mask), np.int32),
        status=SampleStatus.COMPLETED,
        reward=reward,
        response=CALL + "42" + END,
        spans=[
            Span("generate", 1.0, 2.0, engine=0, num_tokens=first),
            Span("generate", 3.0, 4.0, engine=0, first_token=first + between, num_tokens=len(parts[2])),
        ],
    )
    run.write_samples(0, [SampleGroup(0, 0, [sample])])
    for step in range(4):
        edges = {f"edge/{at}": low + (high - low) * step / 3 for at, (low, high) in enumerate(RANGES)}
        rewards = {
            "rollout/reward_mean": step / 4,
            "rollout/mean@1": step / 4 * ROUNDED,
            "rollout/pass@1": 1.0,
            "rollout/pass@2": 0.5 + step / 8,
        }
        run.record(
            {
                "step": step,
                "policy_version": step,
                "time": 1e9 + step,
                "rollout/num_tokens": 10.0,
                "perf/step_s": 1.0,
                "perf/gpu_memory": 0.1 * step,
                **rewards,
                **edges,
            }
        )


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("turns") / "turns"
    run = begin_run(path)
    write_turns(run.directory)
    run.directory.close()
    return path


def test_prompts_are_sorted_and_lead_to_their_samples(open_view: OpenPage) -> None:
    page = open_view("prompts")
    rows = page.locator(".prompts tbody tr")
    expect(rows).to_have_count(len(PROMPTS))
    rates = [int(text.rstrip("%")) for text in page.locator(".prompts tbody td:nth-child(2)").all_text_contents()]
    assert rates == sorted(rates) and rates[0] < rates[-1]
    page.get_by_role("button", name="Pass rate").click()
    assert "order=-pass_rate" in page.url
    expect(page.locator("th[aria-sort=descending]")).to_contain_text("Pass rate ↓")
    assert page.locator(".spark").first.get_attribute("aria-label").startswith("step 0: ")
    rows.filter(has_text=PROMPTS[1]).get_by_role("button").click()
    found(page, NUM_SAMPLES // len(PROMPTS))
    expect(page.locator(".line-prompt").first).to_have_text(PROMPTS[1])


def test_shaped_rewards_below_1_have_no_pass_rates(serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
    run = begin_run(tmp_path / "shaped")
    write_turns(run.directory, reward=0.93)
    run.directory.close()
    page = open_page(serve([tmp_path / "shaped"]) + "#prompts")
    expect(page.locator(".prompts tbody td:nth-child(2)")).to_have_text("–")
    expect(page.get_by_text("no pass rates, as no response has a reward of at least 1")).to_be_visible()


def test_prompts_of_evaluations_and_of_a_report(open_page: OpenPage, open_view: OpenPage, recorded: Path, tmp_path: Path) -> None:
    page = open_view("prompts?of=eval")
    expect(page.locator(".prompts tbody tr")).to_have_count(2)
    page.locator(".controls").get_by_text("long_sums", exact=True).click()
    expect(page.locator(".prompts tbody tr")).to_have_count(1)
    write_report([RunReader(recorded, "recorded")], tmp_path / "report.html")
    report = open_page(f"{(tmp_path / 'report.html').as_uri()}#prompts?order=-change")
    expect(report.locator(".prompts tbody tr")).to_have_count(len(PROMPTS))


def test_the_same_prompt_of_another_run_is_shown_beside(serve: Serve, open_page: OpenPage, recorded: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", lr=5e-5, num_steps=3, name="other")
    page = open_page(serve([recorded, other]) + "#samples?run=recorded&sample=9.5")
    part = page.get_by_label("The same prompt in other runs")
    expect(part).to_contain_text("other, step 2: mean reward")  # the nearest step
    expect(part.locator(".member")).to_have_count(4)
    part.locator(".member").nth(1).click()
    expect(page.locator("#run")).to_have_value("other")
    expect(page.get_by_label("The same prompt in other runs")).to_contain_text("recorded, step 2")


def test_other_steps_and_runs_are_shown_once_they_are_read(serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
    """The index of samples is filled in the background, so the first answers lack what is not read yet."""
    mine, other = (begin_run(tmp_path / name) for name in ("mine", "other"))
    mine.step(0)
    page = open_page(serve([mine.directory.path, other.directory.path]) + "#samples?run=mine&sample=0.5")
    history, part = page.get_by_label("This prompt over time"), page.get_by_label("The same prompt in other runs")
    expect(history).to_contain_text("only in this step")
    expect(part).to_be_hidden()
    other.step(0)
    expect(part).to_contain_text("other, step 0: mean reward")
    mine.step(1)
    expect(history.get_by_role("button")).to_have_count(2)
    for run in (mine, other):
        run.directory.close()


def test_datasets_judge_the_same_prompt_by_their_own_rewards(serve: Serve, open_page: OpenPage, tmp_path: Path) -> None:
    run = begin_run(tmp_path / "graded").directory
    rewards = [{"acc": 1.0, "brief": 0.75}, {"acc": 0.0, "brief": 0.25}]
    samples = [Sample(at, 0, "How many?", np.ones(2, np.int32), reward=reward) for at, reward in enumerate(rewards)]
    names = ("exact", "style")
    groups = {name: [SampleGroup(0, 0, samples)] for name in names}
    run.write_evaluation(0, groups, {f"eval/{name}/mean@1": 0.5 for name in names}, reward_keys={"exact": "acc", "style": "brief"})
    run.close()
    page = open_page(serve([tmp_path / "graded"]) + "#prompts?of=eval")
    rows = page.locator(".prompts tbody tr")
    expect(rows).to_have_count(2)
    for row, name, rate in zip((rows.nth(0), rows.nth(1)), names, ("50%", "–"), strict=True):
        expect(row).to_contain_text(name)
        expect(row.locator("td").nth(1)).to_have_text(rate)
    rows.nth(1).get_by_role("button").click()
    found(page, 2)
    expect(page.locator(".line .reward")).to_have_text(["0.75", "0.25"])
    page.get_by_label("Part of reward").select_option("acc")
    page.get_by_label("acc from").fill("0.5")
    found(page, 1)
    page.locator(".line").first.click()
    expect(page.locator(".sample-facts")).to_contain_text("acc1brief0.75")


def test_template_and_tools_are_grey_and_named(serve: Serve, open_page: OpenPage, turns: Path) -> None:
    page = open_page(serve([turns]) + "#samples?sample=0.0&color=engine_logprobs")
    template = page.locator(".message.template")
    expect(template).to_have_count(2)
    expect(template.first).to_contain_text("<|im_start|>user")
    expect(page.locator(".message:not(.template) .prose")).to_have_text(PROMPTS[0])
    expect(page.locator(".token.given.appended")).not_to_have_count(0)
    assert "".join(page.locator(".token.given.appended").all_text_contents()) == "42"
    given = "".join(page.locator(".token.given").all_text_contents())
    assert given.replace("↵", "") == RESULT
    expect(page.locator(".token-legend")).to_contain_text("of tools and users")
    expect(page.locator(".token-legend")).to_contain_text("of the chat template")
    page.locator(".token.given.template").first.hover()
    expect(page.locator(".token-facts")).to_contain_text("fromchat template")


def test_repeated_and_flat_curves_are_among_the_other_metrics(serve: Serve, open_page: OpenPage, turns: Path) -> None:
    page = open_page(serve([turns]))
    chart(page, "rollout/pass@2").locator("path.line").wait_for()
    assert [chart(page, f"rollout/{key}").count() for key in ("reward_mean", "mean@1", "pass@1")] == [1, 0, 0]
    chart(page, "perf/gpu_memory").locator("path.line").wait_for()
    page.locator("details.group summary").click()
    chart(page, "rollout/mean@1").locator("path.line").wait_for()
    chart(page, "rollout/pass@1").locator("path.line").wait_for(state="attached")  # a level line has no height


@pytest.mark.parametrize("settings", ["", "&log=1", "&x=time", "&x=tokens", "&from=1&to=1.6", "&from=2&to=3"])
def test_axes_have_two_labels_that_differ(serve: Serve, open_page: OpenPage, turns: Path, settings: str) -> None:
    page = open_page(f"{serve([turns])}#overview?find=edge{settings}")
    chart(page, "edge/0").locator(".tick-y").first.wait_for()
    for at, ends in enumerate(RANGES):
        texts = chart(page, f"edge/{at}").locator(".tick-y").all_text_contents()
        assert len(set(texts)) == len(texts) >= 2 or (not texts and "log" in settings and min(ends) <= 0), (ends, texts)
    steps = chart(page, "edge/0").locator(".tick-x").all_text_contents()
    assert len(set(steps)) == len(steps) >= 2, steps
