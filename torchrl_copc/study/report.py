"""From runs to tables, a figure and a verdict; every sentence of the verdict is made from the numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl_copc.study.methods import VARIANTS
from torchrl_copc.study.plan import FORMS, REFERENCE, WIDE, Part
from torchrl_copc.study.records import Run

BEYOND = 2.0  # standard errors that a difference must exceed to be called one


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its standard error.

    Examples:
        >>> str(Estimate.of([0.1, 0.3, 0.2])), Estimate.of([0.1, 0.3, 0.2]).signed()
        ('0.200 ± 0.058', '+0.200 ± 0.058 (z 3.5)')
    """

    mean: float
    error: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Estimate:
        """From at least two independent values."""
        values = list(values)
        return cls(statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)))

    @property
    def z(self) -> float:
        return self.mean / self.error if self.error else math.copysign(math.inf, self.mean) * bool(self.mean)

    @property
    def sign(self) -> int:
        """1 or -1 when the mean is beyond :data:`BEYOND` standard errors from 0, else 0."""
        return 0 if abs(self.mean) <= BEYOND * self.error else int(math.copysign(1, self.mean))

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.error:.3f}"

    def signed(self) -> str:
        """As a difference."""
        if not self.mean and not self.error:
            return "0 (identical)"
        return f"{self.mean:+.3f} ± {self.error:.3f} (z {self.z:.1f})"


class Results:
    """The runs of a study, by part, method and lag.

    Args:
        rates: the parts of the study with their learning rates.
        runs: all finished runs.
    """

    def __init__(self, rates: Mapping[Part, float], runs: Sequence[Run]) -> None:
        self.parts = list(rates)
        names = {(part.task, part.model, rate): part.name for part, rate in rates.items()}
        self._runs: dict[tuple[str, str, int], dict[int, Run]] = {}
        for run in runs:
            name = names[run.task, run.model, run.learning_rate]
            self._runs.setdefault((name, run.method, run.lag), {})[run.seed] = run

    def methods(self, part: Part) -> list[str]:
        """Those with finished runs, in the order of the part."""
        return [m for m in part.methods if any((part.name, m, lag) in self._runs for lag in part.lags)]

    def has(self, part: Part, method: str, lag: int) -> bool:
        return (part.name, method, lag) in self._runs

    def values(self, part: Part, method: str, lag: int, name: str = "score") -> dict[int, float]:
        """One number of each seed."""
        return {seed: getattr(run, name) for seed, run in self._runs[part.name, method, lag].items()}

    def estimate(self, part: Part, method: str, lag: int, name: str = "score") -> Estimate:
        return Estimate.of(self.values(part, method, lag, name).values())

    def differences(self, part: Part, method: str, reference: str, lag: int) -> dict[int, float]:
        """Score of a method minus that of the reference on the same seed."""
        ours, theirs = (self.values(part, m, lag) for m in (method, reference))
        return {seed: ours[seed] - theirs[seed] for seed in ours}

    def paired(self, part: Part, method: str, reference: str, lag: int) -> Estimate:
        return Estimate.of(self.differences(part, method, reference, lag).values())

    def compared(
        self, method: str, reference: str, parts: Sequence[Part] | None = None
    ) -> list[tuple[Part, int]]:
        """Parts and lags above 0 that have both methods."""
        return [
            (part, lag)
            for part in (self.parts if parts is None else parts)
            for lag in sorted(part.lags)
            if lag and self.has(part, method, lag) and self.has(part, reference, lag)
        ]

    def pooled(self, method: str, reference: str, parts: Sequence[Part]) -> Estimate:
        """Paired difference averaged over the parts and lags above 0; seeds are the independent units."""
        each = [
            self.differences(part, method, reference, lag)
            for part, lag in self.compared(method, reference, parts)
        ]
        return Estimate.of(statistics.fmean(d[seed] for d in each) for seed in each[0])


def write_report(
    output: Path,
    rates: Mapping[Part, float],
    tuning: Sequence[Run],
    runs: Sequence[Run],
    *,
    quick: bool,
) -> str:
    """Write ``README.md`` and ``study.png``.

    Args:
        output: folder that holds ``runs.csv``.
        rates: the parts of the study with the learning rates that were chosen.
        tuning: the runs behind that choice.
        runs: finished runs; methods may be missing.
        quick: say that nothing can be concluded in place of a verdict.

    Returns:
        the verdict.
    """
    results = Results(rates, runs)
    said = QUICK_VERDICT if quick else verdict(results)
    sections = [
        "# Method study\n\nMade by `python scripts/study.py`; what is measured: `docs/study.md`. Every run is in "
        "`runs.csv`, those behind the learning rates in `tuning.csv`. Scores are exact expected returns, averaged over "
        "the second half of training, ± one standard error over seeds; the return at the end is in brackets. "
        "Differences are paired by seed.\n",
        f"## In plain words\n\n{said}",
        f"![Scores and differences](study.png)\n\n## Settings\n\n{_settings(rates, tuning)}",
        _off_policy(results),
        *(_part_tables(results, part) for part in results.parts),
    ]
    (output / "README.md").write_text("\n".join(sections))
    draw(output / "study.png", results)
    return said


