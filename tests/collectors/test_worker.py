"""The worker process: start-up, calls, deaths on either side."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import ExitingEngine, FailingEngine, HangingEngine, ScriptedEngine, ScriptedEnv, make_prompts

from torchrl_copc.collectors.engine import EngineDeadError, WeightUpdate
from torchrl_copc.collectors.worker import RolloutWorker, WorkerError
from torchrl_copc.collectors.worker_process import RowRequest, _Running, _Server, derive_seed
from torchrl_copc.trajectory import Episode

ROOT = Path(__file__).parents[2]


class Sink:
    def __init__(self) -> None:
        self.episodes: list[Episode] = []
        self.failures: list[tuple[str, str]] = []
        self.deaths: list[WorkerError] = []

    def on_row(self, episode: Episode) -> None:
        self.episodes.append(episode)

    def on_failure(self, row_id: str, error: str) -> None:
        self.failures.append((row_id, error))

    def on_tick(self) -> None:
        pass

    def on_death(self, error: WorkerError) -> None:
        self.deaths.append(error)


def wait_for(condition, timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def group_is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutWorker]:
    with RolloutWorker(
        ScriptedEngine, ScriptedEnv, log_path=tmp_path_factory.mktemp("run") / "worker.log"
    ) as worker:
        yield worker


def request(index: int = 0, **script) -> RowRequest:
    return RowRequest(f"row{index}", make_prompts(index + 1, **script)[index], f"row{index}", 1.0, seed=7)


def test_an_episode_arrives_with_the_ids_that_the_engine_saw(worker: RolloutWorker) -> None:
    sink = Sink()
    worker.submit(request(turns=3, tokens=4), sink)
    wait_for(lambda: sink.episodes)
    episode = sink.episodes[0]
    assert (episode.row_id, episode.prompt.id, episode.num_turns, episode.terminated) == (
        "row0",
        "p0",
        3,
        True,
    )
    assert len(episode.token_ids) == 3 * (3 + 4)
    assert len(set(episode.token_ids[3:6])) == 3
    assert episode.token_ids[3] != episode.token_ids[10], "every turn draws its own seed"
    assert episode.timings["total"] >= episode.timings["engine"] > 0


def test_a_bug_in_a_tool_fails_its_row_only(worker: RolloutWorker) -> None:
    sink = Sink()
    worker.submit(request(0, fault="bug"), sink)
    worker.submit(request(1), sink)
    wait_for(lambda: sink.episodes and sink.failures)
    assert sink.failures[0][0] == "row0"
    assert "KeyError: 'a bug in a tool'" in sink.failures[0][1]
    assert sink.episodes[0].row_id == "row1"


def test_cancelled_rows_never_arrive_and_leave_the_engine(worker: RolloutWorker) -> None:
    sink = Sink()
    worker.attach(sink)
    for index in range(3):
        worker.submit(request(index, tokens=50, delay=2.0), sink)
    wait_for(lambda: worker.call("report")["running"] == 3)
    worker.cancel("row0", sink)
    wait_for(lambda: worker.call("report")["running"] == 2)
    worker.detach(sink)
    wait_for(lambda: worker.call("report")["running"] == 0)
    assert sink.episodes == []


def test_a_cut_row_arrives_truncated_with_what_it_had_sampled(worker: RolloutWorker) -> None:
    sink = Sink()
    worker.submit(request(tokens=20, delay=2.0), sink)
    wait_for(lambda: worker.call("report")["running"] == 1)
    time.sleep(0.5)
    worker.cut("row0", sink, "row_deadline")
    wait_for(lambda: sink.episodes)
    episode = sink.episodes[0]
    assert (episode.truncated, episode.finish_reason) == (True, "row_deadline")
    assert 0 < episode.num_policy_tokens < 20


def test_a_cut_interrupts_a_tool_that_hangs(worker: RolloutWorker) -> None:
    sink = Sink()
    worker.submit(request(fault="hang once"), sink)
    wait_for(lambda: worker.call("report")["running"] == 0)
    time.sleep(0.2)
    worker.cut("row0", sink, "row_deadline")
    wait_for(lambda: sink.episodes)
    assert sink.episodes[0].truncated
    assert sink.episodes[0].num_policy_tokens == 3


def test_an_answer_that_a_cut_finds_complete_is_kept() -> None:
    server = _Server(None)  # type: ignore[arg-type]  # nothing is sent over the pipe
    server._env = ScriptedEnv()
    running = _Running(request(turns=1))

    class Engine(ScriptedEngine):
        async def generate(self, *args, **kwargs):
            completion = await super().generate(*args, **kwargs)
            running.cut_reason = "row_deadline"  # the deadline passes between the last token and the row
            return completion

    server._engine = Engine()
    server._running[0] = running
    episode = asyncio.run(server._play(0, running))
    assert (episode.terminated, episode.finish_reason, episode.reward) == (True, "stop", 1.0)


def test_no_row_vanishes_when_a_tool_cancels_itself_or_a_row_cannot_be_sent(worker: RolloutWorker) -> None:
    sink = Sink()
    worker.submit(request(0, fault="cancels itself once"), sink)
    worker.submit(request(1, fault="cannot be sent once"), sink)
    wait_for(lambda: len(sink.failures) == 2)
    failures = dict(sink.failures)
    assert "CancelledError" in failures["row0"]
    assert "pickle" in failures["row1"]


def test_calls_return_values_versions_and_errors(worker: RolloutWorker) -> None:
    assert worker.call("score", [[1, 2, 3]]) == [[-1.0, -1.0]]
    assert worker.call("update_weights", WeightUpdate(), version=3) == {"load": 0.0}
    assert worker.weight_version == worker.call("weight_version") == 3
    with pytest.raises(ValueError, match="broken") as caught:
        worker.call("fail", "broken")
    assert "in the rollout worker" in caught.value.__notes__[0]
    with pytest.raises(WorkerError, match=r"did not answer sleep\(\) within 0.2 s"):
        worker.call("sleep", 5.0, timeout=0.2)
    with pytest.raises(AttributeError):
        worker.call("no_such_method")
    with pytest.raises(ValueError, match="not a public method"):
        worker.call("_running")


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (FailingEngine, "start the engine.*no such checkpoint"),
        (ExitingEngine, "exit code 7 during: start the engine"),
    ],
)
def test_a_failed_start_names_the_stage(engine: type, message: str, tmp_path: Path) -> None:
    worker = RolloutWorker(engine, ScriptedEnv, log_path=tmp_path / "worker.log")
    with pytest.raises(WorkerError, match=f"(?s){message}"):
        worker.start()
    assert group_is_gone(worker.pid)


@pytest.mark.slow
def test_a_start_that_hangs_is_given_up_and_shows_the_log(tmp_path: Path) -> None:
    worker = RolloutWorker(HangingEngine, ScriptedEnv, log_path=tmp_path / "worker.log", stage_timeout=12.0)
    with pytest.raises(
        WorkerError, match=r"(?s)did not finish a stage in 12 s: start the engine.*a port that never opens"
    ):
        worker.start()
    assert group_is_gone(worker.pid)


def test_a_killed_worker_fails_calls_and_sinks_with_its_last_words(tmp_path: Path) -> None:
    with RolloutWorker(ScriptedEngine, ScriptedEnv, log_path=tmp_path / "worker.log") as worker:
        sink = Sink()
        worker.attach(sink)
        worker.submit(request(fault="process dies"), sink)
        with pytest.raises(
            WorkerError, match=r"(?s)killed by signal 9 \(SIGKILL\).*last words of the worker"
        ):
            worker.call("sleep", 30.0)
        wait_for(lambda: sink.deaths)
        assert not worker.alive
        with pytest.raises(WorkerError, match="SIGKILL"):
            worker.submit(request(), sink)
        with pytest.raises(WorkerError, match="SIGKILL"):
            worker.attach(sink)


def test_a_dead_engine_is_told_from_a_failed_call(tmp_path: Path) -> None:
    with RolloutWorker(ScriptedEngine, ScriptedEnv, log_path=tmp_path / "worker.log") as worker:
        sink = Sink()
        worker.attach(sink)
        with pytest.raises(EngineDeadError):
            worker.call("fail", "dead")
        wait_for(lambda: sink.deaths)
        assert "the rollout engine died: EngineDeadError: the engine core is gone" in str(sink.deaths[0])
        wait_for(lambda: group_is_gone(worker.pid))


def test_the_worker_ends_when_the_learner_is_killed(tmp_path: Path) -> None:
    script = (
        "import time; from fakes import *; from torchrl_copc.collectors.worker import RolloutWorker\n"
        f"worker = RolloutWorker(ScriptedEngine, ScriptedEnv, log_path={str(tmp_path / 'worker.log')!r}).start()\n"
        "print(worker.pid, flush=True); time.sleep(600)"
    )
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "collectors")])
    learner = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    try:
        assert learner.stdout is not None
        group = int(learner.stdout.readline())
        assert not group_is_gone(group)
        learner.send_signal(signal.SIGKILL)
        learner.wait(10)
        wait_for(lambda: group_is_gone(group), timeout=40)
    finally:
        learner.kill()
        learner.wait(10)


def test_shutdown_can_be_repeated_and_ends_every_process(tmp_path: Path) -> None:
    worker = RolloutWorker(ScriptedEngine, ScriptedEnv, log_path=tmp_path / "worker.log").start()
    worker.shutdown()
    worker.shutdown()
    assert group_is_gone(worker.pid)
    with pytest.raises(WorkerError, match="not running"):
        worker.call("weight_version")


def test_seeds_are_the_same_on_every_machine() -> None:
    assert derive_seed(0, "12.0") == 683086482
    assert len({derive_seed(0, f"{row}.0", turn) for row in range(100) for turn in range(5)}) == 500
