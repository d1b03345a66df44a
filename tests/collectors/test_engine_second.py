"""An engine of its own, in bfloat16: what holds for another dtype, and what is left when its core is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import EngineThread

from torchrl_copc.collectors.engine import (
    EngineDeadError,
    EngineRequestError,
    VLLMEngine,
    VLLMEngineConfig,
)
from torchrl_copc.collectors.weights import WeightPublisher

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def thread(tiny_model_dir: Path) -> Iterator[EngineThread]:
    pytest.importorskip("vllm")
    made = EngineThread(
        VLLMEngine(
            VLLMEngineConfig(
                model=str(tiny_model_dir), dtype="bfloat16", max_model_len=512, skip_tokenizer=True
            )
        )
    )
    made.call("start", timeout=600)
    yield made
    made.close()


def test_a_bfloat16_engine_holds_the_rounded_weights_of_a_float32_learner(
    thread: EngineThread, tiny_model_dir: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    probe = [[5, 60, 61, 62, 9, 40, 17, 18, 19, 20]]

    def score(sequences: Any) -> list[list[float]]:
        with torch.no_grad():
            log_probs = model(torch.tensor(sequences)).logits[:, :-1].log_softmax(-1)
        return log_probs.gather(-1, torch.tensor(sequences)[:, 1:, None])[..., 0].tolist()

    publisher = WeightPublisher(thread.call, thread.engine.config, probe)
    report = publisher.calibrate(dict(model.named_parameters()), 1, score)
    assert 1e-6 < report.noise_mean < 0.1
    with torch.no_grad():
        model.model.norm.weight.mul_(1.01)
    publisher.publish(dict(model.named_parameters()), 2, score)
    publisher.close()


def test_stop_strings_without_a_tokenizer_are_refused(thread: EngineThread) -> None:
    with pytest.raises(EngineRequestError, match=r"engine\.skip_tokenizer=false"):
        thread.call("generate", [5], max_tokens=2, stop_strings=["</a>"], request_id="string")


def test_a_killed_core_ends_every_request_with_a_clear_error(thread: EngineThread) -> None:
    (core,) = thread.engine.processes
    family = [psutil.Process(core.pid), *psutil.Process(core.pid).children(recursive=True)]
    outstanding = [
        thread.submit("generate", [5, 6, 7], max_tokens=500, request_id=f"outstanding-{i}") for i in range(4)
    ]
    time.sleep(0.3)
    os.kill(core.pid, signal.SIGKILL)
    for i, future in enumerate(outstanding):
        with pytest.raises(
            EngineDeadError, match=rf"request outstanding-{i}: .*process {core.pid} ended with exit code -9"
        ):
            future.result(30)
    for method, arguments in (("score", [[[1, 2]]]), ("weight_version", []), ("checksums", [])):
        with pytest.raises(EngineDeadError, match="exit code -9"):
            thread.call(method, *arguments)
    thread.call("shutdown")
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive
