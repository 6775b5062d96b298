"""Tail of a growing file: every complete line is read once, however its bytes arrive."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuligo.observability.viewer import tail as tail_module
from fuligo.observability.viewer.tail import DAMAGED, Tail


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=12).filter(lambda line: b"\n" not in line), max_size=12), st.data())
def test_lines_do_not_depend_on_how_the_file_grew(tmp_path_factory, lines: list[bytes], data) -> None:
    path: Path = tmp_path_factory.mktemp("tail") / "file"
    whole = b"".join(line + b"\n" for line in lines)
    tail, read, at = Tail(path), [], 0
    while at < len(whole):
        step = data.draw(st.integers(1, len(whole) - at))
        with path.open("ab") as file:
            file.write(whole[at : at + step])
        at += step
        max_bytes = data.draw(st.integers(13, 32))
        while new := tail.read(max_bytes):
            read += new
    assert read == lines
    assert tail.generation == 0


def test_a_cut_off_last_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\ntw")
    tail = Tail(path)
    assert tail.read() == [b"one"]
    assert tail.read() == []
    path.write_bytes(b"one\ntwo\n")
    assert tail.read() == [b"two"]


def test_a_file_that_was_cut_back_and_grew_again_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\ntwo\nthree\n")
    tail = Tail(path)
    tail.read()
    path.write_bytes(b"one\nTWO\nTHREE\nFOUR\n")
    assert tail.read() == [b"one", b"TWO", b"THREE", b"FOUR"]
    assert tail.generation == 1


def test_a_line_longer_than_a_chunk_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\n" + b"x" * 100)
    tail = Tail(path)
    assert tail.read(8) == [b"one"]
    for _ in range(20):
        assert set(tail.read(8)) <= {b""}
    with path.open("ab") as file:
        file.write(b"xxx\ntwo\n")
    rest = tail.read(8) + tail.read(8)
    assert [line for line in rest if line] == [DAMAGED, b"two"]
    assert tail.generation == 0


def test_no_file_has_no_lines(tmp_path: Path) -> None:
    assert Tail(tmp_path / "missing").read() == []


def test_a_file_is_not_read_beyond_a_line_of_absurd_length_until_it_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_module, "MAX_LINE_BYTES", 16)
    path = tmp_path / "file"
    path.write_bytes(b"one\n" + b"x" * 100 + b"\ntwo\n")
    tail = Tail(path)
    assert [tail.read(8) for _ in range(20)] == [[b"one"], [b""], [b""], *[[]] * 17]
    path.write_bytes(b"three\n")
    assert tail.read(8) == [b"three"]
    assert tail.generation == 1
