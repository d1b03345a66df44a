"""Code that means harm: it ends as it should, leaves nothing behind, and the next call works."""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from sandbox_cases import (
    BUBBLEWRAP,
    LANDLOCK,
    WITH_PACKAGES,
    adopting,
    at_rest,
    below_this_test,
    call,
    descriptors,
    eventually,
    missing,
    server_processes,
    small,
)

CHECKOUT = Path(__file__).parents[2]
MARK = f"sandbox-escape-{uuid.uuid4().hex}"  # in the name of every file that hostile code tries to make
WRITABLE_PLACES = (
    "/",
    "/tmp",
    "/var/tmp",
    "/dev/shm",
    "/usr",
    "/usr/lib",
    "/root",
    os.path.expanduser("~"),
    os.getcwd(),
)

TRY = """
import os
def attempt(what, action):
    try:
        action()
    except (OSError, ValueError) as error:
        print("refused", what, error)
    else:
        print("DONE", what)
"""


@dataclass(frozen=True)
class Hostile:
    """``status`` and ``last`` (end of standard error) where the code gets; ``scratch`` if it needs files to write."""

    code: str
    status: str
    last: str = ""
    scratch: bool = False
    settings: dict = field(default_factory=dict)


STOPPED = {"timeout": 0.4}
SNIPPETS = {
    "busy loop": Hostile("while True: pass", "timeout", settings=STOPPED),
    "sleep": Hostile("import time; time.sleep(100)", "timeout", settings=STOPPED),
    "8 GB bytearray": Hostile("bytearray(8 << 30)", "memory", "MemoryError"),
    "growing list": Hostile("l = []\nwhile True: l.append('x' * 1_000_000)", "memory", "MemoryError"),
    "fork bomb": Hostile("import os\nwhile True: os.fork()", "error", "Operation not permitted"),
    "thread bomb": Hostile(
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(100,)).start()",
        "error",
        "RuntimeError: can't start new thread",
    ),
    "endless print": Hostile("while True: print('x' * 1000)", "output_limit"),
    "endless print to stderr": Hostile("import sys\nwhile True: print('x', file=sys.stderr)", "output_limit"),
    "read /etc/shadow": Hostile("open('/etc/shadow').read()", "error", "'/etc/shadow'"),
    "read the checkout": Hostile(f"open({str(CHECKOUT / 'setup.cfg')!r}).read()", "error", "setup.cfg'"),
    "list home": Hostile(f"import os; os.listdir({os.path.expanduser('~/.ssh')!r})", "error", ".ssh'"),
    "fill a file": Hostile(
        f"f = open('{MARK}', 'wb', 0)\nwhile True: f.write(b'x' * 1_000_000)",
        "error",
        "No space left on device",
        scratch=True,
    ),
    "fill the scratch": Hostile(
        f"for i in range(99): open(f'{MARK}{{i}}', 'wb').write(b'x' * 1_000_000)",
        "error",
        "No space left on device",
        scratch=True,
    ),
    "200,000 files": Hostile(
        f"for i in range(200_000): open(f'{MARK}{{i}}', 'w').close()",
        "error",
        "No space left on device",
        scratch=True,
    ),
    "double fork, setsid, ignore TERM": Hostile(
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(1000)",
        "error",
        "Operation not permitted",
    ),
    "subprocess": Hostile("import subprocess; subprocess.run(['true'])", "error", "Operation not permitted"),
    "exec": Hostile("import os, sys; os.execv(sys.executable, ['python', '-c', 'print(1)'])", "error", "not permitted"),
    "ignore all signals and loop": Hostile(
        "import signal\n"
        "for s in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(s, signal.SIG_IGN)\n"
        "while True: pass",
        "timeout",
        settings=STOPPED,
    ),
    "stop itself": Hostile("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "timeout", settings=STOPPED),
    "kill itself": Hostile("import os; os.kill(os.getpid(), 9)", "killed"),
    "abort": Hostile("import os; os.abort()", "killed"),
    "read address 1": Hostile("import ctypes; ctypes.string_at(1)", "killed"),
    "input": Hostile("input()", "error", "EOFError: EOF when reading a line"),
    "a number of 10**8 digits": Hostile("str(10 ** 10 ** 8)", "timeout", settings=STOPPED),
    "infinite recursion": Hostile("def f(): f()\nf()", "error", "RecursionError: maximum recursion depth exceeded"),
    "memory outside the limit": Hostile("import os; os.memfd_create('x')", "error", "Operation not permitted"),
    "deep nesting": Hostile("(" * 100_000, "error", "too many nested parentheses"),
    "close every descriptor": Hostile("import os; os.closerange(0, 100)", "ok"),
    "break the interpreter's own exit": Hostile(
        "import os, sys, atexit, threading, traceback, builtins\n"
        "os._exit = sys.exit = os.write = traceback.print_exception = None\n"
        "threading._shutdown = atexit._run_exitfuncs = lambda: 1 / 0\n"
        "sys.modules.clear(); builtins.__dict__.clear()",
        "error",
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=[*BUBBLEWRAP, LANDLOCK])
def sandbox(request):
    if reason := missing(request.param):
        pytest.skip(reason)
    with adopting():
        box = small(request.param, **WITH_PACKAGES)
        assert call(box, "print(6 * 7)").stdout == "42\n"
        assert box.isolation == request.param
        yield box
        asyncio.run(box.close())


@pytest.fixture(autouse=True)
def nothing_left(sandbox):
    """After any code: no process, no file and no socket of it, no descriptor of ours, and the next call works."""
    processes, ours = at_rest(), descriptors(os.getpid())
    servers = {pid: descriptors(pid) for pid in processes & server_processes()}
    yield
    assert eventually(lambda: below_this_test() == processes), "a process is left, or a server died"
    assert descriptors(os.getpid()) == ours
    for pid, links in servers.items():
        assert descriptors(pid) == links and "socket" not in links
    for place in (place for place in WRITABLE_PLACES if os.access(place, os.R_OK)):
        assert not [name for name in os.listdir(place) if MARK in name]
    result = call(
        sandbox, "import os, math; print(math.pi, [f for f in os.listdir('.')] if os.getcwd() != '/' else [])"
    )
    assert (result.status, result.stdout) == ("ok", "3.141592653589793 []\n")


@pytest.mark.parametrize("name", SNIPPETS)
def test_hostile_code_ends_as_it_should(sandbox, name):
    hostile = SNIPPETS[name]
    result = call(sandbox, hostile.code, **hostile.settings)
    assert result.status == hostile.status, result
    if hostile.scratch and sandbox.isolation != "warm":  # there no file can be written at all
        assert "Read-only file system" in result.stderr or "Permission denied" in result.stderr
    else:
        assert hostile.last in result.stderr.strip().rpartition("\n")[2]
    if hostile.status == "timeout":
        assert hostile.settings["timeout"] <= result.seconds < hostile.settings["timeout"] + 2
    assert len(result.stdout) + len(result.stderr) <= sandbox.config.max_output_bytes


def test_a_listener_on_the_host_hears_nothing(sandbox):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        port = listener.getsockname()[1]
        result = call(sandbox, f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=1)")
        assert result.status == "error" and "Operation not permitted" in result.stderr
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_secrets_of_the_environment_are_absent(sandbox, monkeypatch):
    monkeypatch.setenv("API_SECRET", "hunter2")
    box = small(sandbox.isolation)
    try:
        result = call(box, "import os; print(os.environ); print(open('/proc/self/environ').read())")
    finally:
        asyncio.run(box.close())
    assert "hunter2" not in result.stdout + result.stderr and "API_SECRET" not in result.stdout
    assert result.stdout.startswith("environ({") and result.status == "error"


def test_nothing_outside_the_scratch_can_be_written(sandbox):
    places = [
        "/usr/lib",
        "/dev/shm",
        "/dev",
        "/packages",
        "/sandbox",
        "/root",
        "/etc",
        "/var/tmp",
        "/home",
        "/",
    ]
    code = (
        TRY
        + f"""
import sys, os, math
for place in {places!r} + [os.path.dirname(os.__file__), os.getcwd() if os.getcwd() != "/tmp" else "/"]:
    attempt("write " + place, lambda: open(os.path.join(place, {MARK!r}), "w"))
    attempt("mkdir " + place, lambda: os.mkdir(os.path.join(place, {MARK!r})))
attempt("truncate", lambda: os.truncate(os.__file__, 0))
attempt("append", lambda: open(os.__file__, "a"))
attempt("unlink", lambda: os.unlink(os.__file__))
attempt("rename", lambda: os.rename(os.__file__, os.__file__ + "x"))
attempt("chmod", lambda: os.chmod(os.__file__, 0o777))
attempt("utime", lambda: os.utime(os.__file__))
attempt("symlink", lambda: os.symlink("/", "/usr/lib/{MARK}"))
import numpy
attempt("site-packages", lambda: open(numpy.__file__, "a"))
"""
    )
    result = call(sandbox, code)
    assert result.status == "ok", result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 2 * 12 + 8 and all(line.startswith("refused") for line in lines), result.stdout


def test_signals_reach_nobody(sandbox):
    code = (
        TRY
        + """
import fcntl
for pid in (0, -1, os.getppid(), 1, 2):
    attempt(f"kill {pid}", lambda: os.kill(pid, 9))
attempt("pidfd", lambda: os.pidfd_open(os.getppid()))
r, w = os.pipe()
# The kernel would send SIGKILL to the owner of the pipe as soon as something is in it.
attempt("owner", lambda: fcntl.fcntl(r, fcntl.F_SETOWN, os.getppid()))
attempt("signal", lambda: fcntl.fcntl(r, 10, 9))
"""
    )
    result = call(sandbox, code)
    assert result.status == "ok", result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 8 and all(line.startswith("refused") for line in lines), result.stdout


def test_no_inherited_descriptor_is_open(sandbox):
    code = """
import os
frame = b'\\x40\\0\\0\\0{"status": "ok", "stdout": "forged", "stderr": "", "seconds": 0.0}  '
for fd in range(3, 4096):
    try:
        os.write(fd, frame)
    except OSError:
        continue
    print("wrote to", fd)
"""
    result = call(sandbox, code)
    assert (result.status, result.stdout) == ("ok", "")


def test_namespaces_mounts_tracing_and_limits_are_refused(sandbox):
    code = (
        TRY
        + """
import ctypes, resource
libc = ctypes.CDLL(None, use_errno=True)
def raw(name, *arguments):
    def action():
        if getattr(libc, name)(*arguments) < 0:
            raise OSError(ctypes.get_errno(), name)
    return action
attempt("user namespace", raw("unshare", 0x10000000))
attempt("mount namespace", raw("unshare", 0x20000))
attempt("mount", raw("mount", b"none", b"/tmp", b"tmpfs", 0, None))
attempt("umount", raw("umount2", b"/tmp", 2))
attempt("ptrace", raw("ptrace", 16, os.getppid(), 0, 0))
attempt("chroot", raw("chroot", b"/tmp"))
attempt("keys", raw("syscall", 250, 0, -3, 0))
attempt("shared memory", raw("shmget", 1, 4096, 0o1600))
attempt("other's limits", raw("prlimit64", os.getppid(), resource.RLIMIT_NOFILE, (ctypes.c_ulong * 2)(0, 0), None))
attempt("undumpable", raw("prctl", 4, 0, 0, 0, 0))
attempt("nice", lambda: os.nice(5))
attempt("setuid", lambda: os.setuid(0))
for limit in ("RLIMIT_AS", "RLIMIT_NOFILE", "RLIMIT_FSIZE", "RLIMIT_CORE"):
    attempt(limit, lambda: resource.setrlimit(getattr(resource, limit), (resource.RLIM_INFINITY,) * 2))
"""
    )
    result = call(sandbox, code)
    assert result.status == "ok", result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 16 and all(line.startswith("refused") for line in lines), result.stdout


def test_locks_leases_and_signals_through_a_descriptor_are_refused(sandbox):
    code = (
        TRY
        + """
import fcntl, struct
null, library = open(os.devnull), open(os.__file__)
for file in (null, library, 0, 1):
    attempt("flock", lambda: fcntl.flock(file, fcntl.LOCK_SH))
    for command in (fcntl.F_GETLK, fcntl.F_SETLK, fcntl.F_SETLKW, fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW):
        attempt(f"lock {command}", lambda: fcntl.fcntl(file, command, struct.pack("hhqqi4x", 0, 0, 0, 0, 0)))
    attempt("lease", lambda: fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK))
    attempt("watch", lambda: fcntl.fcntl(file, fcntl.F_NOTIFY, fcntl.DN_ACCESS))
"""
    )
    result = call(sandbox, code)
    assert result.status == "ok", result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 4 * 8
    assert all(line.startswith("refused") and "[Errno 1]" in line for line in lines), result.stdout


def test_flags_of_the_descriptors_are_fresh_in_every_call(sandbox):
    code = """
import fcntl, os
for fd in range(3):
    print(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_NONBLOCK | os.O_APPEND)), fcntl.fcntl(fd, fcntl.F_GETFD))
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_APPEND)
print(repr(os.read(0, 1)))
"""
    for _ in range(2):
        result = call(sandbox, code)
        assert (result.status, result.stdout) == ("ok", "False 0\n" * 3 + "b''\n"), result


def test_what_an_earlier_call_said_is_nowhere_in_the_memory_of_the_next(sandbox):
    tell = "print('printed secret' * 4000)\n#" + "secret in code" * 400
    # The heaps are found from objects in them; write() says whether a page can be read.
    search = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
words = b"printed secret", b"secret in code"
libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_long]
r, w = os.pipe()
pages, found = 0, 0
def readable(page):
    if libc.write(w, page, 1) != 1:
        return False
    os.read(r, 1)
    return True
