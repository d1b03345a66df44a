"""The study's CSV files: a finished cell is appended at once, so that an interrupted study goes on where it stopped."""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import get_type_hints

from torchrl_copc.study.plan import Cell
from torchrl_copc.study.train import Scores


@dataclass(frozen=True)
class Run:
    """One seed of one cell. The numbers are those of :class:`~torchrl_copc.study.train.Scores`."""

    task: str
    model: str
    method: str
    lag: int
    learning_rate: float
    batches: int
    seed: int
    score: float
    final: float
    whole: float
    kept_fraction: float
    ess: float
    outside_fraction: float


def runs_of(cell: Cell, scores: Scores) -> list[Run]:
    """One run for each seed."""
    assert cell.rate is not None
    numbers = {f.name: getattr(scores, f.name).double() for f in fields(scores)}
    return [
        Run(
            cell.part.task,
            cell.part.model,
            cell.method,
            cell.lag,
            cell.rate,
            cell.part.batches,
            seed,
            **{name: round(float(x[i]), 6) for name, x in numbers.items()},
        )
        for i, seed in enumerate(cell.seeds)
    ]


class Records:
    """A CSV file of runs.

    Args:
        path: the file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: list[Run] = []
        if path.exists():
            types = get_type_hints(Run)
            with path.open(newline="") as file:
                self.runs = [Run(**{k: types[k](v) for k, v in row.items()}) for row in csv.DictReader(file)]

    def of(self, cell: Cell) -> list[Run]:
        """The runs of a cell that are there, in the order of its seeds."""
        key = cell.part.task, cell.part.model, cell.method, cell.lag, cell.rate, cell.part.batches
        found = {
            run.seed: run
            for run in self.runs
            if (run.task, run.model, run.method, run.lag, run.learning_rate, run.batches) == key
        }
        return [found[seed] for seed in cell.seeds if seed in found]

    def rest(self, cell: Cell) -> Cell:
        """The same cell with the seeds that are missing."""
        there = {run.seed for run in self.of(cell)}
        return replace(cell, seeds=tuple(seed for seed in cell.seeds if seed not in there))

    def append(self, runs: list[Run]) -> None:
        """Add the runs of a cell, in memory and in one write to the file."""
        new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, [f.name for f in fields(Run)], lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerows(asdict(run) for run in runs)
        self.runs += runs
