"""The learner: FSDP2 over 1..N ranks, one call per batch of rows.

    rows (this rank's) ─ micro-batches ─> frozen pass, no gradient: learner log-probs, values
        ─ compress to policy tokens [1, N] ─> value estimator (advantage channel) ─> whitening over the global
        batch ─ loss_weight from counts over all ranks ─ diagnostics ─> per minibatch: K critic updates, then one
        actor update
            (loss module per micro-batch, backward ─> clip ─> finite gate ─> AdamW)

Every rank makes the same sequence of collectives: ranks with fewer micro-batches run empty ones at the end,
and every decision (finite gate, number of micro-batches) is taken from reduced numbers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torchrl import torchrl_logger
from torchrl.objectives.value import ValueEstimatorBase

from torchrl_copc.models.causal_lm import CausalLMActor, CausalLMCritic
from torchrl_copc.models.layout import Layout, compress, micro_batches
from torchrl_copc.objectives.aggregate import Aggregation, effective_sample_size, loss_weights
from torchrl_copc.objectives.base import PolicyCriticLoss
from torchrl_copc.objectives.diagnostics import batch_contents, batch_diagnostics

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Metrics of loss modules that the diagnostics have for the learner before the update.
_IN_DIAGNOSTICS = {
    "ESS",
    "clip_fraction_high",
    "clip_fraction_low",
    "explained_variance",
    "kl_approx",
    "kl_k3",
}

# The other ranks wait in a collective while rank 0 samples or evaluates, which may take hours. It need not be
# shorter to notice a dead rank: torchrun ends the whole group then.
_COLLECTIVE_TIMEOUT = timedelta(hours=24)
_MAX_DUMPS = 20  # a run that skips every update must not fill the disk


class NonFiniteError(RuntimeError):
    """A loss, gradient or frozen quantity was NaN or infinite, and ``learner.on_nonfinite`` is ``"stop"``."""


@dataclass
class _Batch:
    """One batch on its way through :meth:`Learner.update`."""

    rows: list[TensorDictBase]
    packed: TensorDict  # all policy tokens of this rank, [1, N]
    minibatches: list[list[TensorDict | None]]  # micro-batches; None where only other ranks have one more
    metrics: dict[str, float]
    losses: dict[str, list[float]]  # per update, over all ranks
    kept: dict[str, list[TensorDictBase]]  # outputs of the frozen pass with their graphs, by micro-batch
    means: dict[str, list[float]]  # this rank's [sum over tokens, tokens] of the loss module's metrics

    def add_means(self, out: dict[str, Tensor], tokens: int) -> None:
        for key in out.keys() - _IN_DIAGNOSTICS:
            if not key.startswith("loss_"):
                # the ratios move from minibatch to minibatch, and with them what a channel keeps
                name = "kept_fraction_current" if key == "kept_fraction" else key
                mean = self.means.setdefault(name, [0.0, 0.0])
                mean[0] += float(out[key]) * tokens
                mean[1] += tokens


@dataclass
class OptimizerConfig:
    """AdamW of one network."""

    lr: float = 1e-6
    warmup_updates: int = 0  # optimizer updates over which lr rises linearly to its value
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float = 1.0  # global L2 norm, over all ranks

    def check(self, name: str) -> None:
        """Refuse settings out of range; ``name`` is where they are set, ``"actor"`` or ``"critic"``."""
        for key in ("lr", "warmup_updates", "weight_decay"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"learner.{name}.{key} must be at least 0, got {getattr(self, key)}")
        for key in ("beta1", "beta2"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"learner.{name}.{key} must be in [0, 1), got {getattr(self, key)}")
        for key in ("eps", "max_grad_norm"):
            if not getattr(self, key) > 0:
                raise ValueError(f"learner.{name}.{key} must be above 0, got {getattr(self, key)}")


@dataclass
class LearnerConfig:
    """Settings of the learner.

    Raises:
        ValueError: if a setting is out of range, with its name and value.
    """

    actor: OptimizerConfig = field(default_factory=OptimizerConfig)
    critic: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    max_tokens_per_micro_batch: int = 8192  # tokens per rank, padding included
    layout: str = "padded"  # or "packed": rows end to end, for variable-length attention on CUDA
    aggregation: str = "token_mean"  # or "response_mean"
    whiten_advantage: bool = True  # standardise over all policy tokens of the global batch
    minibatches_per_batch: int = 1  # actor updates per batch
    critic_updates: int = 1  # critic updates per actor update
    critic_warmup_batches: int = 0  # first batches in which only the critic, if any, is trained
    # VCPO's step size: the actor's lr times sqrt(min(1, ess/ess_base)), with the effective sample size of the batch's
    # responses as a fraction of their number, from their whole ratios. None = off.
    ess_base: float | None = None
    param_dtype: str = "float32"  # of the passes, or "bfloat16"; master weights and heads stay float32
    on_nonfinite: str = "stop"  # or "skip": leave the update out; either way the batch is written to a file
    # The frozen pass serves as the forward pass of the first update of both networks. Exact, and about a fifth of
    # a step faster, but the activations of the whole first minibatch must fit the memory at once.
    keep_activations: bool = False
    device: str = "auto"  # "auto" = this rank's GPU when there is one, else "cpu"
    seed: int = 0  # of torch's generators and of the split into minibatches

    def __post_init__(self) -> None:
        self.actor.check("actor")
        self.critic.check("critic")
        for key, least in (
            ("max_tokens_per_micro_batch", 1),
            ("minibatches_per_batch", 1),
            ("critic_updates", 1),
            ("critic_warmup_batches", 0),
        ):
            if getattr(self, key) < least:
                raise ValueError(f"learner.{key} must be at least {least}, got {getattr(self, key)}")
        for key, accepted in (
            ("layout", ("padded", "packed")),
            ("aggregation", ("token_mean", "response_mean")),
            ("param_dtype", tuple(_DTYPES)),
            ("on_nonfinite", ("skip", "stop")),
            ("device", ("auto", "cpu", "cuda")),
        ):
            if getattr(self, key) not in accepted:
                choices = ", ".join(accepted)
                raise ValueError(f"learner.{key} must be one of {choices}, got {getattr(self, key)!r}")
        if self.ess_base is not None and not 0 < self.ess_base <= 1:
            raise ValueError(f"learner.ess_base must be in (0, 1], got {self.ess_base}")


def start_process_group(device: str = "auto") -> torch.device:
    """Join torchrun's process group, or make one of a single rank, and say which device this rank computes
    on.

    Args:
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.

    Raises:
        ValueError: for ``"cuda"`` where torch finds no GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "learner.device=cuda, but torch finds no CUDA GPU; set learner.device to auto or cpu"
        )
    use_cuda = device != "cpu" and torch.cuda.is_available()
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if use_cuda else "gloo"
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, timeout=_COLLECTIVE_TIMEOUT)
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if not use_cuda:
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


