"""CHAMP, a set of competition problems for evaluation, cut to those whose answer can be verified.

Source: https://arxiv.org/abs/2401.06961. The text comes with the PyPI package ``champ-dataset`` (MIT).
"""

from __future__ import annotations

import re
from functools import lru_cache

from torchrl_copc.trajectory import Prompt

_LIMIT = re.compile(r"The (?:limit exists and is equal to|only possible value for the limit is) ")
# "2", "2 inequalities", "At most 0 values (i.e., no such values)", "100 (i.e., all numbers)"
_INTEGER = re.compile(r"(?:At (?:most|least) )?(-?\d+)(?: [^\d]*)?")
# "376 and 625"
_INTEGERS = re.compile(r"-?\d+(?:(?:, | and )-?\d+)+")
# Formulas stand between pairs of @@. What may be said around them, with alternatives after the first:
_FORMULA = re.compile(r"@@(.*?)@@")
_AROUND = re.compile(
    r"#(?: times|, or equivalently [#\d]+|, or an equivalent form such as #|, or approximately [\d.]+%)?"
    r"(?: \(i\.e\., all of them\))?"
)
# Plain text that LaTeX reads as something else, solutions by name (whose form nobody can guess), and enumerations.
_UNREADABLE = re.compile(r"floor|sum_|[=±<>≥]|\.\.\.")
# The expression to rewrite equals the answer: repeating it would be right.
_REWRITING = ("Factorize", "Find a closed-form formula")
_BINOMIAL = re.compile(r"C\(([^,()]+), ([^,()]+)\)")


@lru_cache(maxsize=1)
def _problems() -> tuple[Prompt, ...]:
    try:
        import champ_dataset
    except ModuleNotFoundError as error:
        raise ImportError(
            'the CHAMP problems need the package champ-dataset: pip install "torchrl-copc[envs]"'
        ) from error
    prompts = []
    for problem in champ_dataset.load("v0").problems.values():
        golds = _golds(problem.raw_answer)
        if golds and not problem.text.startswith(_REWRITING):
            metadata = {"data_source": "champ", "category": problem.category}
            prompt_id = f"champ-{problem.identifier.removeprefix('P_')}"
            prompts.append(Prompt(prompt_id, problem.text, golds, metadata))
    return tuple(prompts)


def load_champ() -> list[Prompt]:
    """The problems of CHAMP whose answer is a number, a set of numbers or one formula: 184 of 270.

    Left out are answers in words (33 are yes or no), solutions in several variables, and expressions to rewrite.
    ``metadata["category"]`` is the field of mathematics.

    Raises:
        ImportError: if the package with the problems is not installed.

    Example:
        >>> load_champ()[0].answers
        ('239',)
    """
    return list(_problems())


def _golds(raw: str) -> tuple[str, ...]:
    """The accepted answers in LaTeX; none if the answer cannot be verified."""
    raw = _LIMIT.sub("", raw)
    if match := _INTEGER.fullmatch(raw):
        return (match.group(1),)
    if _INTEGERS.fullmatch(raw):
        return (r"\{" + raw.replace(" and ", ", ") + r"\}",)
    if not _AROUND.fullmatch(_FORMULA.sub("#", raw)):
        return ()
    formulas = [formula for formula in _FORMULA.findall(raw) if not _UNREADABLE.search(formula)]
    return tuple(_BINOMIAL.sub(r"\\binom{\1}{\2}", formula) for formula in formulas)
