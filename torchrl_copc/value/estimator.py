"""What every advantage channel shares as a TorchRL value estimator: keys, networks, padding, frozen log-probs."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Self

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, composite_lp_aggregate, dispatch, set_skip_existing
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor
from torchrl.objectives.utils import hold_out_net
from torchrl.objectives.value.advantages import (
    ValueEstimatorBase,
    _self_set_grad_enabled,
    _self_set_skip_existing,
)

from torchrl_copc.value.inputs import (
    align,
    check_finite,
    expand_right,
    fill_padding,
    stored_action_log_prob,
    valid_steps,
)
from torchrl_copc.value.td import following


class OffPolicyValueEstimators(Enum):
    """Keys of this package's estimators in TorchRL's registry; lower-case names work too (``"copc"``)."""

    COPC = "COPC: clipped-ratio weighted TD residuals"
    TOKEN_GAE = (
        "GAE with its own decay for the value target, and decays that adapt to the length of a response"
    )
    TOKEN_VTRACE = "V-trace on stored actions"
    BRACE = "BRACE: windowed V-trace with a terminal correction"
    RETRACE = "Retrace for a state-value critic"
    GROUP_RELATIVE = "returns compared within the group of responses to one prompt, without a critic"
    MINIMUM_VARIANCE = (
        "returns minus the off-policy baseline of least variance of their group, without a critic"
    )


class OffPolicyEstimator(ValueEstimatorBase):
    """Base of the advantage channels: everything but the formula.

    Reads and writes ordinary TorchRL data of batch size ``[*B, T]``: control rollouts, or policy tokens of many
    responses packed along time with ``done`` on the last token of each. A subclass writes :meth:`estimate`.

    The learner's log-probs are read from ``learner_log_prob``. When that entry is missing and ``actor_network`` is
    given, the network evaluates the *stored* action without gradient and the result is written to the entry, so that
    losses find the same frozen ratio in every later minibatch. Without either, an estimator that needs ratios raises:
    a missing ratio is never taken as 1. An entry that is present is trusted; drop it before data is reused for a later
    update.

    Keyword Args:
        gamma (float or Tensor): discount per step. Defaults to ``1.0``.
        lmbda (float or Tensor): trace decay; a tensor must broadcast to ``[*B, T, 1]``. Defaults to ``0.95``.
        value_network (TensorDictModule, optional): critic. ``None`` reads the values from the data, at
            ``value`` and ``("next", value)``.
        actor_network (TensorDictModule, optional): evaluates stored actions when ``learner_log_prob`` is
            missing: a probabilistic actor, or a module that writes ``log_prob``. Defaults to ``None``.
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

    Examples:
        >>> class MonteCarlo(OffPolicyEstimator):
        ...     needs_ratio = False
        ...
        ...     def estimate(
        ...         self, gamma, log_ratio, value, next_value, reward, done, terminated, *, time_dim
        ...     ):
        ...         from torchrl_copc.value.scan import backward_scan
        ...
        ...         flow = torch.where(done, 0.0, gamma.to(reward))
        ...         target = backward_scan(flow, reward, time_dim=time_dim)
        ...         return target - value, target
        >>> from tensordict import TensorDict
        >>> end = torch.tensor([False, True, True]).view(1, 3, 1)  # packed responses of two tokens and one
        >>> half = torch.full((1, 3, 1), 0.5)
        >>> after = {"state_value": half, "reward": end.float(), "done": end, "terminated": end}
        >>> tokens = TensorDict({"state_value": half, "next": after}, batch_size=[1, 3])
        >>> MonteCarlo(value_network=None)(tokens)["advantage"].flatten()
        tensor([0.5000, 0.5000, 0.5000])
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
            group_id: integer, equal on all responses to one prompt; read by critic-free estimators.
            grad_sq_norm: squared norm of the gradient of its response's log-prob, the same on all of its steps.
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
        group_id: NestedKey = "group_id"
        grad_sq_norm: NestedKey = "grad_sq_norm"

        def __post_init__(self) -> None:
            if self.sample_log_prob is None:
                aggregated = composite_lp_aggregate(nowarn=True)
                self.sample_log_prob = "sample_log_prob" if aggregated else "action_log_prob"

    needs_ratio: ClassVar[bool] = True
    """Whether :meth:`estimate` reads the log-ratio; without it the behaviour log-prob may be missing."""

    needs_value: ClassVar[bool] = True
    """Whether :meth:`estimate` reads values; critic-free estimators get zeros."""

    entries: ClassVar[tuple[str, ...]] = ()
    """Accepted keys beside the usual ones whose entries :meth:`estimate` gets by keyword, ``[*B, T, 1]``."""

    unclipped: ClassVar[dict[str, Any]] = {}
    """Settings (attributes) that take every clip of ratios off, for :meth:`estimate_unclipped`."""

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    value_network: TensorDictModuleBase | None
    actor_network: TensorDictModuleBase | None
    gamma: Tensor
    lmbda: Tensor

    def __init__(
        self,
        *,
        gamma: float | Tensor = 1.0,
        lmbda: float | Tensor = 0.95,
        value_network: TensorDictModuleBase | None,
        actor_network: TensorDictModuleBase | None = None,
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
        # outside the module registry, as TorchRL holds the value network: the loss owns both networks'
        # parameters
        self.__dict__["actor_network"] = actor_network
        self._register("gamma", gamma)
        self._register("lmbda", lmbda)
        self.time_dim = time_dim

    def _register(self, name: str, value: float | Tensor | None) -> None:
        """Hold a coefficient as a buffer, so that it is saved and moves with the module."""
        if value is not None and not isinstance(value, Tensor):
            # float64 keeps the number as written; a scalar tensor does not promote the data's dtype
            value = torch.tensor(value, dtype=torch.float64)
        self.register_buffer(name, None if value is None else value.to(self._device))

    @classmethod
    def for_loss(cls, loss_module: Any, **hyperparams: Any) -> Self:
        """Build an estimator that shares the networks of ``loss_module``."""
        if cls.needs_ratio or getattr(loss_module, "reads_frozen", False):
            hyperparams.setdefault("actor_network", getattr(loss_module, "actor_network", None))
        return super().for_loss(loss_module, **hyperparams)

    @abstractmethod
    def estimate(
        self,
        gamma: Tensor,  # broadcasts to [*B, T, F]
        log_ratio: Tensor,  # [*B, T, F] or [*B, T, 1]; zeros when not `needs_ratio`
        value: Tensor,  # [*B, T, F]
        next_value: Tensor,  # [*B, T, F]
        reward: Tensor,  # [*B, T, F]
        done: Tensor,  # [*B, T, F] bool
        terminated: Tensor,  # [*B, T, F] bool
        *,
        time_dim: int,
    ) -> tuple[Tensor, Tensor]:
        """The formula: ``(advantage, value_target)``, each ``[*B, T, F]``.

        The :attr:`entries` come by keyword too. Padding has been neutralised: zero reward, values and log-ratio, and
        ``done``; of other entries, the least integer, which is nobody's id, or zero.
        """

    def estimate_unclipped(self, *tensors: Tensor, time_dim: int, **entries: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`estimate` with the ratios themselves wherever it clips them; the same arguments and result.

        What diagnostics take for the ideal advantage, see :mod:`torchrl_copc.objectives.diagnostics`.
        """
        free = copy(self)
        free.__dict__.update(self.unclipped)
        return free.estimate(*tensors, time_dim=time_dim, **entries)

    @property
    def log_weight_bounds(self) -> tuple[float, float] | None:
        """Ends of the interval to which the log-ratio that weights a TD residual is clipped, nats.

        ``(0, 0)`` where the weight is always 1. ``None`` where there is no such weight, as in critic-free
        estimators, or where a subclass that reads ratios does not say.
        """
        return (0.0, 0.0) if self.needs_value and not self.needs_ratio else None

    @property
    def in_keys(self) -> list[NestedKey]:
        keys = self.tensor_keys
        networks = [net for net in (self.value_network, self.actor_network) if net is not None]
        read: list[NestedKey] = [key for net in networks for key in net.in_keys]
        if self.value_network is not None:
            read += [unravel_key(("next", key)) for key in self.value_network.in_keys]
        elif self.needs_value:
            read += [keys.value, unravel_key(("next", keys.value))]
        read += [unravel_key(("next", key)) for key in (keys.reward, keys.done, keys.terminated)]
        if self.actor_network is not None:
            read.append(keys.action)
        if self.needs_ratio:
            read.append(self._sample_log_prob_key)
        if self.needs_ratio or self.actor_network is not None:
            read.append(keys.learner_log_prob)
        read += [getattr(keys, name) for name in self.entries]
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
            KeyError: if the reward, an entry the formula needs, or a log-prob is missing, and no ``actor_network`` can
                compute the latter.
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

        if self.needs_value or self.value_network is not None:
            value, next_value = self._values(data, params, target_params)
        else:
            value = next_value = torch.zeros_like(reward)
        if self.value_network is not None:
            tensordict.set(keys.value, value)
            tensordict.set(("next", keys.value), next_value)
        log_ratio = self._log_ratio(tensordict, data, value)

        shifted_valid = data.get("shifted_valid", None)
        data = self._prepare_shifted_tensordict(data, shifted_valid, time_dim)
        reward = data.get(("next", keys.reward))
        done = data.get(("next", keys.done))
        terminated = data.get(("next", keys.terminated), done)
        entries = {name: align(self._entry(data, name), reward, name) for name in self.entries}
        if valid is not None:
            padding = ~expand_right(valid, value)
            reward, value, next_value, log_ratio = (
                x.masked_fill(padding, 0.0) for x in (reward, value, next_value, log_ratio)
            )
            entries = {
                name: x.masked_fill(padding, 0.0 if x.is_floating_point() else torch.iinfo(x.dtype).min)
                for name, x in entries.items()
            }
            # a trajectory ends where its padding begins: its length counts for decays that adapt to it
            done = done | padding | following(padding, time_dim=time_dim)
        check_finite(log_ratio, (keys.sample_log_prob, keys.learner_log_prob))

        gamma = self.gamma.to(reward.device)
        steps = data.get(keys.steps_to_next_obs, None)
        if steps is not None:
            gamma = gamma ** steps.view_as(reward).to(reward.dtype)
        advantage, value_target = self.estimate(
            gamma, log_ratio, value, next_value, reward, done, terminated, time_dim=time_dim, **entries
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

    def _entry(self, data: TensorDictBase, name: str) -> Tensor:
        key = getattr(self.tensor_keys, name)
        entry = data.get(key, None)
        if entry is None:
            raise KeyError(
                f"{type(self).__name__} needs {key!r} in the data; set_keys({name}=...) renames it"
            )
        return entry

    def _log_ratio(self, tensordict: TensorDictBase, data: TensorDictBase, value: Tensor) -> Tensor:
        behaviour_key, learner_key = self._sample_log_prob_key, self.tensor_keys.learner_log_prob
        behaviour = data.get(behaviour_key, None)
        if behaviour is None and self.needs_ratio:
            raise KeyError(
                f"behaviour log-prob {behaviour_key!r} is missing: let the actor that samples return it "
                "(return_log_prob=True), or name its entry with set_keys(sample_log_prob=...)"
            )
        learner = data.get(learner_key, None)
        if learner is None and (self.needs_ratio or self.actor_network is not None):
            learner = self._evaluate_actor(data)
            tensordict.set(learner_key, learner)
        if not self.needs_ratio:
            return torch.zeros_like(value)
        assert learner is not None and behaviour is not None
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
