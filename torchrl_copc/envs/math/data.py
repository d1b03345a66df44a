"""Maths problems with gold answers: the named evaluation and training sets, hub data sets, and local files."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torchrl_copc.envs.math.champ import load_champ
from torchrl_copc.envs.math.verify import check_gold
from torchrl_copc.envs.records import DataError, Record, read_records
from torchrl_copc.trajectory import Prompt


@dataclass(frozen=True)
class HubSet:
    """Where a named set stands on the hub."""

    repository: str
    split: str = "train"
    config: str | None = None


HUB_SETS = {
    "aime24": HubSet("Maxwell-Jia/AIME_2024"),
    "aime25": HubSet("MathArena/aime_2025"),
    "aime26": HubSet("MathArena/aime_2026"),
    "brumo25": HubSet("MathArena/brumo_2025"),
    "beyond_aime": HubSet("ByteDance-Seed/BeyondAIME", "test"),
    "dapo_math_17k": HubSet("open-r1/DAPO-Math-17k-Processed", config="en"),
}

# The first that is there counts. A `solution` is the answer itself (DAPO), or holds it in a box.
_QUESTION = ("problem", "Problem", "question", "Question", "input", "prompt")
_ANSWER = ("answer", "Answer", "output", "expected_answer", "solution")
_ID = ("id", "ID", "problem_idx")


def load_math(source: str, split: str | None = None, limit: int | None = None) -> list[Prompt]:
    """Problems with one gold answer each, in the order of the source.

    Every gold answer is checked: one that nothing could be compared with is refused with its row, rather than
    costing every response to it the reward. Ids are ``SET-ID``, with the row where there is no id.

    Args:
        source: a name (``aime24``, ``aime25``, ``aime26``, ``brumo25``, ``beyond_aime``, ``dapo_math_17k``:
            from the hub; ``champ``: from its package), the path of a ``.jsonl`` or ``.parquet`` file, or a hub
            name (``owner/name``). A file with a set's name replaces it: ``folder/aime24.jsonl``.
        split: of a hub data set; None for the named set's own, or ``"train"``. A file has none.
        limit: at most so many problems, from the first.

    Raises:
        FileNotFoundError: if ``source`` looks like a file and is none.
        DataError: for a record without problem or usable gold answer and for a repeated id, naming its row;
            for an unknown name; for a data set that cannot be read.
        ImportError: if a package that the source needs is not installed.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        ...     _ = file.write('{"problem": "What is 6 times 7?", "answer": 42}')
        ...     file.flush()
        ...     load_math(file.name)[0].answers
        ('42',)
    """
    if source == "champ":
        return load_champ()[:limit]
    known = HUB_SETS.get(source)
    path = Path(source)
    if known is not None:
        name, records = source, read_records(known.repository, split or known.split, known.config)
    elif path.suffix in (".jsonl", ".parquet"):
        name, records = path.stem, read_records(source)
    elif source.count("/") == 1:
        name, records = path.name, read_records(source, split or "train")
    else:
        raise DataError(
            f"source={source!r} is no known set ({', '.join(('champ', *HUB_SETS))}), no .jsonl or .parquet "
            "file, and no hub name (owner/name)"
        )
    prompts = _prompts(name, islice(records, limit))
    if not prompts:
        raise DataError(f"{source}: no records; give a file or split that has some")
    return prompts


def _prompts(name: str, records: Iterable[tuple[str, Record]]) -> list[Prompt]:
    prompts: dict[str, Prompt] = {}
    for row, (where, record) in enumerate(records):
        prompt_id = f"{name}-{_id(record, where, row)}"
        if prompt_id in prompts:
            raise DataError(f"{where}: id {prompt_id!r} occurred before; make ids unique or leave them out")
        gold = _answer(record, where)
        prompts[prompt_id] = Prompt(prompt_id, _question(record, where), (gold,), {"data_source": name})
    return list(prompts.values())


def _column(record: Record, names: tuple[str, ...], where: str) -> tuple[str, Any]:
    for name in names:
        if name in record:
            return name, record[name]
    raise DataError(
        f"{where}: no column {' or '.join(f'`{name}`' for name in names)}; rename one of {sorted(record)}"
    )


def _question(record: Record, where: str) -> str:
    name, question = _column(record, _QUESTION, where)
    if not isinstance(question, str):
        raise DataError(f"{where}: `{name}` is a {type(question).__name__}; give the problem as text")
    if not question.strip():
        raise DataError(f"{where}: `{name}` is empty; give the problem or remove the row")
    return question.strip()


def _answer(record: Record, where: str) -> str:
    name, answer = _column(record, _ANSWER, where)
    if isinstance(answer, float) and math.isfinite(answer):  # Parquet columns of numbers may be all float
        answer = int(answer) if answer.is_integer() else repr(answer)
    if isinstance(answer, bool) or not isinstance(answer, str | int):
        raise DataError(
            f"{where}: `{name}` is {answer!r:.80} ({type(answer).__name__}); give one answer, as text or number"
        )
    gold = str(answer).strip()
    try:
        check_gold(gold)
    except ValueError as error:
        raise DataError(f"{where}: `{name}`: {error}; correct the answer or remove the row") from error
    return gold


def _id(record: Record, where: str, row: int) -> str | int:
    name = next((name for name in _ID if name in record), None)
    if name is None:
        return row
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise DataError(f"{where}: `{name}` is {value!r:.80}; give a text or an integer, or leave ids out")
    return value
