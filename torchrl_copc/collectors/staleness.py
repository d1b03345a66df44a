"""Every rule about staleness, as pure logic: no clock, no process, no tensor.

``version`` counts the batches the learner has consumed; a batch handed out at version ``v`` is consumed at
``v``. The bound: no consumed token is older than ``s = max_staleness`` versions. Two rules keep it.

1. *Admission.* With the engine at version ``e <= version``, a group of rows may start only while
   ``started_rows < (e + 1 + s) * batch_rows``, where ``started_rows = version * batch_rows + held +
   outstanding`` counts places in batches: discarded and re-queued rows are not in it, evaluation rows never
   were. (``e`` is the engine's version and not the learner's: it is what the new row's tokens will carry
   while weights are on their way, and with a controlled lag always.)
2. *Look-ahead.* A batch may be formed at version ``v`` only if afterwards, for every ``u`` in ``v..v+s``, the
   outstanding rows (running *or* finished) with ``oldest_version + s <= u`` number at most ``(u - v) *
   batch_rows``.

Why the bound holds. A row whose oldest token has version ``w`` is due at ``w + s``; call ``D(u)`` the
outstanding rows due at ``u`` or before, and ``open`` the places left in the batch of version ``v``. The
invariant is ``D(u) <= open + (u - v) * batch_rows`` for every ``u >= v``: what is due by ``u`` fits in the
batches up to ``u``.

- A running row counts with the engine's version at its admission. Its tokens are never older, so when it
  finishes it can only move to a later due date, which lowers ``D``.
- Admission at engine version ``e`` adds rows due at ``e + s``, which changes ``D(u)`` only for ``u >= e +
  s``; there, rule 1 gives ``D(u) <= outstanding <= (e + 1 + s) * batch_rows - version * batch_rows - held =
  open + (e + s - v) * batch_rows``.
- Forming the batch leaves ``open = 0``, and rule 2 is the invariant for ``u <= v + s``; beyond, every
  outstanding row is due and rule 1 has already bounded their number. Advancing to ``v + 1`` opens
  ``batch_rows`` places, which restates it.
- At ``u = v``, rule 2 says that no row due at ``v`` is left behind: nothing is ever consumed late.

Why it cannot deadlock. Suppose every outstanding row has finished. Taking the oldest first removes
``min(open, D(u))`` rows from every ``D(u)``, so the invariant before implies rule 2 after: a full batch can
be formed. If there are fewer than ``open`` rows, then ``started_rows < (version + 1) * batch_rows`` and rule
1 admits more as soon as ``e >= version - s``. Running rows end: by themselves, by failing, or at
``row_deadline``. (The tests break the bound, or hang, with rule 1 alone, with rule 2 alone, when only rows
due now are waited for, and when only running rows are counted while batches take rows in the order of their
arrival. Oldest first, counting running rows would do: the invariant then covers the finished ones. The rule
counts both, so that it does not lean on the order.)

Rows of one group are admitted, consumed and discarded together and are due when the oldest of them is; since
``batch_rows % group_size == 0``, every count above is a multiple of the group size and the argument is
unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Group:
    """Rows that share a group id; ``running`` maps those that have not finished to the time they started."""

    group_id: str
    sequence: int
    num_rows: int
    oldest_version: int
    running: dict[str, float]
    asked_to_stop: set[str] = field(default_factory=set)
    row_versions: list[int] = field(default_factory=list)


class StalenessController:
    """Decides when rows may start, which rows form a batch, and when a batch has to wait.

    Args:
        batch_rows: rows in one learner batch.
        max_staleness: the bound ``s``, in versions; 0 is the synchronous mode.
        group_size: rows per group; divides ``batch_rows``.
        max_concurrent_rows: running rows at any time, defaults to ``2 * batch_rows``. Without a cap every row
            would arrive exactly ``max_staleness`` versions late.
        row_deadline: seconds a row may run before :meth:`expired` names it; ``None`` for no deadline.

    Raises:
        ValueError: for settings that contradict each other.

    Example:
        >>> controller = StalenessController(batch_rows=2, max_staleness=0)
        >>> while controller.can_admit(engine_version=0):
        ...     row = f"row{controller.counters['started']}"
        ...     controller.admit(row, [row], engine_version=0)
        >>> controller.finish("row1", oldest_version=0), controller.take()
        (True, None)
        >>> controller.finish("row0", oldest_version=0), controller.take()
        (True, ['row0', 'row1'])
        >>> controller.advance()
        ['row0', 'row1']
        >>> controller.version, controller.can_admit(engine_version=0), controller.can_admit(engine_version=1)
        (1, False, True)
    """

    def __init__(
        self,
        batch_rows: int,
        max_staleness: int,
        *,
        group_size: int = 1,
        max_concurrent_rows: int | None = None,
        row_deadline: float | None = None,
    ) -> None:
        if max_concurrent_rows is None:
            max_concurrent_rows = 2 * batch_rows
        if batch_rows < 1 or group_size < 1:
            raise ValueError(f"batch_rows={batch_rows} and group_size={group_size} must be at least 1")
        if batch_rows % group_size:
            raise ValueError(
                f"batch_rows={batch_rows} is not a multiple of group_size={group_size}: groups stay whole"
            )
        if max_staleness < 0:
            raise ValueError(f"max_staleness={max_staleness} must be 0 (synchronous) or more")
        if max_concurrent_rows < group_size:
            raise ValueError(
                f"max_concurrent_rows={max_concurrent_rows} is below group_size={group_size}: none can start"
            )
        if row_deadline is not None and row_deadline <= 0:
            raise ValueError(f"row_deadline={row_deadline} must be positive, or None for no deadline")
        self.batch_rows = batch_rows
        self.max_staleness = max_staleness
        self.group_size = group_size
        self.max_concurrent_rows = max_concurrent_rows
        self.row_deadline = row_deadline
        self.version = 0
        self.counters: Counter[str] = Counter()
        self._sequence = 0
        self._running: dict[str, _Group] = {}
        self._finished: dict[str, _Group] = {}
        self._held: dict[str, _Group] = {}
        self._group_of_row: dict[str, _Group] = {}
        # Rows by oldest version, so that the look-ahead costs O(s) however many rows are outstanding.
        self._running_by_version: Counter[int] = Counter()
        self._finished_by_version: Counter[int] = Counter()
        self._finished_rows = 0

    @property
    def running_rows(self) -> int:
        """Rows that an engine is working on."""
        return len(self._group_of_row)

    @property
    def outstanding_rows(self) -> int:
        """Admitted rows that no batch holds yet, running or finished."""
        return self._running_by_version.total() + self._finished_rows

    @property
    def held_rows(self) -> int:
        """Rows of the batch in hand: taken at this version, not yet consumed by :meth:`advance`."""
        return sum(group.num_rows for group in self._held.values())

    @property
    def started_rows(self) -> int:
        """Places in batches that are spoken for, from the start of the run."""
        return self.version * self.batch_rows + self.held_rows + self.outstanding_rows

    def admission_limit(self, engine_version: int) -> int:
        """Value that ``started_rows`` may not exceed while the engine holds ``engine_version``."""
        return (min(engine_version, self.version) + 1 + self.max_staleness) * self.batch_rows

    def can_admit(self, engine_version: int) -> bool:
        """Whether one more group may start now (rule 1 and the cap on concurrent rows)."""
        return (
            self.started_rows + self.group_size <= self.admission_limit(engine_version)
            and self.running_rows + self.group_size <= self.max_concurrent_rows
        )

    def admit(self, group_id: str, row_ids: Sequence[str], engine_version: int, now: float = 0.0) -> None:
        """Start a group: its rows run from time ``now`` (seconds) on an engine holding ``engine_version``."""
        if not self.can_admit(engine_version):
            raise RuntimeError(f"group {group_id} may not start now; ask can_admit first")
        if len(row_ids) != self.group_size:
            raise ValueError(f"group {group_id} has {len(row_ids)} rows, group_size is {self.group_size}")
        if any(group_id in groups for groups in (self._running, self._finished, self._held)):
            raise ValueError(f"group {group_id} is already in the ledger")
        oldest = min(engine_version, self.version)
        group = _Group(group_id, self._sequence, len(row_ids), oldest, dict.fromkeys(row_ids, now))
        self._sequence += 1
        self._running[group_id] = group
        self._running_by_version[oldest] += group.num_rows
        for row_id in row_ids:
            self._group_of_row[row_id] = group
        self.counters["started"] += group.num_rows

    def finish(self, row_id: str, oldest_version: int) -> bool:
        """Record that a row is complete, with the version of its oldest token; true when its group is too.

        Raises:
            ValueError: if the row holds a token older than what the engine held when the row started.
        """
        group = self._group_of_row[row_id]
        if oldest_version < group.oldest_version:
            raise ValueError(
                f"row {row_id} has a token of version {oldest_version}, but the engine held version "
                f"{group.oldest_version} when the row started: the engine's version labels cannot be trusted"
            )
        del self._group_of_row[row_id]
        del group.running[row_id]
        group.row_versions.append(oldest_version)
        self.counters["finished"] += 1
        if group.running:
            return False
        del self._running[group.group_id]
        _subtract(self._running_by_version, group.oldest_version, group.num_rows)
        group.oldest_version = min(group.row_versions)
        self._add_finished(group)
        return True

    def discard(self, group_id: str, reason: str) -> list[str]:
        """Take a group out of the ledger, wherever it is, and count its rows under ``reason``.

        Places it held in the batch in hand become open again, to be filled by :meth:`take`.

        Returns:
            its rows that still run.
        """
        if group_id in self._running:
            group = self._running.pop(group_id)
            _subtract(self._running_by_version, group.oldest_version, group.num_rows)
            for row_id in group.running:
                del self._group_of_row[row_id]
        elif group_id in self._finished:
            group = self._finished.pop(group_id)
            self._remove_finished(group)
        elif group_id in self._held:
            group = self._held.pop(group_id)
        else:
            raise KeyError(
                f"group {group_id} is not in the ledger: consumed, discarded before, or never started"
            )
        self.counters[reason] += group.num_rows
        return list(group.running)

    def take(self) -> list[str] | None:
        """Fill the open places of this version's batch with finished groups, oldest first.

        Returns:
            the groups that joined the batch in hand, or ``None`` while there are too few finished rows or the
            look-ahead rule says to wait for running ones.
        """
        open_rows = self.batch_rows - self.held_rows
        if open_rows == 0 or self._finished_rows < open_rows or not self._bound_survives(open_rows):
            return None
        oldest_first = sorted(self._finished.values(), key=_age)
        taken: list[str] = []
        for group in oldest_first:
            if open_rows == 0:
                break
            open_rows -= group.num_rows
            taken.append(group.group_id)
            self._held[group.group_id] = self._finished.pop(group.group_id)
            self._remove_finished(group)
        return taken

    def advance(self) -> list[str]:
        """The learner has consumed the batch in hand: go to the next version.

        Returns:
            the groups that were consumed.

        Raises:
            RuntimeError: unless the batch is full; open places were promised to rows that may be due.
        """
        if self.held_rows != self.batch_rows:
            raise RuntimeError(
                f"version {self.version}: the batch in hand has {self.held_rows} of {self.batch_rows} rows; "
                "fill its open places (take) before consuming it"
            )
        consumed = list(self._held)
        self.counters["consumed"] += self.held_rows
        self._held.clear()
        self.version += 1
        return consumed

    def expired(self, now: float) -> list[str]:
        """Running rows past ``row_deadline`` that nobody has asked to stop yet."""
        if self.row_deadline is None:
            return []
        return [
            row_id
            for group in self._running.values()
            for row_id, started in group.running.items()
            if now - started > self.row_deadline and row_id not in group.asked_to_stop
        ]

    def mark_cut(self, row_id: str) -> None:
        """Count a running row as cut; it stays in the ledger until it arrives, truncated."""
        self._group_of_row[row_id].asked_to_stop.add(row_id)
        self.counters["cut"] += 1

    def group_of(self, row_id: str) -> str | None:
        """Group of a running row, ``None`` for a row that is not running."""
        group = self._group_of_row.get(row_id)
        return None if group is None else group.group_id

    def held_groups(self) -> list[str]:
        """Groups of the batch in hand."""
        return list(self._held)

    def finished_groups(self) -> list[str]:
        """Groups that are complete and not consumed, those of the batch in hand included."""
        return [*self._held, *self._finished]

    def state_dict(self) -> dict[str, Any]:
        """Version, counters and every complete group that is not consumed; running rows start again."""
        groups = sorted([*self._held.values(), *self._finished.values()], key=lambda group: group.sequence)
        return {
            "version": self.version,
            "counters": dict(self.counters),
            "finished": [(group.group_id, group.num_rows, group.oldest_version) for group in groups],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` saved into a controller that has not admitted anything."""
        if self._running or self._finished or self._held:
            raise RuntimeError("load_state_dict needs a controller without rows; make a new one")
        for group_id, num_rows, _ in state["finished"]:
            if num_rows != self.group_size:
                raise ValueError(
                    f"the checkpoint's group {group_id} has {num_rows} rows, group_size={self.group_size}; "
                    "resume with the group_size of the run"
                )
        self.version = int(state["version"])
        self.counters = Counter(state["counters"])
        for group_id, num_rows, oldest in state["finished"]:
            self._add_finished(_Group(group_id, self._sequence, num_rows, oldest, {}))
            self._sequence += 1

    def _add_finished(self, group: _Group) -> None:
        self._finished[group.group_id] = group
        self._finished_by_version[group.oldest_version] += group.num_rows
        self._finished_rows += group.num_rows

    def _remove_finished(self, group: _Group) -> None:
        _subtract(self._finished_by_version, group.oldest_version, group.num_rows)
        self._finished_rows -= group.num_rows

    def _bound_survives(self, open_rows: int) -> bool:
        """Rule 2, after the oldest ``open_rows`` finished rows have left."""
        left = self._running_by_version.copy()
        for version in sorted(self._finished_by_version):
            rows = self._finished_by_version[version]
            taken = min(rows, open_rows)
            open_rows -= taken
            left[version] += rows - taken
        horizon = range(self.version, self.version + self.max_staleness + 1)
        # Nothing can be due before this version (the invariant), but an old row must count rather than be
        # overlooked.
        due = sum(rows for version, rows in left.items() if version + self.max_staleness < self.version)
        for u in horizon:
            due += left[u - self.max_staleness]
            if due > (u - self.version) * self.batch_rows:
                return False
        return True


def _age(group: _Group) -> tuple[int, int]:
    return group.oldest_version, group.sequence


def _subtract(counter: Counter[int], key: int, count: int) -> None:
    counter[key] -= count
    if not counter[key]:
        del counter[key]


def staleness_summary(histogram: Mapping[int, int]) -> dict[str, float]:
    """Mean, median, 95th percentile and maximum of a histogram ``staleness in versions -> number of tokens``.

    Example:
        >>> staleness_summary({0: 3, 1: 1})
        {'mean': 0.25, 'p50': 0.0, 'p95': 1.0, 'max': 1.0}
    """
    total = sum(histogram.values())
    if total == 0:
        return {"mean": 0.0, "p50": 0.0, "p95": 0.0, "max": 0.0}

    def percentile(share: float) -> float:
        seen = 0
        for value in sorted(histogram):
            seen += histogram[value]
            if seen >= share * total:
                return float(value)
        return float(max(histogram))

    mean = sum(value * count for value, count in histogram.items()) / total
    largest = max(value for value, count in histogram.items() if count)
    return {"mean": mean, "p50": percentile(0.5), "p95": percentile(0.95), "max": float(largest)}
