"""How weight and advantage errors combine: bias and variance decompositions, each against plain enumeration."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from torchrl_copc.theory import (
    PrefixTrees,
    advantage_estimate,
    gradient_mse,
    ideal_gradient,
    policy_weight,
    random_score,
    random_trees,
    response_gradient,
    trace_covariance,
)

EXACT = float("inf")
SETTINGS = list(
    itertools.product((0.25, 1.0), (0.0, 0.5, EXACT), ("step", "product"), ("full", "continuation"))
)


@dataclass
class Case:
    """Actual and ideal weight and advantage of one setting, all [M, N, T]."""

    trees: PrefixTrees
    score: Tensor
    weight: Tensor
    advantage: Tensor
    ideal_weight: Tensor
    ideal_advantage: Tensor

    def token_gradient(self, coefficient: Tensor) -> Tensor:
        return coefficient[..., None] * self.trees.at(self.score)


def make_case(eta_p: float, eta_a: float, trace: str, form: str, lmbda: float = 0.9) -> Case:
    trees = random_trees(4, max_length=4, gap=0.6, seed=6)
    generator = torch.Generator().manual_seed(1)
    value = torch.randn(trees.reward.shape[:2], generator=generator, dtype=torch.float64)
    estimate, _ = advantage_estimate(trees, value, lmbda=lmbda, eta=eta_a, trace=trace, advantage=form)
    value_pi, action_value_pi = trees.policy_value(trees.learner_log_prob.exp())
    return Case(
        trees=trees,
        score=random_score(trees),
        weight=policy_weight(trees, eta_p),
        advantage=torch.where(trees.mask, estimate, 0.0),
        ideal_weight=policy_weight(trees, EXACT),
        ideal_advantage=trees.at(action_value_pi - value_pi[..., None]),
    )


def at_each_position(case: Case, values: Tensor) -> Tensor:
    """``E_mu[values_t | the response has a token t]``, ``[M, N, T, ...] -> [M, T, ...]``."""
    alive = case.trees.probability[..., None] * case.trees.mask
    return torch.einsum("mnt,mnt...->mt...", alive / alive.sum(1, keepdim=True), values)


def conditional_moments(case: Case) -> tuple[Tensor, Tensor]:
    """Mean and variance of the advantage given state and token, at each token of each response."""
    mean = case.trees.given_action(case.advantage)
    variance = case.trees.given_action(case.advantage.square()) - mean.square()
    return case.trees.at(mean), case.trees.at(variance)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_bias_is_the_sum_of_mask_residual_and_joint_terms(setting: tuple[float, float, str, str]) -> None:
    case = make_case(*setting)
    weight_error = case.weight - case.ideal_weight
    advantage_error = case.advantage - case.ideal_advantage
    terms = (
        weight_error * case.ideal_advantage,
        case.ideal_weight * advantage_error,
        weight_error * advantage_error,
    )
    difference = case.weight * case.advantage - case.ideal_weight * case.ideal_advantage
    torch.testing.assert_close(sum(terms), difference, rtol=0, atol=1e-12)

    trees, one = case.trees, torch.ones_like(case.weight)
    actual = trees.expectation(response_gradient(trees, case.score, case.weight, case.advantage))
    bias = actual - ideal_gradient(trees, case.score)
    parts = [trees.expectation(response_gradient(trees, case.score, term, one)) for term in terms]
    torch.testing.assert_close(sum(parts), bias, rtol=0, atol=1e-12)
    assert bias.abs().max() > 1e-3


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_joint_term_sees_the_advantage_only_through_its_conditional_bias(
    setting: tuple[float, float, str, str],
) -> None:
    """Given state and token the weight and the score are fixed, so ``A - A*`` may be replaced by its mean."""
    case = make_case(*setting)
    weight_error = case.weight - case.ideal_weight
    mean, _ = conditional_moments(case)
    sampled, averaged = (
        case.trees.expectation(case.token_gradient(weight_error * (a - case.ideal_advantage)).sum(2))
        for a in (case.advantage, mean)
    )
    torch.testing.assert_close(sampled, averaged, rtol=0, atol=1e-12)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_conditional_variance(setting: tuple[float, float, str, str]) -> None:
    """``Var(wA) = E[w^2 Var(A|s,a)] + Var(w E[A|s,a])`` at every position."""
    case = make_case(*setting)
    mean, variance = conditional_moments(case)

    def var(values: Tensor) -> Tensor:
        return at_each_position(case, (values - at_each_position(case, values)[:, None]).square())

    within = at_each_position(case, case.weight.square() * variance)
    torch.testing.assert_close(
        var(case.weight * case.advantage), within + var(case.weight * mean), rtol=0, atol=1e-12
    )
    assert within.max() > 0.1


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_vector_variance(setting: tuple[float, float, str, str]) -> None:
    """The same for the gradient of a token: ``E[w^2 |g|^2 Var(A|s,a)] + tr Cov(w E[A|s,a] g)``."""
    case = make_case(*setting)
    mean, variance = conditional_moments(case)

    def trace_cov(coefficient: Tensor) -> Tensor:
        vectors = case.token_gradient(coefficient)
        return at_each_position(case, (vectors - at_each_position(case, vectors)[:, None]).square().sum(-1))

    squared_score = case.trees.at(case.score).square().sum(-1)
    within = at_each_position(case, case.weight.square() * squared_score * variance)
    torch.testing.assert_close(
        trace_cov(case.weight * case.advantage), within + trace_cov(case.weight * mean), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_response_variance_is_the_sum_over_pairs_of_positions(setting: tuple[float, float, str, str]) -> None:
    """``tr Cov U = sum_{t,k} tr Cov(Z_t, Z_k)`` with ``Z_t = 1{t<L} u_t / L``; also by length."""
    case = make_case(*setting)
    trees = case.trees
    tokens = case.token_gradient(case.weight * case.advantage) / trees.length[:, None, None]
    centred = tokens - trees.expectation(tokens)[:, None]
    pairs = torch.einsum("mn,mntd,mnkd->mtk", trees.probability, centred, centred)
    gradients = response_gradient(trees, case.score, case.weight, case.advantage)
    total = trace_covariance(trees, gradients)
    torch.testing.assert_close(pairs.sum((1, 2)), total, rtol=0, atol=1e-12)
    # the pairs matter: positions are not independent
    assert (pairs.diagonal(dim1=1, dim2=2).sum(1) - total).abs().min() > 1e-4

    mean, split = trees.expectation(gradients), torch.zeros_like(total)
    for length in trees.length.unique():
        share = trees.probability * (trees.length == length)
        mass = share.sum(1)
        centre = torch.einsum("mn,mnd->md", share, gradients) / mass[:, None]
        split += torch.einsum("mn,mnd->m", share, (gradients - centre[:, None]).square())
        split += mass * (centre - mean).square().sum(-1)
    torch.testing.assert_close(split, total, rtol=0, atol=1e-12)


def test_gradient_mse_of_two_responses_by_enumerating_pairs() -> None:
    case = make_case(0.5, 0.5, "step", "full")
    gradients = response_gradient(case.trees, case.score, case.weight, case.advantage)
    target = ideal_gradient(case.trees, case.score)
    error = (gradients[:, :, None] + gradients[:, None]) / 2 - target[:, None, None]
    probability = case.trees.probability[:, :, None] * case.trees.probability[:, None]
    brute_force = (probability * error.square().sum(-1)).sum((1, 2))
    torch.testing.assert_close(
        gradient_mse(case.trees, gradients, target, batch_size=2), brute_force, rtol=1e-12, atol=0
    )
