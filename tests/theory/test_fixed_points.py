"""What COPC's critic converges to, and how: exact expectations of the library's value target."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from torchrl_copc.theory import PrefixTrees, advantage_estimate, random_trees, tilted_policy

TRACES = ("step", "product", "cut")
LMBDAS = (0.0, 0.9, 1.0)
ETAS = (0.0, 0.25, 0.5, 1.0, 2.0, float("inf"))


def random_value(trees: PrefixTrees, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(trees.reward.shape[:2], generator=generator, dtype=torch.float64)


def expected_target(trees: PrefixTrees, value: Tensor, **form: object) -> Tensor:
    return trees.given_state(advantage_estimate(trees, value, **form)[1])


def clipped_target_policy(trees: PrefixTrees, eta: float) -> tuple[Tensor, Tensor]:
    """``pi~`` and ``cbar`` from probabilities, without the library's log-space clip."""
    mu, pi = trees.behaviour_log_prob.exp(), trees.learner_log_prob.exp()
    weighted = mu * (pi / mu).clamp(max(0.0, 1 - 0.4 * eta), 1 + 0.56 * eta)
    return weighted / weighted.sum(-1, keepdim=True), weighted.sum(-1)


@pytest.mark.parametrize("eta", ETAS)
def test_tilted_policy(eta: float) -> None:
    trees = random_trees(4, gap=1.0)
    for ours, plain in zip(tilted_policy(trees, eta), clipped_target_policy(trees, eta), strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-13)


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("eta", ETAS)
def test_exact_iteration_converges_to_the_value_of_the_tilted_policy(eta: float, trace: str) -> None:
    """``eta = 0`` gives ``V^mu``, exact ratios ``V^pi``, a clip ``V^{pi~}``, whatever the trace and lambda."""
    trees = random_trees(5, gap=1.0, seed=3)
    policy = {0.0: trees.behaviour_log_prob.exp(), float("inf"): trees.learner_log_prob.exp()}.get(eta)
    if policy is None:
        policy = clipped_target_policy(trees, eta)[0]
    for lmbda, gamma in itertools.product(LMBDAS, (1.0, 0.95)):
        expected, _ = trees.policy_value(policy, gamma)
        value = random_value(trees)
        assert (value - expected).abs().max() > 1
        for _ in range(400):
            previous = value
            value = expected_target(trees, value, gamma=gamma, lmbda=lmbda, eta=eta, trace=trace)
            if torch.allclose(value, previous, rtol=0, atol=1e-13):
                break
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-11)


def test_the_three_fixed_points_differ() -> None:
    trees = random_trees(5, gap=1.0, seed=3)
    values = [trees.policy_value(tilted_policy(trees, eta)[0])[0] for eta in (0.0, 0.5, float("inf"))]
    for one, other in itertools.combinations(values, 2):
        assert (one - other).abs().max() > 0.05


@pytest.mark.parametrize("eta", ETAS)
def test_expected_residual_is_cbar_times_the_bellman_error_of_the_tilted_policy(eta: float) -> None:
    trees = random_trees(5, gap=1.0, seed=4)
    policy, cbar = clipped_target_policy(trees, eta)
    # with lmbda = 0 the full form is c_t * delta_t alone
    value = random_value(trees)
    residual = trees.given_state(advantage_estimate(trees, value, lmbda=0.0, eta=eta, advantage="full")[0])
    future = torch.where(trees.next_state < 0, 0.0, value[:, trees.next_state.clamp(min=0)])
    bellman_error = (policy * (trees.reward + future)).sum(-1) - value
    torch.testing.assert_close(residual, cbar * bellman_error, rtol=0, atol=1e-11)

    fixed_point, _ = trees.policy_value(policy)
    for trace, lmbda in itertools.product(TRACES, LMBDAS):
        estimate, _ = advantage_estimate(
            trees, fixed_point, lmbda=lmbda, eta=eta, trace=trace, advantage="full"
        )
        assert trees.given_state(estimate).abs().max() < 1e-11


@pytest.mark.parametrize("lmbda", LMBDAS)
@pytest.mark.parametrize("trace", TRACES)
def test_jacobian_of_the_exact_iteration_is_triangular_with_eigenvalues_one_minus_cbar(
    trace: str, lmbda: float
) -> None:
    for eta, seed in itertools.product((0.25, 0.5, 1.0), range(3)):
        trees = random_trees(1, gap=1.0, seed=seed)
        _, cbar = clipped_target_policy(trees, eta)
        assert (1 - cbar).abs().max() > 0.01

        def iterate(value: Tensor, trees: PrefixTrees = trees, eta: float = eta) -> Tensor:
            return expected_target(trees, value[None], lmbda=lmbda, eta=eta, trace=trace)[0]

        jacobian = torch.autograd.functional.jacobian(iterate, random_value(trees)[0])
        assert jacobian.tril(-1).abs().max() < 1e-13  # a prefix depends on its extensions only
        eigenvalues = torch.linalg.eigvals(jacobian)
        assert eigenvalues.imag.abs().max() < 1e-12
        torch.testing.assert_close(
            eigenvalues.real.sort().values, (1 - cbar[0]).sort().values, rtol=0, atol=1e-12
        )
        assert cbar.min() > 0 and cbar.max() < 2
