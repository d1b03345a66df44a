"""How the bytes of a push reach the engine: shared memory on one host, or vLLM's own NCCL and CUDA IPC senders.

Each transport ends in one ``update_weights`` call, in which the engine pauses, loads, relabels and resumes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from torchrl_copc.collectors.engine import EngineTimeoutError, VLLMEngineConfig, WeightUpdate

_ALIGNMENT = 64


class EngineCall(Protocol):
    """Runs a method of the :class:`~torchrl_copc.collectors.engine.RolloutEngine` and waits for its result."""

    def __call__(self, method: str, *args: Any, timeout: float) -> Any: ...


class Transport(Protocol):
    """Delivers one set of tensors."""

    def send(self, tensors: Mapping[str, Tensor], version: int) -> dict[str, float]:
        """Load the tensors into the engine as ``version``; returns the engine's seconds per step."""

    def close(self) -> None:
        """Release what is held between pushes."""


def make_transport(call: EngineCall, config: VLLMEngineConfig) -> Transport:
    """The transport that ``engine.weight_transfer`` names."""
    if config.weight_transfer == "shm":
        return ShmTransport(call, config)
    return VLLMTransport(call, config)


def call_timeout(config: VLLMEngineConfig) -> float:
    """Deadline of a whole call, seconds: beyond every deadline inside it, which say more when they end it."""
    return 8 * config.step_timeout


class ShmTransport:
    """Shared memory that the engine's processes open through ``/proc`` (Linux, one host).

    The memory has no name in any file system: it is gone with the last process that holds it, however that ends, and
    the size of ``/dev/shm`` does not limit it.

    Args:
        call: reaches the engine.
        config: the engine's settings.
    """

    def __init__(self, call: EngineCall, config: VLLMEngineConfig) -> None:
        self._call = call
        self._timeout = call_timeout(config)
        self._file = os.memfd_create("torchrl_copc_weights")
        self._memory: Tensor | None = None

    def send(self, tensors: Mapping[str, Tensor], version: int) -> dict[str, float]:
        seconds: dict[str, float] = self._call(
            "update_weights", self._write(tensors), version, timeout=self._timeout
        )
        return seconds

    def _write(self, tensors: Mapping[str, Tensor]) -> WeightUpdate:
        offsets, end = [], 0
        for tensor in tensors.values():
            offsets.append(end)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        if self._memory is None or self._memory.numel() != end:
            os.ftruncate(self._file, end)
            self._memory = torch.from_file(path, shared=True, size=end, dtype=torch.uint8)
        for tensor, offset in zip(tensors.values(), offsets, strict=True):
            size = tensor.numel() * tensor.element_size()
            self._memory[offset : offset + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return WeightUpdate(
            {
                "path": path,
                "names": list(tensors),
                "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
                "shapes": [list(tensor.shape) for tensor in tensors.values()],
                "offsets": offsets,
            }
        )

    def close(self) -> None:
        self._memory = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class VLLMTransport:
    """vLLM's trainer-side ``nccl`` and ``ipc`` engines (CUDA): see ``vllm.distributed.weight_transfer``.

    The connection is made with the first push.

    Args:
        call: reaches the engine.
        config: the engine's settings.
    """

    def __init__(self, call: EngineCall, config: VLLMEngineConfig) -> None:
        self._client = _SyncClient(call, call_timeout(config))
        self._config = config
        self._trainer: Any = None
        self._source: Any = None

    def send(self, tensors: Mapping[str, Tensor], version: int) -> dict[str, float]:
        device = torch.cuda.current_device()
        on_device = {name: tensor.to(f"cuda:{device}") for name, tensor in tensors.items()}
        if self._trainer is None:
            self._source = _mapping_source()
        self._source.tensors = on_device
        self._client.version = version

        def work() -> None:
            torch.cuda.set_device(device)
            if self._trainer is None:
                self._trainer = self._connect()
            self._trainer.send_weights()

        # A broadcast whose peer failed never returns.
        _with_deadline(work, call_timeout(self._config), f"weight_transfer={self._config.weight_transfer}")
        return self._client.seconds

    def _connect(self) -> Any:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        from vllm.utils.network_utils import get_ip, get_open_port

        info: Any
        if self._config.weight_transfer == "nccl":
            info = NCCLTrainerInitInfo(
                master_address=get_ip(),
                master_port=get_open_port(),
                world_size=1 + self._config.tensor_parallel_size,
                rank=0,
            )
        else:
            if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
                raise ValueError(
                    "engine.weight_transfer=ipc gathers handles from every learner rank, but only rank 0 publishes; "
                    "set engine.weight_transfer=nccl or shm"
                )
            info = IPCTrainerInitInfo(rank=0)
        return WeightTransferTrainerFactory.trainer_init(info, client=self._client, source=self._source)

    def close(self) -> None:
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.shutdown()


class _SyncClient:
    """vLLM's ``VLLMWeightSyncClient``: what its trainer engines drive the inference side with.

    The engine's ``update_weights`` starts and finishes the update itself, so that nothing can be sampled in between.
    """

    def __init__(self, call: EngineCall, timeout: float) -> None:
        self._call = call
        self._timeout = timeout
        self.version = 0
        self.seconds: dict[str, float] = {}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer", init_info, timeout=self._timeout)

    def start_weight_update(self) -> None:
        """Part of :meth:`update_weights`."""

    def update_weights(self, update_info: Any) -> None:
        self.seconds = self._call(
            "update_weights", WeightUpdate(update_info), self.version, timeout=self._timeout
        )

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Part of :meth:`update_weights`."""


def _mapping_source() -> Any:
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class MappingSource(WeightSource):
        tensors: Mapping[str, Tensor]

        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self.tensors.items()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return iter(self.tensors.items())

    return MappingSource()


def _with_deadline(work: Callable[[], None], timeout: float, what: str) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # handed to the caller
            errors.append(error)

    thread = threading.Thread(target=run, name="weight-transfer", daemon=True)
    thread.start()
    thread.join(timeout)
    if errors:
        raise errors[0]
    if thread.is_alive():
        raise EngineTimeoutError(
            f"the push with engine.{what} did not end within {timeout:g} s (8 x engine.step_timeout)"
        )
