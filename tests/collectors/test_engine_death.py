"""What is left when vLLM's core process is killed: clear errors, and no process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from conftest import EngineThread

from torchrl_copc.collectors.engine import EngineDeadError, VLLMEngine, VLLMEngineConfig

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_a_killed_core_ends_every_request_with_a_clear_error(tiny_model_dir: Path) -> None:
    pytest.importorskip("vllm")
    thread = EngineThread(
        VLLMEngine(VLLMEngineConfig(model=str(tiny_model_dir), max_model_len=512, skip_tokenizer=True))
    )
    thread.call("start", timeout=600)
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
    thread.close()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive
