"""Verdicts follow from the numbers: paired differences, their errors, and the best form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from torchrl_copc.study.plan import FORMS, Part
from torchrl_copc.study.records import Records, Run
from torchrl_copc.study.report import Estimate, Results, verdict, write_report

PART = Part(
    task="risky",
    model="table",
    methods=("copc_wo_rc", "copc", "copc_continuation", "ppo"),
    lags=(0, 8, 64),
    seeds=3,
    batches=10,
    rates=(0.1,),
    critic_factor=1.0,
    tuning_seeds=2,
)
LUCK = (0.0, 0.3, 0.1)  # of the seeds, the same for every method


def runs(scores: dict[tuple[str, int], float], noise: float = 0.001) -> list[Run]:
    return [
        Run("risky", "table", method, lag, 0.1, 10, seed, *6 * (score + LUCK[seed] + noise * (-1) ** seed,))
        for (method, lag), score in scores.items()
        for seed in range(3)
    ]


def test_differences_are_paired_by_seed() -> None:
    results = Results({PART: 0.1}, runs({("copc", 8): 0.5}) + runs({("copc_wo_rc", 8): 0.4}, noise=0.0))
    difference = results.paired(PART, "copc", "copc_wo_rc", 8)
    # 0.101, 0.099 and 0.101: the seeds' luck, hundreds of times larger, is gone
    assert difference.mean == pytest.approx(0.1 + 0.001 / 3)
    assert difference.error == pytest.approx(
        ((2 * (0.001 * 2 / 3) ** 2 + (0.001 * 4 / 3) ** 2) / 2 / 3) ** 0.5
    )
    assert results.estimate(PART, "copc", 8).error > 50 * difference.error


@pytest.mark.parametrize(
    ("values", "sign", "text"),
    [
        ([0.1, 0.11, 0.12], 1, "+0.110 ± 0.006 (z 19.1)"),
        ([-0.1, -0.11, -0.12], -1, "-0.110 ± 0.006 (z -19.1)"),
        ([0.1, -0.1, 0.03], 0, "+0.010 ± 0.059 (z 0.2)"),
        ([0.0, 0.0, 0.0], 0, "0 (identical)"),
    ],
)
def test_a_difference_needs_more_than_two_standard_errors(values: list[float], sign: int, text: str) -> None:
    assert Estimate.of(values).sign == sign
    assert Estimate.of(values).signed() == text


def test_the_verdict_says_where_copc_helps_and_which_form_is_best() -> None:
    base = runs({("copc_wo_rc", lag): 0.4 for lag in PART.lags} | {("copc", 0): 0.4})
    others = {
        ("copc", 8): 0.45,
        ("copc", 64): 0.3,
        ("copc_continuation", 8): 0.5,
        ("copc_continuation", 64): 0.4,
    }
    results = Results(
        {PART: 0.1}, base + runs(others, noise=0.0005) + runs({("ppo", 8): 0.45, ("ppo", 64): 0.2}, 0.002)
    )
    text = verdict(results)
    overall = next(line for line in text.splitlines() if "Does return correction help" in line)
    assert "Worse: risky table -0.025" in overall  # the mean of +0.05 and -0.1
    by_lag = next(line for line in text.splitlines() if "lag by lag" in line)
    assert "Better: risky table s=8 +0.050" in by_lag and "Worse: risky table s=64 -0.100" in by_lag
    against_ppo = next(line for line in text.splitlines() if "Is COPC better than PPO?" in line)
    assert "Better: risky table +0.049" in against_ppo  # the mean of -0.001 and 0.099
    assert "COPC (continuation, step) has the largest mean, better than the default form: +0.075" in text
    assert "Not compared on the transformer." in text
    assert "s=8: COPC (continuation, step)" in text and "s=64: COPC" in text


def test_report_has_every_method_and_leaves_out_those_that_were_not_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = runs({(m, lag): 0.4 for m in ("copc_wo_rc", "copc") for lag in PART.lags})
    assert write_report(tmp_path, {PART: 0.1}, [], found, quick=False) in (tmp_path / "README.md").read_text()
    text = (tmp_path / "README.md").read_text()
    assert "| copc | 0.534 ± 0.088 (0.534) |" in text and "| ppo |" not in text and "0 (identical)" in text


def test_records_know_which_seeds_of_a_cell_are_missing(tmp_path: Path) -> None:
    (cell,) = [replace(c, rate=0.1) for c in PART.cells() if (c.method, c.lag) == ("copc", 8)]
    records, written = Records(tmp_path / "runs.csv"), runs({("copc", 8): 0.5})
    records.append([written[2], written[0]])
    assert records.of(cell) == [written[0], written[2]]
    assert records.rest(cell) == replace(cell, seeds=(1,))
    records.append(written[1:2])
    assert records.of(cell) == Records(tmp_path / "runs.csv").of(cell) == written
    assert records.rest(cell).seeds == ()
    assert records.rest(replace(cell, rate=0.2)).seeds == (0, 1, 2)  # other settings, other runs


def test_forms_of_copc_are_not_repeated_without_a_lag() -> None:
    without = {cell.method for cell in PART.cells() if cell.lag == 0}
    assert without == {"copc_wo_rc", "copc", "ppo"} and without.isdisjoint(FORMS[1:])
