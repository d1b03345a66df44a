"""The whole rollout path: real engine, real searches, weights pushed while episodes run."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from recording import RecordingEngine, make_env
from tensordict import TensorDict

from torchrl_copc.collectors.prompts import PromptStream
from torchrl_copc.collectors.rollout import AsyncRolloutCollector
from torchrl_copc.collectors.worker import RolloutWorker, WorkerError
from torchrl_copc.trajectory import LOG_PROBS, POLICY_MASK, POLICY_VERSION, TOKENS, Prompt, metadata

pytestmark = [pytest.mark.engine, pytest.mark.slow]
PROBE = [[5, 60, 61, 62, 9, 40, 17, 18, 19, 20], [7, 8, 30, 31, 32]]
PROMPTS = [Prompt(f"p{i}", f"Question {i}: which capital?", ("none",)) for i in range(400)]
BATCHES, BATCH_ROWS = 10, 20


@pytest.fixture(scope="module")
def config(tiny_model_dir: Path) -> Any:
    pytest.importorskip("vllm")
    from torchrl_copc.collectors.engine import VLLMEngineConfig

    return VLLMEngineConfig(model=str(tiny_model_dir), max_model_len=512)


@pytest.fixture(scope="module")
def worker(
    config: Any, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RolloutWorker]:
    with RolloutWorker(
        functools.partial(RecordingEngine, config),
        functools.partial(make_env, str(tiny_model_dir)),
        log_path=tmp_path_factory.mktemp("run") / "worker.log",
        stage_timeout=500.0,
    ) as worker:
        yield worker


def living_members(group: int) -> list[int]:
    """Processes of a group, without those that are dead and only wait for their parent to notice."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
    return members


