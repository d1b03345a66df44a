"""Fixtures shared by every room's tests: a tiny checkpoint, and one real vLLM engine per session."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

ASSET = Path(__file__).parents[1] / "torchrl_copc" / "assets" / "search_tiny"


def save_tiny_model(folder: Path, seed: int = 0) -> None:
    """A random two-layer Llama (tied head, grouped-query attention) and a byte-level BPE tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    text = ["What is the capital of France? <search>France</search> <answer>Paris</answer>\n"] * 4
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(text, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>"
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        # Wide enough for log-probs that differ visibly between tokens.
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint that transformers and vLLM load: the shipped one, or a random one before it exists."""
    if (ASSET / "model.safetensors").exists():
        return ASSET
    folder = tmp_path_factory.mktemp("tiny_model")
    save_tiny_model(folder)
    return folder


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
