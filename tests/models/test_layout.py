from __future__ import annotations

import pytest
import torch
from lm_cases import row

from torchrl_copc.models.layout import compress, micro_batches
from torchrl_copc.trajectory import DONE, LOG_PROBS, METADATA, POLICY_MASK, REWARD, TOKENS, RowError

ROWS = [row(seed, truncated=seed == 2, trailing=3 * (seed == 2)) for seed in range(9)]


def test_compress_keeps_policy_tokens_in_row_order():
    packed = compress(ROWS)
    at = 0
    for index, one in enumerate(ROWS):
        mask = one.get(POLICY_MASK)
        n = int(mask.sum())
        part = packed[0, at : at + n]
        assert part["response_id"].flatten().tolist() == [index] * n
        assert part["position"].flatten().tolist() == list(range(n))
        assert torch.equal(part["action_log_prob"].flatten(), one.get(LOG_PROBS)[mask])
        assert part["next", "done"].flatten().tolist() == [False] * (n - 1) + [True]
        assert float(part["next", "reward"].sum()) == float(one.get(REWARD).sum())
        at += n
    assert packed.batch_size == (1, at)
    assert torch.equal(packed["group_id"], packed["response_id"])  # every row is its own group
    shared = compress([row(0, group=7), row(1, group=3), row(2, group=7), row(3).exclude(METADATA)])
    of_row = dict(
        zip(shared["response_id"].flatten().tolist(), shared["group_id"].flatten().tolist(), strict=True)
    )
    assert of_row == {0: 0, 1: 1, 2: 0, 3: 2}
    assert int(packed["next", "truncated"].sum()) == 1


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("max_tokens", [1, 40, 10_000])
def test_micro_batches_cover_every_policy_token_once_with_its_predictor(layout, max_tokens):
    batches = micro_batches(ROWS, max_tokens, layout, pad_id=0)
    seen = torch.cat([batch["token_index"] for batch in batches])
    assert seen.sort().values.tolist() == list(range(compress(ROWS).shape[1]))
    targets = torch.cat([one.get(TOKENS)[one.get(POLICY_MASK)] for one in ROWS])
    for batch in batches:
        assert batch["input_ids"].numel() <= max_tokens or len(batch["row_index"]) == 1
        ids = batch["input_ids"].flatten()
        assert torch.equal(batch["target_ids"], targets[batch["token_index"]])
        assert torch.equal(ids[batch["predict_index"] + 1], batch["target_ids"])
        positions = batch["position_ids"].flatten()
        assert torch.equal(positions[batch["predict_index"]] + 1, positions[batch["predict_index"] + 1])
        last = [ROWS[int(i)].get(TOKENS)[-1].item() for i in batch["row_index"]]
        assert ids[batch["final_index"]].tolist() == last
        lengths = [ROWS[int(i)].shape[0] for i in batch["row_index"]]
        assert (positions[batch["final_index"]] + 1).tolist() == lengths


def test_a_row_that_starts_with_a_policy_token_is_refused_by_name():
    bad = row(3)[4:].clone()
    bad.get(POLICY_MASK)[0] = True
    with pytest.raises(RowError, match=r"row-3, token 0.*prompt"):
        micro_batches([row(1), bad], 100)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda r: r.get(LOG_PROBS).masked_fill_(r.get(POLICY_MASK), float("nan")), "log-prob"),
        (lambda r: r.get(LOG_PROBS).masked_fill_(r.get(POLICY_MASK), float("-inf")), "log-prob"),
        (lambda r: r.get(DONE).zero_(), "done"),
        (lambda r: r.get(DONE).fill_(True), "done"),
        (lambda r: r.get(POLICY_MASK).zero_(), "no policy token"),
    ],
)
def test_damaged_rows_are_refused_by_name(damage, message):
    bad = row(5)
    damage(bad)
    with pytest.raises(RowError, match=f"row-5.*{message}"):
        compress([row(1), bad])


def test_settings_are_named_when_wrong():
    with pytest.raises(ValueError, match=r"learner\.max_tokens_per_micro_batch"):
        micro_batches(ROWS, 0)
    with pytest.raises(ValueError, match=r"learner\.layout"):
        micro_batches(ROWS, 10, "ragged")
