"""The advantage estimate against an independent sum formula, GAE, and hand-made cases."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchrl.objectives.value.functional import generalized_advantage_estimate

from torchrl_copc.value.functional import backward_scan, copc_advantage_estimate, log_ratio_bounds

TRACES = ("step", "product", "cut")
FORMS = ("full", "continuation")
LENGTH = 13


def brute_force(
    gamma: float,
    lmbda: list[float],
    rho: Tensor,
    value: Tensor,
    next_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor,
    interval: tuple[float, float],
    trace: str,
) -> tuple[Tensor, Tensor]:
    """The full and the continuation advantage of one trajectory [T], as explicit sums over k >= t."""
    length = len(rho)
    weight = [min(max(float(r), interval[0]), interval[1]) for r in rho]
    carried = {"step": [1.0] * length, "product": weight, "cut": [min(1.0, w) for w in weight]}[trace]
    delta = [
        float(reward[t]) + (0.0 if terminated[t] else gamma * float(next_value[t])) - float(value[t])
        for t in range(length)
    ]

    def x(t: int) -> float:
        total = 0.0
        for k in range(t, length):
            if any(bool(done[j]) for j in range(t, k)):
                break
            total += math.prod(gamma * lmbda[j] * carried[j] for j in range(t, k)) * weight[k] * delta[k]
        return total

    full = [x(t) for t in range(length)]
    continuation = [
        delta[t] + (0.0 if done[t] or t + 1 == length else gamma * lmbda[t] * x(t + 1)) for t in range(length)
    ]
    return torch.tensor(full, dtype=torch.float64), torch.tensor(continuation, dtype=torch.float64)


def batch(pattern: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """log_ratio, value, next_value, reward, done, terminated of shape [3, LENGTH, 1]."""
    generator = torch.Generator().manual_seed(5)
    log_ratio, value, next_value, reward = (
        torch.randn(3, LENGTH, 1, generator=generator, dtype=torch.float64) for _ in range(4)
    )
    done = torch.zeros(3, LENGTH, 1, dtype=torch.bool)
    if pattern != "none":
        done[:, -1] = True
    if pattern in ("packed", "truncated"):
        done[0, [2, 3, 8]] = True
        done[1, 6] = True
    terminated = done.clone()
    if pattern == "truncated":
        terminated[0, 3] = terminated[1, -1] = False
    floats = (x.to(dtype) for x in (0.3 * log_ratio, value, next_value, reward))
    return (*floats, done, terminated)


@pytest.mark.parametrize("pattern", ["none", "end", "packed", "truncated"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize(
    ("gamma", "lmbda", "eta"), [(1.0, 1.0, 0.5), (0.9, 0.95, 1.0), (1.0, 0.0, 3.0), (1.0, 0.5, 0.0)]
)
def test_equals_the_sum_formula(
    pattern: str, form: str, trace: str, gamma: float, lmbda: float, eta: float
) -> None:
    columns = batch(pattern)
    advantage, target = copc_advantage_estimate(gamma, lmbda, *columns, eta=eta, trace=trace, advantage=form)
    interval = (max(0.0, 1 - 0.4 * eta), 1 + 0.56 * eta)
    for row in range(3):
        rho, *rest = (x[row, :, 0] for x in (columns[0].exp(), *columns[1:]))
        full, continuation = brute_force(gamma, [lmbda] * LENGTH, rho, *rest, interval, trace)
        expected = full if form == "full" else continuation
        torch.testing.assert_close(advantage[row, :, 0], expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(target[row, :, 0], columns[1][row, :, 0] + full, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("trace", TRACES)
def test_tensor_lambda_and_a_separate_critic_lambda(trace: str, form: str) -> None:
    log_ratio, value, next_value, reward, done, terminated = batch("packed")
    lmbda = torch.linspace(0.5, 1.0, LENGTH, dtype=torch.float64).view(1, LENGTH, 1)
    arguments = (log_ratio, value, next_value, reward, done, terminated)
    advantage, target = copc_advantage_estimate(
        0.99, lmbda, *arguments, trace=trace, advantage=form, lmbda_critic=1.0
    )
    for row in range(3):
        columns = [x[row, :, 0] for x in (log_ratio.exp(), *arguments[1:])]
        forms = brute_force(0.99, lmbda.flatten().tolist(), *columns, (0.8, 1.28), trace)
        critic = brute_force(0.99, [1.0] * LENGTH, *columns, (0.8, 1.28), trace)[0]
        expected = forms[FORMS.index(form)]
        torch.testing.assert_close(advantage[row, :, 0], expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(target[row, :, 0], value[row, :, 0] + critic, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lmbda", [0.0, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eta_zero_is_gae(lmbda: float, dtype: torch.dtype) -> None:
    log_ratio, value, next_value, reward, done, terminated = batch("truncated", dtype)
    delta = reward + 0.97 * torch.where(terminated, 0.0, next_value) - value
    gae = backward_scan(torch.where(done, 0.0, 0.97 * lmbda * torch.ones_like(delta)), delta)
    stock, stock_target = generalized_advantage_estimate(
        0.97, lmbda, value, next_value, reward, done, terminated
    )
    for trace in TRACES:
        for form in FORMS:
            advantage, target = copc_advantage_estimate(
                0.97,
                lmbda,
                100 * log_ratio,
                value,
                next_value,
                reward,
                done,
                terminated,
                eta=0.0,
                trace=trace,
                advantage=form,
            )
            assert torch.equal(advantage, gae)
            assert torch.equal(target, value + gae)
            torch.testing.assert_close(advantage, stock, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(target, stock_target, rtol=1e-6, atol=1e-6)


def test_the_lower_end_may_be_zero_and_ratios_may_be_extreme() -> None:
    zeros, done = torch.zeros(1, 3, 1), torch.tensor([False, False, True]).view(1, 3, 1)
    reward = torch.ones(1, 3, 1)
    log_ratio = torch.tensor([-torch.inf, 2000.0, 0.0]).view(1, 3, 1)
    advantage, _ = copc_advantage_estimate(1.0, 0.0, log_ratio, zeros, zeros, reward, done, eta=5.0)
    torch.testing.assert_close(advantage.flatten(), torch.tensor([0.0, 3.8, 1.0]))
    assert log_ratio_bounds(5.0, 0.4, 0.56)[0] == -math.inf
    assert log_ratio_bounds(0.0, 0.4, math.inf) == (0.0, 0.0)


def test_nothing_crosses_done_and_terminal_values_are_never_read() -> None:
    log_ratio, value, next_value, reward, done, terminated = batch("packed")
    arguments = (value, torch.where(terminated, torch.nan, next_value), reward, done, terminated)
    before, _ = copc_advantage_estimate(1.0, 1.0, log_ratio, *arguments, trace="product")
    assert before.isfinite().all()
    reward[0, 4:] += 7.0
    after, _ = copc_advantage_estimate(1.0, 1.0, log_ratio, *arguments, trace="product")
    assert torch.equal(before[0, :4], after[0, :4])
    assert not torch.equal(before[0, 4:9], after[0, 4:9])


def test_a_masked_tokens_residual_still_moves_earlier_advantages() -> None:
    log_ratio, value, next_value, reward, done, terminated = batch("end")
    log_ratio[0, 5] = 3.0  # far outside the policy mask's interval
    before, _ = copc_advantage_estimate(1.0, 0.9, log_ratio, value, next_value, reward, done, terminated)
    reward[0, 5] += 1.0
    after, _ = copc_advantage_estimate(1.0, 0.9, log_ratio, value, next_value, reward, done, terminated)
    moved = (after - before)[0, :6, 0]
    torch.testing.assert_close(moved, 1.28 * 0.9 ** torch.arange(5, -1, -1, dtype=torch.float64))


@pytest.mark.parametrize("time_dim", [0, 1, -2, -3])
def test_time_dim(time_dim: int) -> None:
    arguments = batch("packed")
    reference = copc_advantage_estimate(1.0, 0.9, *arguments, advantage="continuation")
    time_first = time_dim in (0, -3)
    if time_first:
        arguments = tuple(x.transpose(0, 1) for x in arguments)
    result = copc_advantage_estimate(1.0, 0.9, *arguments, advantage="continuation", time_dim=time_dim)
    for x, expected in zip(result, reference, strict=True):
        torch.testing.assert_close(x.transpose(0, 1) if time_first else x, expected, rtol=1e-13, atol=1e-13)


def test_several_value_features_share_one_ratio() -> None:
    log_ratio, *others = batch("packed")
    wide = [x.expand(-1, -1, 2) for x in others]
    narrow, _ = copc_advantage_estimate(1.0, 0.9, log_ratio, *others)
    both, _ = copc_advantage_estimate(1.0, 0.9, log_ratio, *wide)
    assert torch.equal(both, narrow.expand(-1, -1, 2))


def test_the_ratio_carries_no_gradient_but_values_do() -> None:
    log_ratio, value, *others = batch("end")
    log_ratio.requires_grad_()
    value.requires_grad_()
    advantage, _ = copc_advantage_estimate(1.0, 0.9, log_ratio, value, *others, advantage="continuation")
    advantage.sum().backward()
    assert log_ratio.grad is None
    assert value.grad is not None and value.grad.abs().sum() > 0


@pytest.mark.parametrize("trace", TRACES)
def test_gradients_of_values_reward_and_discount(trace: str) -> None:
    log_ratio, value, next_value, reward, done, terminated = batch("truncated")
    gamma = torch.tensor(0.9, dtype=torch.float64)

    def estimate(gamma: Tensor, value: Tensor, next_value: Tensor, reward: Tensor) -> tuple[Tensor, Tensor]:
        return copc_advantage_estimate(
            gamma,
            0.8,
            log_ratio,
            value,
            next_value,
            reward,
            done,
            terminated,
            trace=trace,
            advantage="continuation",
        )

    inputs = [x.requires_grad_() for x in (gamma, value, next_value, reward)]
    assert torch.autograd.gradcheck(estimate, inputs)


def test_wrong_arguments_are_named() -> None:
    arguments = batch("end")
    with pytest.raises(ValueError, match="trace must be one of step, product, cut, got 'retrace'"):
        copc_advantage_estimate(1.0, 1.0, *arguments, trace="retrace")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"eta must be at least 0, got -0\.1"):
        copc_advantage_estimate(1.0, 1.0, *arguments, eta=-0.1)
    with pytest.raises(ValueError, match=r"log_ratio \(3, 13\)"):
        copc_advantage_estimate(1.0, 1.0, arguments[0].squeeze(-1), *arguments[1:])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(0, 10_000), st.booleans())
def test_scan_equals_the_loop(length: int, seed: int, wide: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, length, 3) if wide else (length, 1)
    coeff = 1.3 * torch.rand(shape, generator=generator, dtype=torch.float64)
    coeff[coeff < 0.1] = 0.0
    bias = torch.randn(shape, generator=generator, dtype=torch.float64)
    x, expected = torch.zeros_like(bias.select(-2, 0)), torch.empty_like(bias)
    for t in range(length - 1, -1, -1):
        x = bias.select(-2, t) + coeff.select(-2, t) * x
        expected.select(-2, t).copy_(x)
    torch.testing.assert_close(backward_scan(coeff, bias), expected, rtol=1e-12, atol=1e-12)


def test_scan_gradient() -> None:
    coeff = torch.rand(2, 7, 1, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, 7, 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(backward_scan, (coeff, bias))


def test_scan_of_float32_stays_close_to_float64_over_a_long_response() -> None:
    generator = torch.Generator().manual_seed(0)
    coeff, bias = (
        torch.rand(1, 50_000, 1, generator=generator),
        torch.randn(1, 50_000, 1, generator=generator),
    )
    coeff = 0.9 + 0.1 * coeff
    exact = backward_scan(coeff.double(), bias.double())
    assert ((backward_scan(coeff, bias) - exact).abs().max() / exact.abs().max()) < 1e-6