QUICK_VERDICT = (
    "Nothing: this was a quick run of a few batches and two seeds. It shows that every part runs; its numbers conclude "
    "nothing.\n"
)


def verdict(results: Results) -> str:
    """Where COPC helps, where it does not, and which form of its advantage does best."""
    lines = [
        f"A difference is called one when it exceeds {BEYOND:g} standard errors; about one comparison in twenty does "
        "so by chance. What is called best was chosen after looking at the same runs, which flatters it.\n"
    ]
    questions = [
        ("Does return correction help (COPC minus COPC w/o RC)?", FORMS[0], REFERENCE),
        ("Is COPC better than PPO?", FORMS[0], "ppo"),
        ("Is COPC better than V-trace?", FORMS[0], "vtrace"),
        *((f"Is {_title(wide)} better than COPC?", wide, FORMS[0]) for wide in WIDE),
    ]
    lines += [
        f"- **{question}** Averaged over lags above 0: {_by_part(results, method, reference)}"
        for question, method, reference in questions
    ]
    lines.append(f"- **Where return correction helps, lag by lag.** {_by_cell(results, FORMS[0], REFERENCE)}")
    lines += [f"- **Which form.** {_best_form(results, model)}" for model in ("table", "transformer")]
    lines += [f"- **{part.name}: which method.** {_best_method(results, part)}" for part in results.parts]
    return "\n".join(lines) + "\n"


def _title(method: str) -> str:
    names = {
        "copc": "COPC (full, step)",
        "copc_continuation": "COPC (continuation, step)",
        "copc_product": "COPC (full, product)",
        "copc_continuation_product": "COPC (continuation, product)",
        "copc_wide_advantage": "COPC with eta_A = 2.5",
        "copc_wide": "COPC with eta_A = eta_P = 2.5",
        REFERENCE: "COPC w/o RC",
        "ppo": "PPO",
        "vtrace": "V-trace",
    }
    return names.get(method, method)


def _by_part(results: Results, method: str, reference: str) -> str:
    """Parts where a method is better, worse, and neither, over all lags above 0."""
    parts = [part for part in results.parts if results.compared(method, reference, [part])]
    return _sorted({part.name: results.pooled(method, reference, [part]) for part in parts})


def _by_cell(results: Results, method: str, reference: str) -> str:
    """Parts and lags where a method is better, worse, and neither."""
    cells = results.compared(method, reference)
    return _sorted(
        {f"{part.name} s={lag}": results.paired(part, method, reference, lag) for part, lag in cells}
    )


def _sorted(differences: Mapping[str, Estimate]) -> str:
    said = []
    for label, sign in (("Better", 1), ("Worse", -1), ("No difference", 0)):
        found = [f"{name} {d.mean:+.3f} ± {d.error:.3f}" for name, d in differences.items() if d.sign == sign]
        if found:
            said.append(f"{label}: {', '.join(found)}.")
    return " ".join(said) or "Not compared."


def _best_form(results: Results, model: str) -> str:
    parts = [part for part in results.parts if part.model == model]
    forms = [form for form in FORMS if results.compared(form, REFERENCE, parts)]
    if not forms:
        return f"Not compared on the {model}."
    gains = {form: results.pooled(form, REFERENCE, parts) for form in forms}
    best = max(gains, key=lambda form: gains[form].mean)
    listed = ", ".join(f"{_title(form)} {gain.signed()}" for form, gain in gains.items())
    text = f"On the {model}, averaged over tasks and lags above 0, the gain over COPC w/o RC is: {listed}."
    if gains[best].mean <= 0:
        return f"{text} None of them helps."
    if (
        best == FORMS[0]
    ):  # against the next best: chosen after looking, as everything that is called best here
        rival = max((form for form in forms if form != best), key=lambda form: gains[form].mean, default=best)
        lead = results.pooled(best, rival, parts)
        word = "better than" if lead.sign > 0 else "not distinguishable from"
        return f"{text} The default form has the largest mean, {word} {_title(rival)}: {lead.signed()}."
    lead = results.pooled(best, FORMS[0], parts)
    word = "better than" if lead.sign > 0 else "not distinguishable from"
    return f"{text} {_title(best)} has the largest mean, {word} the default form: {lead.signed()}."


def _best_method(results: Results, part: Part) -> str:
    sentences = []
    for lag in sorted(part.lags):
        here = [m for m in results.methods(part) if results.has(part, m, lag)]
        if not here:
            continue
        best = max(here, key=lambda m: results.estimate(part, m, lag).mean)
        text = f"s={lag}: {_title(best)} {results.estimate(part, best, lag)}"
        if best != FORMS[0] and results.has(part, FORMS[0], lag):
            text += f", {results.paired(part, best, FORMS[0], lag).signed()} to {_title(FORMS[0])}"
        sentences.append(text)
    return "; ".join(sentences) + "."


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _settings(rates: Mapping[Part, float], tuning: Sequence[Run]) -> str:
    rows = []
    for part in rates:
        tried = []
        for rate in part.rates:
            scores = [
                run.score
                for run in tuning
                if (run.task, run.model, run.batches, run.learning_rate)
                == (part.task, part.model, part.batches, rate)
            ]
            tried.append(f"{rate:g} ({statistics.fmean(scores):.3f})" if len(part.rates) > 1 else "not tuned")
        row = (
            part.name,
            part.seeds,
            part.batches,
            f"{rates[part]:g}",
            f"{part.critic_factor:g}",
            ", ".join(tried),
        )
        rows.append([str(x) for x in row])
    head = "task and model", "seeds", "batches", "learning rate", "critic's, times that", "tried (mean score)"
    return _table(head, rows)


