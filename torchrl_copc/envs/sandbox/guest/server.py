"""The sandbox server: for every call it forks a watcher, which forks a confined child and watches over it.

Started by ``worker.py`` with its settings as one JSON argument. Requests come from standard input, replies go to
standard output. The watcher reads and writes them, never the server: a child is a copy of the memory of whoever
forks it, so it would find the code and the output of earlier calls in what the server has freed. A child has
neither descriptor: its standard input is empty, its output goes to pipes that the watcher reads, and nothing else
is open in it. The end of standard input ends the call in hand and the server.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import site
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

from . import frames, interpreter, landlock, libc, limits, seccomp
from .warm_up import warm_up_sympy

READY = b"\0"  # a child's word that it is confined and about to run the code
STDLIB = (
    "bisect cmath collections datetime decimal fractions functools heapq itertools math random re "
    "statistics string"
)
_SCRATCH_OPTIONS = f"size={limits.SCRATCH_BYTES},nr_inodes={limits.SCRATCH_INODES},mode=0700"


@dataclass(frozen=True)
class Settings:
    """How calls are confined, besides whatever the server was started in.

    Args:
        packages: imported before the first call.
        package_path: directories they lie in.
        scratch: directory on which every call gets an empty file system; empty: there is none.
        confined: drop capabilities and filter system calls; only the unsafe mode does without.
        landlock: arguments of :func:`.landlock.confine`, for a server that sees the host's files.
    """

    packages: list[str]
    package_path: list[str]
    scratch: str
    confined: bool
    landlock: dict[str, list[str]] | None


@dataclass
class _Child:
    pid: int
    stdout: int
    stderr: int
    status: int  # READY, or why the child could not be confined


class Server:
    """One call at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._on_host = settings.landlock is not None or not settings.confined  # in no namespace of its own
        # Python's dup is closed on exec, and children close everything from 3 on.
        self._requests, self._replies = os.dup(0), os.dup(1)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.close(null)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits.OPEN_FILES, limits.OPEN_FILES))
        self._prepare_interpreter()
        if settings.confined:
            seccomp.program(shared_files=self._on_host, pid=1)  # most of it is the same for every child
        if settings.scratch:
            libc.call("unshare", libc.CLONE_NEWNS)
            self._mount_scratch()
        self._address_space = limits.address_space_in_use()

    def serve(self) -> None:
        """Answer requests until standard input ends."""
        frames.send(self._replies, {"ready": True})
        waiting = select.poll()
        waiting.register(self._requests, select.POLLIN)
        while waiting.poll() and self._watcher_answers():
            if self._settings.scratch:
                libc.call("umount2", self._settings.scratch.encode(), libc.MNT_DETACH)
                self._mount_scratch()

    def _watcher_answers(self) -> bool:
        """Have one request answered; false once there are no more, or the watcher failed."""
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                libc.end_with_parent(server)
                status = self._answer()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        _, wait_status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(wait_status) == 0

    def _answer(self) -> int:
        """Answer one request; the watcher's exit status."""
        request = frames.receive(self._requests)
        if request:
            frames.send(self._replies, self._call(request))
        return int(request is None)  # an empty one cancels a call that had ended

    def _prepare_interpreter(self) -> None:
        """Everything a call would otherwise wait for; the heap is frozen, so that children share its pages."""
        ours = os.environ.pop("PYTHONPATH").split(os.pathsep)
        sys.path[:] = [*(path for path in sys.path if path not in ours), *self._settings.package_path]
        os.environ["HOME"] = self._settings.scratch or "/"
        site.setquit()
        for name in (*STDLIB.split(), *self._settings.packages):
            importlib.import_module(name)
        if "numpy" in sys.modules:
            importlib.import_module("numpy.random")
        if "sympy" in sys.modules:
            warm_up_sympy(sys.modules["sympy"])
        gc.collect()
        gc.freeze()

    def _mount_scratch(self) -> None:
        libc.mount("tmpfs", self._settings.scratch, "tmpfs", libc.MS_NOSUID | libc.MS_NODEV, _SCRATCH_OPTIONS)

    def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        started = time.monotonic()
        child = self._fork(request)
        watch = _Watch(child, self._requests, request["max_output_bytes"])
        try:
            status = watch.until(started + request["timeout"])
        finally:
            os.kill(child.pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):  # in unsafe mode it may have children
                os.killpg(child.pid, signal.SIGKILL)
            _, wait_status = os.waitpid(child.pid, 0)
            watch.close()
        seconds = time.monotonic() - started
        if status == "gone":
            os._exit(1)
        if not watch.ready and status == "":
            return {"failure": watch.failure or "the child ended before it was confined"}
        return {
            "status": status or _ending(os.waitstatus_to_exitcode(wait_status)),
            "stdout": watch.text(child.stdout),
            "stderr": watch.text(child.stderr),
            "seconds": seconds,
        }

    def _fork(self, request: dict[str, Any]) -> _Child:
        (stdout, out), (stderr, err), (status, ready) = (os.pipe() for _ in range(3))
        watcher = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                libc.end_with_parent(watcher)
                self._enter(out, err, ready, request)
            except BaseException as error:
                os.write(ready, f"{type(error).__name__}: {error}".encode()[:4096])
                os._exit(1)
            interpreter.run(request["code"], print_last=request["print_last"])
        for descriptor in (out, err, ready):
            os.close(descriptor)
        return _Child(pid, stdout, stderr, status)

    def _enter(self, out: int, err: int, ready: int, request: dict[str, Any]) -> None:
        """Confine the child; what it inherited and may not use is closed."""
        settings = self._settings
        os.setpgid(0, 0)  # the session is the server's own already, without a terminal
        # Opened anew: flags set on the server's would stay for the next call.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.closerange(3, ready)
        os.closerange(ready + 1, limits.OPEN_FILES)
        os.chdir(settings.scratch or "/")
        if "numpy" in sys.modules and "random" in request["code"]:
            sys.modules["numpy"].random.seed()  # 1 ms; Python's own generator is reseeded by fork
        limits.apply(
            self._address_space + request["memory_bytes"], threads=None if self._on_host else limits.THREADS
        )
        if settings.confined:
            libc.drop_capabilities()
            libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
            if settings.landlock is not None:
                landlock.confine(**settings.landlock)
            seccomp.confine(shared_files=self._on_host)
        os.write(ready, READY)
        os.close(ready)


