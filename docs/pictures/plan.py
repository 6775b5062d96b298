"""Draws plan-8.png, plan-64.png and plan-256.png: the page of `fuligo plan --html` for three recipes, in Chromium.

    python docs/pictures/plan.py

Needs the dev extra and Chromium (Debian: apt-get install chromium-headless-shell fonts-inter).
"""

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright
from png import recompressed

from fuligo import cli

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
WIDTH = 1120


@dataclass(frozen=True, slots=True)
class Picture:
    name: str
    config: str
    scheme: str
    color_by: str
    gpu: int
    """The one that is pointed at."""
    last_section: str
    """The picture ends above it."""


PICTURES = (
    Picture("plan-8", "glm4-9b/separate.yaml", "light", "role", 5, "stages"),
    Picture("plan-64", "glm4.5-355b/fp8.yaml", "dark", "ep", 19, "stages"),
    Picture("plan-256", "glm5.2-744b/config.yaml", "light", "pp", 75, "memory"),
)


def main() -> None:
    program = shutil.which("chromium-headless-shell") or shutil.which("chromium") or sys.exit("there is no chromium on the path")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        for picture in PICTURES:
            draw(browser, picture)
        browser.close()


def draw(browser: Browser, picture: Picture) -> None:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "plan.html"
        cli.main(["plan", "--config", str(EXAMPLES / picture.config), "--html", str(file)])
        page = browser.new_page(viewport={"width": WIDTH, "height": 3000}, color_scheme=picture.scheme)
        page.goto(file.as_uri())
        page.locator(f"input[value={picture.color_by}] + span").click()
        page.locator(f'[data-index="{picture.gpu}"]').click()
        page.mouse.move(2, 2)
        page.wait_for_timeout(400)  # colors fade in
        end = page.locator(f"#{picture.last_section}").bounding_box()
        assert end is not None
        taken = page.screenshot(clip={"x": 0, "y": 0, "width": WIDTH, "height": end["y"] - 16})
        (HERE / f"{picture.name}.png").write_bytes(recompressed(taken))
        page.close()


if __name__ == "__main__":
    main()
