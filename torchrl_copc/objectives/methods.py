"""The other methods as loss modules: each names its policy channel and its default value estimator.

Settings beside a method's own are those of :class:`~torchrl_copc.objectives.PolicyCriticLoss`. The defaults are the
papers'; where a paper has none, the config of the method says "ours".

Examples:
    >>> import torch
    >>> from tensordict import TensorDict
    >>> from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
    >>> from tensordict.nn import TensorDictModule
    >>> actor = ProbabilisticTensorDictSequential(
    ...     TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["logits"]),
    ...     ProbabilisticTensorDictModule(
    ...         in_keys=["logits"],
    ...         out_keys=["action"],
    ...         distribution_class=torch.distributions.Categorical,
    ...         return_log_prob=True,
    ...     ),
    ... )
    >>> critic = TensorDictModule(
    ...     torch.nn.Linear(3, 1), in_keys=["observation"], out_keys=["state_value"]
    ... )
    >>> data = actor(TensorDict({"observation": torch.randn(4, 5, 3)}, batch_size=[4, 5]))
    >>> end = torch.tensor([False, False, False, False, True]).view(1, 5, 1).expand(4, 5, 1)
    >>> after = {"observation": torch.randn(4, 5, 3), "reward": end.float(), "done": end, "terminated": end}
    >>> data["next"] = TensorDict(after, batch_size=[4, 5])
    >>> for method in (AsyncPPOLoss, SAOLoss, AReaLLoss, VTraceLoss, BRACELoss, RetraceLoss):
    ...     loss = method(actor, critic)
    ...     losses = loss(data)
    ...     (losses["loss_objective"] + losses["loss_critic"]).backward()
"""

from __future__ import annotations

from typing import Any

from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_copc.objectives.base import PolicyCriticLoss
from torchrl_copc.objectives.policy import (
    PolicyTerm,
    clipped_surrogate,
    decoupled_clip,
    truncated_weight,
    two_sided_mask,
)
from torchrl_copc.value.estimator import OffPolicyValueEstimators


class _ClippedSurrogateLoss(PolicyCriticLoss):
    """The methods that share PPO's policy channel."""

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        critic_network: TensorDictModuleBase | None = None,
        *,
        eps_low: float = 0.2,
        eps_high: float = 0.2,
        **kwargs: Any,
    ) -> None:
        super().__init__(actor_network, critic_network, **kwargs)
        self.eps_low, self.eps_high = eps_low, eps_high

    @property
    def reads_frozen(self) -> bool:
        return False

    def policy_term(self, log_ratio: Tensor, frozen_log_ratio: Tensor, advantage: Tensor) -> PolicyTerm:
        return clipped_surrogate(
            log_ratio, frozen_log_ratio, advantage, eps_low=self.eps_low, eps_high=self.eps_high
        )


class AsyncPPOLoss(_ClippedSurrogateLoss):
    """PPO against the behaviour policy, with GAE: :func:`~torchrl_copc.objectives.policy.clipped_surrogate`.

    The clip is around the policy that sampled each token, however old. Source: PPO (arXiv 1707.06347).

    Args:
        actor_network (TensorDictModule): see :class:`~torchrl_copc.objectives.PolicyCriticLoss`.
        critic_network (TensorDictModule, optional): see there.

    Keyword Args:
        eps_low (float): width of the clip below 1. Defaults to ``0.2``.
        eps_high (float): width of the clip above 1; larger is DAPO's clip-higher. Defaults to ``0.2``.
        lmbda_critic (float, optional): trace decay of the value target. Defaults to ``lmbda``.
        **kwargs: of :class:`~torchrl_copc.objectives.PolicyCriticLoss`.

    Examples:
        >>> loss = AsyncPPOLoss(actor, critic, eps_high=0.28)  # doctest: +SKIP
    """

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        critic_network: TensorDictModuleBase | None = None,
        *,
        eps_low: float = 0.2,
        eps_high: float = 0.2,
        lmbda_critic: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(actor_network, critic_network, eps_low=eps_low, eps_high=eps_high, **kwargs)
        self.lmbda_critic = lmbda_critic

    def estimator_settings(self) -> dict[str, Any]:
        return {"lmbda_critic": self.lmbda_critic}


