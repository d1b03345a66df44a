"""What every estimator of this package owes TorchRL, checked for all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from control_cases import make_actor, make_critic, make_rollout
from tensordict import TensorDict
from torchrl.objectives import A2CLoss, ClipPPOLoss
from torchrl.objectives.utils import build_value_estimator

from torchrl_copc.value import (
    BRACEEstimator,
    COPCEstimator,
    OffPolicyEstimator,
    RetraceEstimator,
    TokenGAE,
    TokenVTrace,
    brace_advantage_estimate,
    copc_advantage_estimate,
    length_adaptive_lmbda,
    retrace_advantage_estimate,
    token_gae_advantage_estimate,
    vtrace_advantage_estimate,
)

# name in the registry: (class, its options, the function with the same options)
CASES: dict[str, tuple[type[OffPolicyEstimator], dict[str, Any], Any]] = {
    "copc": (COPCEstimator, {"eta": 1.0}, copc_advantage_estimate),
    "token_gae": (TokenGAE, {"lmbda_critic": 1.0}, token_gae_advantage_estimate),
    "token_vtrace": (TokenVTrace, {"rho_threshold": 1.3, "c_threshold": 0.9}, vtrace_advantage_estimate),
    "retrace": (RetraceEstimator, {}, retrace_advantage_estimate),
    "brace": (BRACEEstimator, {"window": 3}, brace_advantage_estimate),
}
every = pytest.mark.parametrize("name", CASES)
KEYS = ("reward", "done", "terminated")


def make(name: str, *, networks: bool = True, **kwargs: Any) -> OffPolicyEstimator:
    cls, options, _ = CASES[name]
    found = (
        {"value_network": make_critic(), "actor_network": make_actor()}
        if networks
        else {"value_network": None}
    )
    return cls(**(found | options | {"gamma": 0.99, "lmbda": 0.9} | kwargs))


def packed_tokens() -> TensorDict:
    """Responses of 5, 3 and 4 policy tokens as ``[1, 12]``, with log-probs and values written."""
    data = make_rollout(1, 12)
    data["next", "done"][:] = False
    data["next", "done"][0, [4, 7, 11]] = True
    data["next", "terminated"] = data["next", "done"].clone()
    return make("copc")(data).exclude("advantage", "value_target")


@every
def test_the_estimate_is_the_function(name: str) -> None:
    data = make_rollout()
    make(name)(data)
    with torch.no_grad():
        learner = make_actor().get_dist(data.select("observation")).log_prob(data["action"])
    torch.testing.assert_close(data["learner_log_prob"], learner)
    _, options, function = CASES[name]
    inputs = [data["state_value"], data["next", "state_value"], *(data["next", key] for key in KEYS)]
    if name != "token_gae":
        inputs.insert(0, (learner - data["action_log_prob"]).unsqueeze(-1))
    expected = function(torch.tensor(0.99).double(), torch.tensor(0.9).double(), *inputs, **options)
    assert torch.equal(data["advantage"], expected[0]) and torch.equal(data["value_target"], expected[1])
    assert not data["advantage"].requires_grad


@every
def test_packed_responses_equal_responses_on_their_own(name: str) -> None:
    data = packed_tokens()
    whole = make(name, networks=False)(data.clone())
    for first, last in ((0, 5), (5, 8), (8, 12)):
        alone = make(name, networks=False)(data[:, first:last].clone())
        for key in ("advantage", "value_target"):
            torch.testing.assert_close(whole[key][:, first:last], alone[key])


@every
def test_padding_never_enters(name: str) -> None:
    data = make_rollout()
    expected = make(name)(data[:, :8].clone())
    data["collector", "mask"] = torch.ones(data.shape, dtype=torch.bool)
    data["collector", "mask"][:, 8:] = False
    for leaf in data.exclude(("collector", "mask")).values(True, True):
        leaf[:, 8:] = torch.nan if leaf.is_floating_point() else False
    make(name)(data)
    torch.testing.assert_close(data["advantage"][:, :8], expected["advantage"])
    torch.testing.assert_close(data["value_target"][:, :8], expected["value_target"])
    assert (data["advantage"][:, 8:] == 0).all()


@every
def test_call_without_a_tensordict(name: str) -> None:
    data, estimator = make_rollout(), make(name)
    inputs = {"_".join(k) if isinstance(k, tuple) else k: data[k] for k in estimator.in_keys if k in data}
    advantage, target = estimator(**inputs)
    estimator(data)
    assert torch.equal(advantage, data["advantage"]) and torch.equal(target, data["value_target"])


@every
def test_keys_can_be_renamed_and_nested(name: str) -> None:
    data = packed_tokens()
    expected = make(name, networks=False)(data.clone())
    names = {
        "state_value": ("critic", "v"),
        "action_log_prob": ("behaviour", "lp"),
        "learner_log_prob": ("learner", "lp"),
        ("next", "state_value"): ("next", "critic", "v"),
        ("next", "reward"): ("next", "r"),
        ("next", "done"): ("next", "d"),
        ("next", "terminated"): ("next", "t"),
    }
    renamed = TensorDict({new: data[old] for old, new in names.items()}, batch_size=data.batch_size)
    estimator = make(name, networks=False)
    estimator.set_keys(
        advantage=("out", "adv"),
        value_target="target",
        value=("critic", "v"),
        sample_log_prob=("behaviour", "lp"),
        learner_log_prob=("learner", "lp"),
        reward="r",
        done="d",
        terminated="t",
    )
    estimator(renamed)
    assert torch.equal(renamed["out", "adv"], expected["advantage"])
    assert torch.equal(renamed["target"], expected["value_target"])
    assert estimator.out_keys == [("out", "adv"), "target"]
    with pytest.raises(KeyError, match="not an accepted tensordict key"):
        estimator.set_keys(unknown="x")


@every
def test_time_dimension_by_name_and_by_argument(name: str) -> None:
    expected = make(name)(make_rollout())["advantage"].transpose(0, 1)
    swapped = make_rollout().transpose(0, 1)
    torch.testing.assert_close(make(name)(swapped.clone())["advantage"], expected)
    swapped.names = [None, None]
    torch.testing.assert_close(make(name, time_dim=0)(swapped.clone())["advantage"], expected)
    torch.testing.assert_close(make(name)(swapped.clone(), time_dim=-2)["advantage"], expected)


@every
def test_skip_existing_shifted_and_differentiable(name: str) -> None:
    data = make_rollout()
    data["state_value"], data["next", "state_value"] = torch.full((3, 11, 1), 2.0), torch.zeros(3, 11, 1)
    make(name, skip_existing=True)(data)
    assert (data["state_value"] == 2.0).all()

    data = make_rollout()
    data["next", "done"][:, :-1] = False
    data["next", "terminated"][:] = False
    shifted = make(name, shifted=True)(data.clone())
    torch.testing.assert_close(shifted["advantage"], make(name)(data.clone())["advantage"])

    data["observation"].requires_grad_()
    estimator = make(name, differentiable=True)
    estimator(data)["advantage"].sum().backward()
    assert data["observation"].grad.abs().sum() > 0
    assert all(p.grad is None for p in estimator.value_network.parameters())


@every
def test_functional_critic_and_state_dict(name: str) -> None:
    estimator = make(name)
    params = TensorDict.from_module(estimator.value_network)
    torch.testing.assert_close(
        estimator(make_rollout(), params=params)["advantage"], make(name)(make_rollout())["advantage"]
    )
    other = make(name, gamma=0.5, lmbda=0.1)
    other.load_state_dict(estimator.state_dict())
    assert torch.equal(other(make_rollout())["advantage"], estimator(make_rollout())["advantage"])
    assert not list(estimator.parameters())


@every
def test_value_estimate_leaves_the_data_alone(name: str) -> None:
    data, estimator = make_rollout(), make(name)
    keys = set(data.keys(True, True))
    target = estimator.value_estimate(data)
    assert set(data.keys(True, True)) == keys
    assert torch.equal(target, estimator(data)["value_target"])


@every
@pytest.mark.parametrize("loss_class", [ClipPPOLoss, A2CLoss])
def test_stock_losses_take_an_instance_and_the_registry_its_name(name: str, loss_class: Any) -> None:
    loss = loss_class(make_actor(), make_critic())
    estimator = build_value_estimator(loss, name, gamma=0.9)
    assert type(estimator) is CASES[name][0] and float(estimator.gamma) == 0.9
    loss.make_value_estimator(make(name, value_network=loss.critic_network, actor_network=make_actor()))
    losses = loss(make_rollout())
    (losses["loss_objective"] + losses["loss_critic"]).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in loss.parameters())


@pytest.mark.parametrize("name", [name for name in CASES if name != "token_gae"])
def test_a_missing_ratio_is_never_taken_as_one(name: str) -> None:
    data = packed_tokens()
    for key in ("learner_log_prob", "action_log_prob"):
        with pytest.raises(KeyError, match=f"'{key}' is missing"):
            make(name, networks=False)(data.exclude(key))
    data["learner_log_prob"][0, 3] = torch.nan
    with pytest.raises(ValueError, match="1 of 12 log-ratios are not finite"):
        make(name, networks=False)(data)


def test_gae_needs_no_log_probs() -> None:
    data = packed_tokens()
    expected = make("token_gae", networks=False)(data.clone())["advantage"]
    result = make("token_gae", networks=False)(data.exclude("learner_log_prob", "action_log_prob"))
    assert torch.equal(result["advantage"], expected) and "learner_log_prob" not in result


def test_length_adaptive_gae_decays_each_response_by_its_own_length() -> None:
    data = packed_tokens()
    result = make("token_gae", networks=False, alpha=0.7)(data.clone())
    lmbda = length_adaptive_lmbda(torch.tensor([5] * 5 + [3] * 3 + [4] * 4), alpha=0.7).view(1, 12, 1)
    expected = make("token_gae", networks=False, lmbda=lmbda)(data.clone())
    torch.testing.assert_close(result["advantage"], expected["advantage"])
    torch.testing.assert_close(result["value_target"], expected["value_target"])
