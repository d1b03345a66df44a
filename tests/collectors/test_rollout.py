"""The collector against a scripted engine in a real worker process."""

from __future__ import annotations

import io
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fakes import ScriptedEngine, ScriptedEnv, make_prompts
from tensordict import TensorDict

from torchrl_copc.collectors import rollout
from torchrl_copc.collectors.engine import WeightUpdate
from torchrl_copc.collectors.evaluation import EvaluationError
from torchrl_copc.collectors.prompts import PromptStream
from torchrl_copc.collectors.rollout import AsyncRolloutCollector, CollectorError
from torchrl_copc.collectors.worker import RolloutWorker, WorkerError
from torchrl_copc.trajectory import (
    POLICY_MASK,
    POLICY_VERSION,
    REWARD,
    TRUNCATED,
    Prompt,
    RowError,
    metadata,
    oldest_version,
)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutWorker]:
    """One worker for all tests: every collector hands it on without stopping it."""
    path = tmp_path_factory.mktemp("run") / "worker.log"
    with RolloutWorker(ScriptedEngine, ScriptedEnv, log_path=path) as worker:
        yield worker


@pytest.fixture
def collect(worker: RolloutWorker) -> Iterator[Any]:
    """Builds collectors on the shared worker and shuts them down after the test."""
    made = []

    def make(prompts: list[Prompt], **settings: Any) -> AsyncRolloutCollector:
        settings = {"batch_rows": 4, "max_staleness": 2, "seed": 5, **settings}
        stream = PromptStream(prompts, seed=1)
        made.append(AsyncRolloutCollector(worker, stream, **settings))
        return made[-1]

    publish(worker, 0)
    yield make
    for collector in made:
        collector.shutdown()


def publish(worker: RolloutWorker, version: int) -> None:
    worker.call("update_weights", WeightUpdate(), version)


def train(collector: AsyncRolloutCollector, batches: int, pause: float = 0.0) -> list[list[TensorDict]]:
    """A learner without a model: consume, advance, publish."""
    out = []
    for rows in collector:
        out.append(rows)
        time.sleep(pause)
        version = collector.version + 1
        collector.advance(version)
        if len(out) == batches:
            return out
        target = collector.engine_version_for(version)
        if target != collector.worker.weight_version:
            publish(collector.worker, target)
    raise AssertionError("the collector ended")


def prompt_ids(batches: list[list[TensorDict]]) -> list[str]:
    return [metadata(row)["prompt_id"] for rows in batches for row in rows]


def order(prompts: list[Prompt], count: int) -> list[str]:
    stream = PromptStream(prompts, seed=1)
    return [stream.prompt(stream.take()).id for _ in range(count)]


def check_each_place_once(
    prompts: list[Prompt], batches: list[list[TensorDict]], collector: AsyncRolloutCollector
) -> None:
    """Every place of the order up to the cursor was consumed once, or is in the checkpoint once."""
    consumed = {
        int(metadata(row)["group_id"].split("+")[0]): metadata(row)["prompt_id"]
        for rows in batches
        for row in rows
    }
    assert len(consumed) == sum(map(len, batches)), "a place was consumed twice"
    state = collector.state_dict()
    pending = [index for index, _ in state["prompts"]["pending"]]
    buffered = [group["ticket"][0] for group in state["groups"].values()]
    assert sorted([*consumed, *pending, *buffered]) == list(range(state["prompts"]["cursor"]))
    expected = order(prompts, state["prompts"]["cursor"])
    assert all(expected[index] == prompt_id for index, prompt_id in consumed.items())


def test_rows_arrive_once_oldest_first_and_within_the_bound(collect: Any) -> None:
    prompts = [*make_prompts(30, delay=0.01), *make_prompts(10, delay=0.15)]
    prompts = [Prompt(f"p{i}", p.question, p.answers, p.metadata) for i, p in enumerate(prompts)]
    collector = collect(prompts, max_staleness=2)
    batches = train(collector, 9, pause=0.02)
    assert [len(rows) for rows in batches] == [4] * 9
    assert max(Counter(prompt_ids(batches)).values()) == 1
    for version, rows in enumerate(batches):
        versions = [oldest_version(row) for row in rows]
        assert versions == sorted(versions)
        assert version - min(versions) <= 2
    row = batches[0][0]
    assert float(row.get(REWARD).sum()) == float(int(metadata(row)["prompt_id"][1:]) % 2 == 0)
    stats = collector.stats()
    assert stats["rows_consumed"] == 36
    assert stats["rows_started"] == 36 + stats["rows_running"] + stats["rows_buffered"]
    assert 0 < stats["staleness_max"] <= 2
    assert sum(collector.staleness_histogram.values()) == sum(
        int(row.get(POLICY_MASK).sum()) for rows in batches for row in rows
    )


