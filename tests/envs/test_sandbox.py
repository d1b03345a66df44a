"""The sandbox as its callers see it: results, statuses, cancelling, and what happens when its servers die."""

from __future__ import annotations

import asyncio
import doctest
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from sandbox_cases import (
    WITH_PACKAGES,
    at_rest,
    below_this_test,
    call,
    descriptors,
    eventually,
    missing,
    server_processes,
    small,
)

from torchrl_copc.envs.sandbox import Sandbox, SandboxConfig, SandboxError, client, config, worker
from torchrl_copc.envs.sandbox.choose import first_worker

pytestmark = pytest.mark.skipif(bool(missing("warm")), reason=missing("warm"))
CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sandbox():
    box = small(**WITH_PACKAGES)
    yield box
    asyncio.run(box.close())


@pytest.fixture(scope="module")
def mortal():
    """A sandbox whose servers start fast enough to be killed."""
    box = small()
    yield box
    asyncio.run(box.close())


def server_of(box: Sandbox) -> int:
    """The process that forks: the one without a child of its own, told from other sandboxes' by its packages."""
    call(box, "")
    at_rest()
    (found,) = [
        process.pid
        for process in psutil.Process().children(recursive=True)
        if "guest.server" in process.cmdline()
        and json.loads(process.cmdline()[-1])["packages"] == [*box.config.packages]
        and not process.children()
    ]
    return found


# Results.


@pytest.mark.parametrize(
    ("code", "status", "stdout", "stderr"),
    [
        ("print(6 * 7)", "ok", "42\n", ""),
        ("", "ok", "", ""),
        ("1 / 0", "error", "", "ZeroDivisionError: division by zero"),
        ("def f(:", "error", "", "SyntaxError: invalid syntax"),
        ("a = 1\0", "error", "", "null bytes"),
        ("x = '\ud800'", "error", "", "surrogates not allowed"),
        ("print('before'); raise SystemExit", "ok", "before\n", ""),
        ("exit()", "ok", "", ""),
        ("exit(3)", "error", "", ""),
        ("import sys; sys.exit('bye')", "error", "", "bye"),
        ("import atexit, sys; atexit.register(print, 'at exit'); sys.exit(3)", "error", "at exit\n", ""),
        ("import os; os._exit(0)", "ok", "", ""),
        ("raise KeyboardInterrupt", "error", "", "KeyboardInterrupt"),
        ("import threading\nthreading.Thread(target=lambda: print('late')).start()", "ok", "late\n", ""),
        ("import atexit; atexit.register(print, 'bye')", "ok", "bye\n", ""),
        ("try: bytearray(8 << 30)\nexcept MemoryError: print('caught')", "ok", "caught\n", ""),
        ("print(__name__); import sys; print(sys.argv)", "ok", "__main__\n['main.py']\n", ""),
        (
            "from __future__ import annotations\ndef f(x: y): pass\nprint(f.__annotations__)",
            "ok",
            "{'x': 'y'}\n",
            "",
        ),
        ("def f(x: int): pass\nprint(f.__annotations__)", "ok", "{'x': <class 'int'>}\n", ""),
        ("import numpy as np; print(int(np.linalg.det(np.eye(3))))", "ok", "1\n", ""),
        ("from sympy import *; x = symbols('x'); print(solve(x**2 - 4))", "ok", "[-2, 2]\n", ""),
        ("open('f', 'w').write('x'); print(open('f').read())", "ok", "x\n", ""),
        ("import zoneinfo; print(zoneinfo.ZoneInfo('Europe/Berlin'))", "ok", "Europe/Berlin\n", ""),
        ("import ssl, sqlite3, hashlib, lzma; print(hashlib.md5(b'').hexdigest()[:4])", "ok", "d41d\n", ""),
    ],
)
def test_what_a_script_does_is_reported(sandbox, code, status, stdout, stderr):
    result = call(sandbox, code)
    assert (result.status, result.stdout) == (status, stdout), result
    assert stderr in result.stderr.strip().rpartition("\n")[2]
    assert 0 < result.seconds < 5


