"""The learner of the study: one method on all seeds at once, through the library's own estimators and losses.

    rows of version v - lag ─> frozen pass: learner log-probs, values ─> policy tokens [1, N] of all seeds, packed
        ─> value estimator ─> whitening ─> per minibatch: K critic updates, one actor update, each: loss module on all
        seeds, backward, clip ─> AdamW

It is what :class:`~torchrl_copc.training.learner.Learner` does with a language model, for networks whose parameters are
stacked over seeds. Estimators see packed responses, so seeds are only more of them; losses are sums with
``loss_weight``, so the gradient of a seed's parameters is that of its own loss. What is taken over a batch is taken
over each seed's part of it: loss denominators, whitening, the norm that is clipped, M2PO's threshold and VCPO's step.

Of a method's config, ``loss``, ``value_estimator``, ``critic``, ``collector.group_size`` and all of ``learner`` that is
not about memory, precision or devices are used. Dynamic sampling (DAPO) draws three batches and takes the first groups
with different rewards; when there are too few, the others fill the batch, where a training run would sample on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from copy import deepcopy
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from torchrl_copc.models.linear_log_prob import score_sq_norm
from torchrl_copc.objectives.aggregate import Aggregation, effective_sample_size, loss_weights
from torchrl_copc.objectives.policy import PolicyTerm
from torchrl_copc.study.models import Network, actor_module, critic_module, token_log_prob
from torchrl_copc.study.rollout import Chance, sample
from torchrl_copc.study.tasks import TokenTask
from torchrl_copc.training.config import TrainConfig
from torchrl_copc.training.learner import OptimizerConfig
from torchrl_copc.training.rollouts import call_target
from torchrl_copc.value.functional import log_ratio_bounds

DYNAMIC_BATCHES = 3  # drawn for one by dynamic sampling


class LaggedPolicy:
    """The policy as it was ``lag`` versions ago; the first one until there is such a version.

    Args:
        net: the policy that is trained.
        lag: versions.

    Examples:
        >>> from torchrl_copc.study.models import Table
        >>> net = Table(torch.zeros(1, 1, 1))
        >>> lagged = LaggedPolicy(net, lag=2)
        >>> held = []
        >>> for version in range(5):
        ...     held.append(lagged.advance().weight.item())
        ...     with torch.no_grad():
        ...         net.weight += 1
        >>> held
        [0.0, 0.0, 0.0, 1.0, 2.0]
    """

    def __init__(self, net: nn.Module, lag: int) -> None:
        self._net, self._held = net, deepcopy(net)
        self._versions: deque[list[Tensor]] = deque(maxlen=lag + 1)

    @torch.no_grad()
    def advance(self) -> nn.Module:
        """Note the present parameters as the next version, and return the policy that samples for it."""
        self._versions.append([p.detach().clone() for p in self._net.parameters()])
        for held, value in zip(self._held.parameters(), self._versions[0], strict=True):
            held.copy_(value)
        return self._held


class _Optimizer:
    """AdamW whose gradient is clipped for each seed by itself."""

    def __init__(self, net: nn.Module, config: OptimizerConfig) -> None:
        self.config, self.parameters, self.updates = config, list(net.parameters()), 0
        self.lr_scale: Tensor | None = None  # of each seed
        self.adam = torch.optim.AdamW(
            self.parameters,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
        )

    @torch.no_grad()
    def step(self) -> None:
        gradients = [cast(Tensor, p.grad) for p in self.parameters]
        norm = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()  # [S]
        if not bool(norm.isfinite().all()):
            raise FloatingPointError(
                f"gradient norms of the seeds are {norm.tolist()}: lower the learning rate"
            )
        scale = (self.config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        for g in gradients:
            g.mul_(_like(scale, g))
        before = None if self.lr_scale is None else [p.clone() for p in self.parameters]
        self.updates += 1
        for group in self.adam.param_groups:
            group["lr"] = self.config.lr * min(1.0, self.updates / max(1, self.config.warmup_updates))
        self.adam.step()
        self.adam.zero_grad()
        if before is not None and self.lr_scale is not None:  # AdamW's step is linear in its learning rate
            for p, old in zip(self.parameters, before, strict=True):
                p.copy_(old.lerp(p, _like(self.lr_scale, p)))


def _like(x: Tensor, parameter: Tensor) -> Tensor:
    """One number per seed, to multiply a stacked parameter with."""
    return x.view(-1, *(1,) * (parameter.ndim - 1))


class StackedLearner:
    """Trains stacked policies of a task with one method.

    Args:
        config: composed configuration; ``method``, ``learner`` and of ``collector`` ``batch_rows``, ``group_size`` and
            ``lag`` are used.
        task: ``S`` instances.
        seeds: of the random numbers of each instance.
        actor: network that writes logits.
        critic: network that writes one value.

    Attributes:
        totals: sums over versions, ``[S]`` each, of what :class:`~torchrl_copc.study.train.Scores` has means of.
    """

    def __init__(
        self, config: TrainConfig, task: TokenTask, seeds: list[int], actor: nn.Module, critic: nn.Module
    ) -> None:
        self.config, self.task, self.seeds = config, task, seeds
        self.actor = cast(Network, actor)
        self.critic = cast(Network, critic) if config.method.critic else None
        self.chance = Chance(seeds)
        self.behaviour = LaggedPolicy(actor, config.collector.lag)
        modules = [actor_module(actor), critic_module(critic) if self.critic else None]
        self.loss = call_target(config.method.loss, *modules, functional=False)
        self.value_estimator = call_target(config.method.value_estimator, value_network=None)
        self.optimizers = {"actor": _Optimizer(actor, config.learner.actor)}
        if self.critic:
            self.optimizers["critic"] = _Optimizer(critic, config.learner.critic)
        self.version = 0
        self.totals = {name: torch.zeros(len(seeds)) for name in ("kept_fraction", "ess", "outside_fraction")}
        self._kept: list[Tensor] = []
        self._watch_mask()

    def _watch_mask(self) -> None:
        """The loss reports one kept fraction for the call; here each seed's is wanted."""
        policy_term: Callable[..., PolicyTerm] = self.loss.policy_term

        def watched(*args: Any, **kwargs: Any) -> PolicyTerm:
            term = policy_term(*args, **kwargs)
            self._kept.append(term.kept)
            return term

        self.loss.policy_term = watched

    def update(self) -> None:
        """Sample one batch from the lagged policy and train on it."""
        rows = self._sample()
        packed = self._packed(rows)
        self.value_estimator(packed)
        if self.config.learner.whiten_advantage:
            self._whiten(packed)
        self._set_batch_entries(packed)
        if self.config.learner.ess_base is not None:
            ess = torch.stack([effective_sample_size(x) for x in self._response_log_ratios(packed)])
            self.optimizers["actor"].lr_scale = (
                (ess / self.config.learner.ess_base).clamp(max=1).sqrt().float()
            )
        train_actor = not self.critic or self.version >= self.config.learner.critic_warmup_batches
        for part in self._minibatches(rows, packed):
            if self.critic:
                for _ in range(self.config.learner.critic_updates):
                    self._step("critic", self.loss.critic_loss, part)
            if train_actor:
                self._step("actor", self.loss.actor_loss, part)
        self._note(packed)
        self.version += 1

    def _sample(self) -> TensorDict:
        c = self.config.collector
        groups, drawn = c.batch_rows // c.group_size, DYNAMIC_BATCHES if c.dynamic_sampling else 1
        prompts = torch.arange(drawn * groups) + self.version * drawn * groups
        prompt = (prompts % self.task.starts.numel()).repeat_interleave(c.group_size)
        uniform = self.chance.uniform(drawn * c.batch_rows, self.task.max_tokens + 1)
        behaviour = cast(Network, self.behaviour.advance())
        rows = sample(behaviour, self.task, prompt.expand(len(self.seeds), -1), uniform)
        if not c.dynamic_sampling:
            return rows
        reward = rows["reward"].view(len(self.seeds), drawn * groups, c.group_size)
        first = (reward.amax(-1) == reward.amin(-1)).int().argsort(dim=1, stable=True)[:, :groups]
        chosen = (first[..., None] * c.group_size + torch.arange(c.group_size)).flatten(1)
        return cast(TensorDict, rows[torch.arange(len(self.seeds))[:, None], chosen])

    @torch.no_grad()
    def _packed(self, rows: TensorDict) -> TensorDict:
        """Policy tokens of all seeds, ``[1, N]``: responses one after the other, the first seed's first."""
        mask = rows["mask"]
        inputs = rows["prompt"], rows["state"], rows["action"]
        logits = self.actor(*inputs)
        end = mask & ~nn.functional.pad(mask[..., 1:], (0, 1))
        seeds, count, _ = mask.shape
        response = torch.arange(seeds * count).view(seeds, count, 1).expand_as(mask)
        leaves = {
            "action_log_prob": rows["action_log_prob"],
            "learner_log_prob": token_log_prob(logits, rows["action"]),
            "seed": torch.arange(seeds).view(-1, 1, 1).expand_as(mask),
            "response_id": response,
            "group_id": response // self.config.collector.group_size,
        }
        after = {
            "reward": torch.where(end, rows["reward"][..., None], 0.0),
            "done": end,
            "terminated": end,
        }

        if self.critic:
            leaves["state_value"] = value = self.critic(*inputs).squeeze(-1)
            after["state_value"] = torch.where(end, 0.0, nn.functional.pad(value[..., 1:], (0, 1)))
        if "grad_sq_norm" in getattr(self.value_estimator, "entries", ()):
            # exact for a table, whose rows are visited once in a response; the library's proxy for a transformer
            score = score_sq_norm(logits.flatten(0, 2), torch.eye(logits.shape[-1]), rows["action"].flatten())
            score = torch.where(mask, score.view_as(mask), 0.0)
            leaves["grad_sq_norm"] = score.sum(-1, keepdim=True).expand_as(mask)

        def pack(x: Tensor) -> Tensor:
            return x[mask].view(1, -1, 1)

        packed = TensorDict({key: pack(x) for key, x in leaves.items()}, batch_size=[1, int(mask.sum())])
        packed["next"] = TensorDict({key: pack(x) for key, x in after.items()}, batch_size=packed.batch_size)
        return packed

    def _whiten(self, packed: TensorDict) -> None:
        advantage = packed["advantage"].double().flatten()
        seed = packed["seed"].flatten()
        mean = self._per_seed(advantage, seed)
        spread = self._per_seed((advantage - mean[seed]).square(), seed).sqrt().clamp(min=1e-6)
        packed["advantage"] = ((advantage - mean[seed]) / spread[seed]).to(packed["advantage"]).view(1, -1, 1)

    def _set_batch_entries(self, packed: TensorDict) -> None:
        """What a policy channel solves once from all tokens of a batch, such as M2PO's threshold: for each seed."""
        if all(packed.get(name, None) is not None for name in self.loss.entries):
            return
        log_ratio = (packed["learner_log_prob"] - packed["action_log_prob"]).flatten()
        counts = torch.bincount(packed["seed"].flatten()).tolist()
        parts = zip(log_ratio.split(counts), packed["advantage"].flatten().split(counts), strict=True)
        solved = [self.loss.batch_entries(*part) for part in parts]
        for name in solved[0]:
            numbers = torch.stack([entries[name] for entries in solved])
            packed[name] = numbers[packed["seed"]].to(log_ratio)

    def _response_log_ratios(self, packed: TensorDict) -> Tensor:
        """Log of the ratio of each whole response, ``[S, R]``."""
        log_ratio = (packed["learner_log_prob"] - packed["action_log_prob"]).double().flatten()
        total = log_ratio.new_zeros(len(self.seeds) * self.config.collector.batch_rows)
        return total.index_add(0, packed["response_id"].flatten(), log_ratio).view(len(self.seeds), -1)

    def _per_seed(self, x: Tensor, seed: Tensor) -> Tensor:
        """Mean over the tokens of each seed, ``[S]``."""
        sums = x.new_zeros(len(self.seeds)).index_add(0, seed, x)
        return sums / torch.bincount(seed, minlength=len(self.seeds))

    def _minibatches(self, rows: TensorDict, packed: TensorDict) -> list[TensorDictBase]:
        """What the loss is called with: packed tokens with weights, and the rows they are in."""
        mask = rows["mask"]
        place = (mask.flatten().cumsum(0) - 1).view_as(mask)  # of each token in `packed`
        order = self.chance.permutation(mask.shape[1])
        parts = []
        for chosen in order.tensor_split(self.config.learner.minibatches_per_batch, 1):
            index = chosen[..., None].expand(-1, -1, mask.shape[-1])
            part_mask = mask.gather(1, index)
            data = cast(TensorDict, packed[:, place.gather(1, index)[part_mask]])
            data["loss_weight"] = self._loss_weight(data)
            data.batch_size = torch.Size([])
            data["rows"] = TensorDict(
                {
                    "prompt": rows["prompt"].gather(1, chosen),
                    "state": rows["state"].gather(1, index),
                    "action": rows["action"].gather(1, index),
                    "index": part_mask.flatten().nonzero().squeeze(-1),
                }
            )
            parts.append(data)
        return parts

    def _loss_weight(self, data: TensorDict) -> Tensor:
        response, counts = data["response_id"].flatten(), torch.bincount(data["seed"].flatten())
        mode = cast(Aggregation, self.config.learner.aggregation)
        weights = [loss_weights(part, mode) for part in response.split(counts.tolist())]
        return torch.cat(weights).view(1, -1, 1)

    def _step(
        self, name: str, loss: Callable[[TensorDictBase], TensorDictBase], data: TensorDictBase
    ) -> None:
        out = loss(data)
        sum(value for key, value in out.items() if key.startswith("loss_")).backward()
        self.optimizers[name].step()
        if name == "actor":
            kept = self._kept.pop().flatten().float()
            share = 1 / self.config.learner.minibatches_per_batch
            self.totals["kept_fraction"] += share * self._per_seed(kept, data["seed"].flatten())

    def _note(self, packed: TensorDict) -> None:
        seed = packed["seed"].flatten()
        log_ratio = (packed["learner_log_prob"] - packed["action_log_prob"]).flatten()
        low, high = log_ratio_bounds(0.5, 0.4, 0.56)
        outside = ((log_ratio < low) | (log_ratio > high)).float()
        self.totals["outside_fraction"] += self._per_seed(outside, seed)
        parts = log_ratio.split(torch.bincount(seed).tolist())
        self.totals["ess"] += torch.stack([effective_sample_size(part) for part in parts])
