"""COPCLoss: its formula, its masks and weights, and TorchRL's conventions for loss modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from control_cases import OBSERVATIONS, make_actor, make_critic, make_rollout
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.objectives import ValueEstimators
from torchrl.objectives.value import GAE, TDLambdaEstimator, VTrace

from torchrl_copc.objectives import COPCLoss, loss_weights
from torchrl_copc.value import COPCEstimator


def make_loss(**kwargs: Any) -> COPCLoss:
    return COPCLoss(make_actor(), make_critic(), **kwargs)


def estimated(loss: COPCLoss, **kwargs: Any) -> TensorDict:
    """A rollout after the value estimator: frozen log-probs, advantages and targets written."""
    data = make_rollout(**kwargs)
    # far enough from the learner that the masks do something
    data["action_log_prob"] = data["action_log_prob"] + 0.5 * torch.randn(data.shape)
    loss.value_estimator(data)
    return data


def total(losses: TensorDict) -> Tensor:
    return sum(value for key, value in losses.items() if key.startswith("loss_"))


def gradients(loss: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in loss.named_parameters() if p.grad is not None}


def log_probs(data: TensorDict) -> tuple[Tensor, Tensor]:
    rho = (data["learner_log_prob"] - data["action_log_prob"]).exp().unsqueeze(-1)
    return rho, ((rho >= 0.8) & (rho <= 1.28))


def test_the_objective_is_the_formula() -> None:
    loss = make_loss(lmbda=0.9)
    data = estimated(loss)
    losses = loss(data)
    rho, kept = log_probs(data)
    assert 0 < kept.float().mean() < 1
    torch.testing.assert_close(losses["loss_objective"], -(kept * rho * data["advantage"]).mean())
    value = make_critic()(data.select("observation"))["state_value"]
    torch.testing.assert_close(losses["loss_critic"], 0.5 * (value - data["value_target"]).square().mean())
    torch.testing.assert_close(losses["kept_fraction"], kept.float().mean())
    torch.testing.assert_close(losses["clip_fraction_low"], (rho < 0.8).float().mean())
    torch.testing.assert_close(losses["clip_fraction_high"], (rho > 1.28).float().mean())
    torch.testing.assert_close(losses["kl_approx"], -rho.log().mean())
    torch.testing.assert_close(losses["kl_k3"], (rho - 1 - rho.log()).mean())
    torch.testing.assert_close(losses["ESS"], rho.sum() ** 2 / (rho.numel() * rho.square().sum()))
    expected = 1 - (value - data["value_target"]).var(correction=0) / data["value_target"].var(correction=0)
    torch.testing.assert_close(losses["explained_variance"], expected)
    assert not any(value.requires_grad for key, value in losses.items() if not key.startswith("loss_"))


def test_masked_tokens_give_exactly_zero_gradient_but_count() -> None:
    """Per-token logits make each token's gradient visible."""
    logits = nn.Parameter(torch.randn(1, 12, 2))

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logits = logits

        def forward(self, action: Tensor) -> Tensor:
            return self.logits.log_softmax(-1).gather(-1, action)

    actor = TensorDictModule(Table(), in_keys=["action"], out_keys=["log_prob"])
    action = torch.randint(2, (1, 12, 1))
    learner = logits.detach().log_softmax(-1).gather(-1, action)
    shift = torch.zeros(1, 12, 1)
    shift[0, [3, 7]] = torch.tensor([[1.0], [-1.0]])
    done = torch.zeros(1, 12, 1, dtype=torch.bool)
    done[0, -1] = True
    data = TensorDict(
        {
            "action": action,
            "action_log_prob": learner - shift,
            "learner_log_prob": learner,
            "state_value": torch.randn(1, 12, 1),
            "next": {
                "state_value": torch.randn(1, 12, 1),
                "reward": torch.randn(1, 12, 1),
                "done": done,
                "terminated": done,
            },
        },
        batch_size=[1, 12],
    )
    estimator = COPCEstimator(value_network=None)
    estimator(data)
    loss = COPCLoss(actor, functional=False)
    loss(data)["loss_objective"].backward()
    grad = logits.grad.abs().sum(-1)[0]
    assert (grad[[3, 7]] == 0).all() and (grad[[0, 1, 2, 4, 5, 6, 8, 9, 10, 11]] > 0).all()
    kept = torch.ones(12, dtype=torch.bool)
    kept[[3, 7]] = False
    expected = -(kept * data["advantage"][0, :, 0]).sum() / 12
    torch.testing.assert_close(loss(data)["loss_objective"], expected)

    before = data["advantage"].clone()
    data["next", "reward"][0, 3] += 1.0
    estimator(data)
    assert ((data["advantage"] - before)[0, :4] > 0).all()


