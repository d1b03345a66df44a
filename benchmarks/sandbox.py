"""Time one call of a Python tool: plain subprocess, one-shot bubblewrap, and the sandbox.

The ways take turns, so that what else the machine does hits all of them; numbers are medians. ``--quick`` takes fewer
rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

from torchrl_copc.envs.sandbox import Sandbox, SandboxConfig
from torchrl_copc.envs.sandbox.launch import find_bubblewrap

SNIPPETS = {
    "bare": "print(6 * 7)",
    "numpy": "import numpy as np\nprint(int(np.array([6]).sum()) * 7)",
    "sympy": "import sympy as sp\nprint(sp.Integer(6) * 7)",
    "sympy solve": "from sympy import *\nx = symbols('x')\nprint(solve(x**2 - 84*x + 42**2, x)[0])",
}
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "PATH": os.environ.get("PATH", "")}

Way = Callable[[str], Awaitable[str]]


async def output_of(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    return (await process.communicate())[0].decode()


async def plain(code: str) -> str:
    """Isolates nothing."""
    return await output_of(sys.executable, "-I", "-c", code)


async def one_shot(code: str) -> str:
    """New namespaces and a new interpreter each time; the host's files can be read."""
    isolation = [
        "--unshare-all",
        "--die-with-parent",
        "--ro-bind",
        "/",
        "/",
        "--dev",
        "/dev",
        "--tmpfs",
        "/tmp",
    ]
    return await output_of(find_bubblewrap()[0], *isolation, sys.executable, "-I", "-c", code)


async def one_after_the_other(ways: dict[str, Way], code: str, rounds: int) -> dict[str, float]:
    """Milliseconds of a call, for each way."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            assert await way(code) == "42\n"
            times[name].append(1e3 * (time.perf_counter() - began))
    return {name: statistics.median(times[name]) for name in ways}


async def side_by_side(
    ways: dict[str, Way], code: str, workers: int, calls: int, rounds: int
) -> dict[str, float]:
    """Calls a second with ``workers`` calls at once, for each way, over rounds of ``calls``."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    limit = asyncio.Semaphore(workers)

    async def call(way: Way) -> None:
        async with limit:
            assert await way(code) == "42\n"

    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            await asyncio.gather(*(call(way) for _ in range(calls)))
            rates[name].append(calls / (time.perf_counter() - began))
    return {name: statistics.median(rates[name]) for name in ways}


async def main(quick: bool) -> None:
    workers = len(os.sched_getaffinity(0))
    async with Sandbox(SandboxConfig(workers=workers, timeout=30.0)) as sandbox:

        async def ours(code: str) -> str:
            return (await sandbox.run(code)).stdout

        ways: dict[str, Way] = {
            "plain subprocess": plain,
            "one-shot bubblewrap": one_shot,
            f"sandbox ({sandbox.isolation})": ours,
        }
        print(
            f"{workers} cores, load {os.getloadavg()[0]:.1f} before; ratios: times as fast as a plain subprocess"
        )
        print(f"{'':12}{'way':24}{'p50 ms':>10}{'ratio':>10}{'calls/s':>10}{'ratio':>10}")
        for snippet, code in SNIPPETS.items():
            for way in ways.values():
                await way(code)
            latency = await one_after_the_other(ways, code, rounds=3 if quick else 40)
            rate = await side_by_side(
                ways, code, workers, calls=(3 if quick else 10) * workers, rounds=1 if quick else 5
            )
            for name in ways:
                faster = latency["plain subprocess"] / latency[name]
                more = rate[name] / rate["plain subprocess"]
                print(
                    f"{snippet:12}{name:24}{latency[name]:10.1f}{faster:9.1f}x{rate[name]:10.1f}{more:9.1f}x",
                    flush=True,
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: rough, and soon done")
    asyncio.run(main(parser.parse_args().quick))
