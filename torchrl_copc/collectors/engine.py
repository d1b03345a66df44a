"""Token ids in, token ids out: the engine protocol and its vLLM implementation.

An engine never sees text unless a turn ends at a stop string. Every sampled id comes back with the log-probability it
was sampled with and the policy version that sampled it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torchrl_copc.trajectory import Completion


class EngineError(RuntimeError):
    """An engine call that failed for a reason the policy did not cause."""


class EngineStartError(EngineError):
    """The engine did not come up; the message names the stage and the setting to change."""


class EngineDeadError(EngineError):
    """The engine is gone or unusable: every outstanding and later call raises this."""


class EngineRequestError(ValueError):
    """A request the engine cannot serve (too long, empty, an id outside the vocabulary); the engine goes on."""


class WeightUpdateError(EngineError):
    """One step of a weight update failed or ran past its deadline; ``step`` names it."""

    def __init__(self, message: str, step: str) -> None:
        super().__init__(message, step)
        self.step = step

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass
class VLLMEngineConfig:
    """Settings of one vLLM engine (``engine`` in the run's configuration). Plain types: picklable, OmegaConf-ready.

    Args:
        model: folder (or hub name) of a Hugging Face checkpoint.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        max_model_len: prompt plus response, in tokens.
        max_num_seqs: sequences decoded at the same time.
        kv_cache_gib: memory for the KV cache on CPU, GiB.
        gpu_memory_utilization: share of each GPU's memory, on CUDA.
        tensor_parallel_size: GPUs that share one copy of the model.
        enforce_eager: no compilation and no CUDA graphs; ``None`` means eager on CPU only.
        skip_tokenizer: never load a tokenizer; stop strings are then refused.
        weight_transfer: ``"shm"`` (same host, CPU or CUDA), or vLLM's own ``"nccl"`` or ``"ipc"`` (CUDA).
        top_p: must stay 1: truncated sampling breaks the ratio between learner and behaviour.
        top_k: must stay 0, for the same reason.
        seed: of the engine's own random state (requests carry their own seed).
        start_timeout: deadline of each stage of the start, seconds.
        step_timeout: deadline of each step of a weight update and of each small call, seconds.
    """

    model: str = ""
    dtype: str = "float32"
    max_model_len: int = 1024
    max_num_seqs: int = 128
    kv_cache_gib: int = 1
    gpu_memory_utilization: float = 0.85
    tensor_parallel_size: int = 1
    enforce_eager: bool | None = None
    skip_tokenizer: bool = False
    weight_transfer: str = "shm"
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    start_timeout: float = 300.0
    step_timeout: float = 60.0


@dataclass(frozen=True)
class WeightUpdate:
    """Where the engine finds a set of weights: names and places, never tensors, so that it crosses pipes cheaply.

    Args:
        info: what the transfer backend's receiving side expects (for ``shm``: path, names, dtypes, shapes, offsets).
    """

    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ParameterChecksum:
    """Checksum of the part of one Hugging Face parameter that one engine rank computes with.

    Args:
        name: Hugging Face parameter name; fused engine weights are reported slice by slice.
        dim: dimension along which the rank holds ``[start, stop)`` of the full parameter.
        start: first index, in the full parameter.
        stop: index after the last one.
        checksum: :func:`torchrl_copc.collectors.vllm_plugin.tensor_checksum` of that part, in ``dtype``.
        dtype: the engine's, as in ``"float32"``.
        source: ``"weight"`` (the stored tensor) or ``"gemm"`` (read back through the layer's own matrix product).
    """

    name: str
    dim: int
    start: int
    stop: int
    checksum: int
    dtype: str
    source: str


@runtime_checkable
class RolloutEngine(Protocol):
    """What the rollout worker and the weight publisher need from an engine. Every method runs on one asyncio loop."""

    async def start(self) -> None:
        """Bring the engine up; returns when it can generate. Raises :class:`EngineStartError`."""

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        stop_token_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        temperature: float = 1.0,
        seed: int | None = None,
        request_id: str,
    ) -> Completion:
        """Sample one turn after ``token_ids``; ``temperature=0`` is greedy."""

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-prob (nats, temperature 1) of every token but the first, given the tokens before it."""

    async def abort(self, request_id: str) -> None:
        """End a running request; its ``generate`` returns what was sampled, with finish reason ``"abort"``."""

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Connect the transfer backend (``nccl`` and ``ipc``; ``shm`` needs none)."""

    async def update_weights(self, update: WeightUpdate, version: int) -> dict[str, float]:
        """Pause, load, label with ``version``, resume; returns seconds per step. Running requests go on."""

    async def checksums(self) -> list[ParameterChecksum]:
        """Checksum of everything the engine computes with, under Hugging Face names."""

    async def weight_version(self) -> int:
        """Version of the weights in use."""

    async def shutdown(self) -> None:
        """Stop the engine and its processes; safe to repeat."""


def make_engine(config: VLLMEngineConfig) -> RolloutEngine:
    """The engine a configuration asks for, not yet started."""
    return VLLMEngine(config)


class VLLMEngine:
    """:class:`RolloutEngine` over vLLM's ``AsyncLLM``."""

    def __init__(self, config: VLLMEngineConfig) -> None:
        self.config = config
