"""What the sandbox's tests share: which isolations this host has, and what a sandbox must not leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from torchrl_copc.envs.sandbox import Sandbox, SandboxConfig, SandboxError, SandboxResult
from torchrl_copc.envs.sandbox.guest import landlock
from torchrl_copc.envs.sandbox.guest.libc import prctl
from torchrl_copc.envs.sandbox.launch import find_bubblewrap

WITH_PACKAGES = {"packages": SandboxConfig().packages}
PR_SET_CHILD_SUBREAPER = 36
BUBBLEWRAP, LANDLOCK = ("warm", "bubblewrap"), "landlock"


def missing(isolation: str) -> str:
    """Why this host cannot offer an isolation, found out without the sandbox; empty if it can."""
    if isolation == LANDLOCK:
        try:
            landlock.abi()
        except OSError as error:
            return str(error)
        return ""
    try:
        program = find_bubblewrap()[0]
    except SandboxError as error:
        return str(error)
    probe = [program, "--unshare-user", "--ro-bind", "/", "/", "true"]
    return subprocess.run(probe, capture_output=True, text=True, check=False).stderr.strip()


def call(sandbox: Sandbox, code: str, **options: object) -> SandboxResult:
    """One call, on an event loop of its own."""
    return asyncio.run(sandbox.run(code, **options))


def small(isolation: str = "warm", **settings: object) -> Sandbox:
    """One worker, little memory, the standard library only: quick to start."""
    defaults = {"workers": 1, "memory_mb": 128, "packages": (), "isolation": isolation}
    return Sandbox(SandboxConfig(**{**defaults, **settings}))


def server_processes() -> set[int]:
    """This test's servers and the code they run: a child that was forked keeps the command line."""
    return {process.pid for process in running() if "guest.server" in command_line(process)}


def below_this_test() -> set[int]:
    """Everything this test started, of any depth, that still runs; with :func:`adopting`, also what lost its parent."""
    return {process.pid for process in running()}


def at_rest() -> set[int]:
    """:func:`below_this_test` once it no longer changes: the kernel ends processes in its own time."""
    found = below_this_test()
    while (again := time.sleep(0.02) or below_this_test()) != found:
        found = again
    return found


def running() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Make processes whose parent ends this test's children, not those of the machine's first process."""
    before = {process.pid for process in psutil.Process().children()}
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0)
        for process in psutil.Process().children():
            if process.pid not in before and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, 0)


def descriptors(pid: int) -> list[str]:
    """Where a process's descriptors lead: kinds only, since numbers of pipes change."""
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(entry).split(":")[0])
        except FileNotFoundError:
            continue  # the listing's own
    return sorted(links)


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether ``condition()`` becomes true: the kernel ends processes in its own time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
