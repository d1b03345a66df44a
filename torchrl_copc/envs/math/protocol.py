r"""How policy and Python interpreter talk: prompt text, actions and observations of each protocol.

In all of them the final answer stands in ``\boxed{}``, in a turn that runs no code and that the policy ends itself.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchrl_copc.envs.chat import QUESTION, UserTurn, prompt_frame
from torchrl_copc.envs.codec import TokenCodec
from torchrl_copc.envs.token_env import Observation

#: What ``protocol="tiny"`` needs as one token each, in the order of the tiny tokenizer's ids.
TINY_TAGS = ("<user>", "<assistant>", "<code>", "</code>", "<output>", "</output>")


@dataclass(frozen=True)
class Code:
    """The policy runs code."""

    source: str


@dataclass(frozen=True)
class Answer:
    """The policy ended its response; the verifier looks for the answer in all of it."""

    text: str


@dataclass(frozen=True)
class CodeRules:
    """What the policy is told about running code.

    Args:
        turns: turns that may run code.
        seconds: a call may take.
        characters: of an output that are shown.
        packages: that can be imported besides the standard library.
    """

    turns: int
    seconds: float
    characters: int
    packages: tuple[str, ...]

    def __str__(self) -> str:
        packages = f" {' and '.join(self.packages)} can be imported." if self.packages else ""
        return (
            f"You may run code up to {self.turns} times. Every run starts anew, may take {self.seconds:g} seconds, "
            "and prints the value of its last line if that is an expression. Of an output longer than "
            f"{self.characters} characters you see beginning and end.{packages}"
        )


class MathProtocol(ABC):
    """One way to write code, outputs and the end of a response.

    Args:
        codec: of the policy's tokenizer.
        rules: as told to the policy.
    """

    stop_tags: tuple[str, ...]
    invalid_action: str
    no_output = "(no output)"
    last_turn = "No runs are left: give the final answer now.\n"

    def __init__(self, codec: TokenCodec, rules: CodeRules) -> None:
        self.codec = codec
        self._prefix, self._suffix = self._prompt_frame(rules)

    def render_prompt(self, problem: str) -> list[int]:
        """Ids of the first prompt; the problem is plain text whatever it spells."""
        return [*self._prefix, *self.codec.ordinary(self.problem_text(problem)), *self._suffix]

    def problem_text(self, problem: str) -> str:
        """The problem as it follows the prompt's constant text (here after a colon, so with a space)."""
        return f" {problem.strip()}"

    @abstractmethod
    def parse(self, text: str) -> Code | Answer | None:
        """The action of one turn, or ``None`` for code that is not marked as the protocol wants it."""

    @abstractmethod
    def observation(self, text: str, *, last_turn: bool, after_eos: bool) -> Observation:
        """Wrap what the environment says.

        Args:
            text: an output or a message.
            last_turn: whether the next turn is the one that must answer.
            after_eos: whether the policy ended its turn with the end-of-sequence token.
        """

    @abstractmethod
    def _prompt_frame(self, rules: CodeRules) -> tuple[list[int], list[int]]:
        """Ids before and after the problem."""


class PythonBlockProtocol(MathProtocol):
    r"""A fenced python block in the middle of the assistant's turn; its output follows in a fenced block, too.

    A fence is a line of its own. The stop string is a bare fence with both its line ends, so that the line
    that opens a python block is none; a bare fence that opens a block ends the turn as well, and is answered. After
    end-of-sequence a chat model reads the output in a new user turn.
    """

    stop_tags = ("\n```\n",)
    invalid_action = (
        "No code was run. Code stands between a line ```python and a line ```, and nothing else does.\n"
    )
    _opening = re.compile(r"^```(?i:python|py)[ \t]*(?:\r?\n|\Z)", re.MULTILINE)
    _closing = re.compile(r"^```[ \t]*\r?$", re.MULTILINE)
    # Near enough to be told how code is marked: ~~~python, ``` python, ```python3, an indented fence, code beside it.
    _attempt = re.compile(r"^[ \t]*+(?:`{3}|~{3})[ \t]*+(?i:py(?:thon)?)(?![A-Za-z])", re.MULTILINE)

    def __init__(self, codec: TokenCodec, rules: CodeRules) -> None:
        super().__init__(codec, rules)
        self._user_turn = None if codec.tokenizer.chat_template is None else UserTurn(codec.tokenizer)

    def parse(self, text: str) -> Code | Answer | None:
        """The first complete python block; an unclosed one or another block at the end is no action."""
        # In two searches, so that a response of nothing but opening lines takes no more than linear time.
        if opening := self._opening.search(text):
            closing = self._closing.search(text, opening.end())
            return None if closing is None else Code(text[opening.end() : closing.start()])
        if self.stop_tags[0] in text or self._attempt.search(text):
            return None
        return Answer(text)

    def observation(self, text: str, *, last_turn: bool, after_eos: bool) -> Observation:
        """The text in an output block."""
        before, after = ("\n" if after_eos else ""), ""
        if after_eos and self._user_turn is not None:
            before, after = self._user_turn.before(after_eos=True), self._user_turn.after
        notice = self.last_turn if last_turn else ""
        return Observation((text,), f"{before}```output\n", f"\n```\n{notice}{after}")

    def _prompt_frame(self, rules: CodeRules) -> tuple[list[int], list[int]]:
        return prompt_frame(
            self.codec,
            "Solve the problem at the end step by step. You can run Python: write the code between a line ```python "
            "and a line ```, then wait for its output, which comes back in an ```output block. "
            f"{rules} Put the final answer in \\boxed{{}}, for instance \\boxed{{42}}, and stop.\n\n"
            f"Problem:{QUESTION}\n",
        )


