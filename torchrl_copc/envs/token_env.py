"""Append-only, token-exact multi-turn environments: what every text environment shares."""

from __future__ import annotations

import asyncio
import itertools
import time
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from torchrl_copc.envs.codec import TokenCodec
from torchrl_copc.trajectory import (
    LOG_PROBS,
    POLICY_MASK,
    POLICY_VERSION,
    TOKENS,
    Completion,
    Episode,
    Prompt,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class PrefixError(RuntimeError):
    """The ids of a running episode were rewritten; the row would no longer be what the engine saw."""


@dataclass(frozen=True)
class TurnLimits:
    """Budgets of one episode, all in tokens except ``max_turns``.

    Args:
        max_turns: completions the policy may sample.
        max_turn_tokens: ids sampled in one turn.
        max_observation_tokens: ids of one observation, its tags included.
        max_response_tokens: everything after the prompt, observations included.
    """

    max_turns: int = 5
    max_turn_tokens: int = 500
    max_observation_tokens: int = 500
    max_response_tokens: int = 8192

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"limits.{name} is {value}; it must be at least 1")


@dataclass(frozen=True)
class TurnRequest:
    """What the engine is asked to sample next.

    Args:
        token_ids: every id of the episode so far.
        max_tokens: ids it may sample.
        stop_token_ids: sampling ends after any of these.
        stop_strings: sampling may end once the decoded new ids contain one of these; an engine that cannot
            stop on text samples on, and :meth:`TokenEnv.advance` drops what comes after.
    """

    token_ids: list[int]
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]


@dataclass(frozen=True)
class Observation:
    """What the environment answers: plain text between two optional tags.

    Args:
        chunks: plain text, encoded so that nothing in it can become a control token. Under the token limit
            the text ends at a chunk boundary; only a first chunk that does not fit is cut inside.
        opening: control text before the chunks.
        closing: control text after them, always present however much is cut.
    """

    chunks: tuple[str, ...]
    opening: str = ""
    closing: str = ""


@dataclass(frozen=True)
class Final:
    """The environment's verdict that ends the episode.

    Args:
        reward: task reward of the episode.
        finish_reason: ``"stop"`` when the policy ended the task, ``"length"`` when a budget did.
    """

    reward: float
    finish_reason: str = "stop"


@dataclass
class TokenEpisode(Episode):
    """An :class:`~torchrl_copc.trajectory.Episode` with what the environment must remember between two calls.

    Args:
        prompt_length: number of prompt ids.
        seen: the ids as the environment last left them.
    """

    prompt_length: int = 0
    seen: tuple[int, ...] = ()


