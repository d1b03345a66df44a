"""Compare the methods on small tasks whose expected return is exact, with data of policies that are s versions old.

    python scripts/study.py                # about an hour of one core, writes runs/study
    python scripts/study.py --quick        # under a minute; runs every part and concludes nothing

Tasks, models and what is measured: docs/study.md. A study that was interrupted goes on where it stopped when it is
started again with the same output folder.

Every method is its file in configs/method, trained through the library's own estimator and loss, with these settings
of its config: loss, value estimator, critic, group size and all of the learner (whitening, aggregation, minibatches,
critic updates, warm-up, step size). What all share is set here and in torchrl_copc/study/plan.py: 64 responses a
batch in two minibatches (AReaL's number, so that no method takes more actor updates than another) and one learning
rate per task and model, chosen on other seeds. ppo_sync is ppo at s = 0 and is not run again.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch

from torchrl_copc.study.methods import method_config
from torchrl_copc.study.plan import FULL, QUICK, Cell, Part, cells
from torchrl_copc.study.records import Records, Run, runs_of
from torchrl_copc.study.report import write_report
from torchrl_copc.study.train import run_cell

CONFIGS = Path(__file__).parents[1] / "configs"


class Clock:
    """Time left, from the cells that this process has run, with those of tuning: the same task and model if any."""

    def __init__(self) -> None:
        self._spent: dict[tuple[str, str], list[float]] = defaultdict(list)

    def add(self, part: Part, seconds: float) -> None:
        self._spent[part.task, part.model].append(seconds)

    def left(self, waiting: list[Cell]) -> float:
        every = [x for spent in self._spent.values() for x in spent]
        times = [self._spent.get((cell.part.task, cell.part.model), every) for cell in waiting]
        return sum(sum(spent) / len(spent) for spent in times)


def run(cell: Cell, records: Records, clock: Clock) -> list[Run]:
    """The runs of a cell; those that are not in the file are made."""
    if (rest := records.rest(cell)).seeds:
        part, began = cell.part, time.monotonic()
        config = method_config(CONFIGS, cell.method, *cell.overrides())
        scores = run_cell(config, part.task, part.model, rest.seeds, imitation_steps=part.imitation_steps)
        records.append(runs_of(rest, scores))
        clock.add(part, time.monotonic() - began)
    return records.of(cell)


def choose_rate(part: Part, records: Records, clock: Clock) -> float:
    """The learning rate with the best mean score over three methods at lag 16, on seeds that are not used again."""

    def score(rate: float) -> float:
        runs = [one for cell in part.tuning_cells(rate) for one in run(cell, records, clock)]
        mean = sum(one.score for one in runs) / len(runs)
        print(f"  {part.name}: learning rate {rate:g} scores {mean:.3f}", flush=True)
        return mean

    return part.rates[0] if len(part.rates) == 1 else max(part.rates, key=score)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the methods on small tasks with exact scores.")
    parser.add_argument("--output", type=Path, default=Path("runs/study"), help="folder to write to")
    parser.add_argument("--quick", action="store_true", help="under a minute, to see that everything runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.output.mkdir(parents=True, exist_ok=True)
    parts = QUICK if args.quick else FULL
    tuning, records = (Records(args.output / name) for name in ("tuning.csv", "runs.csv"))

    clock = Clock()
    rates = {part: choose_rate(part, tuning, clock) for part in parts}
    todo = [replace(cell, rate=rates[cell.part]) for cell in cells(parts)]
    waiting = [cell for cell in todo if records.rest(cell).seeds]
    print(f"{len(todo)} cells, {len(todo) - len(waiting)} of them finished", flush=True)
    while waiting:
        cell = waiting.pop(0)
        runs = run(cell, records, clock)
        score = sum(one.score for one in runs) / len(runs)
        left = clock.left(waiting) / 60
        print(f"{cell.part.name} s={cell.lag} {cell.method}: {score:.3f}  ({left:.0f} min left)", flush=True)
    finished = [one for cell in todo for one in records.of(cell)]
    print(write_report(args.output, rates, tuning.runs, finished, quick=args.quick), end="")


if __name__ == "__main__":
    main()
