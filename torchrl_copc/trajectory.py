"""The row: one trajectory, token-exact. Everything that crosses a room's wall is defined here.

An :class:`Episode` only ever grows: prompt ids, sampled ids and observation ids are appended, never decoded and
re-encoded. :meth:`Episode.to_row` freezes it into the ``TensorDict`` that the replay buffer holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase

TOKENS = ("tokens", "full")
POLICY_MASK = ("masks", "all_assistant_mask")
LOG_PROBS = ("log_probs", "full")
POLICY_VERSION = "policy_version"
REWARD = ("next", "reward")
TERMINATED = ("next", "terminated")
TRUNCATED = ("next", "truncated")
DONE = ("next", "done")
METADATA = "metadata"

FinishReason = Literal["stop", "length", "abort"]


class RowError(ValueError):
    """A row that must not be trained on, with the row's id and what is wrong with it."""


@dataclass(frozen=True)
class Prompt:
    """One task of a data set.

    Args:
        id: unique within the data set and split; stable over runs, so that a resumed run knows what it consumed.
        question: the text shown to the policy (the environment adds its own instructions around it).
        answers: every accepted gold answer.
        metadata: anything an environment or report needs (data source, country, hops, ...).
    """

    id: str
    question: str
    answers: tuple[str, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """What the engine sampled in one turn; the three sequences have one entry per sampled token.

    Args:
        token_ids: sampled ids, the stop token included when there was one.
        log_probs: log-probability (nats) of each id under the distribution it was sampled from.
        versions: policy version that sampled each id.
        finish_reason: ``"stop"`` (a stop token or string), ``"length"`` (the token budget ran out) or ``"abort"``
            (the engine ended the request for a reason the policy did not cause).
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.log_probs) == len(self.versions):
            raise ValueError(
                f"completion with {len(self.token_ids)} tokens, {len(self.log_probs)} log-probs and "
                f"{len(self.versions)} versions: one of each per sampled token is needed"
            )

    def truncated(self, length: int) -> Completion:
        """The first ``length`` tokens; ids dropped after a stop take their log-probs and versions with them."""
        return Completion(
            self.token_ids[:length], self.log_probs[:length], self.versions[:length], self.finish_reason
        )


@dataclass
class Episode:
    """One trajectory while it runs: append-only ids with a mask, behaviour log-probs and versions.

    Args:
        row_id: unique within a run.
        prompt: the task.
        group_id: rows that share it are admitted, consumed and discarded together.
    """

    row_id: str
    prompt: Prompt
    group_id: str
    token_ids: list[int] = field(default_factory=list)
    policy_mask: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    finish_reason: str = ""
    num_turns: int = 0
    num_tool_calls: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated

    @property
    def num_policy_tokens(self) -> int:
        return sum(self.policy_mask)

    def append_context(self, token_ids: Sequence[int]) -> None:
        """Append prompt, template or observation ids: context, never trained on."""
        self._check_running()
        self.token_ids.extend(token_ids)
        self.policy_mask.extend([False] * len(token_ids))
        self.log_probs.extend([0.0] * len(token_ids))
        self.versions.extend([-1] * len(token_ids))

    def append_completion(self, completion: Completion) -> None:
        """Append the ids the policy sampled in one turn."""
        self._check_running()
        self.token_ids.extend(completion.token_ids)
        self.policy_mask.extend([True] * len(completion.token_ids))
        self.log_probs.extend(completion.log_probs)
        self.versions.extend(completion.versions)
        self.num_turns += 1

    def finish(self, reward: float, finish_reason: str, *, truncated: bool = False) -> None:
        """End the episode. ``truncated`` is only for cuts that the policy did not cause."""
        self._check_running()
        self.reward, self.finish_reason = float(reward), finish_reason
        self.terminated, self.truncated = not truncated, truncated

    def _check_running(self) -> None:
        if self.done:
            raise RuntimeError(
                f"row {self.row_id} is finished ({self.finish_reason}); nothing can be appended"
            )

    def to_row(self) -> TensorDict:
        """Freeze into a ``TensorDict`` of batch size ``[T]``.

        Reward and the done flags sit on the last policy token.

        Raises:
            RowError: if the episode still runs or holds no policy token.
        """
        if not self.done:
            raise RowError(f"row {self.row_id} still runs")
        if not any(self.policy_mask):
            raise RowError(f"row {self.row_id} (prompt {self.prompt.id}) has no policy token")
        length = len(self.token_ids)
        last = max(i for i, is_policy in enumerate(self.policy_mask) if is_policy)
        reward = torch.zeros(length, 1)
        reward[last] = self.reward
        flags = torch.zeros(3, length, 1, dtype=torch.bool)
        flags[:, last, 0] = torch.tensor([self.terminated, self.truncated, True])
        row = TensorDict(
            {
                "tokens": {"full": torch.tensor(self.token_ids, dtype=torch.int64)},
                "masks": {"all_assistant_mask": torch.tensor(self.policy_mask, dtype=torch.bool)},
                "log_probs": {"full": torch.tensor(self.log_probs, dtype=torch.float32)},
                POLICY_VERSION: torch.tensor(self.versions, dtype=torch.int32),
                "next": {"reward": reward, "terminated": flags[0], "truncated": flags[1], "done": flags[2]},
            },
            batch_size=[length],
        )
        row.set(METADATA, NonTensorData(self._metadata(), batch_size=[length]))
        return row

    def _metadata(self) -> dict[str, Any]:
        return {
            "row_id": self.row_id,
            "prompt_id": self.prompt.id,
            "group_id": self.group_id,
            "question": self.prompt.question,
            "answers": list(self.prompt.answers),
            "finish_reason": self.finish_reason,
            "num_turns": self.num_turns,
            "num_tool_calls": self.num_tool_calls,
            "metrics": dict(self.metrics),
            "timings": dict(self.timings),
        }


def metadata(row: TensorDictBase) -> dict[str, Any]:
    """The non-tensor part of a row: ids, finish reason, counts, metrics and timings."""
    data: dict[str, Any] = row.get(METADATA).data
    return data


def oldest_version(row: TensorDictBase) -> int:
    """Oldest policy version that sampled a token of the row."""
    return int(row.get(POLICY_VERSION)[row.get(POLICY_MASK)].min())


def check_row(row: TensorDictBase) -> None:
    """Admission check of a finished row.

    Values at context positions are never looked at.

    Raises:
        RowError: if there is no policy token, or a behaviour log-prob on one is NaN, infinite or above zero, or the
            reward is not finite.
    """
    mask = row.get(POLICY_MASK)
    name = metadata(row)["row_id"]
    if not bool(mask.any()):
        raise RowError(f"row {name} has no policy token")
    log_probs = row.get(LOG_PROBS)
    bad = mask & (~torch.isfinite(log_probs) | (log_probs > 1e-4))
    if bool(bad.any()):
        at = int(bad.nonzero()[0, 0])
        raise RowError(
            f"row {name}: behaviour log-prob {float(log_probs[at])} at policy token {at} "
            f"({int(bad.sum())} such tokens); the engine must return finite log-probs of the tokens it sampled"
        )
    reward = row.get(REWARD)[mask]
    if not math.isfinite(float(reward.sum())):
        raise RowError(
            f"row {name}: reward {float(reward.sum())} is not finite; check the environment's reward"
        )
