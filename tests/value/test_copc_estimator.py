"""COPCEstimator as a TorchRL value estimator: keys, networks, padding, errors."""

from __future__ import annotations

import warnings

import pytest
import torch
from control_cases import OBSERVATIONS, make_actor, make_critic, make_rollout
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.utils import build_value_estimator, default_value_kwargs
from torchrl.objectives.value import GAE

from torchrl_copc.value import COPCEstimator, copc_advantage_estimate


def packed_tokens(length: int = 12, seed: int = 0) -> TensorDict:
    """Three responses of 5, 3 and ``length - 8`` policy tokens as ``[1, N]``."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(1, length, 1, generator=generator)

    done = torch.zeros(1, length, 1, dtype=torch.bool)
    done[0, [4, 7, -1]] = True
    log_prob = -normal().abs()
    return TensorDict(
        {
            "state_value": normal(),
            "action_log_prob": log_prob,
            "learner_log_prob": log_prob + 0.3 * normal(),
            "next": {"state_value": normal(), "reward": normal(), "done": done, "terminated": done.clone()},
        },
        batch_size=[1, length],
    )


def test_values_from_the_data_give_the_functional_estimate() -> None:
    data = packed_tokens()
    estimator = COPCEstimator(
        value_network=None, gamma=0.99, lmbda=0.9, eta=1.0, trace="cut", lmbda_critic=1.0
    )
    estimator(data)
    expected = copc_advantage_estimate(
        0.99,
        0.9,
        data["learner_log_prob"] - data["action_log_prob"],
        data["state_value"],
        data["next", "state_value"],
        data["next", "reward"],
        data["next", "done"],
        data["next", "terminated"],
        eta=1.0,
        trace="cut",
        lmbda_critic=1.0,
    )
    assert torch.equal(data["advantage"], expected[0])
    assert torch.equal(data["value_target"], expected[1])


def test_packing_responses_along_time_changes_nothing() -> None:
    packed = packed_tokens()
    estimator = COPCEstimator(value_network=None)
    estimator(packed)
    for start, stop in ((0, 5), (5, 8), (8, 12)):
        alone = packed[:, start:stop].exclude("advantage", "value_target").clone()
        estimator(alone)
        torch.testing.assert_close(alone["advantage"], packed["advantage"][:, start:stop])


def test_eta_zero_is_stock_gae_on_a_rollout() -> None:
    data, critic = make_rollout(), make_critic()
    COPCEstimator(value_network=critic, actor_network=make_actor(), gamma=0.98, lmbda=0.9, eta=0.0)(data)
    stock = GAE(gamma=0.98, lmbda=0.9, value_network=critic)(make_rollout())
    torch.testing.assert_close(data["advantage"], stock["advantage"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(data["value_target"], stock["value_target"], rtol=1e-6, atol=1e-6)


def test_actor_evaluates_the_stored_action_and_keeps_the_result() -> None:
    data, actor = make_rollout(), make_actor()
    with torch.no_grad():
        expected = actor.get_dist(data.select("observation")).log_prob(data["action"])
    COPCEstimator(value_network=make_critic(), actor_network=actor)(data)
    torch.testing.assert_close(data["learner_log_prob"], expected)
    assert not data["learner_log_prob"].requires_grad
    assert all(p.grad is None and p.requires_grad for p in actor.parameters())

    flipped = make_rollout()
    flipped["action"] = 1 - flipped["action"]
    COPCEstimator(value_network=make_critic(), actor_network=actor)(flipped)
    assert not torch.allclose(flipped["learner_log_prob"], expected)


@pytest.mark.parametrize("skip_existing", [None, True])
def test_distribution_parameters_stored_by_the_behaviour_policy_are_not_reused(
    skip_existing: bool | None,
) -> None:
    data = make_rollout()
    assert "logits" in data
    COPCEstimator(value_network=make_critic(), actor_network=make_actor(), skip_existing=skip_existing)(data)
    assert (data["learner_log_prob"] - data["action_log_prob"]).abs().max() > 0.01


def test_an_existing_learner_log_prob_is_used() -> None:
    data = make_rollout()
    data["learner_log_prob"] = data["action_log_prob"] - 5.0  # every ratio clipped to the lower end
    critic = make_critic()
    COPCEstimator(value_network=critic, actor_network=make_actor(), lmbda=0.9)(data)
    stock = GAE(gamma=1.0, lmbda=0.9, value_network=critic)(make_rollout())
    torch.testing.assert_close(data["advantage"], 0.8 * stock["advantage"])


def test_actor_without_a_distribution() -> None:
    class Scorer(nn.Module):
        def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
            return -observation.square().sum(-1) - action

    actor = TensorDictModule(Scorer(), in_keys=["observation", "action"], out_keys=["log_prob"])
    data = make_rollout()
    COPCEstimator(value_network=make_critic(), actor_network=actor)(data)
    torch.testing.assert_close(
        data["learner_log_prob"], -data["observation"].square().sum(-1) - data["action"]
    )
    assert "log_prob" not in data


def test_missing_entries_are_named_and_never_taken_as_ratio_one() -> None:
    with pytest.raises(KeyError, match=r"'learner_log_prob' is missing.*actor_network"):
        COPCEstimator(value_network=make_critic())(make_rollout())
    with pytest.raises(KeyError, match="behaviour log-prob 'action_log_prob' is missing"):
        COPCEstimator(value_network=None)(packed_tokens().exclude("action_log_prob"))
    with pytest.raises(ValueError, match="'state_value' is missing"):
        COPCEstimator(value_network=None)(packed_tokens().exclude("state_value"))
    with pytest.raises(KeyError, match="has no get_dist"):
        COPCEstimator(value_network=make_critic(), actor_network=make_critic())(make_rollout())


@pytest.mark.parametrize("key", ["action_log_prob", "learner_log_prob"])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_log_prob_that_is_not_finite_is_refused(key: str, value: float) -> None:
    data = packed_tokens()
    data[key][0, 3] = value
    with pytest.raises(ValueError, match="1 of 12 log-ratios are not finite"):
        COPCEstimator(value_network=None)(data)


def test_a_log_prob_of_the_wrong_shape_is_refused() -> None:
    data = packed_tokens()
    data["learner_log_prob"] = data["learner_log_prob"].expand(1, 12, 2)
    with pytest.raises(ValueError, match=r"'learner_log_prob' of shape \(1, 12, 2\)"):
        COPCEstimator(value_network=None)(data)


@pytest.mark.parametrize("mask_key", [("collector", "mask"), "mask"])
@pytest.mark.parametrize("trailing", [False, True])
def test_padding_never_enters_the_result(mask_key: str | tuple[str, str], trailing: bool) -> None:
    clean, data = make_rollout(), make_rollout()
    cut = clean[:, :8].clone()
    mask = torch.ones(3, 11, 1, dtype=torch.bool) if trailing else torch.ones(3, 11, dtype=torch.bool)
    mask[:, 8:] = False
    data[mask_key] = mask
    for leaf in data.exclude(mask_key).values(True, True):
        if leaf.is_floating_point():
            leaf[:, 8:] = torch.nan
        elif leaf.dtype == torch.int64:
            leaf[:, 8:] = -100
    estimator = COPCEstimator(value_network=make_critic(), actor_network=make_actor())
    if mask_key == "mask":
        estimator.set_keys(mask="mask")
    estimator(data)
    estimator(cut)
    torch.testing.assert_close(data["advantage"][:, :8], cut["advantage"])
    torch.testing.assert_close(data["value_target"][:, :8], cut["value_target"])
    assert (data["advantage"][:, 8:] == 0).all()
    assert data["learner_log_prob"].isfinite().all()


def test_call_without_a_tensordict() -> None:
    data, estimator = make_rollout(), COPCEstimator(value_network=make_critic(), actor_network=make_actor())
    advantage, target = estimator(
        observation=data["observation"],
        action=data["action"],
        action_log_prob=data["action_log_prob"],
        next_observation=data["next", "observation"],
        next_reward=data["next", "reward"],
        next_done=data["next", "done"],
        next_terminated=data["next", "terminated"],
    )
    estimator(data)
    assert torch.equal(advantage, data["advantage"]) and torch.equal(target, data["value_target"])

    tokens, estimator = packed_tokens(), COPCEstimator(value_network=None)
    flat = {"_".join(k) if isinstance(k, tuple) else k: v for k, v in tokens.items(True, True)}
    advantage, _ = estimator(**flat)
    assert torch.equal(advantage, estimator(tokens)["advantage"])


def test_every_key_can_be_renamed_and_nested() -> None:
    data = packed_tokens()
    expected = COPCEstimator(value_network=None)(data.clone())["advantage"]
    names = {
        "advantage": ("out", "adv"),
        "value_target": ("out", "target"),
        "value": ("critic", "v"),
        "reward": "r",
        "done": "d",
        "terminated": "t",
        "sample_log_prob": ("behaviour", "lp"),
        "learner_log_prob": ("learner", "lp"),
    }
    renamed = TensorDict(
        {
            ("critic", "v"): data["state_value"],
            ("behaviour", "lp"): data["action_log_prob"],
            ("learner", "lp"): data["learner_log_prob"],
            ("next", "critic", "v"): data["next", "state_value"],
            ("next", "r"): data["next", "reward"],
            ("next", "d"): data["next", "done"],
            ("next", "t"): data["next", "terminated"],
        },
        batch_size=data.batch_size,
    )
    estimator = COPCEstimator(value_network=None)
    estimator.set_keys(**names)
    assert torch.equal(estimator(renamed)["out", "adv"], expected)
    assert estimator.out_keys == [("out", "adv"), ("out", "target")]
    with pytest.raises(KeyError, match="not an accepted tensordict key"):
        estimator.set_keys(unknown="x")
    with pytest.raises(KeyError, match="not found in value network out_keys"):
        COPCEstimator(value_network=make_critic()).set_keys(value="other")


def test_skip_existing_reads_stored_values() -> None:
    data = make_rollout()
    data["state_value"] = torch.full((3, 11, 1), 2.0)
    data["next", "state_value"] = torch.full((3, 11, 1), 3.0)
    COPCEstimator(value_network=make_critic(), actor_network=make_actor(), skip_existing=True)(data)
    assert (data["state_value"] == 2.0).all()
    COPCEstimator(value_network=make_critic(), actor_network=make_actor())(data)
    assert not (data["state_value"] == 2.0).any()


def test_shifted_equals_two_calls() -> None:
    data, shifted = make_rollout(), make_rollout()
    for rollout in (data, shifted):
        # one value call per step needs consecutive observations: no reset inside the rollout
        rollout["next", "done"][:, :-1] = False
        rollout["next", "terminated"][:] = False
    networks = {"value_network": make_critic(), "actor_network": make_actor()}
    COPCEstimator(**networks)(data)
    COPCEstimator(**networks, shifted=True)(shifted)
    torch.testing.assert_close(data["advantage"], shifted["advantage"])


def test_time_dim_from_name_argument_and_constructor() -> None:
    networks = {"value_network": make_critic(), "actor_network": make_actor()}
    expected = COPCEstimator(**networks)(make_rollout())["advantage"].transpose(0, 1)
    swapped = make_rollout().transpose(0, 1)
    assert swapped.names == ["time", None]
    torch.testing.assert_close(COPCEstimator(**networks)(swapped.clone())["advantage"], expected)
    swapped.names = [None, None]
    torch.testing.assert_close(COPCEstimator(**networks, time_dim=0)(swapped.clone())["advantage"], expected)
    torch.testing.assert_close(COPCEstimator(**networks)(swapped.clone(), time_dim=-2)["advantage"], expected)


def test_differentiable_reaches_inputs_but_not_the_critics_parameters() -> None:
    for differentiable in (False, True):
        data, critic = make_rollout(), make_critic()
        data["observation"].requires_grad_()
        estimator = COPCEstimator(
            value_network=critic, actor_network=make_actor(), differentiable=differentiable
        )
        advantage = estimator(data)["advantage"]
        assert advantage.requires_grad is differentiable
        if differentiable:
            advantage.sum().backward()
            assert data["observation"].grad.abs().sum() > 0
            assert all(p.grad is None and p.requires_grad for p in critic.parameters())


def test_functional_value_network() -> None:
    critic = make_critic()
    params = TensorDict.from_module(critic)
    networks = {"value_network": critic, "actor_network": make_actor()}
    expected = COPCEstimator(**networks)(make_rollout())["advantage"]
    result = COPCEstimator(**networks)(make_rollout(), params=params)["advantage"]
    torch.testing.assert_close(result, expected)
    doubled = COPCEstimator(**networks)(make_rollout(), params=params.apply(lambda p: 2 * p))["advantage"]
    assert not torch.allclose(doubled, expected)


def test_value_estimate_leaves_the_data_alone() -> None:
    data = make_rollout()
    keys = set(data.keys(True, True))
    estimator = COPCEstimator(value_network=make_critic(), actor_network=make_actor())
    target = estimator.value_estimate(data)
    assert set(data.keys(True, True)) == keys
    assert torch.equal(target, estimator(data)["value_target"])


def test_multi_step_transitions_discount_by_their_span() -> None:
    data = packed_tokens()
    data["steps_to_next_obs"] = torch.full((1, 12, 1), 3)
    multi = COPCEstimator(value_network=None, gamma=0.9)(data)["advantage"]
    once = COPCEstimator(value_network=None, gamma=0.9**3)(packed_tokens())["advantage"]
    torch.testing.assert_close(multi, once)


def test_state_dict_holds_the_coefficients() -> None:
    lmbda = torch.linspace(0.5, 1.0, 12).view(1, 12, 1)
    estimator = COPCEstimator(value_network=None, gamma=0.9, lmbda=lmbda)
    other = COPCEstimator(value_network=None, gamma=1.0, lmbda=torch.zeros(1, 12, 1))
    other.load_state_dict(estimator.state_dict())
    assert torch.equal(other(packed_tokens())["advantage"], estimator(packed_tokens())["advantage"])
    assert not list(COPCEstimator(value_network=make_critic(), actor_network=make_actor()).parameters())


def test_registered_as_copc() -> None:
    assert default_value_kwargs("copc") == {"gamma": 1.0, "lmbda": 0.95, "differentiable": False}
    loss = ClipPPOLoss(make_actor(), make_critic())
    estimator = build_value_estimator(loss, "copc", eta=0.25)
    assert isinstance(estimator, COPCEstimator) and estimator.eta == 0.25
    assert estimator.value_network is loss.critic_network and estimator.actor_network is loss.actor_network


def test_plugs_into_stock_clip_ppo() -> None:
    actor, critic = make_actor(), make_critic()
    loss = ClipPPOLoss(actor, critic)
    loss.make_value_estimator(COPCEstimator(value_network=critic, actor_network=actor, eta=1.0))
    losses = loss(make_rollout())
    (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in loss.parameters())
    data = COPCEstimator(value_network=critic, actor_network=actor, eta=1.0)(make_rollout())
    torch.testing.assert_close(loss(data)["loss_objective"], losses["loss_objective"])


def test_long_products_warn_once() -> None:
    def tokens(longest: int) -> TensorDict:
        zeros = torch.zeros(1, longest + 600, 1)
        done = torch.zeros(1, longest + 600, 1, dtype=torch.bool)
        done[0, [599, -1]] = True
        return TensorDict(
            {
                "state_value": zeros,
                "action_log_prob": zeros,
                "learner_log_prob": zeros,
                "next": {"state_value": zeros, "reward": zeros, "done": done, "terminated": done},
            },
            batch_size=[1, longest + 600],
        )

    estimator = COPCEstimator(value_network=None, trace="product", lmbda=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimator(tokens(1024))
        COPCEstimator(value_network=None, trace="product", lmbda=0.99)(tokens(1025))
        COPCEstimator(value_network=None, trace="step", lmbda=1.0)(tokens(1025))
    with pytest.warns(UserWarning, match="response of 1025 steps"):
        estimator(tokens(1025))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimator(tokens(1025))


def test_several_reward_features() -> None:
    torch.manual_seed(0)
    critic = TensorDictModule(nn.Linear(OBSERVATIONS, 2), in_keys=["observation"], out_keys=["state_value"])
    data = make_rollout()
    for key in ("reward", "done", "terminated"):
        data["next", key] = data["next", key].expand(3, 11, 2)
    assert COPCEstimator(value_network=critic, actor_network=make_actor())(data)["advantage"].shape == (
        3,
        11,
        2,
    )
