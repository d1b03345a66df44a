"""Two layouts of rows: policy tokens only (estimators, losses) and micro-batches of ids (models)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_copc.trajectory import (
    DONE,
    LOG_PROBS,
    METADATA,
    POLICY_MASK,
    POLICY_VERSION,
    REWARD,
    TERMINATED,
    TOKENS,
    TRUNCATED,
    RowError,
    metadata,
)

Layout = Literal["padded", "packed"]


@dataclass(frozen=True)
class _Policy:
    """Where the policy tokens of several rows are, rows laid end to end."""

    lengths: Tensor  # [B] tokens per row
    starts: Tensor  # [B] first token of each row in the concatenation
    index: Tensor  # [N] place of each policy token in the concatenation
    row: Tensor  # [N] row of each policy token
    counts: Tensor  # [B] policy tokens per row

    @property
    def first(self) -> Tensor:
        """Place of each row's first policy token among all policy tokens, [B]."""
        return self.counts.cumsum(0) - self.counts


def _name(row: TensorDictBase, index: int) -> str:
    return str(metadata(row)["row_id"]) if row.get(METADATA, None) is not None else f"number {index}"


def _cat(rows: Sequence[TensorDictBase], key: str | tuple[str, ...]) -> Tensor:
    return torch.cat([row.get(key) for row in rows])


def _locate(rows: Sequence[TensorDictBase]) -> _Policy:
    if not rows:
        raise RowError("no rows: at least one is needed")
    lengths = torch.tensor([row.shape[0] for row in rows])
    index = _cat(rows, POLICY_MASK).nonzero().squeeze(-1)
    row = torch.repeat_interleave(torch.arange(len(rows)), lengths)[index]
    counts = torch.bincount(row, minlength=len(rows))
    if bool((counts == 0).any()):
        bad = int((counts == 0).nonzero()[0, 0])
        raise RowError(f"row {_name(rows[bad], bad)} has no policy token")
    return _Policy(lengths, lengths.cumsum(0) - lengths, index, row, counts)


def compress(rows: Sequence[TensorDictBase]) -> TensorDict:
    """Gather the policy tokens of rows into TorchRL's "trajectories concatenated along time" layout.

    Context (prompts, observations, template tokens) is dropped, so that the next token is always the next
    *policy* token of the same response, whatever lies between them in the row.

    Args:
        rows: trajectories of batch size ``[T_i]`` as made by :meth:`~torchrl_copc.trajectory.Episode.to_row`.

    Returns:
        A ``TensorDict`` of batch size ``[1, N]`` with every leaf ``[1, N, 1]``: ``action_log_prob`` (nats,
        behaviour), ``policy_version``, ``response_id`` (place of the row in ``rows``), ``group_id`` (equal for
        rows of one group; a row without metadata is its own), ``position`` (of the policy token within its
        response, from 0) and ``("next", "reward" | "done" | "terminated" |
        "truncated")``.

    Raises:
        RowError: if a row has no policy token, a non-finite behaviour log-prob on one, or ``done`` anywhere
            else than on its last policy token.

    Examples:
        >>> from torchrl_copc.trajectory import Completion, Episode, Prompt
        >>> episode = Episode("row-0", Prompt("p", "?", ("!",)), "g")
        >>> episode.append_context([5, 6])
        >>> episode.append_completion(Completion((7, 8), (-0.5, -0.1), (0, 0), "stop"))
        >>> episode.finish(1.0, "stop")
        >>> packed = compress([episode.to_row()])
        >>> packed.batch_size, packed["next", "reward"].flatten().tolist()
        (torch.Size([1, 2]), [0.0, 1.0])
    """
    policy = _locate(rows)
    take = policy.index

    def gather(key: str | tuple[str, ...]) -> Tensor:
        return _cat(rows, key)[take].reshape(1, -1, 1)

    names = [
        ("row", i) if row.get(METADATA, None) is None else ("group", metadata(row)["group_id"])
        for i, row in enumerate(rows)
    ]
    number = {name: i for i, name in enumerate(dict.fromkeys(names))}
    group = torch.tensor([number[name] for name in names])
    done = gather(DONE)
    log_prob = gather(LOG_PROBS)
    last = torch.zeros(take.numel(), dtype=torch.bool)
    last[policy.first + policy.counts - 1] = True
    _check(rows, policy, done.flatten() == last, "`done` must be set on its last policy token and only there")
    _check(
        rows, policy, log_prob.flatten().isfinite(), "a behaviour log-prob of a policy token is not finite"
    )
    return TensorDict(
        {
            "action_log_prob": log_prob,
            "policy_version": gather(POLICY_VERSION),
            "response_id": policy.row.reshape(1, -1, 1),
            "group_id": group[policy.row].reshape(1, -1, 1),
            "position": (torch.arange(take.numel()) - policy.first[policy.row]).reshape(1, -1, 1),
            "next": {
                "reward": gather(REWARD),
                "done": done,
                "terminated": gather(TERMINATED),
                "truncated": gather(TRUNCATED),
            },
        },
        batch_size=[1, take.numel()],
    )


