from __future__ import annotations

import math
from datetime import timedelta

import pytest
import torch
from learner_cases import ROWS, SCORED, SMOOTH, gradients, make_learner, weights
from lm_cases import llama, row
from omegaconf import OmegaConf

from torchrl_copc.training.learner import (
    LearnerConfig,
    NonFiniteError,
    OptimizerConfig,
    start_process_group,
)
from torchrl_copc.trajectory import LOG_PROBS, POLICY_MASK, REWARD, TOKENS, TRUNCATED


@pytest.fixture(autouse=True, scope="module")
def one_rank():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def assert_same(ours: dict, theirs: dict, rtol: float = 1e-5) -> None:
    """Relative to the largest entry of each tensor: single entries may cancel to rounding error."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        scale = float(theirs[name].abs().max())
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=rtol * scale + 1e-12, msg=name)


def assert_equal(ours: dict, theirs: dict) -> None:
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def brute_force(
    minibatches: list[list],
    head: torch.Tensor,
    *,
    critic_updates: int = 1,
    lmbda_critic: float = 0.9,
    clip_value: float = math.inf,
    mask_from: str = "frozen",
    interval: tuple[float, float] = (0.0, 3.24),
    optimizers: tuple[OptimizerConfig, OptimizerConfig],
) -> tuple[dict, dict]:
    """One batch by the formulas, row by row in float64: AdamW's first moments / 0.1, and what was active.

    eta_policy=4, eta=2: I(eta_P) = ``interval``, I(eta_A) = [.2, 2.12]; lmbda=.9, step trace, full form.
    """
    actor, critic = llama(0).double(), llama(1).model.double()
    head = head.detach().double().requires_grad_()
    bias = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    rows = [one for minibatch in minibatches for one in minibatch]

    def inside(log_ratio):
        return (log_ratio.exp() >= interval[0]) & (log_ratio.exp() <= interval[1])

    def log_ratios(one):
        ids, mask = one.get(TOKENS), one.get(POLICY_MASK)
        log_prob = actor(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None]).squeeze(-1)
        return log_prob[mask[1:]] - one.get(LOG_PROBS)[mask].double()

    def values(one):
        """At every policy token, and after the row."""
        value = (critic(one.get(TOKENS)[None]).last_hidden_state[0] @ head.t()).squeeze(-1) + bias
        return value[:-1][one.get(POLICY_MASK)[1:]], value[-1:]

    frozen = []
    with torch.no_grad():
        for one in rows:
            log_ratio, (value, last) = log_ratios(one), values(one)
            clipped = log_ratio.exp().clamp(0.2, 2.12)
            at_end = last if bool(one.get(TRUNCATED).any()) else torch.zeros(1).double()
            reward = one.get(REWARD)[one.get(POLICY_MASK)].squeeze(-1).double()
            delta = reward + torch.cat([value[1:], at_end]) - value
            advantage, target = torch.zeros_like(delta), torch.zeros_like(delta)
            flow = critic_flow = 0.0
            for t in reversed(range(len(delta))):
                flow = advantage[t] = clipped[t] * delta[t] + 0.9 * flow
                critic_flow = target[t] = clipped[t] * delta[t] + lmbda_critic * critic_flow
            frozen.append((log_ratio, value, advantage, value + target))
    every = torch.cat([advantage for _, _, advantage, _ in frozen])
    mean, std = every.mean(), every.std(unbiased=False)

    actor_optimizer, critic_optimizer = (
        torch.optim.AdamW(parameters, lr=config.lr, eps=config.eps, weight_decay=0.0)
        for parameters, config in zip(
            (actor.parameters(), [*critic.parameters(), head, bias]), optimizers, strict=True
        )
    )
    active = dict(masked=0, mask_changed=0, value_clipped=0)
    first = 0
    for minibatch in minibatches:
        known = frozen[first : first + len(minibatch)]
        first += len(minibatch)
        old_log_ratio, old_value, advantage, target = (torch.cat(x) for x in zip(*known, strict=True))
        for _ in range(critic_updates):
            value = torch.cat([values(one)[0] for one in minibatch])
            near = old_value + (value - old_value).clamp(-clip_value, clip_value)
            active["value_clipped"] += int((near != value).sum())
            error = torch.maximum((value - target).square(), (near - target).square())
            critic_optimizer.zero_grad()
            (0.5 * error.mean()).backward()
            critic_optimizer.step()
        log_ratio = torch.cat([log_ratios(one) for one in minibatch])
        kept = inside(old_log_ratio if mask_from == "frozen" else log_ratio.detach())
        active["masked"] += int((~kept).sum())
        active["mask_changed"] += int((kept != inside(old_log_ratio)).sum())
        actor_optimizer.zero_grad()
        (-(kept * log_ratio.exp() * (advantage - mean) / std).mean()).backward()
        actor_optimizer.step()

    names = {f"actor.model.{name}": (actor_optimizer, p) for name, p in actor.named_parameters()}
    names |= {f"critic.trunk.{name}": (critic_optimizer, p) for name, p in critic.named_parameters()}
    names |= {"critic.value_head.weight": (critic_optimizer, head)}
    names |= {"critic.value_head.bias": (critic_optimizer, bias)}
    return {name: adamw.state[p]["exp_avg"] / 0.1 for name, (adamw, p) in names.items()}, active


def learner_and_formulas(head_settings: dict, **settings) -> tuple[dict, dict, dict, dict]:
    learner = make_learner(**settings)
    parts = learner.config.minibatches_per_batch
    rows = learner._shuffled(ROWS)
    minibatches = [rows[len(rows) * i // parts : len(rows) * (i + 1) // parts] for i in range(parts)]
    expected, active = brute_force(
        minibatches,
        learner.critic.net.value_head.weight.full_tensor(),
        critic_updates=learner.config.critic_updates,
        optimizers=(learner.config.actor, learner.config.critic),
        **head_settings,
    )
    metrics = learner.update(ROWS)
    return {n: g.double() for n, g in gradients(learner).items()}, expected, active, metrics


def test_gradients_are_those_of_the_formulas_row_by_row_in_float64():
    found, expected, active, metrics = learner_and_formulas({})
    assert active["masked"] > 0
    tokens = metrics["tokens"]
    assert metrics["kept_fraction"] == pytest.approx(1 - active["masked"] / tokens)
    assert_same(found, expected, rtol=1e-4)


@pytest.mark.parametrize("mask_from", ["frozen", "current"])
def test_minibatches_value_clipping_and_traces_follow_the_formulas(mask_from):
    found, expected, active, metrics = learner_and_formulas(
        dict(lmbda_critic=1.0, clip_value=0.2, mask_from=mask_from, interval=(0.6, 1.56)),
        loss_settings=dict(clip_value=0.2, mask_from=mask_from, eta_policy=1.0),
        estimator_settings=dict(lmbda_critic=1.0),
        minibatches_per_batch=3,
        critic_updates=2,
        actor=OptimizerConfig(lr=0.3, max_grad_norm=1e9, eps=1.0),
        critic=SMOOTH,
    )
    assert active["value_clipped"] > 0 and metrics["value_clip_fraction"] > 0
    assert (active["mask_changed"] > 0) == (mask_from == "current")
    assert_same(found, expected, rtol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        dict(max_tokens_per_micro_batch=1),
        dict(max_tokens_per_micro_batch=10_000),
        dict(layout="packed"),
        dict(gradient_checkpointing=True),
        dict(keep_activations=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("aggregation", ["token_mean", "response_mean"])
def test_micro_batches_packing_and_recomputation_leave_gradients_unchanged(settings, aggregation):
    reference, other = (
        make_learner(aggregation=aggregation),
        make_learner(aggregation=aggregation, **settings),
    )
    expected, found = reference.update(ROWS), other.update(ROWS)
    assert_same(gradients(other), gradients(reference))
    for key in ("loss_actor", "loss_critic", "kept_fraction", "ESS", "explained_variance", "grad_norm_actor"):
        assert found[key] == pytest.approx(expected[key], rel=1e-4), key


def test_anything_at_context_positions_leaves_the_update_unchanged():
    reference, other = make_learner(), make_learner()
    reference.update(ROWS)
    dirty = [one.clone() for one in ROWS]
    for one in dirty:
        context = ~one.get(POLICY_MASK)
        one.get(LOG_PROBS)[context] = float("nan")
        one.get(REWARD)[context] = float("inf")
        one.get("policy_version")[context] = 10**6
    other.update(dirty)
    assert_equal(weights(other), weights(reference))


def test_value_at_the_cut_enters_only_truncated_rows():
    def first_gradients(rows):
        learner = make_learner(whiten_advantage=False)
        learner.update(rows)
        return gradients(learner)

    longer = [one if i != 2 else row(2, truncated=True, trailing=5) for i, one in enumerate(ROWS)]
    ended = [one.clone() for one in ROWS]
    ended[2].get(TRUNCATED)[:] = False
    ended[2].get(("next", "terminated"))[:] = ended[2].get(("next", "done"))
    name = "actor.model.model.norm.weight"
    cut = first_gradients(ROWS)[name]
    assert not torch.allclose(cut, first_gradients(ended)[name])
    assert not torch.allclose(cut, first_gradients(longer)[name])  # the observation after the cut is read


@pytest.mark.parametrize("damage", ["reward", "weights"])
def test_non_finite_updates_are_left_out_and_the_batch_is_written(tmp_path, damage):
    learner = make_learner(tmp_path / "dump", on_nonfinite="skip")
    learner.update(ROWS)
    rows = [one.clone() for one in ROWS]
    if damage == "reward":
        rows[0].get(REWARD)[:] = float("nan")
    else:
        with torch.no_grad():
            learner.critic.net.value_head.bias.to_local().fill_(float("inf"))
    before, moments = weights(learner), gradients(learner)
    metrics = learner.update(rows)
    assert metrics["nonfinite_updates"] == (2 if damage == "reward" else 1)
    assert learner.version == 2 and learner.actor.updates == 1
    assert_equal(weights(learner), before)
    assert_equal(gradients(learner), moments)
    (dump,) = (tmp_path / "dump").iterdir()
    saved = torch.load(dump, weights_only=False)
    assert len(saved["rows"]) == len(rows) and saved["version"] == 1
    if damage == "reward":
        assert learner.update(ROWS)["nonfinite_updates"] == 0
        assert not torch.equal(
            weights(learner)["actor.model.model.norm.weight"], before["actor.model.model.norm.weight"]
        )


def test_non_finite_update_stops_the_run_with_the_file(tmp_path):
    learner = make_learner(tmp_path)
    rows = [one.clone() for one in ROWS]
    rows[3].get(REWARD)[:] = float("inf")
    before = weights(learner)
    with pytest.raises(NonFiniteError, match=r"version000000_rank0\.pt.*learner\.on_nonfinite=skip"):
        learner.update(rows)
    assert_equal(weights(learner), before)
    assert learner.version == 1


@pytest.mark.parametrize("keep_activations", [False, True])
def test_a_frozen_pass_that_is_not_finite_leaves_the_learner_usable(tmp_path, keep_activations):
    learner = make_learner(tmp_path, on_nonfinite="skip", keep_activations=keep_activations)
    before = learner.critic.net.value_head.bias.full_tensor().detach().clone()
    with torch.no_grad():
        learner.critic.net.value_head.bias.to_local().fill_(float("nan"))
    skipped = learner.update(ROWS, version=4)
    assert skipped["nonfinite_updates"] == 1
    with torch.no_grad():
        learner.critic.net.value_head.bias.to_local().copy_(before)
    learner.update(ROWS, version=4)
    reference = make_learner()
    expected = reference.update(ROWS, version=4)
    contents = ("tokens", "responses", "reward", *(key for key in expected if key.startswith("staleness")))
    assert len(contents) == 10 and all(skipped[key] == expected[key] for key in contents)
    assert_same(gradients(learner), gradients(reference))


def test_activations_are_kept_for_the_first_update_only():
    settings = dict(minibatches_per_batch=2, critic_updates=2, critic_warmup_batches=1)
    kept, plain = make_learner(keep_activations=True, **settings), make_learner(**settings)
    for _ in range(2):
        kept.update(ROWS), plain.update(ROWS)
    assert_same(weights(kept), weights(plain), rtol=1e-4)


def test_critic_warm_up_leaves_the_actor_bitwise_unchanged():
    learner = make_learner(critic_warmup_batches=2)
    start = weights(learner)
    for _ in range(2):
        metrics = learner.update(ROWS)
        assert "loss_actor" not in metrics
    during = weights(learner)
    assert all(torch.equal(during[name], start[name]) for name in start if name.startswith("actor"))
    assert not torch.equal(during["critic.value_head.weight"], start["critic.value_head.weight"])
    learner.update(ROWS)
    name = "actor.model.model.embed_tokens.weight"
    assert not torch.equal(weights(learner)[name], start[name])


def test_minibatches_and_critic_updates_are_counted_per_batch():
    learner = make_learner(minibatches_per_batch=3, critic_updates=2)
    learner.update(ROWS)
    assert (learner.actor.updates, learner.critic.updates, learner.version) == (3, 6, 1)
    with pytest.raises(ValueError, match=r"2 rows for 3 minibatches.*learner\.minibatches_per_batch"):
        learner.update(ROWS[:2])


def test_more_critic_updates_fit_the_targets_better_and_leave_the_actor_update_alone():
    once, often = make_learner(), make_learner(critic_updates=4)
    first, second = once.update(ROWS), often.update(ROWS)
    assert second["loss_critic"] < first["loss_critic"]
    ours, theirs = weights(often), weights(once)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if name.startswith("actor"))


def test_learning_rates_rise_separately():
    learner = make_learner(
        actor=OptimizerConfig(lr=1e-3, warmup_updates=4), critic=OptimizerConfig(lr=1e-2, warmup_updates=2)
    )
    rates = [learner.update(ROWS) for _ in range(5)]
    assert [m["lr_actor"] for m in rates] == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])
    assert [m["lr_critic"] for m in rates] == pytest.approx([0.5e-2, 1e-2, 1e-2, 1e-2, 1e-2])


def test_clipping_scales_the_gradient_to_the_given_norm():
    free, clipped = make_learner(), make_learner(actor=OptimizerConfig(lr=1e-2, max_grad_norm=0.01))
    norm = free.update(ROWS)["grad_norm_actor"]
    assert clipped.update(ROWS)["grad_norm_actor"] == pytest.approx(norm) and norm > 0.01

    def length(learner):
        return math.sqrt(
            sum(float(g.square().sum()) for n, g in gradients(learner).items() if n.startswith("actor"))
        )

    assert length(free) == pytest.approx(norm, rel=1e-4)
    assert length(clipped) == pytest.approx(0.01, rel=1e-3)


def test_scores_and_weights_are_those_of_the_updated_model():
    learner = make_learner()
    before = learner.score(SCORED)
    learner.update(ROWS)
    pushed = learner.actor_weights()
    assert "lm_head.weight" not in pushed
    model = llama(5)
    missing, unexpected = model.load_state_dict(pushed, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    after = learner.score(SCORED)
    for ids, ours, old in zip(SCORED, after, before, strict=True):
        ids = torch.tensor(ids)
        theirs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(ours), theirs.detach(), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(torch.tensor(ours), torch.tensor(old), atol=1e-3)


def test_metrics_count_policy_tokens_and_staleness():
    learner = make_learner()
    metrics = learner.update(ROWS, version=10)
    counts = torch.tensor([int(one.get(POLICY_MASK).sum()) for one in ROWS])
    staleness = 10 - torch.arange(len(ROWS)).repeat_interleave(counts)  # row i was sampled by version i
    assert metrics["tokens"] == int(counts.sum()) and metrics["responses"] == len(ROWS)
    assert metrics["reward"] == pytest.approx(sum(float(one.get(REWARD).sum()) for one in ROWS) / len(ROWS))
    assert metrics["staleness_mean"] == pytest.approx(float(staleness.float().mean()))
    assert metrics["staleness_max"] == 10 and learner.version == 11
    for share, key in ((0.5, "staleness_p50"), (0.95, "staleness_p95")):
        expected = staleness.sort().values[math.ceil(share * len(staleness)) - 1]
        assert metrics[key] == int(expected)
    assert 0 < metrics["ESS"] <= 1 and metrics["kl_k3"] >= 0
    assert all(math.isfinite(value) for value in metrics.values())


def test_bfloat16_passes_keep_float32_master_weights_and_heads():
    learner = make_learner(param_dtype="bfloat16")
    metrics = learner.update(ROWS)
    exact = make_learner().update(ROWS)
    assert metrics["grad_norm_critic"] == pytest.approx(exact["grad_norm_critic"], rel=0.1)
    assert {value.dtype for value in weights(learner).values()} == {torch.float32}


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (dict(param_dtype="float16"), "learner.param_dtype"),
        (dict(device="gpu"), r"learner\.device must be one of auto, cpu, cuda, got 'gpu'"),
        (dict(on_nonfinite="ignore"), "learner.on_nonfinite"),
        (dict(critic_updates=0), "learner.critic_updates"),
        (dict(actor=OptimizerConfig(lr=-1.0)), "learner.actor.lr"),
        (dict(critic=OptimizerConfig(max_grad_norm=0.0)), "learner.critic.max_grad_norm"),
    ],
)
def test_settings_check_themselves(settings, name):
    with pytest.raises(ValueError, match=name):
        LearnerConfig(**settings)


def test_a_gpu_that_is_not_there_is_named_before_anything_starts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"learner\.device=cuda.*no CUDA GPU"):
        start_process_group("cuda")


def test_other_ranks_wait_as_long_as_rank_0_evaluates():
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", 0)):
            patch.setenv(name, str(value))
        start_process_group("cpu")
    group = torch.distributed.distributed_c10d._get_default_group()
    assert group._get_backend(torch.device("cpu")).options._timeout >= timedelta(hours=24)


def test_clip_fractions_are_shares_of_the_global_batch_where_the_frozen_ratio_leaves_the_interval():
    metrics = make_learner(minibatches_per_batch=3).update(ROWS)
    actor, log_ratios = llama(0), []
    for one in ROWS:
        ids, mask = one.get(TOKENS), one.get(POLICY_MASK)
        log_prob = actor(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None]).squeeze(-1)
        log_ratios.append(log_prob.detach()[mask[1:]] - one.get(LOG_PROBS)[mask])
    ratio = torch.cat(log_ratios).exp()
    for key, outside in (("clip_fraction_low", ratio < 0.2), ("clip_fraction_high", ratio > 2.12)):
        assert 0 < metrics[key] == pytest.approx(float(outside.float().mean()))


def test_settings_compose_in_structured_configs():
    composed = OmegaConf.merge(
        OmegaConf.structured(LearnerConfig), {"critic": {"lr": 0.5}, "layout": "packed"}
    )
    config = OmegaConf.to_object(composed)
    assert isinstance(config, LearnerConfig) and config.critic == OptimizerConfig(lr=0.5)
    with pytest.raises(ValueError, match=r"learner\.actor\.beta1"):
        OmegaConf.to_object(OmegaConf.merge(composed, {"actor": {"beta1": 1.0}}))
