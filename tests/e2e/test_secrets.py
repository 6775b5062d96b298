"""A whole run with secrets: nothing that it leaves behind or answers holds one, and no other user can read it."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

import pytest
from starlette.testclient import TestClient

from fuligo.observability.viewer.api import make_app
from fuligo.observability.viewer.run import RunReader
from tests.e2e.command import fail, fuligo, succeed
from tests.e2e.conftest import Job

KEY = "canary-5e1d"


class Judge(BaseHTTPRequestHandler):
    """Reward model that notes who asks."""

    seen: ClassVar[set[tuple[str, str]]] = set()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        key = parse_qs(urlsplit(self.path).query).get("api_key", [""])[0]
        self.seen.add((self.headers.get("Authorization", ""), key))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"1.0")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def judge() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_run_leaves_no_secret_behind(job: Job, judge: str, tmp_path: Path) -> None:
    run_dir, save = tmp_path / "run", tmp_path / "saved"
    flags = {
        "rm_type": "remote_rm",
        "rm_url": f"http://me:{KEY}-1@{judge}/?api_key={KEY}-2",
        "env": json.dumps({"MY_SETTING": f"{KEY}-3", "WANDB_API_KEY": "${OUTER_TOKEN}"}),
        "num_rollout": 1,
        "save": save,
        "save_debug_rollout_data": tmp_path / "debug" / "{rollout_id}.pt",
        "use_tensorboard": True,
        "run_dir": run_dir,
    }
    arguments = [*job(**flags), "--env", "OUTER_TOKEN"]
    done = fuligo(*arguments, OUTER_TOKEN=f"{KEY}-4")
    assert done.returncode == 0, done.stderr
    basic = base64.b64encode(f"me:{KEY}-1".encode()).decode()
    assert {(f"Basic {basic}", f"{KEY}-2")} == Judge.seen, "the secrets reach what needs them"

    plan = fuligo("plan", "--gpu", "h100-80", "--json", tmp_path / "plan.json", "--html", tmp_path / "plan.html", *arguments[1:])
    succeed("view", run_dir, "--export", tmp_path / "report.html")
    assert KEY not in done.stdout + done.stderr + plan.stdout + plan.stderr
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {"config.yaml", "log.txt", "plan.json", "plan.html", "report.html"} <= {file.name for file in files}
    assert [file for file in files if KEY.encode() in file.read_bytes()] == []
    assert KEY not in answers(run_dir)
    for private in (run_dir, save, run_dir / "samples", tmp_path / "debug", run_dir / "config.yaml"):
        assert private.stat().st_mode & 0o077 == 0, f"{private} is open to others"

    resumed = ["train", "--config", run_dir / "config.yaml", "--run-dir", tmp_path / "again"]
    message = fail(2, *resumed)
    assert "--env: ${MY_SETTING} refers to the environment variable MY_SETTING, which is not set; export it" in message
    assert "--rm-url: ${RM_URL} refers to" in message
    assert not (tmp_path / "again").exists()


def answers(run_dir: Path) -> str:
    """Return everything that the page of a run can ask for."""
    app = make_app([RunReader(run_dir, "run")], token="t")
    client = TestClient(app, base_url="http://127.0.0.1", headers={"Authorization": "Bearer t"})
    paths = ["/", "/api/runs", *(f"/api/{name}?run=run" for name in ("metrics", "settings", "steps", "health", "trace.json"))]
    paths += ["/api/samples?run=run&step=0", "/api/step?run=run&step=0"]
    answered = [client.get(path) for path in paths]
    assert [answer.url for answer in answered if answer.status_code != 200] == []
    return "".join(answer.text for answer in answered)
