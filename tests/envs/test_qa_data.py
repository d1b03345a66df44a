"""Question-answering data sets are read whole, or refused with the row that is wrong."""

from __future__ import annotations

import json

import pytest

from torchrl_copc.envs.search.qa_data import DataError, load_qa


def _write(tmp_path, *records):
    path = tmp_path / "qa.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))
    return str(path)


def test_both_record_shapes_are_read(tmp_path):
    path = _write(
        tmp_path,
        {"question": "who?", "answer": ["A", "B"], "data_source": "nq"},
        {"id": "x7", "question": " where? ", "golden_answers": "C"},
        {"question": "when?", "reward_model": {"ground_truth": {"target": ["1999"]}}, "prompt": []},
    )
    first, second, third = load_qa(path)
    assert first.answers == ("A", "B") and first.metadata == {"data_source": "nq"}
    assert (second.id, second.question, second.answers) == ("x7", "where?", ("C",))
    assert third.answers == ("1999",)
    assert len(load_qa(path, limit=2)) == 2


def test_merged_data_sets_may_repeat_ids(tmp_path):
    record = {"id": "train_0", "question": "q", "answer": "A"}
    path = _write(tmp_path, {**record, "data_source": "nq"}, {**record, "data_source": "hotpotqa"}, record)
    assert [prompt.id for prompt in load_qa(path)] == ["nq-train_0", "hotpotqa-train_0", "train_0"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"answer": "A"}, "row 1: no `question` text"),
        ({"question": "q", "answer": ["", " "]}, "row 1: no gold answer"),
        ({"question": "q"}, "row 1: no gold answer"),
        ("{not json", "row 1: not JSON"),
        ("[1, 2]", "row 1: a list; write one object a line"),
        ({"id": "same", "question": "q", "answer": "A"}, "row 1: id 'same' occurred before"),
    ],
)
def test_bad_records_are_refused_with_their_row(tmp_path, record, message):
    path = _write(tmp_path, {"id": "same", "question": "q", "answer": "A"}, record)
    with pytest.raises(DataError, match=message):
        load_qa(path)


def test_rows_are_those_of_the_file_blank_lines_included(tmp_path):
    path = _write(tmp_path, "", {"question": "q", "answer": "A"}, "", {"question": "q"})
    with pytest.raises(DataError, match="row 3: no gold answer"):
        load_qa(path)


def test_bytes_that_are_no_text_are_refused_with_their_row(tmp_path):
    path = tmp_path / "qa.jsonl"
    path.write_bytes(b'{"question": "q", "answer": "A"}\n{"question": "caf\xe9", "answer": "A"}\n')
    with pytest.raises(DataError, match="row 1: not UTF-8"):
        load_qa(str(path))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.jsonl"):
        load_qa(str(tmp_path / "nothing.jsonl"))
