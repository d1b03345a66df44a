"""The backward scan on CPU, compiled by numba."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

TILE = 64  # steps


def scan(coeff: Tensor, bias: Tensor) -> Tensor:
    """Solve ``x_t = bias_t + coeff_t * x_{t+1}`` along the last dimension, carrying ``x`` in float64.

    Args:
        coeff: ``[rows, T]``, float32 or float64, on CPU.
        bias: as ``coeff``.
    """
    coeff, bias = coeff.detach().contiguous(), bias.detach().contiguous()
    x = torch.empty_like(bias)
    _scan(coeff.numpy(), bias.numpy(), x.numpy(), TILE)
    return x


# A fused multiply-add halves the latency of the chain through x. Unsigned indices spare the test for negative ones, and
# four rows side by side hide most of what latency is left. Results go through a buffer in the first cache: a whole tile
# is converted from float64 with vector instructions, a single x is not. (The size of a tile is an argument because code
# compiled for a fixed one is slower.)
@numba.njit(nogil=True, fastmath={"contract"})
def _scan(coeff: Any, bias: Any, out: Any, tile: int) -> None:
    rows, length = bias.shape
    blocked = rows // 4 * 4
    buffer = np.empty((4, tile))
    y0, y1, y2, y3 = buffer[0], buffer[1], buffer[2], buffer[3]
    for i in range(0, blocked, 4):
        a0, a1, a2, a3 = coeff[i], coeff[i + 1], coeff[i + 2], coeff[i + 3]
        b0, b1, b2, b3 = bias[i], bias[i + 1], bias[i + 2], bias[i + 3]
        x0 = x1 = x2 = x3 = 0.0
        for stop in range(length, 0, -tile):
            start = max(0, stop - tile)
            size = stop - start
            for step in range(size):
                k = np.uint64(size - 1 - step)
                t = np.uint64(start) + k
                x0 = b0[t] + a0[t] * x0
                x1 = b1[t] + a1[t] * x1
                x2 = b2[t] + a2[t] * x2
                x3 = b3[t] + a3[t] * x3
                y0[k], y1[k], y2[k], y3[k] = x0, x1, x2, x3
            for row in range(4):
                for step in range(size):
                    out[i + row, start + step] = buffer[row, step]
        if not math.isfinite(x0 + x1 + x2 + x3):
            for row in range(i, i + 4):
                _scan_row_with_resets(coeff[row], bias[row], out[row])
    for i in range(blocked, rows):
        a, b, out_row = coeff[i], bias[i], out[i]
        x = 0.0
        for step in range(length):
            t = np.uint64(length - 1 - step)
            x = b[t] + a[t] * x
            out_row[t] = x
        if not math.isfinite(x):
            _scan_row_with_resets(a, b, out_row)


@numba.njit(nogil=True, fastmath={"contract"})
def _scan_row_with_resets(coeff: Any, bias: Any, out: Any) -> None:
    # A value that is not finite never becomes finite again in the loop above, since 0 * inf is NaN; here a
    # zero coefficient drops it.
    x = 0.0
    for t in range(bias.size - 1, -1, -1):
        x = bias[t] + coeff[t] * x if coeff[t] != 0 and x != 0 else np.float64(bias[t])
        out[t] = x
