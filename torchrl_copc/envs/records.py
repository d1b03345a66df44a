"""Records of data sets, read one at a time with their place: JSONL and Parquet files, and the hub."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]


class DataError(ValueError):
    """A record that cannot be used, with file, row and what to change."""


def read_records(
    source: str, split: str = "train", config: str | None = None
) -> Iterator[tuple[str, Record]]:
    """Every record of a data set after its place, ``"SOURCE, row N"``; rows count from 0, blank lines included.

    Args:
        source: path of a ``.jsonl`` or ``.parquet`` file, or hub name of a data set (``owner/name``).
        split: split of a hub data set; a file has none.
        config: configuration of a hub data set; None for its only one.

    Raises:
        FileNotFoundError: if ``source`` looks like a file and is none.
        DataError: for a file or data set that cannot be read, and for a line that is no JSON object.
        ImportError: for a hub data set or a Parquet file without ``datasets`` installed.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        ...     _ = file.write('{"question": "Where?"}')
        ...     file.flush()
        ...     [record for _, record in read_records(file.name)]
        [{'question': 'Where?'}]
    """
    path = Path(source)
    if path.suffix == ".jsonl":
        yield from _read_jsonl(path)
        return
    if path.suffix == ".parquet" and not path.is_file():
        raise FileNotFoundError(f"{source} does not exist")
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"reading {source} needs datasets: pip install datasets (or give a .jsonl file)"
        ) from error
    try:
        if path.suffix == ".parquet":
            records: Iterable[Record] = datasets.Dataset.from_parquet(source)
        else:
            records = datasets.load_dataset(source, config, split=split)
    except Exception as error:  # of many kinds: no network, no such data set, no such split, a broken file
        raise DataError(
            f"{source} (split {split!r}) cannot be read ({type(error).__name__}: {str(error)[:200]}); "
            "give a .jsonl or .parquet file instead, or the name of a hub data set and one of its splits"
        ) from error
    for row, record in enumerate(records):
        yield f"{source}, row {row}", record


def _read_jsonl(path: Path) -> Iterator[tuple[str, Record]]:
    with path.open("rb") as file:
        for row, line in enumerate(file):
            if not line.strip():
                continue
            where = f"{path}, row {row}"
            try:
                record = json.loads(line)
            except UnicodeDecodeError as error:
                raise DataError(f"{where}: not UTF-8 ({error}); save the file as UTF-8") from error
            except json.JSONDecodeError as error:
                raise DataError(f"{where}: not JSON ({error}); write one object a line") from error
            except RecursionError as error:
                raise DataError(
                    f"{where}: nested too deeply to be read; write one flat object a line"
                ) from error
            except ValueError as error:  # Python reads no longer integers
                limit = sys.get_int_max_str_digits()
                raise DataError(
                    f"{where}: a number of more than {limit} digits; write it as text, in quotation marks"
                ) from error
            if not isinstance(record, dict):
                raise DataError(f"{where}: a {type(record).__name__}; write one object a line")
            yield where, record
