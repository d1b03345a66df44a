"""Diagnostics against the formulas in plain Python, token by token, for every method's config."""

from __future__ import annotations

import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from control_cases import make_actor, make_critic
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from learner_cases import ROWS, make_learner
from tensordict import TensorDict
from torch import Tensor
from torchrl.objectives.value import GAE

from torchrl_copc.objectives import COPCLoss, PolicyCriticLoss
from torchrl_copc.objectives.diagnostics import (
    POSITION_BUCKETS,
    STALENESS_BUCKETS,
    Moments,
    batch_contents,
    batch_diagnostics,
    bucket_names,
)
from torchrl_copc.training.trainer import progress_line
from torchrl_copc.value import COPCEstimator, TokenGAE, TokenVTrace
from torchrl_copc.value.estimator import OffPolicyEstimator

REPOSITORY = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (REPOSITORY / "configs" / "method").glob("*.yaml"))
CRITIC_FREE = ("dapo", "grpo", "m2po", "m2po_code", "vcpo")
WITH_CRITIC = [name for name in NAMES if name not in CRITIC_FREE]
LENGTHS = (1, 2, 130, 17, 5, 40, 3, 9)
CUT = 3  # this response was truncated
VERSION = 40
SAMPLED_BY = (40, 39, 36, 40, 30, 25, 10, 2)  # the version at the start of each response


@pytest.fixture(autouse=True, scope="module")
def one_rank():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def make_packed(seed: int = 0, spread: float = 0.3) -> TensorDict:
    """Packed responses to four prompts; the third turned to the next version in its middle."""
    torch.manual_seed(seed)
    lengths = torch.tensor(LENGTHS)
    response = torch.repeat_interleave(torch.arange(len(LENGTHS)), lengths)
    position = torch.cat([torch.arange(n) for n in LENGTHS])
    done = position == lengths[response] - 1
    truncated = done & (response == CUT)
    value, tokens = torch.randn(len(response)), len(response)
    version = torch.tensor(SAMPLED_BY)[response] + ((response == 2) & (position > 60)).long()
    leaves = {
        "action_log_prob": -2 + 0.5 * torch.randn(tokens),
        "state_value": value,
        "policy_version": version,
        "response_id": response,
        "group_id": response // 2,
        "grad_sq_norm": (1.0 + torch.rand(len(LENGTHS)))[response],
        "position": position,
    }
    after = {
        "reward": torch.where(done, torch.randn(tokens), 0.1 * torch.randn(tokens)),
        "done": done,
        "terminated": done & ~truncated,
        "state_value": torch.where(truncated, 0.7, torch.where(done, 0.0, value.roll(-1))),
    }
    packed = TensorDict({k: v.view(1, -1, 1) for k, v in leaves.items()}, batch_size=[1, tokens])
    packed["next"] = TensorDict({k: v.view(1, -1, 1) for k, v in after.items()}, batch_size=[1, tokens])
    packed["learner_log_prob"] = packed["action_log_prob"] + spread * torch.randn(1, tokens, 1)
    return packed


@dataclass
class Case:
    """A method's batch on its way through the learner, up to the diagnostics."""

    packed: TensorDict
    loss: PolicyCriticLoss
    estimator: OffPolicyEstimator

    def moments(self, packed: TensorDict | None = None) -> Moments:
        packed = self.packed if packed is None else packed
        settings = {"version": VERSION, "advantage": packed["before_whitening"]}
        return batch_diagnostics(packed, self.loss, self.estimator, **settings)


def make_case(name: str, **settings: Any) -> Case:
    with initialize_config_dir(str(REPOSITORY / "configs"), version_base="1.3"):
        config = compose("train", overrides=[f"method={name}"])
    critic = make_critic() if config.method.critic else None
    loss = instantiate(config.method.loss, actor_network=make_actor(), critic_network=critic)
    estimator = instantiate(config.method.value_estimator, value_network=None)
    packed = make_packed(**settings)
    if not config.method.critic:
        packed = packed.exclude("state_value", ("next", "state_value"))
    advantage = packed["before_whitening"] = estimator(packed)["advantage"]
    if config.learner.whiten_advantage:
        packed["advantage"] = (advantage - advantage.mean()) / advantage.std()
    tokens = (packed["learner_log_prob"] - packed["action_log_prob"]).flatten(), packed["advantage"].flatten()
    for key, number in loss.batch_entries(*tokens).items():
        packed[key] = number.float().expand_as(advantage)
    return Case(packed, loss, estimator)


