"""Policy channels: pure functions from log-ratios and advantages to the per-token actor term.

``r`` is the ratio of the policy being optimised to the behaviour policy and carries the gradient; ``rho`` is the
frozen ratio, of the learner *before* the update. Ratios are compared in log space, so that none overflows where it
is not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrl_copc.value.functional import log_ratio_bounds
from torchrl_copc.value.vtrace import truncated_ratio


class PolicyTerm(NamedTuple):
    """What a policy channel returns.

    Args:
        term: per-token actor loss before aggregation, ``[*B, T, 1]``; without gradient where ``kept`` is False.
        kept: True on tokens that give actor gradient, ``[*B, T, 1]`` bool. The others stay in the
            denominator.
    """

    term: Tensor
    kept: Tensor


PolicyChannel = Callable[..., PolicyTerm]
"""Called with ``log_ratio`` (carries gradient), ``frozen_log_ratio`` and ``advantage``, all ``[*B, T, 1]``, and by
keyword with the entries that the loss passes on."""


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


def clipped_surrogate(
    log_ratio: Tensor,  # [*B, T, 1], carries gradient
    frozen_log_ratio: Tensor,  # [*B, T, 1], not read
    advantage: Tensor,  # [*B, T, 1]
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> PolicyTerm:
    """PPO's policy channel: ``-min(r_t * A_t, clip(r_t, 1 - eps_low, 1 + eps_high) * A_t)``.

    Source: PPO (arXiv 1707.06347); ``eps_high > eps_low`` is DAPO's "clip-higher" (arXiv 2503.14476).

    Args:
        log_ratio: current log-prob minus behaviour log-prob, nats.
        frozen_log_ratio: not read; channels share one signature.
        advantage: reward units.
        eps_low, eps_high: widths of the interval below and above 1, at least 0.

    Returns:
        The per-token term, constant where clipping is active, and where it is not.

    Examples:
        >>> import torch
        >>> log_ratio = torch.tensor([0.0, 1.0, 1.0])
        >>> clipped_surrogate(log_ratio, log_ratio, torch.tensor([1.0, 1.0, -1.0]))
        PolicyTerm(term=tensor([-1.0000, -1.2000,  2.7183]), kept=tensor([ True, False,  True]))
    """
    return surrogate_between(log_ratio, advantage, *log_ratio_bounds(1.0, eps_low, eps_high))


def surrogate_between(
    log_ratio: Tensor,  # [*B, T, 1], carries gradient
    advantage: Tensor,  # [*B, T, 1]
    low: Any,  # number or tensor that broadcasts, nats
    high: Any,  # the same
) -> PolicyTerm:
    """:func:`clipped_surrogate` with the ends of the interval given as log-ratios, which may differ by token.

    Args:
        log_ratio: current log-prob minus behaviour log-prob, nats.
        advantage: reward units.
        low, high: ends of the interval, nats; both numbers or both tensors.

    Returns:
        The per-token term, constant where clipping is active, and where it is not.

    Examples:
        >>> import torch
        >>> log_ratio, end = torch.tensor([1.0, 1.0]), torch.tensor([0.5, 2.0])
        >>> surrogate_between(log_ratio, torch.ones(2), -end, end).kept
        tensor([False,  True])
    """
    # "not outside" keeps a NaN, see `ratio_mask`
    kept = ~torch.where(advantage < 0, log_ratio < low, log_ratio > high)
    bound = log_ratio.detach().clamp(low, high).exp()
    ratio = torch.where(kept, torch.where(kept, log_ratio, 0.0).exp(), bound)
    return PolicyTerm(-ratio * advantage, kept)


def two_sided_mask(
    log_ratio: Tensor,  # [*B, T, 1], carries gradient
    frozen_log_ratio: Tensor,  # [*B, T, 1], not read
    advantage: Tensor,  # [*B, T, 1]
    *,
    eps_low: float = 0.8,
    eps_high: float = 3.0,
) -> PolicyTerm:
    """SAO's policy channel: ``-f(r_t) * A_t * log pi_t`` with a detached, two-sided ``f``.

    ``f(r) = r`` inside ``(1 - eps_low, 1 + eps_high)``, else 0. It is detached: a gradient through it would add a
    factor ``1 + log pi_t``. ``log_ratio`` stands for ``log pi_t``; they differ by the constant ``log mu_t``, so that
    the gradient is the same. It is also that of :func:`ratio_mask` with the mask taken from ``r_t``, up to the ends
    of the interval, which are open here. Source: SAO (arXiv 2607.07508).

    Args:
        log_ratio: current log-prob minus behaviour log-prob, nats.
        frozen_log_ratio: not read; channels share one signature.
        advantage: reward units.
        eps_low, eps_high: widths of the interval below and above 1; the paper has (0.3, 5.0) on maths and (0.8, 3.0)
            elsewhere.

    Returns:
        The per-token term, 0 where masked, and the mask.

    Examples:
        >>> import torch
        >>> log_ratio = torch.tensor([0.5, 2.0], requires_grad=True)
        >>> term, kept = two_sided_mask(log_ratio, log_ratio, torch.ones(2))
        >>> term.sum().backward()
        >>> kept, log_ratio.grad
        (tensor([ True, False]), tensor([-1.6487,  0.0000]))
    """
    low, high = log_ratio_bounds(1.0, eps_low, eps_high)
    current = log_ratio.detach()
    kept = ~((current <= low) | (current >= high))
    weight = torch.where(kept, current, 0.0).exp()
    return PolicyTerm(torch.where(kept, -weight * advantage * torch.where(kept, log_ratio, 0.0), 0.0), kept)


def decoupled_clip(
    log_ratio: Tensor,  # [*B, T, 1], carries gradient
    frozen_log_ratio: Tensor,  # [*B, T, 1]
    advantage: Tensor,  # [*B, T, 1]
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    weight_cap: float = 5.0,
) -> PolicyTerm:
    """AReaL's policy channel: PPO around the frozen learner, weighted for data of the behaviour policy.

    ``-rho_t * min(u_t * A_t, clip(u_t, 1 - eps_low, 1 + eps_high) * A_t)`` with ``u_t = pi_theta(a_t)/pi(a_t)``,
    where ``pi`` is the learner before the update (the "proximal" policy) and ``rho_t = pi(a_t)/mu(a_t)``. Tokens with
    ``rho_t > weight_cap`` are left out. Source: AReaL (arXiv 2505.24298).

    Args:
        log_ratio: current log-prob minus behaviour log-prob, nats.
        frozen_log_ratio: the same of the learner before the update, nats.
        advantage: reward units.
        eps_low, eps_high: widths of the interval of ``u_t`` below and above 1.
        weight_cap: largest ``rho_t`` that is used.

    Returns:
        The per-token term, and where it carries gradient: neither capped nor clipped.

    Examples:
        >>> import torch
        >>> frozen = torch.tensor([0.5, 0.5, 2.0])
        >>> decoupled_clip(frozen + torch.tensor([0.1, 0.9, 0.0]), frozen, torch.ones(3))
        PolicyTerm(term=tensor([-1.8221, -1.9785,  0.0000]), kept=tensor([ True, False, False]))
    """
    if not weight_cap > 0:
        raise ValueError(f"weight_cap must be above 0, got {weight_cap}")
    frozen = frozen_log_ratio.detach()
    used = ~(frozen > math.log(weight_cap))
    surrogate = clipped_surrogate(log_ratio - frozen, frozen, advantage, eps_low=eps_low, eps_high=eps_high)
    weight = torch.where(used, frozen, -torch.inf).exp()
    return PolicyTerm(torch.where(used, weight * surrogate.term, 0.0), used & surrogate.kept)


def truncated_weight(
    log_ratio: Tensor,  # [*B, T, 1], carries gradient
    frozen_log_ratio: Tensor,  # [*B, T, 1]
    advantage: Tensor,  # [*B, T, 1]
    *,
    threshold: float = 1.0,
) -> PolicyTerm:
    """V-trace's policy channel: ``-min(threshold, rho_t) * A_t * log pi_t``.

    ``log_ratio`` stands for ``log pi_t``: the gradient is the same. Source: IMPALA (arXiv 1802.01561).

    Args:
        log_ratio: current log-prob minus behaviour log-prob, nats.
        frozen_log_ratio: the same of the learner before the update, nats.
        advantage: reward units.
        threshold: largest weight, above 0.

    Returns:
        The per-token term; every token is kept.

    Examples:
        >>> import torch
        >>> log_ratio = torch.tensor([-0.5, 2.0], requires_grad=True)
        >>> truncated_weight(log_ratio, log_ratio, torch.ones(2)).term.sum().backward()
        >>> log_ratio.grad
        tensor([-0.6065, -1.0000])
    """
    weight = truncated_ratio(frozen_log_ratio, threshold)
    return PolicyTerm(-weight * advantage * log_ratio, torch.ones_like(weight, dtype=torch.bool))


def sequence_ratio(
    log_ratio: Tensor,  # [*B, T, 1], carries gradient
    frozen_log_ratio: Tensor,  # [*B, T, 1]
    advantage: Tensor,  # [*B, T, 1]
    response_id: Tensor,  # [*B, T, 1] integer
    *,
    threshold: float = 8.0,
) -> PolicyTerm:
    """VCPO's policy channel: ``-w * A_t * log pi_t`` with one weight ``w = min(threshold, prod_t rho_t)`` per response.

    ``log_ratio`` stands for ``log pi_t``: the gradient is the same. Source: VCPO (arXiv 2602.17616).

    Args:
        log_ratio: current log-prob minus behaviour log-prob, nats.
        frozen_log_ratio: the same of the learner before the update, nats.
        advantage: reward units.
        response_id: which response each token belongs to; all tokens of a response are in the call.
        threshold: largest weight, above 0.

    Returns:
        The per-token term; every token is kept.

    Examples:
        >>> import torch
        >>> log_ratio = torch.tensor([1.0, 0.5, 3.0], requires_grad=True)
        >>> response = torch.tensor([0, 0, 1])
        >>> sequence_ratio(log_ratio, log_ratio, torch.ones(3), response).term.sum().backward()
        >>> log_ratio.grad
        tensor([-4.4817, -4.4817, -8.0000])
    """
    frozen = frozen_log_ratio.detach()
    responses, index = torch.unique(response_id, return_inverse=True)
    total = frozen.new_zeros(responses.numel()).index_add(0, index.flatten(), frozen.flatten())
    weight = truncated_ratio(total, threshold)[index]
    return PolicyTerm(-weight * advantage * log_ratio, torch.ones_like(weight, dtype=torch.bool))
