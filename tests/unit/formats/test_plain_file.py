"""Files of others: nobody is kept waiting by a pipe, and nothing endless is read."""

import os
from pathlib import Path

import pytest

from fuligo.formats.disk import MAX_TEXT_BYTES, open_plain, read_plain_text, unreadable_files


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """Make a directory with everything that is not a plain file, and links to it."""
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "device.json").symlink_to("/dev/zero")
    (tmp_path / "directory.json").mkdir()
    (tmp_path / "link.json").symlink_to("pipe.json")
    (tmp_path / "nothing.json").symlink_to("gone")
    (tmp_path / "good.json").write_text("{}")
    (tmp_path / "weights.safetensors").touch()
    os.truncate(tmp_path / "weights.safetensors", MAX_TEXT_BYTES + 1)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "reason"),
    [("pipe", "a pipe"), ("device", "a device"), ("directory", "a directory"), ("link", "a pipe"), ("nothing", "No such")],
)
def test_what_is_no_plain_file_is_refused_at_once(odd: Path, name: str, reason: str) -> None:
    for read in (open_plain, read_plain_text):
        with pytest.raises(OSError, match=reason):
            read(odd / f"{name}.json")


def test_a_plain_file_is_read(odd: Path) -> None:
    assert read_plain_text(odd / "good.json") == "{}"


def test_an_endless_text_is_refused(tmp_path: Path) -> None:
    file, foreign = tmp_path / "tokenizer.json", tmp_path / "eval_results.json"
    foreign.touch()
    os.truncate(foreign, 2**40)
    file.touch()
    os.truncate(file, 2**40)
    with pytest.raises(OSError, match="more than 268,435,456 bytes"):
        read_plain_text(file)
    assert list(unreadable_files(tmp_path)) == [f"{file} has 1,099,511,627,776 bytes, more than 268,435,456; copy or download it again"]


def test_a_plain_file_is_read_as_a_blocking_one(odd: Path) -> None:
    """On storage that fetches files from tape, a non-blocking read returns nothing."""
    with open_plain(odd / "good.json") as stream:
        assert os.get_blocking(stream.fileno())


def test_a_directory_names_what_would_hold_up_its_reader(odd: Path) -> None:
    found = list(unreadable_files(odd))
    assert [text.partition(", not a plain file")[0] for text in found] == [
        f"{odd}/device.json is a device",
        f"{odd}/link.json is a pipe",
        f"{odd}/pipe.json is a pipe",
    ]