def pieces(x: Tensor) -> list[list[float]]:
    """The numbers of each response."""
    return [part.double().tolist() for part in x.flatten().split(LENGTHS)]


def mean(x: list[Any]) -> float:
    return sum(float(number) for number in x) / len(x)


def deviation(x: list[float]) -> float:
    return math.sqrt(mean([(number - mean(x)) ** 2 for number in x]))


def threshold(name: str, log_ratio: list[float], advantage: list[float]) -> float:
    """M2PO's, by trying the tokens one after the other."""
    size = sorted(abs(d) for d, a in zip(log_ratio, advantage, strict=True) if d * a > 0)
    if name == "m2po":
        while mean([d * d for d in size]) > 0.04:
            last = size.pop()
        return last
    return max(tau for tau in size if mean([min(d, tau) ** 2 for d in size]) <= 0.04)


def policy_channel(name: str, log_ratio: list[list[float]], advantage: list[list[float]]) -> list[Any]:
    """``(weight, kept)`` of every token."""
    flat = [
        (d, a) for ds, ads in zip(log_ratio, advantage, strict=True) for d, a in zip(ds, ads, strict=True)
    ]
    if name == "vcpo":
        return [(min(8.0, math.exp(sum(ds))), True) for ds in log_ratio for _ in ds]
    if name == "vtrace":
        return [(min(1.0, math.exp(d)), True) for d, _ in flat]
    tau = threshold(name, *zip(*flat, strict=True)) if name.startswith("m2po") else math.nan
    intervals = {"brace": (0.8, 1.28), "dapo": (0.8, 1.28), "sao": (0.2, 4.0), "areal": (0.0, 5.0)}
    low, high = intervals.get(name, (0.8, 1.28) if name.startswith("copc") else (0.8, 1.2))
    if name == "m2po_code":
        low, high = 1 - max(1 - math.exp(-tau), 0.3), 1 + max(math.exp(tau) - 1, 0.5)
    found = []
    for d, a in flat:
        rho = math.exp(d)
        if name in ("copc", "copc_wo_rc", "sao", "areal"):
            kept = low <= rho <= high
        elif name == "m2po":
            kept = not (d * a > 0 and abs(d) >= tau * (1 - 1e-7))
        else:  # clipped surrogates
            kept = rho >= low if a < 0 else rho <= high
        found.append((rho if kept else 0.0, kept))
    return found


def ideal_advantage(name: str, d: list[float], delta: list[float]) -> list[float]:
    """The advantage of one response with unclipped ratios; gamma = 1."""
    steps, rho = len(d), [math.exp(number) for number in d]
    lmbda = {"areal": 1.0, "vtrace": 1.0, "sao": max(0.0, 1 - 1 / (1.5 * steps))}.get(name, 0.95)
    if name == "brace":
        rest = [sum(delta[t:]) for t in range(steps)]  # return minus value
        x = [0.0] * (steps + 1)
        for s in range(steps):
            product = 1.0
            for t in range(s, min(s + 100, steps)):
                x[s] += product * rho[t] * delta[t]
                product *= lmbda * rho[t]
            if s + 100 < steps:
                x[s] += product * rest[s + 100]
        return [delta[t] + x[t + 1] for t in range(steps)]
    found, x = [0.0] * steps, 0.0
    for t in reversed(range(steps)):
        if name == "vtrace":
            found[t] = delta[t] + x
            x = rho[t] * delta[t] + lmbda * rho[t] * x
        elif name == "retrace":
            found[t] = delta[t] + (lmbda * rho[t + 1] * x if t + 1 < steps else 0.0)
            x = found[t]
        else:
            x = found[t] = rho[t] * delta[t] + lmbda * x
    return found


