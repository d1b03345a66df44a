"""Every policy channel against its formula, token by token in float64, with its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from torchrl_copc.objectives.policy import (
    PolicyTerm,
    clipped_surrogate,
    decoupled_clip,
    ratio_mask,
    sequence_ratio,
    truncated_weight,
    two_sided_mask,
)
from torchrl_copc.objectives.second_moment import (
    capped_second_moment_threshold,
    second_moment_clip,
    second_moment_mask,
    second_moment_threshold,
)

# What a formula says of one token: (term, gradient with respect to log pi_theta). r, rho: current and frozen ratio.
Formula = Callable[[float, float, float], tuple[float, float]]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ppo(eps_low: float, eps_high: float) -> Formula:
    def formula(r: float, rho: float, a: float) -> tuple[float, float]:
        clipped = clip(r, 1 - eps_low, 1 + eps_high)
        return -min(r * a, clipped * a), -r * a if r * a <= clipped * a else 0.0

    return formula


def copc(r: float, rho: float, a: float) -> tuple[float, float]:
    return (-r * a, -r * a) if 0.8 <= rho <= 1.28 else (0.0, 0.0)


def sao(r: float, rho: float, a: float) -> tuple[float, float]:
    return (-r * a * math.log(r), -r * a) if 0.2 < r < 4.0 else (0.0, 0.0)


def areal(r: float, rho: float, a: float) -> tuple[float, float]:
    if rho > 2.0:
        return 0.0, 0.0
    term, gradient = ppo(0.2, 0.3)(r / rho, 1.0, a)
    return rho * term, rho * gradient


def vtrace(r: float, rho: float, a: float) -> tuple[float, float]:
    return -min(1.0, rho) * a * math.log(r), -min(1.0, rho) * a


def m2po(r: float, rho: float, a: float) -> tuple[float, float]:
    dropped = ((a > 0 and rho > 1) or (a < 0 and rho < 1)) and abs(math.log(rho)) >= 0.6
    return (0.0, 0.0) if dropped else (-r * a, -r * a)


CHANNELS = {
    "ratio_mask": (partial(ratio_mask, eta=0.5, eps_low=0.4, eps_high=0.56), copc),
    "clipped_surrogate": (clipped_surrogate, ppo(0.2, 0.2)),
    "clip_higher": (partial(clipped_surrogate, eps_high=0.28), ppo(0.2, 0.28)),
    "two_sided_mask": (two_sided_mask, sao),
    "decoupled_clip": (partial(decoupled_clip, eps_high=0.3, weight_cap=2.0), areal),
    "truncated_weight": (truncated_weight, vtrace),
    "second_moment_mask": (partial(second_moment_mask, threshold=0.6), m2po),
    "second_moment_clip": (
        partial(second_moment_clip, threshold=0.6),
        ppo(max(1 - math.exp(-0.6), 0.3), max(math.exp(0.6) - 1, 0.5)),
    ),
    "second_moment_clip_least": (partial(second_moment_clip, threshold=0.1), ppo(0.3, 0.5)),
}


def tokens(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    frozen, drift, advantage = torch.randn(3, 2, 60, 1, generator=generator, dtype=torch.float64)
    frozen = 0.8 * frozen
    return (frozen + 0.3 * drift).requires_grad_(), frozen, advantage


@pytest.mark.parametrize("name", CHANNELS)
def test_term_and_gradient_are_the_formula(name: str) -> None:
    channel, formula = CHANNELS[name]
    log_ratio, frozen, advantage = tokens()
    term, kept = channel(log_ratio, frozen, advantage)
    term.sum().backward()
    rows = zip(
        log_ratio.flatten().tolist(), frozen.flatten().tolist(), advantage.flatten().tolist(), strict=True
    )
    expected = [formula(math.exp(r), math.exp(rho), a) for r, rho, a in rows]
    exact = torch.tensor(expected, dtype=torch.float64).view(2, 60, 1, 2)
    torch.testing.assert_close(term, exact[..., 0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(log_ratio.grad, exact[..., 1], rtol=1e-12, atol=1e-14)
    assert torch.equal(kept, log_ratio.grad != 0)
    if name != "truncated_weight":
        assert 0.05 < kept.double().mean() < 0.95  # both sides of the formula were met


@pytest.mark.parametrize("name", CHANNELS)
def test_a_rejected_ratio_may_overflow_and_a_nan_is_not_hidden(name: str) -> None:
    channel, _ = CHANNELS[name]
    log_ratio = torch.tensor([500.0, 0.0], requires_grad=True)
    term: PolicyTerm = channel(log_ratio, log_ratio.detach(), torch.ones(2))
    term.term.sum().backward()
    assert term.term.isfinite().all() and log_ratio.grad.isfinite().all()
    nan = torch.tensor([torch.nan])
    assert channel(nan, nan, torch.ones(1)).term.isnan().all()
    assert channel(torch.zeros(1), torch.zeros(1), nan).term.isnan().all()


def test_saos_gradient_is_that_of_a_ratio_mask_taken_from_the_current_ratio() -> None:
    log_ratio, _, advantage = tokens()
    two_sided_mask(log_ratio, log_ratio, advantage).term.sum().backward()
    detached, log_ratio.grad = log_ratio.grad, None
    ratio_mask(log_ratio, log_ratio, advantage, eta=1.0, eps_low=0.8, eps_high=3.0).term.sum().backward()
    torch.testing.assert_close(detached, log_ratio.grad)


def test_the_frozen_ratio_carries_no_gradient() -> None:
    for name, (channel, _) in CHANNELS.items():
        log_ratio, frozen, advantage = tokens()
        frozen.requires_grad_()
        channel(log_ratio, frozen, advantage).term.sum().backward()
        assert frozen.grad is None, name


def test_sequence_ratio_weighs_whole_responses() -> None:
    log_ratio, frozen, advantage = tokens()
    log_ratio, frozen, advantage = log_ratio[:1], 0.2 * frozen[:1], advantage[:1]
    log_ratio.retain_grad()
    response = torch.tensor([7] * 25 + [3] * 1 + [5] * 34).view(1, 60, 1)
    frozen[0, 30] += 3.0
    term, kept = sequence_ratio(log_ratio, frozen, advantage, response)
    term.sum().backward()
    weights = [min(8.0, math.exp(float(part.sum()))) for part in frozen[0].split([25, 1, 34])]
    assert weights[2] == 8.0 > max(weights[:2])
    weight = torch.tensor([weights[0]] * 25 + [weights[1]] + [weights[2]] * 34, dtype=torch.float64).view(
        1, 60, 1
    )
    torch.testing.assert_close(log_ratio.grad, -weight * advantage)
    torch.testing.assert_close(term, -weight * advantage * log_ratio)
    assert kept.all()
    huge = sequence_ratio(log_ratio, frozen + 100.0, advantage, response).term
    torch.testing.assert_close(huge, -8.0 * advantage * log_ratio)


def eligible(frozen: Tensor, advantage: Tensor) -> list[float]:
    pairs = zip(frozen.flatten().tolist(), advantage.flatten().tolist(), strict=True)
    return sorted(abs(x) for x, a in pairs if x * a > 0)


def test_second_moment_threshold_drops_the_fewest_tokens() -> None:
    _, frozen, advantage = tokens()
    threshold = second_moment_threshold(frozen, advantage)
    sizes = eligible(frozen, advantage)
    remaining = list(sizes)
    while sum(x * x for x in remaining) / len(remaining) > 0.04:
        remaining.pop()
    assert [x for x in sizes if x < threshold] == remaining
    assert 0 < len(remaining) < len(sizes)
    assert second_moment_threshold(frozen, advantage, limit=10.0) == math.inf
    assert second_moment_threshold(frozen, torch.zeros_like(advantage)) == math.inf
    # equal tokens are dropped together
    ties = torch.tensor([0.1, 0.3, 0.3])
    assert second_moment_threshold(ties, torch.ones(3), limit=0.06) == float(ties[1].double())
    assert second_moment_mask(ties, ties, torch.ones(3), threshold=float(ties[1].double())).kept.tolist() == [
        True,
        False,
        False,
    ]


def test_capped_second_moment_threshold_is_the_largest_token_that_fits() -> None:
    _, frozen, advantage = tokens()
    threshold = capped_second_moment_threshold(frozen, advantage)
    sizes = eligible(frozen, advantage)

    def fits(cap: float) -> bool:
        return sum(min(x, cap) ** 2 for x in sizes) / len(sizes) <= 0.04

    assert threshold == max(x for x in sizes if fits(x))
    assert capped_second_moment_threshold(frozen, advantage, limit=10.0) == math.inf
    assert capped_second_moment_threshold(frozen, advantage, limit=0.0) == 0.0


def test_a_threshold_may_be_a_tensor_with_one_for_each_token() -> None:
    log_ratio, frozen, advantage = tokens()
    each = torch.full_like(advantage, 0.4)
    each.flatten()[::2] = 0.9
    for channel in (second_moment_mask, second_moment_clip):
        ours = channel(log_ratio, frozen, advantage, threshold=each)
        for value in (0.4, 0.9):
            alone = channel(log_ratio, frozen, advantage, threshold=value)
            there = each == value
            assert torch.equal(ours.term[there], alone.term[there])
            assert torch.equal(ours.kept[there], alone.kept[there])


def test_wrong_settings_are_named() -> None:
    x = torch.zeros(1)
    with pytest.raises(ValueError, match=r"eps_low must be at least 0, got -0\.1"):
        clipped_surrogate(x, x, x, eps_low=-0.1)
    with pytest.raises(ValueError, match=r"threshold must be at least 0, got -1"):
        second_moment_clip(x, x, x, threshold=-1)
    with pytest.raises(ValueError, match=r"weight_cap must be above 0, got 0"):
        decoupled_clip(x, x, x, weight_cap=0)
    with pytest.raises(ValueError, match=r"threshold of ratios must be above 0, got 0"):
        truncated_weight(x, x, x, threshold=0)
