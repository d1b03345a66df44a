"""Every method as a loss class and as a config: it computes its pair of channels, and the learner trains with it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from control_cases import make_actor, make_critic, make_rollout
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from learner_cases import gradients
from lm_cases import llama, row
from omegaconf import OmegaConf
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from torchrl_copc.models.causal_lm import CausalLMActor, CausalLMCritic
from torchrl_copc.objectives import (
    AReaLLoss,
    AsyncPPOLoss,
    BRACELoss,
    COPCLoss,
    DAPOLoss,
    GRPOLoss,
    M2POLoss,
    PolicyCriticLoss,
    RetraceLoss,
    SAOLoss,
    VCPOLoss,
    VTraceLoss,
)
from torchrl_copc.objectives.policy import (
    PolicyTerm,
    clipped_surrogate,
    decoupled_clip,
    ratio_mask,
    sequence_ratio,
    truncated_weight,
    two_sided_mask,
)
from torchrl_copc.objectives.second_moment import (
    capped_second_moment_threshold,
    second_moment_clip,
    second_moment_mask,
    second_moment_threshold,
)
from torchrl_copc.training.config import check
from torchrl_copc.training.learner import Learner
from torchrl_copc.value import (
    BRACEEstimator,
    COPCEstimator,
    GroupRelativeAdvantage,
    MinimumVarianceAdvantage,
    RetraceEstimator,
    TokenGAE,
    TokenVTrace,
)

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = sorted(path.stem for path in (CONFIGS / "method").glob("*.yaml"))


def second_moment(variant: str) -> Any:
    """The channel with the threshold of the tokens it is given."""

    def channel(log_ratio: Tensor, frozen: Tensor, advantage: Tensor) -> PolicyTerm:
        if variant == "paper":
            threshold = second_moment_threshold(frozen, advantage)
            return second_moment_mask(log_ratio, frozen, advantage, threshold=threshold)
        threshold = capped_second_moment_threshold(frozen, advantage)
        return second_moment_clip(log_ratio, frozen, advantage, threshold=threshold)

    return channel


def vcpo(log_ratio: Tensor, frozen: Tensor, advantage: Tensor) -> PolicyTerm:
    response = torch.arange(len(advantage)).view(-1, 1, 1).expand_as(advantage)
    return sequence_ratio(log_ratio, frozen, advantage, response)


# class: (policy channel with the class's defaults, estimator with the class's defaults)
PAIRS: dict[type[PolicyCriticLoss], tuple[Any, Any, dict[str, Any]]] = {
    COPCLoss: (partial(ratio_mask, eta=0.5, eps_low=0.4, eps_high=0.56), COPCEstimator, {}),
    AsyncPPOLoss: (clipped_surrogate, TokenGAE, {}),
    SAOLoss: (two_sided_mask, TokenGAE, {"alpha": 1.5, "lmbda_critic": 1.0}),
    AReaLLoss: (decoupled_clip, TokenGAE, {"lmbda": 1.0}),
    VTraceLoss: (truncated_weight, TokenVTrace, {}),
    BRACELoss: (partial(clipped_surrogate, eps_high=0.28), BRACEEstimator, {}),
    RetraceLoss: (clipped_surrogate, RetraceEstimator, {}),
    GRPOLoss: (clipped_surrogate, GroupRelativeAdvantage, {}),
    DAPOLoss: (partial(clipped_surrogate, eps_high=0.28), GroupRelativeAdvantage, {}),
    M2POLoss: (second_moment("paper"), GroupRelativeAdvantage, {}),
    VCPOLoss: (vcpo, MinimumVarianceAdvantage, {}),
}
every = pytest.mark.parametrize("method", PAIRS, ids=lambda method: method.__name__)


@pytest.fixture(autouse=True, scope="module")
def one_rank():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def off_policy_rollout() -> TensorDict:
    """With what critic-free methods read: rows are responses to one prompt, the last one's to another."""
    data = make_rollout(4)
    data["action_log_prob"] = data["action_log_prob"] + 0.5 * torch.randn(data.shape)
    rows = torch.arange(4).view(4, 1, 1).expand(4, data.shape[1], 1)
    data["response_id"], data["group_id"] = rows.clone(), (rows == 3).long()
    data["grad_sq_norm"] = 1.0 + rows
    return data


def total(losses: TensorDict) -> Tensor:
    return sum(value for key, value in losses.items() if key.startswith("loss_"))


