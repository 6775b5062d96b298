from pathlib import Path

import pytest

from fuligo import cli
from fuligo.cli import chosen
from fuligo.environments.tools.python import PythonSettings
from fuligo.errors import ConfigError
from fuligo.machine import findings
from fuligo.machine.nvidia import Gpu

ASSETS = Path(cli.__file__).parents[1] / "quickstart" / "assets"
RUN = [
    "--hf-checkpoint",
    str(ASSETS / "model"),
    "--prompt-data",
    str(ASSETS / "train.jsonl"),
    "--input-key",
    "prompt",
    "--num-rollout",
    "1",
]
RUN += ["--rollout-max-response-len", "64", "--custom-rm-path", f"{__file__}:reward"]


def reward(args: object, sample: object) -> float:
    return 0.0


def test_a_run_that_works_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *RUN]) == 0
    shown = capsys.readouterr().out
    assert "Requirements of the run" in shown and "!!" not in shown


def test_what_a_run_lacks_ends_with_code_1_and_its_fix(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *RUN, "--rollout-num-gpus", "1", "--engine-python", "/no/such/python"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "/no/such/python -m pip install sglang==0.5.15.post1" in shown


def test_a_temporary_directory_that_cannot_be_used_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    assert cli.main(["doctor"]) == 1
    assert "No such file or directory; create it, free space there" in " ".join(capsys.readouterr().out.split())


def test_arguments_that_train_refuses_end_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *RUN, "--rollout-batch-size", "0"]) == 2
    assert "--rollout-batch-size" in capsys.readouterr().err
    assert cli.main(["doctor", "--help"]) == 0


def test_what_train_chooses_for_the_gpus_of_this_machine_is_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer and SGLang share a single GPU without --colocate; then only what is missing here is named."""
    device = Gpu(0, "NVIDIA H100 80GB HBM3", 80 * 2**30, "580.0")
    monkeypatch.setattr(chosen, "find_devices", lambda config: (device,))
    assert cli.main(["doctor", *RUN, "--sglang-attention-backend", "triton", "--engine-python", "/no/such/python"]) == 1
    assert "/no/such/python -m pip install sglang==0.5.15.post1" in " ".join(capsys.readouterr().out.split())


def test_a_machine_without_a_sandbox_gets_the_fix_and_may_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def none(settings: PythonSettings) -> None:
        raise ConfigError("cannot run Python in a sandbox: no namespaces. Use another machine")

    monkeypatch.setattr(findings, "check_sandbox", none)
    assert cli.main(["doctor"]) == 0
    assert "sandbox none: cannot run Python in a sandbox: no namespaces." in " ".join(capsys.readouterr().out.split())
