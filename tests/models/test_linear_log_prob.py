from __future__ import annotations

import pytest
import torch

from torchrl_copc.models.causal_lm import linear_log_prob
from torchrl_copc.models.linear_log_prob import score_sq_norm


def naive(hidden, weight, target, temperature):
    log_probs = (hidden @ weight.t() / temperature).log_softmax(-1)
    return log_probs.gather(-1, target[:, None]).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1)


def case(dtype=torch.float64, n=7, width=5, vocab=11):
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, width, dtype=torch.float64, generator=rng).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, dtype=torch.float64, generator=rng).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(vocab, (n,), generator=rng)


@pytest.mark.parametrize("chunk_size", [1, 3, 7, None])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_are_those_of_the_softmax(chunk_size, temperature):
    hidden, weight, target = case()
    upstream = torch.randn(2, 7, dtype=torch.float64)
    outcomes = []
    for function in (
        lambda: linear_log_prob(hidden, weight, target, temperature, chunk_size),
        lambda: naive(hidden, weight, target, temperature),
    ):
        log_prob, entropy = function()
        total = (upstream[0] * log_prob + upstream[1] * entropy).sum()
        outcomes.append((log_prob, entropy, *torch.autograd.grad(total, (hidden, weight))))
    for ours, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_gradcheck_of_both_outputs_together_and_alone():
    hidden, weight, target = case(n=4, vocab=6)
    for pick in (lambda o: o, lambda o: o[0], lambda o: o[1]):
        assert torch.autograd.gradcheck(
            lambda h, w, pick=pick: pick(linear_log_prob(h, w, target, 0.7, 3)), (hidden, weight)
        )


def test_bfloat16_states_give_float32_log_probs_and_bfloat16_gradients():
    hidden, weight, target = case(torch.bfloat16)
    log_prob, _ = linear_log_prob(hidden, weight, target)
    assert log_prob.dtype == torch.float32
    log_prob.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    exact, _ = naive(hidden.detach().double(), weight.detach().double(), target, 1.0)
    torch.testing.assert_close(log_prob.detach().double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunk_size", [2, None])
def test_score_norm_is_that_of_the_gradient_in_the_logits(chunk_size):
    hidden, weight, target = case()
    logits = (hidden @ weight.t() / 0.6).detach().requires_grad_()
    logits.log_softmax(-1).gather(-1, target[:, None]).sum().backward()
    ours = score_sq_norm(hidden, weight, target, 0.6, chunk_size)
    torch.testing.assert_close(ours, logits.grad.square().sum(-1))
    assert not ours.requires_grad


def test_temperature_zero_is_refused():
    with pytest.raises(ValueError, match="temperature"):
        linear_log_prob(*case(), temperature=0.0)
