"""Error of a gradient averaged over groups of dependent responses: exact formula, all pairs, and sampled tokens."""

from __future__ import annotations

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
)
from torchrl_copc.value.functional import copc_advantage_estimate

ETA_P, ETA_A, LMBDA = 0.5, 0.5, 0.95
TREES = random_trees(3, max_length=4, gap=0.6, seed=8)  # three prompts, drawn with equal probability
SCORE = random_score(TREES)
VALUE = torch.randn(TREES.reward.shape[:2], generator=torch.Generator().manual_seed(2), dtype=torch.float64)
TARGET = ideal_gradient(TREES, SCORE).mean(0)


def group_gradients(trees: PrefixTrees) -> tuple[Tensor, Tensor]:
    """Gradient of each of two responses to one prompt, ``[M, N, N, 2, d]``, and probabilities ``[M, N, N]``.

    The mean return of the group is subtracted from the advantages, as group-relative methods do, so the two depend
    on each other beyond sharing a prompt.
    """
    weight = policy_weight(trees, ETA_P)
    estimate, _ = advantage_estimate(trees, VALUE, lmbda=LMBDA, eta=ETA_A)
    alone = response_gradient(trees, SCORE, weight, estimate)
    per_baseline = response_gradient(trees, SCORE, weight, torch.ones_like(weight))
    returns = trees.token_reward.sum(-1)
    baseline = ((returns[:, :, None] + returns[:, None]) / 2)[..., None]
    first = alone[:, :, None] - baseline * per_baseline[:, :, None]
    second = alone[:, None] - baseline * per_baseline[:, None]
    probability = trees.probability[:, :, None] * trees.probability[:, None] / len(trees.probability)
    return torch.stack((first, second), 3), probability


def group_mse(gradients: Tensor, probability: Tensor, groups: int) -> Tensor:
    """``|sum of biases|^2 + 1/N * K^-2 * [sum_k tr Cov U_k + sum_{k!=k'} tr Cov(U_k, U_k')]``."""
    mean = torch.einsum("mij,mijkd->kd", probability, gradients)
    centred = gradients - mean
    covariance = torch.einsum("mij,mijkd,mijld->kl", probability, centred, centred)
    own, cross = covariance.diagonal().sum(), covariance.sum() - covariance.diagonal().sum()
    assert abs(cross) > 0.01 * own  # the responses of a group are dependent
    size = gradients.shape[3]
    return (mean.mean(0) - TARGET).square().sum() + (own + cross) / (groups * size**2)


def test_group_formula_equals_enumeration_of_all_pairs_of_groups() -> None:
    gradients, probability = group_gradients(TREES)
    group = gradients.mean(3).flatten(0, 2) - TARGET
    weight = probability.flatten()
    # E|(a + b) / 2|^2 over independent groups a, b; the sum over pairs, one block of rows at a time
    total = torch.zeros((), dtype=torch.float64)
    squared = group.square().sum(-1)
    for rows, row_weight, row_squared in zip(
        group.split(1000), weight.split(1000), squared.split(1000), strict=True
    ):
        pairs = (row_squared[:, None] + squared + 2 * rows @ group.T) / 4
        total += row_weight @ pairs @ weight
    torch.testing.assert_close(group_mse(gradients, probability, groups=2), total, rtol=1e-11, atol=0)
    alone = (weight * squared).sum()
    torch.testing.assert_close(group_mse(gradients, probability, groups=1), alone, rtol=1e-11, atol=0)