@every
def test_a_method_is_its_pair_of_channels(method: type[PolicyCriticLoss]) -> None:
    channel, estimator, settings = PAIRS[method]
    loss, data = method(make_actor(), make_critic()), off_policy_rollout()
    expected = estimator(value_network=make_critic(), actor_network=make_actor(), **settings)(data.clone())
    loss.value_estimator(data)
    assert torch.equal(data["advantage"], expected["advantage"])
    assert torch.equal(data["value_target"], expected["value_target"])
    assert ("learner_log_prob" in data) == (loss.reads_frozen or estimator.needs_ratio)

    loss.from_stateful_net("actor_network", make_actor(5))  # the learner has moved since
    losses = loss(data)
    frozen = (expected["learner_log_prob"] - data["action_log_prob"]).unsqueeze(-1)
    current = make_actor(5).get_dist(data.select("observation")).log_prob(data["action"])
    term, kept = channel((current - data["action_log_prob"]).unsqueeze(-1), frozen, data["advantage"])
    torch.testing.assert_close(losses["loss_objective"], term.mean())
    torch.testing.assert_close(losses["kept_fraction"], kept.float().mean())
    value = make_critic()(data.select("observation"))["state_value"]
    torch.testing.assert_close(losses["loss_critic"], 0.5 * (value - data["value_target"]).square().mean())
    assert set(losses.keys()) == set(loss.out_keys)


@every
@pytest.mark.parametrize("functional", [True, False])
def test_gradients_reach_their_own_network(method: type[PolicyCriticLoss], functional: bool) -> None:
    loss, data = method(make_actor(), make_critic(), functional=functional), off_policy_rollout()
    losses = loss(data)
    assert "advantage" not in data
    for key, owner in (("loss_objective", "actor"), ("loss_critic", "critic")):
        loss.zero_grad()
        losses[key].backward(retain_graph=True)
        touched = {n.split("_")[0] for n, p in loss.named_parameters() if p.grad is not None and p.grad.any()}
        assert touched == {owner}


@every
def test_torchrl_conventions(method: type[PolicyCriticLoss]) -> None:
    settings: dict[str, Any] = {"entropy_bonus": True, "clip_value": 0.1}
    loss, data = method(make_actor(), make_critic(), **settings), off_policy_rollout()
    expected = loss(data)
    # the halves add up to the whole
    halves = loss.actor_loss(data).update(loss.critic_loss(data))
    assert set(halves.keys()) == set(expected.keys()) == set(loss.out_keys)
    # call without a tensordict, and selected outputs
    inputs = {"_".join(k) if isinstance(k, tuple) else k: data[k] for k in loss.in_keys if k in data}
    for key, value in zip(loss.out_keys, loss(**inputs), strict=True):
        torch.testing.assert_close(value, expected[key])
    loss.select_out_keys("loss_objective", "loss_critic")
    assert len(loss(**inputs)) == 2
    # state dict and reductions
    other = method(make_actor(7), make_critic(8), **settings)
    other.make_value_estimator()
    other.load_state_dict(loss.state_dict())
    torch.testing.assert_close(other(data)["loss_objective"], expected["loss_objective"])
    shaped = method(make_actor(), make_critic(), reduction="none")(data)
    assert shaped["loss_objective"].shape == data.shape
    torch.testing.assert_close(shaped["loss_objective"].mean(), expected["loss_objective"])
    summed = method(make_actor(), make_critic(), reduction="sum")(data)
    torch.testing.assert_close(summed["loss_critic"], shaped["loss_critic"].sum())


@every
@pytest.mark.parametrize("separate", [False, True])
def test_shared_parameters(method: type[PolicyCriticLoss], separate: bool) -> None:
    torch.manual_seed(0)
    trunk = TensorDictModule(nn.Linear(4, 4), in_keys=["observation"], out_keys=["hidden"])
    head = make_actor()
    head.module[0].in_keys = ["hidden"]
    actor = type(head)(trunk, *head.module)
    value = TensorDictModule(nn.Linear(4, 1), in_keys=["hidden"], out_keys=["state_value"])
    loss = method(actor, TensorDictSequential(trunk, value), separate_losses=separate)
    losses = loss(off_policy_rollout())
    losses["loss_critic"].backward()
    assert value.module.weight.grad.any()
    assert (trunk.module.weight.grad is not None and bool(trunk.module.weight.grad.any())) is not separate
    losses["loss_objective"].backward()
    assert trunk.module.weight.grad.any()


