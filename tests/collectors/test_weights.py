"""Pushes into the real engine, while it generates, and the sabotages that verification must name."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torchrl_copc.collectors.engine import VLLMEngineConfig, WeightUpdate
from torchrl_copc.collectors.transfer import ShmTransport
from torchrl_copc.collectors.weights import WeightPublisher, WeightSyncError

pytestmark = pytest.mark.engine
PROBE = [[5, 60, 61, 62, 9, 40, 17, 18, 19, 20], [7, 8, 30, 31, 32]]
FIRST_VERSION = 100


def perturbed(model: Any, seed: int, scale: float = 0.02) -> Any:
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return other


def scorer(model: Any) -> Callable[[Sequence[Sequence[int]]], list[list[float]]]:
    def score(sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        rows = []
        for sequence in sequences:
            ids = torch.tensor([list(sequence)])
            with torch.no_grad():
                log_probs = model(ids).logits[0, :-1].log_softmax(-1)
            rows.append(log_probs.gather(-1, ids[0, 1:, None])[:, 0].tolist())
        return rows

    return score


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def config(engine_thread: Any) -> VLLMEngineConfig:
    return engine_thread.engine.config


@pytest.fixture
def publisher(engine_thread: Any, config: VLLMEngineConfig, model: Any) -> Iterator[WeightPublisher]:
    """Calibrated on the checkpoint's weights, which are put back afterwards."""
    made = WeightPublisher(engine_thread.call, config, PROBE)
    made.calibrate(dict(model.named_parameters()), FIRST_VERSION, scorer(model))
    yield made
    made.close()
    restored = WeightPublisher(engine_thread.call, config, PROBE)
    restored.calibrate(dict(model.named_parameters()), 0, scorer(model))
    restored.close()


def test_a_push_makes_the_engine_compute_with_the_new_weights(
    engine_thread: Any, publisher: WeightPublisher, model: Any
) -> None:
    new = perturbed(model, 1)
    before = engine_thread.call("score", PROBE)
    report = publisher.publish(dict(new.named_parameters()), 101, scorer(new))
    after = engine_thread.call("score", PROBE)
    assert engine_thread.call("weight_version") == report.version == 101
    assert report.noise_mean < 5e-6 and report.noise_max < 5e-5
    assert report.num_bytes == sum(4 * p.numel() for p in new.parameters())
    torch.testing.assert_close(torch.tensor(after[0]), torch.tensor(scorer(new)(PROBE)[0]), atol=2e-5, rtol=0)
    assert (torch.tensor(after[0]) - torch.tensor(before[0])).abs().max() > 0.05
    out = engine_thread.call("generate", PROBE[0], max_tokens=20, seed=0, request_id="after")
    assert set(out.versions) == {101}
    expected = scorer(new)([PROBE[0] + list(out.token_ids)])[0][-20:]
    torch.testing.assert_close(torch.tensor(out.log_probs), torch.tensor(expected), atol=2e-5, rtol=0)


def test_running_requests_survive_a_push_and_every_token_carries_its_version(
    engine_thread: Any, publisher: WeightPublisher, model: Any
) -> None:
    new = perturbed(model, 2)
    running = [
        engine_thread.submit("generate", PROBE[0], max_tokens=400, seed=seed, request_id=f"running-{seed}")
        for seed in range(6)
    ]
    time.sleep(0.5)
    publisher.publish(dict(new.named_parameters()), 102, scorer(new))
    outs = [future.result(120) for future in running]
    assert any(set(out.versions) == {FIRST_VERSION, 102} for out in outs), (
        "no request was running at the push"
    )
    for out in outs:
        assert len(out.token_ids) == 400
        assert list(out.versions) == sorted(out.versions)
        sequence = [PROBE[0] + list(out.token_ids)]
        by_version = {
            FIRST_VERSION: scorer(model)(sequence)[0][-400:],
            102: scorer(new)(sequence)[0][-400:],
        }
        # Each token has the log-prob of its own version, given everything before it.
        expected = [by_version[version][i] for i, version in enumerate(out.versions)]
        torch.testing.assert_close(torch.tensor(out.log_probs), torch.tensor(expected), atol=5e-5, rtol=0)


class Sabotaged(ShmTransport):
    """Changes what arrives without telling the publisher."""

    change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]

    def _write(self, tensors: Mapping[str, Tensor]) -> WeightUpdate:
        return super()._write(self.change(dict(tensors)))


