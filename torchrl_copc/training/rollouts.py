"""Rank 0's side of a run: the rollout worker, the collector and the weights it is given."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from hydra.utils import get_method, instantiate
from torch import Tensor

from torchrl_copc.collectors.engine import make_engine
from torchrl_copc.collectors.prompts import PromptStream
from torchrl_copc.collectors.rollout import AsyncRolloutCollector
from torchrl_copc.collectors.weights import PushReport, WeightPublisher
from torchrl_copc.collectors.worker import RolloutWorker
from torchrl_copc.training.config import TrainConfig
from torchrl_copc.trajectory import Prompt


def call_target(spec: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function or class that ``_target_`` names, with the rest of ``spec`` as keyword arguments.

    Values that name a ``_target_`` themselves, such as a policy channel with ``_partial_``, are made first.
    """
    settings = {
        key: instantiate(value, _convert_="all") if isinstance(value, dict) and "_target_" in value else value
        for key, value in spec.items()
        if key != "_target_"
    }
    return get_method(spec["_target_"])(*args, **settings, **kwargs)


class Rollouts:
    """A started worker with the collector of one run on it.

    Args:
        cfg: the run's configuration.
        model_path: folder or hub name the engine starts from; its tokenizer is the environment's.
        tokenizer: the same tokenizer, for the probe.
        prompts: the training prompts.
        log_path: the worker's log.
    """

    def __init__(
        self, cfg: TrainConfig, model_path: str, tokenizer: Any, prompts: Sequence[Prompt], log_path: Path
    ) -> None:
        self.worker = start_worker(cfg, model_path, log_path)
        self.publisher = WeightPublisher(self.worker.call, cfg.engine, probe_sequences(prompts, tokenizer))
        self.collector = AsyncRolloutCollector(
            self.worker,
            PromptStream(prompts, seed=cfg.seed),
            batch_rows=cfg.collector.batch_rows,
            group_size=cfg.collector.group_size,
            max_staleness=cfg.collector.max_staleness,
            lag=cfg.collector.lag,
            max_concurrent_rows=cfg.collector.max_concurrent_rows,
            row_deadline=cfg.collector.row_deadline,
            on_deadline=cast(Literal["cut", "requeue"], cfg.collector.on_deadline),
            max_attempts=cfg.collector.max_attempts,
            temperature=cfg.collector.temperature,
            seed=cfg.seed,
        )
        self._calibrated = False
        # Weights and their probe scores by version, back to the one the engine has to hold.
        self._history: OrderedDict[int, tuple[dict[str, Tensor], list[list[float]]]] = OrderedDict()

    @property
    def probe(self) -> list[list[int]]:
        """The fixed token batch on which engine and learner must agree after every push."""
        return self.publisher.probe

    def publish(
        self, weights: dict[str, Tensor], scores: list[list[float]], version: int
    ) -> PushReport | None:
        """Give the engine the weights it should hold while the learner is at ``version``.

        Args:
            weights: the learner's at ``version``, full tensors by Hugging Face name.
            scores: the learner's log-probs of :attr:`probe`.

        Returns:
            what the push took, or None when the engine holds them already (a controlled lag's first versions).
        """
        self._history[version] = (weights, scores)
        wanted = self.collector.engine_version_for(version)
        for old in [v for v in self._history if v < wanted]:
            del self._history[old]
        if self._calibrated and self.worker.weight_version == wanted:
            return None
        held_weights, held_scores = self._history[wanted]
        push = self.publisher.publish if self._calibrated else self.publisher.calibrate
        self._calibrated = True
        return push(held_weights, wanted, lambda _: held_scores)

    def state_dict(self) -> dict[str, Any]:
        """The collector's frontier and buffer, and the weights a lagging engine still needs."""
        lagging = {} if self.collector.lag == 0 else dict(self._history)
        return {"collector": self.collector.state_dict(), "history": lagging}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`, before anything is published."""
        self.collector.load_state_dict(state["collector"])
        self._history = OrderedDict(state["history"])

    def close(self) -> None:
        """Stop the episodes and the worker."""
        try:
            self.collector.shutdown()
            self.publisher.close()
        finally:
            self.worker.shutdown()


def probe_sequences(prompts: Sequence[Prompt], tokenizer: Any) -> list[list[int]]:
    """Token batch of the log-prob probe: the task's own words, long enough to see every layer at work."""
    text = " ".join(prompt.question for prompt in prompts[:64])
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [ids[i : i + 64] for i in range(0, min(len(ids), 512), 64) if len(ids[i : i + 64]) > 1]


def start_worker(cfg: TrainConfig, model_path: str, log_path: Path) -> RolloutWorker:
    """Start the process that owns the engine and the environment."""
    engine = replace(cfg.engine, model=model_path)
    env = partial(call_target, cfg.task.env, tokenizer_path=model_path)
    # The engine's own deadline fires first: its error names the stage.
    return RolloutWorker(
        partial(make_engine, engine), env, log_path=log_path, stage_timeout=engine.start_timeout + 60
    ).start()
