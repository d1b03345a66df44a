"""What estimators and losses read from a TensorDict: log-probs of stored actions, and which steps are
padding."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor
from torch.distributions import Distribution


def stored_action_log_prob(
    actor: TensorDictModuleBase,
    tensordict: TensorDictBase,
    *,
    action_key: NestedKey,
    log_prob_key: NestedKey,
) -> tuple[Tensor, Distribution | TensorDictBase]:
    """Log-probability (nats) of the action in ``tensordict`` under ``actor``; nothing is sampled.

    Args:
        actor: a probabilistic actor (it has ``get_dist``), or a module that writes the log-prob of the stored
            action under ``log_prob_key``.
        tensordict: holds the actor's inputs and the action.
        action_key: where the action is.
        log_prob_key: where an actor without ``get_dist`` writes.

    Returns:
        The log-prob, and what it came from: the distribution, or the actor's output TensorDict.

    Raises:
        KeyError: if an actor without ``get_dist`` does not write ``log_prob_key``.
        TypeError: if the distribution returns one log-prob per action head.
    """
    source: Distribution | TensorDictBase
    if hasattr(actor, "get_dist"):
        source = actor.get_dist(tensordict)
        log_prob = source.log_prob(tensordict.get(action_key))
    else:
        source = actor(tensordict)
        log_prob = source.get(log_prob_key, None)
        if log_prob is None:
            raise KeyError(
                f"{type(actor).__name__} has no get_dist and did not write {log_prob_key!r}; an actor must "
                "be probabilistic or have the log-prob of the stored action among its out_keys "
                "(set_keys(log_prob=...))"
            )
    if not isinstance(log_prob, Tensor):
        raise TypeError(
            "the actor's distribution returns one log-prob per action head; COPC needs the log-prob of the "
            "whole action (tensordict.nn.set_composite_lp_aggregate(True))"
        )
    return log_prob, source


def align(x: Tensor, like: Tensor, name: NestedKey) -> Tensor:
    """Give ``x`` the trailing feature dimension of ``like`` (actors write ``[*B, T]``, critics ``[*B, T,
    F]``).

    Raises:
        ValueError: if the shapes do not fit, instead of broadcasting to an outer product.

    Examples:
        >>> import torch
        >>> align(torch.zeros(2, 3), torch.zeros(2, 3, 1), "action_log_prob").shape
        torch.Size([2, 3, 1])
    """
    if x.shape == like.shape[:-1]:
        x = x.unsqueeze(-1)
    if x.shape not in (like.shape, (*like.shape[:-1], 1)):
        raise ValueError(
            f"{name!r} of shape {tuple(x.shape)} does not fit values of shape {tuple(like.shape)}: "
            "expected the same shape, with or without the last dimension"
        )
    return x


def check_finite(log_ratio: Tensor, keys: Iterable[NestedKey | None]) -> None:
    """Refuse a log-ratio that is NaN or infinite.

    Args:
        log_ratio: learner minus behaviour log-prob of real steps (no padding), nats.
        keys: the entries it came from, for the message.

    Raises:
        ValueError: with the number of bad entries and the first one.
    """
    finite = torch.isfinite(log_ratio)
    if not bool(finite.all()):
        bad = log_ratio[~finite]
        raise ValueError(
            f"{bad.numel()} of {log_ratio.numel()} log-ratios are not finite (the first is {float(bad[0])}): "
            f"look for NaN and infinities in {' and '.join(map(repr, keys))}, or mark padding in the mask "
            "entry"
        )


def valid_steps(tensordict: TensorDictBase, mask_keys: Iterable[NestedKey]) -> Tensor | None:
    """Conjunction of the masks that are present, shaped like the batch; ``None`` when there is none.

    Args:
        tensordict: batch size ``[*B, T]``.
        mask_keys: where masks may be; True marks a real step, False padding; ``[*B, T]`` or ``[*B, T, 1]``.

    Raises:
        ValueError: if a mask has another shape.
    """
    valid: Tensor | None = None
    batch_size = tensordict.batch_size
    for key in mask_keys:
        mask = tensordict.get(key, None)
        if mask is None:
            continue
        if mask.shape not in (batch_size, (*batch_size, 1)):
            raise ValueError(
                f"mask {key!r} of shape {tuple(mask.shape)} does not fit the batch size {tuple(batch_size)}"
            )
        mask = mask.bool().reshape(batch_size)
        valid = mask if valid is None else valid & mask
    return valid


def expand_right(mask: Tensor, like: Tensor) -> Tensor:
    """Append singleton dimensions until ``mask`` broadcasts against ``like``."""
    return mask.reshape(mask.shape + (1,) * (like.ndim - mask.ndim))


def fill_padding(tensordict: TensorDictBase, valid: Tensor) -> TensorDictBase:
    """A copy whose padding steps repeat the first valid step.

    Masking a network's output is not enough: a NaN observation makes the weight gradient NaN although its
    output carries no gradient (0 * NaN). A real step is always within the support of the networks and
    distributions.

    Args:
        tensordict: batch size ``valid.shape``.
        valid: True on real steps; at least one is True.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> data = TensorDict({"obs": torch.tensor([[1.0, 2.0, torch.nan]])}, batch_size=[1, 3])
        >>> fill_padding(data, torch.tensor([[True, True, False]]))["obs"]
        tensor([[1., 2., 1.]])
    """
    first = valid.flatten().int().argmax()

    def fill(leaf: Tensor) -> Tensor:
        return torch.where(expand_right(valid, leaf), leaf, leaf.flatten(0, valid.ndim - 1)[first])

    filled = tensordict.apply(fill)
    assert filled is not None
    return filled


def trajectory_length(done: Tensor, *, time_dim: int = -2) -> Tensor:
    """Number of steps of the trajectory that each step belongs to; a trajectory still running ends with the data.

    Args:
        done: True on the last step of each trajectory, any shape with a time dimension.
        time_dim: dimension of time.

    Returns:
        int64, shaped like ``done``.

    Examples:
        >>> import torch
        >>> trajectory_length(torch.tensor([False, True, True, False, False, False]), time_dim=-1)
        tensor([2, 2, 1, 3, 3, 3])
    """
    done = done.movedim(time_dim, -1)
    length = done.shape[-1]
    step = torch.arange(1, length + 1, device=done.device)
    started = torch.nn.functional.pad(torch.where(done, step, 0).cummax(-1).values[..., :-1], (1, 0))
    end = torch.where(done, step, length).flip(-1).cummin(-1).values.flip(-1)
    return (end - started).movedim(-1, time_dim)
