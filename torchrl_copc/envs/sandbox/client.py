"""The sandbox as asyncio code sees it: a pool of workers."""

from __future__ import annotations

import asyncio
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Self

from torchrl_copc.envs.sandbox.choose import first_worker, limits_of
from torchrl_copc.envs.sandbox.config import SandboxConfig, SandboxError, SandboxResult, check_timeout
from torchrl_copc.envs.sandbox.worker import Call, Worker

MAX_CODE_BYTES = 1 << 20


class Sandbox:
    """Runs Python code that nobody has read, each call in a fresh state.

    The first call starts the pool. Calls from any number of coroutines, and of event loops, share it; each waits
    for a free worker. Cancelling a call ends its code. What each isolation keeps out: ``docs/sandbox.md``.

    Args:
        config: limits and isolation.

    Example:
        >>> async def main() -> None:
        ...     async with Sandbox(SandboxConfig(workers=1, timeout=2.0)) as sandbox:
        ...         result = await sandbox.run("print(sum(range(10)))")
        ...         print(result.status, result.stdout.strip())
        ...         result = await sandbox.run("1 / 0")
        ...         print(result.status, result.stderr.splitlines()[-1])
        >>> asyncio.run(main())
        ok 45
        error ZeroDivisionError: division by zero
    """

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self.config = config or SandboxConfig()
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._workers: list[Worker] = []
        self._calls: set[Call] = set()
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._started: Future[None] | None = None
        self._closed = False
        self._isolation = ""

    @property
    def isolation(self) -> str:
        """The isolation in use; empty before :meth:`start`."""
        return self._isolation

    async def start(self) -> None:
        """Choose the isolation and start every worker; the first call does it otherwise.

        Raises:
            SandboxUnavailableError: if this host offers no isolation that the configuration allows.
            SandboxError: if a package is not installed, or the sandbox is closed.
        """
        with self._lock:
            if self._closed:
                raise SandboxError("the sandbox is closed")
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self.config.workers, thread_name_prefix="sandbox")
            if self._started is None or (self._started.done() and self._started.exception()):
                self._started = self._threads.submit(self._start)
            started = self._started
        if started.done():
            return started.result()
        await asyncio.shield(asyncio.wrap_future(started))
        if self._closed:
            raise SandboxError("the sandbox was closed while it started")

    async def run(
        self, code: str, *, timeout: float | None = None, print_last: bool = False
    ) -> SandboxResult:
        """Run ``code`` as a script.

        Args:
            code: Python source.
            timeout: seconds it may take, if not the configured ones.
            print_last: print the value of a last line that is an expression, as an interactive session does.

        Raises:
            SandboxError: if the sandbox itself fails, or is closed; whatever the code does is in the result.
            ValueError: if ``timeout`` is not positive, or longer than a day.
        """
        if timeout is not None:
            check_timeout("timeout", timeout)
        if (size := len(code.encode("utf-8", "surrogatepass"))) > MAX_CODE_BYTES:
            return SandboxResult(
                "error", "", f"SyntaxError: the code has {size} bytes; {MAX_CODE_BYTES} are allowed\n", 0.0
            )
        await self.start()
        call = Call(code, self.config.timeout if timeout is None else timeout, print_last)
        with self._lock:
            if self._closed or self._threads is None:
                raise SandboxError("the sandbox is closed")
            future = self._threads.submit(self._run, call)
            self._calls.add(call)
        try:
            result = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            call.cancel()
            raise
        finally:
            with self._lock:
                self._calls.discard(call)
        if result is None:
            raise SandboxError("the sandbox was closed during the call")
        return result

    async def close(self) -> None:
        """End the calls in hand and every process. The sandbox cannot be used again."""
        with self._lock:
            self._closed = True
            threads, calls = self._threads, list(self._calls)
        for call in calls:
            call.cancel()
        if threads is not None:
            await asyncio.to_thread(threads.shutdown)
        for worker in self._workers:
            worker.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _start(self) -> None:
        launch, first = first_worker(self.config)
        others = [Worker(launch, limits_of(self.config)) for _ in range(self.config.workers - 1)]
        try:
            if launch.reusable:
                self._start_all(others)
        except BaseException:
            for worker in (first, *others):
                worker.close()
            raise
        self._workers = [first, *others]
        self._isolation = launch.isolation
        for worker in self._workers:
            self._idle.put(worker)

    def _start_all(self, workers: list[Worker]) -> None:
        """In threads that last: bubblewrap ends when the thread that started it does."""
        with self._lock:
            if self._closed or self._threads is None:
                raise SandboxError("the sandbox was closed while it started")
            starts = [self._threads.submit(worker.start) for worker in workers]
        wait(starts)
        for start in starts:
            start.result()

    def _run(self, call: Call) -> SandboxResult | None:
        worker = self._idle.get_nowait()  # one worker a thread: there is always one
        try:
            return worker.run(call)
        finally:
            self._idle.put(worker)