def test_mask_from_frozen_or_current() -> None:
    data = estimated(make_loss())
    frozen, current = make_loss(), make_loss(mask_from="current")
    torch.testing.assert_close(frozen(data)["loss_objective"], current(data)["loss_objective"])
    moved = make_actor(3)
    for loss in (frozen, current):
        loss.from_stateful_net("actor_network", moved)
    _, kept = log_probs(data)
    assert frozen(data)["kept_fraction"] == kept.float().mean()
    with torch.no_grad():
        ratio = (
            moved.get_dist(data.select("observation")).log_prob(data["action"]) - data["action_log_prob"]
        ).exp()
    expected = ((ratio >= 0.8) & (ratio <= 1.28)).float().mean()
    assert current(data)["kept_fraction"] == expected != kept.float().mean()
    without = data.exclude("learner_log_prob")
    torch.testing.assert_close(current(without)["loss_objective"], current(data)["loss_objective"])


def test_missing_log_probs_are_named_with_the_remedy() -> None:
    loss = make_loss()
    data = estimated(loss)
    with pytest.raises(
        KeyError, match=r"'learner_log_prob' is missing.*value_estimator.*mask_from='current'"
    ):
        loss(data.exclude("learner_log_prob"))
    with pytest.raises(KeyError, match=r"'action_log_prob' is missing and is never taken as ratio 1"):
        loss(data.exclude("action_log_prob"))
    with pytest.raises(KeyError, match="value target 'value_target' is missing"):
        loss(data.exclude("value_target"))
    data["learner_log_prob"][0, 0] = torch.nan
    with pytest.raises(ValueError, match="1 of 33 log-ratios are not finite"):
        loss(data)


def test_an_absent_advantage_is_estimated_with_the_options_of_the_loss() -> None:
    options = {"gamma": 0.9, "lmbda": 0.8, "lmbda_critic": 1.0, "advantage": "continuation", "trace": "cut"}
    loss = make_loss(eta_advantage=1.0, eps_low=0.3, eps_high=0.7, **options)
    data = make_rollout()
    losses = loss(data)
    assert "advantage" not in data and "learner_log_prob" not in data
    COPCEstimator(
        value_network=make_critic(), actor_network=make_actor(), eta=1.0, eps_low=0.3, eps_high=0.7, **options
    )(data)
    again = loss(data)
    for key, value in losses.items():
        torch.testing.assert_close(value, again[key])


@pytest.mark.parametrize("functional", [True, False])
def test_frozen_log_probs_come_from_the_losss_current_parameters(functional: bool) -> None:
    loss = make_loss(functional=functional)
    loss.value_estimator  # noqa: B018  built before the parameters move
    loss = loss.double()
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.add_(0.3)
    data = make_rollout().apply(lambda x: x.double() if x.is_floating_point() else x)
    loss.value_estimator(data)
    metrics = loss(data)
    rho = (data["learner_log_prob"] - data["action_log_prob"]).exp()
    torch.testing.assert_close(metrics["kl_approx"], -rho.log().mean())


