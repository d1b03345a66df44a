"""One number per tensor, the same on every device, so that two processes can compare weights without moving them."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_WORDS = 1 << 17
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64, the increment of splitmix64
_MIX = -4658895280553007687  # 0xBF58476D1CE4E5B9 as int64, a multiplier of splitmix64


@cache
def _positions(device: torch.device) -> Tensor:
    return torch.arange(1, _WORDS + 1, device=device) * _GOLDEN


def tensor_checksum(tensor: Tensor) -> str:
    """Checksum of a floating tensor's values and their order.

    Each 8-byte word is mixed with its position (constants of splitmix64, https://prng.di.unimi.it/splitmix64.c) by a
    bijection, and the results are added modulo 2**64: integer sums do not depend on the order of summation, so CPU and
    CUDA agree, and a change of one word is never missed. It guards against mistakes, not against an adversary.
    ``-0.0`` counts as ``0.0``.

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
    flat = (tensor.detach() + 0.0).contiguous().view(-1).view(torch.uint8)
    total = torch.full((), flat.numel(), dtype=torch.int64, device=tensor.device)
    if flat.numel() % 8:
        flat = torch.cat([flat, flat.new_zeros(8 - flat.numel() % 8)])
    for words in flat.view(torch.int64).split(_WORDS):
        mixed = (words ^ _positions(tensor.device)[: words.numel()]).mul_(_MIX)
        mixed ^= mixed >> 32
        total = total * _GOLDEN + mixed.sum()
    return f"{int(total) % (1 << 64):016x}"
