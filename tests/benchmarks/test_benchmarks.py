"""Benchmarks run, and the scan's kernels are exact; times are for people, not for tests."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def quick(name: str) -> str:
    command = [sys.executable, str(BENCHMARKS / name), "--quick"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_the_quick_benchmark_prints_its_table_and_kernels_are_exact() -> None:
    kernels = {"torch"} | ({"numba"} if importlib.util.find_spec("numba") else set())
    scans = {"python loop", "python loop of TorchRL's V-trace"} | {f"backward_scan, {k}" for k in kernels}
    estimates = {"TorchRL vtrace_advantage_estimate", "TorchRL vec_generalized_advantage_estimate"}
    estimates |= {f"copc_advantage_estimate, {k}" for k in kernels}

    tables = quick("scan.py").split(" steps, float32\n")[1:]
    assert len(tables) == 2
    for table in tables:
        row = re.compile(r"^(.+?)\s+([\d.]+)((?:\s+[\d.]+x)+)(?:\s+(\de-\d\d))?$", re.MULTILINE)
        rows = {name: (float(ms), error) for name, ms, _, error in row.findall(table)}
        assert rows.keys() == scans | estimates
        assert all(ms > 0 for ms, _ in rows.values())
        assert all(float(rows[name][1]) < 1e-6 for name in scans)


@pytest.mark.slow
def test_the_quick_benchmark_of_the_diagnostics_prints_a_share_for_methods_of_each_kind() -> None:
    shares = re.findall(r"^(\w+)\s+[\d.]+\s+\d+\s+([\d.]+)%$", quick("diagnostics.py"), re.MULTILINE)
    assert [name for name, _ in shares] == ["copc", "brace", "grpo"]
    assert all(
        float(share) < 20 for _, share in shares
    )  # far above what is measured: only a blunder gets there
