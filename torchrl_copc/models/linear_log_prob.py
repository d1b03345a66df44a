"""Log-probabilities and entropies of a softmax layer without its logits in memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK_ELEMENTS = 2**26


class _LinearLogProb(torch.autograd.Function):
    """Keeps states, log-normalisers and entropies; the backward pass computes each chunk's logits again."""

    @staticmethod
    def forward(ctx, hidden, weight, target, temperature, chunk_size):  # type: ignore[no-untyped-def]
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        matrix = weight.to(dtype)
        n = hidden.shape[0]
        log_prob, entropy, log_norm = (hidden.new_empty(n, dtype=dtype) for _ in range(3))
        for at in range(0, n, chunk_size):
            part = slice(at, at + chunk_size)
            logits = torch.mm(hidden[part].to(dtype), matrix.t()).div_(temperature)
            log_norm[part] = logits.logsumexp(-1)
            log_prob[part] = logits.gather(-1, target[part, None]).squeeze(-1) - log_norm[part]
            prob = (logits - log_norm[part, None]).exp_()
            entropy[part] = log_norm[part] - prob.mul_(logits).sum(-1)
        ctx.save_for_backward(hidden, weight, target, log_norm, entropy)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        ctx.set_materialize_grads(False)
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_prob, grad_entropy):  # type: ignore[no-untyped-def]
        hidden, weight, target, log_norm, entropy = ctx.saved_tensors
        dtype = log_norm.dtype
        matrix = weight.to(dtype)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_matrix = torch.zeros_like(matrix) if need_weight else None
        for at in range(0, hidden.shape[0], ctx.chunk_size):
            part = slice(at, at + ctx.chunk_size)
            states = hidden[part].to(dtype)
            log_probs = torch.mm(states, matrix.t()).div_(ctx.temperature).sub_(log_norm[part, None])
            prob = log_probs.exp()
            grad = torch.zeros_like(prob)
            if grad_entropy is not None:
                # dH/dz_j = -p_j (log p_j + H)
                grad = log_probs.add_(entropy[part, None]).mul_(prob).mul_(-grad_entropy[part, None])
            if grad_log_prob is not None:
                # d log p_y / dz_j = 1[j = y] - p_j
                grad = grad.addcmul_(prob, grad_log_prob[part, None], value=-1.0)
                grad.scatter_add_(-1, target[part, None], grad_log_prob[part, None])
            grad.div_(ctx.temperature)
            if grad_hidden is not None:
                grad_hidden[part] = torch.mm(grad, matrix).to(hidden.dtype)
            if grad_matrix is not None:
                grad_matrix.addmm_(grad.t(), states)
        return grad_hidden, None if grad_matrix is None else grad_matrix.to(weight.dtype), None, None, None


def linear_log_prob(
    hidden: Tensor, weight: Tensor, target: Tensor, temperature: float = 1.0, chunk_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of the taken tokens, and the entropy, of ``softmax(hidden @ weight.T / temperature)``.

    Logits are computed in float32 (float64 for float64 states), ``chunk_size`` positions at a time, and once
    more in the backward pass, so that the full ``[n, V]`` matrix never exists. Differentiable once in
    ``hidden`` and ``weight``.

    Args:
        hidden: states ``[n, H]``.
        weight: output matrix ``[V, H]``.
        target: taken ids ``[n]``.
        temperature: that of sampling; engines report the log-probs of the tempered distribution.
        chunk_size: positions per chunk; defaults to what fits 2**26 logits (256 MiB).

    Returns:
        ``(log_prob, entropy)``, both ``[n]`` in nats.

    Raises:
        ValueError: if ``temperature`` is not above zero.

    Examples:
        >>> import torch
        >>> log_prob, entropy = linear_log_prob(torch.zeros(3, 4), torch.randn(8, 4), torch.tensor([0, 1, 2]))
        >>> torch.allclose(-log_prob, entropy)
        True
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0 (that of sampling), got {temperature}")
    if chunk_size is None:
        chunk_size = max(1, _CHUNK_ELEMENTS // weight.shape[0])
    return _LinearLogProb.apply(hidden, weight, target, temperature, chunk_size)


@torch.no_grad()
def score_sq_norm(
    hidden: Tensor, weight: Tensor, target: Tensor, temperature: float = 1.0, chunk_size: int | None = None
) -> Tensor:
    """``|p - onehot(target)|^2``: squared norm of the gradient of a token's log-prob in its (tempered) logits.

    Summed over a response it stands in for the squared norm of the gradient in all parameters, which would take a
    backward pass per response; the proxy is this project's, VCPO (arXiv 2602.17616) uses the full norm.

    Args:
        hidden: states ``[n, H]``.
        weight: output matrix ``[V, H]``.
        target: taken ids ``[n]``.
        temperature: that of sampling.
        chunk_size: positions per chunk; defaults to what fits 2**26 logits (256 MiB).

    Returns:
        ``[n]`` between 0 and 2, without gradient.

    Examples:
        >>> import torch
        >>> score_sq_norm(torch.zeros(1, 4), torch.randn(8, 4), torch.tensor([3]))  # (7/8)^2 + 7 (1/8)^2
        tensor([0.8750])
    """
    if chunk_size is None:
        chunk_size = max(1, _CHUNK_ELEMENTS // weight.shape[0])
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    matrix = weight.to(dtype)
    norm = hidden.new_empty(hidden.shape[0], dtype=dtype)
    for at in range(0, hidden.shape[0], chunk_size):
        part = slice(at, at + chunk_size)
        prob = torch.mm(hidden[part].to(dtype), matrix.t()).div_(temperature).softmax(-1)
        taken = prob.gather(-1, target[part, None]).squeeze(-1)
        norm[part] = prob.square_().sum(-1) - 2 * taken + 1
    return norm
