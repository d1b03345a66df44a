"""The training loop.

    every rank                                   rank 0 only
    ----------                                   -----------
                                                 collector.take()      waits for a batch the rules allow
    rows <───────────── scatter ──────────────── rows, oldest first
    learner.update(rows)                         (episodes go on meanwhile, in the worker)
    learner.actor_weights(), score(probe)        collector.advance(version + 1)
                                                 publisher.publish()   engine pauses, loads, resumes; probe
    stop? <──────────── all-reduce ───────────── SIGTERM / SIGINT, max_minutes, total_versions
    checkpoint (all ranks write their shards)    + collector frontier and buffer

Who waits on whom: ranks wait for rank 0's batch; rank 0 waits for the collector, where no row runs longer than
``collector.row_deadline``; the engine waits for the publisher, each step under ``engine.step_timeout``.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from omegaconf import OmegaConf
from tensordict import TensorDictBase

from torchrl_copc.collectors.engine import EngineError
from torchrl_copc.collectors.rollout import CollectorError
from torchrl_copc.collectors.weights import WeightSyncError
from torchrl_copc.collectors.worker import WorkerError
from torchrl_copc.envs.records import DataError
from torchrl_copc.models.causal_lm import CausalLMActor, CausalLMCritic
from torchrl_copc.training import report as reports
from torchrl_copc.training.checkpoint import (
    CheckpointError,
    export_actor,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from torchrl_copc.training.config import ConfigError, TrainConfig, check, config_hash, resumed_config
from torchrl_copc.training.groups import split_groups, take_batch
from torchrl_copc.training.learner import Learner, NonFiniteError, start_process_group
from torchrl_copc.training.rollouts import Rollouts, call_target
from torchrl_copc.training.run_folder import RunFolder, revision
from torchrl_copc.trajectory import POLICY_MASK, RowError

STOPPED = 143  # exit code of a run that a signal stopped and that can be resumed
# What a person can mend: their message says it all, a traceback would bury it.
USER_ERRORS = (
    ConfigError,
    CheckpointError,
    CollectorError,
    DataError,
    EngineError,
    FileExistsError,
    NonFiniteError,
    RowError,
    WeightSyncError,
    WorkerError,
)


def command(cfg: Any) -> NoReturn:
    """Train as configured and leave with the exit code of :func:`run`: the whole of ``scripts/train_*.py``.

    Args:
        cfg: composed by ``hydra.main``.
    """
    try:
        sys.exit(run(cfg, HydraConfig.get().overrides.task))
    except USER_ERRORS as error:
        sys.exit(f"{type(error).__name__}: {error}")


def run(cfg: Any, overrides: Sequence[str] = ()) -> int:
    """Train as configured.

    Args:
        cfg: composed configuration (:class:`~torchrl_copc.training.config.TrainConfig`).
        overrides: what was set on the command line; a resumed run takes everything else from its folder.

    Returns:
        exit code: 0, or 143 when a signal stopped the run after it had written a checkpoint.
    """
    checkpoint = find_checkpoint(cfg.resume) if cfg.resume else None
    if checkpoint is not None:
        cfg = resumed_config(checkpoint, overrides)
    try:
        config = cast(TrainConfig, OmegaConf.to_object(cfg))
        check(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    torch.set_num_threads(config.threads)
    start_process_group(config.learner.device)
    trainer = Trainer(config, OmegaConf.create(OmegaConf.to_container(cfg, resolve=True)))
    try:
        trainer.set_up(checkpoint)
        return trainer.run()
    finally:
        trainer.close()
        dist.destroy_process_group()


def model_path(name: str) -> str:
    """Where a model's files are; ``asset:NAME`` is one shipped in the package."""
    if not name.startswith("asset:"):
        return name
    path = resources.files("torchrl_copc") / "assets" / name.removeprefix("asset:")
    if not path.is_dir():
        raise ConfigError(f"model.path={name!r}: the package ships no model of that name")
    return str(path)


