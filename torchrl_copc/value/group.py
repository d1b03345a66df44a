"""Group-relative advantages: responses to one prompt are each other's baseline."""

from __future__ import annotations

import torch
from torch import Tensor


def group_relative_advantage_estimate(
    reward: Tensor,  # [*B, T, 1]
    done: Tensor,  # [*B, T, 1] bool
    group_id: Tensor,  # [*B, T, 1] integer
    *,
    standardize: bool = True,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    """The return of a token's response, centred (and standardised) within the group of its prompt.

    ``A = (R - mean) / std`` over the responses of the group, ``std`` with ``n - 1``, the same for every token of a
    response; 0 in a group whose returns are all equal, or of one response. Source: GRPO (arXiv 2402.03300), DAPO (arXiv
    2503.14476). Equal to :class:`~torchrl.objectives.llm.MCAdvantage` with ``trajectory_return="sum"``, but for all
    groups of a batch at once.

    Args:
        reward: reward of each token.
        done: True on the last token of each response; a response still running ends with the data.
        group_id: which prompt each token's response belongs to.
        standardize: divide by the standard deviation of the group.
        time_dim: dimension of time.

    Returns:
        ``(advantage, value_target)``, each ``[*B, T, 1]``; the target is the return of the response.

    Raises:
        ValueError: if shapes differ.

    Examples:
        >>> import torch
        >>> done = torch.tensor([False, True, True, True]).view(1, 4, 1)  # three responses
        >>> reward = torch.tensor([0.0, 1.0, 0.0, 5.0]).view(1, 4, 1)
        >>> group = torch.tensor([7, 7, 7, 9]).view(1, 4, 1)
        >>> group_relative_advantage_estimate(reward, done, group, standardize=False)[0].flatten()
        tensor([ 0.5000,  0.5000, -0.5000,  0.0000])
    """
    if not reward.shape == done.shape == group_id.shape:
        raise ValueError(
            "reward, done and group_id must share one shape [*B, T, 1]; got "
            f"{[tuple(x.shape) for x in (reward, done, group_id)]}"
        )
    reward, done, group_id = (x.movedim(time_dim, -1) for x in (reward, done, group_id))
    shape = reward.shape
    starts = torch.nn.functional.pad(done[..., :-1], (1, 0), value=True)
    response = starts.flatten().cumsum(0) - 1
    first = starts.flatten().nonzero().squeeze(-1)
    # float64: the rounding error of a mean of equal returns must stay far below the least deviation of 1e-6
    returns = reward.new_zeros(first.numel(), dtype=torch.float64).index_add(
        0, response, reward.flatten().double()
    )
    _, group, size = torch.unique(group_id.flatten()[first], return_inverse=True, return_counts=True)
    size = size.to(returns)

    def group_sum(x: Tensor) -> Tensor:
        return torch.zeros_like(size).index_add(0, group, x)

    centred = returns - (group_sum(returns) / size)[group]
    if standardize:
        variance = group_sum(centred.square()) / (size - 1).clamp(min=1)
        centred = centred / variance.sqrt().clamp(min=1e-6)[group]
    advantage, target = (
        x[response].to(reward).reshape(shape).movedim(-1, time_dim) for x in (centred, returns)
    )
    return advantage, target
