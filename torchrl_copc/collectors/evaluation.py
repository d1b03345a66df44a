"""Evaluation episodes on one pinned version of the weights, beside whatever else the worker runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from tensordict import TensorDict

from torchrl_copc.collectors.worker import RolloutWorker, WorkerError
from torchrl_copc.collectors.worker_process import RowRequest, derive_seed
from torchrl_copc.trajectory import POLICY_MASK, POLICY_VERSION, Episode, Prompt, check_row


class EvaluationError(RuntimeError):
    """An evaluation that cannot be trusted or completed."""


class EvaluationRun:
    """Runs a fixed list of episodes to their end.

    Args:
        worker: a started worker.
        tasks: prompt and row id of each episode.
        temperature: of sampling; 0 is greedy.
        seed: rows derive theirs from it and their id.
        max_concurrent_rows: episodes at once.
        row_deadline: seconds after which a row is stopped and started again; ``None`` for no deadline.
        max_attempts: times an episode may fail or be stopped before the evaluation ends and names its prompt.
    """

    def __init__(
        self,
        worker: RolloutWorker,
        tasks: Sequence[tuple[Prompt, str]],
        *,
        temperature: float,
        seed: int,
        max_concurrent_rows: int,
        row_deadline: float | None,
        max_attempts: int,
    ) -> None:
        self._worker = worker
        self._prompts = {row_id: prompt for prompt, row_id in tasks}
        self._waiting = [row_id for _, row_id in reversed(tasks)]
        self._order = [row_id for _, row_id in tasks]
        self._temperature = temperature
        self._seed = seed
        self._max_concurrent_rows = max_concurrent_rows
        self._row_deadline = row_deadline
        self._max_attempts = max_attempts
        self._version = worker.weight_version
        self._running: dict[str, float] = {}
        self._cut_at: dict[str, float] = {}
        self._attempts: dict[str, int] = dict.fromkeys(self._order, 0)
        self._rows: dict[str, TensorDict] = {}
        self._error: Exception | None = None
        self._condition = threading.Condition()

    def run(self, timeout: float | None = None) -> list[TensorDict]:
        """The rows, in the order of the tasks.

        Raises:
            EvaluationError: if a token was sampled by other weights than the pinned ones, an episode keeps
                failing or running past its deadline, or ``timeout`` seconds passed.
            WorkerError: if the worker dies or hangs.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self._worker.attach(self)
        try:
            with self._condition:
                self._start_rows()
                while self._error is None and len(self._rows) < len(self._order):
                    if deadline is not None and time.monotonic() > deadline:
                        raise EvaluationError(
                            f"evaluation: {len(self._rows)} of {len(self._order)} episodes in {timeout} s; "
                            "allow more time or fewer prompts"
                        )
                    self._condition.wait(1.0)
                if self._error is not None:
                    raise self._error
                return [self._rows[row_id] for row_id in self._order]
        finally:
            self._worker.detach(self)

    def on_row(self, episode: Episode) -> None:
        """Check and keep a row."""
        with self._condition:
            self._ended(episode.row_id)
            if episode.num_policy_tokens == 0:
                self._retry(episode.row_id, f"it ended ({episode.finish_reason}) without a policy token")
                return
            if episode.truncated:  # it would count as a wrong answer
                self._retry(
                    episode.row_id,
                    f"it was truncated ({episode.finish_reason}) at row_deadline={self._row_deadline} s",
                )
                return
            try:
                row = episode.to_row()
                check_row(row)
                versions = row.get(POLICY_VERSION)[row.get(POLICY_MASK)].unique().tolist()
                if versions != [self._version]:
                    raise EvaluationError(
                        f"evaluation of version {self._version}: row {episode.row_id} was sampled by "
                        f"versions {versions}; publish no weights while an evaluation runs"
                    )
            except (ValueError, EvaluationError) as error:
                self._fail(error)
                return
            self._rows[episode.row_id] = row
            self._start_rows()
            self._condition.notify_all()

    def on_failure(self, row_id: str, error: str) -> None:
        """Run a failed episode again."""
        with self._condition:
            self._ended(row_id)
            self._retry(row_id, f"it raised:\n{error}")

    def on_tick(self) -> None:
        """Stop rows past their deadline."""
        if self._row_deadline is None:
            return
        with self._condition:
            now = time.monotonic()
            for row_id, started in self._running.items():
                if now - started > self._row_deadline and row_id not in self._cut_at:
                    self._cut_at[row_id] = now
                    self._worker.cut(row_id, self, "row_deadline")
            try:
                self._worker.check_cut_rows(self._cut_at)
            except WorkerError as error:
                self._fail(error)

    def on_death(self, error: WorkerError) -> None:
        """Hand the worker's death to the caller."""
        with self._condition:
            self._fail(error)

    def _ended(self, row_id: str) -> None:
        del self._running[row_id]
        self._cut_at.pop(row_id, None)

    def _start_rows(self) -> None:
        while self._waiting and len(self._running) < self._max_concurrent_rows:
            row_id = self._waiting.pop()
            self._running[row_id] = time.monotonic()
            seed = derive_seed(self._seed, row_id, self._attempts[row_id])
            self._worker.submit(
                RowRequest(row_id, self._prompts[row_id], row_id, self._temperature, seed), self
            )

    def _retry(self, row_id: str, why: str) -> None:
        self._attempts[row_id] += 1
        if self._attempts[row_id] >= self._max_attempts:
            self._fail(
                EvaluationError(
                    f"evaluation: prompt {self._prompts[row_id].id} failed {self._attempts[row_id]} times; "
                    f"the last time {why}"
                )
            )
            return
        self._waiting.append(row_id)
        self._start_rows()

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        self._condition.notify_all()
