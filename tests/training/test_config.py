"""Every shipped experiment composes, and settings that do not go together are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import get_method
from omegaconf import OmegaConf

from torchrl_copc.training.config import ConfigError, check, config_hash

CONFIGS = Path(__file__).parents[2] / "configs"


def composed(*overrides):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", overrides=list(overrides))


@pytest.mark.parametrize("experiment", ["search_tiny", "search_smollm2", "search_llama3b"])
@pytest.mark.parametrize("method", ["copc", "copc_wo_rc"])
def test_experiments_compose_and_their_targets_exist(experiment, method):
    config = OmegaConf.to_object(composed(f"experiment={experiment}", f"method={method}"))
    check(config)
    assert config.method.name == method
    for spec in (config.method.loss, config.method.value_estimator, config.task.env, config.task.train):
        assert callable(get_method(spec["_target_"]))


def test_the_ablation_differs_from_copc_only_in_eta_advantage():
    copc, ablation = (
        OmegaConf.to_container(composed(f"method={m}").method, resolve=True) for m in ("copc", "copc_wo_rc")
    )
    assert ablation["loss"].pop("eta_advantage") == 0.0 == ablation["value_estimator"].pop("eta")
    assert copc["loss"].pop("eta_advantage") == 0.5 == copc["value_estimator"].pop("eta")
    assert {**ablation, "name": ""} == {**copc, "name": ""}


@pytest.mark.parametrize(
    ("override", "setting"),
    [
        ("collector.group_size=3", "collector.group_size=3"),
        ("collector.lag=9", "collector.lag=9"),
        ("collector.on_deadline=drop", "collector.on_deadline='drop'"),
        ("collector.temperature=0", "collector.temperature=0"),
        ("total_versions=0", "total_versions=0"),
    ],
)
def test_contradictory_settings_are_refused_by_name(override, setting):
    with pytest.raises(ConfigError, match=setting):
        check(OmegaConf.to_object(composed(override)))


def test_the_hash_sees_what_is_computed_and_not_where():
    base = config_hash(composed())
    assert config_hash(composed("seed=7", "run_name=x", "resume=runs/x", "logging.tensorboard=false")) == base
    assert config_hash(composed("method=copc_wo_rc")) != base
    assert config_hash(composed("learner.actor.lr=1e-5")) != base
