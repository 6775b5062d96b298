"""Secrets: they reach what uses them and nothing that is written or printed."""

import copy
import json
import pickle
from pathlib import Path

import pytest

from fuligo.cli import main
from fuligo.cli.preflight import preflight_problems
from fuligo.config.command_line import parse
from fuligo.config.files import save_yaml
from fuligo.config.passthrough import command_line
from fuligo.config.secret import Environment, Secret, hide_credentials, protect, reveal
from fuligo.errors import ConfigError
from tests.config_files import load_yaml

KEY = "canary-7f3a"
GIVEN = {
    "--env": json.dumps({"MY_SETTING": f"{KEY}-1", "NCCL_DEBUG": "INFO", "SGLANG_API_KEY": f"{KEY}-2"}),
    "--engine-env": json.dumps({"HF_TOKEN": f"{KEY}-3", "HTTPS_PROXY": f"http://me:{KEY}-4@proxy:80"}),
    "--sglang-api-key": f"{KEY}-5",
    "--sglang-ssl-keyfile-password": f"{KEY}-6",
    "--router-api-key": f"{KEY}-7",
    "--router-control-plane-api-keys": f"{KEY}-8",
    "--router-redis-url": f"redis://me:{KEY}-9@host:6379",
    "--router-otlp-traces-endpoint": f"http://me:{KEY}-10@host:4317",
    "--rm-url": f"https://host/judge?api_key={KEY}-11",
    "--opd-teacher-url": f"http://me:{KEY}-12@host:1",
}
WORDS = [word for option, value in GIVEN.items() for word in (option, value)]
TOPOLOGY = {"server_groups": [{"num_gpus": 8, "overrides": {"api_key": f"{KEY}-13"}}]}


def test_no_form_of_a_config_shows_a_secret_and_its_users_get_it(tmp_path: Path) -> None:
    config = parse(WORDS).config
    config = type(config).model_validate({**config.model_dump(), "engine": {**config.engine.model_dump(), "sglang_config": [TOPOLOGY]}})
    save_yaml(config, tmp_path / "config.yaml")
    written = (tmp_path / "config.yaml").read_text()
    for text in (written, repr(config), str(config), json.dumps(config.model_dump(mode="json")), repr(config.model_dump())):
        assert KEY not in text
    assert "api_key: ${SGLANG_API_KEY}" in written and "NCCL_DEBUG: INFO" in written

    for copied in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config), type(config).model_validate(config.model_dump())):
        assert copied == config
        assert copied.cluster.env.reveal()["MY_SETTING"] == f"{KEY}-1"
        assert reveal(copied.sglang.get("api_key")) == f"{KEY}-5"
        assert [reveal(key) for key in copied.router.get("control_plane_api_keys")] == [f"{KEY}-8"]
        assert command_line("router", copied.router)[-2:] == ["--control-plane-api-keys", f"{KEY}-8"]
        assert reveal(copied.reward.rm_url) == f"https://host/judge?api_key={KEY}-11"


def test_a_resume_takes_the_secrets_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse(["--env", '{"MY_SETTING": "one"}', "--sglang-api-key", KEY]).config
    save_yaml(config, tmp_path / "config.yaml")
    missing = load_yaml(tmp_path / "config.yaml")
    problems = [problem for problem in preflight_problems(missing) if "environment variable" in problem]
    assert problems == [
        "--env: ${MY_SETTING} refers to the environment variable MY_SETTING, which is not set; export it",
        "--sglang-api-key: ${SGLANG_API_KEY} refers to the environment variable SGLANG_API_KEY, which is not set; export it",
    ]
    with pytest.raises(ConfigError, match=r"cannot read \$\{MY_SETTING\}: the environment variable MY_SETTING is not set"):
        missing.cluster.env.reveal()
    monkeypatch.setenv("MY_SETTING", "one")
    monkeypatch.setenv("SGLANG_API_KEY", KEY)
    assert load_yaml(tmp_path / "config.yaml") == config


def test_names_and_references_read_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    config = parse(["--env", "WANDB_API_KEY", "--env", '{"OTHER": "${WANDB_API_KEY}"}', "--router-api-key", "${WANDB_API_KEY}"]).config
    assert config.cluster.env.reveal() == {"WANDB_API_KEY": KEY, "OTHER": KEY}
    assert config.router.get("api_key") == Secret("WANDB_API_KEY", KEY)


@pytest.mark.parametrize(
    "words",
    [
        ["--sglang-api-key", KEY, "second"],
        ["--sglang-api-key", KEY, "--sglang-api-key", "other"],
        [f"--sglang-api-key={KEY}", f"{KEY}-more"],
        ["--env", f'{{"A": "{KEY}"'],
        ["--env", f'{{"A": ["{KEY}"]}}'],
        ["--env", f'["{KEY}"]'],
        ["--env", f'{{"bad name": "{KEY}"}}'],
        ["--rollout-external-engine-addrs", f"me:{KEY}@host:1"],
        ["--opd-teacher-url", f"http://me:{KEY}@host:1", "--use-opd"],
        ["--rm-url", f"ftp://me:{KEY}@host", "--rm-type", "remote_rm"],
        ["--prompt-data", f"https://me:{KEY}@host/data.jsonl"],
        ["--wandb-key", KEY],
    ],
)
def test_errors_and_warnings_show_no_secret(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *words]) == 2
    printed = "".join(capfd.readouterr())
    assert "error" in printed
    assert KEY not in printed


@pytest.mark.parametrize(
    "text", [f"sglang:\n  api_key: {KEY}\n  dp_size: {{\n", f"cluster:\n  env: {{A: [{KEY}]}}\n", f"cluster: {{env: {KEY}"]
)
def test_errors_in_files_show_no_secret(text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(text)
    assert main(["train", "--config", str(tmp_path / "run.yaml")]) == 2
    assert KEY not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("name", "value", "is_shown"),
    [
        ("NCCL_DEBUG", "INFO", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", True),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", True),
        ("FI_PROVIDER", "efa", True),
        ("INDEXER_ROPE_NEOX_STYLE", "0", True),
        ("SGLANG_API_KEY", "x", False),
        ("RAY_AUTH_TOKEN", "x", False),
        ("ANYTHING", "x", False),
        ("NCCL_ODD", "http://me:x@host", False),
    ],
)
def test_only_settings_of_libraries_are_shown(name: str, value: str, is_shown: bool) -> None:
    environment = Environment({name: value})
    assert environment.reveal() == {name: value}
    assert environment.settings() == ({name: value} if is_shown else {})
    assert list(environment.secrets()) == ([] if is_shown else [name])


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("http://host:80/a?b=c", "http://host:80/a?b=c"),
        ("see http://me:pw@host/a, ftp://token@b", "see http://***@host/a, ftp://***@b"),
        ("https://h/?x=1&access_token=abc#f", "https://h/?x=1&access_token=***#f"),
        ('{"url": "http://host", "mail": "me@host"}', '{"url": "http://host", "mail": "me@host"}'),
    ],
)
def test_credentials_in_urls_are_hidden(text: str, hidden: str) -> None:
    assert hide_credentials(text) == hidden
    assert isinstance(protect(text, "X"), Secret) == (text != hidden)
