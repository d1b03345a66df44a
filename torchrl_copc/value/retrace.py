"""Retrace for a state-value critic, as a function and as a TorchRL value estimator."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from torch import Tensor
from torchrl.objectives.utils import register_value_estimator

from torchrl_copc.value.estimator import OffPolicyEstimator, OffPolicyValueEstimators
from torchrl_copc.value.scan import backward_scan
from torchrl_copc.value.td import flow, following, td_residual
from torchrl_copc.value.vtrace import truncated_ratio


def retrace_advantage_estimate(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    log_ratio: Tensor,  # [*B, T, F] or [*B, T, 1]
    state_value: Tensor,  # [*B, T, F]
    next_state_value: Tensor,  # [*B, T, F]
    reward: Tensor,  # [*B, T, F]
    done: Tensor,  # [*B, T, F] bool
    terminated: Tensor | None = None,  # [*B, T, F] bool
    *,
    threshold: float = 1.0,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    """Retrace's trace on TD residuals of a state-value critic.

    With ``c_t = lmbda * min(1, pi(a_t)/mu(a_t))``::

        advantage_t = delta_t + gamma*c_{t+1}*advantage_{t+1}        0 past the end of a trajectory
        value_target_t = V_t + min(1, pi(a_t)/mu(a_t)) * advantage_t

    Retrace (arXiv 1606.02647) corrects action values: its first residual is unweighted, as in the advantage here. The
    form with a state-value critic is this project's, since the critics here have no action values.

    Args:
        gamma: discount per step.
        lmbda: trace decay, a number or a tensor that broadcasts to ``[*B, T, 1]``.
        log_ratio: frozen learner log-prob minus behaviour log-prob of each action, nats.
        state_value, next_state_value, reward, done, terminated: see
            :func:`~torchrl_copc.value.gae.token_gae_advantage_estimate`.
        threshold: largest ratio, 1 in Retrace; only diagnostics take the limit off.
        time_dim: dimension of time.

    Returns:
        ``(advantage, value_target)``, each ``[*B, T, F]``.

    Raises:
        ValueError: if shapes differ, or the threshold is not above 0.

    Examples:
        >>> import torch
        >>> value, reward = torch.zeros(1, 2, 1), torch.tensor([0.0, 1.0]).view(1, 2, 1)
        >>> log_ratio = torch.tensor([2.0, -0.5]).view(1, 2, 1)
        >>> advantage, target = retrace_advantage_estimate(1.0, 1.0, log_ratio, value, value, reward, reward > 0)
        >>> advantage.flatten(), target.flatten()
        (tensor([0.6065, 1.0000]), tensor([0.6065, 0.6065]))
    """
    delta = td_residual(gamma, state_value, next_state_value, reward, done, terminated, log_ratio)
    ratio = truncated_ratio(log_ratio, threshold)
    trace = gamma * following(lmbda * ratio.expand_as(delta), time_dim=time_dim)
    advantage = backward_scan(flow(trace, done, delta), delta, time_dim=time_dim)
    return advantage, state_value + ratio * advantage


@register_value_estimator(
    OffPolicyValueEstimators.RETRACE, default_kwargs={"gamma": 1.0, "lmbda": 0.95, "differentiable": False}
)
class RetraceEstimator(OffPolicyEstimator):
    """Retrace for a state-value critic, see :func:`retrace_advantage_estimate`.

    Keyword Args:
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
        >>> RetraceEstimator(value_network=None, lmbda=1.0)(tokens)["advantage"].flatten()
        tensor([0.3679, 1.0000, 1.0000])
    """

    unclipped: ClassVar[dict[str, Any]] = {"threshold": math.inf}
    threshold: ClassVar[float] = 1.0

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
        return retrace_advantage_estimate(
            gamma,
            self.lmbda.to(reward.device),
            log_ratio,
            value,
            next_value,
            reward,
            done,
            terminated,
            threshold=self.threshold,
            time_dim=time_dim,
        )

    @property
    def log_weight_bounds(self) -> tuple[float, float]:
        return -math.inf, 0.0
