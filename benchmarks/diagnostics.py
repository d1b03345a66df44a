"""What the diagnostics of a batch cost: their share of the learner's step, for every method, on one CPU thread.

The learner trains the shipped model on synthetic episodes of about the size that ``make train-search`` sees. The step
is the learner's alone, without the wait for rollouts and the push of weights. Times are medians over steps of the
process's CPU time, so that other processes count as little as possible. ``--quick`` takes fewer methods and steps.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import torch
import transformers
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tensordict import TensorDict
from torchrl import torchrl_logger

from torchrl_copc.training import learner as learner_module
from torchrl_copc.training.config import TrainConfig
from torchrl_copc.training.trainer import build_learner, model_path
from torchrl_copc.trajectory import Completion, Episode, Prompt

CONFIGS = Path(__file__).parents[1] / "configs"
QUICK = ("copc", "brace", "grpo")
PROMPT, TURNS, SAMPLED, OBSERVED = 60, 2, 10, 60  # tokens; SAMPLED and OBSERVED on average, per turn
VERSIONS_OLD = 4


def episode(number: int, config: TrainConfig, vocabulary: int) -> TensorDict:
    """Two turns around an observation, with behaviour log-probs near those of a uniform policy."""
    generator = torch.Generator().manual_seed(number)

    def ids(average: int) -> tuple[int, ...]:
        size = int(torch.randint(average // 2, 2 * average - average // 2, (), generator=generator))
        return tuple(torch.randint(2, vocabulary, (size,), generator=generator).tolist())

    group = number // config.collector.group_size
    rollout = Episode(f"row-{number}", Prompt(f"p{group}", "?", ("!",)), f"g{group}")
    rollout.append_context(ids(PROMPT))
    for turn in range(TURNS):
        if turn:
            rollout.append_context(ids(OBSERVED))
        sampled = ids(SAMPLED)
        log_probs = (-7.0 + torch.randn(len(sampled), generator=generator)).tolist()
        versions = (number % (VERSIONS_OLD + 1),) * len(sampled)
        rollout.append_completion(Completion(sampled, tuple(log_probs), versions, "stop"))
    rollout.finish(float(number % 3 == 0), "stop")
    return rollout.to_row()


def measure(method: str, steps: int) -> tuple[float, float, float]:
    """Milliseconds of the diagnostics and of the whole step, and the median share."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        composed = compose(
            "train", overrides=[f"method={method}", "learner.device=cpu", "learner.critic_warmup_batches=0"]
        )
    config = OmegaConf.to_object(composed)
    assert isinstance(config, TrainConfig)
    path = model_path(config.model.path)
    learner = build_learner(config, path)
    learner.dump_dir = Path(tempfile.gettempdir())
    vocabulary = transformers.AutoConfig.from_pretrained(path).vocab_size
    rows = [episode(i, config, vocabulary) for i in range(config.collector.batch_rows)]
    learner.update(rows, version=VERSIONS_OLD)  # compilation is no part of the measurement
    with patch.object(learner_module, "perf_counter", time.process_time):
        metrics = [learner.update(rows, version=VERSIONS_OLD) for _ in range(steps)]
    cost, whole = ([m[f"time_{name}"] for m in metrics] for name in ("diagnostics", "total"))
    share = statistics.median(a / b for a, b in zip(cost, whole, strict=True))
    return 1e3 * statistics.median(cost), 1e3 * statistics.median(whole), share


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer methods and steps, under half a minute")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torchrl_logger.setLevel(logging.ERROR)
    every = sorted(file.stem for file in (CONFIGS / "method").glob("*.yaml"))
    print(f"{'method':<12}{'diagnostics, ms':>17}{'step, ms':>12}{'share':>10}", flush=True)
    for method in QUICK if arguments.quick else every:
        cost, whole, share = measure(method, steps=3 if arguments.quick else 7)
        print(f"{method:<12}{cost:>17.2f}{whole:>12.0f}{share:>10.2%}", flush=True)


if __name__ == "__main__":
    main()
