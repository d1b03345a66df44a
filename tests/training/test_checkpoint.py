from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from learner_cases import ROWS, SCORED, make_learner, weights
from transformers import AutoModelForCausalLM

import torchrl_copc.training.checkpoint as checkpoint_module
from torchrl_copc.training.checkpoint import (
    CheckpointError,
    export_actor,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)


@pytest.fixture(autouse=True, scope="module")
def one_rank():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


SETTINGS = dict(critic_warmup_batches=1, minibatches_per_batch=2, critic_updates=2)


def without_times(metrics):
    return {key: value for key, value in metrics.items() if not key.startswith("time_")}


@pytest.mark.parametrize("batches", [0, 1, 2])
def test_a_restored_learner_makes_the_same_next_update(tmp_path, batches):
    learner = make_learner(**SETTINGS)
    for _ in range(batches):
        learner.update(ROWS)
    save_checkpoint(learner, tmp_path / "checkpoints", extra={"frontier": [1, 2]})
    expected_random = torch.rand(3)
    expected = learner.update(ROWS)

    restored = make_learner(**SETTINGS)
    restored.score(SCORED)  # parameters gathered before the load must not survive it
    assert load_checkpoint(restored, tmp_path) == {"frontier": [1, 2]}
    assert torch.equal(torch.rand(3), expected_random)
    assert restored.version == batches
    assert without_times(restored.update(ROWS)) == without_times(expected)
    ours, theirs = weights(restored), weights(learner)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert restored.score(SCORED) == learner.score(SCORED)


def test_saving_does_not_change_what_follows(tmp_path):
    saved, plain = make_learner(**SETTINGS), make_learner(**SETTINGS)
    for learner in (saved, plain):
        learner.update(ROWS)
        if learner is saved:
            save_checkpoint(learner, tmp_path)
        learner.update(ROWS)
    ours, theirs = weights(saved), weights(plain)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_save_that_dies_half_way_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    learner = make_learner()
    first = save_checkpoint(learner, tmp_path)
    learner.update(ROWS)

    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_module, "_random_state", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(learner, tmp_path)
    monkeypatch.undo()
    assert find_checkpoint(tmp_path) == first
    load_checkpoint(make_learner(), tmp_path)
    second = save_checkpoint(learner, tmp_path)
    assert find_checkpoint(tmp_path) == second


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    learner = make_learner()
    for version in (1, 5, 20):
        learner.version = version
        save_checkpoint(learner, tmp_path, keep=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["latest", "version_00000005", "version_00000020"]
    assert find_checkpoint(tmp_path / "version_00000005").name == "version_00000005"
    learner.version = 6  # resumed from version 5: the abandoned version 20 is the older checkpoint
    save_checkpoint(learner, tmp_path, keep=2)
    save_checkpoint(learner, tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "version_00000006"]
    assert find_checkpoint(tmp_path).name == "version_00000006"
    with pytest.raises(ValueError, match="keep_checkpoints"):
        save_checkpoint(learner, tmp_path, keep=0)


def test_resume_errors_name_what_is_missing(tmp_path):
    learner = make_learner()
    with pytest.raises(CheckpointError, match="does not exist"):
        load_checkpoint(learner, tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        load_checkpoint(learner, tmp_path)
    saved = save_checkpoint(learner, tmp_path)
    before = weights(learner)
    with pytest.raises(
        CheckpointError, match=r"embed_tokens\.weight has shape \[48, 32\], the model needs \[48, 48\]"
    ):
        load_checkpoint(make_learner(width=48), tmp_path)
    (saved / "extra.pt").unlink()
    with pytest.raises(CheckpointError, match=r"version_00000000 is incomplete: extra\.pt missing"):
        load_checkpoint(learner, saved)
    (saved / "meta.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"names version_00000000, which is missing or incomplete \(meta\.json missing"
    ):
        load_checkpoint(learner, tmp_path)
    (tmp_path / "latest").unlink()
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        load_checkpoint(learner, tmp_path)
    after = weights(learner)
    assert all(torch.equal(after[name], before[name]) for name in before)


def save_versions(folder, *versions):
    learner = make_learner()
    saved = []
    for version in versions:
        learner.version = version
        saved.append(save_checkpoint(learner, folder))
    return saved


def test_links_and_relative_names_mean_the_folder_they_lead_to(tmp_path, monkeypatch):
    (saved,) = save_versions(tmp_path / "runs" / "one" / "checkpoints", 3)
    (tmp_path / "runs" / "latest").symlink_to("one")
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint("runs/latest") == saved
    monkeypatch.chdir(saved)
    assert find_checkpoint(".") == saved
    monkeypatch.chdir(saved.parent)
    assert find_checkpoint(saved.name) == saved


@pytest.mark.parametrize("damage", ["missing", "no weights", "cut off", "meta cut off", "no pointer"])
def test_the_newest_complete_checkpoint_is_taken_when_latest_names_none(tmp_path, damage):
    older, newer = save_versions(tmp_path, 7, 9)
    weights_file = next((newer / "tensors").glob("*.distcp"))
    match damage:
        case "missing":
            shutil.rmtree(newer)
        case "no weights":
            weights_file.unlink()
        case "cut off":
            weights_file.write_bytes(weights_file.read_bytes()[:-1])
        case "meta cut off":
            (newer / "meta.json").write_text((newer / "meta.json").read_text()[:-20])
        case "no pointer":  # a run killed just before the first pointer was written
            (tmp_path / "latest").unlink()
            older = newer
    assert find_checkpoint(tmp_path) == older
    learner = make_learner()
    load_checkpoint(learner, tmp_path)
    assert learner.version == (9 if damage == "no pointer" else 7)


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_saving_a_version_again_never_leaves_a_moment_without_a_checkpoint(tmp_path, monkeypatch, renames):
    learner = make_learner()
    save_checkpoint(learner, tmp_path, extra="first", keep=1)
    left, rename = [renames], Path.rename

    def killed(path, target):
        if path.name.strip(".").startswith("version_"):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    if renames < 2:
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(learner, tmp_path, extra="second", keep=1)
        monkeypatch.undo()
        assert load_checkpoint(learner, tmp_path) == "first"
    save_checkpoint(learner, tmp_path, extra="third", keep=1)
    assert load_checkpoint(learner, tmp_path) == "third"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "version_00000000"]


def test_a_damaged_checkpoint_does_not_crowd_out_a_complete_one(tmp_path):
    older, newer = save_versions(tmp_path, 7, 9)
    (newer / "extra.pt").unlink()
    learner = make_learner()
    learner.version = 11
    newest = save_checkpoint(learner, tmp_path, keep=2)
    assert sorted(tmp_path.glob("version_*")) == [older, newest]


def test_exported_actor_loads_in_transformers(tmp_path):
    learner = make_learner()
    learner.update(ROWS)
    export_actor(learner, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert model.config.architectures == ["LlamaForCausalLM"]
    for ids, ours in zip(SCORED, learner.score(SCORED), strict=True):
        ids = torch.tensor(ids)
        theirs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(ours), theirs.detach(), rtol=1e-5, atol=1e-5)
