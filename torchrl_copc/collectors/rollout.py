"""The collector: many episodes at once in the rollout worker, batches of finished rows for the learner.

    PromptStream ── ticket ──> admit ── start ──> RolloutWorker ── row ──> check ──> group complete
                                 ^                                                        │
                         StalenessController                                        ReplayBuffer
            (may a group start? may a batch leave?) ──> batch, oldest first <──────────── ┘

Messages of the worker are handled on its reader thread, in the learner's process, while the main thread
trains. One lock guards the ledger. Nothing here decides about staleness;
:mod:`torchrl_copc.collectors.staleness` does.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from tensordict import NonTensorData, TensorDict
from torchrl.collectors import BaseCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import ConsumingSampler

from torchrl_copc.collectors.evaluation import EvaluationRun
from torchrl_copc.collectors.prompts import PromptStream, PromptTicket
from torchrl_copc.collectors.staleness import StalenessController, staleness_summary
from torchrl_copc.collectors.worker import RolloutWorker, WorkerError
from torchrl_copc.collectors.worker_process import RowRequest, derive_seed
from torchrl_copc.trajectory import (
    METADATA,
    POLICY_MASK,
    POLICY_VERSION,
    Episode,
    Prompt,
    RowError,
    check_row,
    metadata,
    oldest_version,
)

_STALL_SECONDS = 30.0  # nothing runs, nothing may start, no batch: somebody forgot to publish


class CollectorError(RuntimeError):
    """The run cannot go on: a prompt keeps failing, weights were not published, a worker hangs."""


class ChosenSampler(ConsumingSampler):
    """Hands out the rows it is told to, in that order; their slots in the buffer are free afterwards."""

    chosen: Sequence[int] = ()

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Indices of the chosen rows."""
        self._ensure_state(storage)
        index = torch.as_tensor(self.chosen, dtype=torch.long)
        self._sample_count[index] += 1
        self._live_mask[index] = False
        self._append_free_indices(index)
        return index, {}


@dataclass
class _GroupEntry:
    """A group from its start until it is consumed or discarded."""

    ticket: PromptTicket
    prompt: Prompt
    rows: dict[str, TensorDict] = field(default_factory=dict)
    slots: list[int] = field(default_factory=list)


