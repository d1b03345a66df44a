"""Child processes that compare answers with math-verify, without letting a late one hold up the next.

math-verify stops itself by a signal, which works in the main thread only and does not interrupt every
computation (``9^{9^{9}}`` runs on). So it runs in processes of its own, without its timeouts: the kernel ends a
worker at its deadline of processor time, and its parent, which has math-verify imported, forks the next.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

PATIENCE = 10.0  # times the deadline, by the clock, after which a child counts as hung and is killed
START_DEADLINE = 60.0  # seconds until a child has imported math-verify; it takes about one
# Then a fresh one: math-verify swallows MemoryError, so a child that slowly filled up would call right answers wrong.
REQUESTS_PER_CHILD = 2_000

_PROGRAM = Path(__file__).with_name("judge_child.py")


class JudgeDied(RuntimeError):
    """The child's process ended in the middle of a question (out of memory, or a crash in native code)."""


class JudgeStartError(RuntimeError):
    """A child could not be started: the machine's fault, not the question's."""


class _Child:
    """One process group and the pipe to it. A new program, not a fork: forking with threads can deadlock."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", str(_PROGRAM), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,
            )
        self.requests = 0

    def wait_until_ready(self) -> None:
        problem = self._receive(START_DEADLINE)
        if problem:
            raise ImportError(
                f'verifying answers needs math-verify: pip install "torchrl-copc[envs]" ({problem})'
            )

    def ask(self, gold: str, answer: str | None, deadline: float) -> Any:
        self.requests += 1
        request = {"gold": gold, "answer": answer, "deadline": deadline}
        self.connection.send_bytes(json.dumps(request).encode())
        return self._receive(PATIENCE * deadline)

    def _receive(self, deadline: float) -> Any:
        if not self.connection.poll(deadline):
            raise TimeoutError
        return json.loads(self.connection.recv_bytes())

    def kill(self) -> None:
        """End the process and its worker."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self.process.wait()
        self.connection.close()


class JudgePool:
    """A few judges, each with a thread that waits for it. They start with the first question.

    Args:
        workers: processes at most.
        deadline: seconds of processor time one question may take.

    Raises:
        ValueError: for a setting that cannot work.
    """

    def __init__(self, workers: int, deadline: float) -> None:
        if workers < 1:
            raise ValueError(f"workers={workers}; it must be at least 1")
        if deadline <= 0:
            raise ValueError(f"deadline={deadline} s; it must be above 0")
        self.deadline = deadline
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="judge")
        self._of_thread = threading.local()
        self._children: set[_Child] = set()
        # Runs at the latest when the interpreter exits.
        self.close = weakref.finalize(self, _close, self._executor, self._children, os.getpid())

    def compare(self, gold: str, answer: str) -> Future[Any]:
        """Whether ``answer`` equals ``gold``.

        The future raises TimeoutError past the deadline and :class:`JudgeDied` if the process ended.
        """
        return self._executor.submit(self._ask, gold, answer)

    def objection(self, gold: str) -> Future[Any]:
        """Why ``gold`` cannot be compared with anything; an empty text if it can. Raises as :meth:`compare`."""
        return self._executor.submit(self._ask, gold, None)

    def _ask(self, gold: str, answer: str | None) -> Any:
        child = self._child()
        reusable = False
        try:
            outcome = child.ask(gold, answer, self.deadline)
            reusable = child.requests < REQUESTS_PER_CHILD
        except TimeoutError:
            raise
        except (EOFError, OSError) as error:
            raise JudgeDied("the judge's process ended in the middle of a question") from error
        finally:
            if not reusable:
                self._drop(child)
        failure = outcome.get("failure")
        if failure == "late":
            raise TimeoutError
        if failure:
            raise JudgeDied("the judge's process ended in the middle of a question")
        return outcome["reply"]

    def _child(self) -> _Child:
        child: _Child | None = getattr(self._of_thread, "child", None)
        if child is None:
            child = _Child()
            self._children.add(child)
            try:
                child.wait_until_ready()
            except BaseException as error:
                self._drop(child)
                if isinstance(error, (EOFError, OSError)):
                    raise JudgeStartError(
                        f"the process that verifies answers was not ready within {START_DEADLINE:g} s "
                        f"(it ended with status {child.process.returncode}); see its messages above"
                    ) from error
                raise
            self._of_thread.child = child
        return child

    def _drop(self, child: _Child) -> None:
        child.close()
        self._children.discard(child)
        self._of_thread.child = None


def _close(executor: ThreadPoolExecutor, children: set[_Child], owner: int) -> None:
    if os.getpid() != owner:  # a fork: threads and children are its parent's
        return
    executor.shutdown(wait=False, cancel_futures=True)
    for child in tuple(children):
        child.kill()  # its thread, if it waits, finds the pipe closed and cleans up
    executor.shutdown(wait=True)
    for child in tuple(children):
        child.close()
