"""What the supervised traces of every task share: rows, scripted turns, and the interface of a curriculum."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torchrl_copc.envs.token_env import TokenEnv, TokenEpisode
from torchrl_copc.trajectory import Completion, Episode, Prompt


@dataclass(frozen=True)
class SFTRow:
    """One training sequence; ``learn`` marks the tokens whose prediction is trained."""

    token_ids: list[int]
    learn: list[bool]


class Phase(Protocol):
    """Length of a phase."""

    steps: int


class TraceWriter(Protocol):
    """Plays the scripted episodes of one phase."""

    @property
    def config(self) -> Phase:
        """The phase."""

    async def batch(self) -> list[SFTRow]:
        """The rows of one training step."""


class Curriculum(Protocol):
    """What a task teaches a model that starts from random weights.

    Args:
        prompts: training prompts of the task.
        env: settings of the task's environment.
    """

    tags: Sequence[str]  # one token each, in the order of their ids
    packages: Sequence[str]  # whose versions matter to the result

    def __init__(self, prompts: Sequence[Prompt], env: Mapping[str, Any]) -> None: ...

    def tokenizer_texts(self) -> Iterator[str]:
        """What the tokenizer's merges are learned from."""

    def writer(self, env: Any, phase: Mapping[str, Any], rng: random.Random) -> TraceWriter:
        """What writes the traces of a phase, from the phase's settings."""

    def good_turn(self, prompt: Prompt) -> str:
        """The first turn of a policy that knows how to use its tool."""


async def play(env: TokenEnv, episode: TokenEpisode, text: str) -> None:
    """One scripted turn of the policy."""
    ids = tuple(env.codec.control(text))
    await env.advance(episode, Completion(ids, (0.0,) * len(ids), (0,) * len(ids), "stop"))


def trace(episode: Episode) -> SFTRow:
    """What a scripted episode teaches: the policy's tokens."""
    return SFTRow(list(episode.token_ids), list(episode.policy_mask))


def unfinished_trace(env: TokenEnv, episode: Episode, text: str) -> SFTRow:
    """A scripted episode that ends with the policy's turn ``text``; nothing answers it."""
    ids = env.codec.control(text)
    context = len(episode.token_ids)
    return SFTRow([*episode.token_ids, *ids], [False] * context + [True] * len(ids))
