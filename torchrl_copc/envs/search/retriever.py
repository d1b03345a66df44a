"""Passages, the protocol every retriever follows, and the local engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class RetrieverError(RuntimeError):
    """A search that failed for a reason outside the episode: a dead, slow or misconfigured retriever."""


@dataclass(frozen=True, slots=True)
class Passage:
    """One retrievable piece of text.

    Args:
        id: unique within the corpus; breaks ties between equal scores.
        title: what the passage is about.
        text: the passage itself, without the title.
    """

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """Quoted title, newline, text: the form of JSONL corpora and of the server's documents."""
        return f'"{" ".join(self.title.split())}"\n{self.text}'

    @classmethod
    def from_contents(cls, passage_id: str, contents: str) -> Passage:
        """Inverse of :attr:`contents`; text without a first title line has an empty title.

        Example:
            >>> Passage.from_contents("7", '"Nile"\\nA river.')
            Passage(id='7', title='Nile', text='A river.')
        """
        title, newline, text = contents.partition("\n")
        if not newline:
            return cls(passage_id, "", contents)
        title = title.strip()
        if len(title) >= 2 and title[0] == title[-1] == '"':
            title = title[1:-1]
        return cls(passage_id, title, text)


@dataclass(frozen=True, slots=True)
class ScoredPassage:
    """A passage and how well it matches; scores compare within one result list only."""

    passage: Passage
    score: float


class Retriever(Protocol):
    """What an environment needs of a search engine."""

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[ScoredPassage]]:
        """At most ``top_k`` passages for each query, best first; none for a query without a word in it.

        Raises:
            RetrieverError: if the search could not be made.
        """
        ...


def read_jsonl_corpus(path: str | Path) -> list[Passage]:
    """Passages of a JSON-lines file, one ``{"id": ..., "contents": "\\"title\\"\\ntext"}`` a line.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: with file, line and remedy, if a line cannot be used.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f'no corpus at {path}; pass a JSONL file with {{"id", "contents"}} on each line, or "factbook"'
        )
    passages: dict[str, Passage] = {}
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            passage = _parse_line(line, f"{path}, line {number}")
            if passage.id in passages:
                raise ValueError(f"{path}, line {number}: id {passage.id!r} is taken; make the ids unique")
            passages[passage.id] = passage
    if not passages:
        raise ValueError(f'{path} holds no passage; write one {{"id", "contents"}} object a line')
    return list(passages.values())


def _parse_line(line: str, where: str) -> Passage:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error}); write one object a line, newlines escaped") from error
    if not isinstance(record, dict) or not {"id", "contents"} <= record.keys():
        keys = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise ValueError(f'{where}: found {keys}, needed the keys "id" and "contents"')
    if not isinstance(record["contents"], str):
        raise ValueError(f'{where}: "contents" is {type(record["contents"]).__name__}; it must be text')
    return Passage.from_contents(str(record["id"]), record["contents"])


class LocalRetriever:
    """BM25 over an in-memory index (tantivy), stemmed for English; deterministic, ties broken by passage id.

    Title and text are indexed together. Nothing in a query is syntax.

    Args:
        passages: the corpus; a few hundred thousand passages fit comfortably in memory.

    Raises:
        ImportError: if tantivy is not installed.
        ValueError: if the corpus is empty.
    """

    def __init__(self, passages: Iterable[Passage]) -> None:
        try:
            import tantivy
        except ImportError as error:
            raise ImportError('local search needs tantivy: pip install "torchrl_copc[envs]"') from error
        # Sorted, so that document number order is id order.
        self.passages = sorted(passages, key=lambda passage: passage.id)
        if not self.passages:
            raise ValueError("a retriever needs at least one passage")
        schema = tantivy.SchemaBuilder()
        schema.add_integer_field("number", stored=True)
        schema.add_text_field("contents", tokenizer_name="en_stem", index_option="freq")
        self._index = tantivy.Index(schema.build())
        writer = self._index.writer(heap_size=64_000_000, num_threads=1)
        for number, passage in enumerate(self.passages):
            writer.add_document(tantivy.Document(number=number, contents=passage.contents))
        writer.commit()
        writer.wait_merging_threads()
        self._index.reload()
        self._searcher = self._index.searcher()

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[ScoredPassage]]:
        """At most ``top_k`` passages for each query, best first."""
        return [self._search(query, top_k) for query in queries]

    def _search(self, query: str, top_k: int) -> list[ScoredPassage]:
        # Lower case and no punctuation: neither AND/OR/NOT nor quotes nor fields mean anything to the parser.
        words = re.sub(r"[\W_]+", " ", query).lower().strip()
        if not words or top_k < 1:
            return []
        parsed, _ = self._index.parse_query_lenient(words, ["contents"])
        limit = top_k + 8
        while True:
            hits = self._searcher.search(parsed, limit, count=False).hits
            # Passages that tie with the last one wanted may lie beyond the limit; the index's layout must not
            # decide which of them is returned.
            if len(hits) < limit or hits[-1][0] < hits[top_k - 1][0]:
                break
            limit *= 4
        worst = hits[min(top_k, len(hits)) - 1][0] if hits else 0.0
        found = [(-score, self._searcher.doc(at)["number"][0]) for score, at in hits if score >= worst]
        return [ScoredPassage(self.passages[number], -negated) for negated, number in sorted(found)[:top_k]]
