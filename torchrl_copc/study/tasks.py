"""Small token tasks whose expected return is exact: a state is where a response stands, a token moves it on or ends it.

Every run (a *seed* of the study) has its own instance of a task; the instances of a study are stacked along a leading
dimension ``S``, and all of them are sampled and scored at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

END = -1
MOST_RESPONSES = 1000


@dataclass(frozen=True)
class TokenTask:
    """``S`` instances of a task with ``N`` states, ``K`` tokens and ``C`` prompts.

    Args:
        next_state: ``[S, N, K]``, the state after a token, :data:`END` where the response ends with it.
        reward: ``[S, N, K]``, expected reward of a token that ends a response; 0 elsewhere.
        initial_logits: ``[S, N, K]``, of the policy that training starts from.
        starts: ``[C]``, the first state of each prompt.
        max_tokens: length of the longest response.
        bernoulli: whether the reward is drawn, 1 with probability ``reward``, else 0.

    Examples:
        >>> task = lock([0, 1], prompts=2, length=3)
        >>> task.expected_return(task.initial_logits.softmax(-1))
        tensor([0.3430, 0.3430])
    """

    next_state: Tensor
    reward: Tensor
    initial_logits: Tensor
    starts: Tensor
    max_tokens: int
    bernoulli: bool = False

    def expected_return(self, probabilities: Tensor) -> Tensor:
        """Exact expected reward of policies of the state, over prompts.

        Args:
            probabilities: ``[S, N, K]``.

        Returns:
            ``[S]``, reward units.
        """
        return self.state_values(probabilities)[:, self.starts].mean(-1)

    def state_values(self, probabilities: Tensor) -> Tensor:
        """Exact expected reward of a response that stands in each state, ``[S, N]``."""
        return self._backward(lambda value: (probabilities * value).sum(-1))

    def best_values(self) -> Tensor:
        """Largest expected reward within reach of each state, ``[S, N]``."""
        return self._backward(lambda value: value.amax(-1))

    def _backward(self, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        instances, states, _ = self.next_state.shape
        ends = self.next_state == END
        following = self.next_state.clamp(min=0).flatten(1)
        value = self.reward.new_zeros(instances, states)
        for _ in range(self.max_tokens):  # no response is longer, so this many steps are exact
            after = value.gather(1, following).view_as(self.reward)
            value = reduce(torch.where(ends, self.reward, after))
        return value

    @cached_property
    def rewarded_responses(self) -> RewardedResponses:
        """All responses with a reward above 0: enough for the exact expected return of any policy of the tokens.

        Raises:
            ValueError: if there are more than :data:`MOST_RESPONSES`, or not equally many in every instance.
        """
        best = self.best_values().tolist()
        next_state, reward = self.next_state.tolist(), self.reward.tolist()
        found: list[list[tuple[int, list[int], list[int], float]]] = []
        for instance in range(len(next_state)):
            responses: list[tuple[int, list[int], list[int], float]] = []
            stack: list[tuple[int, int, list[int], list[int]]] = [
                (prompt, start, [], []) for prompt, start in enumerate(self.starts.tolist())
            ]
            while stack:
                prompt, state, passed, taken = stack.pop()
                for token, after in enumerate(next_state[instance][state]):
                    path, tokens = [*passed, state], [*taken, token]
                    if after == END and reward[instance][state][token] > 0:
                        responses.append((prompt, path, tokens, reward[instance][state][token]))
                    elif after != END and best[instance][after] > 0:
                        stack.append((prompt, after, path, tokens))
                if len(responses) > MOST_RESPONSES:
                    raise ValueError(
                        f"more than {MOST_RESPONSES} responses are rewarded: only policies of the state can be scored"
                    )
            found.append(responses)
        if len({len(responses) for responses in found}) != 1:
            raise ValueError("instances with different numbers of rewarded responses cannot be stacked")
        shape = len(found), len(found[0])
        states, actions = (torch.zeros(*shape, self.max_tokens, dtype=torch.long) for _ in range(2))
        mask = torch.zeros(*shape, self.max_tokens, dtype=torch.bool)
        prompts, gains = torch.zeros(shape, dtype=torch.long), torch.zeros(shape)
        for i, responses in enumerate(found):
            for j, (prompt, path, tokens, gain) in enumerate(responses):
                length = len(tokens)
                prompts[i, j], gains[i, j], mask[i, j, :length] = prompt, gain, True
                states[i, j, :length], actions[i, j, :length] = torch.tensor(path), torch.tensor(tokens)
        return RewardedResponses(prompts, states, actions, mask, gains)


@dataclass(frozen=True)
class RewardedResponses:
    """``R`` responses: ``prompt`` and ``reward`` are ``[S, R]``, ``state``, ``action`` and ``mask`` ``[S, R, T]``."""

    prompt: Tensor
    state: Tensor
    action: Tensor
    mask: Tensor
    reward: Tensor


def risky(
    seeds: Sequence[int], *, prompts: int = 8, length: int = 6, tokens: int = 4, skill: float = 0.7
) -> TokenTask:
    """Token 0 ends the response with a safe reward of .5; token 1 starts a chain that pays 1 if every token is right.

    The first policy takes either with about the same probability, and each right token of the chain (drawn for each
    prompt and place) with probability ``skill``. Whether to take the chain thus depends on what the policy learns
    later. The other first tokens are rare and pay nothing.

    Args:
        seeds: one instance each.
        prompts: prompts per instance, with different chains.
        length: tokens of the chain.
        tokens: size of the vocabulary.
        skill: first probability of a right token.

    Examples:
        >>> task = risky([0])
        >>> task.max_tokens, float(task.best_values()[:, task.starts].mean())
        (7, 1.0)
    """
    chains = lock(seeds, prompts=prompts, length=length, tokens=tokens, skill=skill)
    first = chains.starts.numel()
    shape = chains.next_state.shape
    after = torch.where(chains.next_state == END, END, chains.next_state + first)
    begin = torch.full((shape[0], first, tokens), END)
    begin[:, :, 1] = chains.starts + first
    safe = torch.zeros(shape[0], first, tokens)
    safe[:, :, 0] = 0.5
    logits = torch.full((shape[0], first, tokens), -4.0)
    logits[:, :, :2] = math.log(0.5)
    return TokenTask(
        torch.cat((begin, after), 1),
        torch.cat((safe, chains.reward), 1),
        torch.cat((logits, chains.initial_logits), 1),
        torch.arange(first),
        length + 1,
    )


def lock(
    seeds: Sequence[int], *, prompts: int = 8, length: int = 8, tokens: int = 4, skill: float = 0.7
) -> TokenTask:
    """A response of ``length`` tokens pays 1 if every token is right, else 0.

    The right token of each prompt and place is drawn; after a wrong one the response goes on without a chance. The
    first policy takes each right token with probability ``skill``.

    Args:
        seeds: one instance each.
        prompts: prompts per instance, with different chains.
        length: tokens of a response.
        tokens: size of the vocabulary.
        skill: first probability of a right token.

    Examples:
        >>> lock([0, 1]).next_state.shape  # 8 prompts, 8 places, on or off the chain
        torch.Size([2, 128, 4])
    """
    right = torch.stack(
        [torch.randint(tokens, (prompts, length), generator=torch.Generator().manual_seed(s)) for s in seeds]
    )
    hit = torch.nn.functional.one_hot(right, tokens).bool()  # [S, prompts, length, K]
    prompt, place = torch.arange(prompts)[:, None], torch.arange(length)
    on = prompt * length + place  # [prompts, length]
    off = on + prompts * length
    last = (place == length - 1)[None, :, None]
    after_on = torch.where(hit, on[..., None] + 1, off[..., None] + 1).masked_fill(last, END)
    after_off = (off[..., None] + 1).expand(prompts, length, tokens).masked_fill(last, END).expand_as(hit)
    reward = (hit & last).float()
    wrong = math.log((1 - skill) / (tokens - 1))
    logits = torch.where(hit, math.log(skill), wrong)
    return TokenTask(
        torch.cat((after_on, after_off), 1).flatten(1, 2),
        torch.cat((reward, torch.zeros_like(reward)), 1).flatten(1, 2),
        torch.cat((logits, torch.zeros_like(logits)), 1).flatten(1, 2),
        on[:, 0],
        length,
    )


def graph(
    seeds: Sequence[int], *, prompts: int = 8, length: int = 12, width: int = 12, tokens: int = 4
) -> TokenTask:
    """A random graph in layers: every token leads to a random state of the next layer.

    The last token is rewarded with 1, with a probability drawn from Beta(.4, 1.2): mostly small, sometimes large. The
    first policy has normal logits with standard deviation .3.

    Args:
        seeds: one instance each.
        prompts: first states.
        length: tokens of a response.
        width: states of each later layer.
        tokens: size of the vocabulary.

    Examples:
        >>> graph([0]).next_state.shape  # 8 first states and 11 layers of 12
        torch.Size([1, 140, 4])
    """
    states = prompts + (length - 1) * width
    layer = torch.cat(
        (torch.zeros(prompts, dtype=torch.long), 1 + torch.arange((length - 1) * width) // width)
    )
    last = (layer == length - 1)[:, None]
    parts = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        step = torch.randint(width, (states, tokens), generator=generator)
        logits = 0.3 * torch.randn(states, tokens, generator=generator)
        chance = _beta(0.4, 1.2, (states, tokens), generator)
        after = torch.where(last, END, prompts + layer[:, None] * width + step)
        parts.append((after, torch.where(last, chance, 0.0), logits))
    next_state, reward, logits = (torch.stack(part) for part in zip(*parts, strict=True))
    return TokenTask(next_state, reward, logits, torch.arange(prompts), length, bernoulli=True)


def _beta(a: float, b: float, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    gamma = [torch._standard_gamma(torch.full(shape, x), generator=generator) for x in (a, b)]
    return gamma[0] / (gamma[0] + gamma[1])


TASKS: dict[str, Callable[[Sequence[int]], TokenTask]] = {"risky": risky, "lock": lock, "graph": graph}
