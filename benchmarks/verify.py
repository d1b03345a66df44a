"""Time verification of answers beside math-verify called in this process, which a hung answer would stall.

Integers take the exact path, other answers cross into a child process. ``--quick`` takes fewer answers.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence

import math_verify

from torchrl_copc.envs.math import AnswerVerifier

FULL, QUICK = 4_000, 400
WORKERS = 2
Question = tuple[str, str]  # gold answer and answer


def integers(count: int) -> list[Question]:
    return [(str(37 * n), f"{37 * n + n % 2:,}") for n in range(count)]


def expressions(count: int) -> list[Question]:
    """Half right, half wrong; no two alike, so that caches do not help."""
    kinds: tuple[Callable[[int], Question], ...] = (
        lambda n: (rf"\frac{{{n}}}{{{n + 1}}}", f"{n}/{n + 1 + n // 8 % 2}"),
        lambda n: (rf"{n}\sqrt{{2}}", rf"\sqrt{{{2 * n * n + n // 8 % 2}}}"),
        lambda n: (rf"{n}x^2+x", rf"x({n}x+{1 + n // 8 % 2})"),
        lambda n: (rf"\{{1,{n}\}}", rf"\{{{n + n // 8 % 2},1\}}"),
    )
    return [kinds[n % len(kinds)](n) for n in range(2, count + 2)]


def in_process(questions: Sequence[Question]) -> list[bool]:
    def parse(text: str) -> list[object]:
        return math_verify.parse(f"${text}$", parsing_timeout=None)

    return [
        math_verify.verify(parse(gold), parse(answer), timeout_seconds=None) for gold, answer in questions
    ]


def one_by_one(verifier: AnswerVerifier, questions: Sequence[Question]) -> list[bool]:
    return [verifier.verify(gold, rf"\boxed{{{answer}}}").correct for gold, answer in questions]


def together(verifier: AnswerVerifier, questions: Sequence[Question]) -> list[bool]:
    async def verify() -> list[bool]:
        tasks = [verifier.verify_async(gold, rf"\boxed{{{answer}}}") for gold, answer in questions]
        return [verdict.correct for verdict in await asyncio.gather(*tasks)]

    return asyncio.run(verify())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer answers, under half a minute")
    count = QUICK if parser.parse_args().quick else FULL
    logging.disable(logging.WARNING)  # math-verify's, about the disabled timeouts
    with AnswerVerifier(WORKERS) as verifier:
        together(verifier, expressions(8))  # imports math-verify in the children
        in_process(expressions(8))
        for name, questions in (("integers", integers(count)), ("expressions", expressions(count // 4))):
            print(f"\n{len(questions):,} {name:<43}{'answers/s':>12}{'vs in process':>15}", flush=True)
            base = 0.0
            seen: list[list[bool]] = []
            for how, verify in (
                ("math-verify in process, no deadline", in_process),
                ("AnswerVerifier.verify, one by one", lambda q: one_by_one(verifier, q)),
                (f"AnswerVerifier.verify_async, {WORKERS} children", lambda q: together(verifier, q)),
            ):
                began = time.perf_counter()
                seen.append(verify(questions))
                rate = len(questions) / (time.perf_counter() - began)
                base = base or rate
                print(f"{how:<50}{rate:>12,.0f}{rate / base:>14.2f}x", flush=True)
            assert all(a == b for a, b in itertools.pairwise(seen)), "the ways disagree"

        for answer in ("9^{9^{9^{9}}}", "(x+y+z+w)^{999}"):
            began = time.perf_counter()
            verdict = verifier.verify("1", rf"\boxed{{{answer}}}")
            print(f"\n{answer}: {verdict.how} after {time.perf_counter() - began:.2f} s", end="")
        began = time.perf_counter()
        verdict = verifier.verify("1/2", r"\boxed{0.5}")
        print(f"\nthe next answer: {verdict.how} after {time.perf_counter() - began:.2f} s")


if __name__ == "__main__":
    main()