def test_a_traceback_shows_the_code_and_nothing_of_ours(sandbox):
    result = call(sandbox, "def f(x):\n    return 1 / x\nprint('a')\nf(0)")
    assert result.stdout == "a\n"
    expected = [
        "Traceback (most recent call last):",
        '  File "main.py", line 4, in <module>',
        "    f(0)",
        '  File "main.py", line 2, in f',
        "    return 1 / x",
        "ZeroDivisionError: division by zero",
    ]
    lines = [line for line in result.stderr.splitlines() if set(line) - set(" ~^")]
    assert lines == expected


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("x = 3\nx * 2", "6\n"),
        ("'a\\n'", "'a\\n'\n"),
        ("None", ""),
        ("print(1)", "1\n"),
        ("x = 3", ""),
        ("5;", "5\n"),
        ("for i in range(3): i", ""),
        ("# only a comment", ""),
        ("x = (1,\n 2)\n(x,\n x)", "((1, 2), (1, 2))\n"),
        ("def f():\n    return 4\nf()", "4\n"),
    ],
)
def test_the_value_of_a_last_expression_is_printed_on_request(sandbox, code, printed):
    assert call(sandbox, code, print_last=True).stdout == printed
    assert call(sandbox, code).stdout == ("1\n" if "print" in code else "")


def test_an_error_in_a_last_expression_is_reported_where_it_is(sandbox):
    result = call(sandbox, "x = 1\nx / 0", print_last=True)
    assert result.status == "error" and '  File "main.py", line 2, in <module>\n    x / 0\n' in result.stderr
    assert "SyntaxError" in call(sandbox, "x =", print_last=True).stderr


def test_what_was_printed_before_a_kill_is_kept(sandbox):
    assert call(sandbox, "print('so far')\nwhile True: pass", timeout=0.3).stdout == "so far\n"
    crash = call(sandbox, "print('so far'); import ctypes; ctypes.string_at(1)")
    assert (crash.status, crash.stdout) == ("killed", "so far\n")


def test_the_output_limit_counts_both_streams_and_keeps_what_fits():
    box = small(max_output_bytes=1000)
    try:
        exact = call(box, "import sys; sys.stdout.write('x' * 600); sys.stderr.write('y' * 400)")
        assert (exact.status, len(exact.stdout), len(exact.stderr)) == ("ok", 600, 400)
        more = call(box, "import sys; sys.stdout.write('x' * 1001)")
        assert (more.status, more.stdout) == ("output_limit", "x" * 1000)
        assert call(box, "print('x' * 10**9)").status in ("output_limit", "memory")
    finally:
        asyncio.run(box.close())


def test_random_numbers_differ_from_call_to_call(sandbox):
    code = "import random, numpy; print(random.random(), numpy.random.rand(), numpy.random.default_rng().random())"
    first, second = (call(sandbox, code).stdout.split() for _ in range(2))
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_the_memory_limit_is_the_callers():
    box = small(memory_mb=64, packages=("numpy",))
    try:
        assert call(box, "x = bytearray(40 << 20); print(len(x) >> 20)").stdout == "40\n"
        assert call(box, "bytearray(70 << 20)").status == "memory"
        assert call(box, "import numpy; numpy.ones(70 << 17)").status == "memory"
        assert call(box, "import mmap; mmap.mmap(-1, 70 << 20)").status == "error"
    finally:
        asyncio.run(box.close())


def test_a_call_may_start_32_threads_and_no_more():
    code = """
import threading
stop, started = threading.Event(), 0
try:
    while True:
        threading.Thread(target=stop.wait, args=(5,)).start()
        started += 1
finally:
    stop.set()
    print(started)
"""
    box = small(memory_mb=SandboxConfig().memory_mb)
    try:
        result = call(box, code)
    finally:
        asyncio.run(box.close())
    assert result.stdout == "32\n" and "can't start new thread" in result.stderr


def test_code_of_more_than_a_mebibyte_is_an_error_without_running(sandbox):
    fits = "#" + "x" * (client.MAX_CODE_BYTES - 1)
    assert call(sandbox, fits).status == "ok"
    result = call(sandbox, fits + "x")
    assert result.status == "error" and f"{client.MAX_CODE_BYTES} are allowed" in result.stderr


# Many at once.


