"""The sandbox server: forks a confined child for every call and watches over it.

Started by ``worker.py`` with its settings as one JSON argument. It reads requests from standard input and writes
replies to standard output. A child has neither: its standard input is empty, its output goes to pipes that the
server reads, and nothing else is open in it. The end of standard input ends the call in hand and the server.

A child is a copy of the server's memory, freed memory too. Code and output therefore never reach the server's heap:
code is unmapped once the child has it, output is read to memory that is not copied.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import mmap
import os
import resource
import select
import signal
import site
import sys
import time
from dataclasses import dataclass
from typing import Any

from . import frames, interpreter, landlock, libc, limits, seccomp
from .warm_up import warm_up_sympy

_PIECE = 65536  # bytes read at once
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
        self._settings, self._pid = settings, os.getpid()
        self._buffers: list[mmap.mmap] = []
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
        frames.send_reply(self._replies, {"ready": True})
        while (request := frames.receive_request(self._requests)) is not None:
            if request.body is None:
                continue  # cancels a call that had ended
            self._call(request, request.body)
            if self._settings.scratch:
                libc.call("umount2", self._settings.scratch.encode(), libc.MNT_DETACH)
                self._mount_scratch()

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

    def _call(self, request: frames.Request, body: mmap.mmap) -> None:
        started = time.monotonic()
        size = request.max_output_bytes + _PIECE
        if not self._buffers or len(self._buffers[0]) != size:
            self._buffers = [frames.output_buffer(size) for _ in range(2)]
        child = self._fork(body)
        body.close()
        watch = _Watch(child, self._requests, self._buffers, request.max_output_bytes)
        try:
            status = watch.until(started + request.timeout)
        finally:
            os.kill(child.pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):  # in unsafe mode it may have children
                os.killpg(child.pid, signal.SIGKILL)
            _, wait_status = os.waitpid(child.pid, 0)
            watch.close()
        seconds = time.monotonic() - started
        if status == "gone":
            os._exit(0)
        if not watch.ready and status == "":
            failure = watch.failure or "the child ended before it was confined"
            return frames.send_reply(self._replies, {"failure": failure})
        stdout, stderr = watch.output(child.stdout), watch.output(child.stderr)
        message = {
            "status": status or _ending(os.waitstatus_to_exitcode(wait_status)),
            "stdout": len(stdout),
            "stderr": len(stderr),
            "seconds": seconds,
        }
        return frames.send_reply(self._replies, message, stdout, stderr)

    def _fork(self, body: mmap.mmap) -> _Child:
        (stdout, out), (stderr, err), (status, ready) = (os.pipe() for _ in range(3))
        pid = os.fork()
        if pid == 0:
            try:
                request = json.loads(body[:])
                body.close()
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
        libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._pid:  # it died before we asked
            os._exit(1)
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

    def __init__(self, child: _Child, requests: int, buffers: list[mmap.mmap], max_output_bytes: int) -> None:
        self.ready, self.failure = False, ""
        self._child, self._requests, self._room = child, requests, max_output_bytes
        self._output = {child.stdout: memoryview(buffers[0]), child.stderr: memoryview(buffers[1])}
        self._filled = dict.fromkeys(self._output, 0)
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
                    return "gone" if frames.receive_request(self._requests) is None else "cancelled"
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

    def output(self, descriptor: int) -> memoryview:
        """What the child wrote."""
        return self._output[descriptor][: self._filled[descriptor]]

    def close(self) -> None:
        for descriptor in (*self._output, self._child.status, self._exit):
            os.close(descriptor)

    def _read(self, descriptor: int) -> bool:
        try:
            count = self._read_word() if descriptor == self._child.status else self._read_output(descriptor)
        except BlockingIOError:
            return False
        if not count:
            self._poll.unregister(descriptor)
            self._open.discard(descriptor)
        return count > 0

    def _read_word(self) -> int:
        word = os.read(self._child.status, _PIECE)
        if word:
            self.ready = self.ready or word == READY
            self.failure = "" if self.ready else word.decode("utf-8", "replace")
        return len(word)

    def _read_output(self, descriptor: int) -> int:
        filled = self._filled[descriptor]
        count = os.readv(descriptor, [self._output[descriptor][filled : filled + _PIECE]])
        self._filled[descriptor] = filled + min(count, max(self._room, 0))
        self._room -= count
        return count


def _ending(exit_code: int) -> str:
    if exit_code < 0:
        return "killed"
    return {0: "ok", interpreter.OUT_OF_MEMORY: "memory"}.get(exit_code, "error")


def main() -> None:
    Server(Settings(**json.loads(sys.argv[1]))).serve()


if __name__ == "__main__":
    main()
