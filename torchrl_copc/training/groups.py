"""Responses to one prompt that belong together: split over ranks whole, and left out when they teach nothing."""

from __future__ import annotations

from collections.abc import Sequence

from tensordict import TensorDictBase

from torchrl_copc.trajectory import REWARD, metadata

Rows = list[TensorDictBase]


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
