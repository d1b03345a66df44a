"""What the sandbox's tests share: which isolations this host has, and what a sandbox must not leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from torchrl_copc.envs.sandbox import Sandbox, SandboxConfig, SandboxError, SandboxResult
from torchrl_copc.envs.sandbox.guest import landlock
from torchrl_copc.envs.sandbox.launch import find_bubblewrap

WITH_PACKAGES = {"packages": SandboxConfig().packages}
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
    """Servers and the code they run, anywhere on this machine: a child that was forked keeps the command line."""
    found = set()
    for process in psutil.process_iter(["cmdline", "status"]):
        if (
            "guest.server" in (process.info["cmdline"] or ())
            and process.info["status"] != psutil.STATUS_ZOMBIE
        ):
            found.add(process.pid)
    return found


def orphans() -> set[int]:
    """Those whose parent has ended."""
    return {pid for pid in server_processes() if psutil.pid_exists(pid) and parent(pid) == 1}


def parent(pid: int) -> int:
    try:
        return psutil.Process(pid).ppid()
    except psutil.NoSuchProcess:
        return 0


def below_this_test() -> set[int]:
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
    return found


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
