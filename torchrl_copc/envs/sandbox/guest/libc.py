"""System calls that Python has no function for."""

from __future__ import annotations

import ctypes
import os

_LIBC = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS = 0x20000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522


def call(name: str, *arguments: object) -> int:
    """A function of the C library; integers are passed as ``unsigned long``.

    Raises:
        OSError: if it returns a negative number.
    """
    converted = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in arguments]
    result: int = getattr(_LIBC, name)(*converted)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def prctl(option: int, *arguments: object) -> None:
    """``prctl`` with its unused arguments zero, as the kernel demands."""
    call("prctl", option, *arguments, *(0,) * (4 - len(arguments)))


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Mount a file system, or with ``MS_BIND`` a file or directory."""
    call("mount", source.encode(), target.encode(), kind.encode(), flags, data.encode())


def drop_capabilities() -> None:
    """Give up every capability for good (``PR_SET_NO_NEW_PRIVS`` keeps them from coming back)."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def as_nobody() -> None:
    """Change to the user and group ``nobody``, without supplementary groups. Only root can."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


NOBODY = 65534
