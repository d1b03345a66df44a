"""What vLLM's own processes import: the ``shm`` weight transfer engine and the worker extension.

vLLM resolves ``worker_extension_cls`` to :class:`WorkerExtension` in every worker, which imports this module and with
it registers the ``shm`` backend beside vLLM's ``nccl`` and ``ipc``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from torchrl_copc.collectors.checksum import tensor_checksum

OWNER_PID = "TORCHRL_COPC_ENGINE_OWNER_PID"
_EYE_ROWS = 1024


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Nothing to connect: each update says where its bytes are."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """One update: tensor ``i`` lies ``offsets[i]`` bytes into the shared file ``path``."""

    path: str
    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        lengths = {len(self.names), len(self.dtype_names), len(self.shapes), len(self.offsets)}
        if len(lengths) != 1:
            raise ValueError(f"names, dtype_names, shapes and offsets differ in length: {sorted(lengths)}")


class ShmWeightTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Loads weights out of memory that the trainer's process shares (same host, CPU or CUDA)."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo
    model: Any

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """The file comes with each update."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class synchronises torch.accelerator afterwards, which CPU builds of torch do not have.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        self.model.load_weights(_read(update_info, self.device))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_heads(self.model)

    def shutdown(self) -> None:
        """Nothing is held between updates."""