def test_any_registered_estimator_class_or_instance_can_be_the_advantage_channel() -> None:
    loss = make_loss(gamma=0.9, lmbda=0.8, mask_from="current")
    reference = GAE(gamma=0.9, lmbda=0.8, value_network=make_critic())(make_rollout())
    expected = loss(reference)["loss_objective"]
    for value_type in (
        "gae",
        ValueEstimators.GAE,
        GAE,
        GAE(gamma=0.9, lmbda=0.8, value_network=make_critic()),
    ):
        hyperparams = {"gamma": 0.9, "lmbda": 0.8} if value_type is GAE else {}
        loss.make_value_estimator(value_type, **hyperparams)
        torch.testing.assert_close(loss(make_rollout())["loss_objective"], expected)
    loss.make_value_estimator(ValueEstimators.TDLambda)
    assert isinstance(loss.value_estimator, TDLambdaEstimator)
    assert loss(make_rollout())["loss_objective"].isfinite()
    loss.make_value_estimator("vtrace")
    assert isinstance(loss.value_estimator, VTrace)
    loss.make_value_estimator()
    assert isinstance(loss.value_estimator, COPCEstimator)
    loss.make_value_estimator("copc", eta=0.0)
    torch.testing.assert_close(loss(make_rollout())["loss_objective"], expected)


@pytest.mark.parametrize("mode", ["token_mean", "response_mean"])
def test_loss_weights_make_micro_batches_add_up(mode: str) -> None:
    loss = make_loss(entropy_bonus=True)
    data = estimated(loss)
    # responses differ in length: rows of 11, 11 and 11 tokens regrouped as 5 + 28
    flat = data.reshape(-1)
    response_id = torch.tensor([0] * 5 + [1] * 28)
    flat["loss_weight"] = loss_weights(response_id, mode)  # type: ignore[arg-type]
    whole = loss(flat)
    total(whole).backward()
    expected = gradients(loss)
    loss.zero_grad()
    for part in (flat[:3], flat[3:20], flat[20:]):
        total(loss(part)).backward()
    for name, grad in gradients(loss).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-7)
    if mode == "token_mean":
        torch.testing.assert_close(whole["loss_objective"], loss(data)["loss_objective"])


def test_a_language_model_micro_batch() -> None:
    """Batch size [], packed leaves [1, n, 1], ids in a nested TensorDict that only the networks read."""

    class Scorer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 2)

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            out = self.embedding(ids)
            return -out[..., :1].square(), out[..., 1:].square()

    torch.manual_seed(0)
    actor = TensorDictModule(Scorer(), in_keys=[("lm", "ids")], out_keys=["log_prob", "entropy"])
    critic = TensorDictModule(nn.Embedding(5, 1), in_keys=[("lm", "ids")], out_keys=["state_value"])
    loss = COPCLoss(actor, critic, functional=False, entropy_bonus=True, clip_value=0.2)
    ids = torch.randint(5, (1, 7))
    learner = actor(TensorDict({("lm", "ids"): ids}))["log_prob"].detach()
    data = TensorDict(
        {
            "advantage": torch.randn(1, 7, 1),
            "value_target": torch.randn(1, 7, 1),
            "state_value": torch.randn(1, 7, 1),
            "action_log_prob": learner - 0.1,
            "learner_log_prob": learner,
            "loss_weight": torch.full((1, 7, 1), 1 / 20),
            "lm": TensorDict({"ids": ids}),
        }
    )
    keys = set(data.keys(True, True))
    losses = loss(data)
    torch.testing.assert_close(
        losses["loss_objective"], -(torch.tensor(0.1).exp() * data["advantage"]).sum() / 20
    )
    torch.testing.assert_close(losses["loss_entropy"], -0.01 * losses["entropy"] * 7 / 20)
    total(losses).backward()
    assert all(p.grad is not None for p in loss.parameters())
    assert set(data.keys(True, True)) == keys
    assert "loss_critic" not in loss.actor_loss(data) and "loss_objective" not in loss.critic_loss(data)


