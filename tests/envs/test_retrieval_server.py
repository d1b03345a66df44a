from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time

import httpx
import pytest
import uvicorn

from torchrl_copc.envs.search import HTTPRetriever, RetrieverError
from torchrl_copc.envs.search.server import create_app


def post(app, body, *, path="/retrieve", raw=False):
    """One request without a network; returns status and JSON."""

    async def send():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            response = await client.post(path, **({"content": body} if raw else {"json": body}))
            return response.status_code, response.json()

    return asyncio.run(send())


@pytest.fixture
def app(retriever):
    return create_app(retriever)


def test_the_contract_with_scores(app):
    status, answer = post(app, {"queries": ["Lima", "highest point"], "topk": 1, "return_scores": True})
    assert status == 200
    (lima,), (koussi,) = answer["result"]
    assert lima["document"] == {"id": "peru-1", "contents": '"Peru"\nThe capital is Lima.'}
    assert lima["score"] > 0 and koussi["document"]["id"] == "chad-2"


def test_the_contract_without_scores(app):
    expected = {"result": [[{"id": "peru-1", "contents": '"Peru"\nThe capital is Lima.'}]]}
    assert post(app, {"queries": ["Lima"], "return_scores": False}) == (200, expected)
    assert post(app, {"query": "Lima"}) == (200, expected)


@pytest.mark.parametrize(
    ("body", "result"), [({"queries": []}, []), ({"queries": ["", "zzz"]}, [[], []]), ({"query": ""}, [[]])]
)
def test_empty_lists(app, body, result):
    assert post(app, body) == (200, {"result": result})


def test_top_k_defaults_to_three(app):
    _, answer = post(app, {"query": "capital"})
    assert len(answer["result"][0]) == 3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, 'either "queries" (a list) or "query"'),
        ({"query": "x", "queries": ["y"]}, 'either "queries" (a list) or "query"'),
        ({"queries": "x"}, "body.queries"),
        ({"queries": [1]}, "body.queries.0"),
        ({"query": "x", "topk": 0}, "body.topk"),
        ({"query": "x", "topk": 101}, "body.topk"),
        ([], "body"),
    ],
)
def test_a_bad_request_is_a_json_error(app, body, message):
    status, answer = post(app, body)
    assert status == 422 and message in answer["error"]


def test_other_errors_are_json_too(app):
    assert post(app, b"{", raw=True)[0] == 422
    assert post(app, {}, path="/nowhere") == (404, {"error": "Not Found"})

    class Failing:
        def __init__(self, error):
            self.error = error

        async def search(self, queries, top_k):
            raise self.error

    assert post(create_app(Failing(RetrieverError("index lost"))), {"query": "x"}) == (
        503,
        {"error": "index lost"},
    )
    assert post(create_app(Failing(KeyError("bug"))), {"query": "x"}) == (500, {"error": "KeyError: 'bug'"})


# The client.


def client(handler, **options):
    return HTTPRetriever(
        "http://test/retrieve", transport=httpx.MockTransport(handler), backoff=0.001, **options
    )


def search(retriever, queries=("Lima",), top_k=1):
    return asyncio.run(retriever.search(list(queries), top_k))


def test_client_and_server_agree_with_the_local_engine(app, retriever):
    remote = HTTPRetriever("http://test/retrieve", transport=httpx.ASGITransport(app))
    queries = ["Lima", "capital of Mali", "", "highest point"]
    assert search(remote, queries, 3) == asyncio.run(retriever.search(queries, 3))
    assert search(remote, []) == []


@pytest.mark.parametrize("failure", [503, 429, httpx.ConnectError("refused"), httpx.ReadTimeout("slow")])
def test_a_passing_failure_is_retried(failure):
    attempts = []

    def handler(request):
        attempts.append(request)
        if len(attempts) < 3:
            if isinstance(failure, int):
                return httpx.Response(failure)
            raise failure
        return httpx.Response(200, json={"result": [[]]})

    assert search(client(handler, retries=2)) == [[]]
    assert len(attempts) == 3


@pytest.mark.parametrize(
    ("address", "asked"),
    [("http://t:1", "/retrieve"), ("http://t:1/", "/retrieve"), ("http://t:1/v2/find", "/v2/find")],
)
def test_an_address_without_a_path_means_the_standard_endpoint(address, asked):
    paths = []

    def handler(request):
        paths.append(request.url.path)
        return httpx.Response(200, json={"result": [[]]})

    search(HTTPRetriever(address, transport=httpx.MockTransport(handler)))
    assert paths == [asked]


def test_retries_are_bounded_and_the_error_says_what_happened():
    attempts = []

    def handler(request):
        attempts.append(request)
        raise httpx.ConnectError("refused")

    with pytest.raises(
        RetrieverError, match=r"http://test/retrieve failed 2 times, last with ConnectError refused"
    ):
        search(client(handler, retries=1))
    assert len(attempts) == 2


def test_a_refusal_is_not_retried():
    attempts = []

    def handler(request):
        attempts.append(request)
        return httpx.Response(422, json={"error": "topk"})

    with pytest.raises(RetrieverError, match=r"HTTP 422.*topk"):
        search(client(handler))
    assert len(attempts) == 1


@pytest.mark.parametrize(
    "answer",
    [
        "<html>",
        '{"results": []}',
        '{"result": [[{"document": {"id": 1}}]]}',
        '{"result": [[{"document": {"id": 1, "contents": 5}, "score": 1}]]}',
        '{"result": 3}',
        "[]",
        '{"result": []}',
    ],
)
def test_an_answer_of_another_form_is_an_error(answer):
    with pytest.raises(RetrieverError, match="answered"):
        search(client(lambda request: httpx.Response(200, text=answer)))


# Over a real socket.


@contextlib.contextmanager
def serving(app):
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/retrieve"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        sock.close()


def test_many_searches_at_once_over_loopback_and_a_clear_error_once_the_server_is_gone(
    app, retriever, monkeypatch
):
    queries = ["Lima", "capital of Mali", "highest point", ""] * 10

    async def all_at_once(remote):
        results = await asyncio.gather(*(remote.search([query], 2) for query in queries))
        await remote.close()
        return [hits for (hits,) in results]

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # a proxy is for other machines

    with serving(app) as url:
        remote = HTTPRetriever(url, max_connections=4, retries=0, timeout=5.0)
        expected = asyncio.run(retriever.search(queries, 2))
        assert asyncio.run(all_at_once(remote)) == expected
        # A second event loop gets connections of its own.
        assert asyncio.run(all_at_once(remote)) == expected
    with pytest.raises(RetrieverError, match="is the server up"):
        search(remote)


def test_a_server_that_never_answers_is_a_timeout():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        remote = HTTPRetriever(
            f"http://127.0.0.1:{silent.getsockname()[1]}/retrieve", timeout=0.05, retries=0
        )
        with pytest.raises(RetrieverError, match="ReadTimeout"):
            search(remote)
