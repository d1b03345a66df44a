"""COPC on CartPole, from stock TorchRL parts, on data that is several policy versions old.

    python examples/copc_cartpole.py

The replay buffer keeps the last few collections, so most of every batch was sampled by older policies. Their log-probs
travel with the data; ``loss.value_estimator`` adds those of the learner before the update, and from both come the
weights of the advantages and the mask of the actor. Needs ``gymnasium``.
"""

from __future__ import annotations

import torch
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import EnvBase, GymEnv, RewardSum, SerialEnv, TransformedEnv, set_exploration_type
from torchrl.envs.utils import ExplorationType
from torchrl.modules import MLP, ValueOperator

from torchrl_copc.objectives import COPCLoss

NUM_ENVS = 8
STEPS = 128  # per environment and collection
KEPT_COLLECTIONS = 4  # data is up to three versions old
EPOCHS = 4
MINIBATCH = 512
SOLVED = 400.0


def make_env(num_envs: int) -> EnvBase:
    def single() -> EnvBase:
        return GymEnv("CartPole-v1", categorical_action_encoding=True)

    return TransformedEnv(SerialEnv(num_envs, single), RewardSum())


def make_network(outputs: int) -> MLP:
    return MLP(in_features=4, out_features=outputs, num_cells=[64, 64], activation_class=torch.nn.Tanh)


def evaluate(actor: ProbabilisticTensorDictSequential, episodes: int = 10) -> float:
    """Mean return of greedy episodes (at most 500)."""
    env = make_env(episodes)
    env.set_seed(1_000)
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        rollout = env.rollout(500, actor, break_when_any_done=False)
    env.close()
    first_end = (rollout["next", "done"].cumsum(1) == 0).sum(1) + 1
    return float(first_end.clamp(max=500).float().mean())


def train(seed: int = 0, max_collections: int = 120) -> float:
    """Train until sampled episodes are well above the goal; returns the mean return of greedy episodes."""
    torch.manual_seed(seed)
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(make_network(2), in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True
        ),
    )
    critic = ValueOperator(make_network(1), in_keys=["observation"])
    env = make_env(NUM_ENVS)
    env.set_seed(seed)
    frames = NUM_ENVS * STEPS
    collector = Collector(
        env,
        actor,
        frames_per_batch=frames,
        total_frames=frames * max_collections,
        auto_register_policy_transforms=False,
    )
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(NUM_ENVS * KEPT_COLLECTIONS), sampler=SamplerWithoutReplacement()
    )
    loss = COPCLoss(
        actor,
        critic,
        gamma=0.99,
        # Many minibatches per batch: the current ratio also stops tokens that this update has moved enough.
        mask_from="current",
        normalize_advantage=True,
        entropy_bonus=True,
        entropy_coeff=0.005,
    )
    optimizer = torch.optim.Adam(
        [{"params": actor.parameters(), "lr": 1e-3}, {"params": critic.parameters(), "lr": 3e-3}]
    )

    recent = torch.zeros(0)
    for collection, data in enumerate(collector):
        buffer.extend(
            data
        )  # rows are time series [STEPS], with the log-probs of the policy that sampled them
        batch = buffer.sample(len(buffer))  # a copy: what the next line writes is not kept for later updates
        loss.value_estimator(batch)  # frozen log-probs, advantages, value targets: once per update
        steps = batch.reshape(-1)
        for _ in range(EPOCHS):
            for minibatch in steps[torch.randperm(len(steps))].split(MINIBATCH):
                losses = loss(minibatch)
                value = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                optimizer.zero_grad()
                value.backward()
                for network in (actor, critic):  # values are large here: a joint norm would silence the actor
                    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimizer.step()
        collector.update_policy_weights_()

        recent = torch.cat((recent, data["next", "episode_reward"][data["next", "done"]]))[-20:]
        print(
            f"collection {collection:3d}  return {recent.mean():6.1f}  kept {losses['kept_fraction']:.2f}  "
            f"ESS {losses['ESS']:.2f}  kl {losses['kl_approx']:+.4f}",
            flush=True,
        )
        if len(recent) == 20 and recent.mean() > SOLVED and evaluate(actor) > SOLVED:
            break
    collector.shutdown()
    final = evaluate(actor)
    print(f"greedy return {final:.1f} over 10 episodes")
    return final


if __name__ == "__main__":
    torch.set_num_threads(1)
    train()
