r"""Verification of maths answers: what counts as right, pinned, and that no answer can hold anything up."""

from __future__ import annotations

import asyncio
import doctest
import importlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("math_verify")

from torchrl_copc.envs.math import AnswerVerifier, Verdict, check_gold, verify_answer
from torchrl_copc.envs.math import judge as judge_module
from torchrl_copc.envs.math.answer import _BRACES, as_integer, last_boxed
from torchrl_copc.envs.math.judge import JudgeStartError
from torchrl_copc.envs.math.size import MAX_DEPTH, is_too_large
from torchrl_copc.envs.math.verify import MAX_CHARACTERS

HARD = r"\boxed{(x+y+z+w)^{999}}"  # no large number in it, but expanding it takes minutes


@pytest.fixture(scope="module")
def verifier():
    with AnswerVerifier(workers=1, deadline=20.0) as verifier:  # generous: the machine may be busy
        yield verifier


@pytest.fixture(scope="module")
def hasty():
    with AnswerVerifier(workers=1, deadline=1.0) as verifier:
        yield verifier


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 10.0
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(pid)


def child_pids(verifier: AnswerVerifier) -> list[int]:
    return [child.process.pid for child in verifier._judges._children]


def worker_pids(verifier: AnswerVerifier) -> list[int]:
    """The forks that answer, one of each child."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent in child_pids(verifier):
            found.append(int(status.parent.name))
    return found


# The box.


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{2} and \boxed{3", "2"),  # cut off while writing the next one
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),  # an escaped brace is no brace
        (r"\boxed{x = \boxed{5}}", "5"),
        (r"{ unbalanced } } { \boxed{5} }", "5"),
        (r"\boxed {5}", "5"),
        (r"\\boxed{5}", "5"),
        ("\\boxed{\n5\n}", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{a\\b}", r"a\\b"),
        (r"\boxed 5", None),
        (r"\boxed{5", None),
        (r"boxed{5}", None),
        (r"\fbox{5}", None),
        ("The answer is 5.", None),
        ("", None),
    ],
)
def test_the_last_balanced_box_is_the_answer(text, answer):
    assert last_boxed(text) == answer


@given(st.text(alphabet=r"\{}b 5", max_size=40), st.text(alphabet=r"x5 ", max_size=5))
def test_a_complete_box_at_the_end_is_found_whatever_comes_before(before, inside):
    before = before.removesuffix("\\")  # which would escape the box's own backslash
    assert last_boxed(before + rf" \boxed{{{inside}}}") == inside.strip()


@given(st.lists(st.sampled_from(["\\", "\\", "{", "}", "boxed", " ", "\n", "5"]), max_size=20))
def test_the_fast_expression_finds_what_the_plain_one_finds(parts):
    plain = re.compile(r"\\+boxed\s*\{|\\.|[{}]", re.DOTALL)
    text = "".join(parts)
    assert [m.span() for m in _BRACES.finditer(text)] == [m.span() for m in plain.finditer(text)]


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{" * 200_000,
        "\\" * 200_000,
        ("\\" * 500 + "boxed ") * 400,
        r"\boxed" + " " * 200_000,
        r"\boxed{" + "0" * 200_000 + "x}",
        r"\boxed{" + "1," * 100_000 + "}",
        r"\boxed{" + r"\text{" * 100_000 + "}" * 100_001,
        r"\boxed{" + "{9^" * 30_000 + "}" * 30_001,
    ],
)
def test_what_runs_without_a_deadline_takes_linear_time(response):
    with AnswerVerifier() as verifier:
        began = time.perf_counter()
        assert not verifier.verify("1/2", response).correct
        assert time.perf_counter() - began < 3.0
        assert child_pids(verifier) == []


# Integers.


@pytest.mark.parametrize(
    ("text", "integer"),
    [
        ("5", "5"),
        ("+5", "5"),
        ("-5", "-5"),
        ("005", "5"),
        ("-0", "0"),
        ("000", "0"),
        (" 5 ", "5"),
        ("1,234", "1234"),
        ("-1,234,567", "-1234567"),
        (r"12,\!345", "12345"),
        (r"12\,345", "12345"),
        ("$5$", "5"),
        (r"45^\circ", "45"),
        (r"5\text{ cm}", "5"),
        (r"\text{about }5", "5"),
        ("9" * 10_000, "9" * 10_000),  # Python's int() refuses these
        ("1,2", None),
        ("1,2345", None),
        ("1234,567", None),
        ("1 2", None),
        ("1 234", None),
        ("- 5", None),
        ("--5", None),
        ("5x", None),
        ("5.0", None),
        ("5.", None),
        ("5%", None),
        ("1e3", None),
        (r"5\text{ or }6", None),
        (r"\text{5}", None),
        ("٥", None),  # a digit, but not an ASCII one
        ("５", None),
        ("−5", None),
        ("", None),
        ("-", None),
    ],
)
def test_what_is_an_integer(text, integer):
    assert as_integer(text) == integer


@given(st.integers(), st.integers())
def test_integers_are_compared_as_integers(gold, other):
    assert verify_answer(str(gold), rf"\boxed{{{gold:,}}}")
    assert verify_answer(str(gold), rf"\boxed{{{other:+d}}}") is (gold == other)


# Everything else: what math-verify 0.9.0 makes of it.

SAME = [
    (r"\frac{1}{2}", "1/2"),
    (r"\frac12", "0.5"),
    (r"\dfrac{1}{2}", r"\tfrac12"),
    ("1/2", "2/4"),
    ("90", r"\frac{180}{2}"),
    ("12", r"3\cdot4"),
    (r"\sqrt{8}", r"2\sqrt2"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"\frac{n(n+1)}{2}", "0.5n^2+0.5n"),
    ("1000", "1{,}000"),
    ("1000", r"10^{3}"),
    ("1500", r"1.5\times10^3"),
    ("-5", "−5"),  # a Unicode minus
    (r"\pi", "π"),
    ("5", "5.0"),
    ("5", "5."),
    ("5", "5 cm"),
    ("5", r"5\ \mathrm{m}"),
    ("5", r"\text{5}"),
    ("5", r"\textbf{5}"),
    ("5", "x = 5"),
    ("5", "x = 2+3 = 5"),
    ("x=5", "5"),
    ("50", r"\$50"),
    ("45", "45°"),
    ("45", r"45^{\circ}"),
    (r"\text{Monday}", "Monday"),
    ("A", r"\text{(A)}"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("1,2", "2, 1"),
    ("(1,2)", "(1, 2)"),
    ("[1,2)", "[1, 2)"),
    (r"x\le 3", r"(-\infty,3]"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("10!", "3628800"),
    (r"\binom{5}{2}", "10"),
    (r"\sin x", r"\cos(x-\pi/2)"),
]

DIFFERENT = [
    (r"\frac{1}{2}", "0.51"),
    ("5", "5x"),
    ("5", "5 dollars"),
    ("1234", "1,2,34"),
    ("1000", "1 000"),
    ("12", "1 2"),
    ("5", "5 or 6"),
    ("5", "5, 6"),
    ("5", r"\pm 5"),
    ("5", r"5\ne 4"),
    ("5", r"\infty"),
    ("5", r"\text{nan}"),
    ("5", "1/0"),
    ("5", "５"),  # full-width
    ("x", "y"),
    ("(1,2)", "(2,1)"),
    ("[1,2]", "(1,2)"),
    (r"[1,2]", r"\{1,2\}"),
    (r"(-\infty,3]", r"x\le 3"),  # not symmetric: only a gold relation becomes an interval
    (r"\text{even}", r"\text{odd}"),
    (r"\text{no}", r"\text{on}"),
    (r"\pi", "3.14159"),
    (r"\frac{1}{3}", "0.3333"),
    ("500", r"5\%"),
    ("1", "💥"),
    ("1", "\x00\x01"),
    ("1", "\ud800"),  # a lone surrogate
]

# Lenient on purpose of math-verify; a policy could find them, so they stand here to be known.
LENIENT = [
    ("50", r"50\%"),
    ("50", "50%"),
    (r"\frac{1}{3}", ".3333333"),
    ("0.05", "5%"),
    ("(1,2)", r"\{1,2\}"),
    ("(1,2)", "1,2"),
    ("5", "4=5"),  # the last side of an equation
    ("5", r"5\approx 4"),
    ("5", "|5|"),
    ("5", r"\{5\}"),
    ("5", "the answer is 5"),
    ("5", r"4 \foo 5"),  # the last number where the rest does not parse
    ("10:30", "1/3"),
]


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_equal_answers(verifier, gold, answer):
    verdict = verifier.verify(gold, rf"So it is \boxed{{{answer}}}.")
    assert verdict.correct and verdict.how == "math_verify"


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_unequal_answers(verifier, gold, answer):
    verdict = verifier.verify(gold, rf"So it is \boxed{{{answer}}}.")
    assert not verdict.correct and verdict.how == "math_verify"


@pytest.mark.parametrize(("gold", "answer"), LENIENT)
def test_known_leniency(verifier, gold, answer):
    assert verifier.verify(gold, rf"\boxed{{{answer}}}").correct


@pytest.mark.parametrize("gold", [r"\frac{1}{2}", r"$\frac{1}{2}$", r"\boxed{\frac{1}{2}}", "\\frac{1}{2}\n"])
def test_a_gold_answer_may_come_with_dollars_or_a_box(verifier, gold):
    assert verifier.verify(gold, r"\boxed{$\frac12$}").correct
    verifier.check_gold(gold)


@pytest.mark.parametrize(
    ("response", "how"),
    [
        ("", "no_answer"),
        ("The answer is 5.", "no_answer"),
        (r"\boxed{5", "no_answer"),
        (r"\boxed{ }", "no_answer"),
        (r"\boxed{" + "(" * MAX_CHARACTERS + "5" + ")" * MAX_CHARACTERS + "}", "too_long"),
        (r"\boxed{" + "1+" * 100_000 + "}", "too_long"),
    ],
)
def test_a_response_without_a_usable_answer_is_wrong(verifier, response, how):
    began = time.perf_counter()
    verdict = verifier.verify("5", response)
    assert not verdict.correct and verdict.how == how
    assert time.perf_counter() - began < 1.0


def test_an_empty_gold_answer_is_equal_to_nothing(verifier):
    assert not verifier.verify("", r"\boxed{5}").correct
    assert not verifier.verify("", r"\boxed{}").correct


def test_two_boxes_are_two_answers_of_which_the_last_counts(verifier):
    assert not verifier.verify(r"\{1,2\}", r"\boxed{1} and \boxed{2}").correct
    assert verifier.verify("2", r"\boxed{1} and \boxed{2}").correct


# Numbers too large to compute.

TOO_LARGE = [
    "9^{9^{9^{9}}}",
    "9^9^9^9",
    "9**9**9",
    "9^(9^{9})",
    r"\left(9^{9^{9}}\right)^{2}",
    "((9^{999})^{999})^{999}",
    "9^{99999}",
    "9^{9{,}999{,}999}",
    r"9^{-999\cdot 999}",
    "9^{9^{9}+x}",
    "x^{9^{9^{9}}}",
    "e^{e^{e^{9}}}",
    r"\exp(\exp(99))",
    "((((10!)!)!)!)",
    "10!!",
    "99999!",
    r"(99\cdot 999)!",
    r"\prod_{n=1}^{10^7} n",
    r"\sum_{n=-99999}^{9} n",
    r"\binom{10^9}{10^8}",
    r"\sqrt{9^{9^{9}}}",
    "(" * 400 + "1" + ")" * 400,
    r"\frac{1}{" * 80 + "1" + "}" * 80,
    "9^" * 400 + "9",
]

NOT_TOO_LARGE = [
    "2^{2024}-1",
    r"\binom{2024}{1012}",
    "e^{-x^2/2}",
    "2^{2^n}",
    "2^{2^{3}}",
    "2024!",
    "(2n-1)!!",
    r"\frac{(2n)!}{2^n\,n!}",
    r"x^{n_1+n_2+n_3+n_4+n_5}",
    "10^{0.30103}",
    "9" * 500 + "/7",
    r"\sum_{k=1}^{2024} k",
    r"e^{2\pi i/3}",
    "(1+2^{1/3})^2",
    "1010101010_2",
    "[1,2)",
    "^_!})",
    "(" * (MAX_DEPTH - 1) + "1" + ")" * (MAX_DEPTH - 1),
]


def test_which_numbers_are_too_large():
    assert [formula for formula in TOO_LARGE if not is_too_large(formula)] == []
    assert [formula for formula in NOT_TOO_LARGE if is_too_large(formula)] == []


@settings(max_examples=200)
@given(st.lists(st.sampled_from([*"{}()^_!+x9 ", "99", r"\exp", r"\binom", r"\{", "."]), max_size=300))
def test_every_formula_has_a_size(parts):
    assert isinstance(is_too_large("".join(parts)), bool)


def test_too_large_an_answer_starts_no_process_and_is_right_only_as_text():
    with AnswerVerifier(workers=1) as verifier:
        for formula in TOO_LARGE:
            assert verifier.verify("1/2", rf"\boxed{{{formula}}}") == Verdict(False, "too_large")
        assert verifier.verify("9^{9^{9^9}}", r"\boxed{9^{9^{9^{9}}}}") == Verdict(False, "too_large")
        assert verifier.verify("9^{9^{9^9}}", r"\boxed{$9^{9^{ 9^9 }}$}") == Verdict(True, "too_large")
        assert verifier.counts == {"too_large": len(TOO_LARGE) + 2}
        assert child_pids(verifier) == []


# Nothing holds it up.


@pytest.mark.parametrize(
    "answer",
    [
        "(x+y+z+w)^{999}",
        "9^{9999}",
        "9999!",
        r"\Gamma(10^{9})",
        r"\int_0^{1} \exp(x^{x^x}) dx",
        "(" * (MAX_DEPTH - 1) + "1" + ")" * (MAX_DEPTH - 1),
        r"\begin{pmatrix}" + "1&" * 450 + r"\end{pmatrix}",
        "9" * 900 + ".5",
    ],
)
def test_no_answer_takes_longer_than_the_deadline(hasty, answer):
    assert hasty.verify("1/2", r"\boxed{0.5}").correct  # the answer before has left a child that works
    began = time.perf_counter()
    assert not hasty.verify("2", rf"\boxed{{{answer}}}").correct
    assert time.perf_counter() - began < 1.0 + judge_module.PATIENCE


def test_a_late_worker_is_ended_counted_and_replaced_without_a_new_start(hasty):
    hasty.counts.clear()
    assert hasty.verify("1/2", r"\boxed{0.5}").correct
    children, workers = child_pids(hasty), worker_pids(hasty)
    assert hasty.verify("1", HARD).how == "timeout"
    assert len(workers) == 1 and not alive(workers[0])
    assert hasty.verify("1/2", r"\boxed{0.5}").correct
    assert child_pids(hasty) == children
    assert len(worker_pids(hasty)) == 1
    assert hasty.counts == {"math_verify": 2, "timeout": 1}


def test_the_deadline_is_of_processor_time():
    """Beside it other processes may run: here the worker stands still for three deadlines."""
    with AnswerVerifier(workers=1, deadline=0.5) as verifier, ThreadPoolExecutor(1) as thread:
        assert verifier.verify("1/2", r"\boxed{0.5}").correct
        (worker,) = worker_pids(verifier)
        os.kill(worker, signal.SIGSTOP)
        verdict = thread.submit(verifier.verify, "1/3", r"\boxed{2/6}")
        time.sleep(1.5)
        os.kill(worker, signal.SIGCONT)
        assert verdict.result() == Verdict(True, "math_verify")


def test_a_worker_that_stands_still_is_killed(monkeypatch):
    monkeypatch.setattr(judge_module, "PATIENCE", 1.0)
    with AnswerVerifier(workers=1, deadline=1.0) as verifier:
        assert verifier.verify("1/2", r"\boxed{0.5}").correct
        (worker,) = worker_pids(verifier)
        os.kill(worker, signal.SIGSTOP)
        assert verifier.verify("1/2", r"\boxed{0.5}").how == "timeout"
        wait_until_gone(worker)


@pytest.mark.parametrize("whom", [child_pids, worker_pids])
def test_a_process_that_dies_makes_one_answer_wrong(verifier, whom):
    assert verifier.verify("1/2", r"\boxed{0.5}").correct
    (pid,) = whom(verifier)
    os.kill(pid, signal.SIGKILL)
    assert verifier.verify("1/2", r"\boxed{0.5}").how == "crash"
    assert verifier.verify("1/2", r"\boxed{0.5}").correct


def test_a_child_is_replaced_before_its_memory_can_fill(monkeypatch):
    monkeypatch.setattr(judge_module, "REQUESTS_PER_CHILD", 2)
    with AnswerVerifier(workers=1) as verifier:
        pids = []
        for _ in range(3):
            assert verifier.verify("1/2", r"\boxed{0.5}").correct
            pids.extend(child_pids(verifier))
    assert len(pids) == 2 and pids[0] != pids[1]  # no child is left after the second answer


def test_the_event_loop_runs_on_and_hung_answers_do_not_add_up():
    async def main():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.02)
                ticks += 1

        with AnswerVerifier(workers=2, deadline=0.3) as verifier:
            ticker = asyncio.create_task(tick())
            await asyncio.gather(*(verifier.verify_async("1/2", r"\boxed{0.5}") for _ in range(4)))
            children, began = set(child_pids(verifier)), time.perf_counter()
            hung = [verifier.verify_async("1", HARD) for _ in range(12)]
            right = [verifier.verify_async("1/2", r"\boxed{0.5}") for _ in range(4)]
            integer = verifier.verify_async("5", r"\boxed{5}")
            verdicts = await asyncio.gather(*hung, *right, integer)
            ticker.cancel()
            assert set(child_pids(verifier)) == children  # none had to start again, which takes seconds
            return verdicts, ticks, time.perf_counter() - began

    verdicts, ticks, seconds = asyncio.run(main())
    assert [v.how for v in verdicts] == ["timeout"] * 12 + ["math_verify"] * 4 + ["integer"]
    assert all(v.correct for v in verdicts[12:])
    assert ticks > 20
    assert seconds < 30.0  # 12 x .3 s of processor time in two processes, which other programs may share


def test_a_cancelled_coroutine_gives_its_place_in_the_queue_back():
    async def main():
        with AnswerVerifier(workers=1, deadline=1.0) as verifier:
            await verifier.verify_async("1/2", r"\boxed{0.5}")
            tasks = [asyncio.create_task(verifier.verify_async("1", HARD)) for _ in range(50)]
            await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
            return await verifier.verify_async("1/2", r"\boxed{0.5}")

    began = time.perf_counter()
    assert asyncio.run(main()).correct
    assert time.perf_counter() - began < 15.0  # not fifty deadlines


def test_many_threads_share_the_children():
    def ask(number):
        return verify_answer(rf"\frac{{{number}}}{{7}}", rf"\boxed{{{number % 10}/7}}")

    with ThreadPoolExecutor(8) as threads:
        right = list(threads.map(ask, range(20)))
    assert right == [number < 10 for number in range(20)]


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=60), st.text(alphabet=r"\{}()^_!0123456789+-*/=,.frac sqrtx", max_size=40))
def test_random_answers_give_a_verdict(verifier, noise, formula):
    for text in (noise, formula):
        assert isinstance(verifier.verify(r"\frac{1}{7}", rf"\boxed{{{text}}}").correct, bool)
    assert verifier.verify(r"\frac{1}{7}", r"\boxed{2/14}").correct


# Its processes.


def test_integers_start_no_process():
    with AnswerVerifier() as verifier:
        assert verifier.verify("5", r"\boxed{5}").correct
        assert child_pids(verifier) == []


def test_closing_ends_the_children_even_in_the_middle_of_an_answer():
    verifier = AnswerVerifier(workers=1, deadline=60.0)
    assert verifier.verify("1/2", r"\boxed{0.5}").correct
    pids = [*child_pids(verifier), *worker_pids(verifier)]
    assert len(pids) == 2
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(verifier.verify("1", HARD)))
    thread.start()
    time.sleep(0.5)
    verifier.close()
    thread.join(10.0)
    assert [verdict.how for verdict in verdicts] == ["crash"]
    for pid in pids:
        wait_until_gone(pid)
    verifier.close()


def run(program, *arguments):
    program = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=120)


@pytest.mark.slow  # imports torch anew
def test_scripts_need_no_main_guard_and_forks_get_children_of_their_own():
    result = run(r"""
        import os
        from torchrl_copc.envs.math import verify, verify_answer

        assert verify_answer("1/2", r"\boxed{0.5}")
        if os.fork() == 0:
            assert verify_answer("1/2", r"\boxed{0.25}") is False
            assert verify_answer("1/2", r"\boxed{0.5}")
            os._exit(0)
        assert os.wait()[1] == 0
        assert verify_answer("1/2", r"\boxed{0.5}")
        assert verify._shared.counts == {"math_verify": 2}
    """)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("pass", 0),
        ("pool.compare('1', '(x+y+z+w)^{999}'); os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_no_child_outlives_its_parent(ending, status):
    # The pool alone needs no torch, which takes seconds to import.
    program = """
        import importlib.util, os, signal, sys
        spec = importlib.util.spec_from_file_location("judge", sys.argv[1])
        judge = sys.modules["judge"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(judge)
        pool = judge.JudgePool(1, 1.0)
        assert pool.compare("1/2", "0.5").result() is True
        print(*(child.process.pid for child in pool._children), flush=True)
        exec(sys.argv[2])
    """
    result = run(program, judge_module.__file__, ending)
    assert result.returncode == status, result.stderr
    wait_until_gone(int(result.stdout))  # a busy orphan is ended by its own timer


def test_a_missing_math_verify_is_named(tmp_path, monkeypatch):
    program = tmp_path / "judge_child.py"
    source = judge_module._PROGRAM.read_text()
    program.write_text(source.replace("import sys\n", "import sys\nsys.modules['math_verify'] = None\n", 1))
    monkeypatch.setattr(judge_module, "_PROGRAM", program)
    with AnswerVerifier() as verifier, pytest.raises(ImportError, match=r"torchrl-copc\[envs\]"):
        verifier.verify("1/2", r"\boxed{0.5}")


def test_a_child_that_does_not_start_is_an_error_not_a_wrong_answer(tmp_path, monkeypatch):
    program = tmp_path / "judge_child.py"
    program.write_text("raise SystemExit(3)")
    monkeypatch.setattr(judge_module, "_PROGRAM", program)
    with AnswerVerifier() as verifier, pytest.raises(JudgeStartError, match="status 3"):
        verifier.verify("1/2", r"\boxed{0.5}")


@pytest.mark.parametrize(("setting", "value"), [("workers", 0), ("deadline", 0.0)])
def test_settings_that_cannot_work_are_named(setting, value):
    with pytest.raises(ValueError, match=f"{setting}={value}"):
        AnswerVerifier(**{setting: value})


# Gold answers.


@pytest.mark.parametrize(
    "gold",
    [
        "5",
        "-1,000",
        r"\frac{\pi}{4}",
        "(1,2]",
        "x>0",
        r"\text{no solution}",
        "xy",
        "x y",
        r"x \cdot y \cdot z",
        "5 cm",
        r"\begin{array}{ccc}1&2&3\end{array}",
        "sqrt(2)",
        "A",
    ],
)
def test_usable_gold_answers(gold):
    check_gold(gold)


@pytest.mark.parametrize(
    ("gold", "problem"),
    [
        ("", "empty"),
        (" $ $ ", "empty"),
        (r"\frac{1}{", "does not parse"),
        ("???", "does not parse"),
        ("0/0", "undefined"),
        ("see the solution", "product of letters"),
        ("Monday", "product of letters"),
        ("yes", "'yes' would be read as a product of letters"),
        ("We get 3.", "'get' would be .* passed over"),
        ("it is 3", "'it is' would be"),
        ("x or y", "'x or' would be"),
        ("5 apples", "'apples' would be"),
        ("9^{9^{9^{9}}}", "too large to compute"),
        ("1 000", "side by side"),
        ("8 6 2\n4 5 3", "side by side"),
        ("1+" * MAX_CHARACTERS + "1", "characters"),
    ],
)
def test_unusable_gold_answers_are_refused_with_the_reason(gold, problem):
    with pytest.raises(ValueError, match=problem):
        check_gold(gold)


def test_a_gold_answer_too_hard_to_parse_is_refused():
    nested = "(" * (MAX_DEPTH - 1) + "1" + ")" * (MAX_DEPTH - 1)  # takes most of a second
    with (
        AnswerVerifier(workers=1, deadline=0.05) as verifier,
        pytest.raises(ValueError, match=r"longer than deadline=0\.05 s of processor"),
    ):
        verifier.check_gold(nested)


def test_throughput_of_integers():
    responses = [rf"Adding up gives \boxed{{{number:,}}}." for number in range(2_000)]
    began = time.perf_counter()
    right = sum(verify_answer(str(number), response) for number, response in enumerate(responses))
    assert right == 2_000
    assert 2_000 / (time.perf_counter() - began) > 500


@pytest.mark.parametrize("name", ["answer", "size", "verify"])
def test_examples_in_docstrings(name):
    outcome = doctest.testmod(importlib.import_module(f"torchrl_copc.envs.math.{name}"))
    assert outcome.failed == 0 and outcome.attempted > 0
