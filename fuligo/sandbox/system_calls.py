"""System calls that Python does not offer, and a filter for the system calls of sandboxed programs."""

import ctypes
import errno
import os
import platform
import struct
from contextlib import suppress
from typing import Any

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 36, 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522
_NUM_CAPABILITIES = 64

_DENIED = {
    # other processes, kernel objects that no namespace holds, and large attack surfaces
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272), "pidfd_getfd": (438, 438),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "syslog": (103, 116), "perf_event_open": (298, 241),
    "bpf": (321, 280), "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    # mounts and namespaces
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442),
    # execution: the sandbox shows libraries with their permissions, among them the executable dynamic loader
    "execve": (59, 221), "execveat": (322, 281),
    # memory that counts toward the limit of neither a process nor a file system
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186), "mq_open": (240, 180),
}  # fmt: skip
"""System calls that fail with EPERM, with their numbers on x86_64 and aarch64."""
_SOCKET = (41, 198)
_FAMILIES = (1, 2, 10)
"""Allowed socket families AF_UNIX, AF_INET and AF_INET6, which the network namespace isolates. AF_VSOCK could reach a VM's host."""
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Index into the numbers of `_DENIED` and `_SOCKET`, and value of AUDIT_ARCH, by machine."""
_X32_BIT = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL, _DENY = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM

_libc = ctypes.CDLL(None, use_errno=True)


class UnavailableError(Exception):
    """Raised if the kernel does not let this process build a sandbox."""


def call(name: str, *arguments: Any) -> None:
    """Call a function of the C library. Raises OSError if it returned -1."""
    if getattr(_libc, name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def prctl(option: int, value: int) -> None:
    """Change an attribute of this process."""
    call("prctl", option, ctypes.c_ulong(value), 0, 0, 0)


def forbid_capabilities() -> None:
    """Make sure that executing a file later cannot give this process capabilities."""
    for capability in range(_NUM_CAPABILITIES):
        with suppress(OSError):  # the kernel knows fewer
            prctl(PR_CAPBSET_DROP, capability)
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities() -> None:
    """Drop all capabilities of this process."""
    header, data = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    call("capset", header, data)


def filter_system_calls() -> None:
    """Make the system calls in `_DENIED`, and sockets of families outside `_FAMILIES`, fail in this process and its children.

    Call `forbid_capabilities` first: the kernel accepts filters only from processes that cannot gain privileges. Raises UnavailableError
    for a machine that is not in `_ARCHITECTURES`, or a kernel without seccomp.
    """
    if platform.machine() not in _ARCHITECTURES:
        raise UnavailableError(f"system calls of {platform.machine()} cannot be filtered; use x86_64 or aarch64")
    index, architecture = _ARCHITECTURES[platform.machine()]
    code = _filter(sorted(numbers[index] for numbers in _DENIED.values()), _SOCKET[index], architecture)
    instructions = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(instructions))
    try:
        call("prctl", PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), program, 0, 0)
    except OSError as error:
        raise UnavailableError(f"the kernel does not filter system calls ({error.strerror})") from None


def _filter(denied: list[int], socket: int, architecture: int) -> bytes:
    """Return the BPF instructions of the filter."""
    tests = [(_AT_LEAST, _X32_BIT), *((_EQUAL, number) for number in denied)]  # x32 has other numbers for the same calls
    families = [
        (_LOAD, 0, 0, 16),
        *((_EQUAL, len(_FAMILIES) - place, 0, family) for place, family in enumerate(_FAMILIES)),
        (_RETURN, 0, 0, _DENY),
    ]
    # Jumps are relative: a denied number goes to the `deny` at the end, behind the remaining tests, the test of sockets and `allow`.
    checks = [(kind, len(tests) - place + 1, 0, value) for place, (kind, value) in enumerate(tests)]
    instructions = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        *checks,
        (_EQUAL, 2, 0, socket),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _DENY),
        *families,
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)
