"""Random prefix-tree MDPs whose responses can all be enumerated, so that expectations are finite sums in float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torchrl_copc.value.functional import clipped_ratio, copc_advantage_estimate

EPS_LOW, EPS_HIGH = 0.4, 0.56


@dataclass(frozen=True)
class PrefixTrees:
    """M token MDPs on one tree: a state is a prefix, token 0 ends the response, as does the length limit.

    All M share the tree and the list of N responses (each with both outcomes of a coin that is added to the last
    reward), and differ in policies and rewards. Everything is float64.

    Args:
        next_state: state after each token, ``[S, K]``; -1 where the response ends.
        state, action: states visited and tokens sampled by each response, ``[N, T]``; 0 on padding.
        mask: True on the tokens of each response, ``[N, T]``.
        coin: outcome of the coin of each response, +1 or -1, ``[N]``.
        behaviour_log_prob, learner_log_prob: ``log mu`` and ``log pi``, nats, ``[M, S, K]``.
        reward: mean reward of each token in each state, ``[M, S, K]``.
        coin_size: size of the coin's reward, ``[M, S, K]``; read at the last token only.
    """

    next_state: Tensor
    state: Tensor
    action: Tensor
    mask: Tensor
    coin: Tensor
    behaviour_log_prob: Tensor
    learner_log_prob: Tensor
    reward: Tensor
    coin_size: Tensor

    @cached_property
    def done(self) -> Tensor:
        """True on the last token of each response and on the padding behind it, ``[N, T]``."""
        following = torch.cat((self.mask[:, 1:], torch.zeros_like(self.mask[:, :1])), 1)
        return ~following

    @cached_property
    def length(self) -> Tensor:
        """Tokens of each response, ``[N]``."""
        return self.mask.sum(1)

    @cached_property
    def probability(self) -> Tensor:
        """Probability of each response under the behaviour policy, coin included, ``[M, N]``."""
        return self.at(self.behaviour_log_prob).sum(-1).exp() / 2

    @cached_property
    def log_ratio(self) -> Tensor:
        """``log pi - log mu`` of each token, nats, ``[M, N, T]``."""
        return self.at(self.learner_log_prob - self.behaviour_log_prob)

    @cached_property
    def token_reward(self) -> Tensor:
        """Reward of each token, coin included, ``[M, N, T]``."""
        last = self.done & self.mask
        return self.at(self.reward) + torch.where(last, self.coin[:, None] * self.at(self.coin_size), 0.0)

    def at(self, table: Tensor) -> Tensor:
        """Read a table ``[M, S, K, ...]`` at each token: ``[M, N, T, ...]``, 0 on padding."""
        return self._blank(table[:, self.state, self.action])

    def at_state(self, table: Tensor) -> Tensor:
        """Read a table ``[M, S]`` at the state of each token: ``[M, N, T]``, 0 on padding."""
        return self._blank(table[:, self.state])

    def _blank(self, values: Tensor) -> Tensor:
        return torch.where(self.mask.view(*self.mask.shape, *[1] * (values.ndim - 3)), values, 0.0)

    def expectation(self, values: Tensor) -> Tensor:
        """``E_mu`` of a quantity of the response, ``[M, N, ...] -> [M, ...]``."""
        return torch.einsum("mn,mn...->m...", self.probability, values)

    def given_state(self, values: Tensor) -> Tensor:
        """``E_mu[values_t | s_t]``, ``[M, N, T] -> [M, S]``."""
        return self._conditional(values, self.state, self.next_state.shape[0])

    def given_action(self, values: Tensor) -> Tensor:
        """``E_mu[values_t | s_t, a_t]``, ``[M, N, T] -> [M, S, K]``."""
        states, vocab = self.next_state.shape
        flat = self._conditional(values, self.state * vocab + self.action, states * vocab)
        return flat.unflatten(1, (states, vocab))

    def _conditional(self, values: Tensor, index: Tensor, size: int) -> Tensor:
        weight = self.probability[..., None] * self.mask
        empty = weight.new_zeros(len(weight), size)
        total = empty.index_add(1, index.flatten(), (weight * values).flatten(1))
        return total / empty.index_add(1, index.flatten(), weight.flatten(1))

    def policy_value(self, policy: Tensor, gamma: float = 1.0) -> tuple[Tensor, Tensor]:
        """Values by backward induction, which is how everything else here is *not* computed.

        Args:
            policy: probability of each token, ``[M, S, K]``.
            gamma: discount per token.

        Returns:
            ``(V, Q)``: ``[M, S]`` and ``[M, S, K]``.
        """
        value = self.reward.new_zeros(self.reward.shape[:2])
        action_value = torch.zeros_like(self.reward)
        for state in reversed(range(value.shape[1])):  # a prefix comes before its extensions
            following = self.next_state[state]
            future = torch.where(following < 0, 0.0, value[:, following.clamp(min=0)])
            action_value[:, state] = self.reward[:, state] + gamma * future
            value[:, state] = (policy[:, state] * action_value[:, state]).sum(-1)
        return value, action_value


def random_trees(
    count: int, *, vocab: int = 3, max_length: int = 5, gap: float = 0.5, coin: float = 0.5, seed: int = 0
) -> PrefixTrees:
    """Draw MDPs with normal logits and rewards.

    Args:
        count: number of MDPs.
        vocab: tokens, the first of which ends the response.
        max_length: length limit of a response, tokens.
        gap: standard deviation of the difference between learner and behaviour logits.
        coin: scale of the coin added to the last reward; sizes lie between ``coin`` and twice that.
        seed: of the draws.

    Examples:
        >>> trees = random_trees(2, max_length=3)
        >>> trees.state.shape, trees.probability.sum(1)
        (torch.Size([30, 3]), tensor([1.0000, 1.0000], dtype=torch.float64))
    """
    prefixes = [p for n in range(max_length) for p in itertools.product(range(1, vocab), repeat=n)]
    index = {prefix: i for i, prefix in enumerate(prefixes)}
    next_state = torch.tensor([[index.get((*p, a), -1) if a else -1 for a in range(vocab)] for p in prefixes])
    responses = [
        (*p, a) for p in prefixes for a in range(vocab) if next_state[index[p], a] < 0
    ]  # a response is its last prefix and the token that ended it
    padding = [[0] * (max_length - len(r)) for r in responses]
    action = torch.tensor([[*r, *pad] for r, pad in zip(responses, padding, strict=True)])
    state = torch.tensor(
        [[*(index[r[:t]] for t in range(len(r))), *pad] for r, pad in zip(responses, padding, strict=True)]
    )
    lengths = torch.tensor([len(r) for r in responses])
    mask = torch.arange(max_length) < lengths[:, None]

    generator = torch.Generator().manual_seed(seed)
    shape = (count, *next_state.shape)

    def normal() -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    logits = normal()
    learner_logits = logits + gap * normal()
    reward = 0.3 * normal() + torch.where(next_state < 0, normal(), 0.0)
    coin_size = coin * (1 + torch.rand(shape, generator=generator, dtype=torch.float64))
    ones = torch.ones(len(responses), dtype=torch.float64)
    return PrefixTrees(
        next_state=next_state,
        state=state.repeat(2, 1),
        action=action.repeat(2, 1),
        mask=mask.repeat(2, 1),
        coin=torch.cat((ones, -ones)),
        behaviour_log_prob=logits.log_softmax(-1),
        learner_log_prob=learner_logits.log_softmax(-1),
        reward=reward,
        coin_size=coin_size,
    )


def tilted_policy(trees: PrefixTrees, eta: float) -> tuple[Tensor, Tensor]:
    """The policy whose value COPC's critic target has as its fixed point: ``pi~ = mu * c / cbar``.

    Args:
        trees: the MDPs.
        eta: width of the interval on the advantage side; infinity leaves the ratios exact.

    Returns:
        ``(pi~, cbar)``: ``[M, S, K]``, and ``cbar(s) = E_mu[c | s]``, ``[M, S]``.

    Examples:
        >>> trees = random_trees(1)
        >>> policy, cbar = tilted_policy(trees, eta=float("inf"))
        >>> torch.allclose(policy, trees.learner_log_prob.exp()), torch.allclose(cbar, torch.ones(()).double())
        (True, True)
    """
    ratio = clipped_ratio(
        trees.learner_log_prob - trees.behaviour_log_prob, eta=eta, eps_low=EPS_LOW, eps_high=EPS_HIGH
    )
    weighted = trees.behaviour_log_prob.exp() * ratio
    cbar = weighted.sum(-1)
    return weighted / cbar[..., None], cbar


def advantage_estimate(
    trees: PrefixTrees, value: Tensor, *, gamma: float = 1.0, lmbda: float = 1.0, **form: Any
) -> tuple[Tensor, Tensor]:
    """The library's own :func:`~torchrl_copc.value.copc_advantage_estimate` on every response.

    Args:
        trees: the MDPs.
        value: the critic, ``[M, S]``.
        gamma: discount per token.
        lmbda: trace decay.
        form: ``eta``, ``trace``, ``advantage`` of the estimate.

    Returns:
        ``(advantage, value_target)``, each ``[M, N, T]``, meaningless on padding.
    """
    state_value = trees.at_state(value)
    return copc_advantage_estimate(
        gamma,
        lmbda,
        trees.log_ratio,
        state_value,
        torch.cat((state_value[..., 1:], torch.zeros_like(state_value[..., :1])), -1),
        trees.token_reward,
        trees.done.expand_as(state_value),
        eps_low=EPS_LOW,
        eps_high=EPS_HIGH,
        time_dim=-1,
        **form,
    )
