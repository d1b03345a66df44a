"""Question answering with a search engine."""

from torchrl_copc.envs.search.env import SearchEnv
from torchrl_copc.envs.search.factory import make_retriever, make_search_env
from torchrl_copc.envs.search.http_retriever import HTTPRetriever
from torchrl_copc.envs.search.retriever import (
    LocalRetriever,
    Passage,
    Retriever,
    RetrieverError,
    ScoredPassage,
)

__all__ = [
    "HTTPRetriever",
    "LocalRetriever",
    "Passage",
    "Retriever",
    "RetrieverError",
    "ScoredPassage",
    "SearchEnv",
    "make_retriever",
    "make_search_env",
]
