"""A retrieval server that stops in the middle of a run: real worker process, real HTTP, scripted policy."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes import ScriptedEngine, make_prompts

from torchrl_copc.collectors.engine import WeightUpdate
from torchrl_copc.collectors.prompts import PromptStream
from torchrl_copc.collectors.rollout import AsyncRolloutCollector
from torchrl_copc.collectors.worker import RolloutWorker
from torchrl_copc.envs.search.factory import make_search_env
from torchrl_copc.envs.search.retriever import LocalRetriever, Passage
from torchrl_copc.trajectory import Completion, metadata

uvicorn = pytest.importorskip("uvicorn")


class SearchingEngine(ScriptedEngine):
    """Searches once, then answers."""

    def __init__(self, tokenizer_path: str) -> None:
        super().__init__()
        from transformers import AutoTokenizer

        encode = functools.partial(
            AutoTokenizer.from_pretrained(tokenizer_path).encode, add_special_tokens=False
        )
        self._search, self._answer = encode("<search> Mali</search>"), encode("<answer> Bamako</answer>")

    async def generate(self, token_ids: Sequence[int], **settings: Any) -> Completion:
        await asyncio.sleep(0.01)
        ids = self._answer if self._search[-1] in token_ids else self._search
        return Completion(tuple(ids), (-0.5,) * len(ids), (self.version,) * len(ids), "stop")


@contextlib.contextmanager
def serving(app: Any) -> Iterator[tuple[str, Any]]:
    """Address of a server in a thread, and a function that stops it."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()

    def stop() -> None:
        server.should_exit = True
        thread.join(10)
        sock.close()

    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}", stop
    finally:
        stop()


def test_rows_keep_coming_when_the_retriever_stops_and_none_is_lost(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    from torchrl_copc.envs.search.server import create_app

    app = create_app(LocalRetriever([Passage("mali", "Mali", "The capital is Bamako.")]))
    path = str(tiny_model_dir)
    with serving(app) as (url, stop):
        env_factory = functools.partial(
            make_search_env,
            path,
            protocol="tiny",
            retriever=url,
            retriever_options={"timeout": 2.0, "retries": 1, "backoff": 0.01},
        )
        engine_factory = functools.partial(SearchingEngine, path)
        with RolloutWorker(engine_factory, env_factory, log_path=tmp_path / "worker.log") as worker:
            collector = AsyncRolloutCollector(
                worker, PromptStream(make_prompts(80), 1), batch_rows=4, max_staleness=1
            )
            batches = []
            for version in range(1, 9):
                if version == 3:
                    stop()
                batches.append([metadata(row) for row in collector.next()])
                collector.advance(version)
                worker.call("update_weights", WeightUpdate(), version)
            stats = collector.stats()
            collector.shutdown()
            assert "searches fail and episodes go on without them" in worker.log_path.read_text()
    rows = [row for batch in batches for row in batch]
    assert len({row["prompt_id"] for row in rows}) == len(rows) == 32
    assert {row["metrics"]["retriever_failures"] for row in batches[0]} == {0.0}
    assert {row["metrics"]["retriever_failures"] for row in batches[-1]} == {1.0}
    assert stats["rows_failed"] == stats["rows_requeued"] == stats["rows_empty"] == 0
    assert stats["rows_started"] == 32 + stats["rows_running"] + stats["rows_buffered"]
