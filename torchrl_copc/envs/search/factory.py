"""Builds retrievers and search environments from plain values, as configs and spawned workers need them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl_copc.envs.search.env import SearchEnv
from torchrl_copc.envs.search.http_retriever import HTTPRetriever
from torchrl_copc.envs.search.retriever import LocalRetriever, Retriever, read_jsonl_corpus


def make_retriever(retriever: str, **options: Any) -> Retriever:
    """The retriever that a config names.

    Args:
        retriever: ``"factbook"`` (the embedded corpus), an ``http://`` or ``https://`` address of a retrieval
            server, or the path of a JSONL corpus.
        options: of :func:`~torchrl_copc.envs.search.factbook.load_corpus` for the factbook, of
            :class:`~torchrl_copc.envs.search.http_retriever.HTTPRetriever` for an address; none for a path.

    Raises:
        FileNotFoundError: if ``retriever`` is none of these.
    """
    if retriever == "factbook":
        from torchrl_copc.envs.search.factbook import load_corpus

        return LocalRetriever(load_corpus(**options))
    if retriever.startswith(("http://", "https://")):
        return HTTPRetriever(retriever, **options)
    if options:
        raise ValueError(
            f"retriever={retriever!r} is a path and takes no retriever_options: {sorted(options)}"
        )
    return LocalRetriever(read_jsonl_corpus(retriever))


def make_search_env(
    tokenizer_path: str,
    *,
    retriever: str = "factbook",
    retriever_options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> SearchEnv:
    """A :class:`~torchrl_copc.envs.search.env.SearchEnv` from arguments that pickle.

    Args:
        tokenizer_path: folder or hub name of the policy's tokenizer.
        retriever: see :func:`make_retriever`.
        retriever_options: see :func:`make_retriever`.
        settings: of :class:`~torchrl_copc.envs.search.env.SearchEnv`.

    Raises:
        ImportError: if transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ImportError('text environments need transformers: pip install "torchrl_copc[envs]"') from error
    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_path)
    return SearchEnv(tokenizer, make_retriever(retriever, **(retriever_options or {})), **settings)
