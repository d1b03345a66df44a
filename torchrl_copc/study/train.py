"""One cell of the study: a method on a task with a lag, for all seeds."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from torchrl_copc.study.learner import StackedLearner
from torchrl_copc.study.models import Table, Transformer
from torchrl_copc.study.rollout import Chance, sample
from torchrl_copc.study.tasks import TASKS, TokenTask
from torchrl_copc.training.config import TrainConfig


@dataclass(frozen=True)
class Scores:
    """Results of each seed, ``[S]``; scores are exact expected returns, reward units.

    Args:
        score: mean over the second half of training.
        final: at the end.
        whole: mean over all of training.
        kept_fraction: of tokens that gave actor gradient.
        ess: effective sample size of the ratios of frozen learner and behaviour policy, in (0, 1].
        outside_fraction: of tokens whose ratio is outside ``[0.80, 1.28]``, COPC's mask.
    """

    score: Tensor
    final: Tensor
    whole: Tensor
    kept_fraction: Tensor
    ess: Tensor
    outside_fraction: Tensor


def networks(task: TokenTask, model: str, seeds: Sequence[int], imitation_steps: int) -> list[nn.Module]:
    """Actor and critic before training: the task's first policy, and a critic that says 0 everywhere.

    Args:
        task: ``S`` instances.
        model: ``"table"`` or ``"transformer"``.
        seeds: of the initial parameters and of the responses that are imitated.
        imitation_steps: the transformer learns to imitate the first policy in this many steps.
    """
    _, states, tokens = task.next_state.shape
    if model == "table":
        return [Table(task.initial_logits), Table(torch.zeros(len(seeds), states, 1))]
    if model != "transformer":
        raise ValueError(f"model must be table or transformer, got {model!r}")
    shape = task.starts.numel(), tokens, task.max_tokens
    actor = Transformer(*shape, outputs=tokens, seeds=seeds)
    imitate(actor, task, seeds, imitation_steps)
    critic = Transformer(*shape, outputs=1, seeds=seeds)
    critic.load_state_dict({k: v for k, v in actor.state_dict().items() if "head" not in k}, strict=False)
    nn.init.zeros_(critic.head.weight)
    return [actor, critic]


def imitate(net: Transformer, task: TokenTask, seeds: Sequence[int], steps: int, rows: int = 64) -> None:
    """Fit the probabilities of the task's first policy on its own responses."""
    chance, teacher = Chance(seeds), Table(task.initial_logits)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=steps)
    prompt = (torch.arange(rows) % task.starts.numel()).expand(len(seeds), -1)
    for _ in range(steps):
        data = sample(teacher, task, prompt, chance.uniform(rows, task.max_tokens + 1))
        inputs = data["prompt"], data["state"], data["action"]
        with torch.no_grad():
            target = teacher(*inputs).softmax(-1)
        loss = -(target * net(*inputs).log_softmax(-1)).sum(-1)[data["mask"]].sum() / rows
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@lru_cache(maxsize=2)
def prepared(
    task: str, model: str, seeds: tuple[int, ...], imitation_steps: int
) -> tuple[TokenTask, list[nn.Module]]:
    """A task with its networks before training, the same for every method and lag."""
    instances = TASKS[task](seeds)
    return instances, networks(instances, model, seeds, imitation_steps)


def run_cell(
    config: TrainConfig,
    task: str,
    model: str,
    seeds: Sequence[int],
    *,
    records: int = 40,
    imitation_steps: int,
) -> Scores:
    """Train one method and score it.

    Args:
        config: composed method; ``total_versions`` batches, the policy that samples is ``collector.lag`` versions old.
        task: name in :data:`~torchrl_copc.study.tasks.TASKS`.
        model: ``"table"`` or ``"transformer"``.
        seeds: one run each; seed ``i`` has the same task, networks and random numbers with every method.
        records: how often the policy is scored.
        imitation_steps: see :func:`networks`.
    """
    instances, first = prepared(task, model, tuple(seeds), imitation_steps)
    actor, critic = deepcopy(first)
    learner = StackedLearner(config, instances, list(seeds), actor, critic)
    batches = config.total_versions
    due = {round(batches * (i + 1) / records) for i in range(records)}
    curve = []
    for version in range(1, batches + 1):
        learner.update()
        if version in due:
            curve.append(learner.actor.expected_return(instances))
    returns = torch.stack(curve)  # [records, S]
    means = {name: total / batches for name, total in learner.totals.items()}
    return Scores(returns[len(curve) // 2 :].mean(0), returns[-1], returns.mean(0), **means)
