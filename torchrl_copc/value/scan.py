"""The backward recursion that all advantage channels share, solved for all steps at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 64


def backward_scan(coeff: Tensor, bias: Tensor, *, time_dim: int = -2) -> Tensor:
    """Solve ``x_t = bias_t + coeff_t * x_{t+1}`` with ``x = 0`` past the end, without a division.

    Nothing crosses a zero coefficient, which is how packed responses are kept apart: neither a value nor an
    overflow, an infinity or a NaN of the response behind it. CPU tensors go to a numba kernel when numba is
    installed, CUDA tensors to a Triton kernel when Triton is; everything else is computed in plain torch, see
    :func:`torch_scan`. One installation always takes the same path, whatever the size.

    Args:
        coeff: coefficients, broadcastable against ``bias``; 0 where nothing may flow back from the next step.
        bias: inhomogeneous terms, any shape with a time dimension.
        time_dim: dimension of time in the broadcast shape.

    Returns:
        ``x`` with the broadcast shape; differentiable in reverse mode, any number of times, in both arguments. Forward
        mode (``torch.func.jvp``, ``jacfwd``) is not there: torch takes its derivative as zero.

    Examples:
        >>> import torch
        >>> backward_scan(torch.tensor([0.5, 0.0, 0.5]), torch.tensor([1.0, 2.0, 4.0]), time_dim=-1)
        tensor([2., 2., 4.])
    """
    shape = torch.broadcast_shapes(coeff.shape, bias.shape)  # type: ignore[no-untyped-call]
    # a coefficient without dimensions is like a number: it must not widen the data's dtype
    dtype = torch.promote_types(coeff.dtype, bias.dtype) if coeff.ndim else bias.dtype
    working_dtype = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    coeff, bias = (s.to(working_dtype).expand(shape).movedim(time_dim, -1) for s in (coeff, bias))
    time_last = bias.shape
    rows, length = time_last[:-1].numel(), time_last[-1]
    if rows and length:
        bias = _solve(coeff.reshape(rows, length), bias.reshape(rows, length))
    return bias.reshape(time_last).movedim(-1, time_dim).to(dtype)


# One operator, so that torch.compile keeps it whole instead of looking into the kernels.
@torch.library.custom_op("torchrl_copc::backward_scan", mutates_args=())
def _solve(coeff: Tensor, bias: Tensor) -> Tensor:
    return kernel_for(bias.device.type)(coeff, bias)


@_solve.register_fake
def _(coeff: Tensor, bias: Tensor) -> Tensor:
    return bias.new_empty(bias.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor]:
    coeff, x = ctx.saved_tensors
    # The gradient obeys y_t = grad_t + coeff_{t-1} * y_{t-1}: the same recursion, seen from the other end.
    previous_coeff = pad(coeff[:, :-1], (1, 0))
    y = _solve(previous_coeff.flip(-1), grad.flip(-1)).flip(-1)
    return (y * pad(x[:, 1:], (0, 1)) if ctx.needs_input_grad[0] else None), y


_solve.register_autograd(_gradient, setup_context=_save)


@cache
def kernel_for(device_type: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The kernel that solves ``[rows, T]`` on a kind of device (``"cpu"``, ``"cuda"``, ...)."""
    try:
        if device_type == "cpu":
            from torchrl_copc.value.scan_kernels import numba_scan

            return numba_scan.scan
        if device_type == "cuda":
            from torchrl_copc.value.scan_kernels import triton_scan

            return triton_scan.scan
    except ImportError:
        pass  # both compilers are optional: torch_scan solves the same recursion
    return torch_scan


def torch_scan(coeff: Tensor, bias: Tensor) -> Tensor:
    """Solve ``x_t = bias_t + coeff_t * x_{t+1}`` along the last dimension in plain torch, with O(T) work.

    All chunks of 64 steps are solved side by side, twice: first as if nothing followed them, which gives a recursion
    over the chunks' first steps, solved by pairwise folding (Blelloch, "Prefix sums and their applications",
    https://www.cs.cmu.edu/~guyb/papers/Ble93.pdf) in float64; then with what flows into them. A result that is not
    finite is computed again, all of it in float64 and by folding that drops what a zero coefficient meets.

    Args:
        coeff: ``[rows, T]``, float32 or float64.
        bias: as ``coeff``.
    """
    if bias.shape[-1] > 2 * CHUNK:
        x = _chunked(coeff, bias)
        if x is not None:
            return x
    return _fold(coeff.double(), bias.double(), times).to(bias.dtype).contiguous()


def _chunked(coeff: Tensor, bias: Tensor) -> Tensor | None:
    """The solution, or ``None`` when it is not finite."""
    rows, length = bias.shape
    chunks = -(-length // CHUNK)
    padded = chunks * CHUNK
    if padded != length:
        coeff, bias = pad(coeff, (0, padded - length)), pad(bias, (0, padded - length))
    # steps first: each operation below reads and writes contiguous memory
    coeff, x = (s.reshape(rows * chunks, CHUNK).t().contiguous() for s in (coeff, bias))
    coeff_at, x_at = coeff.unbind(), x.unbind()
    local = x_at[-1].clone()
    for t in range(CHUNK - 2, -1, -1):
        torch.addcmul(x_at[t], coeff_at[t], local, out=local)
    first = _fold(coeff.prod(0).view(rows, chunks).double(), local.view(rows, chunks).double(), torch.mul)
    inflow = pad(first[:, 1:], (0, 1)).to(x.dtype).flatten()
    for t in range(CHUNK - 1, -1, -1):
        inflow = x_at[t].addcmul_(coeff_at[t], inflow)
    # What is not finite stays so up to the first step of its chunk, since 0 * inf is NaN. (The sum may overflow by
    # itself, which only costs time.)
    if not bool(inflow.sum().isfinite()):
        return None
    solution = coeff.view(rows, padded)  # no longer needed; fresh memory costs more than the copy itself
    solution.view(rows * chunks, CHUNK).copy_(x.t())
    return solution[:, :length].contiguous()


def _fold(coeff: Tensor, bias: Tensor, times: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    length = bias.shape[-1]
    if length == 1:
        return bias.clone()
    odd_length = length % 2
    coeff_even, coeff_odd = coeff[..., 0::2], pad(coeff[..., 1::2], (0, odd_length))
    bias_even, bias_odd = bias[..., 0::2], pad(bias[..., 1::2], (0, odd_length))
    x_even = _fold(times(coeff_even, coeff_odd), bias_even + times(coeff_even, bias_odd), times)
    x_odd = bias_odd + times(coeff_odd, pad(x_even[..., 1:], (0, 1)))
    return torch.stack((x_even, x_odd), -1).flatten(-2)[..., :length]


def times(coeff: Tensor, x: Tensor) -> Tensor:
    """The product, and 0 where a factor is 0: ``0 * inf`` is NaN, but an overflow must end where its response ends.

    Examples:
        >>> import torch
        >>> times(torch.tensor([0.0, 2.0]), torch.tensor([torch.inf, 3.0]))
        tensor([0., 6.])
    """
    return torch.where((coeff == 0) | (x == 0), 0.0, coeff * x)
