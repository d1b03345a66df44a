"""Question-answering data sets: local files, or a hub data set through ``datasets``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torchrl_copc.trajectory import Prompt


class DataError(ValueError):
    """A record that cannot be used, with file, row and what to change."""


def load_qa(source: str, split: str = "train", limit: int | None = None) -> list[Prompt]:
    """Questions with gold answers from a ``.jsonl`` or ``.parquet`` file, or from a hub data set.

    Records are of one of two shapes: ``question`` with ``answer``, ``answers`` or ``golden_answers`` (a text or a list
    of texts), or the shape of ``PeterJinGo/nq_hotpotqa_train``: ``question`` with
    ``reward_model.ground_truth.target``. An ``id`` is kept, behind its ``data_source`` when that
    is there: merged data sets repeat ids.

    Args:
        source: path of a file, or hub name of a data set.
        split: split of a hub data set; a file has none.
        limit: at most so many records, from the first.

    Raises:
        FileNotFoundError: if ``source`` looks like a file and is none.
        DataError: for a record without question or gold answer, naming its row.
        ImportError: for a hub data set or a parquet file without ``datasets`` installed.
    """
    prompts: list[Prompt] = []
    seen: set[str] = set()
    for row, record in enumerate(_records(source, split)):
        if limit is not None and row >= limit:
            break
        prompt = _prompt(record, f"{source}, row {row}", f"{Path(source).stem}-{split}-{row}")
        if prompt.id in seen:
            raise DataError(f"{source}, row {row}: id {prompt.id!r} occurred before; ids must be unique")
        seen.add(prompt.id)
        prompts.append(prompt)
    if not prompts:
        raise DataError(f"{source}: no records in split {split!r}")
    return prompts


def _records(source: str, split: str) -> Iterable[Mapping[str, Any]]:
    path = Path(source)
    if path.suffix == ".jsonl":
        return _read_jsonl(path)
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"reading {source} needs datasets: pip install datasets (or give a .jsonl file)"
        ) from error
    if path.suffix == ".parquet":
        if not path.is_file():
            raise FileNotFoundError(f"{source} does not exist")
        records: Iterable[Mapping[str, Any]] = datasets.Dataset.from_parquet(source)
    else:
        records = datasets.load_dataset(source, split=split)
    return records


def _read_jsonl(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}, row {number}: not JSON ({error})") from error


def _prompt(record: Mapping[str, Any], where: str, default_id: str) -> Prompt:
    question = record.get("question")
    if not isinstance(question, str) or not question.strip():
        raise DataError(f"{where}: no `question` text; columns are {sorted(record)}")
    answers = _answers(record)
    if not answers:
        raise DataError(
            f"{where}: no gold answer; give `answer`, `answers` or `golden_answers` (a text or a list of texts)"
        )
    source = record.get("data_source")
    metadata = {"data_source": source} if source else {}
    prompt_id = str(record.get("id", default_id))
    if source:  # merged data sets number their records from the start again
        prompt_id = f"{source}-{prompt_id}"
    return Prompt(prompt_id, question.strip(), tuple(answers), metadata)


def _answers(record: Mapping[str, Any]) -> list[str]:
    found: Any = None
    for name in ("golden_answers", "answers", "answer"):
        if record.get(name) is not None:
            found = record[name]
            break
    if found is None and isinstance(record.get("reward_model"), Mapping):
        found = record["reward_model"].get("ground_truth", {}).get("target")
    if isinstance(found, str):
        found = [found]
    return [str(answer) for answer in found if str(answer).strip()] if found is not None else []
