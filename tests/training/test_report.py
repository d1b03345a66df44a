"""Numbers of the report against plain statistics, and transcripts a person can read."""

from __future__ import annotations

import json
import statistics

import pytest

from torchrl_copc.training import report
from torchrl_copc.trajectory import Completion, Episode, Prompt


def finished_row(reward: float, em: float, searched: float, name: str = "r"):
    episode = Episode(name, Prompt(f"p-{name}", "q", ("gold",)), name)
    episode.append_context([0, 1])
    episode.append_completion(Completion((2, 3), (-0.5, -0.5), (0, 0), "stop"))
    episode.append_context([4])
    episode.append_completion(Completion((5,), (-0.5,), (0,), "stop"))
    episode.metrics.update(reward=reward, em=em, searched=searched)
    episode.finish(reward, "stop")
    return episode.to_row()


def test_summary_and_difference_are_plain_statistics():
    before = report.summarize([finished_row(r, r > 0, 0.0) for r in (0.0, 1.1, 0.0, 0.0)])
    after = report.summarize([finished_row(r, r > 0, 1.0) for r in (2.0, 2.0, 0.0, 2.0)])
    rewards = [2.0, 2.0, 0.0, 2.0]
    assert after["reward"]["mean"] == pytest.approx(statistics.mean(rewards))
    assert after["reward"]["se"] == pytest.approx(statistics.stdev(rewards) / 2)
    assert after["search_rate"]["mean"] == 1.0 and after["em"]["n"] == 4
    delta = report.difference(before, after)["reward"]
    se = (before["reward"]["se"] ** 2 + after["reward"]["se"] ** 2) ** 0.5
    assert delta["z"] == pytest.approx((after["reward"]["mean"] - before["reward"]["mean"]) / se)


def test_a_report_without_variance_is_still_json(tmp_path):
    same = report.summarize([finished_row(0.0, 0.0, 0.0)] * 3)
    report.write_report(tmp_path, {"difference": report.difference(same, same)})
    parsed = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert parsed["difference"]["em"] == {"mean": 0.0, "se": 0.0, "z": 0.0}


def test_transcripts_mark_what_the_policy_did_not_write():
    text = report.transcript(finished_row(2.0, 1.0, 1.0), lambda ids: "".join("abcdef"[i] for i in ids))
    head, *parts = text.splitlines()
    assert parts == ["«ab»", "cd", "«e»", "f"]
    assert "p-r" in head and "reward 2.00" in head and "gold gold" in head


def test_an_environment_with_other_metrics_is_summarised_by_its_own_names():
    episode = Episode("r", Prompt("p", "q", ("gold",)), "r")
    episode.append_completion(Completion((2,), (-0.5,), (0,), "stop"))
    episode.metrics["correct"] = 1.0
    episode.finish(1.0, "stop")
    summary = report.summarize([episode.to_row()] * 2)
    assert summary == {name: {"mean": 1.0, "se": 0.0, "n": 2} for name in ("reward", "correct")}


def test_curves_are_drawn_for_runs_that_lack_a_metric(tmp_path):
    report.plot_curves(tmp_path, [{"version": v, "reward": 0.1 * v} for v in range(1, 30)])
    assert (tmp_path / "curves.png").stat().st_size > 10_000