class Trainer:
    """One run: learner on every rank, rollouts and run folder on rank 0.

    Args:
        config: typed configuration.
        resolved: the same as plain OmegaConf, to be saved and hashed.
    """

    learner: Learner
    run_path: Path

    def __init__(self, config: TrainConfig, resolved: Any) -> None:
        self.config, self.resolved = config, resolved
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.folder: RunFolder | None = None
        self.rollouts: Rollouts | None = None
        self.loggers: list[Any] = []
        self.before: reports.Summary = {}
        self.tokens, self.seconds = 0, 0.0
        self._saved_version = -1
        self._training = False
        self._stop_signal = 0
        self._failure: Exception | None = None

    def set_up(self, checkpoint: Path | None) -> None:
        """Build everything; what can be refused is refused before the run folder exists and the engine starts."""
        self._catch_signals()
        config = self.config
        path = model_path(config.model.path)
        prompts = call_target(config.task.train) if self.rank == 0 else []
        self.learner = build_learner(config, path)
        self.tokenizer = load_tokenizer(path)
        state = load_checkpoint(self.learner, checkpoint) if checkpoint else None
        if self.rank == 0:
            self.folder = self._open_folder(checkpoint)
        self.run_path = self._broadcast(self.folder.path if self.folder else None)
        self.learner.dump_dir = self.run_path / "nonfinite"
        if self.rank == 0:
            log = self.run_path / "worker.log"
            self._say(f"run folder {self.run_path}; starting the rollout engine, log in {log}")
            self.rollouts = Rollouts(config, path, self.tokenizer, prompts, log)
            if state is not None:
                self._restore(state)
            self._open_loggers()

    # one run

    def run(self) -> int:
        """Evaluate, train, evaluate, report."""
        self._publish()
        if self.rollouts and not self.before:
            self.before = self._evaluate("before")
        began, earlier = time.monotonic(), self.seconds
        self._training = True
        while not self._should_stop():
            self._train_one_batch()
            self.seconds = earlier + time.monotonic() - began
            every = self.config.checkpoint_every
            if every and self.learner.version % every == 0:
                self._checkpoint()
        self._training = False
        self._checkpoint()
        if self._any(self._failure is not None):
            self._say(
                f"saved version {self.learner.version}; when the cause is mended: resume={self.run_path}"
            )
            raise self._failure or RuntimeError("rank 0's rollouts failed; see its error")
        if self._any(self._stop_signal):
            self._say(f"stopped by signal {self._stop_signal}; continue with resume={self.run_path}")
            return STOPPED
        self._finish()
        return 0

    def _train_one_batch(self) -> None:
        began = time.monotonic()
        all_rows = self._take_batch()
        rows = self._scatter(all_rows)
        if rows is None:  # a signal or a failure while waiting: nothing was taken
            return
        waited = time.monotonic() - began
        metrics = self.learner.update(rows)
        version = self.learner.version
        if self.rollouts and self.folder:
            self.rollouts.collector.advance(version)
            self.folder.append_consumed(version, all_rows)
        sync_began = time.monotonic()
        push = self._publish()
        if not (self.rollouts and self.folder):
            return
        tokens = sum(int(row.get(POLICY_MASK).sum()) for row in all_rows)
        self.tokens += tokens
        now = time.monotonic()
        metrics |= {name: s["mean"] for name, s in reports.summarize(all_rows).items()}
        metrics |= reports.row_seconds(all_rows)
        metrics |= push | {
            "version": version,
            "policy_tokens": tokens,
            "time_wait": waited,
            "time_sync": now - sync_began,
            "time_step": now - began,
        }
        metrics |= {
            f"collector_{name}": float(value)
            for name, value in self.rollouts.collector.stats().items()
            if not name.startswith(("staleness", "batch_staleness"))
        }
        self.folder.append_metrics(metrics)
        for logger in self.loggers:
            for name, value in metrics.items():
                logger.log_scalar(name, value, step=version)
        every = self.config.logging.transcript_every
        if every and version % every == 1 % every:
            self._write_transcripts(f"train-{version:05d}", all_rows)
        self._say(progress_line(metrics, self.config.total_versions))

    def _take_batch(self) -> list[TensorDictBase]:
        """Rank 0's next batch; empty on other ranks, and when a signal or a failure ended the wait."""
        if not self.rollouts:
            return []
        try:
            return take_batch(
                self.rollouts.collector,
                dynamic_sampling=self.config.collector.dynamic_sampling,
                stop=lambda: self._stop_signal != 0,
            )
        except (CollectorError, RowError, WorkerError) as error:
            self._failure = error
            return []

    def _publish(self) -> dict[str, float]:
        """Collective: gather the actor's weights and hand them to the engine."""
        weights = self.learner.actor_weights(device="cpu")
        probe = self._broadcast(self.rollouts.probe if self.rollouts else None)
        scores = self.learner.score(probe)
        if not self.rollouts:
            return {}
        try:
            push = self.rollouts.publish(weights, scores, self.learner.version)
        except (EngineError, WeightSyncError, WorkerError) as error:
            if not self._training:
                raise
            self._failure = error
            return {}
        if push is None:
            return {}
        return {"push_noise_mean": push.noise_mean, "push_noise_max": push.noise_max}

    def _evaluate(self, name: str) -> reports.Summary:
        assert self.rollouts
        settings = self.config.evaluation
        prompts = call_target(self.config.task.test)
        if len(prompts) > settings.num_questions:
            # The same sample before and after, and in every run with this evaluation.seed.
            prompts = random.Random(settings.seed).sample(prompts, settings.num_questions)
        self._say(f"evaluating {len(prompts)} held-out questions ({name} training)")
        rows = self.rollouts.collector.evaluate(prompts, temperature=settings.temperature)
        self._write_transcripts(name, rows)
        return reports.summarize(rows)

    def _finish(self) -> None:
        """Evaluation after training, report, and the model in Hugging Face format."""
        if self.config.collector.lag:  # the engine was held back; what is evaluated is the learner
            if self.rollouts:
                self.rollouts.collector.lag = 0
            self._publish()
        export_actor(self.learner, self.run_path / "model", self.tokenizer)
        if not (self.rollouts and self.folder):
            return
        self.rollouts.collector.shutdown()  # no more training episodes beside the evaluation
        after = self._evaluate("after")
        stats = self.rollouts.collector.stats()
        result = {
            "before": self.before,
            "after": after,
            "difference": reports.difference(self.before, after),
            "staleness": {k: stats[f"staleness_{k}"] for k in ("mean", "p50", "p95", "max")},
            "tok_s": self.tokens / self.seconds if self.seconds else 0.0,
            "seed": self.config.seed,
            "revision": revision(),
            "config_hash": config_hash(self.resolved),
            "versions": self.learner.version,
            "train_seconds": self.seconds,
        }
        reports.write_report(self.run_path, result)
        reports.plot_curves(self.run_path, self.folder.history())
        reports.print_report(result)
        self._say(f"report, curves and transcripts in {self.run_path}; ask the agent: scripts/ask.py")

    # parts

    def _open_folder(self, checkpoint: Path | None) -> RunFolder:
        c = self.config
        if checkpoint is not None:
            folder = RunFolder(checkpoint.parents[1])
            folder.link_latest()
            return folder
        folder = RunFolder.create(c.run_root, c.run_name, f"{c.task.name}-{c.method.name}")
        folder.write_config(self.resolved)
        return folder

    def _open_loggers(self) -> None:
        if self.config.logging.tensorboard:
            from torchrl.record.loggers import TensorboardLogger

            self.loggers.append(TensorboardLogger("tensorboard", log_dir=str(self.run_path)))
        if self.config.logging.wandb_project:
            from torchrl.record.loggers import WandbLogger

            self.loggers.append(WandbLogger(self.run_path.name, project=self.config.logging.wandb_project))

    def _restore(self, state: dict[str, Any]) -> None:
        assert self.rollouts and self.folder
        self.rollouts.load_state_dict(state["rollouts"])
        self.before, self.tokens, self.seconds = state["before"], state["tokens"], state["seconds"]
        self.folder.rewind(self.learner.version)
        self._say(f"resumed at version {self.learner.version}")

    def _checkpoint(self) -> None:
        if self._saved_version == self.learner.version:
            return
        extra = None
        if self.rollouts:
            extra = {
                "rollouts": self.rollouts.state_dict(),
                "before": self.before,
                "tokens": self.tokens,
                "seconds": self.seconds,
            }
        save_checkpoint(self.learner, self.run_path / "checkpoints", extra, keep=self.config.keep_checkpoints)
        self._saved_version = self.learner.version

    def _should_stop(self) -> bool:
        limit = self.config.max_minutes
        too_long = limit is not None and self.seconds >= 60 * limit
        mine = self._stop_signal or self._failure is not None or too_long
        return self.learner.version >= self.config.total_versions or self._any(mine)

    def _catch_signals(self) -> None:
        """SIGTERM or SIGINT while training ends the run after the batch in hand, with a checkpoint; a second at once.

        Before training there is nothing to save, and after it everything is saved: the run ends at once.
        """

        def stop(number: int, _: Any) -> None:
            signal.signal(number, signal.SIG_DFL)
            if not self._training:
                raise SystemExit(STOPPED)
            self._stop_signal = number
            self._say(
                f"signal {number}: stopping after this batch, with a checkpoint (again to stop at once)"
            )

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, stop)
            signal.signal(signal.SIGINT, stop)

    def _scatter(self, rows: list[TensorDictBase]) -> list[TensorDictBase] | None:
        """This rank's part of the batch, whole groups; None on every rank when rank 0 has none."""
        if self.world_size == 1:
            return rows or None
        parts: list[Any] | None = None
        if self.rank == 0:
            parts = split_groups(rows, self.world_size)
        received: list[Any] = [None]
        dist.scatter_object_list(received, parts, src=0)
        part: list[TensorDictBase] | None = received[0]
        return part

    def _broadcast(self, value: Any) -> Any:
        box = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def _any(self, flag: Any) -> bool:
        reduced = torch.tensor(float(bool(flag)))
        dist.all_reduce(reduced, dist.ReduceOp.MAX)
        return bool(reduced)

    def _write_transcripts(self, name: str, rows: list[TensorDictBase]) -> None:
        path = self.run_path / "transcripts" / f"{name}.txt"
        reports.write_transcripts(path, rows, self._decode, self.config.evaluation.transcripts)

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def _say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def close(self) -> None:
        """Stop the worker and its engine."""
        if self.rollouts:
            self.rollouts.close()