@pytest.mark.parametrize("functional", [True, False])
@pytest.mark.parametrize("estimate_first", [True, False])
def test_what_padding_holds_changes_nothing(functional: bool, estimate_first: bool) -> None:
    options = {
        "functional": functional,
        "normalize_advantage": True,
        "clip_value": 0.2,
        "entropy_bonus": True,
    }
    clean, dirty = make_loss(**options), make_loss(**options)
    data = estimated(clean) if estimate_first else make_rollout()
    data["collector", "mask"] = torch.ones(data.shape, dtype=torch.bool)
    data["collector", "mask"][:, 8:] = False
    short = data[:, :8].clone()
    for leaf in data.exclude(("collector", "mask")).values(True, True):
        leaf[:, 8:] = torch.nan if leaf.is_floating_point() else -7 if leaf.dtype == torch.int64 else False
    losses, expected = dirty(data), clean(short)
    for key, value in expected.items():
        torch.testing.assert_close(losses[key], value)
    total(losses).backward()
    total(expected).backward()
    for name, grad in gradients(clean).items():
        torch.testing.assert_close(gradients(dirty)[name], grad)


def test_a_renamed_mask_reaches_the_estimator() -> None:
    loss, data = make_loss(), make_rollout()
    data["valid"] = torch.ones(data.shape, dtype=torch.bool)
    data["valid"][:, 8:] = False
    expected = loss(data[:, :8].exclude("valid"))
    loss.loss_mask_key = "valid"
    data["next", "reward"][:, 8:] = 1e6
    torch.testing.assert_close(loss(data)["loss_objective"], expected["loss_objective"])


def test_actor_and_critic_losses_reach_their_own_parameters_only() -> None:
    loss = make_loss(entropy_bonus=True)
    data = estimated(loss)
    for key, owner in (
        ("loss_objective", "actor"),
        ("loss_entropy", "actor"),
        ("loss_critic", "critic"),
    ):
        loss.zero_grad()
        loss(data)[key].backward()
        touched = {name.split("_")[0] for name, grad in gradients(loss).items() if grad.abs().sum() > 0}
        assert touched == {owner}


def test_no_gradient_flows_through_a_differentiable_estimator() -> None:
    loss = make_loss()
    loss.make_value_estimator("copc", differentiable=True)
    loss(make_rollout())["loss_objective"].backward()
    assert {name.split("_")[0] for name in gradients(loss)} == {"actor"}


@pytest.mark.parametrize("separate", [False, True])
def test_shared_trunk(separate: bool) -> None:
    torch.manual_seed(0)
    trunk = TensorDictModule(
        nn.Linear(OBSERVATIONS, OBSERVATIONS), in_keys=["observation"], out_keys=["hidden"]
    )
    head = make_actor()
    head.module[0].in_keys = ["hidden"]
    actor = type(head)(trunk, *head.module)
    value = TensorDictModule(nn.Linear(OBSERVATIONS, 1), in_keys=["hidden"], out_keys=["state_value"])
    critic = TensorDictSequential(trunk, value)
    loss = COPCLoss(actor, critic, separate_losses=separate)
    loss(make_rollout())["loss_critic"].backward()
    reached = trunk.module.weight.grad is not None and bool(trunk.module.weight.grad.abs().sum() > 0)
    assert reached is not separate
    assert value.module.weight.grad.abs().sum() > 0
    if separate:
        with pytest.raises(ValueError, match=r"separate_losses=True .* needs functional=True"):
            COPCLoss(actor, critic, separate_losses=True, functional=False)


def test_functional_or_not_gives_the_same() -> None:
    outputs = []
    for functional in (True, False):
        loss = make_loss(functional=functional, entropy_bonus=True)
        losses = loss(make_rollout())
        total(losses).backward()
        outputs.append((losses, sorted(grad.abs().sum().item() for grad in gradients(loss).values())))
    for key, value in outputs[0][0].items():
        torch.testing.assert_close(value, outputs[1][0][key])
    assert outputs[0][1] == pytest.approx(outputs[1][1])


def test_halves_of_forward() -> None:
    loss = make_loss(entropy_bonus=True, clip_value=0.1)
    data = make_rollout()
    whole, actor, critic = loss(data), loss.actor_loss(data), loss.critic_loss(data)
    assert set(whole.keys()) == set(actor.keys()) | set(critic.keys()) == set(loss.out_keys)
    for part in (actor, critic):
        for key, value in part.items():
            torch.testing.assert_close(value, whole[key])
    with pytest.raises(ValueError, match="critic_loss needs a critic_network"):
        COPCLoss(make_actor()).critic_loss(data)


