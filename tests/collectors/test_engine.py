"""The real engine on the tiny checkpoint: exact ids, honest log-probs, clear refusals."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from torchrl_copc.collectors.engine import EngineRequestError, RolloutEngine

pytestmark = pytest.mark.engine
PROMPT = [5, 60, 61, 62, 9, 40]


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


def reference_log_probs(model: Any, token_ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    ids = torch.tensor([token_ids])
    with torch.no_grad():
        log_probs = (model(ids).logits[0, :-1] / temperature).log_softmax(-1)
    return log_probs.gather(-1, ids[0, 1:, None])[:, 0]


def test_it_is_a_rollout_engine(engine_thread: Any) -> None:
    assert isinstance(engine_thread.engine, RolloutEngine)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_distribution_sampled_from(
    engine_thread: Any, model: Any, temperature: float
) -> None:
    out = engine_thread.call(
        "generate", PROMPT, max_tokens=40, temperature=temperature, seed=1, request_id="logprobs"
    )
    assert len(out.token_ids) == 40 and out.finish_reason == "length"
    assert set(out.versions) == {engine_thread.call("weight_version")}
    reference = reference_log_probs(model, PROMPT + list(out.token_ids), temperature)[len(PROMPT) - 1 :]
    torch.testing.assert_close(torch.tensor(out.log_probs), reference, atol=2e-5, rtol=0)


def test_score_is_the_log_prob_at_temperature_one(engine_thread: Any, model: Any) -> None:
    sequences = [PROMPT, [7, 8], [11] * 50]
    for sequence, scores in zip(sequences, engine_thread.call("score", sequences), strict=True):
        torch.testing.assert_close(
            torch.tensor(scores), reference_log_probs(model, sequence), atol=2e-5, rtol=0
        )


def test_a_seed_reproduces_a_turn_whatever_else_runs(engine_thread: Any) -> None:
    def sample(seed: int, name: str) -> Any:
        return engine_thread.submit("generate", PROMPT, max_tokens=30, seed=seed, request_id=name)

    alone = sample(3, "alone").result()
    together = [sample(seed, f"seed-{seed}") for seed in (4, 3, 5)]
    tokens = [future.result().token_ids for future in together]
    assert tokens[1] == alone.token_ids
    assert len(set(tokens)) == 3


def test_more_seeded_prompts_than_fit_one_step_are_all_served(engine_thread: Any) -> None:
    # Prompts cut into chunks would kill vLLM's CPU worker as soon as a request has a seed.
    prompts = [[5 + (i + j) % 200 for j in range(400)] for i in range(24)]
    futures = [
        engine_thread.submit("generate", prompt, max_tokens=4, seed=i, request_id=f"crowd-{i}")
        for i, prompt in enumerate(prompts)
    ]
    assert [len(future.result(120).token_ids) for future in futures] == [4] * 24


def test_temperature_zero_is_greedy(engine_thread: Any, model: Any) -> None:
    out = engine_thread.call("generate", PROMPT, max_tokens=12, temperature=0.0, request_id="greedy")
    expected = list(PROMPT)
    for _ in range(12):
        with torch.no_grad():
            expected.append(int(model(torch.tensor([expected])).logits[0, -1].argmax()))
    assert list(out.token_ids) == expected[len(PROMPT) :]


def test_a_stop_id_ends_the_turn_and_is_part_of_it(engine_thread: Any) -> None:
    free = engine_thread.call("generate", PROMPT, max_tokens=40, seed=8, request_id="free").token_ids
    stop = free[10]
    out = engine_thread.call(
        "generate", PROMPT, max_tokens=40, seed=8, stop_token_ids=[stop], request_id="stopped"
    )
    assert out.finish_reason == "stop"
    assert out.token_ids == free[: free.index(stop) + 1]


def test_a_stop_string_of_several_tokens_ends_the_turn_at_the_token_that_completes_it(
    engine_thread: Any, tiny_model_dir: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    # Ids that decode to plain letters, so that the text below is the same however it is cut into tokens.
    for seed in range(200):
        free = engine_thread.call(
            "generate", PROMPT, max_tokens=24, seed=seed, request_id=f"text-{seed}"
        ).token_ids
        pieces = [tokenizer.decode([token]) for token in free]
        starts = [i for i in range(20) if all(p.isascii() and p.isalpha() for p in pieces[i : i + 2])]
        tag = "".join(pieces[starts[0] : starts[0] + 2]) if starts else ""
        if starts and tokenizer.decode(free[: starts[0] + 2]).count(tag) == 1:
            break
    else:
        pytest.fail("no two neighbouring letter tokens in 200 samples")
    out = engine_thread.call(
        "generate", PROMPT, max_tokens=24, seed=seed, stop_strings=[tag], request_id="string"
    )
    assert out.finish_reason == "stop"
    assert out.token_ids == free[: starts[0] + 2]


def test_a_turn_may_fill_the_engine_to_its_limit(engine_thread: Any) -> None:
    room = 512 - len(PROMPT) * 84
    out = engine_thread.call("generate", PROMPT * 84, max_tokens=room, request_id="long")
    assert len(out.token_ids) == room and out.finish_reason == "length"


def test_an_aborted_request_returns_what_it_sampled(engine_thread: Any) -> None:
    future = engine_thread.submit("generate", PROMPT, max_tokens=500, request_id="to-abort")
    time.sleep(0.2)
    engine_thread.call("abort", "to-abort")
    out = future.result(30)
    assert out.finish_reason == "abort"
    assert len(out.token_ids) == len(out.log_probs) == len(out.versions) < 500


@pytest.mark.parametrize(
    ("token_ids", "settings", "message"),
    [
        ([5] * 512, {}, r"512 tokens.*engine\.max_model_len=512"),
        ([5] * 500, {"max_tokens": 13}, r"500 tokens and max_tokens=13.*engine\.max_model_len=512"),
        ([], {}, "empty prompt"),
        ([5, 1_000_000], {}, "token id 1000000"),
        ([-1], {}, "token id -1"),
        ([5], {"max_tokens": 0}, "max_tokens=0"),
        ([5], {"temperature": -1.0}, r"temperature=-1\.0"),
    ],
)
def test_a_bad_request_is_refused_and_the_engine_goes_on(
    engine_thread: Any, token_ids: list[int], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineRequestError, match=message):
        engine_thread.call("generate", token_ids, request_id="bad", **{"max_tokens": 4, **settings})
    assert len(engine_thread.call("generate", [5], max_tokens=4, request_id="good").token_ids) == 4
