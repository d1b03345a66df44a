"""The core needs only torch, tensordict and torchrl, and its documented examples run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import subprocess
import sys

import pytest

import torchrl_copc.objectives
import torchrl_copc.value

BLOCKED = ("vllm", "transformers", "hydra", "omegaconf", "numba", "fastapi", "rich", "gymnasium")

MODULES = sorted(
    f"{package.__name__}.{module.name}"
    for package in (torchrl_copc.value, torchrl_copc.objectives)
    for module in pkgutil.iter_modules(package.__path__)
)


def test_core_imports_without_the_optional_packages() -> None:
    program = f"""
import sys
for name in {BLOCKED!r}:
    sys.modules[name] = None  # any import of it raises ImportError
from torchrl_copc.objectives import COPCLoss
from torchrl_copc.value import COPCEstimator
from torchrl_copc.value.functional import copc_advantage_estimate
print(sorted(name for name in sys.modules if name.startswith("torchrl_copc.")))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    rooms = {name.split(".")[1].strip("']") for name in result.stdout.strip("[]\n").split(", ")}
    assert rooms == {"value", "objectives"}


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    outcome = doctest.testmod(importlib.import_module(name))
    assert outcome.failed == 0


def test_every_public_function_and_class_has_an_example() -> None:
    assert len(MODULES) >= 6
    for name in ("torchrl_copc.value", "torchrl_copc.objectives"):
        module = importlib.import_module(name)
        for public in module.__all__:
            if public != "OffPolicyValueEstimators":
                assert ">>>" in getattr(module, public).__doc__, public