class SAOLoss(PolicyCriticLoss):
    """SAO: :func:`~torchrl_copc.objectives.policy.two_sided_mask`, and GAE with a length-adaptive decay.

    Source: SAO (arXiv 2607.07508). ``lmbda`` is used only with ``alpha=None``.

    Args:
        actor_network (TensorDictModule): see :class:`~torchrl_copc.objectives.PolicyCriticLoss`.
        critic_network (TensorDictModule, optional): see there.

    Keyword Args:
        eps_low (float): width of the mask below 1; the paper has 0.3 on maths. Defaults to ``0.8``.
        eps_high (float): width of the mask above 1; the paper has 5.0 on maths. Defaults to ``3.0``.
        alpha (float, optional): of :func:`~torchrl_copc.value.length_adaptive_lmbda`. Defaults to ``1.5``.
        lmbda_critic (float, optional): trace decay of the value target. Defaults to ``1.0``.
        **kwargs: of :class:`~torchrl_copc.objectives.PolicyCriticLoss`.

    Examples:
        >>> loss = SAOLoss(actor, critic)  # doctest: +SKIP
    """

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        critic_network: TensorDictModuleBase | None = None,
        *,
        eps_low: float = 0.8,
        eps_high: float = 3.0,
        alpha: float | None = 1.5,
        lmbda_critic: float | None = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(actor_network, critic_network, **kwargs)
        self.eps_low, self.eps_high = eps_low, eps_high
        self.alpha, self.lmbda_critic = alpha, lmbda_critic

    @property
    def reads_frozen(self) -> bool:
        return False

    def policy_term(self, log_ratio: Tensor, frozen_log_ratio: Tensor, advantage: Tensor) -> PolicyTerm:
        return two_sided_mask(
            log_ratio, frozen_log_ratio, advantage, eps_low=self.eps_low, eps_high=self.eps_high
        )

    def estimator_settings(self) -> dict[str, Any]:
        return {"alpha": self.alpha, "lmbda_critic": self.lmbda_critic}


class AReaLLoss(PolicyCriticLoss):
    """AReaL's decoupled PPO: :func:`~torchrl_copc.objectives.policy.decoupled_clip`, and GAE with ``lmbda=1``.

    Source: AReaL (arXiv 2505.24298).

    Args:
        actor_network (TensorDictModule): see :class:`~torchrl_copc.objectives.PolicyCriticLoss`.
        critic_network (TensorDictModule, optional): see there.

    Keyword Args:
        eps_low (float): width of the clip around the frozen learner below 1. Defaults to ``0.2``.
        eps_high (float): width above 1. Defaults to ``0.2``.
        weight_cap (float): tokens with a larger frozen ratio are left out. Defaults to ``5.0``.
        lmbda (float): trace decay. Defaults to ``1.0``.
        **kwargs: of :class:`~torchrl_copc.objectives.PolicyCriticLoss`.

    Examples:
        >>> loss = AReaLLoss(actor, critic)  # doctest: +SKIP
    """

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        critic_network: TensorDictModuleBase | None = None,
        *,
        eps_low: float = 0.2,
        eps_high: float = 0.2,
        weight_cap: float = 5.0,
        lmbda: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(actor_network, critic_network, lmbda=lmbda, **kwargs)
        self.eps_low, self.eps_high, self.weight_cap = eps_low, eps_high, weight_cap

    def policy_term(self, log_ratio: Tensor, frozen_log_ratio: Tensor, advantage: Tensor) -> PolicyTerm:
        return decoupled_clip(
            log_ratio,
            frozen_log_ratio,
            advantage,
            eps_low=self.eps_low,
            eps_high=self.eps_high,
            weight_cap=self.weight_cap,
        )


