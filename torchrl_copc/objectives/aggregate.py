"""From per-token terms to one number: weights with global denominators, and the mean behind every metric."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "response_mean"]


def loss_weights(
    response_id: Tensor,
    mode: Aggregation = "token_mean",
    *,
    num_tokens: int | None = None,
    num_responses: int | None = None,
) -> Tensor:
    """Weight of every policy token, such that the loss of the whole batch is ``sum(weight * term)``.

    ``token_mean`` gives ``1/N`` to each of the ``N`` tokens, ``response_mean`` gives ``1/(R * L_i)`` to the
    ``L_i`` tokens of each of the ``R`` responses. Both denominators are counts over all ranks and
    micro-batches, so that splitting a batch in any other way leaves the gradient unchanged. Tokens that a
    policy channel masks count too.

    Args:
        response_id: integer id of each token's response, any shape (packed: ``[1, N, 1]``). Holds all tokens
            of each of its responses.
        mode: which mean.
        num_tokens: policy tokens in the global batch. Defaults to those in ``response_id``.
        num_responses: responses in the global batch. Defaults to those in ``response_id``.

    Returns:
        float32 weights shaped like ``response_id``.

    Raises:
        ValueError: for an unknown mode.

    Examples:
        >>> import torch
        >>> loss_weights(torch.tensor([0, 0, 0, 1]), "response_mean")
        tensor([0.1667, 0.1667, 0.1667, 0.5000])
        >>> loss_weights(torch.tensor([0, 0, 0, 1]), "token_mean", num_tokens=8)
        tensor([0.1250, 0.1250, 0.1250, 0.1250])
    """
    if mode not in get_args(Aggregation):
        raise ValueError(f"aggregation must be one of {', '.join(get_args(Aggregation))}, got {mode!r}")
    if mode == "token_mean":
        total = response_id.numel() if num_tokens is None else num_tokens
        return torch.full(response_id.shape, 1.0 / total, device=response_id.device)
    _, index, lengths = torch.unique(response_id, return_inverse=True, return_counts=True)
    total = lengths.numel() if num_responses is None else num_responses
    return 1.0 / (total * lengths[index].float())


def masked_mean(x: Tensor, valid: Tensor | None = None) -> Tensor:
    """Mean over the entries where ``valid``; what the others hold, NaN included, does not matter.

    Args:
        x: any shape; booleans count as 0 and 1.
        valid: boolean mask that broadcasts to ``x``; ``None`` takes every entry.

    Returns:
        A scalar; 0 if no entry is valid.

    Examples:
        >>> import torch
        >>> masked_mean(torch.tensor([1.0, 3.0, torch.nan]), torch.tensor([True, True, False]))
        tensor(2.)
    """
    if not x.is_floating_point():
        x = x.float()
    if valid is None:
        return x.mean()
    valid = valid.expand_as(x)
    return torch.where(valid, x, 0.0).sum() / valid.sum().clamp(min=1)


def effective_sample_size(log_ratio: Tensor, valid: Tensor | None = None) -> Tensor:
    """``(sum rho)^2 / (n * sum rho^2)`` over valid tokens: 1 when all ratios are equal, ``1/n`` when one
    rules.

    Args:
        log_ratio: log of the ratios, nats, any shape.
        valid: boolean mask that broadcasts to ``log_ratio``.

    Returns:
        A scalar in (0, 1].

    Examples:
        >>> import torch
        >>> effective_sample_size(torch.tensor([0.0, 0.0, 0.0, -100.0]))
        tensor(0.7500)
    """
    valid = torch.ones_like(log_ratio, dtype=torch.bool) if valid is None else valid.expand_as(log_ratio)
    log_ratio = torch.where(valid, log_ratio, -torch.inf).flatten()
    return (2 * log_ratio.logsumexp(0) - (2 * log_ratio).logsumexp(0)).exp() / valid.sum()
