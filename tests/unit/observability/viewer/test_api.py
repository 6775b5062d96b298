"""HTTP endpoints: read-only, limited to the given runs and to permitted visitors."""

from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from fuligo.observability.viewer.api import address, make_app
from fuligo.observability.viewer.run import RunReader
from tests.unit.observability.viewer.recorded_run import NUM_STEPS, write_run

LOCAL = "http://127.0.0.1:6780"
VISITOR = {"authorization": "Bearer secret"}
Client = Callable[..., TestClient]


@pytest.fixture
def client(run: RunReader) -> TestClient:
    return TestClient(make_app([run], token="secret"), base_url=LOCAL, headers=VISITOR)


def test_every_endpoint_answers(client: TestClient) -> None:
    for path in (
        "/",
        "/api/runs",
        "/api/metrics?run=recorded&keys=train/loss",
        "/api/differences?run=recorded",
        "/api/settings?run=recorded",
        "/api/samples?run=recorded",
        "/api/sample?run=recorded&step=3&row=5",
        f"/api/sample?run=recorded&of=eval&step={NUM_STEPS}&row=5",
        "/api/history?run=recorded&prompt=1",
        "/api/steps?run=recorded",
        "/api/step?run=recorded&step=3",
        "/api/health?run=recorded",
        "/api/trace.json?run=recorded",
    ):
        answer = client.get(path)
        assert answer.status_code == 200, path
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_samples_of_evaluations_are_filtered_by_data_set(client: TestClient) -> None:
    answer = client.get("/api/samples", params={"run": "recorded", "of": "eval", "dataset": "long_sums", "step_min": 1}).json()
    assert [(row["step"], row["dataset"], row["reward"]) for row in answer["rows"]] == [
        (NUM_STEPS, "long_sums", reward) for reward in (1.0, 1.0, 1.0, 0.0)
    ]
    sample = client.get("/api/sample", params={"run": "recorded", "of": "eval", "step": NUM_STEPS, "row": 5}).json()
    assert sample["dataset"] == "long_sums"
    assert [member["row"] for member in sample["members"]] == [4, 5, 6, 7], "the other dataset has the same group index"
    history = client.get("/api/history", params={"run": "recorded", "of": "eval", "prompt": sample["prompt_key"]}).json()
    assert [row["step"] for row in history["rows"]] == [0] * 4 + [NUM_STEPS] * 4
    assert client.get("/api/runs").json()["runs"][0]["datasets"] == ["held_out", "long_sums"]


def test_tokens_have_their_engine(client: TestClient) -> None:
    for row, engine in ((3, 0), (12, 1)):
        sample = client.get("/api/sample", params={"run": "recorded", "step": 4, "row": row}).json()
        assert sample["engine"] == engine
        assert set(sample["tokens"]["engines"]) == {engine}
    found = client.get("/api/samples", params={"run": "recorded", "engine": 1}).json()
    assert found["total"] == 8 * NUM_STEPS


def test_only_new_rows_are_sent(client: TestClient) -> None:
    answer = client.get("/api/metrics", params={"run": "recorded", "keys": "train/loss", "after": NUM_STEPS - 2, "generation": 0}).json()
    assert answer["step"] == [NUM_STEPS - 2, NUM_STEPS - 1]
    assert answer["start"] == NUM_STEPS - 2
    whole = client.get("/api/metrics", params={"run": "recorded", "keys": "train/loss", "after": 5, "generation": 3}).json()
    assert len(whole["step"]) == NUM_STEPS, "the page has another generation of the file"


@pytest.mark.parametrize(
    "path",
    [
        "/api/metrics?run=../recorded",
        "/api/samples?run=/etc",
        "/api/sample?run=recorded&step=99&row=0",
        "/api/sample?run=recorded&step=1&row=99",
        "/api/sample?run=recorded&of=eval&step=1&row=0",
        "/api/step?run=recorded&step=99",
        "/api/trace.json?run=..%2F..%2Fetc%2Fpasswd",
        "/api/trace.json/../../etc/passwd",
        "/config.yaml",
        "/samples/rollout_000000.parquet",
        "/docs",
    ],
)
def test_other_paths_are_not_found(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        "/api/samples?run=recorded&limit=100000",
        "/api/samples?run=recorded&order=name",
        "/api/samples?run=recorded&of=test",
        "/api/sample?run=recorded&step=x&row=1",
    ],
)
def test_invalid_parameters_are_refused(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 422


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_other_methods_are_refused(client: TestClient, method: str) -> None:
    assert client.request(method, "/api/runs").status_code == 405


def test_links_out_of_the_run_are_not_followed(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", num_steps=1)
    for name in ("trace.json", "config.yaml", "log.txt", "metrics.jsonl"):
        (path / name).rename(tmp_path / name)
        (path / name).symlink_to(tmp_path / name)
    run = RunReader(path, "run")
    run.update_rest(float("inf"))
    client = TestClient(make_app([run], token="secret"), base_url=LOCAL, headers=VISITOR)
    assert client.get("/api/trace.json?run=run").status_code == 404
    assert client.get("/api/health?run=run").json()["log"] == []
    assert run.settings == {}
    assert run.metrics.num_rows == 0
    assert not run.trace.by_step


class TestAccess:
    @pytest.mark.parametrize("host", ["localhost:6780", "127.0.0.1:6780", "evil.example"])
    def test_other_users_of_the_machine_and_foreign_pages_are_refused(self, run: RunReader, host: str) -> None:
        client = TestClient(make_app([run], token="secret"), base_url=LOCAL, headers={"host": host})
        for path in ("/", "/api/runs", "/api/samples?run=recorded"):
            answer = client.get(path)
            assert answer.status_code == 401, path
            assert "recorded" not in answer.text

    def test_a_token_is_required_of_every_visitor(self, run: RunReader) -> None:
        client = TestClient(make_app([run], token="secret"), base_url="http://host.example:6780", follow_redirects=False)
        for path in ("/", "/api/runs", "/?token=wrong", "/?token="):
            assert client.get(path).status_code == 401, path
        assert client.get("/api/runs", headers={"authorization": "Bearer secret"}).status_code == 200
        assert client.get("/api/runs", headers={"authorization": "Bearer Secret"}).status_code == 401

    def test_the_token_leaves_the_address_and_stays_in_a_cookie(self, run: RunReader) -> None:
        client = TestClient(make_app([run], token="secret"), base_url="http://host.example:6780", follow_redirects=False)
        answer = client.get("/?token=secret&a=b")
        assert (answer.status_code, answer.headers["location"]) == (303, "/?a=b")
        assert "HttpOnly" in answer.headers["set-cookie"]
        assert "SameSite=strict" in answer.headers["set-cookie"]
        assert client.get("/").status_code == 200

    def test_the_redirect_stays_on_the_server(self, run: RunReader) -> None:
        client = TestClient(make_app([run], token="secret"), base_url=LOCAL, follow_redirects=False)
        assert client.get(f"{LOCAL}//evil.example/?token=secret").headers["location"] == "/evil.example/"

    def test_the_address_ends_with_the_token(self) -> None:
        assert address("0.0.0.0", 6780, "mine").endswith(":6780/?token=mine")
        assert address("::1", 6780, "a&b") == "http://[::1]:6780/?token=a%26b"


def test_the_page_may_only_connect_to_its_server(client: TestClient) -> None:
    text = client.get("/").text
    policy = text.partition('http-equiv="Content-Security-Policy" content="')[2].partition('"')[0]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
