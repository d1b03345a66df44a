"""Group-relative advantages against plain Python."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.objectives.llm import MCAdvantage

from torchrl_copc.value import (
    GroupRelativeAdvantage,
    MinimumVarianceAdvantage,
    OffPolicyEstimator,
    group_relative_advantage_estimate,
    minimum_variance_advantage_estimate,
)

LENGTHS = [4, 1, 3, 5, 2, 2, 1, 6]
GROUPS = [3, 8, 3, 3, 8, 1, 5, 5]  # one response alone, the others interleaved


def packed() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    reward = torch.randn(total, generator=generator, dtype=torch.float64)
    done = torch.zeros(total, dtype=torch.bool)
    done[torch.tensor(LENGTHS).cumsum(0) - 1] = True
    group = torch.tensor(GROUPS).repeat_interleave(torch.tensor(LENGTHS))
    return reward.view(1, -1, 1), done.view(1, -1, 1), group.view(1, -1, 1)


@pytest.mark.parametrize("standardize", [True, False])
def test_every_token_gets_the_standing_of_its_response(standardize: bool) -> None:
    reward, done, group = packed()
    advantage, target = group_relative_advantage_estimate(reward, done, group, standardize=standardize)
    returns = [float(part.sum()) for part in reward[0].split(LENGTHS)]
    expected = []
    for value, name in zip(returns, GROUPS, strict=True):
        members = [r for r, g in zip(returns, GROUPS, strict=True) if g == name]
        scale = statistics.stdev(members) if standardize and len(members) > 1 else 1.0
        expected.append((value - statistics.mean(members)) / scale)
    lengths = torch.tensor(LENGTHS)
    for ours, theirs in ((advantage, expected), (target, returns)):
        exact = torch.tensor(theirs, dtype=torch.float64).repeat_interleave(lengths).view(1, -1, 1)
        torch.testing.assert_close(ours, exact)
    assert advantage[0, 13 + 2 : 13 + 4].abs().max() < 1e-12  # a prompt with a single response says nothing


def test_equal_returns_give_zero_and_rows_are_separate_responses() -> None:
    reward = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]]).unsqueeze(-1)
    running = torch.zeros(3, 2, 1, dtype=torch.bool)
    group = torch.zeros(3, 2, 1, dtype=torch.long)
    advantage, target = group_relative_advantage_estimate(reward, running, group)
    assert (advantage == 0).all() and (target == 1).all()
    assert (group_relative_advantage_estimate(0.1 * reward, running, group)[0].abs() < 1e-6).all()
    reward[0, 1] = 4.0
    expected = group_relative_advantage_estimate(reward, running, group)
    swapped = group_relative_advantage_estimate(
        *(x.transpose(0, 1) for x in (reward, running, group)), time_dim=0
    )
    for a, b in zip(swapped, expected, strict=True):
        assert torch.equal(a.transpose(0, 1), b)


def test_wrong_shapes_are_named() -> None:
    reward, done, group = packed()
    with pytest.raises(ValueError, match=r"must share one shape .*\(24,\)"):
        group_relative_advantage_estimate(reward, done, group.flatten())


def test_minimum_variance_baseline_is_the_formula_and_no_constant_does_better() -> None:
    reward, done, group = packed()
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor(LENGTHS)
    log_ratio = 0.5 * torch.randn(reward.shape, generator=generator, dtype=torch.float64)
    norms = torch.rand(len(LENGTHS), generator=generator, dtype=torch.float64)
    norm = norms.repeat_interleave(lengths).view(1, -1, 1)
    advantage, target = minimum_variance_advantage_estimate(log_ratio, reward, done, group, norm)
    returns = [float(part.sum()) for part in reward[0].split(LENGTHS)]
    ratios = [math.prod(part.exp().flatten().tolist()) for part in log_ratio[0].split(LENGTHS)]
    weights = [w * w * g for w, g in zip(ratios, norms.tolist(), strict=True)]
    expected = []
    for name, own in zip(GROUPS, returns, strict=True):
        members = [(w, r) for w, r, g in zip(weights, returns, GROUPS, strict=True) if g == name]
        baseline = sum(w * r for w, r in members) / sum(w for w, _ in members)
        expected.append(own - baseline)

        def variance(constant: float, members: list[tuple[float, float]] = members) -> float:
            return sum(w * (r - constant) ** 2 for w, r in members)

        assert variance(baseline) <= min(variance(baseline + step) for step in (-1e-3, 1e-3))
    exact = torch.tensor(expected, dtype=torch.float64).repeat_interleave(lengths).view(1, -1, 1)
    torch.testing.assert_close(advantage, exact)
    torch.testing.assert_close(target, group_relative_advantage_estimate(reward, done, group)[1])


def test_minimum_variance_baseline_of_long_responses_and_of_no_weight_at_all() -> None:
    reward, done, group = packed()
    for log_ratio in (
        200.0,
        -200.0,
    ):  # the ratio of a response overflows or vanishes, equally for all in a group
        reward_at_end = torch.where(done, reward, 0.0)
        ratio = torch.full_like(reward, log_ratio)
        ratio[~done] = 0.0  # one such token per response
        ones = torch.ones_like(reward)
        ours = minimum_variance_advantage_estimate(ratio, reward_at_end, done, group, ones)[0]
        mean = group_relative_advantage_estimate(reward_at_end, done, group, standardize=False)[0]
        torch.testing.assert_close(ours, mean)
    nothing = minimum_variance_advantage_estimate(0 * reward, reward, done, group, 0 * reward)[0]
    torch.testing.assert_close(
        nothing, group_relative_advantage_estimate(reward, done, group, standardize=False)[0]
    )
    with pytest.raises(
        ValueError, match="log_ratio, reward, done, group_id, grad_sq_norm must share one shape"
    ):
        minimum_variance_advantage_estimate(reward[0], reward, done, group, reward)


def tokens() -> TensorDict:
    reward, done, group = packed()
    generator = torch.Generator().manual_seed(2)
    learner = torch.randn(reward.shape, generator=generator, dtype=torch.float64)
    return TensorDict(
        {
            "group_id": group,
            "grad_sq_norm": reward.abs() + 0.1,
            "learner_log_prob": learner,
            "action_log_prob": learner + 0.3 * reward,
            "next": {"reward": reward, "done": done, "terminated": done},
        },
        batch_size=reward.shape[:2],
    )


def test_standing_is_that_of_torchrls_transform() -> None:
    data = tokens()
    ours = GroupRelativeAdvantage()(data.clone())["advantage"][0]
    responses = dict(enumerate(data[0].split(LENGTHS)))
    for name in set(GROUPS):
        members = [i for i, g in enumerate(GROUPS) if g == name]
        if len(members) > 1:
            theirs = MCAdvantage(
                grpo_size=len(members),
                prompt_key="group_id",
                rewards_key=("next", "reward"),
                done_key=("next", "done"),
                trajectory_return="sum",
            )
            result = [theirs.inv(responses[i].clone()) for i in members][-1]
            mine = torch.cat([part for i, part in enumerate(ours.split(LENGTHS)) if i in members])
            torch.testing.assert_close(mine, result["advantage"].to(mine), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "estimator", [GroupRelativeAdvantage(), MinimumVarianceAdvantage()], ids=lambda e: type(e).__name__
)
def test_estimators_need_no_values_and_padding_never_enters(estimator: OffPolicyEstimator) -> None:
    data = tokens()
    expected = estimator(data.clone())
    assert "state_value" not in expected
    padded = torch.cat([data, data[:, :5]], 1)
    padded["collector", "mask"] = torch.arange(padded.shape[1])[None] < data.shape[1]
    for leaf in padded.exclude(("collector", "mask")).values(True, True):
        leaf[:, data.shape[1] :] = torch.nan if leaf.is_floating_point() else False
    estimator(padded)
    torch.testing.assert_close(padded["advantage"][:, : data.shape[1]], expected["advantage"])
    assert (padded["advantage"][:, data.shape[1] :] == 0).all()


@pytest.mark.parametrize("cls", [GroupRelativeAdvantage, MinimumVarianceAdvantage])
def test_estimators_follow_torchrls_conventions(cls: type[OffPolicyEstimator]) -> None:
    data = tokens()
    expected = cls()(data.clone())
    # without a tensordict
    inputs = {"_".join(k) if isinstance(k, tuple) else k: data[k] for k in cls().in_keys}
    advantage, target = cls()(**inputs)
    assert torch.equal(advantage, expected["advantage"]) and torch.equal(target, expected["value_target"])
    # renamed keys
    estimator = cls()
    estimator.set_keys(group_id=("prompt", "id"), advantage=("out", "a"))
    data.rename_key_("group_id", ("prompt", "id"))
    assert torch.equal(estimator(data)["out", "a"], expected["advantage"])
    with pytest.raises(KeyError, match="needs 'group_id' in the data; set_keys\\(group_id="):
        cls()(data)


def test_rewards_may_be_integers_or_booleans_and_ids_anything() -> None:
    data = tokens()
    data["next", "reward"] = data["next", "done"].long() * (data["group_id"] > 2)
    data["group_id"] = data["group_id"] - 4  # -1 among them
    for dtype in (torch.int64, torch.bool):
        integers = data.clone()
        integers["next", "reward"] = integers["next", "reward"].to(dtype)
        floats = data.clone()
        floats["next", "reward"] = floats["next", "reward"].double()
        for estimator in (GroupRelativeAdvantage(), MinimumVarianceAdvantage()):
            found, expected = estimator(integers)["advantage"], estimator(floats)["advantage"]
            assert found.dtype == torch.get_default_dtype()
            torch.testing.assert_close(found, expected.to(found))
    floats["next", "reward"] = tokens()["next", "reward"]
    expected = GroupRelativeAdvantage()(floats.clone())["advantage"]
    padded = torch.cat([floats, floats[:, :5]], 1)
    padded["collector", "mask"] = torch.arange(padded.shape[1])[None] < floats.shape[1]
    torch.testing.assert_close(GroupRelativeAdvantage()(padded)["advantage"][:, : floats.shape[1]], expected)


def test_with_the_exact_norm_the_baseline_has_the_least_second_moment_of_the_real_gradient() -> None:
    """Gradients in all parameters of a small policy, one backward pass per response."""
    torch.manual_seed(0)
    policy = torch.nn.Linear(3, 4).double()
    lengths, count = [2, 4, 3, 1, 5], 5
    observations = [torch.randn(n, 3, dtype=torch.float64) for n in lengths]
    actions = [torch.randint(4, (n,)) for n in lengths]
    behaviour = [-1.4 + 0.3 * torch.randn(n, dtype=torch.float64) for n in lengths]
    returns = torch.randn(count, dtype=torch.float64)
    gradients, ratios, learner = [], [], []
    for obs, action, old in zip(observations, actions, behaviour, strict=True):
        policy.zero_grad()
        log_prob = policy(obs).log_softmax(-1).gather(-1, action[:, None]).squeeze(-1)
        log_prob.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
        ratios.append((log_prob.detach() - old).sum().exp())
        learner.append(log_prob.detach())
    done = torch.cat([torch.arange(n) == n - 1 for n in lengths]).view(1, -1, 1)
    norms = torch.stack([g.square().sum() for g in gradients]).repeat_interleave(torch.tensor(lengths))
    reward = torch.zeros(1, sum(lengths), 1, dtype=torch.float64)
    reward[done] = returns
    advantage, _ = minimum_variance_advantage_estimate(
        (torch.cat(learner) - torch.cat(behaviour)).view(1, -1, 1),
        reward,
        done,
        torch.zeros(1, sum(lengths), 1, dtype=torch.long),
        norms.view(1, -1, 1),
    )
    baseline = returns - advantage[done]
    torch.testing.assert_close(baseline, baseline[:1].expand(count))

    def second_moment(b: float) -> float:
        return sum(
            float((w * (r - b) * g).square().sum())
            for w, r, g in zip(ratios, returns, gradients, strict=True)
        )

    least = float(baseline[0])
    assert second_moment(least) < min(second_moment(least + step) for step in (-1e-3, 1e-3))
