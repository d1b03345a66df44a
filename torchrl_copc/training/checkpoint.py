"""Checkpoints of a learner: written whole or not at all, readable by any number of ranks.

    checkpoints/
        latest                  name of the newest complete checkpoint
        version_00000050/
            tensors/            distributed checkpoint: both networks and their optimizers
            rng_rank0.pt        random generators, one file per rank
            extra.pt            whatever else the run needs (pickle)
            meta.json           version and update counts, and the size of every file

A checkpoint holds pickles: load only what you trust.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torchrl import torchrl_logger

from torchrl_copc.training.learner import Learner

_PREFIX = "version_"
_LATEST = "latest"
_META = "meta.json"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be found or does not fit, with what is missing."""


def save_checkpoint(learner: Learner, folder: str | Path, extra: Any = None, keep: int = 2) -> Path:
    """Write a checkpoint; a collective of all ranks.

    It is written under a temporary name and renamed when complete, then ``latest`` is pointed at it, and only
    then are older ones removed, so that a run killed at any moment leaves a loadable checkpoint.

    Args:
        learner: what to save.
        folder: of all checkpoints of the run, on a file system that all ranks share.
        extra: any picklable state of the run beside the learner (rank 0's is kept), such as the collector's.
        keep: number of checkpoints to keep, the newest ones.

    Returns:
        The folder of the new checkpoint.

    Raises:
        ValueError: if ``keep`` is below 1.
    """
    if keep < 1:
        raise ValueError(f"keep_checkpoints must be at least 1, got {keep}")
    folder = Path(folder)
    final = folder / f"{_PREFIX}{learner.version:08d}"
    temporary = folder / f".{final.name}.tmp"
    if learner.rank == 0:
        for leftover in folder.glob(f".{_PREFIX}*"):
            shutil.rmtree(leftover)
        temporary.mkdir(parents=True)
    dist.barrier()
    save(learner.state_dict(), checkpoint_id=temporary / "tensors")
    torch.save(_random_state(), temporary / f"rng_rank{learner.rank}.pt")
    if learner.rank == 0:
        torch.save(extra, temporary / "extra.pt")
    dist.barrier()
    if learner.rank == 0:
        meta = learner.counters() | {"world_size": learner.world_size, "files": _sizes(temporary)}
        (temporary / _META).write_text(json.dumps(meta, indent=1))
        _put_in_place(temporary, final)
        pointer = folder / f".{_LATEST}.tmp"
        pointer.write_text(final.name)
        os.replace(pointer, folder / _LATEST)
        replaced = _replaced(final)
        kept = [path for path in _newest(folder) if path != replaced][-keep:]
        for old in folder.glob(f"{_PREFIX}*"):
            if old not in kept:
                shutil.rmtree(old)
    dist.barrier()
    return final


def _replaced(final: Path) -> Path:
    """Where an earlier checkpoint of the same version is while the new one is put in its place."""
    return final.with_name(f"{final.name}.old")  # found by `find_checkpoint` like any other


