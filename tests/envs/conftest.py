"""A small tokenizer with every tag as one token, one with a chat template, and a corpus of six passages."""

from __future__ import annotations

import pytest
from env_cases import CHAT_TEMPLATE, PASSAGES, train_tokenizer

from torchrl_copc.envs.search import LocalRetriever
from torchrl_copc.envs.search.protocol import TINY_TAGS
from torchrl_copc.trajectory import Prompt


@pytest.fixture(scope="session")
def tag_tokenizer():
    return train_tokenizer(("<pad>", "<eos>", *TINY_TAGS), ("<extra>",), pad_token="<pad>", eos_token="<eos>")


@pytest.fixture(scope="session")
def chat_tokenizer():
    """Search-R1's tags are several tokens here; the tool-call tags are added but not special, as in Qwen3."""
    tokenizer = train_tokenizer(
        ("<pad>", "<|im_end|>", "<|im_start|>"),
        ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        pad_token="<pad>",
        eos_token="<|im_end|>",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def retriever() -> LocalRetriever:
    return LocalRetriever(PASSAGES)


@pytest.fixture
def prompt() -> Prompt:
    return Prompt("mali-capital", "What is the capital of Mali?", ("Bamako",))
