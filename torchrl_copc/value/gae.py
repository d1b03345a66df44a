"""Generalized advantage estimation over policy tokens: separate decays, and decays that adapt to the length."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.objectives.utils import register_value_estimator

from torchrl_copc.value.estimator import OffPolicyEstimator, OffPolicyValueEstimators
from torchrl_copc.value.functional import copc_advantage_estimate
from torchrl_copc.value.inputs import trajectory_length
from torchrl_copc.value.scan import backward_scan
from torchrl_copc.value.td import flow, td_residual


def length_adaptive_lmbda(length: Tensor, *, alpha: float = 1.5) -> Tensor:
    """``lambda = 1 - 1/(alpha * length)``, clamped to [0, 1]: longer responses look further ahead.

    Source: VAPO (arXiv 2504.05118), used by SAO (arXiv 2607.07508) with ``alpha = 1.5``.

    Args:
        length: policy tokens of the response each token belongs to, any shape.
        alpha: above 0.

    Raises:
        ValueError: if ``alpha`` is not above 0.

    Examples:
        >>> import torch
        >>> length_adaptive_lmbda(torch.tensor([1, 2, 100]), alpha=0.5)
        tensor([0.0000, 0.0000, 0.9800])
    """
    if not alpha > 0:
        raise ValueError(f"alpha must be above 0, got {alpha}")
    return (1 - 1 / (alpha * length)).clamp(0.0, 1.0)


def token_gae_advantage_estimate(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    state_value: Tensor,  # [*B, T, F]
    next_state_value: Tensor,  # [*B, T, F]
    reward: Tensor,  # [*B, T, F]
    done: Tensor,  # [*B, T, F] bool
    terminated: Tensor | None = None,  # [*B, T, F] bool
    *,
    lmbda_critic: float | Tensor | None = None,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    """GAE whose advantage and value target may decay differently.

    ``A_t = delta_t + gamma*lmbda*A_{t+1}``, and ``V_t + A_t`` with ``lmbda_critic`` as the target. Source: GAE (arXiv
    1506.02438).

    Args:
        gamma: discount per step.
        lmbda: trace decay of the advantage, a number or a tensor that broadcasts to ``[*B, T, 1]``.
        state_value: value of the state in which the action was taken, ``[*B, T, F]``, reward units.
        next_state_value: value of the state it led to; ignored where ``terminated``.
        reward: reward of the action.
        done: True on the last step of each trajectory; nothing flows back across it.
        terminated: True where there is nothing to bootstrap from. Defaults to ``done``.
        lmbda_critic: trace decay of the value target; ``None`` means ``lmbda``, and a single scan.
        time_dim: dimension of time.

    Returns:
        ``(advantage, value_target)``, each ``[*B, T, F]``.

    Raises:
        ValueError: if shapes differ.

    Examples:
        >>> import torch
        >>> value, reward = torch.zeros(1, 3, 1), torch.tensor([0.0, 0.0, 1.0]).view(1, 3, 1)
        >>> done = reward > 0
        >>> advantage, target = token_gae_advantage_estimate(
        ...     1.0, 0.5, value, value, reward, done, lmbda_critic=1.0
        ... )
        >>> advantage.flatten(), target.flatten()
        (tensor([0.2500, 0.5000, 1.0000]), tensor([1., 1., 1.]))
    """
    delta = td_residual(gamma, state_value, next_state_value, reward, done, terminated)
    advantage = backward_scan(flow(gamma * lmbda, done, delta), delta, time_dim=time_dim)
    if lmbda_critic is None:
        return advantage, state_value + advantage
    gap = backward_scan(flow(gamma * lmbda_critic, done, delta), delta, time_dim=time_dim)
    return advantage, state_value + gap


@register_value_estimator(
    OffPolicyValueEstimators.TOKEN_GAE, default_kwargs={"gamma": 1.0, "lmbda": 0.95, "differentiable": False}
)
class TokenGAE(OffPolicyEstimator):
    """GAE over policy tokens, see :func:`token_gae_advantage_estimate`; behaviour log-probs are not needed.

    Keyword Args:
        lmbda_critic (float or Tensor, optional): trace decay of the value target. Defaults to that of the advantage.
        alpha (float, optional): replaces ``lmbda`` by :func:`length_adaptive_lmbda`. Defaults to ``None``.
        **kwargs: of :class:`~torchrl_copc.value.estimator.OffPolicyEstimator`.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> end = torch.tensor([False, True, True]).view(1, 3, 1)  # packed responses of two tokens and one
        >>> zeros = torch.zeros(1, 3, 1)
        >>> after = {"state_value": zeros, "reward": end.float(), "done": end, "terminated": end}
        >>> tokens = TensorDict({"state_value": zeros, "next": after}, batch_size=[1, 3])
        >>> TokenGAE(value_network=None, alpha=1.0)(tokens)["advantage"].flatten()
        tensor([0.5000, 1.0000, 1.0000])
    """

    needs_ratio = False
    lmbda_critic: Tensor | None

    def __init__(
        self,
        *,
        value_network: TensorDictModuleBase | None,
        lmbda_critic: float | Tensor | None = None,
        alpha: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(value_network=value_network, **kwargs)
        if alpha is not None:
            length_adaptive_lmbda(torch.ones(1), alpha=alpha)
        self._register("lmbda_critic", lmbda_critic)
        self.alpha = alpha

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
        return token_gae_advantage_estimate(
            gamma,
            self._decay(reward, done, time_dim),
            value,
            next_value,
            reward,
            done,
            terminated,
            lmbda_critic=None if self.lmbda_critic is None else self.lmbda_critic.to(reward.device),
            time_dim=time_dim,
        )

    def estimate_unclipped(self, *tensors: Tensor, time_dim: int, **entries: Tensor) -> tuple[Tensor, Tensor]:
        """COPC's ``step`` and ``full`` without a clip: GAE itself has no ratios to take a clip off."""
        gamma, log_ratio, value, next_value, reward, done, terminated = tensors
        return copc_advantage_estimate(
            gamma,
            self._decay(reward, done, time_dim),
            log_ratio,
            value,
            next_value,
            reward,
            done,
            terminated,
            eta=1.0,
            eps_low=math.inf,
            eps_high=math.inf,
            lmbda_critic=None if self.lmbda_critic is None else self.lmbda_critic.to(reward.device),
            time_dim=time_dim,
        )

    def _decay(self, reward: Tensor, done: Tensor, time_dim: int) -> Tensor:
        if self.alpha is None:
            return self.lmbda.to(reward.device)
        return length_adaptive_lmbda(trajectory_length(done, time_dim=time_dim), alpha=self.alpha).to(reward)
