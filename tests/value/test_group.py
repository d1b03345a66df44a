"""Group-relative advantages against plain Python."""

from __future__ import annotations

import statistics

import pytest
import torch
from torch import Tensor

from torchrl_copc.value import group_relative_advantage_estimate

LENGTHS = [4, 1, 3, 5, 2, 2, 1, 6]
GROUPS = [3, 8, 3, 3, 8, 1, 5, 5]  # one response alone, the others interleaved


def packed() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    reward = torch.randn(total, generator=generator, dtype=torch.float64)
    done = torch.zeros(total, dtype=torch.bool)
    done[torch.tensor(LENGTHS).cumsum(0) - 1] = True
    group = torch.tensor(GROUPS).repeat_interleave(torch.tensor(LENGTHS))
    return reward.view(1, -1, 1), done.view(1, -1, 1), group.view(1, -1, 1)


@pytest.mark.parametrize("standardize", [True, False])
def test_every_token_gets_the_standing_of_its_response(standardize: bool) -> None:
    reward, done, group = packed()
    advantage, target = group_relative_advantage_estimate(reward, done, group, standardize=standardize)
    returns = [float(part.sum()) for part in reward[0].split(LENGTHS)]
    expected = []
    for value, name in zip(returns, GROUPS, strict=True):
        members = [r for r, g in zip(returns, GROUPS, strict=True) if g == name]
        scale = statistics.stdev(members) if standardize and len(members) > 1 else 1.0
        expected.append((value - statistics.mean(members)) / scale)
    lengths = torch.tensor(LENGTHS)
    for ours, theirs in ((advantage, expected), (target, returns)):
        exact = torch.tensor(theirs, dtype=torch.float64).repeat_interleave(lengths).view(1, -1, 1)
        torch.testing.assert_close(ours, exact)
    assert advantage[0, 13 + 2 : 13 + 4].abs().max() < 1e-12  # a prompt with a single response says nothing


def test_equal_returns_give_zero_and_rows_are_separate_responses() -> None:
    reward = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]]).unsqueeze(-1)
    running = torch.zeros(3, 2, 1, dtype=torch.bool)
    group = torch.zeros(3, 2, 1, dtype=torch.long)
    advantage, target = group_relative_advantage_estimate(reward, running, group)
    assert (advantage == 0).all() and (target == 1).all()
    assert (group_relative_advantage_estimate(0.1 * reward, running, group)[0].abs() < 1e-6).all()
    reward[0, 1] = 4.0
    expected = group_relative_advantage_estimate(reward, running, group)
    swapped = group_relative_advantage_estimate(
        *(x.transpose(0, 1) for x in (reward, running, group)), time_dim=0
    )
    for a, b in zip(swapped, expected, strict=True):
        assert torch.equal(a.transpose(0, 1), b)


def test_wrong_shapes_are_named() -> None:
    reward, done, group = packed()
    with pytest.raises(ValueError, match=r"must share one shape .*\(24,\)"):
        group_relative_advantage_estimate(reward, done, group.flatten())