def sample_responses(prompt: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Responses sampled token by token from the behaviour policy of each prompt, ``[R]`` -> leaves ``[R, T]``."""
    steps = TREES.mask.shape[1]
    state = torch.zeros_like(prompt)
    alive = torch.ones_like(prompt, dtype=torch.bool)
    columns: dict[str, list[Tensor]] = {name: [] for name in ("state", "action", "mask", "reward")}
    for _ in range(steps):
        probability = TREES.behaviour_log_prob[prompt, state].exp()
        action = torch.multinomial(probability, 1, generator=generator).squeeze(1)
        following = TREES.next_state[state, action]
        coin = 2.0 * torch.randint(2, prompt.shape, generator=generator) - 1
        reward = TREES.reward[prompt, state, action]
        reward = reward + torch.where(following < 0, coin * TREES.coin_size[prompt, state, action], 0.0)
        for name, column in (
            ("state", state),
            ("action", action),
            ("mask", alive),
            ("reward", reward * alive),
        ):
            columns[name].append(column)
        alive = alive & (following >= 0)
        state = following.clamp(min=0)
    return {name: torch.stack(column, 1) for name, column in columns.items()}


def sampled_gradients(prompt: Tensor, rows: dict[str, Tensor], baseline: Tensor) -> Tensor:
    """Length-normalised gradient of each sampled response, ``[R, d]``, from the estimate on those rows."""
    at = (prompt[:, None], rows["state"], rows["action"])
    mask = rows["mask"]
    log_ratio = (TREES.learner_log_prob - TREES.behaviour_log_prob)[at] * mask
    value = VALUE[prompt[:, None], rows["state"]] * mask
    done = ~torch.nn.functional.pad(mask[:, 1:], (0, 1))
    next_value = torch.nn.functional.pad(value[:, 1:], (0, 1))
    leaves = (x[..., None] for x in (log_ratio, value, next_value, rows["reward"], done))
    advantage = copc_advantage_estimate(1.0, LMBDA, *leaves, eta=ETA_A, eps_low=0.4, eps_high=0.56)[0][..., 0]
    rho = log_ratio.exp()
    kept = mask & (rho >= 1 - 0.4 * ETA_P) & (rho <= 1 + 0.56 * ETA_P)
    coefficient = torch.where(kept, rho * (advantage - baseline[:, None]), 0.0) / mask.sum(1, keepdim=True)
    return torch.einsum("rt,rtd->rd", coefficient, SCORE[at])


def z_score(errors: Tensor, exact: Tensor) -> float:
    return float((errors.mean() - exact) / (errors.std() / len(errors) ** 0.5))


def test_mse_of_a_batch_against_monte_carlo() -> None:
    repeats, batch = 40_000, 4
    generator = torch.Generator().manual_seed(0)
    estimate, _ = advantage_estimate(TREES, VALUE, lmbda=LMBDA, eta=ETA_A)
    exact = gradient_mse(
        TREES,
        response_gradient(TREES, SCORE, policy_weight(TREES, ETA_P), estimate),
        ideal_gradient(TREES, SCORE),
        batch_size=batch,
    )
    for index, target in enumerate(ideal_gradient(TREES, SCORE)):
        prompt = torch.full((repeats * batch,), index)
        rows = sample_responses(prompt, generator)
        gradients = sampled_gradients(prompt, rows, torch.zeros(len(prompt)))
        errors = (gradients.unflatten(0, (repeats, batch)).mean(1) - target).square().sum(-1)
        assert abs(z_score(errors, exact[index])) < 4


def test_joint_mse_of_groups_against_monte_carlo() -> None:
    repeats, groups, size = 40_000, 3, 2
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(3, (repeats * groups,), generator=generator).repeat_interleave(size)
    rows = sample_responses(prompt, generator)
    returns = rows["reward"].sum(1).unflatten(0, (-1, size)).mean(1).repeat_interleave(size)
    gradients = sampled_gradients(prompt, rows, returns)
    errors = (gradients.unflatten(0, (repeats, groups * size)).mean(1) - TARGET).square().sum(-1)
    exact = group_mse(*group_gradients(TREES), groups=groups)
    assert abs(z_score(errors, exact)) < 4
    # and the check could fail: the error of independent responses is another number
    independent = group_mse(*group_gradients(TREES), groups=groups * size)
    assert abs(z_score(errors, independent)) > 10
