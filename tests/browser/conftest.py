"""A real browser for the tests of pages (headless Chromium, if this machine has one), and a recorded run for those of `fuligo view`."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, expect, sync_playwright

from fuligo.cli.view import bind
from fuligo.observability.viewer.api import address as address_of
from fuligo.observability.viewer.api import make_app
from fuligo.observability.viewer.run import RunReader, Watcher
from tests.unit.observability.viewer.recorded_run import NUM_STEPS, write_run

OpenPage = Callable[..., Page]
Serve = Callable[[list[Path]], str]
NUM_SAMPLES = 16 * NUM_STEPS
"""Samples of the recorded run."""

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


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="module")
def free_pages() -> list[Page]:
    """Return empty pages of the browser for later tests. A new page starts a process, which takes as much CPU time as loading fuligo's."""
    return []


@pytest.fixture
def open_page(browser: Browser, free_pages: list[Page]) -> Iterator[OpenPage]:
    """Open an address; fail the test if the page logs an error or asks any server but its own."""
    complaints: list[str] = []
    foreign: list[str] = []
    opened: list[tuple[Page, dict[str, Callable]]] = []

    def open_it(address: str, width: int = 1280, scheme: str = "light") -> Page:
        page = free_pages.pop() if free_pages else browser.new_page()
        page.set_default_timeout(DEADLINE_MS)
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        home = address.partition("#")[0].partition("?")[0]
        listeners: dict[str, Callable] = {
            "console": lambda message: complaints.append(message.text),
            "pageerror": lambda error: complaints.append(str(error)),
            "request": lambda request: None if request.url.startswith(home) else foreign.append(request.url),
        }
        for event, listener in listeners.items():
            page.on(event, listener)
        opened.append((page, listeners))
        page.goto(address)
        return page

    yield open_it
    for page, listeners in opened:
        page.mouse.move(0, 0)  # returns after everything that the page logged has arrived
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
        page.goto("about:blank")
        page.context.clear_cookies()  # the next visitor shows the token again
        free_pages.append(page)
    assert complaints == []
    assert foreign == []


@pytest.fixture(scope="module")
def address(serve: Serve, recorded: Path) -> str:
    """Serve the recorded run; return its address."""
    return serve([recorded])


@pytest.fixture
def open_view(open_page: OpenPage, address: str) -> OpenPage:
    """Open the recorded run at `#...`."""

    def open_it(fragment: str = "", width: int = 1280, scheme: str = "light") -> Page:
        return open_page(f"{address}#{fragment}", width, scheme)

    return open_it


def chart(page: Page, key: str):
    return page.locator(f'.chart[data-key="{key}"]')


def found(page: Page, number: int, what: str = "sample") -> None:
    expect(page.locator(".found")).to_have_text(f"{number} {what}{'' if number == 1 else 's'}")