def _check(rows: Sequence[TensorDictBase], policy: _Policy, good: Tensor, message: str) -> None:
    if not bool(good.all()):
        bad = int((~good).nonzero()[0, 0])
        row = int(policy.row[bad])
        at = int(policy.index[bad] - policy.starts[row])
        raise RowError(f"row {_name(rows[row], row)}, token {at}: {message}")


def micro_batches(
    rows: Sequence[TensorDictBase], max_tokens: int, layout: Layout = "padded", pad_id: int = 0
) -> list[TensorDict]:
    """Arrange the ids of rows for the models, a bounded number of tokens at a time.

    ``"padded"`` buckets rows of similar length and pads on the right. Under causal attention right padding
    cannot reach an earlier token, so models need no attention mask. ``"packed"`` lays rows end to end in one
    sequence whose ``position_ids`` restart at each row; transformers then keeps rows apart (variable-length
    flash attention, or a block mask under sdpa and flex attention).

    Args:
        rows: trajectories of batch size ``[T_i]``.
        max_tokens: most tokens in one micro-batch, padding included. A longer row gets a micro-batch of its
            own.
        layout: ``"padded"`` (ids ``[B, T]``) or ``"packed"`` (ids ``[1, sum T]``).
        pad_id: id put at padding; its value has no effect.

    Returns:
        One ``TensorDict`` of batch size ``[]`` per micro-batch: ``input_ids``, ``position_ids``,
        ``predict_index`` ``[n]`` (place in the flattened ids whose hidden state predicts policy token i),
        ``target_ids`` ``[n]``, ``token_index`` ``[n]`` (place of policy token i in ``compress(rows)``),
        ``final_index`` ``[B]`` (place of each row's last token), ``row_index`` ``[B]`` (place of each row in
        ``rows``).

    Raises:
        RowError: if a row has no policy token, or starts with one (nothing predicts it).
        ValueError: if ``max_tokens`` or ``layout`` is none of the allowed values.
    """
    if max_tokens < 1:
        raise ValueError(f"learner.max_tokens_per_micro_batch must be at least 1, got {max_tokens}")
    if layout not in ("padded", "packed"):
        raise ValueError(f'learner.layout must be "padded" or "packed", got {layout!r}')
    policy = _locate(rows)
    within = policy.index - policy.starts[policy.row]
    _check(rows, policy, within > 0, "a row may not start with a policy token; put the prompt before it")
    tokens = [row.get(TOKENS) for row in rows]
    return [
        _micro_batch(tokens, torch.tensor(group), policy, within, layout, pad_id)
        for group in _groups(policy.lengths.tolist(), max_tokens, layout)
    ]


def _groups(lengths: list[int], max_tokens: int, layout: Layout) -> list[list[int]]:
    groups: list[list[int]] = []
    longest = total = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        size = (len(groups[-1]) + 1) * longest if layout == "padded" and groups else total + lengths[index]
        if not groups or size > max_tokens:
            groups.append([])
            longest, total = lengths[index], 0
        groups[-1].append(index)
        total += lengths[index]
    return groups


def _micro_batch(
    tokens: list[Tensor], group: Tensor, policy: _Policy, within: Tensor, layout: Layout, pad_id: int
) -> TensorDict:
    members = [tokens[int(i)] for i in group]
    lengths = policy.lengths[group]
    if layout == "padded":
        input_ids = torch.nn.utils.rnn.pad_sequence(members, batch_first=True, padding_value=pad_id)
        width = input_ids.shape[1]
        start = torch.arange(len(members)) * width
        position_ids = torch.arange(width).expand(len(members), width)
    else:
        input_ids = torch.cat(members)[None]
        start = lengths.cumsum(0) - lengths
        position_ids = (torch.arange(input_ids.shape[1]) - torch.repeat_interleave(start, lengths))[None]
    counts = policy.counts[group]
    member = torch.repeat_interleave(torch.arange(len(members)), counts)
    offset = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts)[member]
    token_index = policy.first[group][member] + offset
    place = start[member] + within[token_index]
    return TensorDict(
        {
            "input_ids": input_ids,
            "position_ids": position_ids.contiguous(),
            "predict_index": place - 1,
            "target_ids": input_ids.flatten()[place],
            "token_index": token_index,
            "final_index": start + lengths - 1,
            "row_index": group,
        },
        batch_size=[],
    )
