"""What TorchRL asks of its own estimators beyond `test_channel_estimators.py`, for every registered one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from control_cases import make_actor, make_critic, make_rollout
from tensordict import TensorDict
from tensordict.nn import set_skip_existing
from torchrl.objectives.utils import build_value_estimator

from torchrl_copc.objectives import COPCLoss
from torchrl_copc.value import OffPolicyEstimator, OffPolicyValueEstimators

NAMES = [entry.name.lower() for entry in OffPolicyValueEstimators]
every = pytest.mark.parametrize("name", NAMES)
with_critic = pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("group_relative", "minimum_variance")]
)


def make(name: str, **kwargs: Any) -> OffPolicyEstimator:
    return build_value_estimator(COPCLoss(make_actor(), make_critic(), functional=False), name, **kwargs)


def rollout() -> TensorDict:
    data = make_rollout()
    rows = torch.arange(len(data)).view(-1, 1, 1).expand(*data.shape, 1)
    data["group_id"], data["grad_sq_norm"] = (rows == 2).long(), 1.0 + rows
    return data


def calls_of(estimator: OffPolicyEstimator) -> list[int]:
    """Fills with the number of steps in each call of the critic."""
    sizes: list[int] = []
    critic = estimator.value_network
    assert critic is not None
    critic.register_forward_hook(lambda module, inputs, output: sizes.append(inputs[0].numel()))
    return sizes


@every
@pytest.mark.parametrize("key", ["advantage_key", "value_target_key", "value_key"])
def test_keys_are_not_taken_by_the_constructor(name: str, key: str) -> None:
    with pytest.raises(RuntimeError, match=rf"'{key}' via constructor is deprecated, use .set_keys"):
        make(name, **{key: "x"})


@every
def test_keys_that_were_set_are_told(name: str) -> None:
    estimator = make(name)
    estimator.set_keys(advantage=("a", "adv"), value_target="target", reward="r")
    assert estimator.advantage_key == ("a", "adv") and estimator.value_target_key == "target"
    assert estimator.reward_key == "r" and estimator.value_key == "state_value"


@with_critic
@pytest.mark.parametrize("chunks", [{"num_chunks": 3}, {"value_chunk_size": 2}])
def test_values_in_chunks_give_the_same(name: str, chunks: dict[str, int]) -> None:
    whole, estimator = make(name)(rollout()), make(name, **chunks)
    sizes = calls_of(estimator)
    torch.testing.assert_close(estimator(rollout())["advantage"], whole["advantage"])
    assert len(sizes) > 1


@with_critic
def test_shifted_calls_the_critic_once_per_state(name: str) -> None:
    data = rollout()
    data["next", "done"][:, :-1] = False  # one call needs consecutive states: no reset inside
    data["next", "terminated"][:] = False
    estimator = make(name, shifted=True)
    sizes = calls_of(estimator)
    result = estimator(data.clone())
    assert sum(sizes) == 3 * (11 + 1)
    expected = make(name)(data)
    for key in ("advantage", "value_target", "state_value", ("next", "state_value")):
        torch.testing.assert_close(result[key], expected[key])


@with_critic
def test_skip_existing_as_a_context(name: str) -> None:
    data = rollout()
    data["state_value"], data["next", "state_value"] = torch.full((2, 3, 11, 1), 2.0).unbind()
    with set_skip_existing(True):
        make(name)(data)
    assert (data["state_value"] == 2.0).all() and (data["next", "state_value"] == 2.0).all()


@with_critic
def test_next_values_come_from_target_parameters(name: str) -> None:
    data, estimator = rollout(), make(name)
    params = TensorDict.from_module(estimator.value_network)
    doubled = params.data.apply(lambda p: 2 * p)
    estimator(data, params=params, target_params=doubled)
    plain = make(name)(rollout())
    torch.testing.assert_close(data["state_value"], plain["state_value"])
    torch.testing.assert_close(data["next", "state_value"], 2 * plain["next", "state_value"])
    assert not data["advantage"].requires_grad


@every
def test_precision_is_that_of_the_data(name: str) -> None:
    estimator, data = make(name).double(), rollout()
    estimator.value_network.double(), estimator.actor_network.double()
    double = data.apply(lambda x: x.double() if x.is_floating_point() else x)
    result, single = estimator(double), make(name)(rollout())
    for key in ("advantage", "value_target"):
        assert result[key].dtype == torch.float64 and single[key].dtype == torch.float32
        torch.testing.assert_close(single[key].double(), result[key], rtol=1e-4, atol=1e-4)
