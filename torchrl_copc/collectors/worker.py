"""The rollout worker: a process that owns one engine and runs many episodes at once on an asyncio loop.

    learner's process                                  worker process (spawned, its own process group)
    RolloutWorker ── start / cut / cancel / call ──>   reader thread ─> asyncio loop ─> a coroutine per episode
      reader thread <── rows / failures / results ──   writer thread <─┘                env <-> engine

Messages are pickled bytes over one pipe; an episode crosses as the plain lists it is made of, no tensor is
shared. Either side's death is noticed by the other: the worker ends itself and its engine's processes when
the pipe or its parent is gone, and the parent reports the exit code and the last lines of the worker's log.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from torchrl_copc.collectors.engine import RolloutEngine
from torchrl_copc.collectors.worker_process import SHUTDOWN_GRACE, RowRequest, worker_main
from torchrl_copc.trajectory import Episode

logger = logging.getLogger(__name__)

_TICK = 0.2  # seconds between two looks at deadlines when no message arrives
_LOG_TAIL_LINES = 30
_LOG_TAIL_BYTES = 1 << 16
_CUT_GRACE = 60.0  # seconds a cut row may take to arrive before the worker counts as hung


class WorkerError(RuntimeError):
    """The rollout worker or its engine is gone or hangs; the message holds the end of its log."""


class RowSink(Protocol):
    """Receives what the worker reports, on the worker client's reader thread."""

    def on_row(self, episode: Episode) -> None:
        """An episode ended."""

    def on_failure(self, row_id: str, error: str) -> None:
        """An episode raised; ``error`` is the traceback."""

    def on_tick(self) -> None:
        """Called a few times a second and after every message: look at deadlines, admit rows."""

    def on_death(self, error: WorkerError) -> None:
        """The worker or its engine is gone; nothing will arrive any more."""


