"""Whole runs of the command a user starts: real engine, retriever, learner and pushes, on the shipped model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from torchrl_copc.training.checkpoint import find_checkpoint
from torchrl_copc.training.report import CURVES

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
BATCH_ROWS = 16
SMALL = [
    f"collector.batch_rows={BATCH_ROWS}",
    "collector.max_staleness=2",
    "learner.critic_warmup_batches=1",
    "evaluation.num_questions=16",
    "engine.max_num_seqs=32",
]


def command(*overrides: str, ranks: int = 1) -> list[str]:
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, str(ROOT / "scripts/train_search.py"), *SMALL, *overrides]


def run(*overrides: str, ranks: int = 1) -> str:
    return finish(command(*overrides, ranks=ranks))


def resume(run_path: Path) -> list[str]:
    """Without the settings of the run: it brings its own."""
    return [sys.executable, str(ROOT / "scripts/train_search.py"), f"resume={run_path}"]


def saved_version(run_path: Path) -> int:
    return json.loads((find_checkpoint(run_path) / "meta.json").read_text())["version"]


def finish(arguments: list[str]) -> str:
    done = subprocess.run(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def run_until(marker: str, then: Callable[[subprocess.Popen], None], arguments: list[str]) -> tuple[int, str]:
    """Run to the first line with ``marker``, do something to the run, and return its exit code and output."""
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if marker in line:
            then(process)
            break
    rest, _ = process.communicate(timeout=300)
    return process.returncode, "".join(seen) + rest


def kill_engine(process: subprocess.Popen) -> None:
    """SIGKILL vLLM's own processes, as an out-of-memory killer would."""
    family = psutil.Process(process.pid).children(recursive=True)
    engine = [child for child in family if "VLLM" in " ".join(child.cmdline())]
    assert engine
    for child in engine:
        child.kill()


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def resumed_run(tmp_path_factory) -> Path:
    """Stopped by SIGTERM after its second batch; resumed, its engine killed after the fourth; resumed to the end."""
    root = tmp_path_factory.mktemp("runs")
    start = command(f"run_root={root}", "run_name=stopped", "total_versions=7")
    code, out = run_until("   2/7", lambda process: process.send_signal(signal.SIGTERM), start)
    assert code == 143 and "continue with resume=" in out, out[-4000:]
    assert saved_version(root / "stopped") in (2, 3)
    code, out = run_until("   4/7", kill_engine, again := resume(root / "latest"))
    assert code == 1 and "the rollout engine died" in out, out[-4000:]
    assert saved_version(root / "stopped") in (4, 5, 6)
    finish(again)
    return root / "stopped"


def test_prompts_of_a_resumed_run_are_those_of_the_uninterrupted_order_each_once(resumed_run):
    from torchrl_copc.collectors.prompts import PromptStream
    from torchrl_copc.envs.search.factbook import load_questions

    consumed = lines(resumed_run / "consumed.jsonl")
    assert [entry["version"] for entry in consumed] == [1, 2, 3, 4, 5, 6, 7]
    rows = [row for entry in consumed for row in entry["row_id"]]
    assert max(Counter(rows).values()) == 1 and len(rows) == 7 * BATCH_ROWS

    # Places of the uninterrupted order: consumed, still in the buffer, or to start again; each exactly once.
    extra = torch.load(find_checkpoint(resumed_run) / "extra.pt", weights_only=False)
    collector = extra["rollouts"]["collector"]
    places = [int(row.split("+")[0].split(".")[0]) for row in rows]
    places += [group["ticket"][0] for group in collector["groups"].values()]
    places += [index for index, _ in collector["prompts"]["pending"]]
    assert sorted(places) == list(range(collector["prompts"]["cursor"]))

    order = PromptStream(load_questions("train", hops=1), seed=0)
    expected = [order.prompt(order.take()).id for _ in range(len(places))]
    for entry in consumed:
        for row, prompt in zip(entry["row_id"], entry["prompt_id"], strict=True):
            assert expected[int(row.split("+")[0].split(".")[0])] == prompt


def test_the_report_has_what_a_reader_needs(resumed_run):
    report = json.loads((resumed_run / "report.json").read_text())
    for part in ("before", "after"):
        for metric in ("reward", "em", "search_rate"):
            assert report[part][metric].keys() == {"mean", "se", "n"} and report[part][metric]["n"] == 16
    assert 0 <= report["staleness"]["mean"] <= report["staleness"]["max"] <= 2
    assert report["tok_s"] > 0 and report["seed"] == 0 and len(report["config_hash"]) == 12
    assert (resumed_run.parent / "latest").resolve() == resumed_run.resolve()
    assert (resumed_run / "curves.png").stat().st_size > 10_000
    assert list((resumed_run / "tensorboard").rglob("events.out*"))
    assert "«<user>" in (resumed_run / "transcripts/after.txt").read_text()
    metrics = lines(resumed_run / "metrics.jsonl")
    assert all(entry["push_noise_max"] < 1e-3 for entry in metrics if "push_noise_max" in entry)
    assert metrics[-1]["kept_fraction"] > 0.5
    assert {key for key, _ in CURVES} - {"code_rate"} <= metrics[-1].keys()


def test_the_trained_model_differs_and_answers_a_question(resumed_run):
    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(resumed_run / "model")
    start = AutoModelForCausalLM.from_pretrained(ROOT / "torchrl_copc/assets/search_tiny")
    change = max(
        float((a - b).abs().max()) for a, b in zip(trained.parameters(), start.parameters(), strict=True)
    )
    assert 0 < change < 0.1
    ask = [sys.executable, str(ROOT / "scripts/ask.py"), "--run", str(resumed_run)]
    answer = subprocess.run(
        [*ask, "What is the capital of Kenya?"], capture_output=True, text=True, timeout=300, check=False
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert "«<user>What is the capital of Kenya?<assistant>»" in answer.stdout


def test_two_learner_ranks_train_beside_an_engine_held_one_version_back(tmp_path):
    overrides = ["total_versions=3", "run_name=two", "collector.lag=1", "learner.critic_warmup_batches=0"]
    assert "   3/3" in run(f"run_root={tmp_path}", *overrides, ranks=2)
    assert sum(len(entry["row_id"]) for entry in lines(tmp_path / "two/consumed.jsonl")) == 3 * BATCH_ROWS
    metrics = lines(tmp_path / "two/metrics.jsonl")
    assert all(entry["responses"] == BATCH_ROWS for entry in metrics)
    assert all(1 <= entry["staleness_mean"] <= entry["staleness_max"] <= 2 for entry in metrics[1:])


def test_two_ranks_train_without_a_critic_on_groups_whose_rewards_differ(tmp_path):
    """M2PO solves its threshold over both ranks; DAPO's dynamic sampling replaces groups without reward variance."""
    run(
        f"run_root={tmp_path}",
        "run_name=groups",
        "method=m2po",
        "total_versions=2",
        "collector.group_size=4",
        "collector.dynamic_sampling=true",
        ranks=2,
    )
    folder = tmp_path / "groups"
    consumed = lines(folder / "consumed.jsonl")
    for entry in consumed:
        members = Counter(entry["prompt_id"])
        assert len(entry["row_id"]) == BATCH_ROWS and all(count % 4 == 0 for count in members.values())
    metrics = lines(folder / "metrics.jsonl")
    assert (
        metrics[-1]["collector_rows_discarded"] > 0
    )  # the start model misses most questions four times out of four
    assert all("loss_critic" not in entry and entry["grad_norm_actor"] > 0 for entry in metrics)
    assert (folder / "curves.png").stat().st_size > 10_000