def test_critic_updates_need_no_actor() -> None:
    loss = make_loss()
    data = estimated(loss)
    del loss.__dict__["actor_network"]
    for _ in range(2):
        loss.critic_loss(data)["loss_critic"].backward()
    assert {name.split("_")[0] for name in gradients(loss)} == {"critic"}


def test_value_clipping() -> None:
    loss, data = make_loss(clip_value=0.1), estimated(make_loss())
    new = make_critic(5)
    loss.from_stateful_net("critic_network", new)
    old, target = data["state_value"], data["value_target"]
    value = new(data.select("observation"))["state_value"].detach()
    clipped = old + (value - old).clamp(-0.1, 0.1)
    expected = 0.5 * torch.maximum((value - target).square(), (clipped - target).square()).mean()
    losses = loss(data)
    torch.testing.assert_close(losses["loss_critic"], expected)
    torch.testing.assert_close(losses["value_clip_fraction"], ((value - old).abs() > 0.1).float().mean())
    with pytest.raises(KeyError, match="clip_value needs the frozen value 'state_value'"):
        loss(data.exclude("state_value"))


def test_normalised_advantage_includes_masked_tokens() -> None:
    loss = make_loss(normalize_advantage=True)
    data = estimated(loss)
    rho, kept = log_probs(data)
    advantage = (data["advantage"] - data["advantage"].mean()) / data["advantage"].std(correction=0)
    torch.testing.assert_close(loss(data)["loss_objective"], -(kept * rho * advantage).mean())


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_reduction(reduction: str) -> None:
    data = estimated(make_loss())
    losses = make_loss(reduction=reduction, entropy_bonus=True)(data)
    reference = make_loss(reduction="none", entropy_bonus=True)(data)
    for key in ("loss_objective", "loss_critic", "loss_entropy"):
        assert losses[key].shape == (data.shape if reduction == "none" else ())
        expected = {"none": reference[key], "mean": reference[key].mean(), "sum": reference[key].sum()}
        torch.testing.assert_close(losses[key], expected[reduction])
    assert losses["kept_fraction"].shape == ()


@pytest.mark.parametrize("continuous", [False, True])
def test_entropy_bonus(continuous: bool) -> None:
    actor = make_actor(continuous=continuous)
    loss = COPCLoss(actor, make_critic(), entropy_bonus=True, entropy_coeff=0.5)
    data = make_rollout(continuous=continuous)
    losses = loss(data)
    entropy = actor.get_dist(data.select("observation")).entropy().mean()
    torch.testing.assert_close(losses["entropy"], entropy.detach())
    torch.testing.assert_close(losses["loss_entropy"], -0.5 * entropy)
    loss.entropy_coeff = 0.25
    torch.testing.assert_close(loss(data)["loss_entropy"], -0.25 * entropy)
    assert "loss_entropy" not in COPCLoss(actor, make_critic())(data)


def test_critic_coefficient() -> None:
    data = estimated(make_loss())
    base = make_loss()(data)["loss_critic"]
    torch.testing.assert_close(make_loss(critic_coeff=0.5)(data)["loss_critic"], 0.5 * base)
    loss = make_loss(critic_coeff=None)
    assert "loss_critic" not in loss(data) and "loss_critic" not in loss.out_keys


def test_call_without_a_tensordict_and_selected_outputs() -> None:
    data = make_rollout()
    arguments = {
        "observation": data["observation"],
        "action": data["action"],
        "action_log_prob": data["action_log_prob"],
        "next_observation": data["next", "observation"],
        "next_reward": data["next", "reward"],
        "next_done": data["next", "done"],
        "next_terminated": data["next", "terminated"],
    }
    loss = make_loss(entropy_bonus=True)
    expected = loss(data)
    for key, value in zip(loss.out_keys, loss(**arguments), strict=True):
        torch.testing.assert_close(value, expected[key])
    loss.select_out_keys("loss_objective", "loss_critic")
    objective, critic = loss(**arguments)
    torch.testing.assert_close(objective, expected["loss_objective"])
    torch.testing.assert_close(critic, expected["loss_critic"])


