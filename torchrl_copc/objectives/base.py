"""What every method shares as a TorchRL loss module: networks, keys, weights, masks, metrics and the critic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import isclass
from typing import Any, ClassVar, Literal, Self, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictParams, composite_lp_aggregate, dispatch
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor
from torch.distributions import Distribution
from torchrl.modules.distributions.utils import has_analytic_entropy, sample_and_log_prob
from torchrl.objectives.common import LossModule
from torchrl.objectives.utils import build_value_estimator, default_value_kwargs, get_value_estimator_entry
from torchrl.objectives.value import ValueEstimatorBase

from torchrl_copc.objectives.aggregate import effective_sample_size, masked_mean
from torchrl_copc.objectives.policy import PolicyChannel, PolicyTerm
from torchrl_copc.value.estimator import OffPolicyEstimator, OffPolicyValueEstimators
from torchrl_copc.value.inputs import (
    align,
    check_finite,
    expand_right,
    fill_padding,
    stored_action_log_prob,
    valid_steps,
)


class PolicyCriticLoss(LossModule):
    """A policy channel and a critic, trained on advantages of any estimator.

    The actor term comes from the policy channel, a function of ``r_t = pi_theta(a_t)/mu(a_t)``, which carries the
    gradient, of the frozen ratio ``rho_t`` of the learner *before* the update, and of the advantage; see
    :mod:`torchrl_copc.objectives.policy`. A new method is one such function: pass it as ``channel``, or override
    :meth:`policy_term` to give it settings of its own. Tokens that the channel rejects stay in the denominator and
    still train the critic.

    ``r_t`` drifts while several minibatches are taken from one batch, ``rho_t`` does not: it is read from
    ``learner_log_prob``, which ``loss.value_estimator(data)`` writes together with the advantage when it is missing.
    :meth:`forward` on data without an advantage does the same first; then the frozen learner is the current one.

    When the data holds ``loss_weight`` (see :func:`~torchrl_copc.objectives.aggregate.loss_weights`), each loss is
    ``sum(loss_weight * term)``, so that micro-batches and ranks add up to the gradient of the whole batch; otherwise
    ``reduction`` applies. Padding, marked as TorchRL marks it (``loss_mask_key``), changes nothing.

    :meth:`actor_loss` and :meth:`critic_loss` are the two halves of :meth:`forward`, for critic warm-up or several
    critic updates per actor update.

    Args:
        actor_network (TensorDictModule): a probabilistic actor (with ``get_dist``), or a module that writes
            the current ``log_prob`` (and ``entropy``) of the stored action.
        critic_network (TensorDictModule, optional): writes the state value. Without it only the actor is
            trained.

    Keyword Args:
        channel (callable, optional): the policy channel; bind its settings with :func:`functools.partial`. May only be
            left out by subclasses that override :meth:`policy_term`.
        entries (sequence of str): accepted keys whose entries, ``[*B, T, 1]``, the channel gets by keyword beside
            ratios and advantage, such as ``"response_id"``. Defaults to those of the class (none).
        gamma (float): discount per step, of the default estimator. Defaults to ``1.0``.
        lmbda (float): trace decay, of the default estimator. Defaults to ``0.95``.
        entropy_bonus (bool): add ``loss_entropy``. Defaults to ``False``.
        entropy_coeff (float): weight of the entropy. Defaults to ``0.01``.
        samples_mc_entropy (int): samples for distributions without a closed-form entropy. Defaults to ``1``.
        critic_coeff (float, optional): weight of the critic loss; ``None`` leaves it out of :meth:`forward`.
            Defaults to ``1.0``.
        clip_value (float, optional): PPO's value clipping (arXiv 1707.06347): the larger of the squared
            errors of the value and of the value clipped to this distance from the frozen one. Defaults to
            ``None``.
        normalize_advantage (bool): standardise the advantage over the valid tokens of the call (rejected ones
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
        ``entropy_bonus``; and detached metrics over valid tokens: ``kept_fraction`` (of tokens that give actor
        gradient), ``ESS`` (of ``r``, in (0, 1]), ``kl_approx`` (k1, ``mean(-log r)``), ``kl_k3``
        (``mean(r - 1 - log r)``), ``explained_variance`` and, with ``clip_value``, ``value_clip_fraction``.

    Raises:
        TypeError: without a policy channel.
        ValueError: for unknown options.

    Examples:
        >>> import torch
        >>> from functools import partial
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl_copc.objectives.policy import clipped_surrogate
        >>> class Scorer(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.logits = torch.nn.Parameter(torch.zeros(4))
        ...
        ...     def forward(self, action):
        ...         return self.logits.log_softmax(-1)[action]
        >>> actor = TensorDictModule(Scorer(), in_keys=["action"], out_keys=["log_prob"])
        >>> loss = PolicyCriticLoss(actor, channel=partial(clipped_surrogate, eps_high=0.28), functional=False)
        >>> tokens = TensorDict(
        ...     {
        ...         "action": torch.tensor([[[1], [3]]]),
        ...         "action_log_prob": torch.tensor([[[-1.4], [-9.0]]]),  # the second token moved far from mu
        ...         "learner_log_prob": torch.full((1, 2, 1), 0.25).log(),
        ...         "advantage": torch.ones(1, 2, 1),
        ...     },
        ...     batch_size=[1, 2],
        ... )
        >>> losses = loss(tokens)
        >>> losses["loss_objective"].backward()
        >>> losses["kept_fraction"]
        tensor(0.5000)
    """

    @dataclass
    class _AcceptedKeys:
        """Names of the entries, to be changed with ``set_keys``.

        Attributes:
            advantage, value_target: read, or written by the value estimator.
            value: written by the critic; in the data it is the frozen value that ``clip_value`` needs.
            sample_log_prob: log-prob of the action under the policy that sampled it. Defaults to
                ``"sample_log_prob"`` when :func:`~tensordict.nn.composite_lp_aggregate` returns True, else to
                ``"action_log_prob"``.
            learner_log_prob: log-prob of the action under the learner before the update.
            action: the stored action, for actors with ``get_dist``.
            log_prob, entropy: written by actors without ``get_dist``.
            loss_weight: per-token weights with global denominators, optional.
            reward, done, terminated: read under ``"next"`` by the value estimator.
            response_id, group_id: integers, equal on all tokens of a response and on all responses to one prompt, for
                channels and estimators that need them.
            grad_sq_norm: see :class:`~torchrl_copc.value.MinimumVarianceAdvantage`.
            threshold: of channels that solve one for the whole batch, see :meth:`PolicyCriticLoss.batch_entries`.
        """

        advantage: NestedKey = "advantage"
        value_target: NestedKey = "value_target"
        value: NestedKey = "state_value"
        sample_log_prob: NestedKey | None = None
        learner_log_prob: NestedKey = "learner_log_prob"
        action: NestedKey = "action"
        log_prob: NestedKey = "log_prob"
        entropy: NestedKey = "entropy"
        loss_weight: NestedKey = "loss_weight"
        reward: NestedKey = "reward"
        done: NestedKey = "done"
        terminated: NestedKey = "terminated"
        response_id: NestedKey = "response_id"
        group_id: NestedKey = "group_id"
        grad_sq_norm: NestedKey = "grad_sq_norm"
        threshold: NestedKey = "threshold"

        def __post_init__(self) -> None:
            if self.sample_log_prob is None:
                aggregated = composite_lp_aggregate(nowarn=True)
                self.sample_log_prob = "sample_log_prob" if aggregated else "action_log_prob"

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    default_value_estimator: OffPolicyValueEstimators = OffPolicyValueEstimators.TOKEN_GAE
    entries: tuple[str, ...] = ()
    _frozen_remedy: ClassVar[str] = ""  # what else to do about a missing learner log-prob
    _schedulable_buffers = frozenset({"entropy_coeff", "critic_coeff", "clip_value"})

    actor_network: TensorDictModuleBase
    critic_network: TensorDictModuleBase | None
    actor_network_params: TensorDictParams | None
    critic_network_params: TensorDictParams | None
    target_actor_network_params: TensorDictParams | None
    target_critic_network_params: TensorDictParams | None
    entropy_coeff: Tensor
    critic_coeff: Tensor | None
    clip_value: Tensor | None

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        critic_network: TensorDictModuleBase | None = None,
        *,
        channel: PolicyChannel | None = None,
        entries: Sequence[str] | None = None,
        gamma: float = 1.0,
        lmbda: float = 0.95,
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
        if channel is None and type(self).policy_term is PolicyCriticLoss.policy_term:
            raise TypeError(
                f"{type(self).__name__} has no policy channel: pass channel, or override policy_term"
            )
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction must be one of mean, sum, none, got {reduction!r}")
        self._in_keys: list[NestedKey] | None = None
        self._out_keys: list[NestedKey] | None = None
        self._functional = functional
        super().__init__()
        if entries is not None:
            self.entries = tuple(entries)
        known = self._AcceptedKeys.__dataclass_fields__
        if unknown := [name for name in self.entries if name not in known]:
            raise ValueError(
                f"entries names {unknown[0]!r}, which is not an accepted key: {', '.join(known)}"
            )
        self._hold_networks(actor_network, critic_network, separate_losses)
        self.channel = channel
        self.gamma, self.lmbda = gamma, lmbda
        self.entropy_bonus = entropy_bonus
        self.samples_mc_entropy = samples_mc_entropy
        self.normalize_advantage = normalize_advantage
        self.separate_losses = separate_losses
        self.reduction = reduction
        device = self._default_device if device is None else device
        for name, value in (
            ("entropy_coeff", entropy_coeff),
            ("critic_coeff", None if critic_network is None else critic_coeff),
            ("clip_value", clip_value),
        ):
            self.register_coeff_buffer(name, value, device=device)
        if hasattr(actor_network, "log_prob_keys") and len(actor_network.log_prob_keys) == 1:
            self.set_keys(
                sample_log_prob=actor_network.log_prob_keys[0], action=actor_network.dist_sample_keys[0]
            )

    @property
    def reads_frozen(self) -> bool:
        """Whether the policy channel reads the frozen log-ratio; if not, the current one stands in for it."""
        return True

    def policy_term(
        self, log_ratio: Tensor, frozen_log_ratio: Tensor, advantage: Tensor, **entries: Tensor
    ) -> PolicyTerm:
        """The policy channel; all arguments are ``[*B, T, F]``, only ``log_ratio`` carries gradient.

        ``entries`` are those that :attr:`entries` names.
        """
        assert self.channel is not None
        return self.channel(log_ratio, frozen_log_ratio, advantage, **entries)

    def _check_settings(self) -> None:
        """Let both channels refuse settings now, and not at the first batch of a run."""
        token = torch.zeros(1, 1, 1)
        self.policy_term(token, token, token, **dict.fromkeys(self.entries, token))
        self.batch_entries(token.flatten(), token.flatten())
        estimator = get_value_estimator_entry(self.default_value_estimator).cls
        estimator(value_network=None, **self.estimator_settings())

    def batch_entries(self, frozen_log_ratio: Tensor, advantage: Tensor) -> dict[str, Tensor]:
        """Of :attr:`entries`, the ones that are a single number for a whole batch.

        A learner that splits the batch calls this once with the policy tokens of all its parts and ranks, before the
        first update, and writes the results to every token. An entry still missing in :meth:`forward` is solved from
        the tokens of that call.

        Args:
            frozen_log_ratio: of all valid tokens, ``[N]``, nats.
            advantage: of the same tokens, ``[N]``.

        Returns:
            Scalars by name.
        """
        return {}

    def estimator_settings(self) -> dict[str, Any]:
        """Arguments of the default estimator beside ``gamma`` and ``lmbda``."""
        return {}

    def _hold_networks(
        self, actor: TensorDictModuleBase, critic: TensorDictModuleBase | None, separate_losses: bool
    ) -> None:
        shared = critic is not None and not set(actor.parameters()).isdisjoint(critic.parameters())
        if separate_losses and shared and not self._functional:
            raise ValueError(
                "separate_losses=True with parameters shared by actor and critic needs functional=True: the "
                "critic must run on a detached copy of them"
            )
        if self._functional:
            self.convert_to_functional(actor, "actor_network")
        else:
            self.actor_network = actor
            self.actor_network_params = self.target_actor_network_params = None
        if self._functional and critic is not None:
            policy_params = list(actor.parameters()) if separate_losses else None
            self.convert_to_functional(critic, "critic_network", compare_against=policy_params)
        else:
            self.critic_network = critic
            self.critic_network_params = self.target_critic_network_params = None

    @property
    def functional(self) -> bool:
        return self._functional

    @property
    def in_keys(self) -> list[NestedKey]:
        if self._in_keys is None:
            keys = self.tensor_keys
            networks = [net for net in (self.actor_network, self.critic_network) if net is not None]
            read: list[NestedKey] = [key for net in networks for key in net.in_keys]
            read += [unravel_key(("next", key)) for key in read]
            read += [unravel_key(("next", key)) for key in (keys.reward, keys.done, keys.terminated)]
            read += [keys.action, self._sample_log_prob_key, keys.learner_log_prob]
            read += [keys.advantage, keys.value_target, keys.value, keys.loss_weight]
            estimator = self._value_estimator
            if estimator is None:
                estimator = get_value_estimator_entry(self.default_value_estimator).cls
            read += [getattr(keys, name) for name in (*self.entries, *getattr(estimator, "entries", ()))]
            self._in_keys = list(dict.fromkeys(read))
        return self._in_keys

    @in_keys.setter
    def in_keys(self, values: list[NestedKey]) -> None:
        self._in_keys = values

    @property
    def out_keys(self) -> list[NestedKey]:
        if self._out_keys is None:
            keys: list[NestedKey] = ["loss_objective", *self._actor_metric_keys]
            if self.entropy_bonus:
                keys += ["entropy", "loss_entropy"]
            if self.critic_coeff is not None:
                keys += ["loss_critic", "explained_variance"]
                if self.clip_value is not None:
                    keys.append("value_clip_fraction")
            self._out_keys = keys
        return self._out_keys

    @out_keys.setter
    def out_keys(self, values: list[NestedKey]) -> None:
        self._out_keys = values

    @property
    def _actor_metric_keys(self) -> list[str]:
        return ["kept_fraction", "ESS", "kl_approx", "kl_k3"]

    @property
    def _sample_log_prob_key(self) -> NestedKey:
        key = self.tensor_keys.sample_log_prob
        assert key is not None  # filled in by __post_init__
        return key

    def _forward_value_estimator_keys(self, **kwargs: Any) -> None:
        if self._value_estimator is not None:
            accepted = self._value_estimator._AcceptedKeys.__dict__
            self._value_estimator.set_keys(
                **{name: key for name, key in vars(self.tensor_keys).items() if name in accepted}
            )
        self._in_keys = None

    def make_value_estimator(self, value_type: Any = None, **hyperparams: Any) -> Self:
        """Choose the advantage channel.

        Args:
            value_type: an entry of TorchRL's registry or its lower-case name (``"copc"``, ``"gae"``, ...), an
                estimator class, or an instance. Defaults to the method's own with the options of this loss.
            **hyperparams: arguments of the estimator, overriding those of this loss.

        Examples:
            >>> loss.make_value_estimator("gae", lmbda=0.9)  # doctest: +SKIP
        """
        value_type = self.default_value_estimator if value_type is None else value_type
        self.value_type = type(value_type) if isinstance(value_type, ValueEstimatorBase) else value_type
        if isinstance(value_type, ValueEstimatorBase):
            self._value_estimator = value_type
        elif isclass(value_type):
            self._value_estimator = cast("type[Any]", value_type).for_loss(self, **hyperparams)
        else:
            own = {"gamma": self.gamma, "lmbda": self.lmbda}
            accepted = default_value_kwargs(value_type)
            hyperparams = {name: own[name] for name in own if name in accepted} | hyperparams
            if value_type in (self.default_value_estimator, self.default_value_estimator.name.lower()):
                hyperparams = self.estimator_settings() | hyperparams
            self._value_estimator = build_value_estimator(self, value_type, **hyperparams)
        self._forward_value_estimator_keys()
        return self

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The losses and metrics of one (micro-)batch; ``tensordict`` is not changed.

        Raises:
            KeyError: if a log-prob is missing.
            ValueError: if a frozen log-ratio is not finite, or shapes do not fit.
        """
        data, valid = self._prepare(tensordict, self.tensor_keys.advantage)
        out = self._actor_terms(data, valid)
        if self.critic_coeff is not None:
            out.update(self._critic_terms(data, valid))
        return out

    def actor_loss(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The actor's half of :meth:`forward`: ``loss_objective``, ``loss_entropy`` and their metrics."""
        return self._actor_terms(*self._prepare(tensordict, self.tensor_keys.advantage))

    def critic_loss(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The critic's half of :meth:`forward`; the actor is not evaluated.

        Raises:
            ValueError: if there is no critic.
        """
        if self.critic_network is None or self.critic_coeff is None:
            raise ValueError("critic_loss needs a critic_network and a critic_coeff")
        return self._critic_terms(*self._prepare(tensordict, self.tensor_keys.value_target))

    def _prepare(self, tensordict: TensorDictBase, needed: NestedKey) -> tuple[TensorDictBase, Tensor | None]:
        data = tensordict.clone(False)
        if data.get(needed, None) is None:
            estimator = self.value_estimator
            if isinstance(estimator, OffPolicyEstimator) and self.loss_mask_key not in (None, "auto"):
                estimator.set_keys(mask=self.loss_mask_key)
            params = self.critic_network_params
            estimator(
                data,
                params=None if params is None else params.detach(),
                target_params=None if params is None else self.target_critic_network_params,
            )
        mask_keys = self._loss_mask_keys()
        valid = valid_steps(data, mask_keys)
        return (data if valid is None else fill_padding(data, valid)), valid

    def _actor_terms(self, data: TensorDictBase, valid: Tensor | None) -> TensorDictBase:
        keys = self.tensor_keys
        advantage = data.get(keys.advantage).detach()
        valid = None if valid is None else expand_right(valid, advantage)
        if self.normalize_advantage:
            advantage = self._standardize(advantage, valid)
        behaviour = self._required(data, self._sample_log_prob_key, advantage)

        with self._parameters_in(self.actor_network, self.actor_network_params):
            log_prob, source = stored_action_log_prob(
                self.actor_network, data, action_key=keys.action, log_prob_key=keys.log_prob
            )
        log_ratio = align(log_prob, advantage, "log_prob") - behaviour
        frozen = log_ratio.detach()
        if self.reads_frozen:
            frozen = self._required(data, keys.learner_log_prob, advantage) - behaviour
            check_finite(frozen, (self._sample_log_prob_key, keys.learner_log_prob))
        if valid is not None:  # a channel may add up the tokens of a response
            log_ratio, frozen = (torch.where(valid, x, 0.0) for x in (log_ratio, frozen))
        entries = self._channel_entries(data, valid, frozen, advantage)
        term, kept = self.policy_term(log_ratio, frozen, advantage, **entries)
        reduce = self._reducer(data, valid, advantage)
        out = TensorDict({"loss_objective": reduce(term)})
        if self.entropy_bonus:
            entropy = align(self._entropy(source), advantage, keys.entropy)
            out.set("loss_entropy", reduce(-self.entropy_coeff * entropy))
            out.set("entropy", masked_mean(entropy.detach(), valid))
        out.update(self._actor_metrics(log_ratio.detach(), frozen, kept, valid))
        return out

    def _channel_entries(
        self, data: TensorDictBase, valid: Tensor | None, frozen: Tensor, advantage: Tensor
    ) -> dict[str, Tensor]:
        entries = {name: data.get(getattr(self.tensor_keys, name), None) for name in self.entries}
        if any(entry is None for entry in entries.values()):
            tokens = [x if valid is None else x[valid.expand_as(x)] for x in (frozen, advantage)]
            for name, number in self.batch_entries(*(x.flatten() for x in tokens)).items():
                if entries[name] is None:
                    entries[name] = number.to(frozen).expand_as(frozen)
        for name, entry in entries.items():
            if entry is None:
                raise KeyError(
                    f"the policy channel needs {getattr(self.tensor_keys, name)!r} in the data; set_keys({name}=...) "
                    "renames it"
                )
        return {name: align(entry, advantage, name) for name, entry in entries.items()}

    def _actor_metrics(
        self, log_ratio: Tensor, frozen: Tensor, kept: Tensor, valid: Tensor | None
    ) -> dict[str, Tensor]:
        return {
            "kept_fraction": masked_mean(kept, valid),
            "ESS": effective_sample_size(log_ratio, valid),
            "kl_approx": masked_mean(-log_ratio, valid),
            "kl_k3": masked_mean(log_ratio.expm1() - log_ratio, valid),
        }

    def _critic_terms(self, data: TensorDictBase, valid: Tensor | None) -> TensorDictBase:
        assert self.critic_network is not None and self.critic_coeff is not None
        keys = self.tensor_keys
        if self.separate_losses:
            data = data.detach()
        target = data.get(keys.value_target, None)
        if target is None:
            raise KeyError(
                f"value target {keys.value_target!r} is missing although {keys.advantage!r} is there: value "
                "estimators write both"
            )
        target = target.detach()
        valid = None if valid is None else expand_right(valid, target)
        frozen_value = data.get(keys.value, None)  # before the critic overwrites it
        with self._parameters_in(self.critic_network, self.critic_network_params):
            value = self.critic_network(data).get(keys.value, None)
        if value is None:
            raise KeyError(f"the critic did not write {keys.value!r}: set_keys(value=...) names it")
        value = align(value, target, keys.value)
        error = (value - target).square()
        out = TensorDict({})
        if self.clip_value is not None:
            if frozen_value is None:
                raise KeyError(f"clip_value needs the frozen value {keys.value!r} in the data")
            frozen_value = align(frozen_value, target, keys.value).detach()
            change = value - frozen_value
            clipped = change.clamp(-self.clip_value, self.clip_value)
            error = torch.maximum(error, (frozen_value + clipped - target).square())
            out.set("value_clip_fraction", masked_mean(change.detach() != clipped.detach(), valid))
        reduce = self._reducer(data, valid, target)
        out.set("loss_critic", reduce(self.critic_coeff * 0.5 * error))
        residual = target - value.detach()
        variance = self._variance(target, valid).clamp_min(torch.finfo(target.dtype).eps)
        out.set("explained_variance", 1 - self._variance(residual, valid) / variance)
        return out

    def _required(self, data: TensorDictBase, key: NestedKey, like: Tensor) -> Tensor:
        value = data.get(key, None)
        if value is None:
            raise KeyError(
                f"log-prob {key!r} is missing and is never taken as ratio 1: run the value estimator on the "
                "batch before taking minibatches (loss.value_estimator(data) writes the learner's log-probs; "
                "actors write their own with return_log_prob=True), or name the entry with set_keys"
                + (self._frozen_remedy if key == self.tensor_keys.learner_log_prob else "")
            )
        return align(value.detach(), like, key)

    def _reducer(
        self, data: TensorDictBase, valid: Tensor | None, like: Tensor
    ) -> Callable[[Tensor], Tensor]:
        weight = data.get(self.tensor_keys.loss_weight, None)
        weight = None if weight is None else align(weight, like, self.tensor_keys.loss_weight)

        def reduce(term: Tensor) -> Tensor:
            if weight is None and self.reduction == "mean":
                return masked_mean(term, valid)
            if valid is not None:
                term = torch.where(valid, term, 0.0)
            if weight is not None:
                return (weight * term).sum()
            return term.sum() if self.reduction == "sum" else term.squeeze(-1)

        return reduce

    def _entropy(self, source: Distribution | TensorDictBase) -> Tensor:
        if isinstance(source, TensorDictBase):
            entropy = source.get(self.tensor_keys.entropy, None)
            if entropy is None:
                raise KeyError(
                    f"entropy_bonus=True, but the actor did not write {self.tensor_keys.entropy!r}"
                )
            return entropy
        if has_analytic_entropy(source):
            return source.entropy()
        _, log_prob = sample_and_log_prob(
            source, (self.samples_mc_entropy,), reparameterize=source.has_rsample
        )
        return -log_prob.mean(0)

    @staticmethod
    def _variance(x: Tensor, valid: Tensor | None) -> Tensor:
        return masked_mean((x - masked_mean(x, valid)).square(), valid)

    def _standardize(self, advantage: Tensor, valid: Tensor | None) -> Tensor:
        scale = self._variance(advantage, valid).sqrt().clamp_min(1e-4)
        return (advantage - masked_mean(advantage, valid)) / scale

    @staticmethod
    def _parameters_in(
        network: TensorDictModuleBase, params: TensorDictParams | None
    ) -> AbstractContextManager[Any]:
        return nullcontext() if params is None else params.to_module(network, preserve_module_state=False)
