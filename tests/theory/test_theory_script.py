"""The script that draws the heat map, in its quick form."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "theory.py"
COMMITTED = SCRIPT.parents[1] / "results" / "theory"


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_quick_run_writes_figure_tables_and_summary(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = [sys.executable, str(SCRIPT), "--quick", "--output", str(tmp_path / "out")]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    out = tmp_path / "out"
    assert finished.stdout == (out / "summary.txt").read_text()
    assert (out / "gradient_mse.png").read_bytes().startswith(b"\x89PNG")

    cells = read(out / "gradient_mse.csv")
    assert len(cells) == 4 * 6 * 7
    for cell in cells:
        assert float(cell["relative_mse"]) > 0
        assert float(cell["relative_mse_se"]) > 0
    # eta_A = 0 is GAE in every form, so the four panels share that column
    gae = {(c["eta_p"], c["relative_mse"]) for c in cells if c["eta_a"] == "0.0"}
    assert len(gae) == 6
    # a narrower mask keeps fewer tokens
    kept = [float(c["kept_fraction"]) for c in cells[::7][:6]]
    assert kept == sorted(kept) and kept[0] < kept[-1] <= 1
    assert len(read(out / "sign_reversal.csv")) == 4 * 4


def test_committed_results_have_the_layout_the_script_writes() -> None:
    cells = read(COMMITTED / "gradient_mse.csv")
    assert len(cells) == 4 * 6 * 7
    for row in read(COMMITTED / "sign_reversal.csv"):
        falls = float(row["change_percent_at_0.25"]) < -2 * float(row["se_at_0.25"])
        rises = float(row["change_percent_at_0.75"]) > 2 * float(row["se_at_0.75"])
        assert row["seen"] == str(falls and rises)