def test_workers_run_side_by_side_and_waiting_costs_no_time_of_the_call():
    box = small(workers=2, timeout=1.8)

    async def four() -> tuple[list[str], float]:
        await box.start()
        began = time.monotonic()
        results = await asyncio.gather(*(box.run("import time; time.sleep(1.0)") for _ in range(4)))
        return [result.status for result in results], time.monotonic() - began

    try:
        statuses, seconds = asyncio.run(four())
    finally:
        asyncio.run(box.close())
    assert statuses == ["ok"] * 4 and 2.0 <= seconds < 4.0


def test_many_calls_each_get_their_own_answer_and_leak_nothing(sandbox):
    async def all_of_them() -> list[str]:
        return [r.stdout for r in await asyncio.gather(*(sandbox.run(f"print({i})") for i in range(40)))]

    call(sandbox, "")
    before, server = descriptors(os.getpid()), server_of(sandbox)
    inside = descriptors(server)
    assert asyncio.run(all_of_them()) == [f"{i}\n" for i in range(40)]
    assert descriptors(os.getpid()) == before and descriptors(server) == inside


# Cancelling.


def test_cancelling_a_call_ends_its_code_and_keeps_the_server(sandbox):
    server = server_of(sandbox)

    async def cancel_one() -> float:
        task = asyncio.create_task(sandbox.run("while True: pass", timeout=60))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        began = time.monotonic()
        assert (await sandbox.run("print(1)")).stdout == "1\n"
        return time.monotonic() - began

    assert asyncio.run(cancel_one()) < 5
    assert server_of(sandbox) == server


def test_a_call_cancelled_while_it_waits_never_runs(sandbox):
    async def scenario() -> None:
        running = asyncio.create_task(sandbox.run("import time; time.sleep(0.5)"))
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(sandbox.run("while True: pass", timeout=60))
        await asyncio.sleep(0.1)
        waiting.cancel()
        assert (await running).status == "ok"
        assert (await asyncio.wait_for(sandbox.run("print(1)"), 5)).stdout == "1\n"

    asyncio.run(scenario())


def test_cancelling_at_any_moment_leaves_the_next_call_right(sandbox):
    async def scenario() -> None:
        for step in range(40):
            task = asyncio.create_task(sandbox.run("print('cancelled')"))
            await asyncio.sleep(step * 5e-4)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert (await sandbox.run(f"print({step})")).stdout == f"{step}\n"

    server = server_of(sandbox)
    asyncio.run(scenario())
    assert server_of(sandbox) == server


# Dying servers.


def test_a_server_that_dies_during_a_call_is_the_calls_end_and_is_replaced(mortal, caplog):
    server = server_of(mortal)

    async def scenario() -> None:
        task = asyncio.create_task(mortal.run("while True: pass", timeout=60))
        await asyncio.sleep(0.3)
        os.kill(server, signal.SIGKILL)
        result = await asyncio.wait_for(task, 10)
        assert (result.status, result.stdout) == (
            "killed",
            "",
        ) and "the sandbox server ended" in result.stderr
        assert (await mortal.run("print(1)")).stdout == "1\n"

    asyncio.run(scenario())
    assert server_of(mortal) != server
    assert "the call counts as killed" in caplog.text


def test_a_server_that_died_between_calls_is_replaced_unseen(mortal, caplog):
    server = server_of(mortal)
    os.kill(server, signal.SIGKILL)
    assert eventually(lambda: not psutil.pid_exists(server))
    assert eventually(lambda: call(mortal, "print(1)").stdout == "1\n")
    assert "died" in caplog.text or "ended" in caplog.text


def test_a_server_that_hangs_is_killed_after_the_grace_and_replaced(mortal, monkeypatch):
    monkeypatch.setattr(worker, "GRACE", 0.3)
    server = server_of(mortal)
    os.kill(server, signal.SIGSTOP)
    result = call(mortal, "print(1)", timeout=0.2)
    assert result.status == "killed" and "did not answer in time" in result.stderr
    assert eventually(lambda: not psutil.pid_exists(server))
    assert call(mortal, "print(1)").stdout == "1\n"


# The end.


