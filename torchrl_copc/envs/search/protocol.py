"""How policy and search engine talk: prompt text, actions and observations of each protocol."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_copc.envs.chat import QUESTION, UserTurn, prompt_frame
from torchrl_copc.envs.codec import TokenCodec
from torchrl_copc.envs.search.reward import extract_answer
from torchrl_copc.envs.token_env import Observation

#: What ``protocol="tiny"`` needs as one token each, in the order of the tiny tokenizer's ids.
TINY_TAGS = (
    "<user>",
    "<assistant>",
    "<search>",
    "</search>",
    "<information>",
    "</information>",
    "<answer>",
    "</answer>",
)


@dataclass(frozen=True)
class Search:
    """The policy asked the search engine."""

    query: str


@dataclass(frozen=True)
class Answer:
    """The policy answered the question."""

    text: str


class SearchProtocol(ABC):
    """One way to write searches, observations and answers. Answers always stand in ``<answer> </answer>``.

    Args:
        codec: of the policy's tokenizer.
        search_turns: turns that may search, as told to the policy.
    """

    search_tag: str
    passage_format = "[{number}] {title}\n{text}\n"
    no_results = "No results.\n"
    search_failed = "The search failed. Try again, or answer without it.\n"
    invalid_action: str
    last_turn = "No searches are left: answer now.\n"

    def __init__(self, codec: TokenCodec, search_turns: int) -> None:
        self.codec = codec
        self._prefix, self._suffix = self._prompt_frame(search_turns)

    @classmethod
    def stop_tags(cls) -> tuple[str, ...]:
        """Tags that end a turn."""
        return (f"</{cls.search_tag}>", "</answer>")

    def render_prompt(self, question: str) -> list[int]:
        """Ids of the first prompt; the question is plain text whatever it spells."""
        return [*self._prefix, *self.codec.ordinary(self.question_text(question)), *self._suffix]

    def question_text(self, question: str) -> str:
        """The question as it follows the prompt's constant text (here after a colon, so with a space)."""
        return f" {question.strip()}"

    def parse(self, text: str) -> Search | Answer | None:
        """The action of one turn, or ``None`` for an invalid one. An answer ends the episode whatever else is
        there."""
        answer = extract_answer(text)
        if answer is not None:
            return Answer(answer)
        content = extract_answer(text, f"<{self.search_tag}>", f"</{self.search_tag}>")
        query = None if content is None else self.parse_query(content)
        return None if query is None else Search(query)

    def parse_query(self, content: str) -> str | None:
        """The query inside the search tag, or ``None`` if it is malformed."""
        return content

    @abstractmethod
    def observation(self, chunks: Sequence[str], *, last_turn: bool, after_eos: bool) -> Observation:
        """Wrap what the environment says.

        Args:
            chunks: passages or a message.
            last_turn: whether the next turn is the one that must answer.
            after_eos: whether the policy ended its turn with the end-of-sequence token.
        """

    @abstractmethod
    def _prompt_frame(self, search_turns: int) -> tuple[list[int], list[int]]:
        """Ids before and after the question."""


class SearchR1Protocol(SearchProtocol):
    """``<search> query </search>`` and ``<information>`` inside one assistant turn, as in Search-R1.

    Source: https://arxiv.org/abs/2503.09516. The prompt text is our own; it goes through the tokenizer's chat
    template where there is one.
    """

    search_tag = "search"
    invalid_action = (
        "That was neither a search nor an answer. Write <search> query </search> to search, or "
        "<answer> answer </answer> to answer.\n"
    )

    def observation(self, chunks: Sequence[str], *, last_turn: bool, after_eos: bool) -> Observation:
        """The chunks between information tags, in the middle of the assistant's turn."""
        notice = self.last_turn if last_turn else ""
        return Observation(tuple(chunks), "\n\n<information>\n", f"</information>\n\n{notice}")

    def _prompt_frame(self, search_turns: int) -> tuple[list[int], list[int]]:
        text = (
            "Answer the question at the end. Think between <think> and </think> before every step. "
            "To look something up, write <search> query </search>; what is found comes back between "
            f"<information> and </information>. You may search up to {search_turns} times. Once you know the "
            "answer, write it and nothing else between <answer> and </answer>, for instance "
            "<answer> Mount Logan </answer>.\n\n"
            f"Question:{QUESTION}\n"
        )
        return prompt_frame(self.codec, text)


