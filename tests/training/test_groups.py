"""Groups stay whole on their way to the ranks, and those that teach nothing are found."""

from __future__ import annotations

from lm_cases import row

from torchrl_copc.training.groups import by_reward_variance, groups, split_groups
from torchrl_copc.trajectory import metadata

# rewards alternate with the seed: groups 0 and 2 have both, group 1 twice the same
ROWS = [row(seed, group=group) for seed, group in ((0, 0), (2, 1), (1, 0), (4, 1), (5, 2), (6, 2))]


def names(rows):
    return [metadata(one)["row_id"] for one in rows]


def test_ranks_get_whole_groups_in_turn_and_every_row_once():
    assert [names(group) for group in groups(ROWS)] == [
        ["row-0", "row-1"],
        ["row-2", "row-4"],
        ["row-5", "row-6"],
    ]
    first, second = split_groups(ROWS, 2)
    assert names(first) == ["row-0", "row-1", "row-5", "row-6"] and names(second) == ["row-2", "row-4"]
    assert split_groups([], 2) == [None, None]


def test_groups_with_a_single_reward_are_told_apart():
    kept, dull = by_reward_variance(ROWS)
    assert names(kept) == ["row-0", "row-1", "row-5", "row-6"] and names(dull) == ["row-2", "row-4"]