def test_synchronous_mode_is_on_policy_and_consumes_the_exact_order(collect: Any) -> None:
    prompts = make_prompts(16)
    batches = train(collect(prompts, max_staleness=0), 4)
    for version, rows in enumerate(batches):
        assert sorted(prompt_ids([rows])) == sorted(order(prompts, 16)[4 * version : 4 * version + 4])
        for row in rows:
            assert row.get(POLICY_VERSION)[row.get(POLICY_MASK)].unique().tolist() == [version]


def test_synchronous_runs_repeat_token_by_token(collect: Any, worker: RolloutWorker) -> None:
    def tokens(seed: int) -> list[list[int]]:
        publish(worker, 0)
        collector = collect(make_prompts(16), max_staleness=0, seed=seed)
        batches = train(collector, 2)
        collector.shutdown()
        return sorted(row.get(("tokens", "full")).tolist() for rows in batches for row in rows)

    assert tokens(1) == tokens(1) != tokens(2)


def test_lag_keeps_rows_exactly_that_old_in_the_controlled_mode(collect: Any) -> None:
    collector = collect(make_prompts(40), max_staleness=2, lag=2)
    assert [collector.engine_version_for(version) for version in range(5)] == [0, 0, 0, 1, 2]
    batches = train(collector, 6)
    for version, rows in enumerate(batches):
        assert {oldest_version(row) for row in rows} == {max(0, version - 2)}
    with pytest.raises(ValueError, match="lag=3 needs max_staleness >= lag"):
        collect(make_prompts(4), lag=3)


def test_asking_twice_without_advancing_is_an_error(collect: Any) -> None:
    collector = collect(make_prompts(40))
    collector.next()
    with pytest.raises(ValueError, match="versions count consumed batches"):
        collector.advance(2)
    with pytest.raises(CollectorError, match=r"was not consumed: advance\(1\) comes before"):
        collector.next()


def test_a_wait_for_a_batch_can_be_left_and_taken_up_again(collect: Any) -> None:
    collector = collect(make_prompts(4, delay=0.3), max_staleness=0)
    given_up = 0
    while (rows := collector.take(timeout=0.05)) is None:
        given_up += 1
    assert given_up > 0 and sorted(prompt_ids([rows])) == ["p0", "p1", "p2", "p3"]
    assert collector.stats()["wait_seconds"] >= 0.05 * given_up
    collector.advance(1)
    publish(collector.worker, 1)
    assert len(collector.next()) == 4
    collector.shutdown()
    with pytest.raises(CollectorError, match="was shut down"):
        collector.take(timeout=0.05)


def test_a_learner_that_forgot_to_publish_is_told_however_it_waits(
    collect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "_STALL_SECONDS", 0.5)
    collector = collect(make_prompts(8), max_staleness=0)
    collector.next()
    collector.advance(1)
    time.sleep(0.6)  # the learner is busy: nobody waits
    assert collector.take(timeout=0.01) is None
    with pytest.raises(
        CollectorError, match=r"engine holds version 0, the learner is at 1.*publish version 1"
    ):
        for _ in range(100):
            assert collector.take(timeout=0.05) is None


def test_an_engine_with_foreign_weights_is_refused(collect: Any, worker: RolloutWorker) -> None:
    publish(worker, 57)
    with pytest.raises(CollectorError, match=r"holds weights of version 57.*publish version 0"):
        next(iter(collect(make_prompts(4))))


def test_a_failed_episode_starts_again_and_a_hopeless_prompt_stops_the_run(collect: Any) -> None:
    prompts = make_prompts(8, fault="bug once")
    collector = collect(prompts, max_staleness=0)
    batches = train(collector, 2)
    assert sorted(prompt_ids(batches)) == sorted(prompt.id for prompt in prompts)
    assert collector.stats()["rows_failed"] == 8
    hopeless = [*make_prompts(7), Prompt("p7", "q", ("a",), {"fault": "bug"})]
    publish(collector.worker, 0)
    with pytest.raises(CollectorError, match=r"(?s)prompt p7 failed max_attempts=3 times.*a bug in a tool"):
        train(collect(hopeless, max_staleness=0), 2)


def test_a_row_without_policy_tokens_is_dropped_counted_and_its_prompt_requeued(collect: Any) -> None:
    prompts = make_prompts(4, fault="nothing sampled once")
    collector = collect(prompts, max_staleness=0)
    batches = train(collector, 1)
    assert sorted(prompt_ids(batches)) == sorted(prompt.id for prompt in prompts)
    assert collector.stats()["rows_empty"] == 4