class AsyncRolloutCollector(BaseCollector):
    """Collects token-exact rows asynchronously, never older than ``max_staleness`` versions when consumed.

    Iterating yields lists of ``batch_rows`` rows, oldest first. The learner's side of the contract: take a
    batch, train, call ``advance(version + 1)``, publish to the worker's engine the weights of
    :meth:`engine_version_for` that version.

    Args:
        worker: a started worker; it may serve other collectors before and after.
        prompts: the order of prompts.
        batch_rows: rows per batch.
        max_staleness: the bound in versions; 0 is the synchronous mode.
        lag: the engine is kept this many versions behind the learner; staleness is measured against the
            learner.
        group_size: rows per prompt, admitted, consumed and discarded together.
        max_concurrent_rows: episodes at once, defaults to ``2 * batch_rows``.
        row_deadline: seconds a row may run; ``None`` for no deadline.
        on_deadline: ``"cut"`` truncates the row and keeps it, ``"requeue"`` starts its prompt again.
            Truncated rows of groups larger than one are always re-queued with their group.
        max_attempts: times a prompt may fail (an exception in its episode, no policy token, a re-queue at the
            deadline) before the run stops and names it.
        temperature: of sampling, in training.
        seed: rows derive theirs from it and their id.

    Raises:
        ValueError: for settings that contradict each other.
        RowError: while iterating, for a row that must not be trained on (a NaN log-prob, ...).
        CollectorError: while iterating, when the run cannot go on.
        WorkerError: while iterating, when the worker or its engine died; :meth:`state_dict` still works.

    Example:
        see ``tests/collectors/test_rollout.py``; a collector needs a running worker.
    """

    total_frames = -1
    _iterator: Iterator[list[TensorDict]] | None = None

    def __init__(
        self,
        worker: RolloutWorker,
        prompts: PromptStream,
        *,
        batch_rows: int,
        max_staleness: int,
        lag: int = 0,
        group_size: int = 1,
        max_concurrent_rows: int | None = None,
        row_deadline: float | None = None,
        on_deadline: Literal["cut", "requeue"] = "cut",
        max_attempts: int = 3,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not 0 <= lag <= max_staleness:
            raise ValueError(
                f"lag={lag} needs max_staleness >= lag (it is {max_staleness}): rows are at least that old"
            )
        if on_deadline not in ("cut", "requeue"):
            raise ValueError(f"on_deadline={on_deadline!r} must be 'cut' or 'requeue'")
        if max_attempts < 1:
            raise ValueError(f"max_attempts={max_attempts} must be at least 1")
        self.worker = worker
        self.prompts = prompts
        self.lag = lag
        self.on_deadline = on_deadline
        self.max_attempts = max_attempts
        self.temperature = temperature
        self.seed = seed
        self.controller = StalenessController(
            batch_rows,
            max_staleness,
            group_size=group_size,
            max_concurrent_rows=max_concurrent_rows,
            row_deadline=row_deadline,
        )
        self._sampler = ChosenSampler()
        # Outstanding rows and the batch in hand: what the buffer can hold at once.
        self.buffer = ReplayBuffer(
            storage=LazyStackStorage((max_staleness + 2) * batch_rows), sampler=self._sampler
        )
        self._groups: dict[str, _GroupEntry] = {}
        self._cut_at: dict[str, float] = {}
        self._failures: Counter[int] = Counter()
        self._condition = threading.Condition(threading.RLock())
        self._error: Exception | None = None
        self._attached = False
        self._started = False
        self._stalled_seconds = 0.0
        self._staleness: Counter[int] = Counter()
        self._last_staleness: Counter[int] = Counter()
        self._tokens = 0
        self._wait_seconds = 0.0
        self._evaluations = 0

    @property
    def version(self) -> int:
        """Batches the learner has consumed."""
        return self.controller.version

    @property
    def batch_rows(self) -> int:
        """Rows per batch."""
        return self.controller.batch_rows

    def engine_version_for(self, version: int) -> int:
        """Version the engine should hold while the learner is at ``version``."""
        return max(0, version - self.lag)

    def start(self) -> None:
        """Begin to run episodes; iterating does it too.

        Raises:
            CollectorError: if the engine holds weights that no row may be sampled with.
        """
        with self._condition:
            if self._attached:
                return
            held = self.worker.weight_version
            if not self.version - self.controller.max_staleness <= held <= self.version:
                raise CollectorError(
                    f"the engine holds weights of version {held}, the learner is at version {self.version}; "
                    f"publish version {self.engine_version_for(self.version)} before collecting"
                )
            self.worker.attach(self)
            self._attached = self._started = True
            self._admit()

    def iterator(self) -> Iterator[list[TensorDict]]:
        """Yield batches for ever, each a list of ``batch_rows`` rows, oldest first.

        After :meth:`discard` the next one holds only the rows that fill the open places of the batch in hand.
        """
        while True:
            rows = self.take()
            assert rows is not None  # it waits as long as it takes
            yield rows

    def next(self) -> list[TensorDict]:
        """The next batch."""
        if self._iterator is None:
            self._iterator = iter(self)
        return next(self._iterator)

    def take(self, timeout: float | None = None) -> list[TensorDict] | None:
        """The next batch, or ``None`` when none can be formed in time; nothing is lost then.

        Args:
            timeout: seconds to wait; ``None`` waits as long as the run can go on.
        """
        if not self._started:
            self.start()
        began = time.monotonic()
        with self._condition:
            try:
                return self._wait_for_batch(None if timeout is None else began + timeout)
            finally:
                self._wait_seconds += time.monotonic() - began

    def advance(self, version: int) -> None:
        """The learner has consumed the batch in hand and is now at ``version``.

        Raises:
            ValueError: unless ``version`` is the current one plus one: versions count batches.
        """
        with self._condition:
            if version != self.version + 1:
                raise ValueError(
                    f"advance({version}) at version {self.version}: versions count consumed batches"
                )
            consumed = self.controller.advance()
            self._last_staleness = Counter()
            for group_id in consumed:
                for row in self._groups.pop(group_id).rows.values():
                    self._last_staleness.update(_token_staleness(row, version - 1))
            self._staleness.update(self._last_staleness)
            self._admit()

    def discard(self, rows: Sequence[TensorDict], *, requeue: bool = False) -> None:
        """Give back whole groups of the batch in hand, for example those without reward variance.

        The next batch from the iterator fills their places; :meth:`advance` refuses to go on before.

        Args:
            rows: every row of the groups to discard.
            requeue: start their prompts again instead of going on to new ones.

        Raises:
            ValueError: if a group is only partly in ``rows``.
        """
        with self._condition:
            members = Counter(metadata(row)["group_id"] for row in rows)
            for group_id, count in members.items():
                if count != self.controller.group_size:
                    raise ValueError(
                        f"discard got {count} of the {self.controller.group_size} rows of group {group_id}: "
                        "groups are discarded whole"
                    )
                if group_id not in self.controller.held_groups():
                    raise ValueError(f"discard: group {group_id} is not part of the batch in hand")
            for group_id in members:
                self.controller.discard(group_id, "requeued" if requeue else "discarded")
                entry = self._groups.pop(group_id)
                if requeue:
                    self.prompts.requeue(entry.ticket)
            self._admit()

    def evaluate(
        self,
        prompts: Sequence[Prompt],
        *,
        temperature: float = 0.0,
        samples: int = 1,
        timeout: float | None = None,
    ) -> list[TensorDict]:
        """Run episodes on the engine's present weights, next to the training episodes.

        No weights may be published before it returns; every token's version is checked. With a controlled
        ``lag`` the engine's weights are not the learner's newest. Rows come in the order of ``prompts``; none
        of them counts as started, consumed or stale.

        Args:
            prompts: the held-out tasks.
            temperature: of sampling; 0 is greedy.
            samples: episodes per prompt.
            timeout: seconds for all of them; ``None`` waits as long as the worker lives.

        Raises:
            EvaluationError: if a token was sampled by other weights, a prompt keeps failing, or time ran out.
            WorkerError: if the worker dies.
        """
        with self._condition:
            if isinstance(self._error, WorkerError):  # other errors are the ledger's, which is not used here
                raise self._error
            run = self._evaluations
            self._evaluations += 1
        evaluation = EvaluationRun(
            self.worker,
            [
                (prompt, f"eval{run}.{index}.{sample}")
                for index, prompt in enumerate(prompts)
                for sample in range(samples)
            ],
            temperature=temperature,
            seed=self.seed,
            max_concurrent_rows=self.controller.max_concurrent_rows,
            row_deadline=self.controller.row_deadline,
            max_attempts=self.max_attempts,
        )
        return evaluation.run(timeout)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed of the rows that start from now on (the order of prompts has its own).

        Returns:
            the seed that a next collector may use.
        """
        self.seed = seed
        return seed if static_seed else seed + 1

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Cancel the running episodes; the worker goes on, and :meth:`state_dict` still works."""
        with self._condition:
            attached, self._attached = self._attached, False
        if attached:
            self.worker.detach(self)

    def state_dict(self) -> OrderedDict[str, Any]:
        """The order's frontier, every row that is complete and not consumed, and the counters.

        Episodes in flight (and groups with one in flight) start again after a resume; a batch in hand that
        was not consumed is in the buffer again. Only plain containers, numbers, texts and tensors.
        """
        with self._condition:
            return OrderedDict(
                controller=self.controller.state_dict(),
                prompts=self.prompts.state_dict(),
                groups={
                    group_id: {
                        "ticket": (
                            self._groups[group_id].ticket.index,
                            self._groups[group_id].ticket.attempt,
                        ),
                        "rows": {name: _row_state(row) for name, row in self._groups[group_id].rows.items()},
                    }
                    for group_id in self.controller.finished_groups()
                },
                staleness=dict(self._staleness),
                tokens=self._tokens,
                wait_seconds=self._wait_seconds,
                evaluations=self._evaluations,
                seed=self.seed,
            )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`; call it before collecting.

        Raises:
            ValueError: if the settings or the data set are not those of the run.
        """
        with self._condition:
            if self._attached or self._groups:
                raise RuntimeError("load_state_dict must come before the collector starts")
            self.controller.load_state_dict(state_dict["controller"])
            self.prompts.load_state_dict(state_dict["prompts"])
            for group_id, state in state_dict["groups"].items():
                ticket = PromptTicket(*state["ticket"])
                entry = _GroupEntry(ticket, self.prompts.prompt(ticket))
                entry.rows = {name: _row_from_state(row) for name, row in state["rows"].items()}
                self._groups[group_id] = entry
                self._store(entry)
            self._staleness = Counter(state_dict["staleness"])
            self._tokens = state_dict["tokens"]
            self._wait_seconds = state_dict["wait_seconds"]
            self._evaluations = state_dict["evaluations"]
            self.seed = state_dict["seed"]

    def stats(self) -> dict[str, int | float | bool]:
        """Counters since the start of the run; staleness is over consumed policy tokens, in versions.

        ``staleness_*`` cover the whole run, ``batch_staleness_*`` the batch that :meth:`advance` consumed
        last.
        """
        with self._condition:
            counters = self.controller.counters
            names = ("started", "finished", "consumed", "requeued", "discarded", "cut", "failed", "empty")
            return {
                **{f"rows_{name}": counters[name] for name in names},
                "rows_running": self.controller.running_rows,
                "rows_buffered": len(self.buffer),
                "tokens": self._tokens,
                "wait_seconds": self._wait_seconds,
                "epoch": self.prompts.epoch,
                "policy_version": self.version,
                **{f"staleness_{name}": value for name, value in staleness_summary(self._staleness).items()},
                **{
                    f"batch_staleness_{name}": value
                    for name, value in staleness_summary(self._last_staleness).items()
                },
            }

    @property
    def staleness_histogram(self) -> dict[int, int]:
        """Consumed policy tokens of the run by their staleness in versions."""
        with self._condition:
            return dict(sorted(self._staleness.items()))

    # What the worker's reader thread calls.

    def on_row(self, episode: Episode) -> None:
        """An episode ended: check its row, and store its group once that is complete."""
        with self._guard():
            group_id = self.controller.group_of(episode.row_id)
            if group_id is None:  # discarded while its row was on the way
                return
            self._cut_at.pop(episode.row_id, None)
            if episode.num_policy_tokens == 0:
                self._start_again(
                    group_id, "empty", f"it ended ({episode.finish_reason}) without a policy token"
                )
                return
            if episode.truncated and self.controller.group_size > 1:
                self._start_again(
                    group_id, "requeued", f"a row of its group was truncated ({episode.finish_reason})"
                )
                return
            row = episode.to_row()
            check_row(row)
            self._tokens += episode.num_policy_tokens
            entry = self._groups[group_id]
            entry.rows[episode.row_id] = row
            if self.controller.finish(episode.row_id, oldest_version(row)):
                self._store(entry)
                self.prompts.settle(entry.ticket)
                self._failures.pop(entry.ticket.index, None)
                self._condition.notify_all()

    def on_failure(self, row_id: str, error: str) -> None:
        """An episode raised: its prompt starts again, a bounded number of times."""
        with self._guard():
            group_id = self.controller.group_of(row_id)
            if group_id is not None:
                self._start_again(group_id, "failed", f"an episode raised:\n{error}")

    def on_tick(self) -> None:
        """Look at deadlines and start what may start."""
        with self._guard():
            now = time.monotonic()
            for row_id in self.controller.expired(now):
                group_id = self.controller.group_of(row_id)
                if group_id is None:  # its group was re-queued for another of its rows
                    continue
                if self.on_deadline == "cut" and self.controller.group_size == 1:
                    self.controller.mark_cut(row_id)
                    self._cut_at[row_id] = now
                    self.worker.cut(row_id, self, "row_deadline")
                else:
                    self._start_again(
                        group_id,
                        "requeued",
                        f"it ran longer than row_deadline={self.controller.row_deadline} s",
                    )
            self.worker.check_cut_rows(self._cut_at)
            self._admit()

    def on_death(self, error: WorkerError) -> None:
        """Nothing will arrive any more: the learner gets the error at its next batch."""
        with self._condition:
            self._attached = False
            self._fail(error)

    # Internals; the lock is held.

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Take the lock; an error on the worker's reader thread becomes the learner's."""
        with self._condition:
            try:
                yield
            except (CollectorError, RowError, WorkerError) as error:
                self._fail(error)
            except Exception as error:
                failure = CollectorError(
                    f"a message of the rollout worker could not be handled: {type(error).__name__}: {error}"
                )
                failure.__cause__ = error
                self._fail(failure)

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        self._condition.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _admit(self) -> None:
        if not self._attached or self._error is not None:
            return
        while self.controller.can_admit(self.worker.weight_version):
            ticket = self.prompts.take()
            entry = _GroupEntry(ticket, self.prompts.prompt(ticket))
            row_ids = ticket.row_ids(self.controller.group_size)
            self._groups[ticket.group_id] = entry
            self.controller.admit(ticket.group_id, row_ids, self.worker.weight_version, time.monotonic())
            for row_id in row_ids:
                request = RowRequest(
                    row_id, entry.prompt, ticket.group_id, self.temperature, derive_seed(self.seed, row_id)
                )
                try:
                    self.worker.submit(request, self)
                except WorkerError as error:  # the learner may be in advance(), which did happen
                    self._fail(error)
                    return

    def _start_again(self, group_id: str, reason: str, why: str) -> None:
        """Re-queue the prompt of a running group, unless it has failed too often."""
        entry = self._groups[group_id]
        self._failures[entry.ticket.index] += 1
        if self._failures[entry.ticket.index] >= self.max_attempts:
            raise CollectorError(
                f"prompt {entry.prompt.id} failed max_attempts={self.max_attempts} times; the last time {why}"
            )
        for row_id in self.controller.discard(group_id, reason):
            self._cut_at.pop(row_id, None)
            self.worker.cancel(row_id, self)
        del self._groups[group_id]
        self.prompts.requeue(entry.ticket)

    def _store(self, entry: _GroupEntry) -> None:
        entry.slots = self.buffer.extend(list(entry.rows.values())).tolist()

    def _wait_for_batch(self, deadline: float | None) -> list[TensorDict] | None:
        while True:
            self._raise_error()
            if not self._attached:
                raise CollectorError("the collector was shut down")
            taken = self.controller.take()
            if taken is not None:
                self._stalled_seconds = 0.0
                return self._rows_of(taken)
            if self.controller.held_rows == self.batch_rows:
                raise CollectorError(
                    f"the batch of version {self.version} was not consumed: advance({self.version + 1}) "
                    "comes before asking for the next one"
                )
            if self._stalled_seconds > _STALL_SECONDS:
                raise CollectorError(
                    f"no row may start: the engine holds version {self.worker.weight_version}, the "
                    f"learner is at {self.version} with max_staleness={self.controller.max_staleness}; "
                    f"publish version {self.engine_version_for(self.version)}"
                )
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return None
            self._condition.wait(1.0 if deadline is None else min(1.0, deadline - now))
            # Only waiting counts, over any number of calls: between them the learner may be busy for long.
            waited = time.monotonic() - now
            self._stalled_seconds = 0.0 if self.controller.running_rows else self._stalled_seconds + waited

    def _rows_of(self, group_ids: Sequence[str]) -> list[TensorDict]:
        """Take the rows of these groups out of the buffer."""
        self._sampler.chosen = [slot for group_id in group_ids for slot in self._groups[group_id].slots]
        rows: list[TensorDict] = self.buffer.sample(len(self._sampler.chosen)).tensordicts
        oldest = min(oldest_version(row) for row in rows)
        if self.version - oldest > self.controller.max_staleness:
            raise CollectorError(
                f"a row of version {oldest} reached version {self.version} with "
                f"max_staleness={self.controller.max_staleness}: this is a bug in the staleness rules"
            )
        return rows


def _token_staleness(row: TensorDict, version: int) -> Counter[int]:
    age = version - row.get(POLICY_VERSION)[row.get(POLICY_MASK)]
    values, counts = age.unique(return_counts=True)
    return Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))


def _row_state(row: TensorDict) -> dict[str, Any]:
    return {**row.exclude(METADATA).to_dict(), METADATA: metadata(row)}


def _row_from_state(state: Mapping[str, Any]) -> TensorDict:
    tensors = {key: value for key, value in state.items() if key != METADATA}
    length = len(tensors[POLICY_VERSION])
    row = TensorDict(tensors, batch_size=[length])
    row.set(METADATA, NonTensorData(state[METADATA], batch_size=[length]))
    return row
