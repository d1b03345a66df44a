"""Two ranks under torchrun (gloo) against one: same gradients, weights, scores and metrics."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from learner_cases import CASES, ROWS, gradients, make_learner, rows_of_one_rank, run_case, weights

from torchrl_copc.training.checkpoint import load_checkpoint

SCRIPT = Path(__file__).parents[1] / "learner_cases.py"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(SCRIPT),
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [*command, str(folder)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    yield folder, [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_uneven_ranks_give_the_gradients_of_one_rank(two_ranks, case, tmp_path):
    _, (first, second) = two_ranks
    rows = rows_of_one_rank(make_learner(**CASES[case])) if case == "minibatches" else ROWS
    one = run_case(case, rows, tmp_path)
    for name, expected in one["gradients"].items():
        scale = float(expected.abs().max())
        for found in (first[case]["gradients"][name], second[case]["gradients"][name]):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * scale + 1e-12, msg=name)
    for key, expected in one["metrics"].items():
        assert first[case]["metrics"][key] == second[case]["metrics"][key], key
        assert first[case]["metrics"][key] == pytest.approx(expected, rel=1e-4, abs=1e-6), key
    assert first[case]["scores"] == second[case]["scores"]
    assert second[case]["actor_weights"] == {}
    for name, value in first[case]["actor_weights"].items():
        assert torch.equal(value, first[case]["weights"][f"actor.model.{name}"])


@pytest.mark.slow
def test_diagnostics_in_warm_up_count_the_tokens_of_both_ranks(two_ranks):
    _, results = two_ranks
    expected = make_learner(critic_warmup_batches=10).update(ROWS, version=7)
    assert expected["on_policy_noise"] > 0 and {"kept_fraction_staleness_5_8", "ESS"} <= expected.keys()
    for found in (result["warm_up"] for result in results):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert key.startswith("time_") or found[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_is_read_by_one(two_ranks):
    folder, (first, _) = two_ranks
    learner = make_learner()
    extra = load_checkpoint(learner, folder / "token_mean")
    assert extra == {"rank": 0} and learner.version == 1 and learner.actor.updates == 1
    for name, expected in first["token_mean"]["weights"].items():
        assert torch.equal(weights(learner)[name], expected)
    for name, expected in first["token_mean"]["gradients"].items():
        assert torch.equal(gradients(learner)[name], expected)


@pytest.mark.slow
def test_only_rank_0_gets_the_rest_of_a_checkpoint(two_ranks):
    _, (first, second) = two_ranks
    assert (first["extra"], second["extra"]) == ({"rank": 0}, None)


@pytest.mark.slow
def test_a_bad_row_on_one_rank_skips_the_update_on_both(two_ranks):
    folder, results = two_ranks
    assert [result["nonfinite"]["nonfinite_updates"] for result in results] == [2, 2]
    assert len(list((folder / "dump").iterdir())) == 2