def expected_metrics(name: str, case: Case) -> dict[str, float]:
    packed = case.packed
    log_ratio = pieces(packed["learner_log_prob"] - packed["action_log_prob"])
    channel = policy_channel(name, log_ratio, pieces(packed["advantage"]))
    d = [number for part in log_ratio for number in part]
    rho = [math.exp(number) for number in d]
    raw = [number for part in pieces(packed["before_whitening"]) for number in part]
    kept = [k for _, k in channel]
    out = {
        "kept_fraction": mean(kept),
        "log_ratio_mean": mean(d),
        "log_ratio_std": deviation(d),
        "kl_k1": mean([-x for x in d]),
        "kl_k3": mean([math.exp(x) - 1 - x for x in d]),
        "ESS": sum(rho) ** 2 / (len(rho) * sum(r * r for r in rho)),
        "advantage_mean": mean(raw),
        "advantage_std": deviation(raw),
        # the first and the fourth response are the present version's from beginning to end
        "on_policy_noise": mean([abs(x) for part in (log_ratio[0], log_ratio[3]) for x in part]),
    }
    staleness = [VERSION - int(v) for v in packed["policy_version"].flatten()]
    position = [int(p) for p in packed["position"].flatten()]
    ranges = {
        "kept_fraction_staleness": (
            staleness,
            [(0, 0), (1, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 9999)],
        ),
        "kept_fraction_position": (position, [(0, 15), (16, 63), (64, 255), (256, 1023), (1024, 9999)]),
    }
    for prefix, (numbers, buckets) in ranges.items():
        for low, high in buckets:
            inside = [k for k, number in zip(kept, numbers, strict=True) if low <= number <= high]
            label = f"{low}_up" if high == 9999 else str(low) if low == high else f"{low}_{high}"
            if inside:
                out[f"{prefix}_{label}"] = mean(inside)

    ideal = raw
    if name in CRITIC_FREE:
        out["surviving_coefficient"] = 1.0
    else:
        value, target = packed["state_value"].flatten().tolist(), packed["value_target"].flatten().tolist()
        error = [g - v for g, v in zip(target, value, strict=True)]
        delta = packed["next", "reward"] + packed["next", "state_value"] - packed["state_value"]
        ideal = [
            number
            for ds, deltas in zip(log_ratio, pieces(delta), strict=True)
            for number in ideal_advantage(name, ds, deltas)
        ]
        low, high = {"copc": (0.8, 1.28), "vtrace": (0, 1), "brace": (0, 1.2), "retrace": (0, 1)}.get(
            name, (1, 1)
        )
        out |= {
            "value_mean": mean(value),
            "value_target_mean": mean(target),
            "value_error_max": max(abs(e) for e in error),
            "explained_variance": 1 - deviation(error) ** 2 / deviation(target) ** 2,
            "clip_fraction_low": mean([r < low for r in rho]),
            "clip_fraction_high": mean([r > high for r in rho]),
            "log_c_mean": mean([math.log(min(max(r, low), high)) for r in rho]),
        }
    tokens = list(zip([w for w, _ in channel], rho, raw, ideal, strict=True))
    out["bias_policy"] = mean([(w - r) * best for w, r, _, best in tokens])
    out["bias_advantage"] = mean([r * (a - best) for _, r, a, best in tokens])
    out["bias_coupling"] = mean([(w - r) * (a - best) for w, r, a, best in tokens])
    total = mean([w * a - r * best for w, r, a, best in tokens])
    assert sum(out[f"bias_{part}"] for part in ("policy", "advantage", "coupling")) == pytest.approx(total)
    return out


