"""What a batch shows before it is trained on: one set of metrics for every method.

    packed policy tokens of one rank ─> batch_contents(), batch_diagnostics() ─> Moments (sums and maxima)
        ─ reduced(): one sum and one maximum over ranks ─> metrics(): numbers by name

Everything is computed from frozen quantities, off the autograd graph, and added up in float64: neither micro-batches
nor the number of ranks matter. ``docs/diagnostics.md`` has each metric's formula and what it is good for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.objectives.value import ValueEstimatorBase

from torchrl_copc.objectives.aggregate import masked_mean
from torchrl_copc.objectives.base import PolicyCriticLoss
from torchrl_copc.value.estimator import OffPolicyEstimator

# Neither exp of a log-ratio nor a product of ratios along a response may overflow in a metric: log-ratios count as at
# most 20 nats either way, unclipped advantages as at most 1e20.
LOG_RATIO_LIMIT = 20.0
ADVANTAGE_LIMIT = 1e20

# Last number of each bucket but the open one.
STALENESS_BUCKETS = (0, 2, 4, 8, 16, 32)
POSITION_BUCKETS = (15, 63, 255, 1023)

AllReduce = Callable[[Tensor, Literal["sum", "max"]], Tensor]
"""Takes and returns a float64 vector on the CPU, whose entries are summed or maximised over ranks."""


def bucket_names(last: tuple[int, ...]) -> list[str]:
    """Names of buckets of non-negative integers, given the last number of each but the open one.

    Examples:
        >>> bucket_names((0, 2, 4))
        ['0', '1_2', '3_4', '5_up']
    """
    first = [0, *(number + 1 for number in last)]
    closed = [str(a) if a == b else f"{a}_{b}" for a, b in zip(first, last, strict=False)]
    return [*closed, f"{first[-1]}_up"]


def _bucket(x: Tensor, last: tuple[int, ...]) -> Tensor:
    return torch.bucketize(x, torch.tensor(last, device=x.device))


@dataclass
class Moments:
    """What of a batch adds up over ranks; :meth:`metrics` follow from it.

    Args:
        means: sum and count by name, float64 scalars. The names are those of the method: they are the same on all
            ranks, also where a rank has no token that counts.
        maxima: largest value by name, float64 scalars.
        staleness: number of tokens by staleness, ``[S]`` with ``S`` one more than the maximum ``staleness_max``.

    Examples:
        >>> import torch
        >>> one, other = Moments(), Moments()
        >>> one.add("x", torch.tensor([1.0, torch.nan]), torch.tensor([True, False]))
        >>> other.add("x", torch.tensor([4.0, 4.0]))
        >>> alone = lambda vector, op: vector
        >>> both = lambda vector, op: vector + torch.tensor([8.0, 2.0])  # what the other rank has
        >>> one.reduced(alone).metrics(), one.reduced(both).metrics()
        ({'x': 1.0}, {'x': 3.0})
    """

    means: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    staleness: Tensor | None = None

    def add(self, name: str, x: Tensor, valid: Tensor | None = None) -> None:
        """The mean of ``x`` over the entries where ``valid``, all of them by default."""
        x = x.double()
        if valid is None:
            self.means[name] = masked_mean(x) * x.numel(), x.new_tensor(x.numel())
        else:
            count = valid.sum()
            self.means[name] = masked_mean(x, valid) * count, count.double()

    def add_spread(self, name: str, x: Tensor) -> None:
        """First and second moment of ``x``."""
        self.add(name, x)
        self.add(f"{name}_square", x.double().square())

    def add_buckets(self, name: str, x: Tensor, number: Tensor, last: tuple[int, ...]) -> None:
        """The mean of ``x`` by buckets of ``number``, see :func:`bucket_names`."""
        bucket, names = _bucket(number, last).flatten(), bucket_names(last)
        totals = torch.bincount(bucket, weights=x.double().flatten(), minlength=len(names))
        counts = torch.bincount(bucket, minlength=len(names)).double()
        for label, total, count in zip(names, totals, counts, strict=True):
            self.means[f"{name}_{label}"] = total, count

    def reduced(self, all_reduce: AllReduce) -> Moments:
        """The moments of all ranks together, on the CPU; a collective.

        Args:
            all_reduce: called once with ``"max"`` where there are maxima, then once with ``"sum"``.
        """
        maxima: list[Tensor] = []
        if self.maxima:
            maxima = list(all_reduce(torch.stack(list(self.maxima.values())).cpu(), "max"))
        largest = dict(zip(self.maxima, maxima, strict=True))
        parts = [number for pair in self.means.values() for number in pair]
        sums = torch.stack(parts).cpu() if parts else torch.zeros(0, dtype=torch.float64)
        if self.staleness is not None:
            missing = int(largest["staleness_max"]) + 1 - self.staleness.numel()
            sums = torch.cat([sums, torch.nn.functional.pad(self.staleness.cpu(), (0, missing))])
        sums = all_reduce(sums, "sum")
        pairs = sums[: len(parts)].view(-1, 2)
        means = {name: (pair[0], pair[1]) for name, pair in zip(self.means, pairs, strict=True)}
        return Moments(means, largest, None if self.staleness is None else sums[len(parts) :])

    def metrics(self) -> dict[str, float]:
        """Numbers by name; means over no token are left out."""
        found = {name: float(total / count) for name, (total, count) in self.means.items() if count > 0}
        out = {name: float(largest) for name, largest in self.maxima.items()}

        def spread(name: str) -> tuple[float, float]:
            mean, square = found.pop(name), found.pop(f"{name}_square")
            return mean, math.sqrt(max(square - mean * mean, 0.0))

        if "log_ratio" in found:
            out["log_ratio_mean"], out["log_ratio_std"] = spread("log_ratio")
            out["kl_k1"] = -out["log_ratio_mean"]
            out["ESS"] = found.pop("ratio") ** 2 / found.pop("ratio_square")
        if "advantage" in found:
            out["advantage_mean"], out["advantage_std"] = spread("advantage")
        if "value_error" in found:
            out["value_target_mean"], target = spread("value_target")
            out["explained_variance"] = 1.0 - spread("value_error")[1] ** 2 / max(target**2, 1e-12)
        if self.staleness is not None:
            out["responses"] = float(self.means["reward"][1])
            out |= _staleness_metrics(self.staleness)
        return found | out


def _staleness_metrics(counts: Tensor) -> dict[str, float]:
    versions, tokens = torch.arange(counts.numel()), counts.sum()
    below = counts.cumsum(0) / tokens
    out = {
        "tokens": float(tokens),
        "staleness_mean": float((counts * versions).sum() / tokens),
        "staleness_p50": float((below < 0.5).sum()),
        "staleness_p95": float((below < 0.95).sum()),
    }
    bucket = _bucket(versions, STALENESS_BUCKETS)
    for i, label in enumerate(bucket_names(STALENESS_BUCKETS)):
        share = float(counts[bucket == i].sum() / tokens)
        if share > 0:
            out[f"staleness_share_{label}"] = share
    return out


def _staleness(packed: TensorDictBase, version: int) -> Tensor:
    return (version - packed["policy_version"].long()).clamp(min=0)


def batch_contents(packed: TensorDictBase, *, version: int) -> Moments:
    """How much is in a batch and how old it is; needs nothing of the networks.

    Args:
        packed: policy tokens, batch size ``[1, N]``, every leaf ``[1, N, 1]``: ``policy_version`` and
            ``("next", "reward" | "done")``.
        version: batches the learner has consumed.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> end = torch.tensor([False, True, True]).view(1, 3, 1)
        >>> sampled = torch.tensor([4, 5, 3]).view(1, 3, 1)
        >>> data = TensorDict({"policy_version": sampled, "next": {"reward": 2.0 * end, "done": end}}, [1, 3])
        >>> metrics = batch_contents(data, version=5).metrics()
        >>> metrics["reward"], metrics["staleness_mean"], metrics["staleness_max"], metrics["responses"]
        (2.0, 1.0, 2.0, 2.0)
    """
    staleness = _staleness(packed, version).flatten()
    reward, responses = packed["next", "reward"].double().sum(), packed["next", "done"].sum().double()
    return Moments(
        means={"reward": (reward, responses)},
        maxima={"staleness_max": staleness.max().double()},
        staleness=torch.bincount(staleness).double(),
    )


def actor_weight(
    loss: PolicyCriticLoss, log_ratio: Tensor, advantage: Tensor, **entries: Tensor
) -> tuple[Tensor, Tensor]:
    """What a policy channel multiplies the advantage with, at the learner before the update.

    ``w_t = -(d term_t / d log_ratio_t) / A_t``: channels are positively homogeneous in the advantage, so that its sign
    stands for it here (a zero counts as positive). On-policy it is 1, unclipped it is the ratio.

    Args:
        loss: holds the channel; its parameters are not read.
        log_ratio: frozen log-ratio, nats, ``[*B, T, 1]``; at most 20 either way for the weight.
        advantage: as the channel gets it, same shape.
        **entries: further entries of the channel.

    Returns:
        ``(weight, kept)``: float64, and the channel's own ``kept`` (bool).

    Examples:
        >>> import torch
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl_copc.objectives import AsyncPPOLoss
        >>> actor = TensorDictModule(torch.nn.Linear(1, 1), in_keys=["x"], out_keys=["log_prob"])
        >>> weight, kept = actor_weight(
        ...     AsyncPPOLoss(actor), torch.tensor([0.1, 1.0, 1.0]), torch.tensor([2.0, 2.0, -2.0])
        ... )
        >>> weight, kept
        (tensor([1.1052, 0.0000, 2.7183], dtype=torch.float64), tensor([ True, False,  True]))
    """
    bounded = log_ratio.detach().double().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    sign = torch.where(advantage < 0, -1.0, 1.0).double()
    with torch.enable_grad():
        leaf = bounded.clone().requires_grad_()
        term = loss.policy_term(leaf, bounded, sign, **entries).term
        (slope,) = torch.autograd.grad(term.sum(), leaf)
    with torch.no_grad():
        kept = loss.policy_term(log_ratio, log_ratio, advantage, **entries).kept
    return 0.0 - slope * sign, kept


def batch_diagnostics(
    packed: TensorDictBase,
    loss: PolicyCriticLoss,
    estimator: ValueEstimatorBase,
    *,
    version: int,
    advantage: Tensor | None = None,
) -> Moments:
    """The diagnostics of a batch's policy tokens, after the value estimator and before the first update.

    Args:
        packed: policy tokens, batch size ``[1, N]``, every leaf ``[1, N, 1]``: ``action_log_prob``,
            ``learner_log_prob``, ``advantage`` (as the policy channel gets it), ``value_target``, ``policy_version``,
            ``response_id``, ``position``, ``("next", "reward" | "done" | "terminated")``, with a critic ``state_value``
            and ``("next", "state_value")``, and the entries that loss and estimator name.
        loss: holds the policy channel.
        estimator: wrote the advantage. What is about its ratios is left out when it is not one of this package's.
        version: batches the learner has consumed.
        advantage: before whitening, ``[1, N, 1]``. Defaults to the one in ``packed``.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl_copc.objectives import COPCLoss
        >>> from torchrl_copc.value import COPCEstimator
        >>> actor = TensorDictModule(torch.nn.Linear(1, 1), in_keys=["x"], out_keys=["log_prob"])
        >>> end, zeros = torch.tensor([False, True]).view(1, 2, 1), torch.zeros(1, 2, 1)
        >>> after = {"reward": end.float(), "done": end, "terminated": end, "state_value": zeros}
        >>> names = ("action_log_prob", "state_value", "policy_version", "response_id")
        >>> tokens = TensorDict(dict.fromkeys(names, zeros.long()) | {"next": after}, batch_size=[1, 2])
        >>> tokens["learner_log_prob"] = torch.tensor([0.0, 2.0]).view(1, 2, 1)
        >>> tokens["position"] = torch.arange(2).view(1, 2, 1)
        >>> estimator = COPCEstimator(value_network=None, lmbda=1.0)
        >>> metrics = batch_diagnostics(estimator(tokens), COPCLoss(actor), estimator, version=3).metrics()
        >>> metrics["kept_fraction"], metrics["clip_fraction_high"], metrics["kept_fraction_staleness_3_4"]
        (0.5, 0.5, 0.5)
        >>> round(metrics["surviving_coefficient"], 2)
        1.28
    """
    with torch.no_grad():
        packed = packed.detach()
        advantage = (packed["advantage"] if advantage is None else advantage.detach()).double()
        log_ratio = packed["learner_log_prob"] - packed["action_log_prob"]
        entries = {name: packed[getattr(loss.tensor_keys, name)] for name in loss.entries}
        weight, kept = actor_weight(loss, log_ratio, packed["advantage"], **entries)
        bounded = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        ratio = bounded.double().exp()

        moments = Moments()
        _add_ratios(moments, log_ratio, ratio)
        _add_kept(moments, packed, kept, version)
        moments.add("on_policy_noise", log_ratio.abs(), _sampled_by(packed, version))
        moments.add_spread("advantage", advantage)
        if packed.get("state_value", None) is not None:
            _add_values(moments, packed)
        if isinstance(estimator, OffPolicyEstimator):
            _add_weights(moments, estimator, log_ratio)
            ideal, surviving = _ideal_and_surviving(packed, estimator, bounded, advantage)
            moments.add("surviving_coefficient", surviving, packed["position"] == 0)
            _add_bias(moments, weight, ratio, advantage, ideal)
        return moments


def _add_ratios(moments: Moments, log_ratio: Tensor, ratio: Tensor) -> None:
    moments.add_spread("log_ratio", log_ratio)
    moments.add_spread("ratio", ratio)
    moments.add("kl_k3", ratio - 1 - log_ratio)


def _add_kept(moments: Moments, packed: TensorDictBase, kept: Tensor, version: int) -> None:
    moments.add("kept_fraction", kept)
    moments.add_buckets("kept_fraction_staleness", kept, _staleness(packed, version), STALENESS_BUCKETS)
    moments.add_buckets("kept_fraction_position", kept, packed["position"], POSITION_BUCKETS)


def _sampled_by(packed: TensorDictBase, version: int) -> Tensor:
    """True on the tokens of responses that this version sampled from beginning to end."""
    response = packed["response_id"].flatten()
    other = (packed["policy_version"] != version).flatten().double()
    others = torch.zeros_like(other).index_add(0, response, other)  # there are no more responses than tokens
    return (others[response] == 0).view_as(packed["response_id"])


def _add_values(moments: Moments, packed: TensorDictBase) -> None:
    value, target = packed["state_value"].double(), packed["value_target"].double()
    moments.add("value_mean", value)
    moments.add_spread("value_target", target)
    moments.add_spread("value_error", target - value)
    moments.maxima["value_error_max"] = (target - value).abs().max()


def _add_weights(moments: Moments, estimator: OffPolicyEstimator, log_ratio: Tensor) -> None:
    """What the clip of the residuals' weights does."""
    if estimator.log_weight_bounds is None:
        return
    low, high = estimator.log_weight_bounds
    moments.add("clip_fraction_low", log_ratio < low)
    moments.add("clip_fraction_high", log_ratio > high)
    moments.add("log_c_mean", log_ratio.clamp(low, high))