def build_learner(config: TrainConfig, path: str) -> Learner:
    """Actor, critic (unless the method has none), loss and value estimator of a run."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = config.model
    shared: dict[str, Any] = {
        "attn_implementation": model.attn_implementation,
        "gradient_checkpointing": model.gradient_checkpointing,
    }
    torch.manual_seed(config.seed)
    with _named("model.path", path):
        actor = CausalLMActor.from_pretrained(path, temperature=config.collector.temperature, **shared)
    critic = None
    if config.method.critic:
        critic_path = model_path(model.critic_path) if model.critic_path else path
        with _named("model.critic_path", critic_path):
            critic = CausalLMCritic.from_pretrained(critic_path, **shared)
    with _refused("method.loss"):
        loss = call_target(config.method.loss, actor, critic, functional=False)
    with _refused("method.value_estimator"):
        estimator = call_target(config.method.value_estimator, value_network=None)
    with _refused("method"):
        return Learner(config.learner, actor, critic, loss, estimator)


def load_tokenizer(path: str) -> Any:
    """The policy's tokenizer, which stands beside its weights."""
    from transformers import AutoTokenizer

    with _named("model.path", path):
        return AutoTokenizer.from_pretrained(path)


@contextmanager
def _refused(setting: str) -> Iterator[None]:
    """A target that cannot be made of its settings, or not found, is the fault of the config: say of which part."""
    try:
        yield
    except (TypeError, ValueError, LookupError, ImportError, InstantiationException) as error:
        raise ConfigError(f"{setting}: {error}") from error


