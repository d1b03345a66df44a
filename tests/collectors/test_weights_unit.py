"""The publisher against a stand-in engine, and how fused or sharded engine weights map to Hugging Face names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchrl_copc.collectors.checksum import tensor_checksum
from torchrl_copc.collectors.engine import ParameterChecksum, VLLMEngineConfig, WeightUpdate
from torchrl_copc.collectors.transfer import ShmTransport, _mapping_source, _SyncClient
from torchrl_copc.collectors.weights import WeightPublisher, WeightSyncError

PROBE = [[1, 2, 3]]


class StandInEngine:
    """Loads what an update points to, as two tensor-parallel ranks; ``lie`` distorts what it reports."""

    def __init__(self) -> None:
        self.loaded: dict[str, Tensor] = {}
        self.version = 0
        self.version_offset = 0
        self.stale_rank: int | None = None
        self.calls: list[str] = []

    def __call__(self, method: str, *args: Any, timeout: float) -> Any:
        self.calls.append(method)
        return getattr(self, method)(*args)

    def update_weights(self, update: WeightUpdate, version: int) -> dict[str, float]:
        info = update.info
        memory = torch.from_file(
            info["path"], shared=True, size=os.path.getsize(info["path"]), dtype=torch.uint8
        )
        for name, dtype, shape, offset in zip(
            info["names"], info["dtype_names"], info["shapes"], info["offsets"], strict=True
        ):
            values = memory[offset:].view(-1)[: torch.Size(shape).numel() * getattr(torch, dtype).itemsize]
            self.loaded[name] = values.view(getattr(torch, dtype)).view(shape).clone()
        self.version = version
        return {"update": 0.0}

    def weight_version(self) -> int:
        return self.version + self.version_offset

    def checksums(self) -> list[ParameterChecksum]:
        parts = []
        for name, tensor in (self.loaded or {"a": torch.zeros(4, 6), "b": torch.zeros(5)}).items():
            half = tensor.shape[0] // 2
            for rank, (start, stop) in enumerate(((0, half), (half, tensor.shape[0]))):
                checksum = "stale" if rank == self.stale_rank else tensor_checksum(tensor[start:stop])
                dtype = str(tensor.dtype).removeprefix("torch.")
                parts.append(ParameterChecksum(name, 0, start, stop, checksum, dtype, "weight"))
        return parts

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        return [[-1.0] * (len(sequence) - 1) for sequence in sequences]


def weights(seed: int = 0) -> Mapping[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(4, 6, generator=generator), "b": torch.randn(5, generator=generator)}


def publisher(engine: StandInEngine, dtype: str = "float32") -> WeightPublisher:
    return WeightPublisher(engine, VLLMEngineConfig(model="m", dtype=dtype), PROBE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_arrives_is_the_learners_weights_in_the_engines_dtype(dtype: str) -> None:
    engine = StandInEngine()
    made = publisher(engine, dtype)
    made.calibrate(weights(0), 1, engine.score)
    made.publish(weights(1), 2, engine.score)
    for name, tensor in weights(1).items():
        assert torch.equal(engine.loaded[name], tensor.to(getattr(torch, dtype)))
    made.close()


def test_the_learner_is_scored_once_and_before_the_engine_is_touched() -> None:
    engine = StandInEngine()
    made = publisher(engine)
    made.calibrate(weights(), 1, engine.score)
    engine.calls.clear()
    seen = []

    def score(sequences: Any) -> list[list[float]]:
        seen.append(sequences)
        assert engine.calls == []
        return engine.score(sequences)

    made.publish(weights(), 2, score)
    assert seen == [PROBE]
    assert engine.calls == ["update_weights", "weight_version", "checksums", "score"]


def test_a_shard_that_differs_on_one_rank_is_named_once() -> None:
    engine = StandInEngine()
    made = publisher(engine)
    made.calibrate(weights(), 1, engine.score)
    engine.stale_rank = 1
    with pytest.raises(WeightSyncError, match=r"2 of 4 .* differ from the learner's: a, b$"):
        made.publish(weights(), 2, engine.score)


def test_a_parameter_that_the_engine_does_not_report_is_named() -> None:
    engine = StandInEngine()
    complete = engine.checksums
    engine.checksums = lambda: complete()[:-1]
    with pytest.raises(WeightSyncError, match=r"do not cover b \(2 of 5 along dimension 0\)"):
        publisher(engine).calibrate(weights(), 1, engine.score)
    engine.checksums = list
    with pytest.raises(WeightSyncError, match="unknown to the engine: a, b"):
        publisher(engine).calibrate(weights(), 1, engine.score)
    assert "update_weights" not in engine.calls

    engine.checksums = complete
    made = publisher(engine)
    made.calibrate(weights(), 1, engine.score)
    engine.checksums = lambda: complete()[1:]
    with pytest.raises(WeightSyncError, match=r"missing: a\[0:2\]; unexpected: none"):
        made.publish(weights(), 2, engine.score)
    engine.checksums = list
    with pytest.raises(WeightSyncError, match=r"missing: a\[0:2\], a\[2:4\], b\[0:2\], b\[2:5\]"):
        made.publish(weights(), 3, engine.score)


def test_a_version_that_does_not_follow_is_an_error() -> None:
    engine = StandInEngine()
    made = publisher(engine)
    made.calibrate(weights(), 1, engine.score)
    engine.version_offset = -1
    with pytest.raises(WeightSyncError, match="reports version 1 after a push of version 2"):
        made.publish(weights(), 2, engine.score)


def test_scores_of_the_wrong_shape_are_an_error() -> None:
    engine = StandInEngine()
    with pytest.raises(WeightSyncError, match=r"lengths \[3\].*needs \[2\]"):
        publisher(engine).calibrate(weights(), 1, lambda sequences: [[-1.0] * 3])


def test_noise_that_is_not_a_number_never_passes() -> None:
    engine = StandInEngine()
    made = publisher(engine)
    nan = float("nan")
    with pytest.raises(WeightSyncError, match="differ by nan"):
        made.calibrate(weights(), 1, lambda sequences: [[nan, nan]])


def test_the_memory_follows_the_size_of_the_weights_and_goes_with_the_transport() -> None:
    engine = StandInEngine()
    transport = ShmTransport(engine, VLLMEngineConfig(model="m"))
    for size in (10, 100_000, 3):
        tensors = {"x": torch.arange(float(size)), "y": torch.full((7,), float(size), dtype=torch.bfloat16)}
        transport.send(tensors, 1)
        assert all(torch.equal(engine.loaded[name], tensor) for name, tensor in tensors.items())
    path = f"/proc/{os.getpid()}/fd/{transport._file}"
    assert os.path.exists(path)
    transport.close()
    transport.close()
    assert not os.path.exists(path)


def test_the_client_and_the_source_are_what_vllms_trainer_engines_ask_for() -> None:
    base = pytest.importorskip("vllm.distributed.weight_transfer.base")
    calls: list[Any] = []

    def call(method: str, *args: Any, timeout: float) -> Any:
        calls.append((method, *args))
        return {"update": 1.0}

    client = _SyncClient(call, 1.0)
    assert isinstance(client, base.VLLMWeightSyncClient)
    client.version = 7
    client.start_weight_update()
    client.update_weights({"names": ["a"]})
    client.finish_weight_update()
    assert calls == [("update_weights", WeightUpdate({"names": ["a"]}), 7)]
    assert client.seconds == {"update": 1.0}
    source = _mapping_source()
    source.tensors = weights()
    described = [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()]
    assert described == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source]
    assert source.groups() == [["a", "b"]]


def bare(cls: type[nn.Module], **attributes: Any) -> nn.Module:
    """A vLLM layer without its distributed set-up: only what decides which rows a rank holds."""
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def test_fused_and_sharded_layers_map_to_the_rows_of_hugging_face_parameters() -> None:
    pytest.importorskip("vllm")
    from vllm.model_executor.layers import linear

    from torchrl_copc.collectors.vllm_plugin import _slices

    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    # Rank 3 of 4 with 8 query heads and 2 key-value heads of size 16: each key-value head lives on two ranks.
    qkv = bare(
        linear.QKVParallelLinear,
        tp_rank=3,
        num_heads=2,
        num_kv_heads=1,
        num_kv_head_replicas=2,
        head_size=16,
        v_head_size=16,
    )
    assert _slices(qkv, "layers.0.qkv_proj", packed) == [
        ("layers.0.q_proj", 0, 32, 0, 96, 128),
        ("layers.0.k_proj", 32, 48, 0, 16, 32),
        ("layers.0.v_proj", 48, 64, 0, 16, 32),
    ]
    merged = bare(linear.MergedColumnParallelLinear, tp_rank=1, tp_size=2, output_sizes=[10, 10])
    assert _slices(merged, "mlp.gate_up_proj", packed) == [
        ("mlp.gate_proj", 0, 5, 0, 5, 10),
        ("mlp.up_proj", 5, 10, 0, 5, 10),
    ]
    row = bare(linear.RowParallelLinear, tp_rank=1, input_size_per_partition=6, output_size=4)
    assert _slices(row, "mlp.down_proj", packed) == [("mlp.down_proj", 0, 4, 1, 6, 12)]
    column = bare(linear.ColumnParallelLinear, tp_rank=1, output_size_per_partition=6)
    assert _slices(column, "proj", packed) == [("proj", 0, 6, 0, 6, 12)]