def _put_in_place(temporary: Path, final: Path) -> None:
    """Rename, keeping an earlier checkpoint of the same version loadable all the time."""
    if final.exists():
        if _problems(final):
            shutil.rmtree(final)
        else:
            if _replaced(final).exists():
                shutil.rmtree(_replaced(final))
            final.rename(_replaced(final))
    temporary.rename(final)


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint meant by ``path``: itself, or the newest one of a run or checkpoint folder.

    Where ``latest`` names one that is missing or incomplete, the newest complete one is taken, with a warning.

    Args:
        path: a checkpoint, the folder of a run's checkpoints, or a run folder with ``checkpoints/`` in it; links
            and relative names are resolved.

    Returns:
        The absolute path of a complete checkpoint.

    Raises:
        CheckpointError: if there is none, saying what was looked for.
    """
    resolved = Path(path).resolve()
    if (resolved / _META).is_file() or (resolved.is_dir() and resolved.name.startswith(_PREFIX)):
        if problems := _problems(resolved):
            raise CheckpointError(f"{resolved} is incomplete: {problems}")
        return resolved
    for folder in (resolved, resolved / "checkpoints"):
        pointer = folder / _LATEST
        named = folder / pointer.read_text().strip() if pointer.is_file() else None
        if named and not _problems(named):
            return named
        newest = _newest(folder)
        if newest:
            found = newest[-1]
            why = f"names {named.name}, which is missing or incomplete" if named else "is missing"
            torchrl_logger.warning(f"{pointer} {why}: {found.name} is taken, the newest complete checkpoint")
            return found
        if named:
            raise CheckpointError(
                f"{pointer} names {named.name}, which is missing or incomplete ({_problems(named)}), and no other "
                "checkpoint there is complete"
            )
    problem = "does not exist" if not resolved.exists() else "holds no complete checkpoint"
    raise CheckpointError(
        f"resume={path}: {resolved} {problem}; give a run folder, its checkpoints folder or one checkpoint"
    )


def _newest(folder: Path) -> list[Path]:
    """Complete checkpoints, the newest last; by time, because a resumed run may write lower versions again."""
    complete = [path for path in folder.glob(f"{_PREFIX}*") if not _problems(path)]
    return sorted(complete, key=lambda path: path.stat().st_mtime_ns)


def _sizes(checkpoint: Path) -> dict[str, int]:
    """Bytes of every file but ``meta.json``, by name."""
    files = (path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.name != _META)
    return {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in files}


def _problems(checkpoint: Path) -> str:
    """What is missing or cut off, as a text; empty for a complete checkpoint."""
    try:
        expected = json.loads((checkpoint / _META).read_text())["files"]
    except FileNotFoundError:
        return f"{_META} missing"
    except (ValueError, KeyError):
        return f"{_META} damaged"
    found = _sizes(checkpoint)
    problems = [f"{name} missing" for name in expected.keys() - found.keys()]
    problems += [
        f"{name} has {found[name]} of {size} bytes"
        for name, size in expected.items()
        if found.get(name, size) != size
    ]
    return ", ".join(sorted(problems))


def load_checkpoint(learner: Learner, path: str | Path) -> Any:
    """Restore a learner in place; a collective of all ranks.

    The number of ranks may differ from that of the save. Random generators are then left as seeded, with a
    warning.

    Args:
        learner: built with the same models.
        path: see :func:`find_checkpoint`.

    Returns:
        The ``extra`` state that was saved, on rank 0; ``None`` on the others, which have no use for it.

    Raises:
        CheckpointError: if there is no complete checkpoint at ``path``, or its tensors are not the learner's,
            naming them.
    """
    checkpoint = find_checkpoint(path)
    state = learner.state_dict()
    _check_tensors(checkpoint, state)
    load(state, checkpoint_id=checkpoint / "tensors")
    meta = json.loads((checkpoint / _META).read_text())
    learner.load_counters(meta)
    generators = checkpoint / f"rng_rank{learner.rank}.pt"
    if meta["world_size"] == learner.world_size:
        _set_random_state(torch.load(generators, weights_only=False))
    else:
        torchrl_logger.warning(
            f"{checkpoint} was written by {meta['world_size']} ranks and is read by {learner.world_size}: "
            "random generators are not restored"
        )
    return torch.load(checkpoint / "extra.pt", weights_only=False) if learner.rank == 0 else None


def _check_tensors(checkpoint: Path, state: dict[str, Any]) -> None:
    """Compare names and shapes before anything is overwritten."""
    stored = FileSystemReader(checkpoint / "tensors").read_metadata().state_dict_metadata
    shapes = {
        name: tuple(item.size) for name, item in stored.items() if isinstance(item, TensorStorageMetadata)
    }
    expected = {name: tuple(tensor.shape) for name, tensor in _flatten(state).items()}
    problems = [f"{name} is missing" for name in sorted(expected.keys() - shapes.keys())]
    problems += [f"{name} is not part of this model" for name in sorted(shapes.keys() - expected.keys())]
    problems += [
        f"{name} has shape {list(shapes[name])}, the model needs {list(expected[name])}"
        for name in sorted(expected.keys() & shapes.keys())
        if shapes[name] != expected[name]
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            f"{checkpoint} does not fit the configured models: {'; '.join(problems[:5])}{more}"
        )


def _flatten(state: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    flat: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _random_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate()}


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate(state["python"])


def export_actor(learner: Learner, path: str | Path, tokenizer: Any = None) -> None:
    """Write the actor in Hugging Face format, for transformers and vLLM; a collective of all ranks.

    Args:
        learner: holds the actor.
        path: folder, created when missing.
        tokenizer: a transformers tokenizer to write beside it, optional.
    """
    weights = learner.actor_weights(device="cpu")
    if learner.rank == 0:
        learner.actor.module.save_pretrained(path, state_dict=weights)
        if tokenizer is not None:
            tokenizer.save_pretrained(path)
    dist.barrier()
