"""The page is one file, for a server and for a report alike. (How it behaves: tests/browser; its frame: tests/unit/planner.)"""

from importlib import resources

import pytest

from fuligo.observability.viewer import page


def test_every_script_of_the_folder_is_in_the_page() -> None:
    scripts = {file.name for file in resources.files(page._PACKAGE).iterdir() if file.name.endswith(".js")}
    assert scripts == set(page._SCRIPTS)


@pytest.mark.parametrize(("document", "asks"), [(None, "self"), ({"runs": []}, "none")])
def test_a_report_asks_nobody(document: dict | None, asks: str) -> None:
    assert f"connect-src '{asks}'" in page.page("run", document)