class TaggedProtocol(MathProtocol):
    """Code between two tags, the closing one of which ends the turn."""

    opening: str
    closing: str

    def parse(self, text: str) -> Code | Answer | None:
        """The code before the first closing tag; a tag without the other is no action."""
        before, closed, _ = text.partition(self.closing)
        _, opened, content = before.rpartition(self.opening)
        if not (opened or closed):
            return Answer(text)
        source = self.parse_code(content) if opened and closed else None
        return None if source is None else Code(source)

    def parse_code(self, content: str) -> str | None:
        """The code between the tags, or ``None`` if it is malformed."""
        return content


class TinyProtocol(TaggedProtocol):
    """``<code>``, ``<output>`` and nothing around them, for a small model whose tags are single tokens.

    The prompt is ``<user>problem<assistant>``.
    """

    opening, closing = "<code>", "</code>"
    stop_tags = (closing,)
    invalid_action = "invalid"
    no_output = "none"

    def problem_text(self, problem: str) -> str:
        """The problem itself: the tag before it needs no space."""
        return problem.strip()

    def observation(self, text: str, *, last_turn: bool, after_eos: bool) -> Observation:
        """The text between output tags."""
        return Observation((text,), "<output>", "</output>")

    def _prompt_frame(self, rules: CodeRules) -> tuple[list[int], list[int]]:
        missing = [tag for tag in TINY_TAGS if self.codec.single_id(tag) is None]
        if missing:
            raise ValueError(
                f"protocol='tiny' needs a tokenizer in which every tag is one token; this splits {missing}. "
                "Use the tiny model's tokenizer, or protocol='python_block'"
            )
        return self.codec.control("<user>"), self.codec.control("<assistant>")


class HermesProtocol(TaggedProtocol):
    """Tool calls as JSON in ``<tool_call>``, outputs in ``<tool_response>`` of a user turn: Qwen3-style models.

    Source: https://github.com/NousResearch/Hermes-Function-Calling. Needs a chat template; one that knows
    ``tools`` describes the tool itself, otherwise the prompt does.
    """

    opening, closing = "<tool_call>", "</tool_call>"
    stop_tags = (closing,)
    invalid_action = (
        'That was no valid tool call. Write <tool_call>{"name": "code_interpreter", "arguments": '
        '{"code": "..."}}</tool_call> to run code.\n'
    )

    tool: Mapping[str, Any] = {
        "type": "function",
        "function": {
            "name": "code_interpreter",
            "description": "Run Python code and return what it prints.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "Python source."}},
                "required": ["code"],
            },
        },
    }

    def __init__(self, codec: TokenCodec, rules: CodeRules) -> None:
        if codec.tokenizer.chat_template is None:
            raise ValueError(
                "protocol='hermes' needs a tokenizer with a chat template; "
                "use protocol='python_block' for a base model"
            )
        super().__init__(codec, rules)
        self._user_turn = UserTurn(codec.tokenizer)

    def parse_code(self, content: str) -> str | None:
        """``arguments.code`` of a call to ``code_interpreter``; ``None`` unless the JSON is exactly of that form."""
        try:
            call = json.loads(content)
            code = call["arguments"]["code"] if call["name"] == "code_interpreter" else None
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        return code if isinstance(code, str) else None

    def observation(self, text: str, *, last_turn: bool, after_eos: bool) -> Observation:
        """The text as a user turn; the assistant's turn is closed first unless the policy did so itself."""
        notice = f"\n{self.last_turn}" if last_turn else ""
        return Observation(
            (text,),
            f"{self._user_turn.before(after_eos=after_eos)}<tool_response>\n",
            f"\n</tool_response>{notice}{self._user_turn.after}",
        )

    def _prompt_frame(self, rules: CodeRules) -> tuple[list[int], list[int]]:
        knows_tools = "tools" in str(self.codec.tokenizer.chat_template)
        described = (
            "You have one tool:\n"
            f"{json.dumps(self.tool)}\n"
            'Call it with <tool_call>{"name": "code_interpreter", "arguments": {"code": "..."}}</tool_call>; '
            "its output comes back between <tool_response> and </tool_response>. "
        )
        return prompt_frame(
            self.codec,
            f"Solve the problem at the end step by step. {'' if knows_tools else described}"
            f"Call the tool once a turn. {rules} Put the final answer in \\boxed{{}}, for instance \\boxed{{42}}, and "
            f"stop.\n\nProblem:{QUESTION}\n",
            [dict(self.tool)] if knows_tools else None,
        )


PROTOCOLS: Mapping[str, type[MathProtocol]] = {
    "python_block": PythonBlockProtocol,
    "hermes": HermesProtocol,
    "tiny": TinyProtocol,
}