def _off_policy(results: Results) -> str:
    """How far from its data the learner was without return correction, and what the correction gained."""
    rows = []
    for part in results.parts:
        for lag in sorted(part.lags):
            if not lag or not results.has(part, REFERENCE, lag):
                continue
            row = [part.name, str(lag)]
            row += [
                f"{results.estimate(part, REFERENCE, lag, name).mean:.3f}"
                for name in ("outside_fraction", "kept_fraction", "ess")
            ]
            row += [
                results.paired(part, form, REFERENCE, lag).signed() if results.has(part, form, lag) else ""
                for form in FORMS
            ]
            rows.append(row)
    head = (
        "task and model",
        "s",
        "outside the mask",
        "kept",
        "ESS",
        *(f"gain of {_title(form)}" for form in FORMS),
    )
    return (
        "## How off-policy, and what return correction gained\n\nMeans over the training of COPC w/o RC: tokens whose "
        "ratio is outside [0.80, 1.28], tokens that gave actor gradient, effective sample size.\n\n"
        + _table(head, rows)
    )


def _part_tables(results: Results, part: Part) -> str:
    lags, methods = sorted(part.lags), results.methods(part)

    def score(method: str, lag: int) -> str:
        if not results.has(part, method, lag):
            return "as copc" if method in VARIANTS and not lag else ""
        final = results.estimate(part, method, lag, "final").mean
        return f"{results.estimate(part, method, lag)} ({final:.3f})"

    def difference(method: str, reference: str, lag: int) -> str:
        both = results.has(part, method, lag) and results.has(part, reference, lag)
        return results.paired(part, method, reference, lag).signed() if both and method != reference else ""

    head = ["method", *(f"s={lag}" for lag in lags)]
    text = f"## {part.name}\n\n" + _table(head, [[m, *(score(m, lag) for lag in lags)] for m in methods])
    for reference in (REFERENCE, "ppo"):
        if reference in methods:
            rows = [[m, *(difference(m, reference, lag) for lag in lags)] for m in methods if m != reference]
            text += f"\nMinus `{reference}`:\n\n" + _table(head, rows)
    return text


def draw(path: Path, results: Results) -> None:
    """Upper row: scores over the lag. Lower row: paired differences to COPC w/o RC with two standard errors."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, len(results.parts), figsize=(24, 9), layout="constrained", squeeze=False)
    names = list(dict.fromkeys(m for part in results.parts for m in results.methods(part)))
    others = [m for m in names if m not in FORMS]
    colours: dict[str, Any] = {m: plt.get_cmap("viridis")(i / len(others)) for i, m in enumerate(others)}
    colours |= {REFERENCE: "black", "ppo": "tab:blue", "vtrace": "tab:green"}
    colours |= {form: plt.get_cmap("autumn")(i / len(FORMS)) for i, form in enumerate(FORMS)}
    for column, part in enumerate(results.parts):
        lags, methods = sorted(part.lags), results.methods(part)
        for row, axis in enumerate(axes[:, column]):
            shown = [m for m in methods if row == 0 or m != REFERENCE]
            for number, method in enumerate(shown):
                here = [lag for lag in lags if results.has(part, method, lag)]
                if row:
                    here = [lag for lag in here if lag and results.has(part, REFERENCE, lag)]
                    values = [results.paired(part, method, REFERENCE, lag) for lag in here]
                else:
                    values = [results.estimate(part, method, lag) for lag in here]
                axis.errorbar(
                    [lags.index(lag) + 0.5 * (number / len(shown) - 0.5) for lag in here],
                    [value.mean for value in values],
                    [(BEYOND if row else 1) * value.error for value in values],
                    label=method,
                    color=colours[method],
                    marker="o" if method in FORMS else "s",
                    markersize=4,
                    linewidth=1 if row == 0 else 0,
                    elinewidth=1,
                )
            axis.set_xticks(range(len(lags)), [f"s={lag}" for lag in lags])
            if row:
                axis.axhline(0, color="k", linewidth=0.8)
        axes[0, column].set_title(f"{part.name} ({part.seeds} seeds)")
    axes[0, 0].set_ylabel("score ± s.e.")
    axes[1, 0].set_ylabel(f"minus {REFERENCE}, ± {BEYOND:g} s.e.")
    handles: dict[str, Any] = {}
    for axis in axes[0]:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=9)
    figure.savefig(path, dpi=80)
    plt.close(figure)
