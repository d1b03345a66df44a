"""The study's learner: stacked seeds equal separate runs, the lag is exact, and one update is the library's."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from torchrl_copc.study.learner import StackedLearner
from torchrl_copc.study.methods import VARIANTS, method_config
from torchrl_copc.study.models import Table, Transformer, token_log_prob
from torchrl_copc.study.plan import CRITIC, CRITIC_FREE
from torchrl_copc.study.rollout import Chance, sample
from torchrl_copc.study.tasks import risky
from torchrl_copc.study.train import networks

CONFIGS = Path(__file__).parents[2] / "configs"
METHODS = [*CRITIC, *CRITIC_FREE]


def learner(
    method: str, seeds: list[int], *overrides: str, model: str = "table", rate: float = 0.05
) -> StackedLearner:
    settings = "collector.batch_rows=32", f"learner.actor.lr={rate}", f"learner.critic.lr={rate}"
    task = risky(seeds, length=3)
    config = method_config(CONFIGS, method, *settings, *overrides)
    return StackedLearner(config, task, seeds, *networks(task, model, seeds, imitation_steps=3))


def parameters(one: StackedLearner) -> list[Tensor]:
    assert isinstance(one.actor, nn.Module)
    return [p.detach().clone() for p in one.actor.parameters()]


def test_every_config_is_in_the_study() -> None:
    files = {path.stem for path in (CONFIGS / "method").glob("*.yaml")}
    assert files - {"ppo_sync"} == set(METHODS) - set(VARIANTS)  # ppo_sync is ppo at lag 0


@pytest.mark.parametrize("method", METHODS)
def test_stacked_seeds_equal_separate_runs(method: str) -> None:
    together = learner(method, [4, 9], "collector.lag=2")
    apart = [learner(method, [seed], "collector.lag=2") for seed in (4, 9)]
    first = parameters(together)
    for _ in range(5):
        for one in (together, *apart):
            one.update()
    for i, one in enumerate(apart):
        for stacked, start, single in zip(parameters(together), first, parameters(one), strict=True):
            assert torch.allclose(stacked[i], single[0], atol=1e-5)
            assert not torch.allclose(stacked[i], start[i], atol=1e-2)
        for name, total in together.totals.items():
            assert torch.allclose(total[i], one.totals[name][0], atol=1e-4), name


def test_stacked_transformers_equal_separate_runs() -> None:
    together = learner("copc", [4, 9], "collector.lag=1", model="transformer", rate=1e-3)
    apart = learner("copc", [9], "collector.lag=1", model="transformer", rate=1e-3)
    for _ in range(3):
        together.update()
        apart.update()
    # probabilities, not parameters: Adam turns rounding errors of gradients near 0 into whole steps
    paid, alone = together.task.rewarded_responses, apart.task.rewarded_responses
    logits = together.actor(paid.prompt, paid.state, paid.action)
    single = apart.actor(alone.prompt, alone.state, alone.action)
    assert torch.allclose(logits[1].softmax(-1), single[0].softmax(-1), atol=1e-4)
    assert not torch.allclose(logits[0].softmax(-1), single[0].softmax(-1), atol=1e-2)


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_rows_are_sampled_by_the_parameters_of_lag_versions_ago(lag: int) -> None:
    one = learner("ppo", [0, 1], f"collector.lag={lag}")
    versions, sampled = [], []
    advance = one.behaviour.advance

    def watched() -> nn.Module:
        versions.append(parameters(one))
        held = advance()
        sampled.append([p.detach().clone() for p in held.parameters()])
        return held

    one.behaviour.advance = watched
    for _ in range(6):
        one.update()
    for version, held in enumerate(sampled):
        for got, expected in zip(held, versions[max(0, version - lag)], strict=True):
            assert torch.equal(got, expected)
    assert not torch.equal(versions[0][0], versions[5][0])


def test_without_a_lag_all_ratios_are_one_and_the_forms_of_copc_agree() -> None:
    for model, rate in (("table", 0.05), ("transformer", 1e-3)):
        ends = []
        for method in ("copc", "copc_wo_rc", "copc_continuation"):
            one = learner(method, [0, 1], model=model, rate=rate)
            for _ in range(3):
                one.update()
            assert torch.allclose(one.totals["ess"], torch.full((2,), 3.0))
            assert torch.equal(one.totals["outside_fraction"], torch.zeros(2))
            ends.append(parameters(one))
        for other in ends[1:]:
            assert all(torch.equal(a, b) for a, b in zip(ends[0], other, strict=True))


def test_one_update_of_copc_is_the_formula() -> None:
    """Rows of an older policy, and everything from the ratio to the gradient written out for each seed."""
    one = learner(
        "copc",
        [0, 1],
        "collector.lag=2",
        "learner.minibatches_per_batch=1",
        "method.loss.advantage=full",
        "method.loss.lmbda=0.9",
        "learner.whiten_advantage=false",
        rate=0.3,
    )
    for _ in range(4):
        one.update()
    assert isinstance(one.actor, Table) and isinstance(one.critic, Table)
    logits, value = (net.weight.detach().double().clone() for net in (one.actor, one.critic))
    behaviour, chance = deepcopy(one.behaviour), deepcopy(one.chance)
    held = behaviour.advance()
    prompt = ((torch.arange(4) + 4 * one.version) % 8).repeat_interleave(8).expand(2, -1)
    rows = sample(held, one.task, prompt, chance.uniform(32, one.task.max_tokens + 1))

    expected = torch.zeros_like(logits)
    masked = 0
    for s in range(2):
        tokens = int(rows["mask"][s].sum())
        for row in range(32):
            length = int(rows["mask"][s, row].sum())
            state, action = rows["state"][s, row, :length], rows["action"][s, row, :length]
            prob = logits[s, state].softmax(-1)
            taken = prob[torch.arange(length), action]
            ratio = taken / rows["action_log_prob"][s, row, :length].double().exp()
            v = [*value[s, state, 0].tolist(), 0.0]
            x = 0.0
            for t in reversed(range(length)):
                reward = float(rows["reward"][s, row]) if t == length - 1 else 0.0
                c = min(max(float(ratio[t]), 0.8), 1.28)
                x = c * (reward + v[t + 1] - v[t]) + 0.9 * x
                if not 0.8 <= ratio[t] <= 1.28:
                    masked += 1
                    continue
                score = -prob[t]
                score[action[t]] += 1
                expected[s, state[t]] -= float(ratio[t]) * x * score / tokens
    assert masked > 3

    seen: list[Tensor] = []
    step = one.optimizers["actor"].step

    def watched() -> None:
        assert isinstance(one.actor, Table) and one.actor.weight.grad is not None
        seen.append(one.actor.weight.grad.double().clone())
        step()

    one.optimizers["actor"].step = watched
    one.update()
    assert torch.allclose(seen[0], expected, atol=1e-6)
    assert expected.abs().max() > 1e-3


def test_the_step_of_vcpo_follows_each_seeds_sample_size() -> None:
    settings = "collector.lag=4", "learner.ess_base=1.0", "learner.minibatches_per_batch=1"
    one, full = (learner("vcpo", [0, 1], *settings, rate=0.2) for _ in range(2))
    for _ in range(6):
        one.update()
        full.update()
    before = parameters(one)[0]
    assert torch.equal(before, parameters(full)[0])
    full.config.learner.ess_base = full.optimizers["actor"].lr_scale = None
    one.update()
    full.update()
    scale = one.optimizers["actor"].lr_scale
    assert scale is not None and (scale < 0.99).all() and scale[0] != scale[1]
    whole, scaled = parameters(full)[0] - before, parameters(one)[0] - before
    assert torch.allclose(scaled, scale.view(-1, 1, 1) * whole, atol=1e-6)


def test_dynamic_sampling_prefers_groups_with_different_rewards() -> None:
    one, plain = (learner("dapo", [0, 1], f"collector.dynamic_sampling={flag}") for flag in ("true", "false"))
    for each in (one, plain):
        each.rows = each._sample()["reward"].view(2, 4, 8)  # type: ignore[attr-defined]
    varied = [(r.amax(-1) > r.amin(-1)).sum(1) for r in (one.rows, plain.rows)]
    assert (varied[0] == 4).all()
    assert one._sample().shape == (2, 32)


def test_decoding_place_by_place_equals_the_pass_over_whole_responses() -> None:
    task, seeds = risky([0, 1], length=4), [0, 1]
    net = Transformer(8, 4, task.max_tokens, outputs=4, seeds=seeds)
    prompt = torch.arange(16).view(2, 8) % 8
    data = sample(net, task, prompt, Chance(seeds).uniform(8, task.max_tokens + 1))
    decode, places = net.decoder(prompt), []
    for place in range(task.max_tokens):
        token = None if place == 0 else data["action"][..., place - 1]
        places.append(decode(data["state"][..., place], token))
    log_prob = token_log_prob(torch.stack(places, 2), data["action"])
    assert torch.allclose(log_prob, data["action_log_prob"], atol=1e-5)


def test_transformers_are_small_and_do_not_see_states() -> None:
    task = risky([0])
    actor, critic = networks(task, "transformer", [0], imitation_steps=1)
    for net in (actor, critic):
        assert sum(p.numel() for p in net.parameters()) < 100_000
    prompt, action = torch.zeros(1, 4, dtype=torch.long), torch.randint(4, (1, 4, 7))
    states = [torch.randint(8, (1, 4, 7)) for _ in range(2)]
    assert torch.equal(actor(prompt, states[0], action), actor(prompt, states[1], action))
    later = action.clone()
    later[..., 3] = (later[..., 3] + 1) % 4  # a token changes nothing before the place after it
    same = torch.isclose(actor(prompt, states[0], action), actor(prompt, states[0], later), atol=1e-6).all(-1)
    assert same[..., :4].all() and not same[..., 4:].any()
