"""V-trace on stored actions, as a function and as a TorchRL value estimator."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.objectives.utils import register_value_estimator

from torchrl_copc.value.estimator import OffPolicyEstimator, OffPolicyValueEstimators
from torchrl_copc.value.scan import backward_scan
from torchrl_copc.value.td import flow, following, td_residual


def check_thresholds(*thresholds: float) -> None:
    """Refuse thresholds of ratios that are not above 0.

    Examples:
        >>> check_thresholds(1.0, 0.0)
        Traceback (most recent call last):
        ValueError: a threshold of ratios must be above 0, got 0.0
    """
    for threshold in thresholds:
        if not threshold > 0:
            raise ValueError(f"a threshold of ratios must be above 0, got {threshold}")


def truncated_ratio(log_ratio: Tensor, threshold: float) -> Tensor:
    """``min(threshold, rho_t)``, truncated in log space and detached.

    Raises:
        ValueError: if ``threshold`` is not above 0.

    Examples:
        >>> import torch
        >>> truncated_ratio(torch.tensor([0.0, 900.0]), 1.2)
        tensor([1.0000, 1.2000])
    """
    check_thresholds(threshold)
    return log_ratio.detach().clamp(max=math.log(threshold)).exp()


def vtrace_advantage_estimate(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    log_ratio: Tensor,  # [*B, T, F] or [*B, T, 1]
    state_value: Tensor,  # [*B, T, F]
    next_state_value: Tensor,  # [*B, T, F]
    reward: Tensor,  # [*B, T, F]
    done: Tensor,  # [*B, T, F] bool
    terminated: Tensor | None = None,  # [*B, T, F] bool
    *,
    rho_threshold: float = 1.0,
    c_threshold: float = 1.0,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    """V-trace targets, and advantages that leave the weight of their own action to the policy channel.

    With ``rho_t = min(rho_threshold, w_t)``, ``c_t = lmbda * min(c_threshold, w_t)`` and ``w_t = pi(a_t)/mu(a_t)``::

        X_t = rho_t*delta_t + gamma*c_t*X_{t+1}           X = 0 past the end of a trajectory
        value_target_t = V_t + X_t
        advantage_t = R_t + gamma*value_target_{t+1} - V_t = delta_t + gamma*X_{t+1}

    Source: IMPALA (arXiv 1802.01561), whose policy gradient multiplies the advantage by another truncated ratio: that
    is :func:`~torchrl_copc.objectives.policy.truncated_weight`.
    :func:`~torchrl.objectives.value.functional.vtrace_advantage_estimate` includes that weight, walks over the steps
    one by one and has no ``lmbda``.

    Args:
        gamma: discount per step.
        lmbda: trace decay; the paper has 1.
        log_ratio: frozen learner log-prob minus behaviour log-prob of each action, nats.
        state_value, next_state_value, reward, done, terminated: see
            :func:`~torchrl_copc.value.gae.token_gae_advantage_estimate`.
        rho_threshold: largest weight of a residual; decides whose value function is estimated.
        c_threshold: largest weight along the trace.
        time_dim: dimension of time.

    Returns:
        ``(advantage, value_target)``, each ``[*B, T, F]``.

    Raises:
        ValueError: if shapes differ, or a threshold is not above 0.

    Examples:
        >>> import torch
        >>> value, reward = torch.zeros(1, 2, 1), torch.tensor([0.0, 1.0]).view(1, 2, 1)
        >>> log_ratio = torch.tensor([-0.5, 2.0]).view(1, 2, 1)
        >>> advantage, target = vtrace_advantage_estimate(1.0, 1.0, log_ratio, value, value, reward, reward > 0)
        >>> advantage.flatten(), target.flatten()
        (tensor([1., 1.]), tensor([0.6065, 1.0000]))
    """
    delta = td_residual(gamma, state_value, next_state_value, reward, done, terminated, log_ratio)
    trace = flow(gamma * lmbda * truncated_ratio(log_ratio, c_threshold), done, delta)
    x = backward_scan(trace, truncated_ratio(log_ratio, rho_threshold) * delta, time_dim=time_dim)
    return delta + flow(gamma * following(x, time_dim=time_dim), done, delta), state_value + x


@register_value_estimator(
    OffPolicyValueEstimators.TOKEN_VTRACE,
    default_kwargs={"gamma": 1.0, "lmbda": 1.0, "differentiable": False},
)
class TokenVTrace(OffPolicyEstimator):
    """V-trace, see :func:`vtrace_advantage_estimate`.

    Unlike :class:`~torchrl.objectives.value.VTrace` it evaluates the *stored* action (or reads its log-prob) and leaves
    the policy-gradient weight to the loss.

    Keyword Args:
        lmbda (float or Tensor): trace decay. Defaults to ``1.0``.
        rho_threshold (float): largest weight of a residual. Defaults to ``1.0``.
        c_threshold (float): largest weight along the trace. Defaults to ``1.0``.
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
        >>> TokenVTrace(value_network=None)(tokens)["advantage"].flatten()
        tensor([0.3679, 1.0000, 1.0000])
    """

    unclipped: ClassVar[dict[str, Any]] = {"rho_threshold": math.inf, "c_threshold": math.inf}

    def __init__(
        self,
        *,
        value_network: TensorDictModuleBase | None,
        lmbda: float | Tensor = 1.0,
        rho_threshold: float = 1.0,
        c_threshold: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(value_network=value_network, lmbda=lmbda, **kwargs)
        check_thresholds(rho_threshold, c_threshold)
        self.rho_threshold, self.c_threshold = rho_threshold, c_threshold

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
        return vtrace_advantage_estimate(
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
            time_dim=time_dim,
        )

    @property
    def log_weight_bounds(self) -> tuple[float, float]:
        return -math.inf, math.log(self.rho_threshold)
