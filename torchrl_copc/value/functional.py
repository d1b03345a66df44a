"""COPC's advantage estimate."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from torchrl_copc.value.scan import backward_scan as backward_scan
from torchrl_copc.value.td import flow, following, td_residual

Trace = Literal["step", "product", "cut"]
AdvantageForm = Literal["full", "continuation"]


def log_ratio_bounds(eta: float, eps_low: float, eps_high: float) -> tuple[float, float]:
    """Logarithms of the ends of the ratio interval ``I(eta) = [max(0, 1 - eta*eps_low), 1 + eta*eps_high]``.

    A smaller ``eta`` is a narrower interval. Source: COPC (arXiv 2610.09597).

    Args:
        eta: width of the interval, at least 0; 0 gives ``(0.0, 0.0)``.
        eps_low: width below 1 at ``eta = 1``, at least 0.
        eps_high: width above 1 at ``eta = 1``, at least 0; may be infinite.

    Raises:
        ValueError: if an argument is negative or NaN, with its name and value.

    Examples:
        >>> [round(math.exp(bound), 2) for bound in log_ratio_bounds(0.5, 0.4, 0.56)]
        [0.8, 1.28]
        >>> log_ratio_bounds(3.0, 0.4, 0.56)[0]
        -inf
    """
    for name, value in (("eta", eta), ("eps_low", eps_low), ("eps_high", eps_high)):
        if not value >= 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    if eta == 0:
        return 0.0, 0.0
    low = 1 - eta * eps_low
    return math.log(low) if low > 0 else -math.inf, math.log1p(eta * eps_high)


def clipped_ratio(log_ratio: Tensor, *, eta: float, eps_low: float, eps_high: float) -> Tensor:
    """``c_t = clip(rho_t, I(eta))`` from the log-ratio, clamped in log space so that ``exp`` cannot overflow.

    Args:
        log_ratio: ``log pi - log mu`` in nats, any shape.
        eta, eps_low, eps_high: the interval, see :func:`log_ratio_bounds`.

    Returns:
        The clipped ratio, detached: ``c_t`` is a frozen weight, never a path for gradients.

    Examples:
        >>> import torch
        >>> clipped_ratio(torch.tensor([-9.0, 0.0, 900.0]), eta=0.5, eps_low=0.4, eps_high=0.56)
        tensor([0.8000, 1.0000, 1.2800])
    """
    low, high = log_ratio_bounds(eta, eps_low, eps_high)
    return log_ratio.detach().clamp(low, high).exp_()


def check_form(trace: str, advantage: str) -> None:
    """Refuse an unknown trace or advantage form, naming the accepted ones."""
    for name, value, accepted in (("trace", trace, Trace), ("advantage", advantage, AdvantageForm)):
        if value not in get_args(accepted):
            raise ValueError(f"{name} must be one of {', '.join(get_args(accepted))}, got {value!r}")


def copc_advantage_estimate(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    log_ratio: Tensor,  # [*B, T, F] or [*B, T, 1]
    state_value: Tensor,  # [*B, T, F]
    next_state_value: Tensor,  # [*B, T, F]
    reward: Tensor,  # [*B, T, F]
    done: Tensor,  # [*B, T, F] bool
    terminated: Tensor | None = None,  # [*B, T, F] bool
    *,
    eta: float = 0.5,
    eps_low: float = 0.4,
    eps_high: float = 0.56,
    trace: Trace = "step",
    advantage: AdvantageForm = "full",
    lmbda_critic: float | Tensor | None = None,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    """COPC's clipped-ratio advantage and value target.

    One backward recursion over the weights ``c_t = clip(rho_t, I(eta))`` gives everything::

        delta_t = R_t + gamma*V_{t+1} - V_t
        X_t = c_t*delta_t + gamma*lmbda*e_t*X_{t+1}          X = 0 past the end of a trajectory
        value_target_t = V_t + X_t
        advantage_t = X_t                                    advantage="full"
                    = delta_t + gamma*lmbda*X_{t+1}          advantage="continuation"
        e_t = 1 (trace="step") | c_t (trace="product") | min(1, c_t) (trace="cut")

    ``eta=0`` makes ``c_t = 1``: the result is GAE (arXiv 1506.02438) bit for bit through the same scan, for
    every ``lmbda``, trace and advantage form. Source: COPC (arXiv 2610.09597); which trace and form the
    method means is open, see :class:`~torchrl_copc.value.COPCEstimator`.

    Args:
        gamma: discount per step, a number or a tensor that broadcasts to the values.
        lmbda: trace decay, a number or a tensor that broadcasts to ``[*B, T, 1]`` (length-adaptive decays).
        log_ratio: frozen learner log-prob minus behaviour log-prob of each action, nats, ``[*B, T, F]`` or
            ``[*B, T, 1]``. Carries no gradient into the result.
        state_value: value of the state in which the action was taken, ``[*B, T, F]``, reward units.
        next_state_value: value of the state it led to; ignored where ``terminated``.
        reward: reward of the action.
        done: True on the last step of each trajectory; nothing flows back across it.
        terminated: True where the episode ended and there is nothing to bootstrap from. Defaults to ``done``.
        eta: width of the interval on the advantage side (``eta_A``).
        eps_low, eps_high: widths of the interval at ``eta = 1``.
        trace: how weights accumulate along a trajectory.
        advantage: whether the advantage repeats the weight of its own step.
        lmbda_critic: trace decay of the value target; ``None`` means ``lmbda``, and a single scan.
        time_dim: dimension of time.

    Returns:
        ``(advantage, value_target)``, each ``[*B, T, F]``.

    Raises:
        ValueError: if shapes differ, or for an unknown trace, advantage form or a negative interval width.

    Examples:
        >>> import torch
        >>> value = torch.zeros(1, 3, 1)
        >>> reward = torch.tensor([0.0, 0.0, 1.0]).view(1, 3, 1)
        >>> done = torch.tensor([False, False, True]).view(1, 3, 1)
        >>> log_ratio = torch.tensor([0.0, 0.0, 2.0]).view(1, 3, 1)
        >>> advantage, target = copc_advantage_estimate(1.0, 1.0, log_ratio, value, value, reward, done)
        >>> advantage.flatten()
        tensor([1.2800, 1.2800, 1.2800])
    """
    check_form(trace, advantage)
    delta = td_residual(gamma, state_value, next_state_value, reward, done, terminated, log_ratio)
    ratio = clipped_ratio(log_ratio, eta=eta, eps_low=eps_low, eps_high=eps_high)
    bias = ratio * delta

    def scan(decay: float | Tensor) -> Tensor:
        rate: float | Tensor = gamma * decay
        if trace == "product":
            rate = rate * ratio
        elif trace == "cut":
            rate = rate * ratio.clamp(max=1.0)
        return backward_scan(flow(rate, done, delta), bias, time_dim=time_dim)

    x = scan(lmbda)
    target = state_value + (x if lmbda_critic is None else scan(lmbda_critic))
    if advantage == "full":
        return x, target
    continuation = delta + flow(gamma * lmbda * following(x, time_dim=time_dim), done, delta)
    # Where the weight is exactly 1 both forms are the same number; reading it from the scan keeps eta = 0
    # equal to GAE in the last bit, since the scan rounds in another order than the one-step recursion.
    return torch.where(ratio == 1, x, continuation), target
