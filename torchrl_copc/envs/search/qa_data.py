"""Question-answering data sets: local files, or a hub data set through ``datasets``."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from torchrl_copc.envs.records import DataError, read_records
from torchrl_copc.trajectory import Prompt


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
    for row, (where, record) in enumerate(islice(read_records(source, split), limit)):
        prompt = _prompt(record, where, f"{Path(source).stem}-{split}-{row}")
        if prompt.id in seen:
            raise DataError(f"{where}: id {prompt.id!r} occurred before; ids must be unique")
        seen.add(prompt.id)
        prompts.append(prompt)
    if not prompts:
        raise DataError(f"{source}: no records in split {split!r}")
    return prompts


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
