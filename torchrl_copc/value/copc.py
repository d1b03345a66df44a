"""COPC's advantage channel as a TorchRL value estimator."""

from __future__ import annotations

import math
import warnings
from typing import Any, ClassVar

from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.objectives.utils import register_value_estimator

from torchrl_copc.value.estimator import OffPolicyEstimator, OffPolicyValueEstimators
from torchrl_copc.value.functional import (
    AdvantageForm,
    Trace,
    check_form,
    copc_advantage_estimate,
    log_ratio_bounds,
)
from torchrl_copc.value.inputs import trajectory_length

LONG_RESPONSE = 1024


@register_value_estimator(
    OffPolicyValueEstimators.COPC, default_kwargs={"gamma": 1.0, "lmbda": 0.95, "differentiable": False}
)
class COPCEstimator(OffPolicyEstimator):
    """Clipped-ratio advantage estimation for data sampled by an older policy.

    Each TD residual is weighted by ``c_t = clip(pi(a_t)/mu(a_t), I(eta))``, where ``mu`` sampled the action
    and ``pi`` is the learner *before* the update;
    :func:`~torchrl_copc.value.functional.copc_advantage_estimate` has the formulas. ``eta=0`` is GAE. Reads
    and writes ordinary TorchRL data of batch size ``[*B, T]``: control rollouts, or policy tokens of many
    responses packed along time with ``done`` on the last token of each. Source: COPC (arXiv 2610.09597).

    **What is open.** The description of the method that this class follows fixes neither whether the
    advantage repeats the first ratio (``advantage="full"``) or not (``"continuation"``), nor whether the
    weights multiply along the response (``trace="product"``) or weight each residual once (``"step"``). The
    defaults, ``step`` and ``full``, read "clipped-ratio weighting of TD residuals for return and advantage
    estimation" literally. What this project found by exact enumeration on small random token MDPs
    (``python scripts/theory.py``, committed in ``results/theory``):

    - ``full`` reproduces the published sign reversal: raising ``eta`` here from .25 to .75 lowers the exact
      gradient error by .25 ± .09 % when the policy mask is narrow (``eta_policy=.25``) and raises it by
      7.9 ± .5 % when it is wide (.75). ``continuation`` shows no reversal (-.2 ± .1 % and -1.3 ± .2 %) and has
      less error than GAE over the whole map.
    - The actor's weight already holds the ratio of its own token, which makes ``continuation`` the unbiased
      form: with exact ratios, ``product`` and ``lmbda=1``, ``E_mu[A_t|s,a] = Q^pi(s,a) - V(s)`` for
      any ``V``, against ``rho*(Q^pi - V)`` for ``full``.
    - ``product`` at ``lmbda=1`` degenerates on long responses: with 20 % of tokens at a log-ratio sd of .05
      the effective sample size of the product is .60 at 1k tokens and about .02 at 8k. ``cut`` (``min(1, c)``
      along the trace) kills terminal reward. ``step`` has neither problem.

    TorchRL's own losses take an instance (``ClipPPOLoss(...).make_value_estimator(COPCEstimator(value_network=critic,
    actor_network=actor))``); this package's losses also take the registered name ``"copc"``.

    A warning is issued once for ``product`` with ``lmbda > .999`` and a response longer than 1,024 steps.

    The learner's log-probs are read from ``learner_log_prob``. When that entry is missing and
    ``actor_network`` is given, the network evaluates the *stored* action without gradient and the result is
    written to the entry, so that :class:`~torchrl_copc.objectives.COPCLoss` finds the same frozen ratio in
    every later minibatch. Without either, the estimator raises: a missing ratio is never taken as 1. An entry
    that is present is trusted; drop it before data is reused for a later update.

    Keyword Args:
        gamma (float or Tensor): discount per step. Defaults to ``1.0``.
        lmbda (float or Tensor): trace decay; a tensor must broadcast to ``[*B, T, 1]``. Defaults to ``0.95``.
        value_network (TensorDictModule, optional): critic. ``None`` reads the values from the data, at
            ``value`` and ``("next", value)``.
        actor_network (TensorDictModule, optional): evaluates stored actions when ``learner_log_prob`` is
            missing: a probabilistic actor, or a module that writes ``log_prob``. Defaults to ``None``.
        eta (float): width of the interval on the advantage side. Defaults to ``0.5``.
        eps_low (float): width of the interval below 1 at ``eta=1``. Defaults to ``0.4``.
        eps_high (float): width of the interval above 1 at ``eta=1``. Defaults to ``0.56``.
        trace (str): ``"step"``, ``"product"`` or ``"cut"``. Defaults to ``"step"``.
        advantage (str): ``"full"`` or ``"continuation"``. Defaults to ``"full"``.
        lmbda_critic (float or Tensor, optional): trace decay of the value target. Defaults to ``lmbda``.
        differentiable (bool): keep the graph through the values (never through the ratios). Defaults to
            ``False``.
        skip_existing (bool, optional): reuse values that are already in the data instead of calling the
            critic. The actor is always evaluated afresh.
        shifted (bool): evaluate values and next values in one call, see
            :class:`~torchrl.objectives.value.GAE`. Defaults to ``False``.
        device (torch.device, optional): device of the buffers.
        time_dim (int, optional): dimension of time in the batch size. Defaults to the dimension named
            ``"time"``, else the last one.
        **kwargs: further options of :class:`~torchrl.objectives.value.ValueEstimatorBase`.

    Raises:
        ValueError: for an unknown ``trace`` or ``advantage`` or a negative interval width.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> done = torch.tensor([False, False, True, False, True]).view(1, 5, 1)  # two packed responses
        >>> tokens = TensorDict(
        ...     {
        ...         "state_value": torch.zeros(1, 5, 1),
        ...         "action_log_prob": torch.full((1, 5, 1), -1.0),
        ...         "learner_log_prob": torch.tensor([-1.0, -1.0, -1.0, -1.0, -9.0]).view(1, 5, 1),
        ...         "next": {
        ...             "state_value": torch.zeros(1, 5, 1),
        ...             "reward": torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0]).view(1, 5, 1),
        ...             "done": done,
        ...             "terminated": done,
        ...         },
        ...     },
        ...     batch_size=[1, 5],
        ... )
        >>> estimator = COPCEstimator(value_network=None, lmbda=1.0)
        >>> estimator(tokens)["advantage"].flatten()
        tensor([1.0000, 1.0000, 1.0000, 0.8000, 0.8000])
    """

    unclipped: ClassVar[dict[str, Any]] = {"eta": 1.0, "eps_low": math.inf, "eps_high": math.inf}
    lmbda_critic: Tensor | None

    def __init__(
        self,
        *,
        gamma: float | Tensor = 1.0,
        lmbda: float | Tensor = 0.95,
        value_network: TensorDictModuleBase | None,
        actor_network: TensorDictModuleBase | None = None,
        eta: float = 0.5,
        eps_low: float = 0.4,
        eps_high: float = 0.56,
        trace: Trace = "step",
        advantage: AdvantageForm = "full",
        lmbda_critic: float | Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            gamma=gamma, lmbda=lmbda, value_network=value_network, actor_network=actor_network, **kwargs
        )
        check_form(trace, advantage)
        log_ratio_bounds(eta, eps_low, eps_high)
        self._register("lmbda_critic", lmbda_critic)
        self.eta, self.eps_low, self.eps_high = eta, eps_low, eps_high
        self.trace: Trace = trace
        self.advantage: AdvantageForm = advantage
        self._warned = False

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
        self._warn_degenerate(done, time_dim)
        return copc_advantage_estimate(
            gamma,
            self.lmbda.to(reward.device),
            log_ratio,
            value,
            next_value,
            reward,
            done,
            terminated,
            eta=self.eta,
            eps_low=self.eps_low,
            eps_high=self.eps_high,
            trace=self.trace,
            advantage=self.advantage,
            lmbda_critic=None if self.lmbda_critic is None else self.lmbda_critic.to(reward.device),
            time_dim=time_dim,
        )

    @property
    def log_weight_bounds(self) -> tuple[float, float]:
        return log_ratio_bounds(self.eta, self.eps_low, self.eps_high)

    def _warn_degenerate(self, done: Tensor, time_dim: int) -> None:
        if self._warned or self.trace != "product" or not bool((self.lmbda > 0.999).any()):
            return
        length = int(trajectory_length(done, time_dim=time_dim).max())
        if length > LONG_RESPONSE:
            self._warned = True
            warnings.warn(
                f"trace='product' with lmbda > 0.999 on a response of {length} steps: the product of ratios "
                "has a small "
                "effective sample size beyond about 1,000 steps; use trace='step' or a smaller lmbda",
                stacklevel=2,
            )
