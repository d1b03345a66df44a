"""Learners without a critic: gradients of the formulas, row by row in float64, whatever the micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from learner_cases import gradients
from learner_cases import make_learner as with_critic
from lm_cases import llama, row
from torch import Tensor

from torchrl_copc.models.causal_lm import CausalLMActor
from torchrl_copc.objectives import AsyncPPOLoss, DAPOLoss, M2POLoss, PolicyCriticLoss, VCPOLoss
from torchrl_copc.training.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from torchrl_copc.training.learner import Learner, LearnerConfig, OptimizerConfig
from torchrl_copc.trajectory import LOG_PROBS, POLICY_MASK, REWARD, TOKENS
from torchrl_copc.value import GroupRelativeAdvantage, MinimumVarianceAdvantage, TokenGAE

GROUPS = [0, 0, 0, 1, 1, 1, 2, 2, 2]
ROWS = [row(seed, group=group) for seed, group in enumerate(GROUPS)]
# Behaviour log-probs of the rows are drawn; these are near the learner's, so that ratios lie on both sides of 1.
MODEL = llama(0)


@pytest.fixture(autouse=True, scope="module")
def one_rank():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def logits_of(model: Any, one: Any) -> Tensor:
    return model(one.get(TOKENS)[None]).logits[0, :-1][one.get(POLICY_MASK)[1:]]


def near_policy(rows: list) -> list:
    """Behaviour log-probs a little off the learner's own."""
    rng = torch.Generator().manual_seed(5)
    found = []
    for one in rows:
        one = one.clone()
        mask = one.get(POLICY_MASK)
        with torch.no_grad():
            own = logits_of(MODEL, one).log_softmax(-1).gather(-1, one.get(TOKENS)[mask][:, None]).squeeze(-1)
        one.get(LOG_PROBS)[mask] = own + 0.4 * torch.randn(own.shape, generator=rng)
        found.append(one)
    return found


def make_learner(
    loss_class: type[PolicyCriticLoss], rows_per: int = 40, ess_base=None, **settings
) -> Learner:
    actor = CausalLMActor(llama(0))
    loss = loss_class(actor, functional=False, **settings)
    estimator = MinimumVarianceAdvantage() if loss_class is VCPOLoss else GroupRelativeAdvantage()
    config = LearnerConfig(
        actor=OptimizerConfig(lr=1e-2, max_grad_norm=1e9),
        max_tokens_per_micro_batch=rows_per,
        whiten_advantage=False,
        ess_base=ess_base,
        device="cpu",
    )
    return Learner(config, actor, None, loss, estimator)


def brute_force(
    rows: list, weight_of: Callable[[list, list], list], baseline_of: Callable
) -> dict[str, Tensor]:
    """Gradient of ``-1/N sum_t weight_t * A_t * log pi_t``, with weights and advantages in plain numbers."""
    model = llama(0).double()
    log_ratios, log_probs, scores = [], [], []
    for one in rows:
        mask = one.get(POLICY_MASK)
        taken = one.get(TOKENS)[mask][:, None]
        all_log_probs = logits_of(model, one).log_softmax(-1)
        log_prob = all_log_probs.gather(-1, taken).squeeze(-1)
        onehot = torch.zeros_like(all_log_probs).scatter_(-1, taken, 1.0)
        scores.append(float((all_log_probs.detach().exp() - onehot).square().sum()))
        log_probs.append(log_prob)
        log_ratios.append((log_prob.detach() - one.get(LOG_PROBS)[mask].double()).tolist())
    returns = [float(one.get(REWARD).sum()) for one in rows]
    advantages = baseline_of(returns, [math.exp(sum(x)) for x in log_ratios], scores)
    weights = weight_of(log_ratios, advantages)
    total = sum(len(x) for x in log_ratios)
    loss = torch.zeros((), dtype=torch.float64)
    for log_prob, advantage, weight in zip(log_probs, advantages, weights, strict=True):
        loss = loss - (torch.tensor(weight, dtype=torch.float64) * advantage * log_prob).sum() / total
    loss.backward()
    return {f"actor.model.{name}": p.grad for name, p in model.named_parameters()}


def members(values: list, group: int) -> list:
    return [x for x, g in zip(values, GROUPS, strict=True) if g == group]


def standardized(returns: list, ratios: list, scores: list) -> list:
    out = []
    for value, group in zip(returns, GROUPS, strict=True):
        own = torch.tensor(members(returns, group), dtype=torch.float64)
        out.append(float((value - own.mean()) / own.std().clamp(min=1e-6)))
    return out


def minimum_variance(returns: list, ratios: list, scores: list) -> list:
    weight = [w * w * g for w, g in zip(ratios, scores, strict=True)]
    out = []
    for value, group in zip(returns, GROUPS, strict=True):
        own = members(weight, group)
        baseline = sum(w * r for w, r in zip(own, members(returns, group), strict=True)) / sum(own)
        out.append(value - baseline)
    return out


