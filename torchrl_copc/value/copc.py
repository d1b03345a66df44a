"""COPC's advantage channel as a TorchRL value estimator."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, composite_lp_aggregate, dispatch, set_skip_existing
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor
from torchrl.objectives.utils import hold_out_net, register_value_estimator
from torchrl.objectives.value.advantages import (
    ValueEstimatorBase,
    _self_set_grad_enabled,
    _self_set_skip_existing,
)

from torchrl_copc.value.functional import (
    AdvantageForm,
    Trace,
    check_form,
    copc_advantage_estimate,
    log_ratio_bounds,
)
from torchrl_copc.value.inputs import (
    align,
    check_finite,
    expand_right,
    fill_padding,
    stored_action_log_prob,
    valid_steps,
)

LONG_RESPONSE = 1024


class OffPolicyValueEstimators(Enum):
    """Keys of this package's estimators in TorchRL's registry; lower-case names work too (``"copc"``)."""

    COPC = "COPC: clipped-ratio weighted TD residuals"


@register_value_estimator(
    OffPolicyValueEstimators.COPC, default_kwargs={"gamma": 1.0, "lmbda": 0.95, "differentiable": False}
)
class COPCEstimator(ValueEstimatorBase):
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
    estimation" literally. What this project found by exact enumeration on small random token MDPs, and in
    small learning studies:

    - ``full`` reproduces the published sign reversal: raising ``eta`` here from .25 to .75 lowers the exact
      gradient error by about 1 % when the policy mask is narrow (``eta_policy=.25``) and raises it by about
      7 % when it is wide (.75). ``continuation`` shows no reversal: it lowers the error or leaves it
      unchanged (0 to -11 %).
    - The actor's weight already holds the ratio of its own token, which makes ``continuation`` the unbiased
      form: with exact ratios, ``product`` and ``lmbda=1``, ``E_mu[A_t|s,a] = Q^pi(s,a) - V(s)`` for
      any ``V``, against ``rho*(Q^pi - V)`` for ``full``.
    - ``product`` at ``lmbda=1`` degenerates on long responses: with 20 % of tokens at a log-ratio sd of .05
      the effective sample size of the product is .60 at 1k tokens and about .02 at 8k. ``cut`` (``min(1, c)``
      along the trace) kills terminal reward. ``step`` has neither problem.

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

    @dataclass
    class _AcceptedKeys:
        """Every field is declared here: ``ValueEstimatorBase.set_keys`` does not see inherited ones.

        Attributes:
            advantage, value_target: written.
            value: state value; ``("next", value)`` is the value of the next state.
            reward, done, terminated: read under ``"next"``.
            steps_to_next_obs: number of steps a multi-step transition spans, optional.
            sample_log_prob: log-prob of the action under the policy that sampled it. Defaults to
                ``"sample_log_prob"`` when :func:`~tensordict.nn.composite_lp_aggregate` returns True, else to
                ``"action_log_prob"``.
            learner_log_prob: log-prob of the action under the learner before the update.
            action: read when ``actor_network`` evaluates it.
            log_prob: where an ``actor_network`` without ``get_dist`` writes.
            mask: True on real steps, False on padding, optional.
        """

        advantage: NestedKey = "advantage"
        value_target: NestedKey = "value_target"
        value: NestedKey = "state_value"
        reward: NestedKey = "reward"
        done: NestedKey = "done"
        terminated: NestedKey = "terminated"
        steps_to_next_obs: NestedKey = "steps_to_next_obs"
        sample_log_prob: NestedKey | None = None
        learner_log_prob: NestedKey = "learner_log_prob"
        action: NestedKey = "action"
        log_prob: NestedKey = "log_prob"
        mask: NestedKey = ("collector", "mask")

        def __post_init__(self) -> None:
            if self.sample_log_prob is None:
                aggregated = composite_lp_aggregate(nowarn=True)
                self.sample_log_prob = "sample_log_prob" if aggregated else "action_log_prob"

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    value_network: TensorDictModuleBase | None
    actor_network: TensorDictModuleBase | None
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
        differentiable: bool = False,
        skip_existing: bool | None = None,
        shifted: bool = False,
        device: torch.device | None = None,
        time_dim: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            value_network=value_network,
            differentiable=differentiable,
            skip_existing=skip_existing,
            shifted=shifted,
            device=device,
            **kwargs,
        )
        check_form(trace, advantage)
        log_ratio_bounds(eta, eps_low, eps_high)
        # outside the module registry, as TorchRL holds the value network: the loss owns both networks'
        # parameters
        self.__dict__["actor_network"] = actor_network
        for name, value in (("gamma", gamma), ("lmbda", lmbda), ("lmbda_critic", lmbda_critic)):
            if value is not None and not isinstance(value, Tensor):
                # float64 keeps the number as written; a scalar tensor does not promote the data's dtype
                value = torch.tensor(value, dtype=torch.float64)
            self.register_buffer(name, None if value is None else value.to(self._device))
        self.eta, self.eps_low, self.eps_high = eta, eps_low, eps_high
        self.trace: Trace = trace
        self.advantage: AdvantageForm = advantage
        self.time_dim = time_dim
        self._warned = False

    @classmethod
    def for_loss(cls, loss_module: Any, **hyperparams: Any) -> COPCEstimator:
        """Build an estimator that shares the networks of ``loss_module``."""
        hyperparams.setdefault("actor_network", getattr(loss_module, "actor_network", None))
        return super().for_loss(loss_module, **hyperparams)

    @property
    def in_keys(self) -> list[NestedKey]:
        keys = self.tensor_keys
        networks = [net for net in (self.value_network, self.actor_network) if net is not None]
        read: list[NestedKey] = [key for net in networks for key in net.in_keys]
        if self.value_network is None:
            read += [keys.value, unravel_key(("next", keys.value))]
        else:
            read += [unravel_key(("next", key)) for key in self.value_network.in_keys]
        read += [unravel_key(("next", key)) for key in (keys.reward, keys.done, keys.terminated)]
        if self.actor_network is not None:
            read.append(keys.action)
        read += [self._sample_log_prob_key, keys.learner_log_prob]
        return list(dict.fromkeys(read))

    @property
    def _sample_log_prob_key(self) -> NestedKey:
        key = self.tensor_keys.sample_log_prob
        assert key is not None  # filled in by __post_init__
        return key

    @_self_set_skip_existing
    @_self_set_grad_enabled
    @dispatch
    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        params: TensorDictBase | None = None,
        target_params: TensorDictBase | None = None,
        time_dim: int | None = None,
    ) -> TensorDictBase:
        """Write the advantage and the value target, and the values and learner log-probs that were computed
        for them.

        Args:
            tensordict: batch size ``[*B, T]``. Padding steps, marked by the ``mask`` entry, never enter the
                result, whatever they hold; their own advantage and target are 0.

        Keyword Args:
            params: parameters of a functional value network.
            target_params: its parameters for the next state. Defaults to ``params``.
            time_dim: dimension of time in the batch size, overriding the constructor's.

        Raises:
            KeyError: if the reward or a log-prob is missing, and no ``actor_network`` can compute the latter.
            ValueError: if a log-prob of a real step is not finite, or a value is missing without a value
                network.
        """
        keys = self.tensor_keys
        reward = tensordict.get(("next", keys.reward), None)
        if reward is None:
            raise KeyError(f"reward {('next', keys.reward)!r} is missing; set_keys(reward=...) renames it")
        if tensordict.batch_dims == reward.ndim:
            # a call without tensordict infers the largest common batch size, [*B, T, 1] for packed tokens
            tensordict.batch_size = tensordict.batch_size[:-1]
            tensordict.get("next").batch_size = tensordict.batch_size
        if tensordict.batch_dims < 1:
            raise RuntimeError(
                f"expected a tensordict with a time dimension, got batch size {tensordict.batch_size}"
            )
        time_dim = self._get_time_dim(time_dim, tensordict)
        valid = valid_steps(tensordict, (keys.mask,))
        data = tensordict if valid is None else fill_padding(tensordict, valid)

        value, next_value = self._values(data, params, target_params)
        if self.value_network is not None:
            tensordict.set(keys.value, value)
            tensordict.set(("next", keys.value), next_value)
        log_ratio = self._log_ratio(tensordict, data, value)

        shifted_valid = data.get("shifted_valid", None)
        data = self._prepare_shifted_tensordict(data, shifted_valid, time_dim)
        reward = data.get(("next", keys.reward))
        done = data.get(("next", keys.done))
        terminated = data.get(("next", keys.terminated), done)
        if valid is not None:
            padding = ~expand_right(valid, value)
            reward, value, next_value, log_ratio = (
                x.masked_fill(padding, 0.0) for x in (reward, value, next_value, log_ratio)
            )
            done = done | padding
        check_finite(log_ratio, (keys.sample_log_prob, keys.learner_log_prob))
        self._warn_degenerate(done, time_dim)

        gamma = self.gamma.to(reward.device)
        steps = data.get(keys.steps_to_next_obs, None)
        if steps is not None:
            gamma = gamma ** steps.view_as(reward).to(reward.dtype)
        advantage, value_target = copc_advantage_estimate(
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
        tensordict.set(keys.advantage, advantage)
        tensordict.set(keys.value_target, value_target)
        self._mask_shifted_output(tensordict, shifted_valid)
        return tensordict

    def value_estimate(
        self,
        tensordict: TensorDictBase,
        params: TensorDictBase | None = None,
        target_params: TensorDictBase | None = None,
        time_dim: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The value target alone; ``tensordict`` is left as it was."""
        data = self.forward(
            tensordict.copy(), params=params, target_params=target_params, time_dim=time_dim, **kwargs
        )
        return data.get(self.tensor_keys.value_target)

    def _values(
        self, data: TensorDictBase, params: TensorDictBase | None, target_params: TensorDictBase | None
    ) -> tuple[Tensor, Tensor]:
        value_key = self.tensor_keys.value
        if self.value_network is None:
            values = data.get(value_key, None), data.get(("next", value_key), None)
            for key, value in zip((value_key, ("next", value_key)), values, strict=True):
                if value is None:
                    raise ValueError(
                        f"{key!r} is missing and there is no value network: write it, or pass value_network"
                    )
            return values
        if params is not None:
            params = params.detach()
            target_params = params.clone(False) if target_params is None else target_params
        # only a differentiable call can reach the critic's parameters; the graph through its inputs is kept
        hold_out = self.differentiable and params is None and target_params is None
        with hold_out_net(self.value_network) if hold_out else nullcontext():
            value, next_value, shifted_valid = self._call_value_nets(
                data=data,
                params=params,
                next_params=target_params,
                single_call=self.shifted,
                value_key=value_key,
                detach_next=True,
                vmap_randomness=self.vmap_randomness,
            )
        if shifted_valid is not None:
            data.set("shifted_valid", shifted_valid)
        return value, next_value

    def _log_ratio(self, tensordict: TensorDictBase, data: TensorDictBase, value: Tensor) -> Tensor:
        behaviour_key, learner_key = self._sample_log_prob_key, self.tensor_keys.learner_log_prob
        behaviour = data.get(behaviour_key, None)
        if behaviour is None:
            raise KeyError(
                f"behaviour log-prob {behaviour_key!r} is missing: let the actor that samples return it "
                "(return_log_prob=True), or name its entry with set_keys(sample_log_prob=...)"
            )
        learner = data.get(learner_key, None)
        if learner is None:
            learner = self._evaluate_actor(data)
            tensordict.set(learner_key, learner)
        return (align(learner, value, learner_key) - align(behaviour, value, behaviour_key)).detach()

    def _evaluate_actor(self, data: TensorDictBase) -> Tensor:
        keys = self.tensor_keys
        if self.actor_network is None:
            raise KeyError(
                f"learner log-prob {keys.learner_log_prob!r} is missing: write the frozen learner's log-prob "
                "of the stored action there (set_keys(learner_log_prob=...) renames it), or pass "
                "actor_network; a missing ratio is never taken as 1"
            )
        # Only the actor's inputs, and nothing skipped: collected data also holds the distribution parameters
        # of the behaviour policy, and reusing those would make every ratio 1.
        inputs = data.select(*self.actor_network.in_keys, keys.action, strict=False)
        with torch.no_grad(), set_skip_existing(False):
            log_prob, _ = stored_action_log_prob(
                self.actor_network, inputs, action_key=keys.action, log_prob_key=keys.log_prob
            )
        return log_prob

    def _warn_degenerate(self, done: Tensor, time_dim: int) -> None:
        if self._warned or self.trace != "product" or not bool((self.lmbda > 0.999).any()):
            return
        length = _longest_trajectory(done, time_dim)
        if length > LONG_RESPONSE:
            self._warned = True
            warnings.warn(
                f"trace='product' with lmbda > 0.999 on a response of {length} steps: the product of ratios "
                "has a small "
                "effective sample size beyond about 1,000 steps; use trace='step' or a smaller lmbda",
                stacklevel=2,
            )


def _longest_trajectory(done: Tensor, time_dim: int) -> int:
    done = done.movedim(time_dim, -1)
    step = torch.arange(1, done.shape[-1] + 1, device=done.device)
    ends = torch.where(done, step, 0).cummax(-1).values
    started = torch.nn.functional.pad(ends[..., :-1], (1, 0))
    return int((step - started).max())
