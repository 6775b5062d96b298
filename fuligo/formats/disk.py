"""Durable writes, locks, manifests of files, safe opening of files, and errors about full file systems."""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from fuligo.errors import CheckpointError, FuligoError

_NOT_FOR_SPACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
"""Errors of a path that cannot be written, however much space is free."""


def free_space(path: Path) -> str:
    """Describe the free space of the file system of `path`: `0 of 500 MiB are free on the file system /scratch`."""
    place = path.resolve()
    place = next(parent for parent in (place, *place.parents) if parent.exists())
    usage = shutil.disk_usage(place)
    mount = next(parent for parent in (place, *place.parents) if os.path.ismount(parent))
    return f"{usage.free // 1024**2} of {usage.total // 1024**2} MiB are free on the file system {mount}"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an OSError inside the block to a FuligoError that names `path`, the free space and a fix."""
    try:
        yield
    except OSError as error:
        advice = "make the path writable" if error.errno in _NOT_FOR_SPACE else "free some space"
        raise FuligoError(
            f"cannot write {path}: {_cause(error)} ({free_space(path)}); earlier records are intact; {advice}, then resume"
        ) from error


def _cause(error: OSError) -> object:
    """Return the reason for an error; for `shutil.copytree`, which collects several errors, that of the first."""
    if isinstance(error, shutil.Error):
        _, _, why = error.args[0][0]
        return why
    return error.strerror or error


def sync_tree(directory: Path) -> None:
    """Flush `directory` and all files and directories below it to disk."""
    for path in directory.rglob("*"):
        sync(path)
    sync(directory)


def sync(path: Path) -> None:
    """Flush a file's content or a directory's entries to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_text(path: Path, text: str) -> None:
    """Replace the content of a small file atomically."""
    unfinished = path.with_name(f".tmp_{path.name}")
    unfinished.write_text(text)
    sync(unfinished)
    unfinished.replace(path)
    sync(path.parent)


@contextmanager
def default_mode(file: Path) -> Iterator[None]:
    """Give a file that the block replaces the mode that the umask allows. safetensors lets only the owner read its files."""
    file.touch()
    mode = stat.S_IMODE(file.stat().st_mode)
    yield
    file.chmod(mode)


def is_foreign_link(path: Path) -> bool:
    """Return whether a path is a link that belongs to neither this user nor root."""
    status = path.lstat()
    return stat.S_ISLNK(status.st_mode) and status.st_uid not in (os.geteuid(), 0)


def try_lock(file: Path) -> int | None:
    """Lock a file, created if needed, until the returned descriptor is closed or this process ends; None: another process has the lock."""
    fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)  # NFS locks only files that are open for writing
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


MANIFEST = "manifest.json"
_FIX = "resume from another checkpoint with --ckpt-step"
CHECKSUM_MAX_BYTES = 16 * 1024**2
"""Largest file whose content is checked; of larger files only the size is checked, because reading them twice would double a resume's
time."""


def write_manifest(directory: Path) -> None:
    """Write the manifest of all files below `directory`."""
    files = {str(file.relative_to(directory)): _describe(file) for file in files_below(directory)}
    (directory / MANIFEST).write_bytes(orjson.dumps({"files": files}, option=orjson.OPT_INDENT_2))


def check_manifest(directory: Path) -> None:
    """Compare the files below `directory` with its manifest; files that it does not list are ignored.

    Raises CheckpointError if the manifest is missing or damaged, or a file is missing or changed; it names the first such file.
    """
    path = directory / MANIFEST
    try:
        files = orjson.loads(path.read_bytes())["files"]
    except FileNotFoundError:
        raise CheckpointError(f"cannot load {directory}: it has no {MANIFEST}, so it is not a complete fuligo checkpoint; {_FIX}") from None
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise CheckpointError(f"cannot read {path}: the checkpoint is damaged; {_FIX}") from None
    for name, listed in files.items():
        file = directory / name
        if not file.is_file():
            raise CheckpointError(f"cannot load {directory}: {file} is missing; {_FIX}")
        size = file.stat().st_size
        if size != listed["bytes"]:
            raise CheckpointError(f"cannot load {directory}: {file} has {size} bytes, expected {listed['bytes']}; {_FIX}")
        if _describe(file) != listed:
            raise CheckpointError(f"cannot load {directory}: {file} does not match its checksum; {_FIX}")


def files_below(directory: Path) -> list[Path]:
    """Return all files below `directory` except the manifest, sorted."""
    return sorted(file for file in directory.rglob("*") if file.is_file() and file != directory / MANIFEST)


def _describe(file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    checksum = hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest() if size <= CHECKSUM_MAX_BYTES else None
    return {"bytes": size, "blake2b": checksum}


MAX_TEXT_BYTES = 256 * 2**20
"""Largest accepted size of a text file of a model or its tokenizer; the largest known one has 33 MiB."""
_TEXTS = re.compile(
    r"(generation_|adapter_|.*processor_)?config\.json|(tokenizer|vocab|merges|chat_template|special_tokens|added_tokens).*|.*\.index\.json"
)
"""Names of the files that transformers and tokenizers read whole into memory."""
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def open_plain(file: Path) -> BinaryIO:
    """Open a regular file for reading. Raises OSError if it is something else; a pipe is refused without waiting for its writer."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except BlockingIOError:  # a regular file with a lease, or on tape
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
    """Read a regular UTF-8 file.

    Raises OSError if it is not a regular file or exceeds `MAX_TEXT_BYTES`, and UnicodeDecodeError if it is not UTF-8.
    """
    with open_plain(file) as stream:
        content = stream.read(MAX_TEXT_BYTES + 1)
    if len(content) > MAX_TEXT_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MAX_TEXT_BYTES:,} bytes", str(file))
    return content.decode()


def unreadable_files(directory: Path, max_text_bytes: float = MAX_TEXT_BYTES) -> Iterator[str]:
    """Yield a message for each entry that would block libraries that read the directory, or exhaust memory: pipes, devices, huge texts."""
    with os.scandir(directory) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            try:
                status = entry.stat()
            except OSError:  # a broken link
                continue
            if (kind := _KINDS.get(stat.S_IFMT(status.st_mode))) is not None:
                yield f"{entry.path} is {kind}, not a plain file; remove it"
            elif _TEXTS.fullmatch(entry.name) and stat.S_ISREG(status.st_mode) and status.st_size > max_text_bytes:
                yield f"{entry.path} has {status.st_size:,} bytes, more than {max_text_bytes:,}; copy or download it again"