def _ideal_and_surviving(
    packed: TensorDictBase, estimator: OffPolicyEstimator, log_ratio: Tensor, advantage: Tensor
) -> tuple[Tensor, Tensor]:
    """The advantage without clips, and what a reward of 1 on the last token adds to each token's advantage."""
    if not estimator.needs_value:  # the whole return reaches every token, and no ratio weights it
        return advantage, torch.ones_like(advantage)
    done, terminated = packed["next", "done"], packed["next", "terminated"]
    value, next_value, reward = packed["state_value"], packed["next", "state_value"], packed["next", "reward"]
    entries = {name: packed[getattr(estimator.tensor_keys, name)] for name in estimator.entries}
    gamma, nothing = estimator.gamma.to(reward.device), torch.zeros_like(value)
    ideal, _ = estimator.estimate_unclipped(
        gamma, log_ratio, value, next_value, reward, done, terminated, time_dim=1, **entries
    )
    # estimates are linear in rewards and values
    surviving, _ = estimator.estimate(
        gamma, log_ratio, nothing, nothing, done.to(value), done, terminated, time_dim=1, **entries
    )
    limit = ADVANTAGE_LIMIT
    return ideal.nan_to_num(nan=0.0, posinf=limit, neginf=-limit).clamp(-limit, limit), surviving


def _add_bias(
    moments: Moments, weight: Tensor, ideal_weight: Tensor, advantage: Tensor, ideal: Tensor
) -> None:
    """``wA - w*A*`` in three terms, each a mean over tokens."""
    moments.add("bias_policy", (weight - ideal_weight) * ideal)
    moments.add("bias_advantage", ideal_weight * (advantage - ideal))
    moments.add("bias_coupling", (weight - ideal_weight) * (advantage - ideal))