def _read(info: ShmUpdateInfo, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    shared = torch.from_file(info.path, shared=True, size=os.path.getsize(info.path), dtype=torch.uint8)
    for name, dtype_name, shape, offset in zip(
        info.names, info.dtype_names, info.shapes, info.offsets, strict=True
    ):
        dtype = getattr(torch, dtype_name)
        values = shared[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)
        # A copy: a model that keeps what it is given would change with the next push's bytes.
        yield name, values.to(device, copy=True)


def repack_tied_heads(model: nn.Module) -> None:
    """Rebuild the packed copy that vLLM's CPU kernels keep of a tied ``lm_head``.

    A layerwise reload loads the embedding, but never processes the head that shares its weight, so the head's packed
    copy would stay that of the old version.
    """
    embeddings = {id(m.weight) for m in model.modules() if type(m) is VocabParallelEmbedding}
    for module in model.modules():
        if (
            isinstance(module, ParallelLMHead)
            and hasattr(module, "cpu_linear")
            and id(module.weight) in embeddings
        ):
            module.quant_method.process_weights_after_loading(module)


def _weight_in_use(module: Any) -> tuple[Tensor, str]:
    """The ``[N, K]`` matrix that a layer multiplies with, and where it was read from.

    vLLM's CPU kernels pack linear weights into opaque memory and drop the original. Multiplying the identity by the
    layer gives the packed matrix back exactly: every other summand is zero.
    """
    if not hasattr(module, "cpu_linear") or type(module) is VocabParallelEmbedding:
        return module.weight, "weight"
    k = (
        module.embedding_dim
        if isinstance(module, VocabParallelEmbedding)
        else module.input_size_per_partition
    )
    dtype = module.weight.dtype
    blocks = []
    for start in range(0, k, _EYE_ROWS):
        rows = torch.zeros(min(_EYE_ROWS, k - start), k, dtype=dtype)
        rows[:, start:].fill_diagonal_(1.0)
        blocks.append(module.cpu_linear(rows, module.weight, None))
    return torch.cat(blocks).t(), "gemm"


def _fused_names(name: str, packed: dict[str, list[str]]) -> list[str]:
    stem, _, last = name.rpartition(".")
    return [f"{stem}.{part}" if stem else part for part in packed[last]]


def _slices(
    module: Any, name: str, packed: dict[str, list[str]]
) -> list[tuple[str, int, int, int, int, int]]:
    """Parts of a linear layer's local weight: (HF module, row start, row stop, full dim, full start, full stop)."""
    if isinstance(module, RowParallelLinear):
        local, rank = module.input_size_per_partition, module.tp_rank
        return [(name, 0, module.output_size, 1, rank * local, (rank + 1) * local)]
    if isinstance(module, QKVParallelLinear):
        rank, kv_rank = module.tp_rank, module.tp_rank // module.num_kv_head_replicas
        sizes = [
            module.num_heads * module.head_size,
            module.num_kv_heads * module.head_size,
            module.num_kv_heads * module.v_head_size,
        ]
        ranks = [rank, kv_rank, kv_rank]
    elif isinstance(module, MergedColumnParallelLinear):
        sizes = [size // module.tp_size for size in module.output_sizes]
        ranks = [module.tp_rank] * len(sizes)
    elif isinstance(module, ColumnParallelLinear):
        local, rank = module.output_size_per_partition, module.tp_rank
        return [(name, 0, local, 0, rank * local, (rank + 1) * local)]
    else:
        return [(name, 0, module.output_size, 0, 0, module.output_size)]
    parts, start = [], 0
    for part, size, part_rank in zip(_fused_names(name, packed), sizes, ranks, strict=True):
        parts.append((part, start, start + size, 0, part_rank * size, (part_rank + 1) * size))
        start += size
    return parts


def checksums(model: nn.Module) -> list[tuple[str, int, int, int, str, str, str, str]]:
    """Fields of one :class:`~torchrl_copc.collectors.engine.ParameterChecksum` per parameter part in use.

    Dense decoder models whose fused layers follow ``packed_modules_mapping``; a mixture of experts reports its fused
    tensors under vLLM's names, which no learner pushes, and is therefore refused by the publisher.
    """
    packed = getattr(model, "packed_modules_mapping", {})
    found: list[tuple[str, int, int, int, str, str, str, str]] = []
    seen: set[str] = set()
    embeddings = {id(m.weight): n for n, m in model.named_modules() if type(m) is VocabParallelEmbedding}
    modules: Iterator[tuple[str, Any]] = model.named_modules()

    def add(name: str, dim: int, start: int, stop: int, part: Tensor, source: str, tied_to: str = "") -> None:
        dtype = str(part.dtype).removeprefix("torch.")
        found.append((name, dim, start, stop, tensor_checksum(part), dtype, source, tied_to))

    for name, module in modules:
        if isinstance(module, VocabParallelEmbedding):
            weight, source = _weight_in_use(module)
            first, last = module.shard_indices.org_vocab_start_index, module.shard_indices.org_vocab_end_index
            tied = embeddings.get(id(module.weight)) if isinstance(module, ParallelLMHead) else None
            tied_to = f"{tied}.weight" if tied else ""
            add(f"{name}.weight", 0, first, last, weight[: last - first], source, tied_to)
            seen.add(f"{name}.weight")
        elif isinstance(module, LinearBase):
            weight, source = _weight_in_use(module)
            bias = getattr(module, "bias", None)
            for part, start, stop, dim, full_start, full_stop in _slices(module, name, packed):
                add(f"{part}.weight", dim, full_start, full_stop, weight[start:stop], source)
                if bias is not None:
                    first, last = (full_start, full_stop) if dim == 0 else (0, bias.numel())
                    add(f"{part}.bias", 0, first, last, bias[start:stop], "weight")
            seen.update((f"{name}.weight", f"{name}.bias"))
    for name, parameter in model.named_parameters():
        if name not in seen:
            add(name, 0, 0, parameter.shape[0], parameter, "weight")
    return found


class WorkerExtension:
    """Methods added to every vLLM worker; called through ``collective_rpc``."""

    model_runner: Any

    def copc_checksums(self) -> list[tuple[str, int, int, int, str, str, str, str]]:
        """See :func:`checksums`."""
        with torch.no_grad():
            return checksums(self.model_runner.model)


def _exit_with_owner(pid: int) -> None:
    """End this process when the one that asked for the engine is gone, even by SIGKILL: vLLM alone would stay."""

    def watch() -> None:
        try:
            while owner.is_running() and owner.status() != psutil.STATUS_ZOMBIE:
                time.sleep(1.0)
        except psutil.NoSuchProcess:
            pass
        os._exit(1)

    owner = psutil.Process(pid)
    threading.Thread(target=watch, name="copc-owner-watch", daemon=True).start()


WeightTransferEngineFactory.register_engine("shm", ShmWeightTransferEngine)
# vLLM 0.32 runs AMX attention kernels on CPUs that have them without asking the kernel for permission: with a model
# whose layers are too small for oneDNN, which would ask, the first bfloat16 request is an illegal instruction.
torch.cpu._init_amx()
if OWNER_PID in os.environ:
    _exit_with_owner(int(os.environ[OWNER_PID]))