@pytest.mark.parametrize("name", NAMES)
def test_every_method_has_the_metrics_of_the_formulas(name: str) -> None:
    case = make_case(name, spread=1.0 if name in ("areal", "sao") else 0.3)  # their intervals are wide
    found, expected = case.moments().metrics(), expected_metrics(name, case)
    found.pop("surviving_coefficient") if name not in CRITIC_FREE else None
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=2e-4, abs=2e-6), key
    assert 0 < found["kept_fraction"] < 1 or name in ("vcpo", "vtrace")  # which keep everything


@pytest.mark.parametrize("name", WITH_CRITIC)
def test_surviving_coefficient_is_the_derivative_by_the_last_reward(name: str) -> None:
    case = make_case(name)
    packed = case.packed.clone()
    reward = packed["next", "reward"].requires_grad_()
    case.estimator.differentiable = True
    advantage = case.estimator(packed)["advantage"].flatten()
    first = packed["position"].flatten() == 0
    coefficients = []
    for start, length in zip(first.nonzero().flatten().tolist(), LENGTHS, strict=True):
        (slope,) = torch.autograd.grad(advantage[start], reward, retain_graph=True)
        coefficients.append(float(slope.flatten()[start + length - 1]))
    assert case.moments().metrics()["surviving_coefficient"] == pytest.approx(mean(coefficients), rel=1e-5)
    assert min(coefficients) < 0.9 < max(coefficients) or name == "areal"


def on_two_ranks(moments: list[Moments]) -> list[dict[str, float]]:
    """The metrics on each of two ranks, which are threads that meet in every collective."""
    said: list[Tensor] = [torch.zeros(0)] * 2
    meeting = Barrier(2)

    def of_rank(rank: int) -> dict[str, float]:
        def all_reduce(vector: Tensor, op: str) -> Tensor:
            said[rank] = vector
            meeting.wait(timeout=20)
            result = said[0] + said[1] if op == "sum" else torch.maximum(*said)
            meeting.wait(timeout=20)
            return result

        return moments[rank].reduced(all_reduce).metrics()

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(of_rank, range(2)))


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_have_the_metrics_of_one(name: str) -> None:
    case = make_case(name)
    cut = sum(LENGTHS[:2])  # the first rank has one short row of the present version, and few buckets
    parts = [case.packed[:, :cut].clone(), case.packed[:, cut:].clone()]
    parts[1]["response_id"] -= 2  # they count from 0 on every rank
    found = [
        contents | rest
        for contents, rest in zip(
            on_two_ranks([batch_contents(part, version=VERSION) for part in parts]),
            on_two_ranks([case.moments(part) for part in parts]),
            strict=True,
        )
    ]
    expected = batch_contents(case.packed, version=VERSION).metrics() | case.moments().metrics()
    assert found[0] == found[1] and found[0].keys() == expected.keys()
    for key, value in expected.items():
        assert found[0][key] == pytest.approx(value, rel=1e-5, abs=1e-7), key


def test_nothing_touches_the_graph() -> None:
    case = make_case("copc")
    for key in ("learner_log_prob", "state_value", "advantage"):
        case.packed[key] = case.packed[key].clone().requires_grad_()
    before = [parameter.clone() for parameter in case.loss.parameters()]
    moments = case.moments()
    tensors = [x for pair in moments.means.values() for x in pair] + list(moments.maxima.values())
    assert not any(x.requires_grad for x in tensors)
    assert all(case.packed[key].grad is None for key in ("learner_log_prob", "state_value", "advantage"))
    for parameter, old in zip(case.loss.parameters(), before, strict=True):
        assert parameter.grad is None and torch.equal(parameter, old)


@pytest.mark.parametrize("name", ["copc", "brace", "retrace", "ppo", "sao", "vcpo", "m2po_code", "vtrace"])
def test_ratios_that_overflow_give_finite_metrics(name: str) -> None:
    case = make_case(name, spread=300.0)
    if name == "copc":
        case.estimator = COPCEstimator(value_network=None, trace="product", lmbda=0.99)
    metrics = case.moments().metrics()
    assert all(math.isfinite(value) for value in metrics.values()), metrics


