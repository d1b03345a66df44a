"""The backward scan on CUDA, in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 2048


def scan(coeff: Tensor, bias: Tensor) -> Tensor:
    """Solve ``x_t = bias_t + coeff_t * x_{t+1}`` along the last dimension, computing in float64.

    One program walks one row from its end to its start in blocks of up to 2,048 steps, so that every element
    is read and written once and nothing has to be synchronised between programs.

    Args:
        coeff: ``[rows, T]``, float32 or float64, on one CUDA device.
        bias: as ``coeff``.
    """
    coeff, bias = coeff.detach().contiguous(), bias.detach().contiguous()
    x = torch.empty_like(bias)
    rows, length = bias.shape
    block = min(MAX_BLOCK, triton.next_power_of_2(length))
    with torch.cuda.device_of(bias):  # type: ignore[no-untyped-call]
        _scan[(rows,)](coeff, bias, x, length, block, num_warps=8 if block == MAX_BLOCK else 4)
    return x


@triton.jit
def _times(coeff, x):  # type: ignore[no-untyped-def]
    # 0 * inf is NaN: an overflow must end where its response ends
    return tl.where(coeff == 0, 0.0, tl.where(x == 0, 0.0, coeff * x))


@triton.jit
def _prepend(later_coeff, later_bias, coeff, bias):  # type: ignore[no-untyped-def]
    return _times(coeff, later_coeff), bias + _times(coeff, later_bias)


@triton.jit
def _scan(coeff_ptr, bias_ptr, x_ptr, length, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row_start = tl.program_id(0).to(tl.int64) * length
    offsets = tl.arange(0, BLOCK)
    carry = tl.zeros((), tl.float64)
    for block in range(tl.cdiv(length, BLOCK)):
        t = length - (block + 1) * BLOCK + offsets
        inside = t >= 0
        coeff = tl.load(coeff_ptr + row_start + t, mask=inside, other=0.0).to(tl.float64)
        bias = tl.load(bias_ptr + row_start + t, mask=inside, other=0.0).to(tl.float64)
        product, local = tl.associative_scan((coeff, bias), 0, _prepend, reverse=True)
        x = local + _times(product, carry)
        tl.store(x_ptr + row_start + t, x.to(x_ptr.dtype.element_ty), mask=inside)
        carry = tl.sum(tl.where(offsets == 0, x, 0.0))
