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
    >>> data["group_id"] = torch.zeros(4, 5, 1, dtype=torch.long)  # the same prompt four times
    >>> data["response_id"] = torch.arange(4).view(4, 1, 1).expand(4, 5, 1)
    >>> data["grad_sq_norm"] = torch.ones(4, 5, 1)
    >>> for method in (GRPOLoss, DAPOLoss, M2POLoss, VCPOLoss):
    ...     loss = method(actor)
    ...     loss(data.exclude("advantage"))["loss_objective"].backward()
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_copc.objectives.base import PolicyCriticLoss
from torchrl_copc.objectives.policy import (
    PolicyTerm,
    clipped_surrogate,
    decoupled_clip,
    sequence_ratio,
    truncated_weight,
    two_sided_mask,
)
from torchrl_copc.objectives.second_moment import (
    capped_second_moment_threshold,
    second_moment_clip,
    second_moment_mask,
    second_moment_threshold,
)
from torchrl_copc.value.estimator import OffPolicyValueEstimators
from torchrl_copc.value.functional import log_ratio_bounds


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
        log_ratio_bounds(1.0, eps_low, eps_high)  # refuses them now, not at the first batch

    @property
    def reads_frozen(self) -> bool:
        return False

    def policy_term(
        self, log_ratio: Tensor, frozen_log_ratio: Tensor, advantage: Tensor, **entries: Tensor
    ) -> PolicyTerm:
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
        self._check_settings()

    @property
    def reads_frozen(self) -> bool:
        return False

    def policy_term(
        self, log_ratio: Tensor, frozen_log_ratio: Tensor, advantage: Tensor, **entries: Tensor
    ) -> PolicyTerm:
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
        self._check_settings()

    def policy_term(
        self, log_ratio: Tensor, frozen_log_ratio: Tensor, advantage: Tensor, **entries: Tensor
    ) -> PolicyTerm:
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
        self._check_settings()

    def policy_term(
        self, log_ratio: Tensor, frozen_log_ratio: Tensor, advantage: Tensor, **entries: Tensor
    ) -> PolicyTerm:
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
        self._check_settings()

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


class GRPOLoss(_ClippedSurrogateLoss):
    """GRPO without its KL term: the clipped surrogate on group-relative advantages, without a critic.

    :class:`~torchrl_copc.value.GroupRelativeAdvantage` is the estimator; it reads ``group_id``. Source: GRPO (arXiv
    2402.03300).

    Args:
        actor_network (TensorDictModule): see :class:`~torchrl_copc.objectives.PolicyCriticLoss`.
        critic_network (TensorDictModule, optional): trained on the returns when given; the advantages do not use it.

    Keyword Args:
        eps_low (float): width of the clip below 1. Defaults to ``0.2``.
        eps_high (float): width of the clip above 1. Defaults to ``0.2``.
        **kwargs: of :class:`~torchrl_copc.objectives.PolicyCriticLoss`.

    Examples:
        >>> loss = GRPOLoss(actor)  # doctest: +SKIP
    """

    default_value_estimator = OffPolicyValueEstimators.GROUP_RELATIVE


class DAPOLoss(GRPOLoss):
    """DAPO's loss: GRPO with clip-higher.

    The rest of DAPO is not a matter of the loss: the mean over all tokens (``loss_weight``, or the default reduction
    on packed data) and dynamic sampling (``collector.dynamic_sampling`` in a training run). Overlong reward shaping is
    left out. Source: DAPO (arXiv 2503.14476).

    Args:
        actor_network (TensorDictModule): see :class:`GRPOLoss`.
        critic_network (TensorDictModule, optional): see there.

    Keyword Args:
        eps_low (float): width of the clip below 1. Defaults to ``0.2``.
        eps_high (float): width of the clip above 1. Defaults to ``0.28``.
        **kwargs: of :class:`~torchrl_copc.objectives.PolicyCriticLoss`.

    Examples:
        >>> loss = DAPOLoss(actor)  # doctest: +SKIP
    """

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        critic_network: TensorDictModuleBase | None = None,
        *,
        eps_low: float = 0.2,
        eps_high: float = 0.28,
        **kwargs: Any,
    ) -> None:
        super().__init__(actor_network, critic_network, eps_low=eps_low, eps_high=eps_high, **kwargs)