def sabotage(
    publisher: WeightPublisher,
    engine_thread: Any,
    change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]],
) -> None:
    publisher.close()
    transport = Sabotaged(engine_thread.call, engine_thread.engine.config)
    transport.change = change
    publisher._transport = transport


def test_a_push_that_changes_nothing_is_caught(
    engine_thread: Any, publisher: WeightPublisher, model: Any
) -> None:
    new = perturbed(model, 3)
    old = dict(model.named_parameters())
    sabotage(publisher, engine_thread, lambda tensors: {name: old[name].detach() for name in tensors})
    with pytest.raises(WeightSyncError, match="version 103") as caught:
        publisher.publish(dict(new.named_parameters()), 103, scorer(new))
    assert engine_thread.call("weight_version") == 103
    count = len(old) + model.config.tie_word_embeddings  # the engine reports the tied head as well
    assert f"{count} of {count} parameters" in str(caught.value)
    assert "model.embed_tokens.weight" in str(caught.value)
    assert "stale tied head" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.norm.weight",
    ],
)
def test_a_tensor_that_goes_missing_is_named(
    engine_thread: Any, publisher: WeightPublisher, model: Any, name: str
) -> None:
    new = perturbed(model, 4)
    sabotage(
        publisher,
        engine_thread,
        lambda tensors: {key: value for key, value in tensors.items() if key != name},
    )
    with pytest.raises(WeightSyncError) as caught:
        publisher.publish(dict(new.named_parameters()), 104, scorer(new))
    assert f"differ from the learner's: {name}" in str(caught.value)


def test_a_stale_tied_head_is_named(engine_thread: Any, publisher: WeightPublisher, model: Any) -> None:
    assert model.config.tie_word_embeddings
    new = perturbed(model, 5)
    rpc = engine_thread.engine._llm.collective_rpc

    def skip_repack(skip: bool) -> None:
        engine_thread.run(rpc("sabotage_skip_head_repack", args=(skip,)))

    skip_repack(True)
    try:
        with pytest.raises(WeightSyncError, match=r"stale tied head: lm_head\.weight") as caught:
            publisher.publish(dict(new.named_parameters()), 105, scorer(new))
    finally:
        skip_repack(False)
    assert "1 of" in str(caught.value)
    # The same push, undisturbed, is accepted.
    publisher.publish(dict(new.named_parameters()), 106, scorer(new))


def test_log_probs_that_disagree_although_every_byte_arrived_are_caught(
    publisher: WeightPublisher, model: Any
) -> None:
    def off(sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[value + 1e-3 for value in row] for row in scorer(model)(sequences)]

    with pytest.raises(WeightSyncError, match=r"every parameter arrived.*1\.00e-03 nats"):
        publisher.publish(dict(model.named_parameters()), 107, off)


def test_different_models_are_refused_before_anything_is_pushed(
    engine_thread: Any, publisher: WeightPublisher, model: Any
) -> None:
    tensors = dict(model.named_parameters())
    del tensors["model.norm.weight"]
    tensors["model.extra.weight"] = torch.zeros(3)
    with pytest.raises(WeightSyncError, match=r"missing.*model\.norm\.weight.*unknown.*model\.extra\.weight"):
        publisher.publish(tensors, 108, scorer(model))
    assert engine_thread.call("weight_version") == FIRST_VERSION


def test_weights_that_are_not_finite_are_refused_before_anything_is_pushed(
    engine_thread: Any, publisher: WeightPublisher, model: Any
) -> None:
    tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    tensors["model.norm.weight"][0] = float("nan")
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight holds NaN"):
        publisher.publish(tensors, 109, scorer(model))
    assert engine_thread.call("weight_version") == FIRST_VERSION


def test_a_learner_that_disagrees_at_the_start_is_refused(
    engine_thread: Any, config: VLLMEngineConfig, model: Any
) -> None:
    made = WeightPublisher(engine_thread.call, config, PROBE)
    with pytest.raises(WeightSyncError, match=r"differ by .*rotary settings"):
        made.calibrate(dict(model.named_parameters()), 0, scorer(perturbed(model, 6)))
    with pytest.raises(RuntimeError, match="calibrate"):
        made.publish(dict(model.named_parameters()), 1, scorer(model))
    made.close()
