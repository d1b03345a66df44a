"""The script in its quick form: it runs every part, continues where it stopped, and says that it concludes nothing."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from torchrl_copc.study.plan import FULL, QUICK, cells

SCRIPT = Path(__file__).parents[2] / "scripts" / "study.py"
COMMITTED = SCRIPT.parents[1] / "results" / "study"


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def study(output: Path) -> str:
    command = [sys.executable, str(SCRIPT), "--quick", "--output", str(output)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.slow
def test_quick_run_writes_everything_and_an_interrupted_one_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    said = study(out)
    assert "0 of them finished" in said and said.endswith("conclude nothing.\n")
    assert "conclude nothing" in (out / "README.md").read_text()
    assert (out / "study.png").read_bytes().startswith(b"\x89PNG")
    runs = read(out / "runs.csv")
    assert len(runs) == sum(len(cell.seeds) for cell in cells(QUICK))
    for run in runs:
        assert 0 < float(run["score"]) < 1 and 0 < float(run["ess"]) <= 1
        assert (float(run["ess"]) == 1) == (run["lag"] == "0")  # to the six digits of the file
        assert run["lag"] != "0" or float(run["outside_fraction"]) == 0

    # the second half of the file is lost, in the middle of a cell
    lines = (out / "runs.csv").read_text().splitlines(keepends=True)
    (out / "runs.csv").write_text("".join(lines[: len(lines) // 2]))
    finished = (len(lines) // 2 - 1) // 2
    assert f"{len(cells(QUICK))} cells, {finished} of them finished" in study(out)
    again = read(out / "runs.csv")
    assert len(again) == len(runs)
    names = "task", "model", "learning_rate", "method", "lag", "seed"
    scores = [{tuple(run[name] for name in names): float(run["score"]) for run in x} for x in (runs, again)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)


def test_committed_results_are_those_of_the_plan() -> None:
    planned = {
        (cell.part.task, cell.part.model, cell.method, str(cell.lag), str(seed))
        for cell in cells(FULL)
        for seed in cell.seeds
    }
    runs = read(COMMITTED / "runs.csv")
    names = "task", "model", "method", "lag", "seed"
    assert {tuple(run[name] for name in names) for run in runs} == planned
    chosen = {(run["task"], run["model"], run["learning_rate"]) for run in runs}
    assert len(chosen) == len(FULL)
    tried = {(run["task"], run["model"], run["learning_rate"]) for run in read(COMMITTED / "tuning.csv")}
    assert chosen <= tried and len(tried) == sum(len(part.rates) for part in FULL if len(part.rates) > 1)
    used = {run["seed"] for run in runs}
    assert used.isdisjoint(run["seed"] for run in read(COMMITTED / "tuning.csv"))
