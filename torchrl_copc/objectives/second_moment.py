"""M2PO's policy channel: bound the second moment of the log-ratios of tokens that push away from the behaviour policy.

A token is *eligible* when its gradient would carry its ratio further from 1: ``A > 0`` and ``r > 1``, or ``A < 0`` and
``r < 1``. A threshold on ``|log rho|`` is solved once per global batch from frozen ratios and passed to the channel.
Source: M2PO (arXiv 2510.01161). The released code (https://github.com/Infini-AI-Lab/M2PO) differs from the paper: it
*caps* log-ratios where the paper drops tokens, and turns the cap into the ends of PPO's clip.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_copc.objectives.policy import PolicyTerm, surrogate_between


def _eligible(log_ratio: Tensor, advantage: Tensor) -> Tensor:
    return ((advantage > 0) & (log_ratio > 0)) | ((advantage < 0) & (log_ratio < 0))


def _eligible_sizes(frozen_log_ratio: Tensor, advantage: Tensor, limit: float) -> Tensor:
    """``|log rho|`` of the eligible tokens in float64, the smallest first."""
    if not limit >= 0:
        raise ValueError(f"limit must be at least 0, got {limit}")
    return frozen_log_ratio[_eligible(frozen_log_ratio, advantage)].double().abs().sort().values


def second_moment_threshold(
    frozen_log_ratio: Tensor,  # any shape
    advantage: Tensor,  # same shape
    *,
    limit: float = 0.04,
) -> float:
    """The paper's threshold: drop the largest ``(log rho)^2`` until the mean over the rest is at most ``limit``.

    Args:
        frozen_log_ratio: of all policy tokens of the global batch, nats.
        advantage: of the same tokens.
        limit: largest mean of ``(log rho)^2`` over the eligible tokens that stay, nats squared.

    Returns:
        The smallest ``|log rho|`` to drop, nats; infinity when nothing is dropped.

    Raises:
        ValueError: for a negative limit.

    Examples:
        >>> import torch
        >>> second_moment_threshold(torch.tensor([0.1, 0.2, -0.5, 0.5]), torch.ones(4))
        0.5
    """
    size = _eligible_sizes(frozen_log_ratio, advantage, limit)
    mean = size.square().cumsum(0) / torch.arange(1, size.numel() + 1, device=size.device)
    fitting = int((mean <= limit).sum())  # the mean rises with every larger token
    return float(size[fitting]) if fitting < size.numel() else math.inf


def second_moment_mask(
    log_ratio: Tensor,  # [*B, T, 1], carries gradient
    frozen_log_ratio: Tensor,  # [*B, T, 1]
    advantage: Tensor,  # [*B, T, 1]
    *,
    threshold: float | Tensor,
) -> PolicyTerm:
    """M2PO as in the paper: ``-M_t * r_t * A_t``; ``M_t`` drops eligible tokens with ``|log rho_t| >= threshold``.

    Args:
        log_ratio: current log-prob minus behaviour log-prob, nats.
        frozen_log_ratio: the same of the learner before the update, nats; decides the mask.
        advantage: reward units.
        threshold: from :func:`second_moment_threshold`, nats; a number, or a tensor that broadcasts.

    Returns:
        The per-token term, 0 where masked, and the mask.

    Examples:
        >>> import torch
        >>> log_ratio = torch.tensor([0.1, 0.9, -0.9])
        >>> second_moment_mask(log_ratio, log_ratio, torch.ones(3), threshold=0.5).kept
        tensor([ True, False,  True])
    """
    frozen = frozen_log_ratio.detach()
    kept = ~(_eligible(frozen, advantage) & (frozen.abs().double() >= threshold))
    ratio = torch.where(kept, log_ratio, 0.0).exp()
    return PolicyTerm(torch.where(kept, -ratio * advantage, 0.0), kept)


def capped_second_moment_threshold(
    frozen_log_ratio: Tensor,  # any shape
    advantage: Tensor,  # same shape
    *,
    limit: float = 0.04,
) -> float:
    """The released code's threshold: the largest ``|log rho|`` that caps the mean square to at most ``limit``.

    ``tau`` is the size of a token, the largest with mean ``min((log rho)^2, tau^2)`` within the limit. The released
    code also bounds ratios at 100 where the advantage is negative, which is left out here.

    Args:
        frozen_log_ratio: of all policy tokens of the global batch, nats.
        advantage: of the same tokens.
        limit: largest mean of the capped squares, nats squared.

    Returns:
        ``tau`` in nats, the ``|log rho|`` of a token; 0 when even the smallest is too large, infinity when no cap is
        needed.

    Raises:
        ValueError: for a negative limit.

    Examples:
        >>> import torch
        >>> round(capped_second_moment_threshold(torch.tensor([0.1, 0.2, -0.5, 0.5]), torch.ones(4)), 3)
        0.2
    """
    size = _eligible_sizes(frozen_log_ratio, advantage, limit)
    if size.numel() == 0 or float(size.square().mean()) <= limit:
        return math.inf
    above = torch.arange(size.numel() - 1, -1, -1, device=size.device)
    capped = (size.square().cumsum(0) + above * size.square()) / size.numel()
    fitting = int((capped <= limit).sum())
    return float(size[fitting - 1]) if fitting else 0.0


def second_moment_clip(
    log_ratio: Tensor,  # [*B, T, 1], carries gradient
    frozen_log_ratio: Tensor,  # [*B, T, 1], not read
    advantage: Tensor,  # [*B, T, 1]
    *,
    threshold: float | Tensor,
    least_low: float = 0.3,
    least_high: float = 0.5,
) -> PolicyTerm:
    """M2PO as in its released code: PPO's clip at ``[1 - max(1 - e^-tau, .3), 1 + max(e^tau - 1, .5)]``.

    Args:
        log_ratio: current log-prob minus behaviour log-prob, nats.
        frozen_log_ratio: not read; channels share one signature.
        advantage: reward units.
        threshold: ``tau`` from :func:`capped_second_moment_threshold`, at least 0, nats; a number, or a tensor that
            broadcasts.
        least_low, least_high: the clip is never closer to 1 than this.

    Returns:
        The per-token term, constant where clipping is active, and where it is not.

    Examples:
        >>> import torch
        >>> log_ratio = torch.tensor([0.3, 0.9])
        >>> second_moment_clip(log_ratio, log_ratio, torch.ones(2), threshold=0.6)
        PolicyTerm(term=tensor([-1.3499, -1.8221]), kept=tensor([ True, False]))
    """
    tau = torch.as_tensor(threshold, dtype=log_ratio.dtype, device=log_ratio.device)
    if not bool((tau >= 0).all()):
        raise ValueError(f"threshold must be at least 0, got {float(tau.min())}")
    # log(1 - max(1 - e^-tau, least_low)) = -max(tau, -log(1 - least_low)), and alike above
    low, high = tau.clamp_min(-math.log1p(-least_low)), tau.clamp_min(math.log1p(least_high))
    return surrogate_between(log_ratio, advantage, -low, high)
