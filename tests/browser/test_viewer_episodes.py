"""Episodes in the page of `fuligo view`: turns with tool calls, results, rewards and times."""

import pytest
from playwright.sync_api import expect

from fuligo.observability.samples import Training
from fuligo.types import Episode, ToolUse, Turn
from tests.browser.conftest import OpenPage, Serve
from tests.unit.observability.viewer.recorded_run import SCRIPT, begin_run, groups_of, record_of

CALL = {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
CALLED = {"role": "assistant", "content": "", "reasoning_content": "a sum", "tool_calls": [CALL]}


@pytest.fixture(scope="module")
def episodes(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> str:
    """Serve a run whose first row is the first of two samples of an episode; return its address."""
    path = tmp_path_factory.mktemp("episodes") / "run"
    groups = groups_of(0)
    first, last = groups[0].samples[:2]
    first.index = last.index
    last.episode = Episode(
        [{"role": "system", "content": "You may add."}, {"role": "user", "content": "What is 3 + 4?"}],
        [],
        [
            Turn(0, 2, 3, CALLED, [{"role": "tool", "content": SCRIPT}], -0.5, [ToolUse("add", SCRIPT, True, 0.25)], 1.5, 0.25),
            Turn(0, 6, 2, CALLED, [{"role": "tool", "content": "7"}], 0.0, [ToolUse("add", "7", False, 0.004)], 1.0, 0.25),
            Turn(1, 0, 4, {"role": "assistant", "content": "The sum is 7."}, [], 1.0, [], 0.5, 0.0),
        ],
    )
    run = begin_run(path)
    run.directory.write_samples(0, groups, Training())
    run.directory.record(record_of(0, groups))
    run.directory.close()
    return serve([path])


def test_turns_show_calls_results_rewards_and_times(open_page: OpenPage, episodes: str) -> None:
    page = open_page(f"{episodes}#samples?sample=0.0")
    part = page.get_by_role("region", name="Episode")
    expect(part).to_contain_text("3 turns · 2 tool calls, 1 failed · sampling 3.0 s · between turns 0.50 s")
    expect(part).to_contain_text("this is sample 1 of 2")
    turns = part.get_by_role("article")
    expect(turns).to_have_count(3)
    expect(turns.nth(0)).to_contain_text('add {"a":3,"b":4}')
    expect(turns.nth(0)).to_contain_text("reward −0.5")
    expect(turns.nth(0).locator(".message.failed")).to_contain_text(f"add, 0.25 s: failed{SCRIPT}")
    expect(turns.nth(1).locator(".message.result")).to_contain_text("7")
    expect(turns.nth(2)).to_contain_text("The sum is 7.")
    expect(turns.nth(2)).to_contain_text("sample 2")
    part.get_by_text("First messages").click()
    expect(part).to_contain_text("You may add.")
    assert page.evaluate("window.hacked") is None


def test_a_turn_leads_to_its_tokens(open_page: OpenPage, episodes: str) -> None:
    page = open_page(f"{episodes}#samples?sample=0.0")
    turns = page.get_by_role("region", name="Episode").get_by_role("article")
    expect(turns.nth(2).get_by_role("button", name="Tokens")).to_have_count(0)  # its tokens are those of another sample
    turns.nth(1).get_by_role("button", name="Tokens").click()
    expect(page.locator(".token.chosen")).to_have_attribute("data-at", "6")
    page.goto(f"{episodes}#samples?sample=0.1")
    page.get_by_role("article", name="Turn 3").get_by_role("button", name="Tokens").click()
    expect(page.locator(".token.chosen")).to_have_attribute("data-at", "0")


def test_other_samples_have_no_turns(open_page: OpenPage, episodes: str) -> None:
    page = open_page(f"{episodes}#samples?sample=0.5")
    expect(page.locator(".sample-facts")).to_contain_text("reward")
    expect(page.get_by_role("region", name="Episode")).to_have_count(0)