@every
def test_renamed_keys_reach_loss_and_estimator(method: type[PolicyCriticLoss]) -> None:
    data = off_policy_rollout()
    expected = method(make_actor(), make_critic())(data)
    names = {
        "advantage": ("a", "advantage"),
        "value_target": ("a", "target"),
        "value": "v",
        "learner_log_prob": ("a", "learner"),
        "reward": "r",
        "done": "d",
        "terminated": "t",
        "group_id": ("prompt", "id"),
        "response_id": ("response", "id"),
        "grad_sq_norm": "norm",
        "sample_log_prob": ("behaviour", "lp"),
    }
    for key in ("reward", "done", "terminated"):
        data.rename_key_(("next", key), ("next", key[0]))
    for key in ("group_id", "response_id", "grad_sq_norm"):
        data.rename_key_(key, names[key])
    data.rename_key_("action_log_prob", ("behaviour", "lp"))
    loss = method(make_actor(), make_critic(out_key="v"))
    loss.set_keys(**names)
    torch.testing.assert_close(loss(data)["loss_objective"], expected["loss_objective"])
    loss.value_estimator(data)
    assert ("a", "advantage") in data.keys(True) and ("a", "target") in data.keys(True)
    torch.testing.assert_close(loss(data)["loss_critic"], expected["loss_critic"])
    with pytest.raises(ValueError, match="unknown is not an accepted tensordict key"):
        loss.set_keys(unknown="x")


@every
def test_padding_changes_nothing(method: type[PolicyCriticLoss]) -> None:
    data = off_policy_rollout()
    expected = method(make_actor(), make_critic())(data[:, :8].clone())
    data["collector", "mask"] = torch.ones(data.shape, dtype=torch.bool)
    data["collector", "mask"][:, 8:] = False
    for leaf in data.exclude(("collector", "mask")).values(True, True):
        leaf[:, 8:] = torch.nan if leaf.is_floating_point() else -7 if leaf.dtype == torch.int64 else False
    losses = method(make_actor(), make_critic())(data)
    for key in ("loss_objective", "loss_critic", "kept_fraction"):
        torch.testing.assert_close(losses[key], expected[key])


def test_a_new_method_is_one_function() -> None:
    def sign_only(log_ratio: Tensor, frozen_log_ratio: Tensor, advantage: Tensor) -> PolicyTerm:
        kept = torch.ones_like(advantage, dtype=torch.bool)
        return PolicyTerm(-log_ratio * advantage.sign() * (frozen_log_ratio < 0), kept)

    data = off_policy_rollout()
    loss = PolicyCriticLoss(make_actor(), make_critic(), channel=sign_only, gamma=0.9)
    losses = loss(data)
    loss.value_estimator(data)
    log_ratio = (data["learner_log_prob"] - data["action_log_prob"]).unsqueeze(-1)
    expected = -(log_ratio * data["advantage"].sign() * (log_ratio < 0)).mean()
    torch.testing.assert_close(losses["loss_objective"], expected)
    loss.make_value_estimator("token_vtrace", rho_threshold=2.0)
    assert isinstance(loss.value_estimator, TokenVTrace) and float(loss.value_estimator.gamma) == 0.9
    with pytest.raises(TypeError, match="PolicyCriticLoss has no policy channel"):
        PolicyCriticLoss(make_actor(), make_critic())


def test_a_new_method_is_one_config() -> None:
    config = {
        "_target_": "torchrl_copc.objectives.PolicyCriticLoss",
        "channel": {
            "_target_": "torchrl_copc.objectives.policy.clipped_surrogate",
            "_partial_": True,
            "eps_high": 0.28,
        },
    }
    loss = instantiate(config, actor_network=make_actor(), critic_network=make_critic(), functional=False)
    data = off_policy_rollout()
    expected = AsyncPPOLoss(make_actor(), make_critic(), eps_high=0.28)(data)
    torch.testing.assert_close(loss(data)["loss_objective"], expected["loss_objective"])


def test_only_channels_that_read_the_frozen_ratio_ask_for_it() -> None:
    data = off_policy_rollout()
    AsyncPPOLoss(make_actor(), make_critic()).value_estimator(data)
    assert AsyncPPOLoss(make_actor(), make_critic())(data)["loss_objective"].isfinite()
    with pytest.raises(KeyError, match="'learner_log_prob' is missing and is never taken as ratio 1"):
        AReaLLoss(make_actor(), make_critic())(data)


def composed(*overrides: str) -> Any:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", overrides=list(overrides))


@pytest.mark.parametrize("experiment", ["search_tiny", "search_smollm2", "search_llama3b"])
@pytest.mark.parametrize("name", NAMES)
def test_every_config_composes_with_every_experiment(name: str, experiment: str) -> None:
    config = OmegaConf.to_object(composed(f"experiment={experiment}", f"method={name}"))
    check(config)  # type: ignore[arg-type]
    assert config.method.name == name  # type: ignore[union-attr]


