"""The system-call filter: what is not listed is refused.

A classic BPF program (``man 2 seccomp``), assembled here so that no library has to be there. It is a list of what
is allowed; everything else fails with EPERM, so hostile code sees an ``OSError`` and honest code a readable one.
Refused are among others: new processes, every socket, namespaces, mounts, tracing, shared memory that outlives a
process, file locks, ``memfd``, ``io_uring``, keys, and signals to anybody else.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import struct
from collections.abc import Iterable, Iterator, Sequence

from .libc import PR_SET_SECCOMP, SECCOMP_MODE_FILTER, prctl
from .syscalls import ALLOWED, CHECKED, FILE_METADATA, MACHINES, NEWEST

_AUDIT_ARCH = (0xC000003E, 0xC00000B7)
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _RETURN = 0x20, 0x06  # BPF_LD|BPF_W|BPF_ABS, BPF_RET|BPF_K
_IF_EQUAL, _IF_GREATER, _IF_BITS = 0x15, 0x25, 0x45  # BPF_JMP | BPF_JEQ, BPF_JGT, BPF_JSET, each |BPF_K
_NUMBER, _ARCH = 0, 4  # offsets in struct seccomp_data
_CLONE_THREAD = 0x10000
# Duplicates and flags of a descriptor, and a pipe's size. Not: locks and leases, which other processes with the same
# file would feel; F_SETOWN, F_SETSIG and F_SETOWN_EX, with which the kernel sends signals to others for us.
_FCNTL = (
    0,
    1,
    2,
    3,
    4,
    1030,
    1032,
)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_GETPIPE_SZ

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, value


def program(*, shared_files: bool, pid: int) -> bytes:
    """The filter as ``struct sock_filter[]``.

    Args:
        shared_files: the code sees the host's own files (Landlock, no mount namespace). Then calls that Landlock
            does not restrict are refused too, and threads, which could not be limited.
        pid: the process that may get signals.

    Raises:
        OSError: on a machine whose call numbers are not known.
    """
    machine = platform.machine()
    if machine not in MACHINES:
        raise OSError(
            errno.ENOSYS, f"the system-call filter knows {', '.join(MACHINES)}; this machine is {machine}"
        )
    place = MACHINES[machine]
    return _pack(_about_processes(place, pid)) + _about_everything_else(place, shared_files)


def load(filter_program: bytes) -> None:
    """Apply a filter to this thread, all it starts, and for good. Needs ``PR_SET_NO_NEW_PRIVS``."""
    buffer = ctypes.create_string_buffer(filter_program, len(filter_program))
    # struct sock_fprog, native alignment: an unsigned short, then a pointer.
    header = struct.pack("HP", len(filter_program) // 8, ctypes.addressof(buffer))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.create_string_buffer(header, len(header)))


def _about_processes(place: int, pid: int) -> Iterator[Instruction]:
    yield _LOAD, 0, 0, _ARCH
    yield _IF_EQUAL, 1, 0, _AUDIT_ARCH[place]
    yield _RETURN, 0, 0, _KILL  # a 32-bit call: its numbers mean something else
    for name in ("kill", "tgkill"):
        yield from _checked(CHECKED[name][place], 0, _IF_EQUAL, (pid,))


@functools.cache
def _about_everything_else(place: int, shared_files: bool) -> bytes:
    numbers = {name: pair[place] for name, pair in CHECKED.items()}
    steps = [
        (_LOAD, 0, 0, _NUMBER),
        (_IF_GREATER, 0, 1, NEWEST),  # x86's x32 numbers are above it, too
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        # The C library falls back to clone, whose flags a filter can read.
        (_IF_EQUAL, 0, 1, numbers["clone3"]),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        *_checked(numbers["prlimit64"], 0, _IF_EQUAL, (0,)),  # the caller's own limits
        *_checked(numbers["fcntl"], 1, _IF_EQUAL, _FCNTL),
    ]
    if not shared_files:
        steps += _checked(numbers["clone"], 0, _IF_BITS, (_CLONE_THREAD,))
    for pair in (ALLOWED if shared_files else ALLOWED | FILE_METADATA).values():
        if (number := pair[place]) is not None:
            steps += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    return _pack([*steps, (_RETURN, 0, 0, _ERRNO | errno.EPERM)])


def _checked(number: int, argument: int, test: int, values: Sequence[int]) -> Iterator[Instruction]:
    """Allow a call if the low half of an argument passes the test with any of the values; refuse it otherwise."""
    yield _LOAD, 0, 0, _NUMBER
    yield _IF_EQUAL, 0, 2 + 2 * len(values), number
    yield _LOAD, 0, 0, 16 + 8 * argument
    for value in values:
        yield test, 0, 1, value
        yield _RETURN, 0, 0, _ALLOW
    yield _RETURN, 0, 0, _ERRNO | errno.EPERM


def _pack(steps: Iterable[Instruction]) -> bytes:
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def confine(*, shared_files: bool) -> None:
    """Apply the filter to the running process."""
    load(program(shared_files=shared_files, pid=os.getpid()))