@pytest.mark.parametrize("value", ["nan", "-inf"])
def test_a_broken_log_prob_reaches_the_learner_with_row_and_token(collect: Any, value: str) -> None:
    collector = collect(make_prompts(1, fault=value), batch_rows=1)
    with pytest.raises(RowError, match=rf"row 0\.0: behaviour log-prob {value} at policy token 4"):
        collector.next()
    assert collector.state_dict()["prompts"]["pending"][0] == (0, 0)


@pytest.mark.parametrize("on_deadline", ["cut", "requeue"])
def test_rows_past_their_deadline_are_cut_or_requeued(collect: Any, on_deadline: str) -> None:
    prompts = make_prompts(4, fault="hang once")
    collector = collect(prompts, max_staleness=0, row_deadline=0.6, on_deadline=on_deadline)
    (rows,) = train(collector, 1)
    assert sorted(prompt_ids([rows])) == sorted(prompt.id for prompt in prompts)
    stats = collector.stats()
    truncated = [bool(row.get(TRUNCATED).any()) for row in rows]
    if on_deadline == "cut":
        assert truncated == [True] * 4
        assert {metadata(row)["finish_reason"] for row in rows} == {"row_deadline"}
        assert (stats["rows_cut"], stats["rows_requeued"]) == (4, 0)
    else:
        assert truncated == [False] * 4
        assert (stats["rows_cut"], stats["rows_requeued"]) == (0, 4)


def test_a_truncated_row_requeues_its_group(collect: Any) -> None:
    collector = collect(make_prompts(4, fault="hang once"), max_staleness=0, row_deadline=0.6, group_size=2)
    (rows,) = train(collector, 1)
    assert not any(bool(row.get(TRUNCATED).any()) for row in rows)
    assert Counter(Counter(metadata(row)["group_id"] for row in rows).values()) == {2: 2}
    assert collector.stats()["rows_requeued"] == 4


def test_discarded_groups_are_replaced_before_the_batch_is_consumed(collect: Any) -> None:
    prompts = make_prompts(12)
    collector = collect(prompts, group_size=2)
    batches = iter(collector)
    rows = next(batches)
    first = [row for row in rows if metadata(row)["group_id"] == metadata(rows[0])["group_id"]]
    with pytest.raises(ValueError, match="1 of the 2 rows"):
        collector.discard(first[:1])
    collector.discard(first)
    with pytest.raises(RuntimeError, match="2 of 4 rows"):
        collector.advance(1)
    more = next(batches)
    assert len(more) == 2
    assert metadata(more[0])["group_id"] not in {metadata(row)["group_id"] for row in rows}
    collector.advance(1)
    assert collector.stats()["rows_consumed"] == 4
    assert collector.stats()["rows_discarded"] == 2
    with pytest.raises(ValueError, match="not part of the batch in hand"):
        collector.discard(first)


def test_evaluation_pins_one_version_and_counts_as_nothing(collect: Any, worker: RolloutWorker) -> None:
    collector = collect(make_prompts(40, delay=0.02))
    train(collector, 2)
    publish(worker, 2)
    before = collector.stats()["rows_started"]
    held_out = [Prompt(f"p{100 + i}", "q", ("a",), {}) for i in range(25)]
    rows = collector.evaluate(held_out, samples=2)
    assert [metadata(row)["prompt_id"] for row in rows] == [p.id for p in held_out for _ in range(2)]
    assert {oldest_version(row) for row in rows} == {2}
    assert collector.stats()["rows_started"] - before <= 12, "evaluation rows are outside the ledger"
    assert len(collector.next()) == 4


def test_evaluation_disturbed_by_an_update_is_an_error(collect: Any, worker: RolloutWorker) -> None:
    import threading

    collector = collect(make_prompts(4))
    timer = threading.Timer(0.3, publish, (worker, 1))
    timer.start()
    with pytest.raises(EvaluationError, match="publish no weights while an evaluation runs"):
        collector.evaluate(make_prompts(3, delay=0.5), timeout=30.0)
    timer.join()
    with pytest.raises(EvaluationError, match="prompt p0 failed 3 times"):
        collector.evaluate(make_prompts(1, fault="bug"))


def test_evaluation_runs_beside_a_row_that_training_refused(collect: Any) -> None:
    collector = collect(make_prompts(1, fault="nan"), batch_rows=1)
    with pytest.raises(RowError):
        collector.next()
    assert len(collector.evaluate(make_prompts(2))) == 2


