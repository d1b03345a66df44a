"""GAE, V-trace, Retrace and BRACE as functions, each against its sum written out in float64."""

from __future__ import annotations

import math
from inspect import signature
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torchrl.objectives.value.functional import generalized_advantage_estimate
from torchrl.objectives.value.functional import vtrace_advantage_estimate as torchrl_vtrace

from torchrl_copc.value import (
    brace_advantage_estimate,
    copc_advantage_estimate,
    length_adaptive_lmbda,
    retrace_advantage_estimate,
    scan,
    token_gae_advantage_estimate,
    vtrace_advantage_estimate,
)
from torchrl_copc.value.brace import windowed_scan
from torchrl_copc.value.functional import AdvantageForm, Trace
from torchrl_copc.value.inputs import trajectory_length

LENGTH = 17


def batch() -> tuple[Tensor, ...]:
    """log_ratio, value, next_value, reward, done, terminated ``[3, LENGTH, 1]``: packed, cut, and still running."""
    generator = torch.Generator().manual_seed(4)
    log_ratio, value, next_value, reward = torch.randn(
        4, 3, LENGTH, 1, generator=generator, dtype=torch.float64
    )
    done = torch.zeros(3, LENGTH, 1, dtype=torch.bool)
    done[0, [2, 3, 10, -1]] = True
    done[1, [6, -1]] = True
    terminated = done.clone()
    terminated[0, 3] = terminated[1, -1] = False
    # consecutive states share their value inside a trajectory
    follows = value.roll(-1, 1)
    inside = ~done & (torch.arange(LENGTH).view(1, -1, 1) < LENGTH - 1)
    return 0.6 * log_ratio, value, torch.where(inside, follows, next_value), reward, done, terminated


class Row:
    """One row of the batch as plain numbers."""

    def __init__(self, arguments: tuple[Tensor, ...], row: int, gamma: float) -> None:
        log_ratio, value, next_value, reward, done, terminated = (x[row, :, 0].tolist() for x in arguments)
        self.w = [math.exp(x) for x in log_ratio]
        self.value, self.done, self.gamma = value, done, gamma
        self.bootstrap = [0.0 if t else v for t, v in zip(terminated, next_value, strict=True)]
        self.reward = reward
        self.delta = [r + gamma * b - v for r, b, v in zip(reward, self.bootstrap, value, strict=True)]

    def end(self, t: int) -> int:
        """One past the last step of the trajectory of ``t``."""
        return next((j + 1 for j in range(t, LENGTH) if self.done[j]), LENGTH)

    def discounted(self, s: int, t: int, trace: list[float]) -> float:
        return math.prod(self.gamma * trace[i] for i in range(s, t))

    def weighted(self, s: int, stop: int, trace: list[float], weight: list[float]) -> float:
        return sum(self.discounted(s, t, trace) * weight[t] * self.delta[t] for t in range(s, stop))

    def target_based(self, x: list[float]) -> tuple[list[float], list[float]]:
        """``R_t + gamma*target_{t+1} - V_t`` and the target, where the target is ``V_t + x_t``."""
        target = [v + gap for v, gap in zip(self.value, x, strict=True)]
        after = [self.bootstrap[t] if t + 1 == self.end(t) else target[t + 1] for t in range(LENGTH)]
        advantage = [self.reward[t] + self.gamma * after[t] - self.value[t] for t in range(LENGTH)]
        return advantage, target


def gae(row: Row, lmbda: float, lmbda_critic: float) -> tuple[list[float], list[float]]:
    ones = [1.0] * LENGTH
    advantage, gap = (
        [row.weighted(t, row.end(t), [decay] * LENGTH, ones) for t in range(LENGTH)]
        for decay in (lmbda, lmbda_critic)
    )
    return advantage, [v + g for v, g in zip(row.value, gap, strict=True)]


def vtrace(row: Row, lmbda: float, rho: float, c: float) -> tuple[list[float], list[float]]:
    trace, weight = [lmbda * min(c, w) for w in row.w], [min(rho, w) for w in row.w]
    return row.target_based([row.weighted(s, row.end(s), trace, weight) for s in range(LENGTH)])


def brace(row: Row, lmbda: float, window: int) -> tuple[list[float], list[float]]:
    trace, weight = [lmbda * min(1.1, w) for w in row.w], [min(1.2, w) for w in row.w]

    def x(s: int) -> float:
        stop = s + window
        if stop >= row.end(s):
            return row.weighted(s, row.end(s), trace, weight)
        remaining = sum(row.gamma ** (t - stop) * row.reward[t] for t in range(stop, row.end(s)))
        remaining += row.gamma ** (row.end(s) - stop) * row.bootstrap[row.end(s) - 1]
        correction = row.discounted(s, stop, trace) * (remaining - row.value[stop])
        return row.weighted(s, stop, trace, weight) + correction

    return row.target_based([x(s) for s in range(LENGTH)])