@contextmanager
def _named(setting: str, path: str) -> Iterator[None]:
    """A model that cannot be loaded is the fault of a setting: say which."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{setting}={path!r} cannot be loaded: {error}\nGive a Hugging Face folder (config, weights, tokenizer), a "
            "hub name that this machine can reach, or asset:search_tiny or asset:math_tiny"
        ) from error


def progress_line(metrics: Mapping[str, float], total: int) -> str:
    """One line a step for a person at a terminal."""
    m = metrics
    train = sum(m[f"time_{part}"] for part in ("frozen", "forward", "backward", "optimizer"))
    task = "  ".join(
        f"{label} {m[name]:.2f}"
        for name, label in (("em", "em"), ("search_rate", "search"), ("code_rate", "code"))
        if name in m
    )
    kept = f"kept {m['kept_fraction']:.3f}" if "loss_actor" in m else "critic warm-up"
    return (
        f"{int(m['version']):4d}/{total}  reward {m['reward']:.3f}  {task}  stale {m['staleness_mean']:.1f}  {kept}  "
        f"{m['policy_tokens'] / m['time_step']:.0f} tok/s  | step {m['time_step']:.1f} s: wait {m['time_wait']:.1f}, "
        f"frozen {m['time_frozen']:.1f}, fwd {m['time_forward']:.1f}, bwd {m['time_backward']:.1f}, "
        f"sync {m['time_sync']:.1f}, other {m['time_step'] - m['time_wait'] - m['time_sync'] - train:.1f}  | "
        f"row {m['row_seconds_total']:.1f} s: engine {m['row_seconds_engine']:.1f}, tool {m['row_seconds_tool']:.2f}"
    )
