"""Every shipped experiment composes, and settings that do not go together are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import get_method
from omegaconf import OmegaConf

from torchrl_copc.training.config import ConfigError, check, config_hash, resumed_config
from torchrl_copc.training.run_folder import RunFolder
from torchrl_copc.training.trainer import build_learner, model_path

CONFIGS = Path(__file__).parents[2] / "configs"


def composed(*overrides, entry="train"):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose(entry, overrides=list(overrides))


EXPERIMENTS = {
    "train": ("search_tiny", "search_smollm2", "search_llama3b"),
    "train_math": ("math_tiny", "math_smollm2", "math_qwen4b"),
}


@pytest.mark.parametrize(("entry", "experiment"), [(e, x) for e, found in EXPERIMENTS.items() for x in found])
@pytest.mark.parametrize("method", ["copc", "vcpo"])
def test_experiments_compose_and_their_targets_exist(entry, experiment, method):
    config = OmegaConf.to_object(composed(f"experiment={experiment}", f"method={method}", entry=entry))
    check(config)
    assert config.method.name == method
    for spec in (config.method.loss, config.method.value_estimator, config.task.env, config.task.train):
        assert callable(get_method(spec["_target_"]))


@pytest.mark.parametrize("experiment", EXPERIMENTS["train_math"])
def test_maths_experiments_average_over_responses_and_leave_room_for_the_prompt(experiment):
    config = OmegaConf.to_object(composed(f"experiment={experiment}", entry="train_math"))
    assert config.learner.aggregation == "response_mean"
    assert config.engine.max_model_len - config.task.env["max_response_tokens"] >= 256
    if experiment == "math_qwen4b":  # the paper's
        assert config.task.env["max_response_tokens"] == 38912 and config.task.env["max_turns"] == 8
        assert config.collector.batch_rows == 512 and config.evaluation.temperature == 0.6


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
        ("collector.group_size=0", "collector.group_size=0"),
        ("collector.lag=-1", "collector.lag=-1"),
        ("collector.row_deadline=0", "collector.row_deadline=0"),
        ("keep_checkpoints=0", "keep_checkpoints=0"),
        ("evaluation.num_questions=1", "evaluation.num_questions=1"),
        ("engine.max_model_len=300", "engine.max_model_len=300"),
        ("engine.model=somewhere", "engine.model='somewhere'"),
        ("learner.minibatches_per_batch=200", "collector.batch_rows="),
        ("collector.max_attempts=0", "collector.max_attempts=0"),
        ("method=grpo method.critic=true collector.group_size=1", "collector.group_size=1 with method=grpo"),
        ("collector.dynamic_sampling=true", "collector.group_size=1 with collector.dynamic_sampling=true"),
        ("method=grpo collector.group_size=1", "collector.group_size=1 with method=grpo"),
    ],
)
def test_contradictory_settings_are_refused_by_name(override, setting):
    with pytest.raises(ConfigError, match=setting):
        check(OmegaConf.to_object(composed(*override.split())))


def test_every_rank_needs_a_group(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    config = composed("method=dapo", "collector.batch_rows=16")
    with pytest.raises(ConfigError, match=r"collector.batch_rows=16 makes 2 groups .* 4 ranks need one each"):
        check(OmegaConf.to_object(config))
    monkeypatch.setenv("WORLD_SIZE", "2")  # three groups: the second rank gets one
    config = composed("method=dapo", "collector.batch_rows=24", "learner.minibatches_per_batch=10")
    with pytest.raises(ConfigError, match=r"a rank may get 8 rows \(whole groups of 8\)"):
        check(OmegaConf.to_object(config))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "method=m2po method.loss.variant=both",
            "method.loss: variant must be one of paper, code, got 'both'",
        ),
        ("method.loss.eps_low=-1", "method.loss: eps_low must be at least 0, got -1"),
        ("+method.loss.speed=3", "method.loss: .*unexpected keyword argument 'speed'"),
        ("method.loss._target_=torchrl_copc.objectives.NoLoss", "method.loss: .*NoLoss"),
        (
            "method=vtrace method.value_estimator.c_threshold=0",
            "method.value_estimator: a threshold of ratios",
        ),
        ("method.critic=false", "method: COPCEstimator needs values and there is no critic"),
    ],
)
def test_a_method_that_cannot_be_made_is_refused_by_the_part_of_its_config(override, message):
    config = OmegaConf.to_object(composed(*override.split(), "learner.device=cpu"))
    with pytest.raises(ConfigError, match=message):
        build_learner(config, model_path(config.model.path))


def test_the_hash_sees_what_is_computed_and_not_where():
    base = config_hash(composed())
    assert config_hash(composed("evaluation.transcripts=3", "engine.step_timeout=5", "threads=2")) == base
    assert config_hash(composed("seed=7", "run_name=x", "resume=runs/x", "logging.tensorboard=false")) == base
    assert config_hash(composed("method=copc_wo_rc")) != base
    assert config_hash(composed("learner.actor.lr=1e-5")) != base


@pytest.fixture
def checkpoint(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.write_config(composed("method=copc_wo_rc", "learner.actor.lr=0.003", "seed=5"))
    path = folder.path / "checkpoints" / "version_00000002"
    path.mkdir(parents=True)
    return path


def test_a_resumed_run_keeps_its_own_settings(checkpoint):
    cfg = resumed_config(checkpoint, ["resume=runs/latest", "total_versions=7", "logging.tensorboard=false"])
    assert (cfg.method.name, cfg.learner.actor.lr, cfg.seed, cfg.learner.seed) == ("copc_wo_rc", 0.003, 5, 5)
    assert cfg.total_versions == 7 and cfg.logging.tensorboard is False
    check(OmegaConf.to_object(cfg))


@pytest.mark.parametrize("override", ["method=copc", "collector.lag=1", "seed=1", "+learner.actor.lr=1e-5"])
def test_a_resumed_run_refuses_to_become_another(checkpoint, override):
    with pytest.raises(ConfigError, match=f"{override.replace('+', '.')} would make it another run"):
        resumed_config(checkpoint, [override])


def test_a_checkpoint_outside_a_run_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no run folder around it"):
        resumed_config(tmp_path / "backup" / "version_00000002", [])


@pytest.mark.parametrize(("model", "billions"), [("llama_3_2_3b", 3.213), ("qwen3_4b", 4.022)])
def test_architectures_have_the_published_number_of_parameters(model, billions):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture = OmegaConf.to_container(composed(f"model={model}").model.architecture)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture))
    assert sum(p.numel() for p in built.parameters()) / 1e9 == pytest.approx(billions, abs=5e-4)