def retrace(row: Row, lmbda: float) -> tuple[list[float], list[float]]:
    c = [lmbda * min(1.0, w) for w in row.w]
    advantage = [
        sum(
            math.prod(row.gamma * c[i] for i in range(t + 1, k + 1)) * row.delta[k]
            for k in range(t, row.end(t))
        )
        for t in range(LENGTH)
    ]
    return advantage, [v + min(1.0, w) * a for v, w, a in zip(row.value, row.w, advantage, strict=True)]


def assert_rows(result: tuple[Tensor, Tensor], formula, gamma: float) -> None:  # type: ignore[no-untyped-def]
    for number in range(3):
        expected = formula(Row(batch(), number, gamma))
        for ours, theirs in zip(result, expected, strict=True):
            torch.testing.assert_close(ours[number, :, 0], torch.tensor(theirs, dtype=torch.float64))


@pytest.mark.parametrize(("gamma", "lmbda"), [(1.0, 1.0), (0.9, 0.7), (0.95, 0.0)])
def test_formulas(gamma: float, lmbda: float) -> None:
    log_ratio, *rest = batch()
    result = token_gae_advantage_estimate(gamma, lmbda, *rest, lmbda_critic=0.8)
    assert_rows(result, lambda row: gae(row, lmbda, 0.8), gamma)
    result = vtrace_advantage_estimate(gamma, lmbda, log_ratio, *rest, rho_threshold=1.5, c_threshold=0.9)
    assert_rows(result, lambda row: vtrace(row, lmbda, 1.5, 0.9), gamma)
    assert_rows(
        retrace_advantage_estimate(gamma, lmbda, log_ratio, *rest), lambda row: retrace(row, lmbda), gamma
    )


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, 100])
def test_brace_formula(window: int) -> None:
    log_ratio, *rest = batch()
    result = brace_advantage_estimate(0.9, 0.8, log_ratio, *rest, window=window)
    assert_rows(result, lambda row: brace(row, 0.8, window), 0.9)


