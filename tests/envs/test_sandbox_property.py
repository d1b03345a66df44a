"""Whatever is thrown at the sandbox, it answers, and rightly where the answer is known."""

from __future__ import annotations

import asyncio
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sandbox_cases import at_rest, below_this_test, call, eventually, missing, small

from torchrl_copc.envs.sandbox.config import Status

pytestmark = pytest.mark.skipif(bool(missing("warm")), reason=missing("warm"))
QUICK = settings(max_examples=40, deadline=None, derandomize=True)

VOCABULARY = """import os sys ctypes ( ) [ ] { } : , . = == 0 1 10**9 -1 'x' b'\\xff' print open while for in range if
    else try except finally raise def class lambda return yield await async del global True None self __import__ exec
    eval os.kill os.fork os._exit sys.exit os.listdir('/') bytearray(2**33) \\"""
WORDS = st.sampled_from([*VOCABULARY.split(), "\n", "\n    ", "\n\t"])
STATEMENTS = st.sampled_from(
    [
        "x = 1", "while True: pass", "import os", "os.fork()", "os.kill(0, 9)", "print('a' * 10**6)", "x = [x] * 10**8",
        "open('f', 'w').write('y' * 10**7)", "raise MemoryError", "raise SystemExit(118)", "def f(): return f()", "f()",
        "import ctypes; ctypes.string_at(8)", "import sys; sys.stdout.close()", "import threading", "del __builtins__",
        "threading.Thread(target=f).start()", "import gc; gc.disable()", "os.close(1)", "os._exit(255)", "x = x ** x",
        "sys.modules.clear()", "import signal; signal.alarm(1)", "globals().clear()",
        "import atexit; atexit.register(f)",         "sys.setrecursionlimit(10**9)", "print(eval('(' * 50 + ')' * 50))",
        "x = b'\\xff'.decode()",
        "exec('x = ' + '-' * 10**5)",
    ]
)  # fmt: skip


@pytest.fixture(scope="module")
def sandbox():
    box = small(timeout=0.3, max_output_bytes=4096)
    call(box, "")
    box.processes = at_rest()
    yield box
    asyncio.run(box.close())


def check(sandbox, code: str, *, print_last: bool = False) -> None:
    result = call(sandbox, code, print_last=print_last)
    assert result.status in get_args(Status)
    assert len(result.stdout) + len(result.stderr) <= 4096
    assert eventually(lambda: below_this_test() == sandbox.processes), "the server died or something stayed"
    assert call(sandbox, "print(6 * 7)", timeout=5).stdout == "42\n"


@QUICK
@given(st.binary(max_size=200))
def test_random_bytes(sandbox, data):
    check(sandbox, data.decode("utf-8", "surrogateescape"))
    check(sandbox, data.decode("latin-1"), print_last=True)


@QUICK
@given(st.text(max_size=100), st.booleans())
def test_random_text(sandbox, code, print_last):
    check(sandbox, code, print_last=print_last)


@QUICK
@given(st.lists(WORDS, max_size=30).map(" ".join), st.booleans())
def test_random_words_of_python(sandbox, code, print_last):
    check(sandbox, code, print_last=print_last)


@QUICK
@given(st.lists(STATEMENTS, max_size=6).map("\n".join), st.booleans())
def test_random_statements(sandbox, code, print_last):
    check(sandbox, code, print_last=print_last)


EXPRESSIONS = st.recursive(
    st.integers(-50, 50).map(lambda n: f"({n})"),
    lambda inner: st.tuples(
        inner, st.sampled_from(["+", "-", "*", "//", "%", "&", "|", "^", "<", "=="]), inner
    ).map(lambda parts: f"({' '.join(parts)})"),
    max_leaves=12,
)


@QUICK
@given(EXPRESSIONS)
def test_expressions_have_the_value_they_have_outside(sandbox, expression):
    try:
        expected = ("ok", f"{eval(expression)!r}\n")
    except ZeroDivisionError:
        expected = ("error", "")
    result = call(sandbox, expression, print_last=True, timeout=5)
    assert (result.status, result.stdout) == expected
