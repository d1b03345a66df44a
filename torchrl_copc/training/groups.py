"""Responses to one prompt that belong together: split over ranks whole, and left out when they teach nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tensordict import TensorDictBase

from torchrl_copc.collectors.rollout import AsyncRolloutCollector, CollectorError
from torchrl_copc.trajectory import REWARD, metadata

Rows = list[TensorDictBase]

# Batches' worth of rows that dynamic sampling may discard for one, as in DAPO's own code.
MOST_DISCARDED = 10


def groups(rows: Sequence[TensorDictBase]) -> list[Rows]:
    """The rows of each group, in the order in which the groups first occur."""
    found: dict[str, Rows] = {}
    for row in rows:
        found.setdefault(metadata(row)["group_id"], []).append(row)
    return list(found.values())


def split_groups(rows: Sequence[TensorDictBase], parts: int) -> list[Rows | None]:
    """Deal whole groups out to ``parts`` ranks in turn; every rank gets ``None`` when there are no rows.

    Args:
        rows: a batch of at least ``parts`` groups, or nothing.
        parts: number of ranks.
    """
    whole = groups(rows)
    dealt = [[row for group in whole[part::parts] for row in group] for part in range(parts)]
    return [rows or None for rows in dealt]


def by_reward_variance(rows: Sequence[TensorDictBase]) -> tuple[Rows, Rows]:
    """Dynamic sampling of DAPO (arXiv 2503.14476): separate groups whose responses all got the same reward.

    Args:
        rows: whole groups.

    Returns:
        The rows of groups with different rewards, and those of the others, whose group-relative advantage is 0.
    """
    kept: Rows = []
    dull: Rows = []
    for group in groups(rows):
        rewards = [float(row.get(REWARD).sum()) for row in group]
        (kept if max(rewards) > min(rewards) else dull).extend(group)
    return kept, dull


def take_batch(collector: AsyncRolloutCollector, *, dynamic_sampling: bool, stop: Callable[[], bool]) -> Rows:
    """A full batch of the collector, or nothing once ``stop`` says so.

    Rows in hand are not lost then: they are the collector's until it advances.

    Args:
        collector: where rows are taken from, and groups that teach nothing given back to.
        dynamic_sampling: replace groups whose responses all got the same reward.
        stop: asked about once a second.

    Raises:
        CollectorError: if more than ten batches' worth of rows had to be discarded; and what the collector raises.
    """
    batch: Rows = []
    discarded = 0
    while not stop():
        taken = collector.take(timeout=1.0)
        if taken is None:
            continue
        rows: Rows = list(taken)
        if dynamic_sampling:
            rows, dull = by_reward_variance(rows)
            collector.discard(dull)
            discarded += len(dull)
            if discarded > MOST_DISCARDED * collector.batch_rows:
                raise CollectorError(
                    f"collector.dynamic_sampling=true: {discarded} rows were discarded for one batch, because all "
                    "responses to their prompts got the same reward; the task is too hard or solved. Start a new run "
                    "with collector.dynamic_sampling=false, a larger collector.group_size or another task"
                )
        batch += rows
        if len(batch) == collector.batch_rows:
            return batch
    return []