def test_gae_is_copc_without_correction_and_torchrls_gae() -> None:
    log_ratio, *rest = (x.float() if x.is_floating_point() else x for x in batch())
    ours = token_gae_advantage_estimate(0.99, 0.9, *rest, lmbda_critic=1.0)
    copc = copc_advantage_estimate(0.99, 0.9, log_ratio, *rest, eta=0.0, lmbda_critic=1.0)
    assert all(torch.equal(a, b) for a, b in zip(ours, copc, strict=True))
    value, next_value, reward, done, terminated = rest
    theirs = generalized_advantage_estimate(0.99, 0.9, value, next_value, reward, done, terminated)
    for a, b in zip(token_gae_advantage_estimate(0.99, 0.9, *rest), theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_vtrace_is_torchrls_up_to_the_weight_of_the_own_action() -> None:
    log_ratio, value, next_value, reward, done, terminated = batch()
    arguments = value, next_value, reward, done, terminated
    advantage, target = vtrace_advantage_estimate(0.5, 1.0, log_ratio, *arguments, rho_threshold=1.3)
    weighted, expected = torchrl_vtrace(
        0.5,  # exact in float32, which TorchRL takes it to
        log_ratio,
        torch.zeros_like(log_ratio),
        *arguments,
        rho_thresh=torch.tensor(1.3, dtype=torch.float64),
    )
    torch.testing.assert_close(target, expected)
    torch.testing.assert_close(advantage * log_ratio.exp().clamp(max=1.3), weighted)


def test_brace_with_a_long_window_is_vtrace_and_on_policy_gives_the_return() -> None:
    log_ratio, *rest = batch()
    brace_long = brace_advantage_estimate(0.9, 0.8, log_ratio, *rest, window=LENGTH)
    plain = vtrace_advantage_estimate(0.9, 0.8, log_ratio, *rest, rho_threshold=1.2, c_threshold=1.1)
    for a, b in zip(brace_long, plain, strict=True):
        torch.testing.assert_close(a, b)
    on_policy = brace_advantage_estimate(0.9, 1.0, torch.zeros_like(log_ratio), *rest, window=3)
    returns = token_gae_advantage_estimate(0.9, 1.0, *rest)
    for a, b in zip(on_policy, returns, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("time_dim", [0, 1])
def test_any_time_dimension_and_what_lies_past_a_terminal_state(time_dim: int) -> None:
    log_ratio, value, next_value, reward, done, terminated = batch()
    next_value = torch.where(terminated, torch.nan, next_value)
    arguments = value, next_value, reward, done, terminated
    for estimate, inputs in (
        (token_gae_advantage_estimate, arguments),
        (vtrace_advantage_estimate, (log_ratio, *arguments)),
        (retrace_advantage_estimate, (log_ratio, *arguments)),
        (brace_advantage_estimate, (log_ratio, *arguments)),
    ):
        expected = estimate(0.9, 0.8, *inputs)
        assert all(x.isfinite().all() for x in expected)
        moved = estimate(0.9, 0.8, *(x.movedim(1, time_dim) for x in inputs), time_dim=time_dim)
        assert all(torch.equal(a.movedim(time_dim, 1), b) for a, b in zip(moved, expected, strict=True))


def test_ratios_carry_no_gradient_and_do_not_overflow() -> None:
    log_ratio, value, *rest = batch()
    log_ratio = (1000 * log_ratio).requires_grad_()
    value.requires_grad_()
    for estimate in (vtrace_advantage_estimate, retrace_advantage_estimate, brace_advantage_estimate):
        advantage, target = estimate(1.0, 1.0, log_ratio, value, *rest)
        assert advantage.isfinite().all() and target.isfinite().all()
        (advantage + target).sum().backward()
        assert log_ratio.grad is None and value.grad.isfinite().all()


LARGEST = torch.finfo(torch.float32).max
# what the second response holds, and the options with which that is not finite
BAD: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "overflow": ({"reward": LARGEST}, {}),
    "infinite_reward": ({"reward": math.inf}, {}),
    "nan_reward": ({"reward": math.nan}, {}),
    "nan_value": ({"value": math.nan}, {}),
    "infinite_ratio": (
        {"log_ratio": 1000.0},
        {"rho_threshold": math.inf, "c_threshold": math.inf, "eps_high": math.inf},
    ),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kernel", ["default", "torch"])
@pytest.mark.parametrize(
    ("estimate", "options"),
    [
        *(
            (copc_advantage_estimate, {"trace": t, "advantage": a})
            for t in get_args(Trace)
            for a in get_args(AdvantageForm)
        ),
        (token_gae_advantage_estimate, {"lmbda_critic": 0.5}),
        (vtrace_advantage_estimate, {}),
        (retrace_advantage_estimate, {}),
        *((brace_advantage_estimate, {"window": window}) for window in (1, 3, 100)),
    ],
)
def test_what_is_not_finite_stays_in_its_response(
    estimate: Any, options: dict[str, Any], bad: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``0 * inf`` is NaN: what must not flow back is dropped, not multiplied by 0."""
    if kernel == "torch":
        monkeypatch.setattr(scan, "kernel_for", lambda device_type: scan.torch_scan)
    held, settings = BAD[bad]
    accepted = signature(estimate).parameters
    options = options | {name: x for name, x in settings.items() if name in accepted}
    generator = torch.Generator().manual_seed(0)
    names = ("log_ratio", "value", "next_value", "reward")
    entries = {name: torch.randn(1, 24, 1, generator=generator) for name in names}
    done = torch.zeros(1, 24, 1, dtype=torch.bool)
    done[0, [6, 15, 23]] = True

    def solve(part: slice) -> tuple[Tensor, Tensor]:
        used = names if "log_ratio" in accepted else names[1:]
        return estimate(0.99, 0.9, *(entries[name][:, part] for name in used), done[:, part], **options)

    for name, x in held.items():
        entries[name][0, 7:16] = x
    whole = solve(slice(None))
    assert not all(bool(x[0, 7:16].isfinite().all()) for x in whole) or bad == "infinite_ratio"
    for part in (slice(0, 7), slice(16, 24)):
        for x, alone in zip(whole, solve(part), strict=True):
            assert alone.isfinite().all()
            torch.testing.assert_close(x[:, part], alone)


def test_windowed_scan_equals_the_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    coeff, bias, end = torch.randn(3, 2, 30, 1, generator=generator, dtype=torch.float64)
    for window in (1, 4, 7, 29, 30, 64):
        expected = torch.zeros_like(bias)
        for t in range(30):
            x = end[:, t + window] if t + window < 30 else torch.zeros_like(end[:, 0])
            for i in reversed(range(t, min(t + window, 30))):
                x = bias[:, i] + coeff[:, i] * x
            expected[:, t] = x
        torch.testing.assert_close(windowed_scan(coeff, bias, end, window), expected)


def test_length_adaptive_lmbda() -> None:
    done = torch.zeros(1, 9, 1, dtype=torch.bool)
    done[0, [0, 3]] = True
    length = trajectory_length(done)
    assert length.flatten().tolist() == [1, 3, 3, 3, 5, 5, 5, 5, 5]
    lmbda = length_adaptive_lmbda(length, alpha=1.5).flatten()
    torch.testing.assert_close(lmbda, torch.tensor([1 - 1 / 1.5] + [1 - 1 / 4.5] * 3 + [1 - 1 / 7.5] * 5))
    assert length_adaptive_lmbda(torch.tensor([1]), alpha=0.5) == 0.0


def test_wrong_arguments_are_named() -> None:
    log_ratio, *rest = batch()
    with pytest.raises(ValueError, match=r"log_ratio \(3, 17\) must have the shape of the values"):
        vtrace_advantage_estimate(1.0, 1.0, log_ratio.squeeze(-1), *rest)
    with pytest.raises(ValueError, match=r"must share one shape .*\(3, 17\)"):
        token_gae_advantage_estimate(1.0, 1.0, rest[0].squeeze(-1), *rest[1:])
    with pytest.raises(ValueError, match="threshold of ratios must be above 0, got 0"):
        vtrace_advantage_estimate(1.0, 1.0, log_ratio, *rest, c_threshold=0)
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        brace_advantage_estimate(1.0, 1.0, log_ratio, *rest, window=0)
    with pytest.raises(ValueError, match="alpha must be above 0, got 0"):
        length_adaptive_lmbda(torch.ones(1), alpha=0)
