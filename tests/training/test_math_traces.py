"""The tiny maths model: its scripted traces, a shortened build, and the model shipped in the package."""

from __future__ import annotations

import asyncio
import json
import random
from importlib import resources
from pathlib import Path

import hydra
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_copc.envs.math.env import MathEnv
from torchrl_copc.envs.math.protocol import TINY_TAGS
from torchrl_copc.envs.sandbox import Sandbox, SandboxConfig
from torchrl_copc.training.math_traces import SOLUTIONS, MathCurriculum, TraceConfig, TraceWriter, solution_of
from torchrl_copc.training.sft import EOS, PAD, SFTConfig, TinyModelConfig, run, train_tokenizer
from torchrl_copc.training.sft_measure import measure
from torchrl_copc.training.traces import SFTRow
from torchrl_copc.trajectory import Prompt

CONFIGS = Path(__file__).parents[2] / "configs"
ASSET = Path(str(resources.files("torchrl_copc") / "assets" / "math_tiny"))


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> SFTConfig:
    """The shipped model's experiment with a few small steps."""
    overrides = [
        "experiment=sft_math_tiny",
        f"output_dir={tmp_path_factory.mktemp('sft')}",
        "task.train.size=300",
        "task.test.size=12",
        "reading.steps=2",
        "reading.batch_rows=8",
        "habits.steps=2",
        "habits.batch_rows=8",
        "eval_questions=2",
    ]
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return OmegaConf.to_object(hydra.compose("sft", overrides=overrides))


@pytest.fixture(scope="module")
def prompts(config) -> list[Prompt]:
    return instantiate(config.task["train"], _convert_="all")


@pytest.fixture(scope="module")
def sandbox():
    box = Sandbox(SandboxConfig(workers=1))
    asyncio.run(box.start())
    yield box
    asyncio.run(box.close())


@pytest.fixture(scope="module")
def tokenizer(config, prompts):
    return train_tokenizer(MathCurriculum(prompts, {}).tokenizer_texts(), config.model, TINY_TAGS)


@pytest.fixture(scope="module")
def env(config, tokenizer, sandbox):
    names = ("protocol", "max_turns", "max_turn_tokens", "max_observation_tokens", "max_response_tokens")
    return MathEnv(tokenizer, sandbox, **{name: config.task["env"][name] for name in names})


def write_rows(env, prompts, count: int, **shares: float) -> list[SFTRow]:
    config = TraceConfig(1, count, **shares)
    return asyncio.run(TraceWriter(env, prompts, config, random.Random(0)).batch())


def test_good_code_prints_the_answer_and_poor_code_seldom_does(prompts, sandbox):
    async def printed(code: str) -> str:
        return (await sandbox.run(code, print_last=True)).stdout.strip()

    assert {prompt.metadata["task"] for prompt in prompts} == set(SOLUTIONS)
    poor = right = 0
    for prompt in prompts[:36]:
        solution = solution_of(prompt)
        codes = [solution.write(code, prompt.question) for code in (solution.good, *solution.poor)]
        good_output, *others = [asyncio.run(printed(code)) for code in codes]
        assert good_output == prompt.answers[0], codes[0]
        poor += len(others)
        right += sum(output == prompt.answers[0] for output in others)
    assert right < 0.15 * poor


def test_problems_that_cannot_be_solved_are_named():
    with pytest.raises(ValueError, match="no traces can be written for 'sudoku'"):
        solution_of(Prompt("p", "?", ("1",), {"task": "sudoku"}))
    with pytest.raises(ValueError, match=r"no 'number .* in 'How many bits"):
        SOLUTIONS["count_bits"].write("{0}", "How many bits?")