class TinyProtocol(SearchProtocol):
    """Search-R1's tags with nothing around them, for a small model whose tags are single tokens.

    The prompt is ``<user>question<assistant>``; passages follow one another without numbers.
    """

    search_tag = "search"
    passage_format = " {title}: {text}"
    no_results = " none"
    search_failed = " failed"
    invalid_action = " invalid"

    def question_text(self, question: str) -> str:
        """The question itself: the tag before it needs no space."""
        return question.strip()

    def observation(self, chunks: Sequence[str], *, last_turn: bool, after_eos: bool) -> Observation:
        """The chunks between information tags."""
        return Observation(tuple(chunks), "<information>", "</information>")

    def _prompt_frame(self, search_turns: int) -> tuple[list[int], list[int]]:
        missing = [tag for tag in TINY_TAGS if self.codec.single_id(tag) is None]
        if missing:
            raise ValueError(
                f"protocol='tiny' needs a tokenizer in which every tag is one token; this splits {missing}. "
                "Use the tiny model's tokenizer, or protocol='search_r1'"
            )
        return self.codec.control("<user>"), self.codec.control("<assistant>")


class HermesProtocol(SearchProtocol):
    """Tool calls as JSON in ``<tool_call>``, results in ``<tool_response>`` of a user turn: Qwen3-style
    models.

    Source: https://github.com/NousResearch/Hermes-Function-Calling. Needs a chat template; one that knows
    ``tools`` describes the tool itself, otherwise the prompt does.
    """

    search_tag = "tool_call"
    invalid_action = (
        'That was neither a valid tool call nor an answer. Write <tool_call>{"name": "search", "arguments": '
        '{"query": "..."}}</tool_call> to search, or <answer> answer </answer> to answer.\n'
    )

    tool: Mapping[str, Any] = {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search a collection of text passages.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string", "description": "What to look for."}},
                "required": ["query"],
            },
        },
    }

    def __init__(self, codec: TokenCodec, search_turns: int) -> None:
        super().__init__(codec, search_turns)
        self._user_turn = UserTurn(codec.tokenizer)

    def parse_query(self, content: str) -> str | None:
        """``arguments.query`` of a call to ``search``; ``None`` unless the JSON is exactly of that form."""
        try:
            call = json.loads(content)
            query = call["arguments"]["query"] if call["name"] == "search" else None
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        if not isinstance(query, str):
            return None
        return query.encode("utf-8", "replace").decode("utf-8")  # JSON may spell half a surrogate pair

    def observation(self, chunks: Sequence[str], *, last_turn: bool, after_eos: bool) -> Observation:
        """The chunks as a user turn; the assistant's turn is closed first unless the policy did so itself."""
        notice = f"\n{self.last_turn}" if last_turn else ""
        return Observation(
            tuple(chunks),
            f"{self._user_turn.before(after_eos=after_eos)}<tool_response>\n",
            f"</tool_response>{notice}{self._user_turn.after}",
        )

    def _prompt_frame(self, search_turns: int) -> tuple[list[int], list[int]]:
        tokenizer = self.codec.tokenizer
        if tokenizer.chat_template is None:
            raise ValueError(
                "protocol='hermes' needs a tokenizer with a chat template; "
                "use protocol='search_r1' for a base model"
            )
        knows_tools = "tools" in str(tokenizer.chat_template)
        described = (
            "You have one tool:\n"
            f"{json.dumps(self.tool)}\n"
            'Call it with <tool_call>{"name": "search", "arguments": {"query": "..."}}</tool_call>; '
            "what it finds comes back between <tool_response> and </tool_response>. "
        )
        text = (
            f"Answer the question at the end. {'' if knows_tools else described}"
            f"You may call the search tool up to {search_turns} times, one call a turn. Once you know the "
            "answer, write it and nothing else between <answer> and </answer>, for instance "
            "<answer> Mount Logan </answer>.\n\n"
            f"Question:{QUESTION}\n"
        )
        tools = [dict(self.tool)] if knows_tools else None
        return prompt_frame(self.codec, text, tools)


PROTOCOLS: Mapping[str, type[SearchProtocol]] = {
    "search_r1": SearchR1Protocol,
    "hermes": HermesProtocol,
    "tiny": TinyProtocol,
}
