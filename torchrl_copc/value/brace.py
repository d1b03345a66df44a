"""BRACE: V-trace in windows with a terminal correction, as a function and as a TorchRL value estimator."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.objectives.utils import register_value_estimator

from torchrl_copc.value.estimator import OffPolicyEstimator, OffPolicyValueEstimators
from torchrl_copc.value.scan import backward_scan, times
from torchrl_copc.value.td import flow, following, td_residual
from torchrl_copc.value.vtrace import check_thresholds, truncated_ratio


def _check_window(window: int) -> None:
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")


def windowed_scan(coeff: Tensor, bias: Tensor, end: Tensor, window: int, *, time_dim: int = -2) -> Tensor:
    """``window`` steps of ``x <- bias_t + coeff_t * x``, from ``x = end_{t+window}`` back to each ``t``.

    The window of a step is put together from windows whose lengths are powers of two: O(T log window) work, and
    neither a division nor a difference of large numbers. Past the end of the data everything is 0.

    Args:
        coeff, bias, end: one shape with a time dimension.
        window: number of steps, at least 1.
        time_dim: dimension of time.

    Raises:
        ValueError: if ``window`` is below 1.

    Examples:
        >>> import torch
        >>> ones = torch.ones(5)
        >>> windowed_scan(0.5 * ones, ones, 8 * ones, 2, time_dim=0)
        tensor([3.5000, 3.5000, 3.5000, 1.5000, 1.0000])
    """
    _check_window(window)
    # (gain, offset): the affine map of all steps put together so far; (coeff, bias): that of `size` steps
    gain, offset, done_steps, size = torch.ones_like(coeff), torch.zeros_like(bias), 0, 1
    while True:
        if window & size:
            next_coeff = following(coeff, time_dim=time_dim, steps=done_steps)
            next_bias = following(bias, time_dim=time_dim, steps=done_steps)
            gain, offset = times(gain, next_coeff), offset + times(gain, next_bias)
            done_steps += size
        if done_steps == window:
            return offset + times(gain, following(end, time_dim=time_dim, steps=window))
        next_coeff = following(coeff, time_dim=time_dim, steps=size)
        bias = bias + times(coeff, following(bias, time_dim=time_dim, steps=size))
        coeff, size = times(coeff, next_coeff), 2 * size


def brace_advantage_estimate(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    log_ratio: Tensor,  # [*B, T, F] or [*B, T, 1]
    state_value: Tensor,  # [*B, T, F]
    next_state_value: Tensor,  # [*B, T, F]
    reward: Tensor,  # [*B, T, F]
    done: Tensor,  # [*B, T, F] bool
    terminated: Tensor | None = None,  # [*B, T, F] bool
    *,
    rho_threshold: float = 1.2,
    c_threshold: float = 1.1,
    window: int = 100,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    """V-trace over ``window`` steps, after which the observed return takes over, weighted by the ratios so far.

    With ``rho_t = min(rho_threshold, w_t)``, ``c_t = lmbda * min(c_threshold, w_t)``, ``w_t = pi(a_t)/mu(a_t)`` and
    the return to go ``G_t`` (bootstrapped where the trajectory was cut)::

        X_s = sum_{t=s}^{s+k-1} gamma^{t-s} (prod_{i=s}^{t-1} c_i) rho_t delta_t
              + gamma^k (prod_{i=s}^{s+k-1} c_i) (G_{s+k} - V_{s+k})
        value_target_s = V_s + X_s
        advantage_s = R_s + gamma*value_target_{s+1} - V_s = delta_s + gamma*X_{s+1}

    Sums end, and the second line is 0, at the end of a trajectory: a window as long as the trajectory gives V-trace.
    Source: BRACE (arXiv 2609.09783).

    **What is open.** The description this follows names windows of 100 steps and "a length-k ratio-weighted terminal
    correction" without a formula. The second line is this project's reading: the only weighted term of length ``k``
    that brings the terminal reward to tokens before the last window, and with ratios of 1 and ``lmbda=1`` it makes the
    target the return for every window.

    Args:
        gamma: discount per step.
        lmbda: trace decay, a number or a tensor that broadcasts to ``[*B, T, 1]``.
        log_ratio: frozen learner log-prob minus behaviour log-prob of each action, nats.
        state_value, next_state_value, reward, done, terminated: see
            :func:`~torchrl_copc.value.gae.token_gae_advantage_estimate`.
        rho_threshold: largest weight of a residual.
        c_threshold: largest weight along the trace.
        window: ``k``, steps.
        time_dim: dimension of time.

    Returns:
        ``(advantage, value_target)``, each ``[*B, T, F]``.

    Raises:
        ValueError: if shapes differ, a threshold is not above 0 or the window is below 1.

    Examples:
        >>> import torch
        >>> value, reward = torch.full((1, 3, 1), 0.5), torch.tensor([0.0, 0.0, 1.0]).view(1, 3, 1)
        >>> log_ratio = torch.zeros(1, 3, 1)
        >>> _, target = brace_advantage_estimate(
        ...     1.0, 1.0, log_ratio, value, value, reward, reward > 0, window=1
        ... )
        >>> target.flatten()
        tensor([1., 1., 1.])
    """
    delta = td_residual(gamma, state_value, next_state_value, reward, done, terminated, log_ratio)
    trace = flow(gamma * lmbda * truncated_ratio(log_ratio, c_threshold), done, delta)
    remaining = backward_scan(flow(gamma, done, delta), delta, time_dim=time_dim)  # G - V
    residual = truncated_ratio(log_ratio, rho_threshold) * delta
    x = windowed_scan(trace, residual, remaining, window, time_dim=time_dim)
    return delta + flow(gamma * following(x, time_dim=time_dim), done, delta), state_value + x


@register_value_estimator(
    OffPolicyValueEstimators.BRACE, default_kwargs={"gamma": 1.0, "lmbda": 0.95, "differentiable": False}
)
class BRACEEstimator(OffPolicyEstimator):
    """Windowed V-trace with a terminal correction, see :func:`brace_advantage_estimate` (also for what is open).

    Keyword Args:
        rho_threshold (float): largest weight of a residual. Defaults to ``1.2``.
        c_threshold (float): largest weight along the trace. Defaults to ``1.1``.
        window (int): steps. Defaults to ``100``.
        **kwargs: of :class:`~torchrl_copc.value.estimator.OffPolicyEstimator`.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> end = torch.tensor([False, True, True]).view(1, 3, 1)  # packed responses of two tokens and one
        >>> zeros = torch.zeros(1, 3, 1)
        >>> after = {"state_value": zeros, "reward": end.float(), "done": end, "terminated": end}
        >>> tokens = TensorDict(
        ...     {"state_value": zeros, "action_log_prob": zeros, "learner_log_prob": zeros - 1, "next": after},
        ...     batch_size=[1, 3],
        ... )
        >>> BRACEEstimator(value_network=None)(tokens)["advantage"].flatten()
        tensor([0.3679, 1.0000, 1.0000])
    """

    unclipped: ClassVar[dict[str, Any]] = {"rho_threshold": math.inf, "c_threshold": math.inf}

    def __init__(
        self,
        *,
        value_network: TensorDictModuleBase | None,
        rho_threshold: float = 1.2,
        c_threshold: float = 1.1,
        window: int = 100,
        **kwargs: Any,
    ) -> None:
        super().__init__(value_network=value_network, **kwargs)
        check_thresholds(rho_threshold, c_threshold)
        _check_window(window)
        self.rho_threshold, self.c_threshold, self.window = rho_threshold, c_threshold, window

    def estimate(
        self,
        gamma: Tensor,
        log_ratio: Tensor,
        value: Tensor,
        next_value: Tensor,
        reward: Tensor,
        done: Tensor,
        terminated: Tensor,
        *,
        time_dim: int,
    ) -> tuple[Tensor, Tensor]:
        return brace_advantage_estimate(
            gamma,
            self.lmbda.to(reward.device),
            log_ratio,
            value,
            next_value,
            reward,
            done,
            terminated,
            rho_threshold=self.rho_threshold,
            c_threshold=self.c_threshold,
            window=self.window,
            time_dim=time_dim,
        )

    @property
    def log_weight_bounds(self) -> tuple[float, float]:
        return -math.inf, math.log(self.rho_threshold)
