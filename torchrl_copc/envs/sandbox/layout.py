"""Which of the host's files the sandbox shows: the interpreter, its libraries, and the chosen packages.

Installed packages that were not chosen stay out, such as one that holds the answers of an evaluation set.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from torchrl_copc.envs.sandbox.config import SandboxError

GUEST = Path(__file__).parent / "guest"
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_SYSTEM = (
    "/usr/lib",
    "/usr/lib64",
    "/lib",
    "/lib64",
    "/nix/store",
    "/etc/ld.so.cache",
    "/usr/share/zoneinfo",
)


@dataclass(frozen=True)
class Layout:
    """Absolute paths on the host.

    Args:
        interpreter: the Python that runs the server: this one's, outside its virtual environment.
        readable: files and directories the interpreter needs, links such as ``/lib`` among them.
        hidden: directories of installed packages inside them.
        packages: directory each file or directory of the chosen packages lies in, by its name.
        preloaded: the chosen packages, to import.
    """

    interpreter: str
    readable: tuple[str, ...]
    hidden: tuple[str, ...]
    packages: dict[str, str]
    preloaded: list[str]

    def visible(self) -> Iterator[str]:
        """``readable`` without ``hidden``, in smaller pieces where a hidden directory lies inside."""
        for path in self.readable:
            yield from _without(path, self.hidden)


def find_layout(packages: tuple[str, ...]) -> Layout:
    """The layout for this interpreter.

    Raises:
        SandboxError: if a package is not installed.
    """
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    paths = sysconfig.get_paths(vars={**base, "installed_base": sys.base_prefix})
    interpreter = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    libraries = [os.path.join(sys.base_prefix, name) for name in ("lib", "lib64")]
    wanted = [*_SYSTEM, *libraries, paths["stdlib"], paths["platstdlib"], interpreter]
    readable: list[str] = []
    for path in map(os.path.normpath, wanted):
        if os.path.lexists(path) and not any(_is_below(path, other) for other in readable):
            readable.append(path)
    candidates = {paths["purelib"], paths["platlib"], "/usr/lib/python3/dist-packages"}
    hidden = [path for path in sorted(candidates) if os.path.isdir(path)]
    return Layout(
        interpreter,
        tuple(readable),
        tuple(path for path in hidden if any(_is_below(path, other) for other in readable)),
        {name: directory for package in packages for name, directory in _package_files(package)},
        list(packages),
    )


def _package_files(package: str) -> Iterator[tuple[str, str]]:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SandboxError(
            f"sandbox.packages names {package!r}, which is not installed; "
            'pip install "torchrl_copc[envs]" brings the default ones'
        )
    file = Path(spec.origin)
    path = file.parent if spec.submodule_search_locations else file
    yield path.name, str(path.parent)
    # Shared libraries that a wheel brings along.
    if (libraries := path.with_name(f"{package}.libs")).is_dir():
        yield libraries.name, str(path.parent)


def _is_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _without(path: str, hidden: tuple[str, ...]) -> Iterator[str]:
    if path in hidden:
        return
    if any(_is_below(inner, path) for inner in hidden):
        for child in sorted(os.scandir(path), key=lambda entry: entry.path):
            yield from _without(child.path, hidden)
    else:
        yield path
