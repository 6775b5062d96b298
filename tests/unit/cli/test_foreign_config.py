"""Configuration from somebody else: `fuligo plan` reads it and runs no code that it names."""

from pathlib import Path

import pytest
import yaml

from fuligo import cli

EXAMPLE = Path(__file__).parents[3] / "examples" / "qwen3-4b" / "config.yaml"


@pytest.mark.parametrize("output", [[], ["--json", "plan.json"], ["--html", "plan.html"]], ids=["text", "json", "html"])
def test_plan_executes_neither_hooks_nor_the_interpreter(
    output: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    mark, hook, interpreter = tmp_path / "executed", tmp_path / "hook.py", tmp_path / "python"
    hook.write_text(f"open({str(mark)!r}, 'a').write('hook')\nasync def reward(args, sample):\n    return 1.0\n")
    interpreter.write_text(f"#!/bin/sh\necho interpreter >> {mark}\n")
    interpreter.chmod(0o755)
    config = yaml.safe_load(EXAMPLE.read_text())
    config["reward"] = {"custom_rm_path": f"{hook}:reward"}
    config["engine"] = {**config.get("engine", {}), "engine_python": str(interpreter)}
    config["model"] |= {"model_config_file": str(EXAMPLE.parent / "model" / "config.json")}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    cli.main(["plan", "--config", "run.yaml", *output])
    assert "qwen3-4b" in capsys.readouterr().out.lower() or (output and (tmp_path / output[1]).exists()), "it was planned"
    assert not mark.exists()
