"""Question answering with a search engine, one token-exact row an episode."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchrl_copc.envs.chat import choose_protocol
from torchrl_copc.envs.search.protocol import PROTOCOLS, Answer, Search
from torchrl_copc.envs.search.retriever import Passage, Retriever, RetrieverError
from torchrl_copc.envs.search.reward import exact_match, search_reward
from torchrl_copc.envs.token_env import Final, Observation, TokenEnv, TokenEpisode, TurnLimits
from torchrl_copc.trajectory import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_METRICS = ("em", "reward", "searched", "num_searches", "invalid_actions", "retriever_failures")

logger = logging.getLogger(__name__)


class SearchEnv(TokenEnv):
    """The policy may search ``search_turns`` times, then must answer; the reward is a shaped exact match.

    A right answer earns 2.0 after a successful search (the retriever returned passages) and 1.1 without one.
    Only the last complete ``<answer>`` among the tokens sampled in the final turn counts. A search that fails
    becomes an observation that says so. ``episode.metrics`` holds ``em``, ``reward``, ``searched``,
    ``num_searches``, ``invalid_actions`` and ``retriever_failures``; ``episode.timings["tool"]`` the seconds
    spent searching.

    Args:
        tokenizer: a fast Hugging Face tokenizer, the policy's.
        retriever: what searches.
        protocol: ``"search_r1"``, ``"hermes"`` or ``"tiny"``.
        search_turns: turns that may search; one more may only answer.
        max_turn_tokens: ids sampled in one turn.
        max_observation_tokens: ids of one observation, its tags included.
        max_response_tokens: everything after the prompt, observations included.
        max_passage_tokens: ids of one passage; None for no limit of its own.
        top_k: passages a search returns.
        search_timeout: seconds a search may take before it counts as failed.
        passage_format: how a passage is shown, with ``{number}``, ``{title}`` and ``{text}``; None for the
            protocol's.
        prompts: tasks that ``reset`` takes in turn; :meth:`begin` needs none.

    Raises:
        ValueError: for a setting that cannot work, with its name and value.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        retriever: Retriever,
        *,
        protocol: str = "search_r1",
        search_turns: int = 4,
        max_turn_tokens: int = 500,
        max_observation_tokens: int = 500,
        max_response_tokens: int = 8192,
        max_passage_tokens: int | None = None,
        top_k: int = 3,
        search_timeout: float = 30.0,
        passage_format: str | None = None,
        prompts: Sequence[Prompt] = (),
    ) -> None:
        for name, value, least in (
            ("search_turns", search_turns, 0),
            ("top_k", top_k, 1),
            ("max_passage_tokens", max_passage_tokens, 1),
        ):
            if value is not None and value < least:
                raise ValueError(f"{name}={value}; it must be at least {least}")
        if search_timeout <= 0:
            raise ValueError(f"search_timeout={search_timeout} s; it must be above 0")
        limits = TurnLimits(search_turns + 1, max_turn_tokens, max_observation_tokens, max_response_tokens)
        chosen = choose_protocol(protocol, PROTOCOLS)
        super().__init__(tokenizer, limits, stop_tags=chosen.stop_tags(), prompts=prompts)
        self.protocol = chosen(self.codec, search_turns)
        self.retriever = retriever
        self._top_k, self._search_timeout = top_k, search_timeout
        self._max_passage_tokens = max_passage_tokens
        self._passage_format = passage_format or self.protocol.passage_format
        self._search_is_failing = False
        self._check_passage_format()
        for last_turn in (False, True):  # tags without room for text would else be found at the first search
            self.encode_observation(self.protocol.observation(["x"], last_turn=last_turn, after_eos=False))

    def render_prompt(self, prompt: Prompt) -> list[int]:
        """Instructions and question, as the protocol writes them."""
        return self.protocol.render_prompt(prompt.question)

    def initial_metrics(self) -> dict[str, float]:
        """All at zero."""
        return dict.fromkeys(_METRICS, 0.0)

    async def respond(self, episode: TokenEpisode, text: str) -> Observation | Final:
        """Search, score the answer, or say what was wrong with the turn."""
        action = self.protocol.parse(text)
        metrics = episode.metrics
        if isinstance(action, Answer):
            correct = exact_match(action.text, episode.prompt.answers)
            metrics["em"] = float(correct)
            metrics["reward"] = search_reward(correct, searched=metrics["searched"] > 0)
            return Final(metrics["reward"])
        if action is None:
            metrics["invalid_actions"] += 1
            return self._observe_chunks(episode, [self.protocol.invalid_action])
        if episode.num_turns >= self.limits.max_turns:  # the last turn may only answer
            return Final(0.0, "length")
        return self._observe_chunks(episode, await self._search(episode, action))

    def encode_chunk(self, chunk: str) -> Sequence[int]:
        """Ids of one passage, cut to ``max_passage_tokens``."""
        return super().encode_chunk(chunk)[: self._max_passage_tokens]

    async def _search(self, episode: TokenEpisode, action: Search) -> list[str]:
        episode.num_tool_calls += 1
        episode.metrics["num_searches"] += 1
        try:
            async with asyncio.timeout(self._search_timeout):
                (hits,) = await self.retriever.search([action.query], self._top_k)
        except (RetrieverError, TimeoutError) as error:
            episode.metrics["retriever_failures"] += 1
            if not self._search_is_failing:  # one line for an outage, not one for each of its searches
                logger.warning(
                    "searches fail and episodes go on without them (metric retriever_failures): %s",
                    str(error) or f"no answer within search_timeout={self._search_timeout} s",
                )
            self._search_is_failing = True
            return [self.protocol.search_failed]
        self._search_is_failing = False
        if not hits:
            return [self.protocol.no_results]
        episode.metrics["searched"] = 1.0
        return [self._show(number, hit.passage) for number, hit in enumerate(hits, start=1)]

    def _observe_chunks(self, episode: TokenEpisode, chunks: Sequence[str]) -> Observation:
        return self.protocol.observation(
            chunks,
            last_turn=episode.num_turns == self.limits.max_turns - 1,
            after_eos=episode.token_ids[-1] == self.codec.tokenizer.eos_token_id,
        )

    def _show(self, number: int, passage: Passage) -> str:
        return self._passage_format.format(number=number, title=passage.title, text=passage.text)

    def _check_passage_format(self) -> None:
        try:
            self._show(1, Passage("id", "title", "text"))
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"passage_format={self._passage_format!r} cannot be filled in ({error!r}); "
                "only {number}, {title} and {text} may stand in it"
            ) from error
