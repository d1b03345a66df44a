"""Groups stay whole on their way to the ranks, and those that teach nothing are found."""

from __future__ import annotations

import pytest
from lm_cases import row

from torchrl_copc.collectors.rollout import CollectorError
from torchrl_copc.training.groups import by_reward_variance, groups, split_groups, take_batch
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


class Collector:
    """Hands out groups of two rows: of rewards 0 and 1, or of one reward, as told."""

    batch_rows = 4

    def __init__(self, differ):
        self.differ, self.started, self.held = list(differ), 0, []

    def take(self, timeout):
        if self.started == 3:  # nothing is ready for a while
            self.started += 1
            return None
        rows = []
        while len(self.held) + len(rows) < self.batch_rows:
            differs, group = self.differ.pop(0), self.started
            self.started += 1
            rows += [row(2 * group, group=group), row(2 * group + (1 if differs else 2), group=group)]
        self.held += rows
        return rows

    def discard(self, rows):
        self.held = [one for one in self.held if all(one is not other for other in rows)]


def test_dull_groups_make_room_until_the_batch_is_full():
    collector = Collector([True, False, False, True])
    batch = take_batch(collector, dynamic_sampling=True, stop=lambda: False)
    assert [metadata(one)["group_id"] for one in batch] == ["g0", "g0", "g4", "g4"]
    assert [id(one) for one in collector.held] == [id(one) for one in batch]
    kept = take_batch(Collector([False, False]), dynamic_sampling=False, stop=lambda: False)
    assert len(kept) == 4


def test_a_stop_ends_the_wait_and_an_endless_search_is_an_error():
    assert take_batch(Collector([]), dynamic_sampling=True, stop=lambda: True) == []
    with pytest.raises(
        CollectorError, match=r"dynamic_sampling=true: 4[24] rows were .* Start a new run with"
    ):
        take_batch(Collector([False] * 50), dynamic_sampling=True, stop=lambda: False)
