"""COPC composes with stock TorchRL collectors and replay buffers, and solves CartPole from stale data."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch


@pytest.mark.slow
def test_cartpole_reaches_a_return_of_400() -> None:
    pytest.importorskip("gymnasium")
    path = Path(__file__).parents[2] / "examples" / "copc_cartpole.py"
    spec = importlib.util.spec_from_file_location("copc_cartpole", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert example.train(seed=0) >= 400
    finally:
        torch.set_num_threads(threads)