class _Network:
    """One network with its optimizer: sharding, learning-rate warm-up, clipping and the finite gate."""

    def __init__(
        self,
        module: CausalLMActor | CausalLMCritic,
        config: OptimizerConfig,
        mesh: DeviceMesh,
        dtype: torch.dtype,
    ) -> None:
        self.module: Any = module
        self.config, self.updates, self.lr_scale = config, 0, 1.0
        self.net: Any = module.net
        policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
        )
        blocks = getattr(module.trunk, "layers", None)
        if not isinstance(blocks, nn.ModuleList):
            raise TypeError(f"{type(module.trunk).__name__} has no `layers` to shard")
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        if isinstance(module, CausalLMCritic):
            fully_shard(module.net.value_head, mesh=mesh, mp_policy=MixedPrecisionPolicy())
        fully_shard(self.net, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(
            self.net.parameters(),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
        # Made now rather than at the first step, so that a checkpoint can be written and read at any time.
        for parameter in self.net.parameters():
            self.optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        warm = min(1.0, (self.updates + 1) / max(1, self.config.warmup_updates))
        return self.config.lr * warm * self.lr_scale

    def grad_norm(self) -> float:
        """L2 norm of the gradient over all ranks; the same number on every rank."""
        gradients = [p.grad for p in self.net.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def step(self, grad_norm: float) -> None:
        """Clip the gradient of this norm and take one optimizer step."""
        scale = self.config.max_grad_norm / (grad_norm + 1e-6)
        if scale < 1:
            for parameter in self.net.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr
        self.optimizer.step()
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        """Sharded tensors by name; loading into them in place changes the network and its optimizer."""
        state = {name: self.optimizer.state[p] for name, p in self.net.named_parameters()}
        return {"model": self.net.state_dict(), "optimizer": state}


class Learner:
    """Trains an actor, and a critic unless the method has none, on batches of rows; every rank makes the same calls.

    Args:
        config: settings.
        actor: language-model actor, not yet sharded.
        critic: language-model critic, not yet sharded; ``None`` for a critic-free method.
        loss: policy channel, built on the same ``actor`` and ``critic`` with ``functional=False``.
        value_estimator: advantage channel, built with ``value_network=None``.
        dump_dir: where batches with non-finite numbers are written.

    Attributes:
        version: batches consumed so far.
        nonfinite_updates: updates that the finite gate left out so far.

    Raises:
        TypeError: if a trunk has no ``layers``.
        ValueError: if there is no critic and the value estimator needs values.
    """

    def __init__(
        self,
        config: LearnerConfig,
        actor: CausalLMActor,
        critic: CausalLMCritic | None,
        loss: PolicyCriticLoss,
        value_estimator: ValueEstimatorBase,
        dump_dir: str | Path = "nonfinite",
    ) -> None:
        self.config, self.loss, self.value_estimator = config, loss, value_estimator
        self.dump_dir = Path(dump_dir)
        self.device = start_process_group(config.device)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(config.seed)
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        dtype = _DTYPES[config.param_dtype]
        if critic is None and getattr(value_estimator, "needs_value", True):
            raise ValueError(
                f"{type(value_estimator).__name__} needs values and there is no critic: set method.critic=true, or "
                "choose a critic-free method.value_estimator"
            )
        self.actor = _Network(actor, config.actor, mesh, dtype)
        self.critic = None if critic is None else _Network(critic, config.critic, mesh, dtype)
        for name, buffer in loss.named_buffers(recurse=False):
            setattr(loss, name, buffer.to(self.device))
        self.version = 0
        self.nonfinite_updates = 0
        self._times: dict[str, float] = {}

    # one batch

    def update(self, rows: Sequence[TensorDictBase], version: int | None = None) -> dict[str, float]:
        """Consume one batch; :attr:`version` rises by one whatever happens to it.

        Args:
            rows: this rank's part of the batch; ranks may hold different numbers.
            version: batches consumed before this one, for the staleness metrics. Defaults to :attr:`version`.

        Returns:
            Metrics over the global batch, the same on every rank. Times are this rank's, in seconds. Without a
            finite frozen pass there are only those of the rows themselves (counts, reward, staleness) and times.

        Raises:
            RowError: if a row must not be trained on.
            ValueError: if a rank has fewer rows than ``learner.minibatches_per_batch``.
            NonFiniteError: if something was not finite and ``learner.on_nonfinite`` is ``"stop"``.
        """
        start = perf_counter()
        if version is not None:
            self.version = version
        self._times = dict.fromkeys(("frozen", "diagnostics", "forward", "backward", "optimizer"), 0.0)
        fewest = int(-self._reduce([-len(rows)], dist.ReduceOp.MAX)[0])
        if fewest < self.config.minibatches_per_batch:
            raise ValueError(
                f"a rank has {fewest} rows for {self.config.minibatches_per_batch} minibatches: raise "
                "collector.batch_rows or lower learner.minibatches_per_batch"
            )
        try:
            metrics = self._update(self._shuffled(rows))
        except NonFiniteError:
            self.version += 1
            raise
        self.version += 1
        metrics |= {f"time_{name}": seconds for name, seconds in self._times.items()}
        metrics["time_total"] = perf_counter() - start
        metrics["nonfinite_updates_total"] = float(self.nonfinite_updates)
        return metrics

    def _update(self, rows: list[TensorDictBase]) -> dict[str, float]:
        packed = compress(rows).to(self.device)
        with self._timed("diagnostics"):
            contents = batch_contents(packed, version=self.version).reduced(self._all_reduce).metrics()
        metrics = {"nonfinite_updates": 0.0} | contents
        batch = _Batch(rows, packed, self._minibatches(rows), metrics, losses={}, kept={}, means={})
        train_actor = self.critic is None or self.version >= self.config.critic_warmup_batches
        with self._timed("frozen"):
            written = self._frozen_pass(batch, train_actor)
            finite = all(bool(packed.get(key).isfinite().all()) for key in written)
        if self._any(not finite):
            self._nonfinite("a log-prob or value of the frozen pass", batch)
            return metrics
        self.value_estimator(packed)
        advantage = packed["advantage"]
        if self.config.whiten_advantage:
            self._whiten(packed)
        self._set_batch_entries(packed)
        self._set_loss_weights(batch)
        with self._timed("diagnostics"):
            moments = batch_diagnostics(
                packed, self.loss, self.value_estimator, version=self.version, advantage=advantage
            )
            metrics |= moments.reduced(self._all_reduce).metrics()
        if self.config.ess_base is not None:
            metrics["response_ESS"] = ess = self._response_ess(packed)
            self.actor.lr_scale = math.sqrt(min(1.0, ess / self.config.ess_base))
        for minibatch in batch.minibatches:
            if self.critic is not None:
                for _ in range(self.config.critic_updates):
                    self._step("critic", self.critic, self.loss.critic_loss, minibatch, batch)
            if train_actor:
                self._step("actor", self.actor, self.loss.actor_loss, minibatch, batch)
        metrics |= {f"loss_{name}": sum(losses) / len(losses) for name, losses in batch.losses.items()}
        names = sorted(batch.means)
        means = self._reduce([x for name in names for x in batch.means[name]], dist.ReduceOp.SUM).view(-1, 2)
        return metrics | dict(zip(names, (means[:, 0] / means[:, 1]).tolist(), strict=True))

    def _shuffled(self, rows: Sequence[TensorDictBase]) -> list[TensorDictBase]:
        if self.config.minibatches_per_batch == 1:
            return list(rows)
        rng = torch.Generator().manual_seed(self.config.seed * 1_000_003 + self.version)
        return [rows[i] for i in torch.randperm(len(rows), generator=rng).tolist()]

    def _minibatches(self, rows: list[TensorDictBase]) -> list[list[TensorDict | None]]:
        """Micro-batches of each minibatch; ``None`` where another rank has more of them."""
        parts = self.config.minibatches_per_batch
        bounds = [len(rows) * i // parts for i in range(parts + 1)]
        minibatches: list[list[TensorDict | None]] = []
        first = 0
        for low, high in pairwise(bounds):
            part = micro_batches(
                rows[low:high], self.config.max_tokens_per_micro_batch, cast(Layout, self.config.layout)
            )
            for batch in part:
                batch["token_index"] += first
                batch["row_index"] += low
            first += sum(batch["token_index"].numel() for batch in part)
            minibatches.append([batch.to(self.device) for batch in part])
        most = self._reduce([len(part) for part in minibatches], dist.ReduceOp.MAX).tolist()
        return [part + [None] * (int(n) - len(part)) for part, n in zip(minibatches, most, strict=True)]

    def _frozen_pass(self, whole: _Batch, train_actor: bool) -> list[NestedKey]:
        """Write learner log-probs, values and next values, as they are before any update; the keys written."""
        packed = whole.packed
        log_prob, value, score = (torch.zeros(packed.shape[1], device=self.device) for _ in range(3))
        final_value = torch.zeros(len(whole.rows), device=self.device)
        with_score = "grad_sq_norm" in getattr(self.value_estimator, "entries", ())
        self.actor.module.with_score = with_score
        with self._frozen():
            for number, minibatch in enumerate(whole.minibatches):
                keep = self.config.keep_activations and number == 0
                for batch in minibatch:
                    lm = TensorDict({"lm": self._idle() if batch is None else batch})
                    with torch.set_grad_enabled(keep and train_actor):
                        out = self.actor.module(lm.copy())
                    if keep and train_actor:
                        whole.kept.setdefault("actor", []).append(out.select(*self.actor.module.out_keys))
                    if batch is not None:
                        log_prob[batch["token_index"]] = out["log_prob"].detach().flatten()
                        if with_score:
                            score[batch["token_index"]] = out["score_sq_norm"].flatten()
                    if self.critic is None:
                        continue
                    with torch.set_grad_enabled(keep):
                        out = self.critic.module(lm.copy()).select(*self.critic.module.out_keys)
                    if keep:
                        whole.kept.setdefault("critic", []).append(out)
                    if batch is not None:
                        value[batch["token_index"]] = out["state_value"].detach().flatten()
                        final_value[batch["row_index"]] = out["final_value"].detach()
        self.actor.module.with_score = False
        response = packed["response_id"].flatten()
        written: dict[NestedKey, Tensor] = {"learner_log_prob": log_prob}
        if with_score:
            written["grad_sq_norm"] = torch.zeros_like(final_value).index_add(0, response, score)[response]
        if self.critic is not None:
            done, truncated = packed["next", "done"].flatten(), packed["next", "truncated"].flatten()
            at_end = torch.where(truncated, final_value[response], 0.0)
            written["state_value"] = value
            written["next", "state_value"] = torch.where(done, at_end, value.roll(-1))
        for key, x in written.items():
            packed[key] = x.reshape(1, -1, 1)
        return list(written)

    def _set_batch_entries(self, packed: TensorDict) -> None:
        """What a policy channel solves once from the policy tokens of all ranks, such as M2PO's threshold."""
        keys = {name: getattr(self.loss.tensor_keys, name) for name in self.loss.entries}
        if all(packed.get(key, None) is not None for key in keys.values()):
            return
        log_ratio = packed["learner_log_prob"] - packed["action_log_prob"]
        tokens = (self._gather(x.flatten()) for x in (log_ratio, packed["advantage"]))
        for name, number in self.loss.batch_entries(*tokens).items():
            packed[keys[name]] = number.to(log_ratio).expand_as(log_ratio).clone()

    def _response_ess(self, packed: TensorDict) -> float:
        """``(sum w)^2 / (n sum w^2)`` over the responses of the global batch, ``w`` their whole frozen ratio."""
        response = packed["response_id"].flatten()
        total = torch.zeros(int(response.max()) + 1, dtype=torch.float64, device=self.device)
        log_ratio = (packed["learner_log_prob"] - packed["action_log_prob"]).double().flatten()
        return float(effective_sample_size(self._gather(total.index_add(0, response, log_ratio))))

    def _set_loss_weights(self, batch: _Batch) -> None:
        """Count denominators per minibatch, over all ranks and micro-batches, before the first backward."""
        packed = batch.packed
        packed["loss_weight"] = torch.zeros_like(packed["action_log_prob"])
        for minibatch in batch.minibatches:
            index = torch.cat([part["token_index"] for part in minibatch if part is not None])
            responses = packed["response_id"][:, index]
            local = [index.numel(), responses.unique().numel()]
            tokens, count = self._reduce(local, dist.ReduceOp.SUM).long().tolist()
            packed["loss_weight"][:, index] = loss_weights(
                responses, cast(Aggregation, self.config.aggregation), num_tokens=tokens, num_responses=count
            )

    def _whiten(self, packed: TensorDict) -> None:
        advantage = packed["advantage"].double()
        n, total, square = self._reduce(
            [advantage.numel(), advantage.sum(), advantage.square().sum()], dist.ReduceOp.SUM
        ).tolist()
        mean = total / n
        std = math.sqrt(max(square / n - mean * mean, 0.0))
        packed["advantage"] = ((advantage - mean) / max(std, 1e-6)).float()

    def _step(
        self,
        name: str,
        network: _Network,
        loss: Callable[[TensorDictBase], TensorDictBase],
        minibatch: list[TensorDict | None],
        batch: _Batch,
    ) -> None:
        """Accumulate the gradient of one minibatch, and take the optimizer step when it is finite."""
        total = torch.zeros((), device=self.device)
        kept = batch.kept.pop(name, [])  # none after the first update: the weights have changed
        kept.reverse()
        for part in minibatch:
            with self._timed("forward"):
                lm = (self._idle() if part is None else part).copy()
                if kept:
                    lm["outputs"] = kept.pop()
                if part is None:
                    out = network.module(TensorDict({"lm": lm}))
                    value = 0.0 * sum(out[key].sum() for key in network.module.out_keys)
                else:
                    data = batch.packed[:, part["token_index"]]
                    data.batch_size = torch.Size([])
                    out = dict(loss(data.set("lm", lm)).items())
                    value = sum(out[key] for key in out if key.startswith("loss_"))
                    batch.add_means(out, part["token_index"].numel())
            with self._timed("backward"):
                # FSDP2 averages gradients over ranks; the weights already hold the global denominators.
                (value * self.world_size).backward()
            total += value.detach()
        with self._timed("optimizer"):
            grad_norm = network.grad_norm()
            loss_value = float(self._reduce([total], dist.ReduceOp.SUM)[0])
            finite = math.isfinite(grad_norm) and math.isfinite(loss_value)
            if finite:
                batch.metrics[f"lr_{name}"] = network.lr
                network.step(grad_norm)
            network.optimizer.zero_grad()
        batch.metrics[f"grad_norm_{name}"] = grad_norm
        batch.losses.setdefault(name, []).append(loss_value)
        if not finite:
            self._nonfinite(f"the {name}'s loss ({loss_value}) or gradient norm ({grad_norm})", batch)

    def _idle(self) -> TensorDict:
        """Two tokens that keep this rank's collectives in step with ranks that have more micro-batches."""
        zeros = torch.zeros(1, 2, dtype=torch.long, device=self.device)
        one = torch.zeros(1, dtype=torch.long, device=self.device)
        return TensorDict(
            {
                "input_ids": zeros,
                "position_ids": torch.arange(2, device=self.device)[None],
                "predict_index": one,
                "target_ids": one,
                "final_index": one,
            },
            batch_size=[],
        )

    def _nonfinite(self, what: str, batch: _Batch) -> None:
        self.nonfinite_updates += 1
        batch.metrics["nonfinite_updates"] += 1
        path = self.dump_dir / f"version{self.version:06d}_rank{self.rank}.pt"
        if self.nonfinite_updates <= _MAX_DUMPS:
            self.dump_dir.mkdir(parents=True, exist_ok=True)
            dump = {"reason": what, "version": self.version, "rows": batch.rows, "packed": batch.packed.cpu()}
            torch.save(dump, path)
            torchrl_logger.warning(f"{what} is not finite at version {self.version}: batch written to {path}")
        if self.config.on_nonfinite == "stop":
            raise NonFiniteError(
                f"{what} at version {self.version} is not finite; the batch is in {path}. Lower the learning "
                "rate, check the rewards, or set learner.on_nonfinite=skip to leave such updates out"
            )

    # weights and scores

    def actor_weights(self, device: str | torch.device | None = None) -> dict[str, Tensor]:
        """Full tensors of the actor under its Hugging Face names; a tied head is left out.

        A collective: every rank calls it. Rank 0 gets copies, the others an empty dict.

        Args:
            device: where the copies go. Defaults to the learner's device.
        """
        tied = self.actor.module.tied_names
        weights = {}
        for name, value in self.actor.module.model.state_dict().items():
            if name in tied:
                continue
            full = value.full_tensor() if isinstance(value, DTensor) else value
            if self.rank == 0:
                weights[name] = full.detach().to(device or self.device, copy=True)
        return weights

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Log-prob (nats) of every token but the first given its prefix, by the current actor.

        A collective: every rank calls it with the same sequences and gets the same numbers.

        Args:
            sequences: token ids, at least two per sequence.
            temperature: of the softmax.
        """
        scores = []
        with self._frozen():
            for sequence in sequences:
                ids = torch.tensor([sequence], dtype=torch.long, device=self.device)
                positions = torch.arange(ids.shape[1], device=self.device)
                log_prob, _ = self.actor.net(ids, positions[None], positions[:-1], ids[0, 1:], temperature)
                scores.append(log_prob.tolist())
        return scores

    @property
    def networks(self) -> dict[str, _Network]:
        """The actor, and the critic unless the method has none."""
        return {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})

    def state_dict(self) -> dict[str, Any]:
        """Sharded tensors of the networks and their optimizers; loading into them in place restores them."""
        return {name: network.state_dict() for name, network in self.networks.items()}

    def counters(self) -> dict[str, int]:
        """The numbers a checkpoint must hold beside :meth:`state_dict`."""
        return {
            "version": self.version,
            "nonfinite_updates": self.nonfinite_updates,
            **{f"{name}_updates": network.updates for name, network in self.networks.items()},
        }

    def load_counters(self, counters: dict[str, int]) -> None:
        """Restore what :meth:`counters` returned."""
        self.version, self.nonfinite_updates = counters["version"], counters["nonfinite_updates"]
        for name, network in self.networks.items():
            network.updates = counters[f"{name}_updates"]

    # collectives and clocks

    def _reduce(self, values: Sequence[Any], op: dist.ReduceOp.RedOpType) -> Tensor:
        tensor = torch.tensor([float(v) for v in values], dtype=torch.float64)
        dist.all_reduce(tensor, op)
        return tensor

    @staticmethod
    def _all_reduce(vector: Tensor, op: Literal["sum", "max"]) -> Tensor:
        dist.all_reduce(vector, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)
        return vector

    def _gather(self, values: Tensor) -> Tensor:
        """One tensor of all ranks' values, whose numbers may differ."""
        if self.world_size == 1:
            return values
        parts: list[Any] = [None] * self.world_size
        dist.all_gather_object(parts, values.cpu())
        return torch.cat(parts).to(values.device)

    def _any(self, flag: bool) -> bool:
        return bool(self._reduce([flag], dist.ReduceOp.MAX)[0])

    @contextmanager
    def _frozen(self) -> Iterator[None]:
        with torch.no_grad():
            yield
        # The root keeps its parameters gathered after a forward pass; without a backward pass they would go
        # stale.
        for network in self.networks.values():
            if isinstance(network.net, FSDPModule):
                network.net.reshard()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = self._clock()
        yield
        self._times[name] += self._clock() - start

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter()
