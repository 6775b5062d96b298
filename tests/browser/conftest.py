"""A real browser for the tests of pages: headless Chromium, if this machine has one."""

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

_PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
"""Browsers in order of preference. The shell has no windows and takes a third of the time of the others."""
# No sandbox: it needs rights that containers lack, and the pages are our own. No GPU, and nothing that the browser does by itself.
_SWITCHES = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]

DEADLINE_MS = 60_000
"""Deadline of every wait for a page: on a busy machine a page is slow, not wrong."""
expect.set_options(timeout=DEADLINE_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start a browser per module, not per session, because Playwright's event loop would interfere with asynchronous tests."""
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        pytest.skip(f"no browser on this machine: none of {', '.join(_PROGRAMS)} (Debian: apt-get install chromium-headless-shell)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=_SWITCHES)
        yield browser
        browser.close()
