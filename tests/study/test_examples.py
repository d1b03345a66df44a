"""The examples in the study's docstrings run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import torchrl_copc.study

MODULES = sorted(
    f"torchrl_copc.study.{module.name}" for module in pkgutil.iter_modules(torchrl_copc.study.__path__)
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
