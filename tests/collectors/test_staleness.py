"""The staleness bound and liveness, on random schedules of the pure rules."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_copc.collectors import staleness
from torchrl_copc.collectors.staleness import StalenessController, staleness_summary


@dataclass(frozen=True)
class Schedule:
    """A random run: sizes, and how episodes and the learner behave."""

    batch_groups: int
    group_size: int
    max_staleness: int
    lag: int
    concurrent_groups: int
    slow_share: float
    failure_share: float
    discard_share: float
    publish_delay: float
    learner_busy: float
    seed: int


schedules = st.builds(
    lambda bound, lag, **rest: Schedule(max_staleness=bound, lag=min(lag, bound), **rest),
    batch_groups=st.integers(1, 5),
    group_size=st.integers(1, 3),
    bound=st.integers(0, 4),
    lag=st.integers(0, 4),
    concurrent_groups=st.integers(1, 16),
    slow_share=st.floats(0, 0.5),
    failure_share=st.floats(0, 0.3),
    discard_share=st.floats(0, 0.4),
    publish_delay=st.floats(0, 0.5),
    learner_busy=st.floats(0, 0.95),
    seed=st.integers(0, 2**32),
)


class Violation(AssertionError):
    """A row was consumed later than allowed."""


def simulate(schedule: Schedule, controller: StalenessController, batches: int = 12) -> int:
    """Run until ``batches`` are consumed; returns the largest staleness seen.

    Time is a list of running rows with random remaining work: each step one event happens. The engine learns
    of a new version some events after the learner made it.
    """
    rng = random.Random(schedule.seed)
    # row -> group, engine version when it started, work that remains
    running: dict[str, tuple[str, int, float]] = {}
    oldest: dict[str, int] = {}
    consumed: set[str] = set()
    started = 0
    engine = 0
    in_hand: list[str] = []
    worst = 0
    steps = 0
    while controller.version < batches:
        target = max(0, controller.version - schedule.lag)
        if engine < target and rng.random() >= schedule.publish_delay:
            engine += 1
        while controller.can_admit(engine):
            group, started = f"g{started}", started + 1
            rows = [f"{group}.{member}" for member in range(schedule.group_size)]
            controller.admit(group, rows, engine)
            for row in rows:
                slow = rng.random() < schedule.slow_share
                running[row] = (group, engine, rng.uniform(20, 200) if slow else rng.uniform(0, 3))
            assert controller.running_rows <= controller.max_concurrent_rows
        if running:
            row = min(running, key=lambda name: running[name][2])
            group, first, work = running[row]
            for name in list(running):
                running[name] = (running[name][0], running[name][1], running[name][2] - work)
            if rng.random() < schedule.failure_share:
                for name in controller.discard(group, "failed"):
                    del running[name]
            else:
                del running[row]
                # The first token may come later than the admission, under newer weights.
                oldest[group] = min(oldest.get(group, engine), rng.randint(first, engine))
                controller.finish(row, oldest[group])
        taken = controller.take() if not running or rng.random() >= schedule.learner_busy else None
        if taken is not None:
            in_hand += taken
            rejected = [group for group in taken if rng.random() < schedule.discard_share]
            for group in rejected:
                controller.discard(group, "discarded")
                in_hand.remove(group)
            if controller.held_rows == controller.batch_rows:
                version = controller.version
                worst = max(worst, *(version - oldest[group] for group in in_hand))
                if worst > controller.max_staleness:
                    raise Violation(f"staleness {worst} > {controller.max_staleness}")
                assert sorted(controller.advance()) == sorted(in_hand)
                assert not consumed & set(in_hand), "a group was consumed twice"
                consumed.update(in_hand)
                in_hand.clear()
        steps += 1
        assert steps < 300 * batches, f"no progress at version {controller.version}, engine {engine}"
    return worst


def make(schedule: Schedule, kind: type[StalenessController] = StalenessController) -> StalenessController:
    return kind(
        schedule.batch_groups * schedule.group_size,
        schedule.max_staleness,
        group_size=schedule.group_size,
        max_concurrent_rows=schedule.concurrent_groups * schedule.group_size,
    )


@settings(max_examples=300, deadline=None)
@given(schedules)
def test_no_row_is_consumed_late_and_no_schedule_deadlocks(schedule: Schedule) -> None:
    assert simulate(schedule, make(schedule)) <= schedule.max_staleness


class UnfinishedRowsInArrivalOrder(StalenessController):
    """Rule 2 over running rows only, batches in the order in which rows finished."""

    def _bound_survives(self, open_rows: int) -> bool:
        finished, self._finished_by_version = self._finished_by_version, Counter()
        try:
            return super()._bound_survives(open_rows)
        finally:
            self._finished_by_version = finished


class RowsDueNow(StalenessController):
    """Rule 2 without looking ahead: only rows due at this version are waited for."""

    def _bound_survives(self, open_rows: int) -> bool:
        due = self.version - self.max_staleness
        return not any(count for version, count in self._running_by_version.items() if version <= due)


class AdmissionAlone(StalenessController):
    def _bound_survives(self, open_rows: int) -> bool:
        return True


class LookAheadAlone(StalenessController):
    def admission_limit(self, engine_version: int) -> int:
        return 10**9


def slow_schedules(count: int) -> list[Schedule]:
    return [
        Schedule(
            batch_groups=4,
            group_size=1,
            max_staleness=2,
            lag=0,
            concurrent_groups=12,
            slow_share=0.6,
            failure_share=0.0,
            discard_share=0.0,
            publish_delay=0.0,
            learner_busy=0.5,
            seed=seed,
        )
        for seed in range(count)
    ]


@pytest.mark.parametrize("broken", [UnfinishedRowsInArrivalOrder, RowsDueNow, AdmissionAlone, LookAheadAlone])
def test_each_part_of_the_rules_is_needed(
    broken: type[StalenessController], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same schedules that the full rules survive break the bound, or hang, without one part."""
    for schedule in slow_schedules(60):
        simulate(schedule, make(schedule))
    if broken is UnfinishedRowsInArrivalOrder:
        monkeypatch.setattr(staleness, "_age", lambda group: 0)  # a stable sort keeps the order of arrival
    with pytest.raises(AssertionError, match=r"staleness|no progress"):
        for schedule in slow_schedules(60):
            simulate(schedule, make(schedule, broken))


