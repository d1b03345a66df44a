"""Sampling from all seeds at once, with random numbers that belong to the seed and not to the method."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_copc.study.models import Network, token_log_prob
from torchrl_copc.study.tasks import END, TokenTask


class Chance:
    """One generator for each seed, so that methods share their luck and stacked seeds equal separate ones.

    Args:
        seeds: one generator each.

    Examples:
        >>> Chance([3, 5]).uniform(1, 2)[1].equal(Chance([5]).uniform(1, 2)[0])
        True
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self._generators = [torch.Generator().manual_seed(1_000_003 * (seed + 1)) for seed in seeds]

    def uniform(self, *shape: int) -> Tensor:
        """``[S, *shape]`` in [0, 1)."""
        return torch.stack([torch.rand(*shape, generator=g) for g in self._generators])

    def permutation(self, size: int) -> Tensor:
        """``[S, size]``."""
        return torch.stack([torch.randperm(size, generator=g) for g in self._generators])


@torch.no_grad()
def sample(net: Network, task: TokenTask, prompt: Tensor, uniform: Tensor) -> TensorDict:
    """Responses of a policy.

    Args:
        net: writes logits.
        task: says what follows a token, and what it pays.
        prompt: ``[S, R]``, index of each response's prompt.
        uniform: ``[S, R, T + 1]`` in [0, 1): one number for each token, and one for the reward.

    Returns:
        TensorDict of batch size ``[S, R]``: ``prompt``, ``reward`` (on the last token); ``state``, ``action``,
        ``action_log_prob`` (nats) and ``mask`` (True on the tokens of the response) of ``T`` places each.
    """
    seeds, rows, places = *prompt.shape, task.max_tokens
    state, action = (torch.zeros(seeds, rows, places, dtype=torch.long) for _ in range(2))
    mask, reward = torch.zeros(seeds, rows, places, dtype=torch.bool), torch.zeros(seeds, rows)
    decode = net.decoder(prompt)
    here, running = task.starts[prompt], torch.ones(seeds, rows, dtype=torch.bool)
    token: Tensor | None = None
    for place in range(places):
        cumulative = decode(here, token).softmax(-1).cumsum(-1)
        token = (uniform[..., place, None] > cumulative[..., :-1]).sum(-1)
        state[..., place], action[..., place], mask[..., place] = here, token, running
        index = here * task.next_state.shape[-1] + token
        after = task.next_state.flatten(1).gather(1, index)
        ends = running & (after == END)
        reward = torch.where(ends, task.reward.flatten(1).gather(1, index), reward)
        running = running & ~ends
        here = after.clamp(min=0)
        if not bool(running.any()):
            break
    if task.bernoulli:
        reward = (uniform[..., -1] < reward).float()
    # One pass for all places, as the learner makes it: at lag 0 the ratio is then exactly 1.
    log_prob = token_log_prob(net(prompt, state, action), action)
    rows_of = {"prompt": prompt, "state": state, "action": action, "action_log_prob": log_prob}
    return TensorDict(rows_of | {"mask": mask, "reward": reward}, batch_size=[seeds, rows])
