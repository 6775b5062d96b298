"""Draws view-overview.png, view-samples.png, view-time.png and view-health.png: the views of `fuligo view`, in Chromium.

    fuligo quickstart --run-dir runs/picture
    python docs/pictures/view.py runs/picture

The last two are of the recorded run that the tests use: a quickstart has one engine, one rank, and no alarms worth a picture.
Needs the dev extra and Chromium (Debian: apt-get install chromium-headless-shell fonts-inter).
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright
from png import recompressed

HERE = Path(__file__).parent
WIDTH = 1180


@dataclass(frozen=True, slots=True)
class Picture:
    name: str
    fragment: str
    scheme: str
    height: int
    sign: str
    """It is drawn when this is there."""


OF_QUICKSTART = (
    Picture("view-overview", "overview?smooth=0.4", "light", 740, "path.faint"),
    Picture("view-samples", "samples?sample=2.0&color=entropy&order=-length&step_max=8", "light", 860, ".token"),
)
OF_RECORDED = (
    Picture("view-time", "time?step=9", "dark", 1090, ".phase"),
    Picture("view-health", "health", "light", 560, ".alarm.error"),
)


def main() -> None:
    program = shutil.which("chromium-headless-shell") or shutil.which("chromium") or sys.exit("there is no chromium on the path")
    quickstart = Path(sys.argv[1])
    sys.path.insert(0, str(HERE.parents[1]))
    from tests.unit.observability.viewer.recorded_run import write_run

    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as scratch:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        for run, pictures in ((quickstart, OF_QUICKSTART), (write_run(Path(scratch) / "sums"), OF_RECORDED)):
            with served(run) as address:
                for picture in pictures:
                    draw(browser, address, picture)
        browser.close()


@contextmanager
def served(run: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "fuligo", "view", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        try:
            yield found[0] if found else sys.exit("fuligo view did not start")
        finally:
            process.terminate()


def draw(browser: Browser, address: str, picture: Picture) -> None:
    page = browser.new_page(viewport={"width": WIDTH, "height": picture.height}, color_scheme=picture.scheme)
    page.goto(f"{address}#{picture.fragment}")
    page.locator(picture.sign).first.wait_for()
    page.wait_for_timeout(2500)  # all files are read, the last curves drawn
    (HERE / f"{picture.name}.png").write_bytes(recompressed(page.screenshot()))
    page.close()


if __name__ == "__main__":
    main()
