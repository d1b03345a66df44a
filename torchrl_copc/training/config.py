"""Structured configuration of a training run. Every key has a type here; units are in the comments.

``configs/`` composes these with Hydra: ``method/``, ``task/``, ``model/``, ``engine/`` and ``experiment/``.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from torchrl_copc.collectors.engine import VLLMEngineConfig
from torchrl_copc.training.learner import LearnerConfig


class ConfigError(ValueError):
    """Settings that do not go together; the message names the one to change."""


@dataclass
class MethodConfig:
    """A method is a pair of channels. ``loss`` and ``value_estimator`` are Hydra targets, completed by the trainer."""

    name: str = MISSING
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
    on_deadline: str = "cut"  # "cut" (the row is truncated) or "requeue" (its prompt starts again)
    temperature: float = 1.0


@dataclass
class EvaluationConfig:
    num_questions: int = 256
    temperature: float = 0.0  # 0 = greedy
    seed: int = 0  # of the sampling when temperature > 0
    transcripts: int = 20  # episodes written as readable text


@dataclass
class LoggingConfig:
    tensorboard: bool = True
    wandb_project: str | None = None  # set it to log to Weights & Biases too
    transcript_every: int = 20  # versions between samples of training transcripts; 0 = none


@dataclass
class TrainConfig:
    total_versions: int = 100  # batches the learner consumes
    max_minutes: float | None = None  # stop training (not evaluation) after this wall-clock time
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


# Settings that say where and how long a run goes on, not what it computes.
_NOT_HASHED = ("run_root", "run_name", "resume", "checkpoint_every", "keep_checkpoints", "logging", "seed")


def config_hash(cfg: Any) -> str:
    """Twelve hex digits that two runs share when they compute the same thing up to the seed."""
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    for name in _NOT_HASHED:
        del plain[name]
    for part in ("learner", "engine"):
        del plain[part]["seed"]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:12]


def check(cfg: TrainConfig) -> None:
    """Refuse settings that do not go together.

    Raises:
        ConfigError: naming the setting to change.
    """
    c = cfg.collector
    if c.batch_rows % c.group_size:
        raise ConfigError(
            f"collector.batch_rows={c.batch_rows} is not a multiple of collector.group_size={c.group_size}: rows of "
            "one group are consumed together"
        )
    if c.lag > c.max_staleness:
        raise ConfigError(
            f"collector.lag={c.lag} holds the engine further back than collector.max_staleness={c.max_staleness} "
            "allows; raise max_staleness to at least the lag"
        )
    if c.on_deadline not in ("cut", "requeue"):
        raise ConfigError(f"collector.on_deadline={c.on_deadline!r}: choose 'cut' or 'requeue'")
    if c.temperature <= 0:
        raise ConfigError(
            f"collector.temperature={c.temperature}: training rollouts are sampled, so it must be above 0 "
            "(evaluation.temperature=0 is greedy evaluation)"
        )
    if cfg.total_versions < 1:
        raise ConfigError(f"total_versions={cfg.total_versions}: at least one batch is needed")


ConfigStore.instance().store(name="train_schema", node=TrainConfig)
