"""Settings and results of the sandbox."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "error", "timeout", "memory", "output_limit", "killed"]

AUTO, WARM, BUBBLEWRAP, LANDLOCK, SUBPROCESS = "auto", "warm", "bubblewrap", "landlock", "subprocess"
ISOLATIONS = (WARM, BUBBLEWRAP, LANDLOCK, SUBPROCESS)  # best first

_MOST = {
    "workers": 1024,
    "memory_mb": 1 << 24,
    "max_output_bytes": 8 << 20,  # the server keeps memory for it
}
LONGEST_TIMEOUT = 86400.0


class SandboxError(RuntimeError):
    """The sandbox itself failed, not the code in it."""


class SandboxUnavailableError(SandboxError):
    """This host offers no isolation that is safe enough; the message says what is missing and what to do."""


def check_timeout(name: str, value: float) -> None:
    """Refuse a number of seconds that no call can be given.

    Raises:
        ValueError: naming it.
    """
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} is {value}; it must be a positive number of seconds")
    if value > LONGEST_TIMEOUT:
        raise ValueError(f"{name} is {value}; it must be at most {LONGEST_TIMEOUT:.0f} seconds, a day")


def _default_workers() -> int:
    return min(len(os.sched_getaffinity(0)), 16)


@dataclass(frozen=True)
class SandboxConfig:
    """Settings of a :class:`Sandbox`.

    Args:
        workers: calls that run at once; each keeps a server of about 70 MB. Defaults to the number of cores,
            at most 16.
        timeout: seconds a call may take, at most a day; waiting for a free worker does not count.
        memory_mb: memory a call may use, in MiB; each of its threads reserves 8.
        max_output_bytes: bytes of standard output and standard error together, after which a call is ended; at
            most 8 MiB.
        packages: what code can import besides the standard library.
        isolation: ``"auto"`` takes the first of ``"warm"``, ``"bubblewrap"`` and ``"landlock"`` that works on
            this host; naming one accepts no other.
        unsafe: allow ``"subprocess"``, which isolates nothing, where nothing else works.

    Raises:
        ValueError: naming the setting that is wrong.

    Example:
        >>> SandboxConfig(timeout=2.0).timeout
        2.0
    """

    workers: int = field(default_factory=_default_workers)
    timeout: float = 5.0
    memory_mb: int = 512
    max_output_bytes: int = 256 * 1024
    packages: tuple[str, ...] = ("numpy", "sympy", "mpmath")
    isolation: str = AUTO
    unsafe: bool = False

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"sandbox.{name} is {value}; it must be at least 1")
            if value > most:
                raise ValueError(f"sandbox.{name} is {value}; it must be at most {most}")
        check_timeout("sandbox.timeout", self.timeout)
        if self.isolation not in (AUTO, *ISOLATIONS):
            raise ValueError(
                f"sandbox.isolation is {self.isolation!r}; it must be one of {', '.join((AUTO, *ISOLATIONS))}"
            )
        if self.isolation == SUBPROCESS and not self.unsafe:
            raise ValueError(
                "sandbox.isolation='subprocess' isolates nothing: code can read and write your files, use the network "
                "and leave processes behind; set sandbox.unsafe=true if you accept that"
            )


@dataclass(frozen=True)
class SandboxResult:
    """What a call did.

    Args:
        status: ``"ok"``; ``"error"`` (an exception, or a non-zero exit); ``"timeout"``; ``"memory"`` (an uncaught
            ``MemoryError``); ``"output_limit"``; or ``"killed"`` (a signal, such as a crash of native code).
        stdout: standard output up to the end or the limit, invalid UTF-8 replaced.
        stderr: standard error, likewise.
        seconds: wall time of the code.
    """

    status: Status
    stdout: str
    stderr: str
    seconds: float
