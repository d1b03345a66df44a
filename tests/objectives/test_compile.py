"""torch.compile: every loss and every estimate gives what it gives eagerly, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from control_cases import make_actor, make_critic, make_rollout
from tensordict import TensorDict
from torch import Tensor

from torchrl_copc import objectives
from torchrl_copc.objectives import PolicyCriticLoss
from torchrl_copc.value import (
    brace_advantage_estimate,
    copc_advantage_estimate,
    retrace_advantage_estimate,
    token_gae_advantage_estimate,
    vtrace_advantage_estimate,
)

LOSSES = [name for name in objectives.__all__ if name.endswith("Loss") and name != PolicyCriticLoss.__name__]
ESTIMATES: dict[str, tuple[Any, dict[str, Any]]] = {
    "copc": (copc_advantage_estimate, {}),
    "copc_product": (
        copc_advantage_estimate,
        {"trace": "product", "advantage": "continuation", "lmbda_critic": 1.0},
    ),
    "token_gae": (token_gae_advantage_estimate, {}),
    "vtrace": (vtrace_advantage_estimate, {}),
    "retrace": (retrace_advantage_estimate, {}),
    "brace": (brace_advantage_estimate, {"window": 5}),
}


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    torch._dynamo.reset()


def off_policy_rollout() -> TensorDict:
    """With what critic-free methods read: rows are responses, two of them to one prompt."""
    data = make_rollout()
    data["action_log_prob"] = data["action_log_prob"] + 0.5 * torch.randn(data.shape)
    rows = torch.arange(len(data)).view(-1, 1, 1).expand(*data.shape, 1)
    data["response_id"], data["group_id"], data["grad_sq_norm"] = rows.clone(), (rows == 2).long(), 1.0 + rows
    return data


def losses_and_gradients(loss: PolicyCriticLoss, call: Any, data: TensorDict) -> dict[str, Tensor]:
    loss.zero_grad()
    losses = call(data)
    sum(value for key, value in losses.items() if key.startswith("loss_")).backward()  # type: ignore[union-attr]
    gradients = {name: p.grad for name, p in loss.named_parameters() if p.grad is not None}
    return {key: value.detach().clone() for key, value in (losses.to_dict() | gradients).items()}


def assert_compiles(name: str, backend: str, *, functional: bool) -> None:
    loss = getattr(objectives, name)(make_actor(), make_critic(), functional=functional)
    data = off_policy_rollout()
    loss.value_estimator(data)
    if "learner_log_prob" in data:  # the learner has moved since
        data["learner_log_prob"] += 0.1 * torch.randn(data.shape)
    expected = losses_and_gradients(loss, loss, data)
    assert any(key.startswith("actor_network") for key in expected)
    # the check that frozen ratios are finite looks at their values: it splits the graph, and stays
    compiled = torch.compile(loss, backend=backend, fullgraph=not loss.reads_frozen)
    result = losses_and_gradients(loss, compiled, data)
    assert result.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(result[key], value, msg=lambda message, key=key: f"{key}: {message}")


@pytest.mark.parametrize("name", LOSSES)
def test_losses_with_traced_gradients(name: str) -> None:
    assert_compiles(name, "aot_eager", functional=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["COPCLoss", "M2POLoss"])  # inductor takes ten seconds for each
def test_losses_with_inductor(name: str) -> None:
    assert_compiles(name, "inductor", functional=False)


@pytest.mark.slow
def test_a_functional_loss_with_traced_gradients() -> None:
    assert_compiles("COPCLoss", "aot_eager", functional=True)


def inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shape = (3, 150, 1)
    log_ratio, value, next_value, reward = (torch.randn(shape, generator=generator) for _ in range(4))
    return 0.3 * log_ratio, value, next_value, reward, torch.rand(shape, generator=generator) < 0.05


def assert_estimate_compiles(name: str, backend: str) -> None:
    function, options = ESTIMATES[name]
    log_ratio, value, *rest = inputs()
    log_ratios = () if name == "token_gae" else (log_ratio,)

    def estimate(value: Tensor) -> tuple[Tensor, Tensor]:
        return function(0.99, 0.9, *log_ratios, value, *rest, **options)

    results = []
    for call in (estimate, torch.compile(estimate, backend=backend, fullgraph=True)):
        leaf = value.clone().requires_grad_()
        advantage, target = call(leaf)
        (advantage.square().sum() + target.sin().sum()).backward()
        results.append((advantage.detach(), target.detach(), leaf.grad))
    for compiled, eager in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ESTIMATES)
def test_estimates_are_one_graph(name: str) -> None:
    assert_estimate_compiles(name, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["copc_product", "brace"])
def test_estimates_with_inductor(name: str) -> None:
    assert_estimate_compiles(name, "inductor")


def test_the_scan_is_an_operator_as_torch_wants_it() -> None:
    coeff, bias = (torch.rand(2, 150, dtype=torch.float64, requires_grad=True) for _ in range(2))
    torch.library.opcheck(torch.ops.torchrl_copc.backward_scan.default, (coeff, bias))