class RolloutWorker:
    """Handle of the rollout worker process.

    One worker may serve several collectors, one after the other or at once: every row has its own sink.

    Args:
        engine_factory: picklable, builds the :class:`RolloutEngine` in the worker.
        env_factory: picklable, builds the token environment in the worker.
        log_path: file for everything the worker and its engine print; a temporary file by default.
        stage_timeout: seconds each stage of the start may take before the start is given up, naming the
            stage.

    Raises:
        WorkerError: from :meth:`start`, and from every call after the worker is gone.
    """

    def __init__(
        self,
        engine_factory: Callable[[], RolloutEngine],
        env_factory: Callable[[], Any],
        *,
        log_path: str | Path | None = None,
        stage_timeout: float = 300.0,
    ) -> None:
        if log_path is None:
            handle, name = tempfile.mkstemp(prefix="rollout-worker-", suffix=".log")
            os.close(handle)
            log_path = name
        self.log_path = Path(log_path)
        self.stage_timeout = stage_timeout
        self.weight_version = -1
        self._factories = (engine_factory, env_factory)
        self._process: Any = None
        self._connection: Connection | None = None
        self._reader: threading.Thread | None = None
        self._send_lock = threading.Lock()
        self._lock = threading.Lock()
        self._keys = itertools.count()
        self._rows: dict[int, tuple[RowSink, RowRequest]] = {}
        self._key_of: dict[tuple[int, str], int] = {}
        self._sinks: list[RowSink] = []
        self._calls: dict[int, _PendingCall] = {}
        self._error: WorkerError | None = None
        self._closing = False

    def start(self) -> RolloutWorker:
        """Spawn the process and wait until its engine can generate.

        Raises:
            WorkerError: when a stage fails or takes longer than ``stage_timeout``; names the stage, shows the
                log.
        """
        if self._process is not None:
            raise RuntimeError("this rollout worker was started before; make a new one")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=worker_main, args=(theirs, str(self.log_path), *self._factories), name="rollout-worker"
        )
        self._process.start()
        theirs.close()
        # multiprocessing joins its children at exit: a run that ends in an exception must not hang there.
        atexit.register(_shutdown, weakref.ref(self))
        try:
            self._wait_until_ready()
        except BaseException:
            self._kill()
            raise
        self._reader = threading.Thread(target=self._read, name="rollout-worker-reader", daemon=True)
        self._reader.start()
        return self

    @property
    def alive(self) -> bool:
        """Whether rows can be started."""
        return self._reader is not None and self._error is None and not self._closing

    @property
    def pid(self) -> int:
        """Process id (and process group id) of the worker."""
        return int(self._process.pid)

    def attach(self, sink: RowSink) -> None:
        """Let a sink receive ticks and the news of the worker's death."""
        with self._lock:
            if self._error is None:
                self._sinks.append(sink)
        if self._error is not None:
            raise self._error

    def detach(self, sink: RowSink) -> None:
        """Cancel the rows of a sink and forget it; nothing more reaches it."""
        with self._lock:
            self._sinks = [other for other in self._sinks if other is not sink]
            keys = [key for key, (owner, _) in self._rows.items() if owner is sink]
            for key in keys:
                self._forget(key)
        if keys:
            with contextlib.suppress(WorkerError):  # a worker that is gone runs no rows
                self._send(("cancel", keys))

    def submit(self, request: RowRequest, sink: RowSink) -> None:
        """Start an episode; its row or failure goes to ``sink``."""
        with self._lock:
            key = next(self._keys)
            self._rows[key] = (sink, request)
            self._key_of[id(sink), request.row_id] = key
        self._send(("start", key, request))

    def cancel(self, row_id: str, sink: RowSink) -> None:
        """Stop an episode and forget it; a row already under way is dropped on arrival."""
        with self._lock:
            key = self._key_of.get((id(sink), row_id))
            if key is None:  # its last message has just been taken from the pipe
                return
            self._forget(key)
        self._send(("cancel", [key]))

    def cut(self, row_id: str, sink: RowSink, reason: str) -> None:
        """Truncate an episode where it is; what it has sampled so far arrives as a row."""
        with self._lock:
            key = self._key_of.get((id(sink), row_id))
        if key is not None:
            self._send(("cut", key, reason))

    def check_cut_rows(self, cut_at: Mapping[str, float]) -> None:
        """See that cut rows arrive.

        Args:
            cut_at: rows that were cut and have not arrived, and when (``time.monotonic()``).

        Raises:
            WorkerError: for a row that should have arrived long ago.
        """
        now = time.monotonic()
        for row_id, since in cut_at.items():
            if now - since > _CUT_GRACE:
                raise self._error_with_log(
                    f"row {row_id} was cut at its row_deadline and did not arrive in {_CUT_GRACE:g} s: "
                    "the worker's event loop is blocked"
                )

    def call(self, method: str, *args: Any, timeout: float = 60.0, **kwargs: Any) -> Any:
        """Run a coroutine method of the engine in the worker and wait for its result.

        Args:
            method: name of a public method of :class:`RolloutEngine`, for example ``"update_weights"``.
            timeout: seconds to wait.

        Raises:
            WorkerError: if it takes longer than ``timeout`` or the worker is gone.
            Exception: what the method raised, with the worker's traceback as a note.
        """
        if method.startswith("_"):
            raise ValueError(f"{method!r} is not a public method of the engine")
        pending = _PendingCall()
        with self._lock:
            key = next(self._keys)
            self._calls[key] = pending
        try:
            self._send(("call", key, method, args, kwargs))
            if not pending.done.wait(timeout):
                raise self._error_with_log(
                    f"the rollout engine did not answer {method}() within {timeout:g} s"
                )
        finally:
            with self._lock:
                self._calls.pop(key, None)
        if pending.error is not None:
            raise pending.error
        return pending.value

    def shutdown(self) -> None:
        """Stop the episodes, the engine and the process; safe to repeat."""
        if self._process is None or self._closing:
            return
        self._closing = True
        with contextlib.suppress(OSError):
            self._send_bytes(("shutdown",))
        self._process.join(SHUTDOWN_GRACE + 5.0)
        self._kill()
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(5.0)
        if self._connection is not None:
            self._connection.close()
        self._fail_calls(WorkerError("the rollout worker was shut down"))

    def log_tail(self) -> str:
        """Last lines of the worker's log."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, self.log_path.stat().st_size - _LOG_TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"(the log cannot be read: {error})"
        return "\n".join(f"  | {line}" for line in lines[-_LOG_TAIL_LINES:])

    def __enter__(self) -> RolloutWorker:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _wait_until_ready(self) -> None:
        assert self._connection is not None
        stage = "start of the process"
        while True:
            deadline = time.monotonic() + self.stage_timeout
            while not self._connection.poll(0.1):
                if not self._process.is_alive():
                    raise self._death_error(f"during: {stage}")
                if time.monotonic() > deadline:
                    raise self._error_with_log(
                        f"the rollout worker did not finish a stage in {self.stage_timeout:g} s: {stage}"
                    )
            try:
                message = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                raise self._death_error(f"during: {stage}") from None
            if message[0] == "stage":
                stage = message[1]
            elif message[0] == "ready":
                self.weight_version = message[1]
                return
            else:
                raise self._error_with_log(f"the rollout worker failed during: {stage}\n{message[1]}")

    def _read(self) -> None:
        assert self._connection is not None
        try:
            while not self._closing and self._error is None:
                # The sentinel as well as the pipe: a child of a killed worker can hold the pipe's other end.
                ready = wait([self._connection, self._process.sentinel], timeout=_TICK)
                if self._connection in ready:
                    self._dispatch(pickle.loads(self._connection.recv_bytes()))
                elif ready:
                    raise EOFError
                for sink in self._current_sinks():
                    sink.on_tick()
        except (EOFError, OSError):
            if not self._closing:
                self._die(self._death_error("while episodes were running" if self._rows else "while idle"))
        except Exception:  # without this thread the learner would wait for ever
            self._die(WorkerError(f"the rollout worker's reader thread failed:\n{traceback.format_exc()}"))

    def _dispatch(self, message: tuple[Any, ...]) -> None:
        kind = message[0]
        if kind in ("row", "failed"):
            with self._lock:
                entry = self._rows.get(message[1])
                self._forget(message[1])
            if entry is None:  # cancelled while the message was on its way
                return
            sink, request = entry
            if kind == "failed":
                sink.on_failure(request.row_id, message[2])
            else:
                episode = Episode(request.row_id, request.prompt, request.group_id, **message[2])
                sink.on_row(episode)
        elif kind == "version":
            self.weight_version = message[1]
        elif kind in ("result", "error"):
            with self._lock:
                pending = self._calls.get(message[1])
            if pending is not None:
                if kind == "error":
                    pending.error = message[2]
                else:
                    pending.value = message[2]
                pending.done.set()
        elif kind == "fatal":
            self._die(self._error_with_log(f"the rollout engine died: {message[1]}"))
        else:
            raise RuntimeError(f"unknown message from the rollout worker: {kind}")

    def _current_sinks(self) -> list[RowSink]:
        with self._lock:
            return list(self._sinks)

    def _forget(self, key: int) -> None:
        entry = self._rows.pop(key, None)
        if entry is not None:
            del self._key_of[id(entry[0]), entry[1].row_id]

    def _send(self, message: tuple[Any, ...]) -> None:
        if self._error is not None:
            raise self._error
        if self._reader is None or self._closing:
            raise WorkerError(
                "the rollout worker is not running: start() it first, and do not use it after shutdown()"
            )
        # A broken pipe is the reader thread's to report: it knows the exit code, and fails rows and calls
        # alike.
        with contextlib.suppress(OSError):
            self._send_bytes(message)

    def _send_bytes(self, message: tuple[Any, ...]) -> None:
        assert self._connection is not None
        payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self._send_lock:
            self._connection.send_bytes(payload)

    def _death_error(self, when: str) -> WorkerError:
        self._process.join(5.0)
        code = self._process.exitcode
        if code is not None and code < 0:
            how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
        else:
            how = f"ended with exit code {code}"
        return self._error_with_log(f"the rollout worker {how} {when}")

    def _error_with_log(self, what: str) -> WorkerError:
        return WorkerError(f"{what}\nlast lines of the worker's log ({self.log_path}):\n{self.log_tail()}")

    def _die(self, error: WorkerError) -> None:
        with self._lock:
            self._error = error
            sinks, self._sinks = self._sinks, []
            self._rows.clear()
            self._key_of.clear()
        self._fail_calls(error)
        for sink in sinks:
            sink.on_death(error)
        self._kill()

    def _fail_calls(self, error: WorkerError) -> None:
        with self._lock:
            calls = list(self._calls.values())
        for pending in calls:
            if not pending.done.is_set():
                pending.error = error
                pending.done.set()

    def _kill(self) -> None:
        """End the worker and everything it started: its engine's processes share its process group."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join(5.0)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _shutdown(reference: weakref.ref[RolloutWorker]) -> None:
    worker = reference()
    if worker is not None:
        worker.shutdown()


class _PendingCall:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None
