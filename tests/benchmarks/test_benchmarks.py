"""The benchmark of the scan runs and its kernels are exact; times are for people, not for tests."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scan.py"


@pytest.mark.slow
def test_the_quick_benchmark_prints_its_table_and_kernels_are_exact() -> None:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick"], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    kernels = {"torch"} | ({"numba"} if importlib.util.find_spec("numba") else set())
    scans = {"python loop", "python loop of TorchRL's V-trace"} | {f"backward_scan, {k}" for k in kernels}
    estimates = {"TorchRL vtrace_advantage_estimate", "TorchRL vec_generalized_advantage_estimate"}
    estimates |= {f"copc_advantage_estimate, {k}" for k in kernels}

    tables = result.stdout.split(" steps, float32\n")[1:]
    assert len(tables) == 2
    for table in tables:
        row = re.compile(r"^(.+?)\s+([\d.]+)((?:\s+[\d.]+x)+)(?:\s+(\de-\d\d))?$", re.MULTILINE)
        rows = {name: (float(ms), error) for name, ms, _, error in row.findall(table)}
        assert rows.keys() == scans | estimates
        assert all(ms > 0 for ms, _ in rows.values())
        assert all(float(rows[name][1]) < 1e-6 for name in scans)
