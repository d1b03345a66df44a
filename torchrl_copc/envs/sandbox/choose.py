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

_PROBE = "print(6 * 7)"
_PROBE_TIMEOUT = 30.0


def first_worker(config: SandboxConfig) -> tuple[Launch, Worker]:
    """A worker that passed the probe, and how it was launched.

    Raises:
        SandboxUnavailableError: if no isolation that the configuration allows works here.
        SandboxError: if a package is not installed.
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
        try:
            result = worker.run(Call(_PROBE, _PROBE_TIMEOUT, print_last=False))
            if result is not None and (result.status, result.stdout) == ("ok", "42\n"):
                return launch, worker
            reasons.append(f"{isolation}: the probe answered {result}")
        except SandboxError as error:
            reasons.append(f"{isolation}: {error}")
        worker.close()
    return None


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
