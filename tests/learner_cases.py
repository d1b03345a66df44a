"""A small learner and batches for its tests; as a script, the two-rank run they compare with (under torchrun)."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from lm_cases import llama, row

from torchrl_copc.models.causal_lm import CausalLMActor, CausalLMCritic
from torchrl_copc.objectives import COPCLoss, M2POLoss, PolicyCriticLoss, VCPOLoss
from torchrl_copc.training.checkpoint import load_checkpoint, save_checkpoint
from torchrl_copc.training.learner import Learner, LearnerConfig, OptimizerConfig
from torchrl_copc.value import COPCEstimator, OffPolicyEstimator

# Row 2 is cut after a trailing observation, so its value is read there. Three groups, none on both ranks.
GROUPS = (0, 0, 0, 1, 1, 1, 1, 2, 2)
ROWS = [
    row(seed, truncated=seed == 2, trailing=3 * (seed == 2), group=group) for seed, group in enumerate(GROUPS)
]
# Seven rows and two: the first rank has more micro-batches.
PARTS = (ROWS[:7], ROWS[7:])
SCORED = [[1, 2, 3, 4, 5], [9, 8, 7]]


def make_learner(
    dump_dir: str | Path = "unused",
    *,
    width: int = 32,
    gradient_checkpointing: bool = False,
    loss_settings: dict | None = None,
    estimator_settings: dict | None = None,
    critic_free: type[PolicyCriticLoss] | None = None,
    **settings,
) -> Learner:
    """A learner of two-layer Llamas (tied actor); gradients are not clipped unless asked.

    COPC with wide intervals, or without a critic the loss that is named, with its own estimator.
    """
    actor = CausalLMActor(llama(0, hidden_size=width), gradient_checkpointing=gradient_checkpointing)
    critic = CausalLMCritic(llama(1, hidden_size=width).model, gradient_checkpointing=gradient_checkpointing)
    torch.manual_seed(2)
    torch.nn.init.normal_(critic.net.value_head.weight, std=0.3)
    loss: PolicyCriticLoss
    estimator: OffPolicyEstimator
    if critic_free is None:
        loss_settings = dict(eta_policy=4.0, eta_advantage=2.0) | (loss_settings or {})
        loss = COPCLoss(actor, critic, functional=False, **loss_settings)
        estimator = COPCEstimator(value_network=None, eta=2.0, lmbda=0.9, **(estimator_settings or {}))
    else:
        loss = critic_free(actor, functional=False, **(loss_settings or {}))
        estimator = type(loss.value_estimator)(value_network=None)
        settings["whiten_advantage"] = False
    defaults = dict(
        actor=OptimizerConfig(lr=1e-2, max_grad_norm=1e9),
        critic=OptimizerConfig(lr=1e-2, max_grad_norm=1e9),
        max_tokens_per_micro_batch=60,
        device="cpu",
    )
    config = LearnerConfig(**(defaults | settings))
    return Learner(config, actor, critic if critic_free is None else None, loss, estimator, dump_dir)


def gradients(learner: Learner) -> dict[str, torch.Tensor]:
    """Gradients of the only update so far, from AdamW's first moment; a sum of all, weighted, after several."""
    return {
        f"{name}.{parameter_name}": learner_state["exp_avg"].full_tensor() / 0.1
        for name, network in learner.networks.items()
        for parameter_name, learner_state in network.state_dict()["optimizer"].items()
    }


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": value.full_tensor().clone()
        for name, network in learner.networks.items()
        for key, value in network.net.state_dict().items()
    }


# With this `eps` AdamW's steps are smooth in the gradient, so that rounding errors do not grow from update to
# update.
SMOOTH = OptimizerConfig(lr=1e-1, max_grad_norm=1e9, eps=1.0)

CASES = {
    "token_mean": dict(aggregation="token_mean"),
    "response_mean": dict(aggregation="response_mean", max_tokens_per_micro_batch=30),
    "packed": dict(layout="packed"),
    "keep_activations": dict(keep_activations=True),
    "minibatches": dict(
        minibatches_per_batch=2, critic_updates=2, aggregation="response_mean", actor=SMOOTH, critic=SMOOTH
    ),
    "m2po": dict(critic_free=M2POLoss, max_tokens_per_micro_batch=30),
    "m2po_code": dict(
        critic_free=M2POLoss, loss_settings={"variant": "code", "limit": 0.5}, keep_activations=True
    ),
    "vcpo": dict(critic_free=VCPOLoss, ess_base=0.9, aggregation="response_mean"),
}


def rows_of_one_rank(learner: Learner) -> list:
    """``ROWS`` in the order in which one rank puts into each minibatch what both ranks put there together."""
    halves: list[list] = [[], []]
    for part in PARTS:
        shuffled = learner._shuffled(part)
        cut = len(part) // 2
        halves[0] += shuffled[:cut]
        halves[1] += shuffled[cut:]
    assert len(halves[0]) == len(ROWS) // 2
    order = learner._shuffled(range(len(ROWS)))
    placed = dict(zip(order, halves[0] + halves[1], strict=True))
    return [placed[place] for place in range(len(ROWS))]


def run_case(name: str, rows: list, folder: Path) -> dict:
    """One update; what must not depend on the number of ranks."""
    learner = make_learner(folder, **CASES[name])
    metrics = learner.update(rows)
    result = {
        "metrics": {key: value for key, value in metrics.items() if not key.startswith("time_")},
        "gradients": gradients(learner),
        "weights": weights(learner),
        "scores": learner.score(SCORED),
        "actor_weights": learner.actor_weights(),
    }
    save_checkpoint(learner, folder / name, extra={"rank": learner.rank})
    return result


def main(folder: Path) -> None:
    import os

    rank = int(os.environ["RANK"])
    results = {name: run_case(name, PARTS[rank], folder) for name in CASES}
    # Row 7, of the second rank, is the only one of this version.
    results["warm_up"] = make_learner(critic_warmup_batches=10).update(PARTS[rank], version=7)
    results["extra"] = load_checkpoint(make_learner(), folder / "token_mean")
    learner = make_learner(folder / "dump", on_nonfinite="skip")
    bad = [one.clone() for one in PARTS[rank]]
    if rank == 1:
        bad[0]["next", "reward"][:] = float("nan")
    results["nonfinite"] = learner.update(bad)
    torch.save(results, folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
