from __future__ import annotations

import pytest
import torch

from torchrl_copc.collectors.checksum import tensor_checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_single_changed_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[torch.empty((), dtype=dtype).element_size()]
    tensor = torch.linspace(-1.0, 1.0, 50, dtype=dtype)
    seen = {tensor_checksum(tensor)}
    for position in (0, 7, 49):
        for bit in range(0, tensor.element_size() * 8 - 1, 5):
            changed = tensor.clone()
            changed.view(bits)[position] ^= 1 << bit
            seen.add(tensor_checksum(changed))
    assert len(seen) == 1 + 3 * len(range(0, tensor.element_size() * 8 - 1, 5))


def test_order_counts_beyond_the_first_chunk() -> None:
    tensor = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0))
    swapped = tensor.clone()
    swapped[[5, 2_500_000]] = tensor[[2_500_000, 5]]
    assert tensor_checksum(tensor) != tensor_checksum(swapped)
    assert tensor_checksum(tensor) == tensor_checksum(tensor.clone())


def test_layout_and_the_sign_of_zero_do_not_count() -> None:
    tensor = torch.randn(8, 5)
    assert tensor_checksum(tensor.t()) == tensor_checksum(tensor.t().contiguous())
    assert tensor_checksum(torch.tensor([0.0, 1.0])) == tensor_checksum(torch.tensor([-0.0, 1.0]))


def test_a_tensor_of_zeros_is_not_an_empty_tensor() -> None:
    assert (
        tensor_checksum(torch.zeros(3)) != tensor_checksum(torch.zeros(4)) != tensor_checksum(torch.zeros(0))
    )