def test_closing_ends_running_calls_and_every_process_and_a_new_sandbox_works():
    before = at_rest()

    async def scenario() -> None:
        box = small(workers=2)
        await box.start()
        calls = [asyncio.create_task(box.run("while True: pass", timeout=60)) for _ in range(5)]
        await asyncio.sleep(0.3)
        began = time.monotonic()
        await box.close()
        assert time.monotonic() - began < 5
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, SandboxError) and "closed" in str(outcome)
        with pytest.raises(SandboxError, match="the sandbox is closed"):
            await box.run("print(1)")
        await box.close()

    asyncio.run(scenario())
    assert below_this_test() == before

    async def again() -> str:
        async with small() as box:
            return (await box.run("print(2)")).stdout

    assert asyncio.run(again()) == "2\n"
    assert below_this_test() == before


def test_closing_a_sandbox_that_is_starting_ends_the_start(monkeypatch):
    before, begun, go_on = at_rest(), threading.Event(), threading.Event()

    def first(config):
        begun.set()
        go_on.wait(10)
        return first_worker(config)

    monkeypatch.setattr(client, "first_worker", first)

    async def scenario(workers: int) -> None:
        begun.clear()
        go_on.clear()
        box = small(workers=workers)
        starting = [asyncio.create_task(box.start()), asyncio.create_task(box.run("print(1)"))]
        await asyncio.to_thread(begun.wait, 10)
        closing = asyncio.create_task(box.close())
        await asyncio.sleep(0.05)
        go_on.set()
        await closing
        for outcome in await asyncio.gather(*starting, return_exceptions=True):
            assert isinstance(outcome, SandboxError) and "was closed while it started" in str(outcome)

    for workers in (1, 2):
        asyncio.run(scenario(workers))
        assert below_this_test() == before


def test_a_worker_that_cannot_start_ends_the_others_and_a_later_start_works(monkeypatch):
    before, real = at_rest(), client.Worker.start
    first: list[client.Worker] = []

    def start(self):
        if not first:
            first.append(self)
        if self is first[0]:
            return real(self)
        raise SandboxError("no memory just now")

    async def scenario() -> None:
        box = small(workers=3)
        with monkeypatch.context() as patch:
            patch.setattr(client.Worker, "start", start)
            with pytest.raises(SandboxError, match="no memory just now"):
                await box.start()
        assert below_this_test() == before
        outcomes = await asyncio.gather(*(box.run("print(1)") for _ in range(6)))
        assert [outcome.stdout for outcome in outcomes] == ["1\n"] * 6
        await box.close()
        assert below_this_test() == before

    asyncio.run(scenario())


FORGETFUL = """
import asyncio, sys, types
# Without what the packages above import: torch takes seconds.
for name in ("torchrl_copc", "torchrl_copc.envs"):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [name.replace(".", "/")]
from torchrl_copc.envs.sandbox import Sandbox, SandboxConfig
async def main():
    sandbox = Sandbox(SandboxConfig(workers=2, memory_mb=64, packages=()))
    print((await sandbox.run("print(1)")).stdout.strip(), flush=True)
    if sys.argv[1] == "busy":
        await sandbox.run("while True: pass", timeout=60)
asyncio.run(main())
"""


@pytest.mark.parametrize("ending", ["exit", "busy"])
def test_a_client_that_exits_or_is_killed_without_closing_leaves_nothing(ending):
    client_process = subprocess.Popen(
        [sys.executable, "-c", FORGETFUL, ending], stdout=subprocess.PIPE, text=True, cwd=CHECKOUT
    )
    assert client_process.stdout is not None
    assert client_process.stdout.readline() == "1\n"
    if ending == "busy":
        busy = lambda: family(client_process.pid) & server_processes()  # noqa: E731
        assert eventually(lambda: len(busy()) >= 3)
        everything = family(client_process.pid)
        client_process.kill()
        assert eventually(lambda: not any(map(psutil.pid_exists, everything)))
    assert client_process.wait(30) == (0 if ending == "exit" else -signal.SIGKILL)
    client_process.stdout.close()


def family(pid: int) -> set[int]:
    return {process.pid for process in psutil.Process(pid).children(recursive=True)}


