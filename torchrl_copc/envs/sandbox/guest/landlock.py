"""File access, TCP and signals limited by Landlock, for hosts where no namespace can be made.

Source: https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
from collections.abc import Sequence

from .libc import call

_CREATE, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every machine
_PATH_BENEATH = 1
_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
OLDEST_ABI = 3  # Linux 6.2; before, a file that may only be read can still be truncated


def abi() -> int:
    """The kernel's Landlock version.

    Raises:
        OSError: if it has none, or one that cannot keep files whole.
    """
    try:
        version = call("syscall", _CREATE, None, 0, 1)
    except OSError as error:
        raise OSError(
            error.errno, "the kernel has no Landlock (CONFIG_SECURITY_LANDLOCK, lsm=landlock)"
        ) from error
    if version < OLDEST_ABI:
        raise OSError(
            errno.ENOSYS, f"the kernel's Landlock has version {version}; {OLDEST_ABI} (Linux 6.2) is needed"
        )
    return version


def confine(*, readable: Sequence[str], listable: Sequence[str], devices: Sequence[str]) -> None:
    """Restrict the running process for good. Needs ``PR_SET_NO_NEW_PRIVS``.

    Args:
        readable: files, and directories with all that is below them.
        listable: directories in which names may be listed, at any depth.
        devices: files that may be read and written.
    """
    version = abi()
    files = (1 << (16 if version >= 5 else 15)) - 1  # every right the version knows
    network = 0b11 if version >= 4 else 0
    scopes = 0b11 if version >= 6 else 0  # abstract sockets, signals
    attributes = struct.pack("QQQ", files, network, scopes)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = call("syscall", _CREATE, attributes, size, 0)
    try:
        for paths, rights in (
            (readable, _READ_FILE | _READ_DIR),
            (listable, _READ_DIR),
            (devices, _READ_FILE | _WRITE_FILE),
        ):
            for path in paths:
                _allow(ruleset, path, rights)
        call("syscall", _RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                rights &= ~_READ_DIR
            rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor))
            call("syscall", _ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
        finally:
            os.close(descriptor)