def test_synchronous_mode_starts_one_batch_and_waits_for_the_new_weights() -> None:
    controller = StalenessController(batch_rows=3, max_staleness=0)
    rows = []
    while controller.can_admit(0):
        rows.append(f"r{len(rows)}")
        controller.admit(rows[-1], [rows[-1]], 0)
    assert len(rows) == 3
    for row in rows:
        controller.finish(row, 0)
    assert controller.take() == rows
    controller.advance()
    assert not controller.can_admit(0), "version 0 weights would make rows that are one version late"
    assert controller.can_admit(1)


def test_with_lag_the_engine_version_limits_admission() -> None:
    controller = StalenessController(batch_rows=2, max_staleness=3, max_concurrent_rows=100)
    assert controller.admission_limit(engine_version=0) == 8
    controller.version = 5
    assert (
        controller.admission_limit(engine_version=3) == 14
    )  # due at version 6: batches 5 and 6 have 4 places
    assert controller.admission_limit(engine_version=9) == controller.admission_limit(engine_version=5)


def test_batches_take_finished_rows_oldest_first() -> None:
    controller = StalenessController(batch_rows=2, max_staleness=4, max_concurrent_rows=10)
    for row, version in (("a", 0), ("b", 0), ("c", 0)):
        controller.admit(row, [row], version)
    controller.finish("c", 0)
    controller.finish("a", 2)
    controller.finish("b", 1)
    assert controller.take() == ["c", "b"]


def test_groups_stay_whole() -> None:
    controller = StalenessController(batch_rows=4, max_staleness=1, group_size=2, max_concurrent_rows=8)
    controller.admit("g", ["g.0", "g.1"], 0)
    controller.admit("h", ["h.0", "h.1"], 0)
    assert controller.finish("g.0", 0) is False
    assert controller.finish("h.0", 0) is False
    assert controller.finish("g.1", 0) is True
    assert controller.take() is None
    assert controller.discard("h", "failed") == ["h.1"]
    assert controller.counters["failed"] == 2
    assert controller.started_rows == 2
    assert controller.group_of("h.1") is None


def test_discarded_places_of_a_batch_must_be_filled_before_it_is_consumed() -> None:
    controller = StalenessController(batch_rows=2, max_staleness=1, max_concurrent_rows=10)
    for row in "abc":
        controller.admit(row, [row], 0)
        controller.finish(row, 0)
    assert controller.take() == ["a", "b"]
    controller.discard("a", "discarded")
    with pytest.raises(RuntimeError, match="1 of 2 rows"):
        controller.advance()
    assert controller.take() == ["c"]
    assert controller.advance() == ["b", "c"]


def test_rows_expire_by_the_given_clock_once_they_are_not_cut_yet() -> None:
    controller = StalenessController(batch_rows=2, max_staleness=1, row_deadline=10.0)
    controller.admit("a", ["a"], 0, now=100.0)
    controller.admit("b", ["b"], 0, now=105.0)
    assert controller.expired(110.0) == []
    assert controller.expired(111.0) == ["a"]
    controller.mark_cut("a")
    assert controller.expired(111.0) == []
    assert controller.expired(116.0) == ["b"]


def test_a_row_older_than_the_engine_said_is_refused() -> None:
    controller = StalenessController(batch_rows=2, max_staleness=4)
    controller.version = 3
    controller.admit("a", ["a"], 2)
    with pytest.raises(ValueError, match="version labels cannot be trusted"):
        controller.finish("a", 1)


def test_the_state_keeps_finished_rows_and_forgets_running_ones() -> None:
    controller = StalenessController(batch_rows=2, max_staleness=2, max_concurrent_rows=10)
    for row in "abcde":
        controller.admit(row, [row], 0)
    for row in "cab":
        controller.finish(row, 0)
    assert controller.take() == ["a", "b"]
    resumed = StalenessController(batch_rows=2, max_staleness=2, max_concurrent_rows=10)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.running_rows == 0
    assert resumed.started_rows == 3
    assert resumed.take() == ["a", "b"], "a batch in hand at the checkpoint is handed out again"
    resumed.advance()
    assert resumed.outstanding_rows == 1


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"batch_rows": 5, "max_staleness": 1, "group_size": 2}, "not a multiple of group_size=2"),
        ({"batch_rows": 4, "max_staleness": -1}, "max_staleness=-1"),
        ({"batch_rows": 4, "max_staleness": 1, "group_size": 4, "max_concurrent_rows": 3}, "none can start"),
        ({"batch_rows": 4, "max_staleness": 1, "row_deadline": 0.0}, "row_deadline=0.0"),
        ({"batch_rows": 0, "max_staleness": 1}, "batch_rows=0"),
    ],
)
def test_contradicting_settings_are_named(settings_: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StalenessController(**settings_)


def test_summary_of_a_histogram() -> None:
    assert staleness_summary({}) == {"mean": 0.0, "p50": 0.0, "p95": 0.0, "max": 0.0}
    assert staleness_summary({0: 10, 2: 90, 7: 5}) == pytest.approx(
        {"mean": (180 + 35) / 105, "p50": 2.0, "p95": 2.0, "max": 7.0}
    )