def test_evaluation_repeats_a_truncated_row_and_names_one_that_stays_so(collect: Any) -> None:
    collector = collect(make_prompts(4), row_deadline=0.4, max_attempts=2)
    (row,) = collector.evaluate(make_prompts(1, fault="hang first"))
    assert not bool(row.get(TRUNCATED).any())
    with pytest.raises(EvaluationError, match=r"(?s)prompt p0 failed 2 times.*row_deadline=0\.4 s"):
        collector.evaluate(make_prompts(1, fault="hang"))


def test_an_evaluation_whose_worker_hangs_ends(
    collect: Any, worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrl_copc.collectors.worker._CUT_GRACE", 0.5)
    collector = collect(make_prompts(4), row_deadline=0.2)
    with pytest.raises(WorkerError, match="event loop is blocked"):
        collector.evaluate(make_prompts(1, fault="block"), timeout=30.0)
    worker.call("weight_version", timeout=20.0)  # the loop is free again


def test_a_worker_that_dies_during_advance_fails_the_next_take_only(
    collect: Any, worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = collect(make_prompts(40), max_staleness=0)
    collector.next()
    publish(worker, 1)  # so that advance() starts rows

    def submit(*_: Any) -> None:
        raise WorkerError("gone")

    monkeypatch.setattr(worker, "submit", submit)
    collector.advance(1)
    assert collector.version == 1
    with pytest.raises(WorkerError, match="gone"):
        collector.next()


def test_an_unexpected_error_on_the_readers_thread_is_a_collector_error(collect: Any) -> None:
    collector = collect(make_prompts(40))

    def finish(*_: Any) -> bool:
        raise ZeroDivisionError("a bug")

    collector.controller.finish = finish
    with pytest.raises(CollectorError, match="ZeroDivisionError: a bug") as caught:
        collector.next()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("fault", ["cancels itself once", "cannot be sent once"])
def test_rows_that_cannot_end_start_again(collect: Any, fault: str) -> None:
    prompts = make_prompts(4, fault=fault)
    (rows,) = train(collect(prompts, max_staleness=0), 1)
    assert sorted(prompt_ids([rows])) == [prompt.id for prompt in prompts]


def test_the_seed_can_be_set_and_names_the_next(collect: Any) -> None:
    collector = collect(make_prompts(4))
    assert (collector.set_seed(7), collector.seed, collector.set_seed(7, static_seed=True)) == (8, 7, 7)


@pytest.mark.parametrize("taken", [False, True], ids=["between steps", "batch in hand"])
def test_a_resumed_run_consumes_the_uninterrupted_prompts_each_once(collect: Any, taken: bool) -> None:
    prompts = make_prompts(60, delay=0.03)
    collector = collect(prompts, max_staleness=1)
    first = train(collector, 2)
    publish(collector.worker, 2)
    if taken:
        collector.next()
    time.sleep(0.1)  # some rows are finished, some are running
    stream = io.BytesIO()
    torch.save(collector.state_dict(), stream)
    collector.shutdown()
    stream.seek(0)

    resumed = collect(prompts, max_staleness=1)
    resumed.load_state_dict(torch.load(stream, weights_only=True))
    assert resumed.version == 2
    second = train(resumed, 4)
    check_each_place_once(prompts, first + second, resumed)
    assert resumed.stats()["rows_consumed"] == 24


def test_a_killed_engine_is_named_and_no_row_is_lost_or_doubled(tmp_path: Any) -> None:
    """Finished rows stay, prompts in flight go back to the frontier; another worker finishes the order."""
    prompts = make_prompts(40)
    doomed = order(prompts, 10)[9]
    script = [
        Prompt(p.id, p.question, p.answers, {"fault": "engine dies", "delay": 0.3} if p.id == doomed else {})
        for p in prompts
    ]
    first: list[list[TensorDict]] = []
    with RolloutWorker(ScriptedEngine, ScriptedEnv, log_path=tmp_path / "first.log") as worker:
        collector = AsyncRolloutCollector(worker, PromptStream(script, 1), batch_rows=4, max_staleness=2)
        with pytest.raises(WorkerError, match="the rollout engine died: EngineDeadError"):
            for rows in collector:
                first.append(rows)
                collector.advance(collector.version + 1)
                publish(worker, collector.version)
        state = collector.state_dict()
    with RolloutWorker(ScriptedEngine, ScriptedEnv, log_path=tmp_path / "second.log") as worker:
        resumed = AsyncRolloutCollector(worker, PromptStream(prompts, 1), batch_rows=4, max_staleness=2)
        resumed.load_state_dict(state)
        publish(worker, resumed.version)
        assert len(resumed.buffer) == len(collector.buffer)
        second = train(resumed, 4)
        resumed.shutdown()
    check_each_place_once(prompts, first + second, resumed)
    assert doomed not in prompt_ids(first)
    assert doomed in prompt_ids(second)