class TokenEnv(EnvBase):
    """Base of every text environment: a subclass renders the prompt and answers a turn, nothing else.

    The episode's ids only ever grow. A turn's ids are kept up to and including the one that completes a stop
    tag; later ids go with their log-probs. A budget that runs out ends the episode as *terminated*
    (``"length"``); :meth:`cut` is for ends that the policy did not cause (*truncated*).

    One instance serves any number of concurrent episodes through :meth:`begin`, :meth:`next_turn`,
    :meth:`advance` and :meth:`cut`. ``reset`` and ``step`` are the same calls for one episode at a time: the
    observation is the row so far (ids, policy mask, behaviour log-probs, versions), ``action`` the ids of one
    turn, ``action_log_prob`` their log-probs (without them the row holds NaN, which its admission check
    refuses).

    Args:
        tokenizer: a fast Hugging Face tokenizer, the policy's.
        limits: budgets of one episode.
        stop_tags: texts that end a turn. A tag that is an added token of the tokenizer is matched by id, any
            other on the decoded text of the sampled ids. The tokenizer's end-of-sequence token always ends a turn.
        prompts: tasks that ``reset`` takes in turn; :meth:`begin` needs none.

    Example:
        see ``examples/new_environment.py``.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        limits: TurnLimits,
        *,
        stop_tags: Sequence[str] = (),
        prompts: Sequence[Prompt] = (),
    ) -> None:
        super().__init__(device="cpu", batch_size=[])
        self.codec = TokenCodec(tokenizer)
        self.limits = limits
        single = {tag: self.codec.single_id(tag) for tag in stop_tags}
        self._eos_id = tokenizer.eos_token_id
        self._stop_ids = frozenset(i for i in (*single.values(), self._eos_id) if i is not None)
        self._stop_strings = tuple(tag for tag, token_id in single.items() if token_id is None)
        self._control_ids: dict[str, list[int]] = {"": []}
        self._prompts = tuple(prompts)
        self._prompt_order = itertools.count()
        self._runner: asyncio.Runner | None = None
        self._current: TokenEpisode | None = None
        self._make_specs(len(tokenizer))

    # What a new environment writes.

    @abstractmethod
    def render_prompt(self, prompt: Prompt) -> Sequence[int]:
        """Ids of the first prompt; build them with ``self.codec``."""

    @abstractmethod
    async def respond(self, episode: TokenEpisode, text: str) -> Observation | Final:
        """Answer one turn.

        Args:
            episode: the running episode; its ``metrics`` may be written, its ids may not.
            text: decoded ids that the policy sampled this turn, the stop tag included and end-of-sequence
                left out.
        """

    def initial_metrics(self) -> dict[str, float]:
        """Metrics a new episode starts with."""
        return {}

    def earned(self, episode: TokenEpisode, text: str) -> float:
        """Reward when a budget ends the episode after a turn that sampled ``text``."""
        return 0.0

    # What a collector calls.

    def begin(self, prompt: Prompt, row_id: str, group_id: str) -> TokenEpisode:
        """Start an episode that holds the prompt's ids."""
        episode = TokenEpisode(
            row_id, prompt, group_id, metrics=self.initial_metrics(), timings={"tool": 0.0}
        )
        self._append(episode, self.render_prompt(prompt))
        episode.prompt_length = len(episode.token_ids)
        return episode

    def next_turn(self, episode: TokenEpisode) -> TurnRequest:
        """What to sample next.

        Raises:
            PrefixError: if the episode's ids are not those the environment left.
            RuntimeError: if the episode is finished.
        """
        self._check_running_and_unchanged(episode)
        return TurnRequest(
            token_ids=list(episode.seen),
            max_tokens=min(self.limits.max_turn_tokens, self._remaining(episode)),
            stop_token_ids=tuple(sorted(self._stop_ids)),
            stop_strings=self._stop_strings,
        )

    async def advance(self, episode: TokenEpisode, completion: Completion) -> None:
        """Append one sampled turn, then append the environment's observation or finish the episode.

        A completion with ``finish_reason="abort"`` truncates the episode: no tool runs for it. If the episode
        is cut while a tool runs, the tool's answer is dropped.

        Args:
            episode: the running episode.
            completion: what the engine sampled for :meth:`next_turn`.

        Raises:
            PrefixError: if the episode's ids are not those the environment left.
            ValueError: if the completion is longer than was asked.
        """
        self._check_running_and_unchanged(episode)
        allowed = min(self.limits.max_turn_tokens, self._remaining(episode))
        if len(completion.token_ids) > allowed:
            raise ValueError(
                f"row {episode.row_id}: {len(completion.token_ids)} tokens sampled, {allowed} were allowed"
            )
        length, text, stopped = self._trim(completion.token_ids)
        episode.append_completion(completion.truncated(length))
        episode.seen = tuple(episode.token_ids)
        if completion.finish_reason == "abort":
            return self.cut(episode, "abort")
        if not stopped and completion.finish_reason == "length":
            return episode.finish(self.earned(episode, text), "length")
        started = time.perf_counter()
        outcome = await self.respond(episode, text)
        episode.timings["tool"] += time.perf_counter() - started
        if episode.done:  # cut while the tool ran
            return None
        self._check_running_and_unchanged(episode)
        if isinstance(outcome, Final):
            return episode.finish(outcome.reward, outcome.finish_reason)
        observation = self.encode_observation(outcome)
        if episode.num_turns >= self.limits.max_turns or len(observation) >= self._remaining(episode):
            return episode.finish(self.earned(episode, text), "length")
        return self._append(episode, observation)

    def cut(self, episode: TokenEpisode, reason: str) -> None:
        """End an episode for a reason the policy did not cause; the row is truncated and earns nothing."""
        episode.finish(0.0, reason, truncated=True)

    def encode_observation(self, observation: Observation) -> list[int]:
        """Ids of an observation within the token limit.

        Raises:
            ValueError: if the tags alone leave no room for text.
        """
        opening = self._control(observation.opening)
        closing = self._control(observation.closing)
        room = self.limits.max_observation_tokens - len(opening) - len(closing)
        if room < 1:
            raise ValueError(
                f"max_observation_tokens={self.limits.max_observation_tokens} leaves no room between "
                f"{observation.opening!r} and {observation.closing!r} ({len(opening) + len(closing)} tokens)"
            )
        body: list[int] = []
        for chunk in observation.chunks:
            ids = self.encode_chunk(chunk)
            if body and len(body) + len(ids) > room:
                break
            body.extend(ids[:room])
        return [*opening, *body, *closing]

    def encode_chunk(self, chunk: str) -> Sequence[int]:
        """Ids of one chunk of an observation, no control token among them."""
        return self.codec.ordinary(chunk)

    # Internals.

    def _append(self, episode: TokenEpisode, token_ids: Sequence[int]) -> None:
        episode.append_context(token_ids)
        episode.seen = tuple(episode.token_ids)

    def _control(self, text: str) -> list[int]:
        if text not in self._control_ids:
            self._control_ids[text] = self.codec.control(text)
        return self._control_ids[text]

    def _remaining(self, episode: TokenEpisode) -> int:
        return self.limits.max_response_tokens - (len(episode.token_ids) - episode.prompt_length)

    def _check_running_and_unchanged(self, episode: TokenEpisode) -> None:
        if episode.done:
            raise RuntimeError(f"row {episode.row_id} is finished ({episode.finish_reason})")
        if tuple(episode.token_ids) != episode.seen:
            pairs = zip(episode.token_ids, episode.seen, strict=False)
            shared = min(len(episode.token_ids), len(episode.seen))
            at = next((i for i, (now, then) in enumerate(pairs) if now != then), shared)
            raise PrefixError(
                f"row {episode.row_id}: the ids from position {at} on are not those the environment left "
                f"({len(episode.seen)} ids then, {len(episode.token_ids)} now); nothing else may touch them"
            )

    def _trim(self, token_ids: Sequence[int]) -> tuple[int, str, bool]:
        """Number of ids to keep, their text without end-of-sequence, and whether a stop was met."""
        keep = next((i + 1 for i, token_id in enumerate(token_ids) if token_id in self._stop_ids), 0)
        stopped = keep > 0
        ids = list(token_ids[:keep] if stopped else token_ids)
        visible = ids[:-1] if ids and ids[-1] == self._eos_id else ids
        text = self.codec.decode(visible)
        if self._has_stop_string(text):
            keep = self._first_stop(visible)
            return keep, self.codec.decode(visible[:keep]), True
        return len(ids), text, stopped

    def _has_stop_string(self, text: str) -> bool:
        return any(stop in text for stop in self._stop_strings)

    def _first_stop(self, ids: list[int]) -> int:
        """Length of the shortest prefix whose text holds a stop string."""
        if not self._has_stop_string(self.codec.decode(ids[:-1])):
            return len(ids)  # the engine stopped there itself: the usual case
        return bisect_left(
            range(len(ids)), True, key=lambda length: self._has_stop_string(self.codec.decode(ids[:length]))
        )

    # TorchRL.

    def _make_specs(self, vocab_size: int) -> None:
        ragged = (-1,)
        self.observation_spec = Composite(
            tokens=Composite(full=Unbounded(ragged, dtype=torch.int64)),
            masks=Composite(all_assistant_mask=Unbounded(ragged, dtype=torch.bool)),
            log_probs=Composite(full=Unbounded(ragged, dtype=torch.float32)),
            policy_version=Unbounded(ragged, dtype=torch.int32),
            max_tokens=Unbounded((1,), dtype=torch.int64),
        )
        self.action_spec = Categorical(vocab_size, shape=ragged, dtype=torch.int64)
        self.reward_spec = Unbounded((1,), dtype=torch.float32)
        self.done_spec = Composite(
            {
                name: Categorical(2, shape=(1,), dtype=torch.bool)
                for name in ("done", "terminated", "truncated")
            }
        )

    @property
    def episode(self) -> TokenEpisode:
        """The episode that ``reset`` started and ``step`` moves."""
        if self._current is None:
            raise RuntimeError("no episode yet; call reset first")
        return self._current

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDictBase:
        if not self._prompts:
            raise RuntimeError(f"reset needs tasks: pass prompts=[Prompt(...), ...] to {type(self).__name__}")
        number = next(self._prompt_order)
        prompt = self._prompts[number % len(self._prompts)]
        self._current = self.begin(prompt, row_id=f"reset-{number}", group_id=prompt.id)
        return TensorDict({**self._observe(), **self._flags()}, batch_size=[])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        ids = tensordict.get("action").tolist()
        log_probs = tensordict.get("action_log_prob", None)
        completion = Completion(
            token_ids=tuple(ids),
            log_probs=(float("nan"),) * len(ids) if log_probs is None else tuple(log_probs.tolist()),
            versions=(0,) * len(ids),
            finish_reason="length" if len(ids) >= self.next_turn(self.episode).max_tokens else "stop",
        )
        if self._runner is None:
            self._runner = asyncio.Runner()
        self._runner.run(self.advance(self.episode, completion))
        reward = torch.tensor([self.episode.reward], dtype=torch.float32)
        return TensorDict({**self._observe(), **self._flags(), "reward": reward}, batch_size=[])

    def _observe(self) -> dict[NestedKey, torch.Tensor]:
        episode = self.episode
        max_tokens = 0 if episode.done else self.next_turn(episode).max_tokens
        return {
            TOKENS: torch.tensor(episode.token_ids, dtype=torch.int64),
            POLICY_MASK: torch.tensor(episode.policy_mask, dtype=torch.bool),
            LOG_PROBS: torch.tensor(episode.log_probs, dtype=torch.float32),
            POLICY_VERSION: torch.tensor(episode.versions, dtype=torch.int32),
            "max_tokens": torch.tensor([max_tokens], dtype=torch.int64),
        }

    def _flags(self) -> dict[str, torch.Tensor]:
        episode = self.episode
        return {
            "terminated": torch.tensor([episode.terminated]),
            "truncated": torch.tensor([episode.truncated]),
            "done": torch.tensor([episode.done]),
        }

    def _set_seed(self, seed: int | None) -> None:
        """Start the order of tasks at ``seed``; nothing else in a text environment is random."""
        self._prompt_order = itertools.count(seed or 0)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Release the event loop that ``step`` uses."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None
        super().close(raise_if_closed=raise_if_closed)
