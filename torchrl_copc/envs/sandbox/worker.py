"""One worker of the pool: a server process, started when needed and replaced when it dies.

Everything here blocks; each worker is used by one thread at a time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import subprocess
import threading
import time
from typing import Any

from torchrl_copc.envs.sandbox.config import SandboxError, SandboxResult
from torchrl_copc.envs.sandbox.guest import frames
from torchrl_copc.envs.sandbox.launch import Launch

logger = logging.getLogger(__name__)

START_TIMEOUT = 120.0  # seconds; importing sympy takes two, on a busy machine many more
GRACE = 10.0  # seconds past a call's deadline after which its server counts as hung
_LAST_BREATH = 2.0


class ServerDiedError(SandboxError):
    """The server ended or hung."""


class Server:
    """A running server process.

    Args:
        launch: how to start it.

    Raises:
        ServerDiedError: if it does not come up, with what it wrote to standard error.
    """

    def __init__(self, launch: Launch) -> None:
        try:
            self._process = subprocess.Popen(
                launch.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=launch.environment,
                cwd="/",
                bufsize=0,
                start_new_session=True,  # Ctrl-C is the run's
            )
        except OSError as error:
            raise ServerDiedError(f"{launch.command[0]}: {error.strerror}") from error
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._stdin, self._stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._stderr = self._process.stderr.fileno()
        for descriptor in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(descriptor, False)
        self._lock = threading.Lock()
        self._in_call = False
        self._cancelled = False
        try:
            self._receive(time.monotonic() + START_TIMEOUT)
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for the reply.

        Raises:
            ServerDiedError: if none comes.
        """
        deadline = time.monotonic() + request["timeout"] + GRACE
        self._send(frames.encode_request(request), deadline)
        with self._lock:
            self._in_call = True
            if self._cancelled:
                self._send(frames.CANCEL, deadline)
        try:
            return self._receive(deadline)
        finally:
            with self._lock:
                self._in_call = self._cancelled = False

    def cancel(self) -> None:
        """End the call in hand, from any thread; its reply says ``cancelled``."""
        with self._lock:
            self._cancelled = True
            if self._in_call:
                with contextlib.suppress(OSError, ValueError):  # it just died
                    os.write(self._stdin, frames.CANCEL)

    def close(self) -> None:
        """Kill the server, whatever it does; returns when everything in the sandbox has ended."""
        self._process.kill()
        self._process.wait()
        # Bubblewrap's end is the end of what it started, a moment later: nobody holds our pipe then.
        poll, deadline = select.poll(), time.monotonic() + _LAST_BREATH
        poll.register(self._stdout, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0 and poll.poll(1e3 * left):
            if not os.read(self._stdout, 65536):
                break
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()

    def _send(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            self._wait(self._stdin, select.POLLOUT, deadline)
            try:
                view = view[os.write(self._stdin, view) :]
            except BrokenPipeError:
                self._died("ended")

    def _receive(self, deadline: float) -> dict[str, Any]:
        (length,) = frames.LENGTH.unpack(self._read(frames.LENGTH.size, deadline))
        message: dict[str, Any] = json.loads(self._read(length, deadline))
        for stream in ("stdout", "stderr"):
            if stream in message:
                message[stream] = self._read(message[stream], deadline).decode("utf-8", "replace")
        return message

    def _read(self, count: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._wait(self._stdout, select.POLLIN, deadline)
            piece = os.read(self._stdout, count - len(data))
            if not piece:
                self._died("ended")
            data += piece
        return bytes(data)

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        if not poll.poll(max(0.0, 1e3 * (deadline - time.monotonic()))):
            self._died("did not answer in time")

    def _died(self, how: str) -> None:
        self._process.kill()
        code = self._process.wait()
        words = b""
        with contextlib.suppress(BlockingIOError):
            words = os.read(self._stderr, 65536)
        lines = words.decode("utf-8", "replace").strip().splitlines()
        raise ServerDiedError(
            f"the sandbox server {how} (exit status {code}): {lines[-1] if lines else 'no message'}"
        )


class Call:
    """Code to run once, which another thread may cancel.

    Args:
        code: Python source.
        timeout: seconds it may take.
        print_last: print the value of a last line that is an expression.
    """

    def __init__(self, code: str, timeout: float, print_last: bool) -> None:
        self.code, self.timeout, self.print_last = code, timeout, print_last
        self._lock = threading.Lock()
        self._server: Server | None = None
        self.cancelled = False

    def run_on(self, server: Server, limits: dict[str, int]) -> dict[str, Any] | None:
        """The server's reply; ``None`` for a call cancelled before it began."""
        with self._lock:
            if self.cancelled:
                return None
            self._server = server
        request = {"code": self.code, "timeout": self.timeout, "print_last": self.print_last, **limits}
        try:
            return server.call(request)
        finally:
            with self._lock:
                self._server = None

    def cancel(self) -> None:
        """End the call if it runs, and never begin it otherwise."""
        with self._lock:
            self.cancelled = True
            if self._server is not None:
                self._server.cancel()


class Worker:
    """Runs calls one after the other, on one server while it lives.

    Args:
        launch: how to start servers.
        limits: of every call: ``memory_bytes`` and ``max_output_bytes``.
    """

    def __init__(self, launch: Launch, limits: dict[str, int]) -> None:
        self._launch, self._limits = launch, limits
        self._server: Server | None = None

    def start(self) -> Server:
        """The running server, a new one if there is none.

        Raises:
            ServerDiedError: if it does not come up.
        """
        if self._server is not None and not self._server.alive:
            logger.warning("a sandbox server died between two calls; starting another")
            self.close()
        if self._server is None:
            self._server = Server(self._launch)
        return self._server

    def run(self, call: Call) -> SandboxResult | None:
        """The result, or ``None`` if the call was cancelled. A server that dies is the call's end: ``killed``.

        Raises:
            ServerDiedError: if no server comes up.
            SandboxError: if the code could not be confined; it did not run then.
        """
        if call.cancelled:
            return None
        server = self.start()
        began = time.monotonic()
        try:
            reply = call.run_on(server, self._limits)
        except ServerDiedError as error:
            self.close()
            if call.cancelled:
                return None
            logger.warning("%s; the call counts as killed", error)
            return SandboxResult("killed", "", f"{error}\n", time.monotonic() - began)
        if not self._launch.reusable:
            self.close()
        if reply is None or reply.get("status") == "cancelled":
            return None
        if "failure" in reply:
            raise SandboxError(
                f"{self._launch.isolation}: the code could not be confined: {reply['failure']}"
            )
        return SandboxResult(**reply)

    def close(self) -> None:
        """Kill the server."""
        if self._server is not None:
            self._server.close()
            self._server = None
