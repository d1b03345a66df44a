"""The rollout worker's own process: an asyncio loop with one coroutine per episode, and one engine.

What it does on the way out: a shutdown message, a dead learner (closed pipe, changed parent) and a dead
engine all end the process; the engine gets a grace period to stop its own processes, then the whole process
group is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import pickle
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from typing import Any

from torchrl_copc.collectors.engine import EngineDeadError, EngineError, RolloutEngine
from torchrl_copc.trajectory import Completion, Episode, Prompt

logger = logging.getLogger(__name__)

ABORT_GRACE = 10.0  # seconds an aborted engine request may take to return what it had
SHUTDOWN_GRACE = 20.0  # seconds the engine may take to stop before its processes are killed


@dataclass(frozen=True)
class RowRequest:
    """One episode to run.

    Args:
        row_id: unique within a run.
        prompt: the task.
        group_id: rows sampled from the same place in the prompt order share it.
        temperature: of sampling; 0 is greedy.
        seed: of the row; each turn draws its own seed from it.
    """

    row_id: str
    prompt: Prompt
    group_id: str
    temperature: float
    seed: int


def derive_seed(*parts: object) -> int:
    """A 31-bit seed from a run's seed, a row's id, a turn, ...; the same on every machine.

    Example:
        >>> derive_seed(0, "row", 1) == derive_seed(0, "row", 1) != derive_seed(0, "row", 2)
        True
    """
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def worker_main(
    connection: Connection,
    log_path: str,
    engine_factory: Callable[[], RolloutEngine],
    env_factory: Callable[[], Any],
) -> None:
    """Entry point of the worker process."""
    # One process group with the engine's processes: they end together, and Ctrl-C is the learner's.
    os.setpgid(0, 0)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    asyncio.run(_Server(connection).run(engine_factory, env_factory))


@dataclass
class _Running:
    """One episode in the worker."""

    request: RowRequest
    task: asyncio.Task[None] | None = None
    engine_request: str | None = None
    cut_reason: str | None = None


class _Server:
    """The worker's side of the pipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._running: dict[int, _Running] = {}
        self._helpers: set[asyncio.Task[None]] = set()

    async def run(self, engine_factory: Callable[[], RolloutEngine], env_factory: Callable[[], Any]) -> None:
        self._loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        threading.Thread(target=self._read, args=(inbox,), daemon=True).start()
        writer = threading.Thread(target=self._write, daemon=True)
        writer.start()
        engine = None
        try:
            self._report("stage", "build the environment")
            self._env = env_factory()
            self._report("stage", "build the engine")
            engine = self._engine = engine_factory()
            self._report("stage", "start the engine")
            await engine.start()
            self._report("ready", await engine.weight_version())
            while (message := await inbox.get())[0] != "shutdown":
                self._handle(message)
        except BaseException:
            self._send("fatal", traceback.format_exc())
            raise
        finally:
            unfinished = list(self._running.values())
            self._running.clear()
            for running in unfinished:
                if running.task is not None:
                    running.task.cancel()
            if engine is not None:
                try:
                    await asyncio.wait_for(engine.shutdown(), SHUTDOWN_GRACE)
                except Exception:
                    logger.exception("the engine did not shut down; the learner's process ends it")
            self._outbox.put(None)
            writer.join(5.0)

    def _handle(self, message: tuple[Any, ...]) -> None:
        kind = message[0]
        if kind == "start":
            key, request = message[1:]
            running = self._running[key] = _Running(request)
            running.task = self._loop.create_task(self._episode(key, running))
        elif kind == "cancel":
            for key in message[1]:
                cancelled = self._running.pop(key, None)
                if cancelled is not None and cancelled.task is not None:
                    cancelled.task.cancel()
        elif kind == "cut":
            late = self._running.get(message[1])
            if late is not None and late.cut_reason is None:
                late.cut_reason = message[2]
                self._spawn(self._cut(late))
        elif kind == "call":
            self._spawn(self._call(*message[1:]))
        else:
            raise RuntimeError(f"unknown message from the learner: {kind}")

    async def _episode(self, key: int, running: _Running) -> None:
        try:
            self._send("row", key, _plain(await self._play(key, running)))
        except asyncio.CancelledError:
            await self._abort(running)
            if self._running.get(key) is not running:  # the learner does not want it any more
                raise
            # A tool's own cancellation that nobody caught: without a message the row would never end.
            self._send("failed", key, traceback.format_exc())
        except EngineDeadError as error:
            self._send("fatal", f"{type(error).__name__}: {error}")
        except Exception:
            self._send("failed", key, traceback.format_exc())
        finally:
            self._running.pop(key, None)

    async def _play(self, key: int, running: _Running) -> Episode:
        request = running.request
        began = time.monotonic()
        engine_seconds = 0.0
        episode: Episode = self._env.begin(request.prompt, request.row_id, request.group_id)
        try:
            while not episode.done:
                turn = self._env.next_turn(episode)
                turn_began = time.monotonic()
                running.engine_request = f"{request.row_id}-{episode.num_turns}-{key}"
                completion: Completion = await self._engine.generate(
                    turn.token_ids,
                    max_tokens=turn.max_tokens,
                    stop_token_ids=turn.stop_token_ids,
                    stop_strings=turn.stop_strings,
                    temperature=request.temperature,
                    seed=derive_seed(request.seed, episode.num_turns),
                    request_id=running.engine_request,
                )
                running.engine_request = None
                engine_seconds += time.monotonic() - turn_began
                # Before any cut: a turn that ended by itself may hold the answer, whatever raced with it.
                await self._env.advance(episode, completion)
                if running.cut_reason is not None:
                    self._end_cut(episode, running.cut_reason)
        except asyncio.CancelledError:
            if self._running.get(key) is not running or running.cut_reason is None:
                raise
            self._end_cut(episode, running.cut_reason)
        seconds = time.monotonic() - began
        episode.timings.update(total=seconds, engine=engine_seconds, environment=seconds - engine_seconds)
        return episode

    def _end_cut(self, episode: Episode, reason: str) -> None:
        if not episode.done:
            self._env.cut(episode, reason)
        elif episode.truncated:  # by its aborted request, which does not know why
            episode.finish_reason = reason

    async def _cut(self, running: _Running) -> None:
        """End an episode early: an engine request gives back what it sampled, a tool call is interrupted."""
        task = running.task
        assert task is not None
        if running.engine_request is not None:
            await self._abort(running)
            await asyncio.wait([task], timeout=ABORT_GRACE)
        if not task.done():
            task.cancel()

    async def _abort(self, running: _Running) -> None:
        if running.engine_request is None:
            return
        try:
            await self._engine.abort(running.engine_request)
        except Exception:
            logger.exception("row %s: its engine request could not be aborted", running.request.row_id)

    async def _call(self, key: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            value = await getattr(self._engine, method)(*args, **kwargs)
            if method == "update_weights":
                self._send("version", await self._engine.weight_version())
            self._send("result", key, value)
        except Exception as error:
            text = traceback.format_exc()
            try:
                error.add_note(f"in the rollout worker:\n{text}")
                pickle.loads(pickle.dumps(error))
            except Exception:  # an exception that does not survive pickling travels as text
                error = EngineError(f"{method}() failed in the rollout worker:\n{text}")
            self._send("error", key, error)
            if isinstance(error, EngineDeadError):
                self._send("fatal", f"{type(error).__name__}: {error}")

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._helpers.add(task)  # the loop keeps only weak references
        task.add_done_callback(self._helpers.discard)

    def _report(self, *message: Any) -> None:
        """Send at once, for the start: a process that dies in a stage must have named it before."""
        self._connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def _send(self, *message: Any) -> None:
        self._outbox.put(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def _write(self) -> None:
        while (payload := self._outbox.get()) is not None:
            try:
                self._connection.send_bytes(payload)
            except OSError:
                return  # the learner is gone; the reader thread ends the process

    def _read(self, inbox: asyncio.Queue[tuple[Any, ...]]) -> None:
        parent = os.getppid()
        try:
            while True:
                while not self._connection.poll(1.0):
                    if os.getppid() != parent:
                        raise EOFError
                message = pickle.loads(self._connection.recv_bytes())
                self._loop.call_soon_threadsafe(inbox.put_nowait, message)
                if message[0] == "shutdown":
                    return
        except (EOFError, OSError):
            pass
        # The learner is gone: stop in order if the loop still runs, by force if it does not.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(inbox.put_nowait, ("shutdown",))
        time.sleep(SHUTDOWN_GRACE)
        os.killpg(0, signal.SIGKILL)


_SENT_FIELDS = [field.name for field in fields(Episode) if field.name not in ("row_id", "prompt", "group_id")]


def _plain(episode: Episode) -> dict[str, Any]:
    """The fields the learner's process does not know yet; an environment's private state stays behind."""
    return {name: getattr(episode, name) for name in _SENT_FIELDS}
