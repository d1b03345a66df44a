from __future__ import annotations

import asyncio
import importlib.util
import re
from pathlib import Path

import pytest
from torchrl.envs.utils import check_env_specs

from torchrl_copc.trajectory import Prompt

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("new_environment", ROOT / "examples" / "new_environment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_prints_an_exact_transcript(example, capsys):
    example.main()
    out = capsys.readouterr().out
    assert "I need <calc> 17 * 3 + 4 </calc>\n<result>55</result>\n<answer> 55 </answer>" in out
    assert "dropped" not in out and "reward 1.0" in out


@pytest.mark.parametrize(
    ("turns", "reward", "reason"),
    [
        (["<answer> 5 </answer>"], 0.0, "stop"),
        (["hm", "<answer> 4 </answer>"], 1.0, "stop"),
        (["<calc> 2 + </calc>", "<calc> 2 ** 9 </calc>", "<calc> 2 + 2 </calc>"], 0.0, "length"),
    ],
)
def test_episodes(example, turns, reward, reason):
    env = example.CalculatorEnv(example.byte_tokenizer())
    episode = asyncio.run(example.play(env, Prompt("p", "2 + 2?", ("4",)), turns))
    assert (episode.reward, episode.finish_reason, episode.metrics["correct"]) == (reward, reason, reward)


def test_it_is_a_torchrl_environment(example):
    check_env_specs(example.CalculatorEnv(example.byte_tokenizer(), prompts=(Prompt("p", "2 + 2?", ("4",)),)))


def test_the_guide_shows_the_example_as_it_is():
    guide = (ROOT / "docs" / "howto" / "new_environment.md").read_text()
    code = (ROOT / "examples" / "new_environment.py").read_text()
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert blocks
    for block in blocks:
        assert block in code
