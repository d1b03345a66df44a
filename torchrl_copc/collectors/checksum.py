"""One number per tensor, the same on every device, so that two processes can compare weights without moving them."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 20
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: the splitmix64 increment
_MIX = -4658895280553007687  # 0xBF58476D1CE4E5B9 as int64: the first splitmix64 multiplier
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_checksum(tensor: Tensor) -> str:
    """Checksum of a floating tensor's values, their order and their dtype's width.

    Each element's bits are mixed with its position (splitmix64, https://prng.di.unimi.it/splitmix64.c) and the results
    are added modulo 2**64: integer sums do not depend on the order of summation, so CPU and CUDA agree. It guards
    against mistakes, not against an adversary. ``-0.0`` counts as ``0.0``.

    Args:
        tensor: any shape, any floating dtype.

    Returns:
        16 hexadecimal digits.

    Example:
        >>> import torch
        >>> a = torch.arange(4.0)
        >>> tensor_checksum(a) == tensor_checksum(a.clone())
        True
        >>> tensor_checksum(a) == tensor_checksum(a.flip(0))
        False
    """
    bits_dtype = _BITS[tensor.element_size()]
    flat = (tensor.detach() + 0.0).contiguous().view(-1).view(bits_dtype)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK].to(torch.int64)
        position = torch.arange(start + 1, start + 1 + chunk.numel(), device=tensor.device)
        mixed = (chunk ^ position.mul_(_GOLDEN)).mul_(_MIX)
        total += (mixed ^ (mixed >> 29)).mul_(_MIX).sum()
    return f"{int(total) % (1 << 64):016x}"
