"""TD residuals and the neighbouring step: the two things every advantage channel is made of beside the scan."""

from __future__ import annotations

import torch
from torch import Tensor


def td_residual(
    gamma: float | Tensor,
    state_value: Tensor,  # [*B, T, F]
    next_state_value: Tensor,  # [*B, T, F]
    reward: Tensor,  # [*B, T, F]
    done: Tensor,  # [*B, T, F] bool
    terminated: Tensor | None = None,  # [*B, T, F] bool
    log_ratio: Tensor | None = None,  # [*B, T, F] or [*B, T, 1]
) -> Tensor:
    """``delta_t = R_t + gamma*V_{t+1} - V_t``, where ``V_{t+1}`` counts as 0 when the episode terminated.

    Args:
        gamma: discount per step, a number or a tensor that broadcasts to the values.
        state_value, next_state_value, reward: reward units.
        done: True on the last step of each trajectory.
        terminated: True where there is nothing to bootstrap from. Defaults to ``done``.
        log_ratio: checked for its shape only.

    Raises:
        ValueError: if shapes differ, instead of broadcasting.

    Examples:
        >>> import torch
        >>> value, end = torch.ones(1, 2, 1), torch.tensor([False, True]).view(1, 2, 1)
        >>> td_residual(0.9, value, torch.full((1, 2, 1), 5.0), value, end).flatten()
        tensor([4.5000, 0.0000])
    """
    terminated = done if terminated is None else terminated
    shape, others = state_value.shape, (next_state_value, reward, done, terminated)
    if any(other.shape != shape for other in others):
        raise ValueError(
            "state_value, next_state_value, reward, done and terminated must share one shape [*B, T, F]; got "
            f"{[tuple(x.shape) for x in (state_value, *others)]}"
        )
    if log_ratio is not None and log_ratio.shape not in (shape, (*shape[:-1], 1)):
        raise ValueError(
            f"log_ratio {tuple(log_ratio.shape)} must have the shape of the values, {tuple(shape)}, or end in 1"
        )
    # where, not a product: the value past a terminal state may be anything, NaN included
    bootstrap = torch.where(terminated, 0.0, next_state_value).mul_(gamma)
    return (reward + bootstrap).sub_(state_value)


def following(x: Tensor, *, time_dim: int, steps: int = 1) -> Tensor:
    """``x_{t+steps}`` at ``t``, and 0 past the end of the data.

    Examples:
        >>> import torch
        >>> following(torch.tensor([1, 2, 3]), time_dim=0)
        tensor([2, 3, 0])
    """
    steps = min(steps, x.shape[time_dim])
    rest = x.narrow(time_dim, steps, x.shape[time_dim] - steps)
    return torch.cat((rest, torch.zeros_like(x.narrow(time_dim, 0, steps))), time_dim)


def flow(rate: float | Tensor, done: Tensor, like: Tensor) -> Tensor:
    """``rate``, and 0 where nothing may flow back from the next step, whatever ``rate`` is there.

    Args:
        rate: a number or a tensor that broadcasts to ``done``.
        done: True on the last step of each trajectory.
        like: gives the dtype and device to a number.

    Examples:
        >>> import torch
        >>> flow(0.9, torch.tensor([False, True]), torch.zeros(2))
        tensor([0.9000, 0.0000])
    """
    if not isinstance(rate, Tensor) or not rate.ndim:  # like a number, it must not widen the data's dtype
        rate = torch.as_tensor(rate, dtype=like.dtype, device=like.device)
    return torch.where(done, 0.0, rate)
