"""The policy channel and the aggregation as pure functions."""

from __future__ import annotations

import pytest
import torch

from torchrl_copc.objectives.aggregate import effective_sample_size, loss_weights, masked_mean
from torchrl_copc.objectives.policy import ratio_mask

INTERVAL = {"eta": 0.5, "eps_low": 0.4, "eps_high": 0.56}  # [0.80, 1.28]


def test_the_interval_is_closed_and_asymmetric() -> None:
    ratio = torch.tensor([0.79, 0.81, 1.0, 1.27, 1.29], dtype=torch.float64)
    _, kept = ratio_mask(ratio.log(), ratio.log(), torch.ones(5), **INTERVAL)
    assert kept.tolist() == [False, True, True, True, False]
    _, kept = ratio_mask(torch.zeros(1), torch.zeros(1), torch.ones(1), eta=0.0, eps_low=0.4, eps_high=0.56)
    assert kept.tolist() == [True]


def test_kept_tokens_keep_their_gradient_after_drifting_out() -> None:
    log_ratio = torch.tensor([2.0, -3.0, 0.1], requires_grad=True)
    advantage = torch.tensor([1.5, -0.5, 2.0])
    term, kept = ratio_mask(log_ratio, torch.zeros(3), advantage, **INTERVAL)
    assert kept.all()
    term.sum().backward()
    torch.testing.assert_close(term, -log_ratio.exp() * advantage)
    torch.testing.assert_close(log_ratio.grad, -log_ratio.detach().exp() * advantage)


def test_masked_tokens_give_exactly_zero_even_when_their_ratio_overflows() -> None:
    log_ratio = torch.tensor([0.0, 500.0, -torch.inf], requires_grad=True)
    term, kept = ratio_mask(log_ratio, log_ratio, torch.ones(3), **INTERVAL)
    term.sum().backward()
    assert kept.tolist() == [True, False, False]
    assert term.tolist() == [-1.0, 0.0, 0.0]
    assert log_ratio.grad.tolist() == [-1.0, 0.0, 0.0]


def test_a_nan_log_ratio_reaches_the_loss() -> None:
    log_ratio = torch.tensor([torch.nan])
    assert ratio_mask(log_ratio, log_ratio, torch.ones(1), **INTERVAL).term.isnan().all()


def test_weights_add_up_to_the_two_means() -> None:
    response_id = torch.tensor([7, 7, 7, 2, 5, 5]).view(1, 6, 1)
    term = torch.randn(1, 6, 1)
    token_mean = (loss_weights(response_id, "token_mean") * term).sum()
    torch.testing.assert_close(token_mean, term.mean())
    response_mean = (loss_weights(response_id, "response_mean") * term).sum()
    torch.testing.assert_close(
        response_mean, torch.stack([term[:, :3].mean(), term[:, 3].mean(), term[:, 4:].mean()]).mean()
    )


@pytest.mark.parametrize("mode", ["token_mean", "response_mean"])
def test_global_counts_make_the_split_irrelevant(mode: str) -> None:
    response_id = torch.tensor([0, 0, 0, 1, 2, 2])
    whole = loss_weights(response_id, mode)  # type: ignore[arg-type]
    counts = {"num_tokens": 6, "num_responses": 3}
    parts = [loss_weights(part, mode, **counts) for part in (response_id[:4], response_id[4:])]  # type: ignore[arg-type]
    torch.testing.assert_close(torch.cat(parts), whole)


def test_unknown_aggregation_is_named() -> None:
    with pytest.raises(ValueError, match="token_mean, response_mean, got 'mean'"):
        loss_weights(torch.zeros(3), "mean")  # type: ignore[arg-type]


def test_masked_mean_ignores_what_padding_holds() -> None:
    x, valid = (
        torch.tensor([[1.0, torch.nan], [torch.inf, 5.0]]),
        torch.tensor([[True, False], [False, True]]),
    )
    assert masked_mean(x, valid) == 3.0
    assert masked_mean(torch.tensor([True, False, False, False])) == 0.25
    assert masked_mean(x, torch.zeros_like(valid)) == 0.0


def test_effective_sample_size() -> None:
    log_ratio = torch.tensor([0.3, -0.2, 1.0, torch.nan])
    rho = log_ratio[:3].exp()
    valid = torch.tensor([True, True, True, False])
    torch.testing.assert_close(
        effective_sample_size(log_ratio, valid), rho.sum() ** 2 / (3 * rho.square().sum())
    )
    assert effective_sample_size(torch.full((4,), 300.0)) == pytest.approx(1.0, rel=1e-4)
