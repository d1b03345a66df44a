"""Time the backward scan and the whole advantage estimate beside TorchRL's, on one CPU thread.

The loops are timed at their best: coefficients are ready, and a step is one multiplication and one addition (TorchRL's
V-trace multiplies discount and ratio inside). Whole estimates start from log-ratios, values and rewards on both sides.
Rows are packed with responses of 256 steps on average. Times are medians of the thread's CPU time, so that other
processes count as little as possible. ``--quick`` takes smaller inputs, where ratios are smaller, too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from unittest.mock import patch

import torch
from torch import Tensor
from torchrl.objectives.value.functional import (
    vec_generalized_advantage_estimate,
    vtrace_advantage_estimate,
)

from torchrl_copc.value import scan
from torchrl_copc.value.functional import backward_scan, copc_advantage_estimate

FULL = ((128, 16_384), (1, 2_097_152))
QUICK = ((32, 1_024), (1, 8_192))
RESPONSE_LENGTH = 256
GAMMA, LMBDA = 1.0, 0.95
FULL_BUDGET, QUICK_BUDGET = 1.5, 0.1  # seconds per entry; slow peers run three times whatever it takes
MOST_REPEATS = 25


def python_loop(coeff: Tensor, bias: Tensor) -> Tensor:
    """The recursion step by step, as TorchRL's loops do it: index, append, stack, flip."""
    x, steps = torch.zeros_like(bias[..., 0, :]), []
    for t in reversed(range(bias.shape[-2])):
        x = bias[..., t, :] + coeff[..., t, :] * x
        steps.append(x)
    return torch.flip(torch.stack(steps, -2), [-2])


def vtrace_loop(discount: Tensor, ratio: Tensor, delta: Tensor) -> Tensor:
    """The loop of TorchRL's V-trace, which multiplies discount and ratio inside."""
    x, steps = torch.zeros_like(delta[..., 0, :]), []
    for t in reversed(range(delta.shape[-2])):
        x = delta[..., t, :] + discount[..., t, :] * ratio[..., t, :] * x
        steps.append(x)
    return torch.flip(torch.stack(steps, -2), [-2])


def exact(coeff: Tensor, bias: Tensor) -> Tensor:
    """The recursion in Python's own float64."""
    rows = []
    for coeff_row, bias_row in zip(coeff.squeeze(-1).tolist(), bias.squeeze(-1).tolist(), strict=True):
        x, row = 0.0, []
        for a, b in zip(reversed(coeff_row), reversed(bias_row), strict=True):
            x = b + a * x
            row.append(x)
        rows.append(row[::-1])
    return torch.tensor(rows, dtype=torch.float64).unsqueeze(-1)


Result = TypeVar("Result")


def timed(function: Callable[[], Result], budget: float) -> tuple[float, Result]:
    """The median time in milliseconds, and what the function returned."""
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - began < budget and len(times) < MOST_REPEATS):
        start = time.thread_time()
        result = function()
        times.append(1e3 * (time.thread_time() - start))
    return statistics.median(times), result


@contextmanager
def kernel(solve: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
    with patch.object(scan, "kernel_for", lambda device_type: solve):
        yield


def kernels() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    scan.kernel_for.cache_clear()
    available = {"torch": scan.torch_scan}
    chosen = scan.kernel_for("cpu")
    if chosen is not scan.torch_scan:
        available["numba"] = chosen
    for solve in available.values():  # compilation is no part of the measurement
        solve(torch.ones(8, 200), torch.ones(8, 200))
    return available


def report(rows: int, length: int, budget: float) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (rows, length, 1)
    value, next_value, reward, noise = (torch.randn(shape, generator=generator) for _ in range(4))
    log_ratio, log_mu = 0.1 * noise, torch.zeros(shape)
    done = torch.rand(shape, generator=generator) < 1 / RESPONSE_LENGTH
    done[:, -1] = True
    ratio = log_ratio.exp().clamp(0.8, 1.28)
    discount = GAMMA * LMBDA * (~done).float()
    coeff, bias = discount * ratio, ratio * (reward + GAMMA * next_value * ~done - value)
    reference = exact(coeff, bias)

    print(f"\n{rows} x {length:,} steps, float32", flush=True)
    print(f"{'scan alone':<42}{'ms':>10}{'vs loop':>10}{'vs V-trace loop':>17}{'error':>10}")
    loop_ms, loop_x = timed(lambda: python_loop(coeff, bias), budget)
    vtrace_loop_ms, vtrace_loop_x = timed(lambda: vtrace_loop(discount, ratio, bias), budget)

    def line(name: str, ms: float, x: Tensor) -> None:
        error = float((x - reference).abs().max() / reference.abs().max())
        ratios = f"{loop_ms / ms:>9.1f}x{vtrace_loop_ms / ms:>16.1f}x"
        print(f"{name:<42}{ms:>10.2f}{ratios}{error:>10.0e}", flush=True)

    line("python loop", loop_ms, loop_x)
    line("python loop of TorchRL's V-trace", vtrace_loop_ms, vtrace_loop_x)
    available = kernels()
    for name, solve in available.items():
        with kernel(solve):
            line(f"backward_scan, {name}", *timed(lambda: backward_scan(coeff, bias), budget))

    print(f"{'whole estimate':<42}{'ms':>10}{'vs vtrace_advantage_estimate':>37}")
    columns = (value, next_value, reward, done)
    vtrace_ms, _ = timed(lambda: vtrace_advantage_estimate(GAMMA, log_ratio, log_mu, *columns), budget)
    gae_ms, _ = timed(lambda: vec_generalized_advantage_estimate(GAMMA, LMBDA, *columns), budget)
    estimates = {
        "TorchRL vtrace_advantage_estimate": vtrace_ms,
        "TorchRL vec_generalized_advantage_estimate": gae_ms,
    }
    for name, solve in available.items():
        with kernel(solve):
            estimates[f"copc_advantage_estimate, {name}"], _ = timed(
                lambda: copc_advantage_estimate(GAMMA, LMBDA, log_ratio, *columns), budget
            )
    for name, ms in estimates.items():
        print(f"{name:<42}{ms:>10.2f}{vtrace_ms / ms:>36.1f}x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smaller inputs, ten seconds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes, budget = (QUICK, QUICK_BUDGET) if arguments.quick else (FULL, FULL_BUDGET)
    for rows, length in sizes:
        report(rows, length, budget)


if __name__ == "__main__":
    main()
