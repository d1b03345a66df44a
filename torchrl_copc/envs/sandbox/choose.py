"""Which isolation this host offers: the first of the fallback order that runs a probe."""

from __future__ import annotations

import logging
import sys

from torchrl_copc.envs.sandbox.config import (
    AUTO,
    BUBBLEWRAP,
    LANDLOCK,
    SUBPROCESS,
    WARM,
    SandboxConfig,
    SandboxError,
    SandboxUnavailableError,
)
from torchrl_copc.envs.sandbox.launch import Launch, launches
from torchrl_copc.envs.sandbox.layout import Layout, find_layout
from torchrl_copc.envs.sandbox.worker import Call, Worker

logger = logging.getLogger(__name__)

_PROBE, _ANSWER = "print(6 + 1, end='')", "7"  # fits into any limit of the output
_PROBE_TIMEOUT = 30.0
_PLENTY = 1 << 30  # bytes


def first_worker(config: SandboxConfig) -> tuple[Launch, Worker]:
    """A worker that passed the probe, and how it was launched.

    Raises:
        SandboxUnavailableError: if no isolation that the configuration allows works here.
        SandboxError: if a package is not installed, or the memory is too little for any code.
    """
    if sys.platform != "linux":
        raise SandboxUnavailableError(
            f"the sandbox needs Linux; on {sys.platform} run training in a Linux container or virtual machine"
        )
    layout = find_layout(config.packages)
    reasons: list[str] = []
    for isolation in _order(config):
        worker = _first_that_works(isolation, layout, config, reasons)
        if worker is not None:
            _report(isolation, config, reasons)
            return worker
    raise SandboxUnavailableError(
        "no isolation that this configuration allows works on this host, so no code is run:\n"
        + "\n".join(f"  {reason}" for reason in reasons)
        + "\nWhat helps, best first: allow unprivileged user namespaces (sysctl user.max_user_namespaces above 0, "
        "kernel.unprivileged_userns_clone=1 on Debian, kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu; "
        "in a container a seccomp profile that permits unshare and mount) with bubblewrap installed; a kernel with "
        "Landlock (6.2 or newer); sandbox.isolation=auto, if it names one way only. sandbox.unsafe=true runs code "
        "without any isolation: only for code you would run yourself."
    )


def limits_of(config: SandboxConfig) -> dict[str, int]:
    """What each request says of the configuration."""
    return {"memory_bytes": config.memory_mb << 20, "max_output_bytes": config.max_output_bytes}


def _order(config: SandboxConfig) -> tuple[str, ...]:
    if config.isolation != AUTO:
        return (config.isolation,)
    return (WARM, BUBBLEWRAP, LANDLOCK, *((SUBPROCESS,) if config.unsafe else ()))


def _first_that_works(
    isolation: str, layout: Layout, config: SandboxConfig, reasons: list[str]
) -> tuple[Launch, Worker] | None:
    try:
        candidates = launches(isolation, layout)
    except SandboxError as error:
        reasons.append(f"{isolation}: {error}")
        return None
    for launch in candidates:
        worker = Worker(launch, limits_of(config))
        if not (problem := _problem(worker)):
            return launch, worker
        worker.close()
        if config.memory_mb << 20 < _PLENTY:
            other = Worker(launch, limits_of(config) | {"memory_bytes": _PLENTY})
            enough = not _problem(other)
            other.close()
            if enough:
                raise SandboxError(
                    f"sandbox.memory_mb is {config.memory_mb}, too little to run any code ({isolation}: {problem}); "
                    "raise it"
                )
        reasons.append(f"{isolation}: {problem}")
    return None


def _problem(worker: Worker) -> str:
    """What is wrong with a worker, by the probe; empty if nothing is."""
    try:
        result = worker.run(Call(_PROBE, _PROBE_TIMEOUT, print_last=False))
    except SandboxError as error:
        return str(error)
    if result is not None and (result.status, result.stdout) == ("ok", _ANSWER):
        return ""
    return f"the probe answered {result}"


def _report(isolation: str, config: SandboxConfig, reasons: list[str]) -> None:
    if isolation == SUBPROCESS:
        logger.warning(
            "sandbox.unsafe=true: code runs WITHOUT isolation, with your rights, files and network%s",
            "".join(f"\n  {reason}" for reason in reasons),
        )
    elif reasons and config.isolation == AUTO:
        logger.warning(
            "the sandbox falls back to %s isolation:%s",
            isolation,
            "".join(f"\n  {reason}" for reason in reasons),
        )
