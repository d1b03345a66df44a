"""Methods of the study: each is its file in ``configs/method``, on a base that all share."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from torchrl_copc.training.config import TrainConfig

# COPC beside the default of its config (full advantage, step trace): other forms, and wider intervals.
VARIANTS: dict[str, tuple[str, ...]] = {
    "copc_continuation": ("method=copc", "method.loss.advantage=continuation"),
    "copc_product": ("method=copc", "method.loss.trace=product"),
    "copc_continuation_product": (
        "method=copc",
        "method.loss.advantage=continuation",
        "method.loss.trace=product",
    ),
    "copc_wide_advantage": ("method=copc", "method.loss.eta_advantage=2.5"),  # weights in [0, 2.4]
    "copc_wide": ("method=copc", "method.loss.eta_advantage=2.5", "method.loss.eta_policy=2.5"),
}

# What an experiment sets in a training run. A method's own settings win over it, as there.
ConfigStore.instance().store(
    group="experiment",
    name="study",
    package="_global_",
    node={
        "collector": {"batch_rows": 64, "group_size": 8, "max_staleness": 64},
        "learner": {"aggregation": "token_mean", "minibatches_per_batch": 2},
    },
)


def method_config(configs: Path, method: str, *overrides: str) -> TrainConfig:
    """Compose a method with the study's base.

    Args:
        configs: the folder ``configs``.
        method: a file in ``configs/method``, or one of :data:`VARIANTS`.
        *overrides: as on the command line of ``scripts/train_search.py``; they win over the method.
    """
    chosen = VARIANTS.get(method, (f"method={method}",))
    with initialize_config_dir(str(configs.resolve()), version_base="1.3"):
        cfg: Any = compose("train", overrides=["experiment=study", *chosen, *overrides])
    return cast(TrainConfig, OmegaConf.to_object(cfg))
