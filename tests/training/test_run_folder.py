"""The run folder keeps what a run wrote, and a resumed run does not write a line twice."""

from __future__ import annotations

import json

import pytest

from torchrl_copc.training.run_folder import RunFolder


def test_latest_follows_the_newest_run_and_a_name_is_never_reused(tmp_path):
    RunFolder.create(str(tmp_path), "first", "x")
    folder = RunFolder.create(str(tmp_path), "second", "x")
    assert (tmp_path / "latest").resolve() == folder.path.resolve()
    with pytest.raises(FileExistsError, match="resume="):
        RunFolder.create(str(tmp_path), "first", "x")
    assert len({RunFolder.create(str(tmp_path), None, "same").path for _ in range(3)}) == 3


def test_rewind_drops_what_a_resumed_run_computes_again(tmp_path):
    folder = RunFolder(tmp_path)
    for version in (1, 2, 3):
        folder.append_metrics({"version": version, "reward": float(version)})
        folder.append_consumed(version, [])
    folder.rewind(2)
    assert [entry["version"] for entry in folder.history()] == [1, 2]
    with (tmp_path / "consumed.jsonl").open("a") as file:
        file.write('{"version": 3, "row_')  # killed while writing
    folder.rewind(2)
    consumed = [json.loads(line) for line in (tmp_path / "consumed.jsonl").read_text().splitlines()]
    assert [entry["version"] for entry in consumed] == [1, 2]