def test_what_a_method_needs_goes_before_the_experiment() -> None:
    assert composed("method=ppo_sync").collector.max_staleness == 0 < composed().collector.max_staleness
    assert not composed("method=vtrace").learner.whiten_advantage and composed().learner.whiten_advantage
    assert composed("method=areal").learner.minibatches_per_batch == 2
    assert composed("method=areal").learner.actor.warmup_updates == 25
    assert composed("method=sao").learner.critic_updates == 2
    assert composed("method=sao", "learner.actor.lr=0.02").learner.critic.lr == pytest.approx(0.1)
    assert composed("method=sao", "learner.critic_updates=3").learner.critic_updates == 3


@pytest.mark.parametrize("name", NAMES)
def test_the_learner_takes_an_update_with_every_config(name: str, tmp_path: Path) -> None:
    config = composed(f"method={name}", "learner.max_tokens_per_micro_batch=60", "learner.device=cpu")
    actor = CausalLMActor(llama(0))
    critic = CausalLMCritic(llama(1).model) if config.method.critic else None
    loss = instantiate(config.method.loss, actor_network=actor, critic_network=critic, functional=False)
    estimator = instantiate(config.method.value_estimator, value_network=None)
    # the estimator of the config is the one that the loss would make of its own settings
    assert type(loss.value_estimator) is type(estimator)
    own = {key: value for key, value in vars(estimator).items() if isinstance(value, (int, float, str))}
    assert own == {key: vars(loss.value_estimator)[key] for key in own}
    for coefficient, value in estimator.named_buffers():
        assert torch.equal(value, getattr(loss.value_estimator, coefficient)), coefficient

    settings = OmegaConf.to_object(config).learner  # type: ignore[union-attr]
    settings.critic_warmup_batches = 0
    rows = [row(seed, group=seed // 4) for seed in range(8)]
    metrics = (learner := Learner(settings, actor, critic, loss, estimator, tmp_path)).update(rows)
    assert all(torch.tensor(value).isfinite() for value in metrics.values())
    assert 0 < metrics["kept_fraction"] <= 1
    for network in learner.networks:
        assert metrics[f"grad_norm_{network}"] > 0
    assert ("grad_norm_critic" in metrics) is config.method.critic
    assert all(g.isfinite().all() for g in gradients(learner).values())


def test_copc_without_correction_and_an_open_mask_is_ppo_without_a_clip() -> None:
    data = off_policy_rollout()
    copc = COPCLoss(make_actor(), make_critic(), eta_policy=1e9, eta_advantage=0.0, eps_high=1e9, lmbda=0.9)
    ppo = AsyncPPOLoss(make_actor(), make_critic(), eps_low=1e9, eps_high=1e9, lmbda=0.9)
    losses = copc(data), ppo(data)
    for key in ("loss_objective", "loss_critic"):
        torch.testing.assert_close(losses[0][key], losses[1][key])


def test_m2pos_threshold_is_the_batchs_and_not_the_minibatchs() -> None:
    data = off_policy_rollout()
    for variant in ("paper", "code"):
        loss = M2POLoss(make_actor(), variant=variant, limit=0.01)
        loss.value_estimator(data.exclude("advantage", inplace=True))
        log_ratio = (data["learner_log_prob"] - data["action_log_prob"]).unsqueeze(-1)
        whole = loss(data)
        threshold = loss.batch_entries(log_ratio.flatten(), data["advantage"].flatten())["threshold"]
        data["threshold"] = threshold.float().expand_as(log_ratio)
        parts = [loss(data[:2]), loss(data[2:])]
        torch.testing.assert_close(
            (parts[0]["loss_objective"] + parts[1]["loss_objective"]) / 2, whole["loss_objective"]
        )
        del data["threshold"]
    with pytest.raises(ValueError, match="variant must be one of paper, code, got 'both'"):
        M2POLoss(make_actor(), variant="both")  # type: ignore[arg-type]


def test_channels_get_the_entries_they_name() -> None:
    data = off_policy_rollout()
    loss = PolicyCriticLoss(make_actor(), channel=sequence_ratio, entries=["response_id"])
    loss.make_value_estimator("group_relative")
    expected = VCPOLoss(make_actor()).make_value_estimator("group_relative")
    torch.testing.assert_close(loss(data)["loss_objective"], expected(data)["loss_objective"])
    with pytest.raises(KeyError, match=r"needs 'response_id' in the data; set_keys\(response_id="):
        loss(data.exclude("response_id"))
    with pytest.raises(KeyError, match="GroupRelativeAdvantage needs 'group_id' in the data"):
        loss(data.exclude("group_id"))
    with pytest.raises(ValueError, match="entries names 'length', which is not an accepted key"):
        PolicyCriticLoss(make_actor(), channel=sequence_ratio, entries=["length"])
