"""Small actors, critics and control rollouts for the tests of estimators and losses."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torchrl.modules import IndependentNormal

OBSERVATIONS = 4


def make_actor(seed: int = 0, *, continuous: bool = False) -> ProbabilisticTensorDictSequential:
    """Two discrete actions, or one continuous one."""
    torch.manual_seed(seed)
    if continuous:
        net = TensorDictModule(
            nn.Sequential(nn.Linear(OBSERVATIONS, 4), NormalParamExtractor()),
            in_keys=["observation"],
            out_keys=["loc", "scale"],
        )
        head = ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=IndependentNormal,
            return_log_prob=True,
        )
    else:
        net = TensorDictModule(nn.Linear(OBSERVATIONS, 2), in_keys=["observation"], out_keys=["logits"])
        head = ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        )
    return ProbabilisticTensorDictSequential(net, head)


def make_critic(seed: int = 1, out_key: str = "state_value") -> TensorDictModule:
    torch.manual_seed(seed)
    return TensorDictModule(nn.Linear(OBSERVATIONS, 1), in_keys=["observation"], out_keys=[out_key])


def make_rollout(batch: int = 3, length: int = 11, seed: int = 2, *, continuous: bool = False) -> TensorDict:
    """A rollout ``[batch, length]`` of the actor of seed 10: learners of other seeds are off-policy."""
    behaviour = make_actor(10, continuous=continuous)
    torch.manual_seed(seed)
    observations = torch.randn(batch, length + 1, OBSERVATIONS)
    data = TensorDict({"observation": observations[:, :-1].clone()}, batch_size=[batch, length])
    with torch.no_grad():
        # collected data also holds the behaviour policy's distribution parameters
        data = behaviour.get_dist_params(data)
        dist = behaviour.build_dist_from_params(data)
        data["action"] = dist.sample()
        data["action_log_prob"] = dist.log_prob(data["action"])
    done = torch.rand(batch, length, 1) < 0.15
    done[:, -1] = True
    data["next"] = TensorDict(
        {
            "observation": observations[:, 1:].clone(),
            "reward": torch.randn(batch, length, 1),
            "done": done,
            "terminated": done & (torch.rand(batch, length, 1) < 0.5),
        },
        batch_size=[batch, length],
    )
    data.names = [None, "time"]
    return data
