"""Page in one file. Its behavior is tested in tests/browser, its frame in tests/unit/planner."""

from importlib import resources

import pytest

from fuligo.observability.viewer import front


def test_page_has_every_script_of_the_folder() -> None:
    scripts = {file.name for file in resources.files(front).iterdir() if file.name.endswith(".js")}
    assert scripts == set(front._SCRIPTS)


@pytest.mark.parametrize(("document", "asks"), [(None, "self"), ({"runs": []}, "none")])
def test_a_report_sends_no_requests(document: dict | None, asks: str) -> None:
    assert f"connect-src '{asks}'" in front.page("run", document)