class _Watch:
    """Collects a child's output and decides when it must end."""

    def __init__(self, child: _Child, requests: int, max_output_bytes: int) -> None:
        self.ready, self.failure = False, ""
        self._child, self._requests, self._room = child, requests, max_output_bytes
        self._output = {child.stdout: bytearray(), child.stderr: bytearray()}
        self._exit = os.pidfd_open(child.pid)
        self._poll = select.poll()
        self._open = {*self._output, child.status}
        for descriptor in (*self._open, self._exit, requests):
            self._poll.register(descriptor, select.POLLIN)

    def until(self, deadline: float) -> str:
        """Wait for the child's end: ``""`` if it came by itself, else why the child must be killed."""
        ended = False
        while not ended:
            left = deadline - time.monotonic()
            if left <= 0:
                return "timeout"
            for descriptor, _ in self._poll.poll(1e3 * left + 1):
                if descriptor == self._requests:
                    return "gone" if frames.receive(self._requests) is None else "cancelled"
                if descriptor == self._exit:
                    ended = True
                elif descriptor in self._open:
                    self._read(descriptor)
            if self._room < 0:
                return "output_limit"
        # What is still in the pipes; a process that inherited them (unsafe mode) is not waited for.
        for descriptor in tuple(self._open):
            os.set_blocking(descriptor, False)
            while descriptor in self._open and self._room >= 0 and self._read(descriptor):
                pass
        return "output_limit" if self._room < 0 else ""

    def text(self, descriptor: int) -> str:
        """What the child wrote; bytes that are not UTF-8 are replaced."""
        return self._output[descriptor].decode("utf-8", "replace")

    def close(self) -> None:
        for descriptor in (*self._output, self._child.status, self._exit):
            os.close(descriptor)

    def _read(self, descriptor: int) -> bool:
        try:
            piece = os.read(descriptor, 65536)
        except BlockingIOError:
            return False
        if not piece:
            self._poll.unregister(descriptor)
            self._open.discard(descriptor)
        elif descriptor == self._child.status:
            self.ready = self.ready or piece == READY
            self.failure = "" if self.ready else piece.decode("utf-8", "replace")
        else:
            self._output[descriptor] += piece[: max(self._room, 0)]
            self._room -= len(piece)
        return bool(piece)


def _ending(exit_code: int) -> str:
    if exit_code < 0:
        return "killed"
    return {0: "ok", interpreter.OUT_OF_MEMORY: "memory"}.get(exit_code, "error")


def main() -> None:
    Server(Settings(**json.loads(sys.argv[1]))).serve()


if __name__ == "__main__":
    main()
