"""Tasks of the study: exact expected returns against all responses listed, and samples against probabilities."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from torchrl_copc.study.models import Table
from torchrl_copc.study.rollout import Chance, sample
from torchrl_copc.study.tasks import END, TASKS, TokenTask, graph, lock, risky

SMALL = {
    "risky": risky([3, 4], prompts=2, length=3, tokens=3),
    "lock": lock([3, 4], prompts=2, length=4, tokens=3),
    "graph": graph([3, 4], prompts=2, length=4, width=3, tokens=3),
}
every = pytest.mark.parametrize("name", SMALL)


def random_policy(task: TokenTask) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(task.next_state.shape, generator=generator, dtype=torch.float64).softmax(-1)


def listed_return(task: TokenTask, probabilities: Tensor, instance: int) -> float:
    """Every string of tokens, cut where its response ends, counted once."""
    total, tokens = 0.0, task.next_state.shape[-1]
    for start in task.starts.tolist():
        seen = set()
        for string in product(range(tokens), repeat=task.max_tokens):
            state, likelihood, response = start, 1.0, ()
            for token in string:
                likelihood *= float(probabilities[instance, state, token])
                response += (token,)
                after = int(task.next_state[instance, state, token])
                if after == END:
                    break
                state = after
            assert after == END  # no response is longer than max_tokens
            if response not in seen:
                seen.add(response)
                total += likelihood * float(task.reward[instance, state, response[-1]])
    return total / len(task.starts)


@every
def test_expected_return_equals_the_sum_over_all_responses(name: str) -> None:
    task = SMALL[name]
    probabilities = random_policy(task)
    expected = [listed_return(task, probabilities, instance) for instance in range(2)]
    assert task.expected_return(probabilities).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["risky", "lock"])
def test_rewarded_responses_are_all_that_a_return_needs(name: str) -> None:
    task = SMALL[name]
    probabilities, paid = random_policy(task), task.rewarded_responses
    instance = torch.arange(2)[:, None, None]
    likelihood = probabilities[instance, paid.state, paid.action].where(paid.mask, 1.0).prod(-1)
    returns = (likelihood * paid.reward).sum(-1) / len(task.starts)
    assert torch.allclose(returns, task.expected_return(probabilities))
    assert paid.reward.shape == (
        2,
        2 * (2 if name == "risky" else 1),
    )  # per prompt: the chain, and the safe token


def test_too_many_rewarded_responses_are_refused() -> None:
    with pytest.raises(ValueError, match="more than 1000"):
        _ = graph([0]).rewarded_responses


@every
def test_sampled_responses_follow_the_task(name: str) -> None:
    task, rows = SMALL[name], 6000
    probabilities = random_policy(task).float()
    prompt = (torch.arange(rows) % 2).expand(2, -1)
    data = sample(Table(probabilities.log()), task, prompt, Chance([0, 1]).uniform(rows, task.max_tokens + 1))
    expected = task.expected_return(probabilities)
    error = (expected * (1 - expected) / rows).sqrt()  # at most, for rewards in [0, 1]
    assert ((data["reward"].mean(1) - expected) / error).abs().max() < 4
    # every response ends exactly at its last token, and its log-probs are those of its tokens
    length = data["mask"].sum(-1)
    for instance, row in product(range(2), range(20)):
        last = int(length[instance, row]) - 1
        path = list(
            zip(data["state"][instance, row].tolist(), data["action"][instance, row].tolist(), strict=True)
        )
        after = [int(task.next_state[instance, s, a]) for s, a in path[: last + 1]]
        assert after[-1] == END and after[:-1] == [s for s, _ in path[1 : last + 1]]
        likelihood = torch.stack([probabilities[instance, s, a] for s, a in path[: last + 1]])
        assert torch.allclose(data["action_log_prob"][instance, row, : last + 1].exp(), likelihood, atol=1e-6)


def test_the_first_policy_is_as_described() -> None:
    seeds = [0, 1, 2]
    half = (1 + 2 * torch.tensor(-4.0).exp()).reciprocal() / 2  # of the first tokens, two are rare
    assert torch.allclose(
        risky(seeds).expected_return(risky(seeds).initial_logits.softmax(-1)), half * (0.5 + 0.7**6)
    )
    assert torch.allclose(
        lock(seeds).expected_return(lock(seeds).initial_logits.softmax(-1)), torch.tensor(0.7**8)
    )
    first = graph(seeds).best_values()[:, graph(seeds).starts]
    assert (first > 0.5).all()


@pytest.mark.parametrize("name", TASKS)
def test_an_instance_does_not_depend_on_the_others(name: str) -> None:
    stacked, alone = TASKS[name]([5, 6]), TASKS[name]([6])
    for key in ("next_state", "reward", "initial_logits"):
        assert torch.equal(getattr(stacked, key)[1:], getattr(alone, key))
    assert not torch.equal(stacked.next_state[0], stacked.next_state[1])
