"""Client of a retrieval server that speaks ``POST /retrieve``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib.util import find_spec
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from torchrl_copc.envs.search.retriever import Passage, RetrieverError, ScoredPassage

if TYPE_CHECKING:
    import httpx

_RETRIED_STATUS = frozenset({429, 500, 502, 503, 504})


class HTTPRetriever:
    """Searches over HTTP: ``{"queries", "topk", "return_scores": true}`` to ``url``.

    Connections are pooled per event loop. A request that times out, cannot connect or meets a busy or failing
    server is repeated ``retries`` times, waiting ``backoff``, ``2 * backoff``, ... seconds in between; what
    the server refuses (any other 4xx) is not.

    Args:
        url: address of the endpoint; ``/retrieve`` is added to one without a path.
        timeout: seconds one attempt may take; with the default of ``retries`` all of them fit in the search
            environment's ``search_timeout``.
        retries: further attempts after the first.
        backoff: seconds before the first repetition.
        max_connections: size of the pool.
        transport: replaces the network, for tests.

    Raises:
        ImportError: if httpx is not installed.
        ValueError: if ``url`` is not an http(s) address.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 8.0,
        retries: int = 2,
        backoff: float = 0.2,
        max_connections: int = 64,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if find_spec("httpx") is None:
            raise ImportError('an HTTP retriever needs httpx: pip install "torchrl_copc[envs]"')
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"retriever {url!r} is not an address; write http://host:port/retrieve")
        self.url = url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/retrieve"
        self._timeout, self._retries, self._backoff = timeout, retries, backoff
        self._max_connections, self._transport = max_connections, transport
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[ScoredPassage]]:
        """At most ``top_k`` passages for each query, best first.

        Raises:
            RetrieverError: when every attempt failed or the server refused the request.
        """
        if not queries:
            return []
        body = {"queries": list(queries), "topk": top_k, "return_scores": True}
        problem = ""
        for attempt in range(1 + self._retries):
            if attempt:
                await asyncio.sleep(self._backoff * 2 ** (attempt - 1))
            response, problem = await self._attempt(body)
            if response is not None:
                return self._parse(response, len(queries))
        raise RetrieverError(
            f"{self.url} failed {1 + self._retries} times, last with {problem}; "
            "is the server up (scripts/serve_retriever.py) and the retriever's address right?"
        )

    async def close(self) -> None:
        """Close the pool."""
        if self._client is not None and self._loop is asyncio.get_running_loop():
            await self._client.aclose()
        self._client = None

    async def _attempt(self, body: dict[str, Any]) -> tuple[httpx.Response | None, str]:
        """The response, or ``None`` and a reason worth another attempt."""
        import httpx

        try:
            response = await self._pool().post(self.url, json=body)
        except httpx.RequestError as error:
            return None, f"{type(error).__name__} {error}".strip()
        if response.status_code in _RETRIED_STATUS:
            return None, f"HTTP {response.status_code} {response.text[:200]}"
        if response.status_code != 200:
            raise RetrieverError(f"{self.url} refused: HTTP {response.status_code} {response.text[:200]}")
        return response, ""

    def _pool(self) -> httpx.AsyncClient:
        import httpx

        loop = asyncio.get_running_loop()
        # A pool belongs to the loop that opened its connections.
        if self._client is None or self._loop is not loop:
            limits = httpx.Limits(
                max_connections=self._max_connections, max_keepalive_connections=self._max_connections
            )
            self._client = httpx.AsyncClient(
                timeout=self._timeout,
                limits=limits,
                transport=self._transport,
                trust_env=not _is_loopback(self.url),  # a proxy (http_proxy) cannot reach this machine
            )
            self._loop = loop
        return self._client

    def _parse(self, response: httpx.Response, expected: int) -> list[list[ScoredPassage]]:
        try:
            result = [[_scored(item) for item in passages] for passages in response.json()["result"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RetrieverError(
                f"{self.url} answered {response.text[:200]!r} ({type(error).__name__}: {error}); "
                'needed {"result": [[{"document": {"id", "contents"}, "score"}]]}'
            ) from error
        if len(result) != expected:
            raise RetrieverError(f"{self.url} answered {len(result)} result lists to {expected} queries")
        return result


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def _scored(item: dict[str, Any]) -> ScoredPassage:
    document = item["document"]
    return ScoredPassage(
        Passage.from_contents(str(document["id"]), document["contents"]), float(item["score"])
    )