def test_keys_can_be_renamed_and_reach_the_estimator() -> None:
    loss = COPCLoss(make_actor(), make_critic(out_key="v"))
    names = {
        "advantage": ("out", "adv"),
        "value_target": "target",
        "value": "v",
        "sample_log_prob": ("behaviour", "lp"),
        "learner_log_prob": ("learner", "lp"),
        "action": "act",
        "reward": "r",
        "done": "d",
        "terminated": "t",
        "loss_weight": "w",
    }
    loss.set_keys(**names)
    loss.value_estimator  # noqa: B018  keys reach an estimator that exists, and one that is made later
    data = make_rollout()
    expected = make_loss()(data)
    data.rename_key_("action", "act").rename_key_("action_log_prob", ("behaviour", "lp"))
    for old, new in (("reward", "r"), ("done", "d"), ("terminated", "t")):
        data["next"].rename_key_(old, new)
    torch.testing.assert_close(loss(data)["loss_objective"], expected["loss_objective"])
    loss.make_value_estimator("gae")
    for name in ("advantage", "value_target", "value", "reward", "done", "terminated"):
        assert getattr(loss.value_estimator.tensor_keys, name) == names[name]
    assert ("behaviour", "lp") in loss.in_keys and ("next", "r") in loss.in_keys
    with pytest.raises(ValueError, match="not an accepted tensordict key"):
        loss.set_keys(unknown="x")
    loss = make_loss()
    loss.set_keys(learner_log_prob=("learner", "lp"))
    loss.value_estimator(renamed := make_rollout())
    assert ("learner", "lp") in renamed.keys(True)


def test_default_keys_follow_the_actor() -> None:
    keys = make_loss().tensor_keys
    assert (keys.sample_log_prob, keys.action) == ("action_log_prob", "action")
    with pytest.raises(KeyError, match="did not write 'state_value'"):
        loss = COPCLoss(make_actor(), make_critic(out_key="v"))
        data = estimated(make_loss()).exclude("state_value")
        loss(data)


def test_state_dict_round_trip_and_reset() -> None:
    loss, other = make_loss(), COPCLoss(make_actor(7), make_critic(8))
    data = estimated(make_loss())
    assert not torch.allclose(loss(data)["loss_critic"], other(data)["loss_critic"])
    other.load_state_dict(loss.state_dict())
    for key, value in loss(data).items():
        torch.testing.assert_close(value, other(data)[key])
    before = {name: p.detach().clone() for name, p in loss.named_parameters()}
    loss.reset_parameters_recursive()
    assert all(not torch.equal(before[name], p) for name, p in loss.named_parameters())


def test_parameters_are_listed_once_and_owned_by_the_loss() -> None:
    loss = make_loss()
    names = [name for name, _ in loss.named_parameters()]
    loss.value_estimator  # noqa: B018
    assert [name for name, _ in loss.named_parameters()] == names
    assert len(names) == 4


def test_wrong_options_are_named() -> None:
    with pytest.raises(ValueError, match="mask_from must be one of frozen, current, got 'learner'"):
        make_loss(mask_from="learner")
    with pytest.raises(ValueError, match="reduction must be one of mean, sum, none, got 'avg'"):
        make_loss(reduction="avg")
    with pytest.raises(ValueError, match="eps_low must be at least 0, got -1"):
        make_loss(eps_low=-1)
    with pytest.raises(ValueError, match="advantage must be one of full, continuation, got 'half'"):
        make_loss(advantage="half")


def test_shapes_never_broadcast_to_an_outer_product() -> None:
    loss = make_loss()
    data = estimated(loss)
    expected = loss(data)["loss_objective"]
    flat = data.clone()
    flat["advantage"] = flat["advantage"].squeeze(-1)
    torch.testing.assert_close(loss(flat)["loss_objective"], expected)
    data.names, data.batch_size = [None, None], [3]
    data["advantage"] = torch.zeros(3, 1, 1)
    with pytest.raises(ValueError, match=r"\(3, 11\) does not fit values of shape \(3, 1, 1\)"):
        loss(data)
