"""A whole short run of the maths command: real engine, sandbox, verification, learner and pushes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
COMMAND = [
    sys.executable,
    str(ROOT / "scripts/train_math.py"),
    "total_versions=2",
    "collector.batch_rows=32",
    "collector.max_staleness=1",
    "learner.critic_warmup_batches=0",
    "evaluation.num_questions=24",
    "engine.max_num_seqs=32",
    "task.train.size=600",
    "run_name=short",
]


def sandboxes() -> set[int]:
    """Processes of the sandbox on this machine."""
    return {p.pid for p in psutil.process_iter(["cmdline"]) if "guest.server" in (p.info["cmdline"] or [])}


def test_two_batches_train_and_leave_no_process_behind(tmp_path):
    before = sandboxes()
    done = subprocess.run(
        [*COMMAND, f"run_root={tmp_path}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "   2/2" in done.stdout and "tool " in done.stdout
    run = tmp_path / "short"
    report = json.loads((run / "report.json").read_text())
    for part in ("before", "after"):
        for metric in (
            "reward",
            "correct",
            "code_rate",
            "tool_calls",
            "tool_errors",
            "verification_timeouts",
        ):
            assert report[part][metric]["n"] == 24
        assert report[part]["reward"]["mean"] == report[part]["correct"]["mean"] <= 1.0
    *_, last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert 0 < last["row_seconds_tool"] < last["row_seconds_total"]
    assert last["code_rate"] > 0 and last["tool_timeouts"] == 0
    transcript = (run / "transcripts/after.txt").read_text()
    assert "«<user>" in transcript and r"\boxed{" in transcript
    assert not [p for p in sandboxes() - before if psutil.pid_exists(p)]
