"""`fuligo view` as a visitor meets it."""

import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.unit.observability.viewer.recorded_run import write_run


@pytest.mark.long
@pytest.mark.parametrize("token", [None, "mine"])
def test_the_page_is_shown_only_at_the_printed_address(tmp_path: Path, token: str | None) -> None:
    run = write_run(tmp_path / "run", num_steps=1)
    environment = os.environ | ({} if token is None else {"FULIGO_VIEW_TOKEN": token})
    command = [sys.executable, "-m", "fuligo", "view", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as view:
        try:
            assert view.stdout is not None
            printed = re.search(r"(http://127\.0\.0\.1:\d+)/\?token=(\S+)", view.stdout.readline())
            assert printed is not None
            assert len(printed[2]) >= 20 if token is None else printed[2] == token
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(f"{printed[1]}/api/runs")
            opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
            assert b"fuligo view" in opener.open(printed[0]).read()
            assert opener.open(f"{printed[1]}/api/runs").status == 200
        finally:
            view.terminate()
