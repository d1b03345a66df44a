"""Fixtures shared by every room's tests: the tiny checkpoint, and one real vLLM engine per session."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

ASSET = Path(__file__).parents[1] / "torchrl_copc" / "assets" / "search_tiny"


@pytest.fixture(scope="session")
def tiny_model_dir() -> Path:
    """The shipped checkpoint, small enough for every test that needs a model."""
    return ASSET


class EngineThread:
    """Drives an engine's coroutines from synchronous tests, on one event loop in a thread."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout: float = 120.0) -> Any:
        """Run any coroutine on the engine's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start a method of the engine; returns at once."""
        return asyncio.run_coroutine_threadsafe(getattr(self.engine, method)(*args, **kwargs), self._loop)

    def call(self, method: str, *args: Any, timeout: float = 120.0, **kwargs: Any) -> Any:
        """Run a method of the engine to its end, as the rollout worker's client does."""
        return self.submit(method, *args, **kwargs).result(timeout)

    def close(self) -> None:
        self.call("shutdown")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="session")
def engine_thread(tiny_model_dir: Path) -> Iterator[EngineThread]:
    """A started vLLM engine on the tiny checkpoint; tests that change its weights put them back."""
    pytest.importorskip("vllm")
    from torchrl_copc.collectors.engine import VLLMEngine, VLLMEngineConfig

    class Engine(VLLMEngine):
        worker_extension = "engine_sabotage.SabotageExtension"

    thread = EngineThread(Engine(VLLMEngineConfig(model=str(tiny_model_dir), max_model_len=512)))
    thread.call("start", timeout=600)
    yield thread
    thread.close()
