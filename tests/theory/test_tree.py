"""The enumeration itself, against backward induction, and the gradient it takes, against autograd."""

from __future__ import annotations

import doctest
import importlib

import pytest
import torch

from torchrl_copc.objectives.policy import ratio_mask
from torchrl_copc.theory import (
    advantage_estimate,
    policy_weight,
    random_score,
    random_trees,
    response_gradient,
)


def test_every_response_is_listed_once_with_each_outcome_of_the_coin() -> None:
    trees = random_trees(2, vocab=3, max_length=4)
    tokens = torch.where(trees.mask, trees.action, -1)
    listed = {(*row.tolist(), float(coin)) for row, coin in zip(tokens, trees.coin, strict=True)}
    assert len(listed) == len(tokens) == 2 * (1 + 2 + 4 + 3 * 8)
    torch.testing.assert_close(trees.probability.sum(1), torch.ones(2).double(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_enumerated_returns_are_the_values_of_the_behaviour_policy(gamma: float) -> None:
    trees = random_trees(3, seed=1)
    value, action_value = trees.policy_value(trees.behaviour_log_prob.exp(), gamma)
    to_go = torch.zeros_like(trees.token_reward)
    following = torch.zeros_like(to_go[..., 0])
    for t in reversed(range(to_go.shape[-1])):
        to_go[..., t] = following = trees.token_reward[..., t] + gamma * following
    torch.testing.assert_close(trees.given_state(to_go), value, rtol=0, atol=1e-12)
    torch.testing.assert_close(trees.given_action(to_go), action_value, rtol=0, atol=1e-12)
    torch.testing.assert_close(trees.expectation(to_go[..., 0]), value[:, 0], rtol=0, atol=1e-12)


def test_response_gradient_is_autograd_of_the_ratio_mask_objective() -> None:
    trees = random_trees(2, max_length=4, seed=2)
    score = random_score(trees)
    estimate, _ = advantage_estimate(trees, torch.zeros(trees.reward.shape[:2]).double(), lmbda=0.9, eta=0.5)
    theta = torch.zeros(score.shape[-1], dtype=torch.float64, requires_grad=True)
    log_prob = (trees.learner_log_prob + score @ theta).log_softmax(-1)
    log_ratio = trees.at(log_prob - trees.behaviour_log_prob)
    term = ratio_mask(log_ratio, trees.log_ratio, estimate, eta=0.5, eps_low=0.4, eps_high=0.56).term
    loss = trees.expectation(torch.where(trees.mask, term, 0.0).sum(-1) / trees.length).sum()
    (gradient,) = torch.autograd.grad(loss, theta)
    enumerated = response_gradient(trees, score, policy_weight(trees, 0.5), estimate)
    torch.testing.assert_close(-gradient, trees.expectation(enumerated).sum(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["tree", "gradient"])
def test_examples_in_docstrings(name: str) -> None:
    outcome = doctest.testmod(importlib.import_module(f"torchrl_copc.theory.{name}"))
    assert outcome.attempted > 0
    assert outcome.failed == 0