def test_traces_copy_numbers_and_output_id_for_id(env, prompts):
    for row in write_rows(env, prompts, 40, direct=0.0, good_code=1.0, random_output=0.5):
        starts = [i for i, on in enumerate(row.learn) if on and (i == 0 or not row.learn[i - 1])]
        assert len(starts) == 2 and row.learn[-1]
        code, answer = (env.codec.decode(row.token_ids[i:]) for i in starts)
        output = code.split("<output>")[1].split("</output>")[0]
        assert answer == rf"\boxed{{{output}}}{EOS}"
        ids = list(env.codec.ordinary(output))
        assert row.token_ids[-len(ids) - 2 : -2] == ids
        assert sum(row.token_ids[i : i + len(ids)] == ids for i in range(len(row.token_ids))) >= 2


def test_traces_show_the_shares_they_are_asked_for(env, prompts):
    rows = write_rows(env, prompts, 300, direct=0.6, good_code=0.5)
    texts = [env.codec.decode(row.token_ids) for row in rows]
    assert sum("<code>" not in text for text in texts) / 300 == pytest.approx(0.6, abs=0.1)
    assert sum("<output>" in text for text in texts) / 300 == pytest.approx(0.2, abs=0.08)
    assert all(text.endswith((EOS, "</code>")) for text in texts)


def test_every_number_of_three_digits_is_one_token(tokenizer, config):
    numbers = [f"{number:0{width}d}" for width in (1, 2, 3) for number in range(10**width)]
    assert all(len(tokenizer.encode(number, add_special_tokens=False)) == 1 for number in numbers)
    assert len(tokenizer.encode("1234567", add_special_tokens=False)) == 3
    assert len(tokenizer) == config.model.vocab_size


def test_digits_may_also_stand_alone():
    model = TinyModelConfig(vocab_size=300, digits_per_token=1)
    tokenizer = train_tokenizer(iter(["1234567 " * 9]), model, TINY_TAGS)
    assert len(tokenizer.encode("1234567", add_special_tokens=False)) == 7


def test_a_shortened_build_loads_in_transformers(config):
    threads = torch.get_num_threads()
    run(config)
    torch.set_num_threads(threads)
    built = Path(config.output_dir)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(built), AutoTokenizer.from_pretrained(built)
    assert model.config.vocab_size == len(tokenizer) == config.model.vocab_size
    provenance = json.loads((built / "provenance.json").read_text())
    assert provenance["command"] == "python scripts/sft.py experiment=sft_math_tiny"
    assert set(provenance["held_out"]["good_turn_then_greedy"]) >= {"correct", "reward", "ran_code"}
    assert provenance["held_out"]["good_turn_then_greedy"]["ran_code"] == 1.0


def test_shipped_model_is_small_and_says_where_it_comes_from():
    assert sum(file.stat().st_size for file in ASSET.iterdir()) < 10_000_000
    provenance = json.loads((ASSET / "provenance.json").read_text())
    assert provenance["command"] == "python scripts/sft.py experiment=sft_math_tiny"
    tokenizer = AutoTokenizer.from_pretrained(ASSET)
    assert [len(tokenizer.encode(tag, add_special_tokens=False)) for tag in (PAD, EOS, *TINY_TAGS)] == [1] * 8


@pytest.mark.slow
def test_shipped_model_copies_well_but_runs_little_code(config, sandbox):
    names = ("protocol", "max_turns", "max_turn_tokens", "max_observation_tokens", "max_response_tokens")
    settings = {name: config.task["env"][name] for name in names}
    env = MathEnv(AutoTokenizer.from_pretrained(ASSET), sandbox, **settings)
    model = AutoModelForCausalLM.from_pretrained(ASSET, dtype=torch.float32).eval()
    prompts = instantiate({**config.task["test"], "size": 60}, _convert_="all")
    good_turn = MathCurriculum(prompts, {}).good_turn
    copied = asyncio.run(measure(model, env, prompts, temperature=0.0, first_turn=good_turn))
    alone = asyncio.run(measure(model, env, prompts, temperature=1.0))
    assert copied["correct"] > 0.8
    assert 0.2 < alone["ran_code"] < 0.7
    assert alone["correct"] < copied["correct"] - 0.3