def log_probs_of(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Log-prob of every token given those before it; 0 for the first."""
    ids = torch.tensor([token_ids])
    with torch.no_grad():
        log_probs = model(ids).logits[0, :-1].log_softmax(-1)
    return torch.cat([torch.zeros(1), log_probs.gather(-1, ids[0, 1:, None])[:, 0]])


def scorer(model: Any) -> Callable[[Sequence[Sequence[int]]], list[list[float]]]:
    return lambda sequences: [log_probs_of(model, list(ids))[1:].tolist() for ids in sequences]


@pytest.fixture(scope="module")
def run(worker: RolloutWorker, config: Any, tiny_model_dir: Path) -> tuple[list[TensorDict], list[Any]]:
    """200 rows in ten batches, other weights pushed after each; the rows and the model of every version."""
    from transformers import AutoModelForCausalLM

    from torchrl_copc.collectors.weights import WeightPublisher

    torch.set_num_threads(1)  # the engine has the other core
    models = [AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()]
    generator = torch.Generator().manual_seed(0)
    publisher = WeightPublisher(worker.call, config, PROBE)
    publisher.calibrate(dict(models[0].named_parameters()), 0, scorer(models[0]))
    collector = AsyncRolloutCollector(
        worker, PromptStream(PROMPTS), batch_rows=BATCH_ROWS, max_staleness=3, max_concurrent_rows=40
    )
    rows: list[TensorDict] = []
    for batch in collector:
        rows += batch
        version = collector.version + 1
        collector.advance(version)
        models.append(copy.deepcopy(models[-1]))
        with torch.no_grad():
            for parameter in models[-1].parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        publisher.publish(dict(models[-1].named_parameters()), version, scorer(models[-1]))
        if version == BATCHES:
            break
    collector.shutdown()
    publisher.close()
    return rows, models


def test_200_multi_turn_rows_hold_exactly_what_the_engine_saw(
    run: tuple[list[TensorDict], list[Any]], worker: RolloutWorker
) -> None:
    rows, _ = run
    requests = defaultdict(list)
    for request_id, prompt, sampled in worker.call("recorded"):
        if request_id.count("-") == 2:  # row, turn, key; the engine's own warm-up request has another form
            row_id, turn, _ = request_id.split("-")
            requests[row_id].append((int(turn), prompt, sampled))
    assert len({metadata(row)["row_id"] for row in rows}) == BATCHES * BATCH_ROWS
    for row in rows:
        tokens, mask = row.get(TOKENS).tolist(), row.get(POLICY_MASK).tolist()
        turns = sorted(requests[metadata(row)["row_id"]])
        assert [turn for turn, _, _ in turns] == list(range(metadata(row)["num_turns"]))
        sampled_at = set()
        for _, prompt, sampled in turns:
            assert tokens[: len(prompt)] == prompt
            # The environment drops ids after a stop, so that what it keeps is a prefix of what was sampled.
            kept = sum(itertools.takewhile(bool, mask[len(prompt) :]))
            assert 0 < kept <= len(sampled)
            assert tokens[len(prompt) : len(prompt) + kept] == sampled[:kept]
            sampled_at.update(range(len(prompt), len(prompt) + kept))
        assert sampled_at == {position for position, is_policy in enumerate(mask) if is_policy}
    turns_of = Counter(metadata(row)["num_turns"] for row in rows)
    assert sum(count for turns, count in turns_of.items() if turns > 1) > 0.8 * len(rows)
    assert sum(metadata(row)["num_tool_calls"] + metadata(row)["metrics"]["num_searches"] for row in rows) > 0


def test_rows_survive_updates_and_every_token_has_the_log_prob_of_its_version(
    run: tuple[list[TensorDict], list[Any]],
) -> None:
    rows, models = run
    for row in rows:
        mask = row.get(POLICY_MASK)
        versions = row.get(POLICY_VERSION)
        assert versions[mask].tolist() == sorted(versions[mask].tolist())
        assert versions[~mask].eq(-1).all()
    spanning = [row for row in rows if len(row.get(POLICY_VERSION)[row.get(POLICY_MASK)].unique()) > 1]
    assert len(spanning) >= 10, "episodes were in flight at the pushes"
    for row in spanning[:30]:
        mask, versions = row.get(POLICY_MASK), row.get(POLICY_VERSION)
        for version in versions[mask].unique().tolist():
            at = mask & (versions == version)
            expected = log_probs_of(models[version], row.get(TOKENS).tolist())
            torch.testing.assert_close(row.get(LOG_PROBS)[at], expected[at], atol=1e-4, rtol=0)
    for index, row in enumerate(rows):
        age = index // BATCH_ROWS - int(row.get(POLICY_VERSION)[row.get(POLICY_MASK)].min())
        assert 0 <= age <= 3


def test_evaluation_repeats_itself_on_one_version(
    run: tuple[list[TensorDict], list[Any]], worker: RolloutWorker
) -> None:
    collector = AsyncRolloutCollector(worker, PromptStream(PROMPTS), batch_rows=8, max_staleness=1)
    first, second = (collector.evaluate(PROMPTS[:12]) for _ in range(2))
    assert [row.get(TOKENS).tolist() for row in first] == [row.get(TOKENS).tolist() for row in second]
    assert all(row.get(POLICY_VERSION).max() == BATCHES for row in first)


def test_a_killed_engine_core_is_named_and_nothing_stays_behind(
    run: tuple[list[TensorDict], list[Any]], worker: RolloutWorker
) -> None:
    """Last: it ends the worker."""
    collector = AsyncRolloutCollector(worker, PromptStream(PROMPTS), batch_rows=8, max_staleness=10)
    collector.controller.version = BATCHES
    collector.start()
    consumed = []
    rows = collector.next()
    for pid in worker.call("core_pids"):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="the rollout engine died: EngineDeadError"):
        while True:
            collector.advance(collector.version + 1)
            consumed += rows
            rows = collector.next()
    state = collector.state_dict()
    places = [int(metadata(row)["group_id"]) for row in consumed]
    places += [group["ticket"][0] for group in state["groups"].values()]
    places += [index for index, _ in state["prompts"]["pending"]]
    assert sorted(places) == list(range(state["prompts"]["cursor"])), "a row was lost or doubled"
    worker.shutdown()
    deadline = time.monotonic() + 10.0  # a killed process takes a moment to give its memory back
    while living_members(worker.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert living_members(worker.pid) == []
