"""Structured configuration of a training run. Every key has a type here; units are in the comments.

``configs/`` composes these with Hydra: ``method/``, ``task/``, ``model/``, ``engine/`` and ``experiment/``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.utils import get_method
from omegaconf import MISSING, OmegaConf

from torchrl_copc.collectors.engine import VLLMEngineConfig, check_engine_config
from torchrl_copc.training.learner import LearnerConfig


class ConfigError(ValueError):
    """Settings that do not go together; the message names the one to change."""


@dataclass
class MethodConfig:
    """A method is a pair of channels. ``loss`` and ``value_estimator`` are Hydra targets, completed by the trainer."""

    name: str = MISSING
    critic: bool = True  # False: none is built, for value estimators that read no values
    loss: dict[str, Any] = field(default_factory=dict)  # called with actor_network and critic_network
    value_estimator: dict[str, Any] = field(default_factory=dict)  # called with value_network=None


@dataclass
class TaskConfig:
    """An environment and its questions, as Hydra targets."""

    name: str = MISSING
    env: dict[str, Any] = field(default_factory=dict)  # called with tokenizer_path, in the rollout worker
    train: dict[str, Any] = field(default_factory=dict)  # returns the list of training prompts
    test: dict[str, Any] = field(default_factory=dict)  # returns the list of held-out prompts


@dataclass
class ModelConfig:
    name: str = MISSING
    path: str = MISSING  # Hugging Face folder or hub name of the actor; "asset:NAME" is a model shipped in the package
    critic_path: str | None = None  # trunk of the critic; None = the actor's
    attn_implementation: str = (
        "sdpa"  # "flash_attention_2" or "flex_attention" with learner.layout=packed on CUDA
    )
    gradient_checkpointing: bool = False
    architecture: dict[str, Any] = field(
        default_factory=dict
    )  # the model's config, for runs without a download


@dataclass
class CollectorConfig:
    batch_rows: int = 128  # responses per batch, over all ranks
    group_size: int = 1  # responses per prompt
    max_staleness: int = 8  # versions; 0 = synchronous
    lag: int = 0  # versions the engine is held behind the learner, for controlled studies
    max_concurrent_rows: int | None = None  # running episodes; None = 2 * batch_rows
    row_deadline: float = 600.0  # seconds an episode may run
    # "cut" (the row is truncated) or "requeue" (its prompt starts again); groups of several rows always start again
    on_deadline: str = "cut"
    max_attempts: int = 3  # times a prompt may fail or start again before the run stops and names it
    temperature: float = 1.0
    dynamic_sampling: bool = (
        False  # DAPO's: groups whose responses all got the same reward make room for others
    )


@dataclass
class EvaluationConfig:
    num_questions: int = 256
    temperature: float = 0.0  # 0 = greedy
    seed: int = 0  # of the choice of questions
    transcripts: int = 20  # episodes written as readable text


@dataclass
class LoggingConfig:
    tensorboard: bool = True
    wandb_project: str | None = None  # set it to log to Weights & Biases too
    transcript_every: int = 20  # versions between samples of training transcripts; 0 = none


@dataclass
class TrainConfig:
    total_versions: int = 100  # batches the learner consumes
    max_minutes: float | None = (
        None  # stop training (not evaluation) after this time, over all parts of a resumed run
    )
    seed: int = 0
    threads: int = 1  # CPU threads of each learner rank; beside an engine on the same cores, more are slower
    run_root: str = "runs"  # run folders are made here; "latest" links to the newest
    run_name: str | None = None  # None = task-method-date
    resume: str | None = None  # run folder (or one checkpoint in it) to continue
    checkpoint_every: int = 50  # versions; 0 = only at the end and on SIGTERM
    keep_checkpoints: int = 2
    method: MethodConfig = field(default_factory=MethodConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: VLLMEngineConfig = field(default_factory=VLLMEngineConfig)
    collector: CollectorConfig = field(default_factory=CollectorConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)


# Settings that say where a run is kept and how it is watched, not what it computes: a resumed run may change them, and
# the config's hash does not see them.
_BESIDE = ("run_root", "run_name", "resume", "checkpoint_every", "keep_checkpoints", "logging", "threads")
_NOT_HASHED = (
    *_BESIDE,
    "seed",
    "learner.seed",
    "engine.seed",
    "engine.start_timeout",
    "engine.step_timeout",
    "evaluation.transcripts",
)
_MAY_CHANGE = (*_BESIDE, "total_versions", "max_minutes")


def config_hash(cfg: Any) -> str:
    """Twelve hex digits that two runs share when they compute the same thing up to the seed."""
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    for name in _NOT_HASHED:
        *parents, key = name.split(".")
        part = plain
        for parent in parents:
            part = part[parent]
        part.pop(key)
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:12]


def resumed_config(checkpoint: Path, overrides: Sequence[str]) -> Any:
    """The configuration a run was started with, and what the command line may change about it.

    Args:
        checkpoint: in ``RUN/checkpoints``.
        overrides: ``key=value`` of the command line.

    Raises:
        ConfigError: for a checkpoint outside a run folder, and for an override that would make it another run.
    """
    run = checkpoint.parents[1]
    saved = run / "config.yaml"
    if checkpoint.parent.name != "checkpoints" or not saved.is_file():
        raise ConfigError(
            f"resume={checkpoint}: no run folder around it (looked for {saved}); resume from RUN or "
            "RUN/checkpoints/version_N"
        )
    cfg = OmegaConf.merge(OmegaConf.structured(TrainConfig), OmegaConf.load(saved))
    for override in overrides:
        name = override.split("=")[0].lstrip("+~")
        if name.split(".")[0] not in _MAY_CHANGE:
            raise ConfigError(
                f"resume continues {run} with its own settings; {override} would make it another run: leave it out, or "
                f"start a new run (a resumed run may change {', '.join(_MAY_CHANGE)})"
            )
    return OmegaConf.merge(cfg, OmegaConf.from_dotlist(list(overrides)))


def check(cfg: TrainConfig) -> None:
    """Refuse settings that are out of range or do not go together.

    Raises:
        ConfigError: naming the setting to change.
    """
    for name, least in (
        ("total_versions", 1),
        ("threads", 1),
        ("keep_checkpoints", 1),
        ("checkpoint_every", 0),
        ("collector.batch_rows", 1),
        ("collector.group_size", 1),
        ("collector.max_staleness", 0),
        ("collector.lag", 0),
        ("collector.max_concurrent_rows", 1),
        ("collector.max_attempts", 1),
        ("evaluation.num_questions", 2),
        ("evaluation.temperature", 0),
        ("logging.transcript_every", 0),
    ):
        value = attrgetter(name)(cfg)
        if value is not None and value < least:
            raise ConfigError(f"{name}={value} must be at least {least}")
    for name in ("max_minutes", "collector.row_deadline", "collector.temperature"):
        value = attrgetter(name)(cfg)
        if value is not None and not value > 0:
            raise ConfigError(f"{name}={value} must be above 0")
    c = cfg.collector
    if c.batch_rows % c.group_size:
        raise ConfigError(
            f"collector.batch_rows={c.batch_rows} is not a multiple of collector.group_size={c.group_size}: rows of "
            "one group are consumed together"
        )
    estimator: Any = get_method(cfg.method.value_estimator.get("_target_", "builtins.object"))
    compares = "group_id" in getattr(estimator, "entries", ())
    if c.group_size == 1 and (c.dynamic_sampling or compares):
        why = "collector.dynamic_sampling=true" if c.dynamic_sampling else f"method={cfg.method.name}"
        raise ConfigError(
            f"collector.group_size=1 with {why}, which compares the responses to one prompt; set collector.group_size "
            "to 2 or more"
        )
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if c.batch_rows // c.group_size < ranks:
        raise ConfigError(
            f"collector.batch_rows={c.batch_rows} makes {c.batch_rows // c.group_size} groups of "
            f"collector.group_size={c.group_size}, and {ranks} ranks need one each; raise collector.batch_rows"
        )
    if c.lag > c.max_staleness:
        raise ConfigError(
            f"collector.lag={c.lag} holds the engine further back than collector.max_staleness={c.max_staleness} "
            "allows; raise max_staleness to at least the lag"
        )
    if c.max_concurrent_rows is not None and c.max_concurrent_rows < c.group_size:
        raise ConfigError(
            f"collector.max_concurrent_rows={c.max_concurrent_rows} is below collector.group_size={c.group_size}: no "
            "group could start"
        )
    if c.on_deadline not in ("cut", "requeue"):
        raise ConfigError(f"collector.on_deadline={c.on_deadline!r}: choose 'cut' or 'requeue'")
    fewest = c.batch_rows // c.group_size // ranks * c.group_size  # rows of a rank: it gets whole groups
    if fewest < cfg.learner.minibatches_per_batch:
        raise ConfigError(
            f"collector.batch_rows={c.batch_rows} is too few: a rank may get {fewest} rows (whole groups of "
            f"{c.group_size}) for learner.minibatches_per_batch={cfg.learner.minibatches_per_batch}"
        )
    if cfg.engine.model:
        raise ConfigError(
            f"engine.model={cfg.engine.model!r}: the engine starts from model.path, set that instead"
        )
    check_engine_config(replace(cfg.engine, model=cfg.model.path))
    response = cfg.task.env.get("max_response_tokens")
    if response is not None and response >= cfg.engine.max_model_len:
        raise ConfigError(
            f"engine.max_model_len={cfg.engine.max_model_len} leaves no room for a prompt beside "
            f"task.env.max_response_tokens={response}; raise the first or lower the second"
        )


ConfigStore.instance().store(name="train_schema", node=TrainConfig)
OmegaConf.register_new_resolver("times", lambda *factors: math.prod(map(float, factors)), replace=True)
