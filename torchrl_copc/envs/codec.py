"""Text to ids through two doors: control text may become special tokens, ordinary text never does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_ORDINARY_CACHE = 4096  # retrieved passages repeat; encoding one costs more than everything else in a turn


class TokenCodec:
    """Encodes what the environment writes and decodes what the policy sampled.

    ``split_special_tokens=True`` of transformers leaves *non-special* added tokens alone: Qwen3's
    ``<tool_call>`` inside a web page would still become the control token. :meth:`ordinary` therefore runs a
    copy of the tokenizer without any added token.

    Args:
        tokenizer: a fast (Rust-backed) Hugging Face tokenizer.

    Raises:
        ValueError: if the tokenizer is not a fast one, or writes one of its added tokens as ordinary text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(
                f"{type(tokenizer).__name__} is not a fast tokenizer; save it with a tokenizer.json "
                "(transformers.PreTrainedTokenizerFast)"
            )
        from tokenizers import Tokenizer

        state = json.loads(backend.to_str())
        state["added_tokens"] = []
        state["truncation"] = state["padding"] = None
        self.tokenizer = tokenizer
        self._plain = Tokenizer.from_str(json.dumps(state))
        self._decode = backend.decode
        self._added: dict[str, int] = tokenizer.get_added_vocab()
        self._ordinary = lru_cache(_ORDINARY_CACHE)(self._encode_plain)
        for token, token_id in self._added.items():
            if token_id in self.ordinary(token):
                raise ValueError(
                    f"this tokenizer turns the plain text {token!r} into control token {token_id}; "
                    "observations could forge control tokens (only BPE tokenizers are supported)"
                )

    def _encode_plain(self, text: str) -> tuple[int, ...]:
        # A lone surrogate (half of a pair in some JSON) is no text to the tokenizer.
        text = text.encode("utf-8", "replace").decode("utf-8")
        return tuple(self._plain.encode(text, add_special_tokens=False).ids)

    def ordinary(self, text: str) -> tuple[int, ...]:
        """Ids of ``text`` as plain characters, whatever it spells. For everything that people or tools
        wrote."""
        return self._ordinary(text)

    def control(self, text: str) -> list[int]:
        """Ids of ``text`` with special tokens recognised. Only for the environment's own constant text."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=False)
        return ids

    def single_id(self, tag: str) -> int | None:
        """The id of a tag that is an added token, or ``None`` for one that is made of ordinary tokens."""
        return self._added.get(tag)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids``, special tokens shown."""
        text: str = self._decode(token_ids, skip_special_tokens=False)
        return text
