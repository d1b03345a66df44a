"""Policy channels: pure functions from log-ratios and advantages to the per-token actor term."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_copc.value.functional import log_ratio_bounds


class PolicyTerm(NamedTuple):
    """What a policy channel returns.

    Args:
        term: per-token actor loss before aggregation, ``[*B, T, 1]``; exactly 0 where ``kept`` is False.
        kept: True on tokens that give actor gradient, ``[*B, T, 1]`` bool. The others stay in the
            denominator.
    """

    term: Tensor
    kept: Tensor


def ratio_mask(
    log_ratio: Tensor,  # [*B, T, 1], carries gradient
    frozen_log_ratio: Tensor,  # [*B, T, 1]
    advantage: Tensor,  # [*B, T, 1]
    *,
    eta: float,
    eps_low: float,
    eps_high: float,
) -> PolicyTerm:
    """COPC's policy channel: ``-M_t * r_t * A_t`` with ``M_t = 1[rho_t in I(eta)]``.

    Kept tokens retain the gradient through their ratio even when it drifts out of the interval during the
    update; masked ones give exactly zero. Source: COPC (arXiv 2610.09597).

    Args:
        log_ratio: current log-prob minus behaviour log-prob, nats.
        frozen_log_ratio: the log-ratio that decides the mask: the learner's before the update, or
            ``log_ratio`` itself to decide afresh in every minibatch.
        advantage: reward units.
        eta: width of the interval on the policy side (``eta_P``).
        eps_low, eps_high: widths of the interval at ``eta = 1``.

    Returns:
        The per-token term and the mask.

    Examples:
        >>> import torch
        >>> log_ratio = torch.tensor([0.0, 0.1, 3.0], requires_grad=True)
        >>> term, kept = ratio_mask(log_ratio, log_ratio, torch.ones(3), eta=0.5, eps_low=0.4, eps_high=0.56)
        >>> kept
        tensor([ True,  True, False])
        >>> term.sum().backward()
        >>> log_ratio.grad
        tensor([-1.0000, -1.1052,  0.0000])
    """
    low, high = log_ratio_bounds(eta, eps_low, eps_high)
    frozen = frozen_log_ratio.detach()
    # "not outside" keeps a NaN, so that it reaches the loss and the caller's finite check instead of
    # vanishing
    kept = ~((frozen < low) | (frozen > high))
    ratio = torch.where(kept, log_ratio, 0.0).exp()
    return PolicyTerm(torch.where(kept, -ratio * advantage, 0.0), kept)