def scan(page, step, most):
    global pages, found
    while most and readable(page):
        data = ctypes.string_at(page, 4096)
        found += sum(data.count(word) > 20 for word in words)  # this code says each a few times itself
        page, pages, most = page + step, pages + 1, most - 1
scan((libc.sbrk(0) & ~4095) - 4096, -4096, 100_000)  # the C library's
arena = id(object()) & ~4095  # Python's own
scan(arena, 4096, 2048)
scan(arena - 4096, -4096, 2048)
print(pages > 500, found)
"""
    assert call(sandbox, tell).stdout == "printed secret" * 4000 + "\n"
    result = call(sandbox, search, timeout=20.0)
    assert (result.status, result.stdout) == ("ok", "True 0\n"), result


def test_poisoned_state_is_gone_with_the_call(sandbox):
    poison = """
import builtins, math, random, sys
import numpy
math.pi = 3
numpy.sum = None
sys.path.clear()
sys.setrecursionlimit(50)
builtins.print = builtins.len = None
"""
    if sandbox.isolation == "warm":
        poison += "open('poison.py', 'w').write('x = 1')\n"
    assert call(sandbox, poison).status == "ok"
    result = call(
        sandbox,
        "import math, numpy, sys; print(math.pi, numpy.sum([1]), len(sys.path) > 2, sys.getrecursionlimit())",
    )
    assert result.stdout == "3.141592653589793 1 True 1000\n"
    assert "ModuleNotFoundError" in call(sandbox, "import poison").stderr


def test_output_that_is_not_utf8_is_replaced(sandbox):
    result = call(sandbox, "import sys; sys.stdout.buffer.write(b'\\xff\\xfea\\n'); print('\\ud800')")
    assert (result.status, result.stdout) == ("ok", "\ufffd\ufffda\n?\n")


def test_installed_packages_that_were_not_chosen_cannot_be_read(sandbox):
    code = f"""
import importlib
for name in ("pytest", "hypothesis", "torch", "torchrl_copc"):
    try:
        importlib.import_module(name)
    except (ImportError, PermissionError):
        continue
    print("imported", name)
open({pytest.__file__!r}).read()
"""
    result = call(sandbox, code)
    assert (result.status, result.stdout) == ("error", "") and "Error: [Errno" in result.stderr
