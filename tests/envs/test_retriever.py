from __future__ import annotations

import asyncio
import json
import random

import pytest
from env_cases import PASSAGES
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_copc.envs.search import HTTPRetriever, LocalRetriever, Passage, make_retriever
from torchrl_copc.envs.search.retriever import read_jsonl_corpus


def ids(retriever, query, top_k=3):
    (hits,) = asyncio.run(retriever.search([query], top_k))
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    return [hit.passage.id for hit in hits]


def test_the_passage_that_names_subject_and_fact_comes_first(retriever):
    assert ids(retriever, "capital of Mali")[0] == "mali-1"
    assert ids(retriever, "Chad: highest point?")[0] == "chad-2"
    assert ids(retriever, "CAPITALS Peru")[0] == "peru-1"  # case and plural do not matter


def test_queries_are_answered_in_order_and_none_is_fine(retriever):
    results = asyncio.run(retriever.search(["Lima", "", "Koussi"], 1))
    assert [[hit.passage.id for hit in hits] for hits in results] == [["peru-1"], [], ["chad-2"]]
    assert asyncio.run(retriever.search([], 3)) == []


@pytest.mark.parametrize("query", ["", "   ", '"!?"', "___", "–…’", "zzz"])
def test_a_query_without_a_known_word_finds_nothing(retriever, query):
    assert ids(retriever, query) == []


@pytest.mark.parametrize(
    "query",
    ['title:Mali"', "Mali AND NOT (", "+Mali -capital", "[Mali TO Peru]", "Mali^2 OR *", "Ma\\li~1 'x"],
)
def test_query_syntax_means_nothing(retriever, query):
    plain = "".join(c if c.isalnum() else " " for c in query).lower()
    assert ids(retriever, query) == ids(retriever, plain)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_any_text_is_a_query(query):
    assert len(ids(ANY_TEXT, query)) <= 3


ANY_TEXT = LocalRetriever(PASSAGES)


@pytest.mark.parametrize("top_k", [1, 3, 9, 40, 100])
def test_ties_are_broken_by_id_whatever_the_order_of_the_corpus(top_k):
    passages = [Passage(f"{i:03d}", "same", "twin text") for i in range(60)]
    passages += [Passage(f"x{i}", "other", f"twin of {i}") for i in range(3)]
    expected = None
    for seed in range(3):
        random.Random(seed).shuffle(passages)
        found = ids(LocalRetriever(passages), "same twin", top_k)
        assert found[: min(top_k, 60)] == [f"{i:03d}" for i in range(min(top_k, 60))]
        expected = expected or found
        assert found == expected


def test_an_empty_corpus_is_refused():
    with pytest.raises(ValueError, match="at least one passage"):
        LocalRetriever([])


@pytest.mark.parametrize(
    "passage",
    [
        Passage("1", "Nile", "A river.\nIn Africa."),
        Passage("1", 'The "Nile"', "A river."),
        Passage("1", "", "No title."),
        Passage("1", "Empty", ""),
    ],
)
def test_contents_round_trip(passage):
    assert Passage.from_contents("1", passage.contents) == passage


def test_contents_without_a_title_line_are_text():
    assert Passage.from_contents("1", "just text") == Passage("1", "", "just text")
    assert Passage.from_contents("1", 'Nile\n"A" river') == Passage("1", "Nile", '"A" river')


# JSONL corpora.


def test_a_jsonl_corpus_is_read(tmp_path):
    path = tmp_path / "c.jsonl"
    records = [{"id": 7, "contents": '"Nile"\nA river.'}, {"id": "b", "contents": "text", "url": "ignored"}]
    path.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    assert read_jsonl_corpus(path) == [Passage("7", "Nile", "A river."), Passage("b", "", "text")]


GOOD = '{"id": "1", "contents": "x"}'


@pytest.mark.parametrize(
    ("second_line", "message"),
    [
        ('{"id": "2", "contents": "x"', "line 2: not JSON .*one object a line"),
        ('{"id": "2", "text": "x"}', r"line 2: found \['id', 'text'\], needed the keys"),
        ("[1]", 'line 2: found list, needed the keys "id" and "contents"'),
        ('{"id": "2", "contents": 3}', 'line 2: "contents" is int; it must be text'),
        (GOOD, "line 2: id '1' is taken; make the ids unique"),
    ],
)
def test_a_bad_line_is_named_with_file_and_remedy(tmp_path, second_line, message):
    path = tmp_path / "c.jsonl"
    path.write_text(f"{GOOD}\n{second_line}\n")
    with pytest.raises(ValueError, match=rf"c\.jsonl, {message}"):
        read_jsonl_corpus(path)


def test_a_missing_or_empty_corpus_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r'no corpus at .*gone\.jsonl.*or "factbook"'):
        make_retriever(str(tmp_path / "gone.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl holds no passage"):
        make_retriever(str(tmp_path / "empty.jsonl"))


# Choosing by name.


def test_a_retriever_is_chosen_by_name():
    assert isinstance(make_retriever("http://127.0.0.1:1/retrieve", timeout=1.0), HTTPRetriever)
    assert ids(make_retriever("factbook", passage_words=40), "Mali capital Bamako")


def test_options_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"takes no retriever_options: \['timeout'\]"):
        make_retriever(str(tmp_path / "c.jsonl"), timeout=1.0)
    with pytest.raises(ValueError, match="is not an address"):
        HTTPRetriever("localhost:8001")
