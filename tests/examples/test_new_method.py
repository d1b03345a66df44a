from __future__ import annotations

import importlib.util
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from lm_cases import llama, row
from omegaconf import OmegaConf

from torchrl_copc.models.causal_lm import CausalLMActor
from torchrl_copc.training.config import check
from torchrl_copc.training.learner import Learner
from torchrl_copc.training.rollouts import call_target

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("new_method", ROOT / "examples" / "new_method.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["new_method"] = module  # as with PYTHONPATH=examples
    spec.loader.exec_module(module)
    yield module
    del sys.modules["new_method"]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_value_and_gradient_are_the_formula(example):
    current = torch.tensor([-2.0, 0.1, 3.0, 800.0], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    term, kept = example.clipped_weight(current, current, advantage, eps_high=1.0)
    weights = [min(math.exp(x), 2.0) if x < 700 else 2.0 for x in current.tolist()]
    formula = [-w * a * x for w, a, x in zip(weights, advantage.tolist(), current.tolist(), strict=True)]
    torch.testing.assert_close(term, torch.tensor(formula, dtype=torch.float64))
    term.sum().backward()
    torch.testing.assert_close(current.grad, -torch.tensor(weights, dtype=torch.float64) * advantage)
    assert kept.all()


def test_the_example_raises_the_rewarded_actions(example, capsys):
    example.main()
    numbers = re.search(r"gradient of the logits: \[(.*)\]", capsys.readouterr().out)
    first, second, third, fourth = (float(x) for x in numbers[1].split(","))
    assert second < first < 0 < third == fourth  # the unlikely one gets the larger weight


def test_the_config_trains_through_the_systems_learner(example):
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config = compose(
            "train",
            overrides=[
                f"hydra.searchpath=[file://{ROOT}/examples/configs]",
                "method=cispo",
                "learner.device=cpu",
            ],
        )
    config = OmegaConf.to_object(config)
    check(config)
    actor = CausalLMActor(llama(0))
    loss = call_target(config.method.loss, actor, None, functional=False)
    estimator = call_target(config.method.value_estimator, value_network=None)
    learner = Learner(config.learner, actor, None, loss, estimator)
    metrics = learner.update([row(seed, group=seed // 4) for seed in range(8)])
    assert metrics["grad_norm_actor"] > 0 and metrics["kept_fraction"] == 1


def test_the_guide_shows_the_example_as_it_is():
    guide = (ROOT / "docs/howto/new_method.md").read_text()
    code = (ROOT / "examples/new_method.py").read_text()
    config = (ROOT / "examples/configs/method/cispo.yaml").read_text()
    blocks = re.findall(r"```(python|yaml)\n(.*?)```", guide, re.DOTALL)
    assert len(blocks) == 3
    for language, block in blocks:
        assert block in (code if language == "python" else config)
