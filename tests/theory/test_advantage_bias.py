"""Bias of the two advantage forms given state and token, with exact ratios and with clipped ones."""

from __future__ import annotations

import itertools

import pytest
import torch

from torchrl_copc.theory import advantage_estimate, random_trees

EXACT = float("inf")
TREES = random_trees(5, gap=1.0, seed=5)
VALUE_PI, ACTION_VALUE_PI = TREES.policy_value(TREES.learner_log_prob.exp())
RANDOM_VALUE = torch.randn(VALUE_PI.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
RHO = (TREES.learner_log_prob - TREES.behaviour_log_prob).exp()


@pytest.mark.parametrize(
    "value", [VALUE_PI, RANDOM_VALUE, 100 * RANDOM_VALUE], ids=["V^pi", "random", "large"]
)
def test_exact_ratios_product_trace_and_lmbda_1_are_unbiased_for_any_critic(value: torch.Tensor) -> None:
    """``E_mu[A|s,a]`` is ``Q^pi - V`` for the continuation form and ``rho * (Q^pi - V)`` for the full one."""
    advantage = ACTION_VALUE_PI - value[..., None]
    for form, expected in (("continuation", advantage), ("full", RHO * advantage)):
        estimate, _ = advantage_estimate(TREES, value, eta=EXACT, trace="product", advantage=form)
        torch.testing.assert_close(TREES.given_action(estimate), expected, rtol=1e-11, atol=1e-11)


def test_with_the_right_critic_every_trace_and_lmbda_is_unbiased() -> None:
    advantage = ACTION_VALUE_PI - VALUE_PI[..., None]
    for trace, lmbda in itertools.product(("step", "product", "cut"), (0.0, 0.9, 1.0)):
        for form, expected in (("continuation", advantage), ("full", RHO * advantage)):
            estimate, _ = advantage_estimate(
                TREES, VALUE_PI, lmbda=lmbda, eta=EXACT, trace=trace, advantage=form
            )
            torch.testing.assert_close(TREES.given_action(estimate), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("eta", "lmbda", "trace"),
    [(0.5, 1.0, "product"), (0.0, 1.0, "product"), (EXACT, 0.9, "product"), (EXACT, 1.0, "step")],
    ids=["clipped", "uncorrected", "lmbda .9", "step"],
)
def test_each_condition_of_unbiasedness_is_needed(eta: float, lmbda: float, trace: str) -> None:
    estimate, _ = advantage_estimate(
        TREES, RANDOM_VALUE, lmbda=lmbda, eta=eta, trace=trace, advantage="continuation"
    )
    error = TREES.given_action(estimate) - (ACTION_VALUE_PI - RANDOM_VALUE[..., None])
    assert error.abs().max() > 0.02