class VTraceLoss(PolicyCriticLoss):
    """V-trace actor-critic: :func:`~torchrl_copc.objectives.policy.truncated_weight` and V-trace targets.

    Source: IMPALA (arXiv 1802.01561), without advantage normalisation and value clipping.

    Args:
        actor_network (TensorDictModule): see :class:`~torchrl_copc.objectives.PolicyCriticLoss`.
        critic_network (TensorDictModule, optional): see there.

    Keyword Args:
        policy_threshold (float): largest weight of the policy gradient. Defaults to ``1.0``.
        rho_threshold (float): largest weight of a residual. Defaults to ``1.0``.
        c_threshold (float): largest weight along the trace. Defaults to ``1.0``.
        lmbda (float): trace decay. Defaults to ``1.0``.
        **kwargs: of :class:`~torchrl_copc.objectives.PolicyCriticLoss`.

    Examples:
        >>> loss = VTraceLoss(actor, critic)  # doctest: +SKIP
    """

    default_value_estimator = OffPolicyValueEstimators.TOKEN_VTRACE

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        critic_network: TensorDictModuleBase | None = None,
        *,
        policy_threshold: float = 1.0,
        rho_threshold: float = 1.0,
        c_threshold: float = 1.0,
        lmbda: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(actor_network, critic_network, lmbda=lmbda, **kwargs)
        self.policy_threshold = policy_threshold
        self.rho_threshold, self.c_threshold = rho_threshold, c_threshold

    def policy_term(self, log_ratio: Tensor, frozen_log_ratio: Tensor, advantage: Tensor) -> PolicyTerm:
        return truncated_weight(log_ratio, frozen_log_ratio, advantage, threshold=self.policy_threshold)

    def estimator_settings(self) -> dict[str, Any]:
        return {"rho_threshold": self.rho_threshold, "c_threshold": self.c_threshold}


class BRACELoss(_ClippedSurrogateLoss):
    """BRACE: the clipped surrogate, and windowed V-trace with a terminal correction.

    :func:`~torchrl_copc.value.brace_advantage_estimate` says what about the advantage is open. Source: BRACE (arXiv
    2609.09783).

    Args:
        actor_network (TensorDictModule): see :class:`~torchrl_copc.objectives.PolicyCriticLoss`.
        critic_network (TensorDictModule, optional): see there.

    Keyword Args:
        eps_low (float): width of the clip below 1. Defaults to ``0.2``.
        eps_high (float): width of the clip above 1. Defaults to ``0.28``.
        rho_threshold (float): largest weight of a residual. Defaults to ``1.2``.
        c_threshold (float): largest weight along the trace. Defaults to ``1.1``.
        window (int): steps. Defaults to ``100``.
        **kwargs: of :class:`~torchrl_copc.objectives.PolicyCriticLoss`.

    Examples:
        >>> loss = BRACELoss(actor, critic, clip_value=0.5)  # doctest: +SKIP
    """

    default_value_estimator = OffPolicyValueEstimators.BRACE

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        critic_network: TensorDictModuleBase | None = None,
        *,
        eps_low: float = 0.2,
        eps_high: float = 0.28,
        rho_threshold: float = 1.2,
        c_threshold: float = 1.1,
        window: int = 100,
        **kwargs: Any,
    ) -> None:
        super().__init__(actor_network, critic_network, eps_low=eps_low, eps_high=eps_high, **kwargs)
        self.rho_threshold, self.c_threshold, self.window = rho_threshold, c_threshold, window

    def estimator_settings(self) -> dict[str, Any]:
        return {"rho_threshold": self.rho_threshold, "c_threshold": self.c_threshold, "window": self.window}


class RetraceLoss(_ClippedSurrogateLoss):
    """The clipped surrogate with :func:`~torchrl_copc.value.retrace_advantage_estimate`.

    The form of Retrace (arXiv 1606.02647) with a state-value critic is this project's.

    Args:
        actor_network (TensorDictModule): see :class:`~torchrl_copc.objectives.PolicyCriticLoss`.
        critic_network (TensorDictModule, optional): see there.

    Keyword Args:
        eps_low (float): width of the clip below 1. Defaults to ``0.2``.
        eps_high (float): width of the clip above 1. Defaults to ``0.2``.
        **kwargs: of :class:`~torchrl_copc.objectives.PolicyCriticLoss`.

    Examples:
        >>> loss = RetraceLoss(actor, critic)  # doctest: +SKIP
    """

    default_value_estimator = OffPolicyValueEstimators.RETRACE