SecondMomentVariant = Literal["paper", "code"]


class M2POLoss(PolicyCriticLoss):
    """M2PO: a bound on the second moment of the log-ratios, solved once per batch; group-relative advantages.

    ``variant="paper"`` drops tokens (:func:`~torchrl_copc.objectives.second_moment.second_moment_mask`); ``"code"``
    clips, as the released code does (:func:`~torchrl_copc.objectives.second_moment.second_moment_clip`). The
    ``threshold`` is read from the data when it is there (see
    :meth:`~torchrl_copc.objectives.PolicyCriticLoss.batch_entries`), else solved from the tokens of the call. Source:
    M2PO (arXiv 2510.01161).

    Args:
        actor_network (TensorDictModule): see :class:`GRPOLoss`.
        critic_network (TensorDictModule, optional): see there.

    Keyword Args:
        variant (str): ``"paper"`` or ``"code"``. Defaults to ``"paper"``.
        limit (float): largest mean of the squared log-ratios of eligible tokens, nats squared. Defaults to ``0.04``.
        **kwargs: of :class:`~torchrl_copc.objectives.PolicyCriticLoss`.

    Raises:
        ValueError: for an unknown variant.

    Examples:
        >>> loss = M2POLoss(actor, variant="code")  # doctest: +SKIP
    """

    default_value_estimator = OffPolicyValueEstimators.GROUP_RELATIVE
    entries = ("threshold",)

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        critic_network: TensorDictModuleBase | None = None,
        *,
        variant: SecondMomentVariant = "paper",
        limit: float = 0.04,
        **kwargs: Any,
    ) -> None:
        if variant not in get_args(SecondMomentVariant):
            raise ValueError(
                f"variant must be one of {', '.join(get_args(SecondMomentVariant))}, got {variant!r}"
            )
        super().__init__(actor_network, critic_network, **kwargs)
        self.variant: SecondMomentVariant = variant
        self.limit = limit
        self._check_settings()

    def batch_entries(self, frozen_log_ratio: Tensor, advantage: Tensor) -> dict[str, Tensor]:
        solve = second_moment_threshold if self.variant == "paper" else capped_second_moment_threshold
        threshold = solve(frozen_log_ratio, advantage, limit=self.limit)
        # float64: tokens are compared with the log-ratio of one of them
        return {"threshold": torch.tensor(threshold, dtype=torch.float64, device=advantage.device)}

    def policy_term(
        self, log_ratio: Tensor, frozen_log_ratio: Tensor, advantage: Tensor, **entries: Tensor
    ) -> PolicyTerm:
        channel = second_moment_mask if self.variant == "paper" else second_moment_clip
        return channel(log_ratio, frozen_log_ratio, advantage, **entries)


class VCPOLoss(PolicyCriticLoss):
    """VCPO: one truncated ratio per response, and the baseline of least variance.

    :func:`~torchrl_copc.objectives.policy.sequence_ratio` and :class:`~torchrl_copc.value.MinimumVarianceAdvantage`;
    the data holds ``response_id``, ``group_id`` and ``grad_sq_norm``, and all tokens of a response are in one call. The
    method's step size is not a matter of the loss (``learner.ess_base`` in a training run). Source: VCPO (arXiv
    2602.17616).

    Args:
        actor_network (TensorDictModule): see :class:`GRPOLoss`.
        critic_network (TensorDictModule, optional): see there.

    Keyword Args:
        threshold (float): largest ratio of a response. Defaults to ``8.0``.
        **kwargs: of :class:`~torchrl_copc.objectives.PolicyCriticLoss`.

    Examples:
        >>> loss = VCPOLoss(actor)  # doctest: +SKIP
    """

    default_value_estimator = OffPolicyValueEstimators.MINIMUM_VARIANCE
    entries = ("response_id",)

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        critic_network: TensorDictModuleBase | None = None,
        *,
        threshold: float = 8.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(actor_network, critic_network, **kwargs)
        self.threshold = threshold
        self._check_settings()

    def policy_term(
        self, log_ratio: Tensor, frozen_log_ratio: Tensor, advantage: Tensor, **entries: Tensor
    ) -> PolicyTerm:
        return sequence_ratio(log_ratio, frozen_log_ratio, advantage, **entries, threshold=self.threshold)