def clipped(low: float, high: float) -> Callable[[list, list], list]:
    def weights(log_ratios: list, advantages: list) -> list:
        return [
            [
                math.exp(x) if (x <= math.log(high) if a >= 0 else x >= math.log(low)) else 0.0
                for x in log_ratio
            ]
            for log_ratio, a in zip(log_ratios, advantages, strict=True)
        ]

    return weights


def eligible(log_ratios: list, advantages: list) -> list:
    return sorted(abs(x) for xs, a in zip(log_ratios, advantages, strict=True) for x in xs if x * a > 0)


def m2po_paper(log_ratios: list, advantages: list) -> list:
    left = eligible(log_ratios, advantages)
    while sum(x * x for x in left) / len(left) > 0.04:
        left.pop()
    return [
        [0.0 if x * a > 0 and abs(x) > left[-1] + 1e-6 else math.exp(x) for x in xs]
        for xs, a in zip(log_ratios, advantages, strict=True)
    ]


def m2po_code(log_ratios: list, advantages: list) -> list:
    sizes = eligible(log_ratios, advantages)
    tau = max(c for c in sizes if sum(min(x, c) ** 2 for x in sizes) / len(sizes) <= 0.04)
    low, high = 1 - max(1 - math.exp(-tau), 0.3), 1 + max(math.exp(tau) - 1, 0.5)
    return clipped(low, high)(log_ratios, advantages)


def sequence(log_ratios: list, advantages: list) -> list:
    return [[min(8.0, math.exp(sum(xs)))] * len(xs) for xs in log_ratios]


CASES = {
    "dapo": (DAPOLoss, {}, clipped(0.8, 1.28), standardized),
    "m2po": (M2POLoss, {}, m2po_paper, standardized),
    "m2po_code": (M2POLoss, {"variant": "code"}, m2po_code, standardized),
    "vcpo": (VCPOLoss, {}, sequence, minimum_variance),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_formulas_whatever_the_micro_batches(name: str) -> None:
    loss_class, settings, weights, advantages = CASES[name]
    rows = near_policy(ROWS)
    expected = brute_force(rows, weights, advantages)
    for tokens in (30, 10_000):
        learner = make_learner(loss_class, tokens, **settings)
        metrics = learner.update(rows)
        ours = gradients(learner)
        assert ours.keys() == {f"actor.{n}" for n, _ in learner.actor.net.named_parameters()}
        for key, value in ours.items():
            scale = max(float(expected[key].abs().max()), 1e-12)
            assert float((value - expected[key]).abs().max()) / scale < 2e-4, (key, tokens)
        assert metrics["grad_norm_actor"] > 0 and "loss_critic" not in metrics


def test_the_step_follows_the_effective_sample_size_of_responses() -> None:
    rows = near_policy(ROWS)
    steps = []
    for base in (None, 1.0, 0.05):
        learner = make_learner(VCPOLoss, ess_base=base)
        before = {key: value.clone() for key, value in learner.actor_weights().items()}
        metrics = learner.update(rows)
        after = learner.actor_weights()
        steps.append(sum(float((after[key] - before[key]).abs().sum()) for key in before))
        if base == 1.0:
            ess, lr = metrics["response_ESS"], metrics["lr_actor"]
    ratios = []
    model = llama(0)
    for one in rows:
        mask = one.get(POLICY_MASK)
        with torch.no_grad():
            own = logits_of(model, one).log_softmax(-1).gather(-1, one.get(TOKENS)[mask][:, None]).squeeze(-1)
        ratios.append(math.exp(float((own - one.get(LOG_PROBS)[mask]).sum())))
    expected = sum(ratios) ** 2 / (len(ratios) * sum(w * w for w in ratios))
    assert ess == pytest.approx(expected, rel=1e-4) and ess < 0.9
    assert lr == pytest.approx(1e-2 * math.sqrt(ess), rel=1e-6)
    assert steps[1] / steps[0] == pytest.approx(math.sqrt(ess), rel=1e-3)
    assert steps[2] == pytest.approx(steps[0])  # never a longer step
    with pytest.raises(ValueError, match=r"learner.ess_base must be in \(0, 1\], got 2"):
        LearnerConfig(ess_base=2)


def test_a_checkpoint_without_a_critic_comes_back_and_does_not_fit_one(tmp_path) -> None:
    rows = near_policy(ROWS)
    learner = make_learner(DAPOLoss)
    learner.update(rows)
    save_checkpoint(learner, tmp_path)
    other = make_learner(DAPOLoss)
    load_checkpoint(other, tmp_path)
    assert other.counters() == learner.counters() and "critic_updates" not in learner.counters()
    ours, theirs = learner.update(rows), other.update(rows)
    assert ours["loss_actor"] == theirs["loss_actor"]
    with pytest.raises(CheckpointError, match=r"critic.*is missing"):
        load_checkpoint(with_critic(), tmp_path)


def test_values_without_a_critic_are_refused() -> None:
    actor = CausalLMActor(llama(0))
    loss = AsyncPPOLoss(actor, functional=False)
    with pytest.raises(
        ValueError, match=r"TokenGAE needs values and there is no critic: set method.critic=true"
    ):
        Learner(LearnerConfig(device="cpu"), actor, None, loss, TokenGAE(value_network=None))
