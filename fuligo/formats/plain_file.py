"""Files that another user may have written: pipes and devices are not opened, and no more than a limit is read."""

import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

MAX_TEXT_BYTES = 256 * 2**20
"""Most that a JSON file of a model or of its tokenizer may have; the largest that is known has 33 MiB."""
_TEXTS = re.compile(
    r"(generation_|adapter_|.*processor_)?config\.json|(tokenizer|vocab|merges|chat_template|special_tokens|added_tokens).*|.*\.index\.json"
)
"""Names of the files that libraries read whole."""
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def open_plain(file: Path) -> BinaryIO:
    """Open a file to read; a pipe, whose opening would wait for its writer, or a device raises.

    Raises OSError if it cannot be opened, or is not a plain file.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except BlockingIOError:  # a plain file with a lease, or on tape
        if not stat.S_ISREG(file.stat().st_mode):
            raise
        return file.open("rb")
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind == stat.S_IFREG:
        os.set_blocking(descriptor, True)  # storage with tapes would otherwise return nothing for a file that it has to fetch
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'a directory')}, not a plain file; copy its content to one", str(file))


def read_plain_text(file: Path) -> str:
    """Return the text of a plain file in UTF-8.

    Raises OSError if it cannot be read, is not a plain file, or has more than `MAX_TEXT_BYTES`, and UnicodeDecodeError if it is not UTF-8.
    """
    with open_plain(file) as stream:
        content = stream.read(MAX_TEXT_BYTES + 1)
    if len(content) > MAX_TEXT_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MAX_TEXT_BYTES:,} bytes", str(file))
    return content.decode()


def unreadable_files(directory: Path, max_text_bytes: float = MAX_TEXT_BYTES) -> Iterator[str]:
    """Describe what would block a library that reads the files of a directory, or fill its memory: pipes, devices, endless texts."""
    with os.scandir(directory) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            try:
                status = entry.stat()
            except OSError:  # a link to nothing
                continue
            kind = _KINDS.get(stat.S_IFMT(status.st_mode))
            if kind is not None:
                yield f"{entry.path} is {kind}, not a plain file; remove it"
            elif _TEXTS.fullmatch(entry.name) and stat.S_ISREG(status.st_mode) and status.st_size > max_text_bytes:
                yield f"{entry.path} has {status.st_size:,} bytes, more than {max_text_bytes:,}; copy or download it again"
