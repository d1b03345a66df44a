"""Whole runs of the command a user starts: real engine, retriever, learner and pushes, on the shipped model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

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


def resume(*overrides: str) -> str:
    """Without the settings of the run: it brings its own."""
    return finish([sys.executable, str(ROOT / "scripts/train_search.py"), *overrides])


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


def run_until(marker: str, *overrides: str) -> int:
    """Send SIGTERM at the first line with ``marker``; return the exit code."""
    process = subprocess.Popen(
        command(*overrides), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ
    )
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if marker in line:
            process.send_signal(signal.SIGTERM)
            break
    rest, _ = process.communicate(timeout=300)
    assert process.returncode == 143, "".join(seen)[-3000:] + rest[-3000:]
    return process.returncode


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def resumed_run(tmp_path_factory) -> Path:
    """Stopped by SIGTERM after its second batch, then resumed to its sixth."""
    root = tmp_path_factory.mktemp("runs")
    run_until("   2/6", f"run_root={root}", "run_name=stopped", "total_versions=6")
    stopped_at = json.loads(next((root / "stopped/checkpoints").glob("version_*/meta.json")).read_text())[
        "version"
    ]
    assert 2 <= stopped_at < 6
    resume(f"resume={root}/latest", "total_versions=6")
    return root / "stopped"


def test_prompts_of_a_resumed_run_are_those_of_the_uninterrupted_order_each_once(resumed_run):
    from torchrl_copc.collectors.prompts import PromptStream
    from torchrl_copc.envs.search.factbook import load_questions
    from torchrl_copc.training.checkpoint import find_checkpoint

    consumed = lines(resumed_run / "consumed.jsonl")
    assert [entry["version"] for entry in consumed] == [1, 2, 3, 4, 5, 6]
    rows = [row for entry in consumed for row in entry["row_id"]]
    assert max(Counter(rows).values()) == 1 and len(rows) == 6 * BATCH_ROWS

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
    assert "«<user>" in (resumed_run / "transcripts/after.txt").read_text()
    metrics = lines(resumed_run / "metrics.jsonl")
    assert all(entry["push_noise_max"] < 1e-3 for entry in metrics if "push_noise_max" in entry)
    assert metrics[-1]["kept_fraction"] > 0.5
    assert {key for key, _ in CURVES} <= metrics[-1].keys()


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


def test_two_learner_ranks_train_on_one_engine(tmp_path):
    out = run(
        f"run_root={tmp_path}", "total_versions=2", "run_name=two", "learner.critic_warmup_batches=0", ranks=2
    )
    assert "2/2" in out
    assert sum(len(entry["row_id"]) for entry in lines(tmp_path / "two/consumed.jsonl")) == 2 * BATCH_ROWS
    assert lines(tmp_path / "two/metrics.jsonl")[-1]["responses"] == BATCH_ROWS
