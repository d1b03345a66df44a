"""Policy gradients of enumerated responses: their exact mean, covariance and mean squared error."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_copc.objectives.policy import ratio_mask
from torchrl_copc.theory.tree import EPS_HIGH, EPS_LOW, PrefixTrees


def random_score(trees: PrefixTrees, dim: int = 5, seed: int = 0) -> Tensor:
    """Score ``grad log pi(a|s)`` of a softmax over random linear features, so that states share parameters.

    Args:
        trees: the MDPs.
        dim: number of parameters d.
        seed: of the features.

    Returns:
        ``[M, S, K, d]``.
    """
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn((*trees.reward.shape, dim), generator=generator, dtype=torch.float64)
    mean = (trees.learner_log_prob.exp()[..., None] * features).sum(2, keepdim=True)
    return features - mean


def policy_weight(trees: PrefixTrees, eta: float) -> Tensor:
    """``w_t = M_t * rho_t``, what the library's ratio mask multiplies the advantage and the score with.

    Args:
        trees: the MDPs.
        eta: width of the interval on the policy side; infinity keeps every token, which is the ideal weight.

    Returns:
        ``[M, N, T]``, 0 on padding.
    """
    unit = torch.ones_like(trees.log_ratio)
    log_ratio = trees.log_ratio
    term = ratio_mask(log_ratio, log_ratio, unit, eta=eta, eps_low=EPS_LOW, eps_high=EPS_HIGH).term
    return torch.where(trees.mask, -term, 0.0)


def response_gradient(trees: PrefixTrees, score: Tensor, weight: Tensor, advantage: Tensor) -> Tensor:
    """``U = 1/L * sum_t w_t A_t grad log pi_t``: one response's share of the ``response_mean`` objective.

    Args:
        trees: the MDPs.
        score: ``[M, S, K, d]``.
        weight, advantage: ``[M, N, T]``.

    Returns:
        ``[M, N, d]``.
    """
    coefficient = weight * advantage / trees.length[:, None]
    return torch.einsum("mnt,mntd->mnd", coefficient, trees.at(score))


def ideal_gradient(trees: PrefixTrees, score: Tensor) -> Tensor:
    """``E_mu`` of the gradient with the ideal weight ``rho`` and the ideal advantage ``Q^pi - V^pi``, ``[M, d]``.

    The weight is the token's own ratio: states keep their distribution under the behaviour policy, as in every
    objective of the PPO family.
    """
    value, action_value = trees.policy_value(trees.learner_log_prob.exp())
    advantage = trees.at(action_value - value[..., None])
    weight = policy_weight(trees, float("inf"))
    return trees.expectation(response_gradient(trees, score, weight, advantage))


def trace_covariance(trees: PrefixTrees, vectors: Tensor) -> Tensor:
    """``tr Cov`` of a vector per response, ``[M, N, d] -> [M]``."""
    mean = trees.expectation(vectors)
    return trees.expectation((vectors - mean[:, None]).square().sum(-1))


def gradient_mse(trees: PrefixTrees, gradients: Tensor, target: Tensor, batch_size: int) -> Tensor:
    """Exact mean squared error of the mean gradient of independent responses.

    ``|E U - target|^2 + tr Cov(U) / batch_size``.

    Args:
        trees: the MDPs.
        gradients: gradient of each response, ``[M, N, d]``.
        target: ``[M, d]``.
        batch_size: number of responses.

    Returns:
        ``[M]``.

    Examples:
        >>> from torchrl_copc.theory import random_trees
        >>> trees = random_trees(1)
        >>> score = random_score(trees)
        >>> unit = torch.ones_like(trees.log_ratio)
        >>> gradients = response_gradient(trees, score, policy_weight(trees, 0.5), unit)
        >>> mean = trees.expectation(gradients)
        >>> error = gradient_mse(trees, gradients, mean, batch_size=4)
        >>> torch.allclose(error, trace_covariance(trees, gradients) / 4)
        True
    """
    bias = trees.expectation(gradients) - target
    return bias.square().sum(-1) + trace_covariance(trees, gradients) / batch_size
