"""A mistake on the command line ends in one line that names the setting, before anything is built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/train_search.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("collector.lag=9", "ConfigError: collector.lag=9 holds the engine"),
        ("model.path=nowhere/model", "ConfigError: model.path='nowhere/model' cannot be loaded"),
    ],
)
def test_a_mistake_is_named_without_a_traceback(override, message, tmp_path):
    environment = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), override],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
