"""Prompts of chat models: a tokenizer's chat template, and the text between two of its turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torchrl_copc.envs.codec import TokenCodec

Protocol = TypeVar("Protocol")

#: Stands for text that is encoded on its own, so that it cannot forge control tokens.
QUESTION = "QUESTIONGOESHERE"
_REPLY = "REPLYGOESHERE"


def choose_protocol(name: str, protocols: Mapping[str, Protocol]) -> Protocol:
    """The protocol called ``name``.

    Raises:
        ValueError: for an unknown name.
    """
    if name not in protocols:
        raise ValueError(f"protocol={name!r} is unknown; choose one of {', '.join(protocols)}")
    return protocols[name]


def prompt_frame(
    codec: TokenCodec, text: str, tools: list[dict[str, Any]] | None = None
) -> tuple[list[int], list[int]]:
    """Ids of the first prompt before and after the question: plain text where there is no chat template.

    Args:
        codec: of the policy's tokenizer.
        text: the environment's instructions, :data:`QUESTION` in them.
        tools: for a template that describes tools itself.
    """
    tokenizer = codec.tokenizer
    if tokenizer.chat_template is None:  # a base model continues plain text
        before, after = text.split(QUESTION)
        start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        return start + codec.control(before), codec.control(after)
    rendered = render_chat(tokenizer, [{"role": "user", "content": text}], tools)
    before, after = rendered.split(QUESTION)
    return codec.control(before), codec.control(after)


def render_chat(
    tokenizer: Any, messages: list[dict[str, str]], tools: list[dict[str, Any]] | None = None
) -> str:
    """The template's text up to where the assistant begins to write.

    Args:
        tokenizer: with a chat template.
        messages: each a ``role`` and a ``content``.
        tools: for a template that describes tools itself.
    """
    # Llama 3 templates print today's date unless they are given one: a prompt must not depend on the day.
    text: str = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True, date_string="01 Jan 2026"
    )
    return text


class UserTurn:
    """What the template writes around a user turn that follows the assistant's.

    Args:
        tokenizer: with a chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": _REPLY},
            {"role": "user", "content": QUESTION},
        ]
        _, after_reply = render_chat(tokenizer, messages).split(_REPLY)
        self._before, self.after = after_reply.split(QUESTION)
        self._eos = str(tokenizer.eos_token)

    def before(self, *, after_eos: bool) -> str:
        """The text before the content; it ends the assistant's turn unless the policy did so itself."""
        return self._before.removeprefix(self._eos) if after_eos else self._before
