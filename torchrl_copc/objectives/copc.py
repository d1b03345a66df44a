"""COPC as a TorchRL loss module: ratio-masked actor, clipped-ratio advantages, critic."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_copc.objectives.aggregate import masked_mean
from torchrl_copc.objectives.base import PolicyCriticLoss
from torchrl_copc.objectives.policy import PolicyTerm, ratio_mask
from torchrl_copc.value.estimator import OffPolicyValueEstimators
from torchrl_copc.value.functional import AdvantageForm, Trace, check_form, log_ratio_bounds

MaskFrom = Literal["frozen", "current"]


class COPCLoss(PolicyCriticLoss):
    """Coupled off-policy correction: one ratio interval on the policy side, another on the advantage side.

    The actor term is ``-agg_t(M_t * r_t * A_t)``, where ``r_t = pi_theta(a_t)/mu(a_t)`` carries the gradient
    and ``M_t = 1[rho_t in I(eta_policy)]`` masks tokens whose ratio ``rho_t`` left the interval
    ``I(eta) = [max(0, 1 - eta*eps_low), 1 + eta*eps_high]``; smaller ``eta`` means a narrower interval.
    Masked tokens give exactly zero actor gradient, stay in the denominator and still train the critic. The
    advantages come from :class:`~torchrl_copc.value.COPCEstimator` with ``I(eta_advantage)``; its docstring
    says what about them is open. ``eta_advantage=0`` is GAE (the ablation without return correction). Source:
    COPC (arXiv 2610.09597).

    ``r_t`` drifts while several minibatches are taken from one batch, ``rho_t`` (the learner *before* the
    update) does not: it is read from ``learner_log_prob``, which ``loss.value_estimator(data)`` writes
    together with the advantage when it is missing. :meth:`forward` on data without an advantage does the same
    first; then the frozen learner is the current one.

    When the data holds ``loss_weight`` (see :func:`~torchrl_copc.objectives.aggregate.loss_weights`), each
    loss is ``sum(loss_weight * term)``, so that micro-batches and ranks add up to the gradient of the whole
    batch; otherwise ``reduction`` applies. Padding, marked as TorchRL marks it (``loss_mask_key``), changes
    nothing.

    :meth:`actor_loss` and :meth:`critic_loss` are the two halves of :meth:`forward`, for critic warm-up or
    several critic updates per actor update.

    Args:
        actor_network (TensorDictModule): a probabilistic actor (with ``get_dist``), or a module that writes
            the current ``log_prob`` (and ``entropy``) of the stored action.
        critic_network (TensorDictModule, optional): writes the state value. Without it only the actor is
            trained.

    Keyword Args:
        eta_policy (float): width of the interval of the mask. Defaults to ``0.5``.
        eta_advantage (float): width of the interval of the advantage weights. Defaults to ``0.5``.
        eps_low (float): width of both intervals below 1 at ``eta=1``. Defaults to ``0.4``.
        eps_high (float): width of both intervals above 1 at ``eta=1``. Defaults to ``0.56``.
        advantage (str): ``"full"`` or ``"continuation"``. Defaults to ``"full"``.
        trace (str): ``"step"``, ``"product"`` or ``"cut"``. Defaults to ``"step"``.
        gamma (float): discount per step. Defaults to ``1.0``.
        lmbda (float): trace decay. Defaults to ``0.95``.
        lmbda_critic (float, optional): trace decay of the value target. Defaults to ``lmbda``.
        mask_from (str): ``"frozen"`` decides the mask from ``rho_t``, once per batch; ``"current"`` from
            ``r_t``, afresh in every minibatch, which also stops a token that this update has moved enough: the
            better choice for many minibatches per batch. Defaults to ``"frozen"``.
        entropy_bonus (bool): add ``loss_entropy``. Defaults to ``False``: the method has no entropy term.
        entropy_coeff (float): weight of the entropy. Defaults to ``0.01``.
        samples_mc_entropy (int): samples for distributions without a closed-form entropy. Defaults to ``1``.
        critic_coeff (float, optional): weight of the critic loss; ``None`` leaves it out of :meth:`forward`.
            Defaults to ``1.0``.
        clip_value (float, optional): PPO's value clipping (arXiv 1707.06347): the larger of the squared
            errors of the value and of the value clipped to this distance from the frozen one. Defaults to
            ``None``.
        normalize_advantage (bool): standardise the advantage over the valid tokens of the call (masked ones
            included). Statistics are local: for micro-batches or ranks, standardise before. Defaults to
            ``False``.
        separate_losses (bool): parameters that both networks share get gradient from the actor only.
            Defaults to ``False``.
        functional (bool): whether parameters are extracted from the networks. Use ``False`` with FSDP or DDP.
            Defaults to ``True``.
        reduction (str): ``"mean"``, ``"sum"`` or ``"none"``. Defaults to ``"mean"``.
        device (torch.device, optional): device of the coefficients. Defaults to that of the parameters.

    Returns:
        TensorDict: ``loss_objective``; ``loss_critic`` with a critic; ``loss_entropy`` and ``entropy`` with
        ``entropy_bonus``; and detached metrics over valid tokens: ``kept_fraction``, ``ESS`` (of ``r``, in
        (0, 1]), ``kl_approx`` (k1, ``mean(-log r)``), ``kl_k3`` (``mean(r - 1 - log r)``), with
        ``mask_from="frozen"`` ``clip_fraction_low`` and ``clip_fraction_high`` (where ``rho`` leaves
        ``I(eta_advantage)``), ``explained_variance`` and, with ``clip_value``, ``value_clip_fraction``.

    Raises:
        ValueError: for unknown options or negative interval widths.

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
        >>> loss = COPCLoss(actor, critic)
        >>> data = actor(TensorDict({"observation": torch.randn(4, 5, 3)}, batch_size=[4, 5]))
        >>> data["next"] = TensorDict(
        ...     {
        ...         "observation": torch.randn(4, 5, 3),
        ...         "reward": torch.randn(4, 5, 1),
        ...         "done": torch.zeros(4, 5, 1, dtype=torch.bool),
        ...         "terminated": torch.zeros(4, 5, 1, dtype=torch.bool),
        ...     },
        ...     batch_size=[4, 5],
        ... )
        >>> _ = loss.value_estimator(data)  # frozen log-probs, advantages and targets, once per batch
        >>> losses = loss(data.reshape(-1)[:8])  # any minibatch of it
        >>> (losses["loss_objective"] + losses["loss_critic"]).backward()
        >>> losses["kept_fraction"]
        tensor(1.)
    """

    default_value_estimator = OffPolicyValueEstimators.COPC
    _frozen_remedy = ", or use mask_from='current'"

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        critic_network: TensorDictModuleBase | None = None,
        *,
        eta_policy: float = 0.5,
        eta_advantage: float = 0.5,
        eps_low: float = 0.4,
        eps_high: float = 0.56,
        advantage: AdvantageForm = "full",
        trace: Trace = "step",
        gamma: float = 1.0,
        lmbda: float = 0.95,
        lmbda_critic: float | None = None,
        mask_from: MaskFrom = "frozen",
        entropy_bonus: bool = False,
        entropy_coeff: float = 0.01,
        samples_mc_entropy: int = 1,
        critic_coeff: float | None = 1.0,
        clip_value: float | None = None,
        normalize_advantage: bool = False,
        separate_losses: bool = False,
        functional: bool = True,
        reduction: Literal["mean", "sum", "none"] = "mean",
        device: torch.device | None = None,
    ) -> None:
        check_form(trace, advantage)
        for eta in (eta_policy, eta_advantage):
            log_ratio_bounds(eta, eps_low, eps_high)
        if mask_from not in get_args(MaskFrom):
            raise ValueError(f"mask_from must be one of {', '.join(get_args(MaskFrom))}, got {mask_from!r}")
        super().__init__(
            actor_network,
            critic_network,
            gamma=gamma,
            lmbda=lmbda,
            entropy_bonus=entropy_bonus,
            entropy_coeff=entropy_coeff,
            samples_mc_entropy=samples_mc_entropy,
            critic_coeff=critic_coeff,
            clip_value=clip_value,
            normalize_advantage=normalize_advantage,
            separate_losses=separate_losses,
            functional=functional,
            reduction=reduction,
            device=device,
        )
        self.eta_policy, self.eta_advantage = eta_policy, eta_advantage
        self.eps_low, self.eps_high = eps_low, eps_high
        self.advantage: AdvantageForm = advantage
        self.trace: Trace = trace
        self.lmbda_critic = lmbda_critic
        self.mask_from: MaskFrom = mask_from

    @property
    def reads_frozen(self) -> bool:
        return self.mask_from == "frozen"

    def policy_term(
        self, log_ratio: Tensor, frozen_log_ratio: Tensor, advantage: Tensor, **entries: Tensor
    ) -> PolicyTerm:
        return ratio_mask(
            log_ratio,
            frozen_log_ratio,
            advantage,
            eta=self.eta_policy,
            eps_low=self.eps_low,
            eps_high=self.eps_high,
        )

    def estimator_settings(self) -> dict[str, Any]:
        return {
            "eta": self.eta_advantage,
            "eps_low": self.eps_low,
            "eps_high": self.eps_high,
            "trace": self.trace,
            "advantage": self.advantage,
            "lmbda_critic": self.lmbda_critic,
        }

    @property
    def _actor_metric_keys(self) -> list[str]:
        clipped = ["clip_fraction_low", "clip_fraction_high"] if self.mask_from == "frozen" else []
        return super()._actor_metric_keys + clipped

    def _actor_metrics(
        self, log_ratio: Tensor, frozen: Tensor, kept: Tensor, valid: Tensor | None
    ) -> dict[str, Tensor]:
        metrics = super()._actor_metrics(log_ratio, frozen, kept, valid)
        if self.mask_from == "frozen":
            low, high = log_ratio_bounds(self.eta_advantage, self.eps_low, self.eps_high)
            metrics["clip_fraction_low"] = masked_mean(frozen < low, valid)
            metrics["clip_fraction_high"] = masked_mean(frozen > high, valid)
        return metrics
