"""adapter_config.json of others: what fuligo cannot apply as written is refused, not guessed."""

import json
import os
from pathlib import Path

import pytest

from fuligo.errors import CheckpointError
from fuligo.formats.adapter_config import ADAPTER, ADAPTER_CONFIG, ADAPTER_WEIGHTS, AdapterConfig

PLAIN = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["v_proj", "q_proj"]}


def read(directory: Path, text: str) -> AdapterConfig:
    (directory / ADAPTER_CONFIG).write_text(text)
    return AdapterConfig.read(directory)


def test_a_plain_adapter_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, json.dumps(PLAIN)) == AdapterConfig(8, 16.0, ("q_proj", "v_proj"))
    assert read(tmp_path, json.dumps({**PLAIN, "target_modules": "all-linear", "use_rslora": True})) == AdapterConfig(8, 16.0, (), True)


@pytest.mark.parametrize("text", ["[]", "null", "3", "", "[" * 100_000, "{}"])
def test_other_json_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(CheckpointError, match="use a directory that PEFT or fuligo saved"):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("r", value) for value in (0, -1, None, True, 2.5, [1], float("inf"), 10**30)),
        *(("lora_alpha", value) for value in (None, float("nan"), "16", 10**400, -1e300)),
        *(("target_modules", value) for value in ([], [3], ["q_proj", 3], "q_proj|v_proj")),
        *(("lora_dropout", value) for value in (-1, [0.5], 1.5)),
        ("use_dora", True),
        ("rank_pattern", {"q_proj": 4}),
        ("use_bdlora", {"nblocks": 2}),
        ("init_lora_weights", "pissa"),
    ],
)
def test_a_value_that_cannot_be_applied_is_named(tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=name):
        read(tmp_path, json.dumps({**PLAIN, name: value}))


def test_a_directory_of_checkpoints_is_refused_with_the_name_of_one(tmp_path: Path) -> None:
    for step in (1, 2):
        adapter = tmp_path / f"iter_{step:07d}" / ADAPTER
        adapter.mkdir(parents=True)
        (adapter / ADAPTER_CONFIG).write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds checkpoints; use one of them, such as .*/iter_0000002$"):
        AdapterConfig.read(tmp_path)


@pytest.mark.parametrize("name", [ADAPTER_CONFIG, ADAPTER_WEIGHTS])
@pytest.mark.parametrize("kind", ["pipe", "device", "endless"])
def test_a_file_that_would_hold_up_its_reader_is_refused(tmp_path: Path, kind: str, name: str) -> None:
    if (name, kind) == (ADAPTER_WEIGHTS, "endless"):
        pytest.skip("its header says how much is read")
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(PLAIN))
    file = tmp_path / name
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        file.touch()
        os.truncate(file, 2**40)
    with pytest.raises(CheckpointError, match=f"{file} .*(not a plain file|more than)"):
        AdapterConfig.read(tmp_path)