# Settings and the command line.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 0}, "sandbox.workers is 0; it must be at least 1"),
        ({"timeout": 0}, "sandbox.timeout is 0; it must be a positive number"),
        ({"timeout": float("nan")}, "sandbox.timeout is nan"),
        ({"timeout": 1e9}, "sandbox.timeout is 1000000000.0; it must be at most 86400 seconds, a day"),
        ({"memory_mb": -1}, "sandbox.memory_mb is -1"),
        ({"memory_mb": 10**13}, "sandbox.memory_mb is 10000000000000; it must be at most 16777216"),
        ({"max_output_bytes": 1 << 30}, "sandbox.max_output_bytes is 1073741824; it must be at most 8388608"),
        ({"max_output_bytes": 0}, "sandbox.max_output_bytes is 0"),
        ({"isolation": "docker"}, "sandbox.isolation is 'docker'; it must be one of auto, warm"),
        ({"isolation": "subprocess"}, "set sandbox.unsafe=true if you accept that"),
    ],
)
def test_a_wrong_setting_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        SandboxConfig(**settings)


@pytest.mark.parametrize(("timeout", "problem"), [(0, "must be a positive"), (1e9, "must be at most 86400")])
def test_a_calls_own_timeout_is_checked_likewise(timeout, problem):
    with pytest.raises(ValueError, match=f"^timeout is {timeout}; it {problem}"):
        call(small(), "print(1)", timeout=timeout)


def test_the_longest_timeout_and_the_least_and_most_of_the_rest_work():
    for settings in ({"timeout": 86400.0, "memory_mb": 1 << 24}, {"max_output_bytes": 1}):
        box = small(**settings)
        assert call(box, "").status == "ok"
        asyncio.run(box.close())


def test_the_largest_output_of_the_worst_bytes_arrives():
    box = small(max_output_bytes=8 << 20, timeout=30.0)
    try:
        result = call(box, "import sys; sys.stdout.buffer.write(b'\\xff' * (8 << 20))")
        assert (result.status, result.stdout == "\ufffd" * (8 << 20)) == ("ok", True)
    finally:
        asyncio.run(box.close())


def test_a_package_that_is_not_installed_is_named():
    with pytest.raises(
        SandboxError, match=r"sandbox.packages names 'no_such_package', which is not installed"
    ):
        call(small(packages=("no_such_package",)), "print(1)")


def test_the_command_line_prints_one_json_line():
    done = subprocess.run(
        [sys.executable, "-m", "torchrl_copc.envs.sandbox"],
        input=b"print('h\xc3\xa9llo')",
        capture_output=True,
        cwd=CHECKOUT,
        timeout=60,
        check=False,
    )
    answer = json.loads(done.stdout)
    assert done.returncode == 0 and done.stdout.count(b"\n") == 1
    assert list(answer) == ["status", "stdout", "stderr", "seconds"]
    assert (answer["status"], answer["stdout"], answer["stderr"]) == ("ok", "h\u00e9llo\n", "")


def main_with(monkeypatch, code: bytes, *arguments: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(code)))
    monkeypatch.setattr(sys, "argv", ["sandbox", *arguments])
    runpy.run_module("torchrl_copc.envs.sandbox", run_name="__main__")


def test_the_command_line_survives_code_that_is_not_text(monkeypatch, capsys):
    monkeypatch.setattr(config, "SandboxConfig", partial(SandboxConfig, packages=()))  # starts at once
    main_with(monkeypatch, b"\xff\x00\xfe", "--timeout", "2")
    assert json.loads(capsys.readouterr().out)["status"] == "error"


def test_the_command_line_names_a_wrong_setting(monkeypatch, capsys):
    with pytest.raises(SystemExit, match=r"sandbox\.unsafe=true"):
        main_with(monkeypatch, b"", "--isolation", "subprocess")
    assert capsys.readouterr().out == ""


def test_the_command_line_without_standard_input_says_so(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)  # as Python sets it for ``<&-``
    monkeypatch.setattr(sys, "argv", ["sandbox"])
    with pytest.raises(SystemExit, match="standard input is closed"):
        runpy.run_module("torchrl_copc.envs.sandbox", run_name="__main__")


@pytest.mark.parametrize("module", ["client", "config"])
def test_examples_in_docstrings(module):
    outcome = doctest.testmod(sys.modules[f"torchrl_copc.envs.sandbox.{module}"])
    assert outcome.attempted and not outcome.failed
