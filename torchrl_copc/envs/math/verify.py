r"""Whether a response answers a maths problem: integers exactly, everything else with math-verify.

The last balanced ``\boxed{}`` of the response counts. If gold answer and box are both integers they are compared
as such; numbers too large to compute are compared as text; otherwise ``math_verify.verify(gold, answer)`` decides
(https://github.com/huggingface/Math-Verify), in a child process with a hard deadline. What it lets pass (50 for 50\%,
an answer in which only the last number can be read, ...) and what it does not is pinned in
``tests/envs/test_math_verify.py``.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

from torchrl_copc.envs.math.answer import as_integer, last_boxed
from torchrl_copc.envs.math.judge import JudgeDied, JudgePool
from torchrl_copc.envs.math.size import MAX_DEPTH, is_too_large

How = Literal["integer", "math_verify", "no_answer", "too_long", "too_large", "timeout", "crash"]

MAX_CHARACTERS = 1_000  # of an answer that is no integer; parsing takes more than linear time
DEADLINE = 1.0  # seconds of processor time; answers that can be compared take .01 to .3

_DOLLAR = re.compile(r"(?<!\\)\$")


@dataclass(frozen=True)
class Verdict:
    """The outcome of one verification.

    Args:
        correct: whether the answer is right.
        how: ``"integer"`` or ``"math_verify"`` for what decided; ``"too_large"`` where a number is too large to
            compute, so that only the same text is right (:func:`~torchrl_copc.envs.math.size.is_too_large`);
            otherwise why the answer counts as wrong without a comparison: ``"no_answer"`` (no balanced
            box, or an empty one), ``"too_long"``, ``"timeout"`` or ``"crash"``.
    """

    correct: bool
    how: How


class AnswerVerifier:
    r"""Verifies answers in at most ``workers`` child processes, from any thread and from asyncio.

    Children start with the first answer that needs them (about a second) and end with :meth:`close`, at the exit
    of the interpreter, or when this process is gone. ``counts`` holds how often each
    :attr:`Verdict.how` occurred. Not to be used in a fork of the process that made it.

    Args:
        workers: child processes, one answer each at a time.
        deadline: seconds of processor time one comparison may take; then the answer is wrong. The next one
            does not wait for a new process. Ten times as long by the clock is the end in any case.

    Raises:
        ImportError: from the first comparison, if math-verify is not installed.
        JudgeStartError: from a comparison, if its child cannot be started.

    Example:
        >>> with AnswerVerifier(workers=1) as verifier:
        ...     verdict = verifier.verify(r"\frac{1}{2}", r"Half of it: \boxed{0.5}")
        >>> verdict
        Verdict(correct=True, how='math_verify')
    """

    def __init__(self, workers: int = 2, deadline: float = DEADLINE) -> None:
        self._judges = JudgePool(workers, deadline)
        self.counts: Counter[How] = Counter()
        self._lock = threading.Lock()

    def verify(self, gold: str, response: str) -> Verdict:
        r"""Whether the last ``\boxed{}`` of ``response`` equals ``gold``; blocks at most for the deadline and
        for answers handed in before."""
        outcome = self._without_judge(gold, response)
        if isinstance(outcome, Verdict):
            return self._count(outcome)
        try:
            return self._count(Verdict(outcome().result(), "math_verify"))
        except (TimeoutError, JudgeDied) as error:
            return self._count(_failed(error))

    async def verify_async(self, gold: str, response: str) -> Verdict:
        """The same for coroutines: the event loop runs on meanwhile."""
        outcome = self._without_judge(gold, response)
        if isinstance(outcome, Verdict):
            return self._count(outcome)
        try:
            return self._count(Verdict(await asyncio.wrap_future(outcome()), "math_verify"))
        except (TimeoutError, JudgeDied) as error:
            return self._count(_failed(error))

    def check_gold(self, gold: str) -> None:
        r"""Refuse a gold answer that no response could be compared with.

        Raises:
            ValueError: if it is empty, too long, too large to compute, does not parse within the deadline, is
                undefined, or holds bare words, which LaTeX reads as products of letters.

        Example:
            >>> AnswerVerifier(workers=1).check_gold(r"\frac{1}{")
            Traceback (most recent call last):
            ...
            ValueError: gold answer '\\frac{1}{' cannot be verified: it does not parse as LaTeX
        """
        text = _formula(gold)
        if as_integer(text) is not None:
            return
        if not text:
            problem = "it is empty"
        elif len(text) > MAX_CHARACTERS:
            problem = f"it has {len(text)} characters; at most {MAX_CHARACTERS} are compared"
        elif is_too_large(text):
            problem = f"its numbers are too large to compute, or its brackets nest deeper than {MAX_DEPTH}"
        else:
            try:
                problem = self._judges.objection(text).result()
            except TimeoutError:
                problem = (
                    f"comparing it takes longer than deadline={self._judges.deadline:g} s of processor time"
                )
            except JudgeDied:
                problem = "comparing it ends the process (out of memory?)"
        if problem:
            raise ValueError(f"gold answer {gold[:80]!r} cannot be verified: {problem}")

    def close(self) -> None:
        """End the child processes; an answer that is being compared counts as wrong. Safe to repeat."""
        self._judges.close()

    def __enter__(self) -> AnswerVerifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _without_judge(self, gold: str, response: str) -> Verdict | Callable[[], Future[Any]]:
        """The verdict where none of the children is needed, else what hands the comparison to one."""
        answer = last_boxed(response)
        if not answer:
            return Verdict(False, "no_answer")
        gold, answer = _formula(gold), _formula(answer)
        gold_integer, integer = as_integer(gold), as_integer(answer)
        if gold_integer is not None and integer is not None:
            return Verdict(gold_integer == integer, "integer")
        if max(len(gold), len(answer)) > MAX_CHARACTERS:
            return Verdict(False, "too_long")
        if is_too_large(answer) or is_too_large(gold):
            return Verdict(gold.replace(" ", "") == answer.replace(" ", ""), "too_large")
        return lambda: self._judges.compare(gold, answer)

    def _count(self, verdict: Verdict) -> Verdict:
        with self._lock:
            self.counts[verdict.how] += 1
        return verdict


def verify_answer(gold: str, response: str) -> bool:
    r"""Whether ``response`` answers with ``gold``, by its last balanced ``\boxed{}``.

    Integers are compared exactly. Anything else takes math-verify a few milliseconds in one of two shared child
    processes; an answer that takes it longer than a second of processor time is wrong. Safe in every thread; coroutines
    use :meth:`AnswerVerifier.verify_async`.

    Args:
        gold: the right answer, in LaTeX.
        response: text of the policy's final turn.

    Raises:
        ImportError: for an answer that is no integer, if math-verify is not installed.

    Example:
        >>> verify_answer("1000", r"There are \boxed{1,000} of them."), verify_answer("12", r"\boxed{1,2}")
        (True, False)
    """
    return _shared.verify(gold, response).correct


def check_gold(gold: str) -> None:
    r"""Refuse a gold answer that nothing could be compared with; see :meth:`AnswerVerifier.check_gold`.

    Raises:
        ValueError: with what is wrong with it.

    Example:
        >>> check_gold(r"\frac{\pi}{4}")
    """
    _shared.check_gold(gold)


def _formula(text: str) -> str:
    """One line of LaTeX without dollar signs around or inside it, out of a box if it is in one."""
    inside = last_boxed(text)
    return " ".join(_DOLLAR.sub("", text if inside is None else inside).split())


def _failed(error: Exception) -> Verdict:
    return Verdict(False, "timeout" if isinstance(error, TimeoutError) else "crash")


_shared = AnswerVerifier()  # starts nothing before it is used


def _forget_shared() -> None:
    global _shared
    _shared = AnswerVerifier()


os.register_at_fork(after_in_child=_forget_shared)
