"""What a person reads after a run: numbers with standard errors, curves and transcripts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase

from torchrl_copc.trajectory import POLICY_MASK, REWARD, TOKENS, metadata

Summary = dict[str, dict[str, float]]

# Metrics of a row that read better under another name once they are averaged.
_NAMES = {"searched": "search_rate", "ran_code": "code_rate"}
CURVES = (
    ("reward", "reward"),
    ("em", "exact match"),
    ("search_rate", "episodes that searched"),
    ("code_rate", "episodes that ran code"),
    ("staleness_mean", "staleness (versions)"),
    ("kept_fraction", "kept fraction of tokens"),
    ("grad_norm_actor", "actor gradient norm"),
    ("ESS", "effective sample size of the ratios"),
    ("explained_variance", "explained variance of the critic"),
)


def mean_and_error(values: Sequence[float]) -> dict[str, float]:
    """Mean, standard error of the mean and count.

    >>> mean_and_error([0.0, 1.0, 1.0, 0.0])
    {'mean': 0.5, 'se': 0.28867513459481287, 'n': 4}
    """
    n = len(values)
    if n == 0:
        return {"mean": math.nan, "se": math.nan, "n": 0}
    mean = sum(values) / n
    variance = sum((v - mean) ** 2 for v in values) / (n - 1) if n > 1 else math.nan
    return {"mean": mean, "se": math.sqrt(variance / n), "n": n}


def summarize(rows: Sequence[TensorDictBase]) -> Summary:
    """Mean, standard error and count of the reward and of every metric of the environment over finished rows."""
    values: dict[str, list[float]] = {"reward": [float(row.get(REWARD).sum()) for row in rows]}
    for row in rows:
        for name, value in metadata(row)["metrics"].items():
            if name != "reward":
                values.setdefault(_NAMES.get(name, name), []).append(float(value))
    return {name: mean_and_error(found) for name, found in values.items()}


def row_seconds(rows: Sequence[TensorDictBase]) -> dict[str, float]:
    """Mean seconds that a row took in the rollout worker, in all, in the engine and in its tool.

    Rows run at the same time and beside the learner: these do not add up to a step's time.
    """
    timings = [metadata(row)["timings"] for row in rows]
    return {
        f"row_seconds_{part}": sum(timing[part] for timing in timings) / len(timings)
        for part in ("total", "engine", "tool")
    }


def difference(before: Summary, after: Summary) -> Summary:
    """After minus before with its standard error (the two taken as independent) and ``z``, their ratio."""
    out: Summary = {}
    for name in (name for name in before if name in after):
        mean = after[name]["mean"] - before[name]["mean"]
        se = math.hypot(before[name]["se"], after[name]["se"])
        out[name] = {"mean": mean, "se": se, "z": mean / se if se > 0 else 0.0}
    return out


def transcript(row: TensorDictBase, decode: Callable[[list[int]], str]) -> str:
    """One episode as text; everything the policy did not write stands between ``«`` and ``»``."""
    info = metadata(row)
    ids, mask = row.get(TOKENS).tolist(), row.get(POLICY_MASK).tolist()
    parts, start = [], 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or mask[i] != mask[start]:
            text = decode(ids[start:i])
            parts.append(text if mask[start] else f"«{text}»")
            start = i
    reward = float(row.get(REWARD).sum())
    head = (
        f"{info['prompt_id']}  reward {reward:.2f}  turns {info['num_turns']}  finish {info['finish_reason']}  "
        f"gold {' | '.join(info['answers'])}"
    )
    return head + "\n" + "\n".join(parts)


def write_transcripts(
    path: Path, rows: Sequence[TensorDictBase], decode: Callable[[list[int]], str], limit: int = 20
) -> None:
    """Write the first ``limit`` episodes as readable text, observations marked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(transcript(row, decode) for row in rows[:limit]) + "\n", encoding="utf-8")


def write_report(run_dir: Path, report: Mapping[str, Any]) -> None:
    """Write ``report.json``."""
    (run_dir / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def plot_curves(run_dir: Path, history: Sequence[Mapping[str, float]]) -> None:
    """Write ``curves.png``: one panel per training metric over versions, with a running mean over ten steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    curves = [(key, label) for key, label in CURVES if any(key in entry for entry in history)]
    columns = -(-len(curves) // 2)
    figure, axes = plt.subplots(
        2, columns, figsize=(4 * columns, 6.5), squeeze=False, constrained_layout=True
    )
    steps = [entry["version"] for entry in history]
    for axis in axes.flat[len(curves) :]:
        axis.remove()
    for axis, (key, label) in zip(axes.flat, curves, strict=False):
        values = [entry.get(key, math.nan) for entry in history]
        axis.plot(steps, values, color="tab:blue", alpha=0.3, linewidth=1)
        axis.plot(steps, _running_mean(values, 10), color="tab:blue", linewidth=1.8)
        axis.set_title(label)
        axis.set_xlabel("version (batches consumed)")
        axis.grid(alpha=0.3)
    figure.savefig(run_dir / "curves.png", dpi=110)
    plt.close(figure)


def _running_mean(values: Sequence[float], width: int) -> list[float]:
    means = []
    for i in range(len(values)):
        window = [v for v in values[max(0, i - width + 1) : i + 1] if not math.isnan(v)]
        means.append(sum(window) / len(window) if window else math.nan)
    return means


def print_report(report: Mapping[str, Any]) -> None:
    """Print the report as a terminal table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"held-out questions, n = {report['before']['reward']['n']}")
    for column in ("", "before", "after", "difference", "z"):
        table.add_column(column, justify="left" if not column else "right")
    for name, delta in report["difference"].items():
        before, after = report["before"][name], report["after"][name]
        table.add_row(
            name.replace("_", " "),
            *(f"{s['mean']:.3f} ± {s['se']:.3f}" for s in (before, after)),
            f"{delta['mean']:+.3f} ± {delta['se']:.3f}",
            f"{delta['z']:+.1f}",
        )
    console = Console()
    console.print(table)
    staleness = report["staleness"]
    console.print(
        f"staleness (versions): mean {staleness['mean']:.2f}, p50 {staleness['p50']:.0f}, "
        f"p95 {staleness['p95']:.0f}, max {staleness['max']:.0f}; {report['tok_s']:.0f} policy tokens/s consumed"
    )