def test_without_clips_and_masks_there_is_no_bias() -> None:
    packed = make_packed()
    loss = COPCLoss(make_actor(), make_critic(), eta_policy=1e9)
    estimator = COPCEstimator(value_network=None, eta=1e9, eps_high=1e9)
    metrics = batch_diagnostics(estimator(packed), loss, estimator, version=VERSION).metrics()
    for part in ("policy", "advantage", "coupling"):
        assert metrics[f"bias_{part}"] == pytest.approx(0.0, abs=1e-12)
    assert (
        metrics["kept_fraction"] == 1 and metrics["clip_fraction_low"] == metrics["clip_fraction_high"] == 0
    )
    assert metrics["log_c_mean"] == pytest.approx(metrics["log_ratio_mean"])


def test_an_estimator_of_torchrl_has_the_metrics_that_need_no_ratio_weights() -> None:
    packed, loss = make_packed(), COPCLoss(make_actor(), make_critic())
    estimator = GAE(gamma=1.0, lmbda=0.95, value_network=None)
    metrics = batch_diagnostics(estimator(packed), loss, estimator, version=VERSION).metrics()
    ours = TokenGAE(value_network=None, lmbda=0.95)
    expected = batch_diagnostics(ours(make_packed()), loss, ours, version=VERSION).metrics()
    left_out = {"clip_fraction_low", "clip_fraction_high", "log_c_mean", "surviving_coefficient"}
    assert expected.keys() - metrics.keys() == left_out | {
        f"bias_{p}" for p in ("policy", "advantage", "coupling")
    }
    for key, value in metrics.items():
        assert value == pytest.approx(expected[key], rel=1e-4), key


def test_clips_of_an_estimator_come_off_only_for_the_unclipped_estimate() -> None:
    packed = make_packed()
    estimator = TokenVTrace(value_network=None, rho_threshold=0.9)
    before = estimator(packed.clone())["advantage"]
    batch_diagnostics(estimator(packed), COPCLoss(make_actor(), make_critic()), estimator, version=VERSION)
    assert torch.equal(estimator(packed)["advantage"], before) and estimator.rho_threshold == 0.9


def test_buckets_hold_the_numbers_that_their_names_say() -> None:
    for last in (STALENESS_BUCKETS, POSITION_BUCKETS):
        for label in bucket_names(last):
            low, _, high = label.partition("_")
            ends = [int(low), int(low) + 5000 if high == "up" else int(high or low)]
            moments = Moments()
            moments.add_buckets("x", torch.ones(2), torch.tensor(ends), last)
            assert moments.metrics() == {f"x_{label}": 1.0}


def test_kept_fraction_is_there_in_critic_warm_up_and_agrees_with_the_first_update() -> None:
    learner = make_learner(critic_warmup_batches=1, loss_settings={"eta_policy": 2.0})
    warm, trained = learner.update(ROWS), learner.update(ROWS)
    assert "loss_actor" not in warm and "kept_fraction_current" not in warm
    assert 0 < warm["kept_fraction"] < 1
    assert trained["kept_fraction"] == pytest.approx(trained["kept_fraction_current"])
    assert trained["time_diagnostics"] > 0
    shown = {"version": 1, "policy_tokens": 1, "time_step": 1.0, "time_wait": 0.0, "time_sync": 0.0}
    shown |= {f"row_seconds_{part}": 1.0 for part in ("total", "engine", "tool")}
    assert "critic warm-up" in progress_line(warm | shown, 10)
    assert f"kept {trained['kept_fraction']:.3f}" in progress_line(trained | shown, 10)


def test_every_metric_is_documented() -> None:
    text = (REPOSITORY / "docs" / "diagnostics.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(\w+)`", text))
    prefixes = tuple(re.findall(r"`(\w+)_\*`", text))
    learned = make_learner(loss_settings={"clip_value": 0.2}).update(ROWS, version=7)
    names = learned.keys() | {key for name in NAMES for key in make_case(name).moments().metrics()}
    undocumented = {key for key in names if key not in documented and not key.startswith(prefixes)}
    assert not undocumented
