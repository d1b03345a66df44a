from __future__ import annotations

import json

import pytest
import torch
from lm_cases import llama, row
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, GPTJConfig, GPTJForCausalLM

from torchrl_copc.models.causal_lm import CausalLMActor, CausalLMCritic
from torchrl_copc.models.layout import compress, micro_batches
from torchrl_copc.trajectory import POLICY_MASK, TOKENS

ROWS = [row(seed, truncated=seed == 2, trailing=3 * (seed == 2)) for seed in range(9)]


def outputs(module, max_tokens, layout, pad_id=0):
    """Outputs of all micro-batches, put back into the order of ``compress(rows)`` and of the rows."""
    tokens, rows = {}, {}
    for batch in micro_batches(ROWS, max_tokens, layout, pad_id):
        out = module(TensorDict({"lm": batch}))
        for key in module.out_keys:
            into, index = (
                (rows, batch["row_index"]) if key == "final_value" else (tokens, batch["token_index"])
            )
            into.setdefault(key, []).append((index, out[key].flatten()))
    return {
        key: torch.cat([value for _, value in parts])[torch.cat([index for index, _ in parts]).argsort()]
        for key, parts in (tokens | rows).items()
    }


def critic(seed=1):
    module = CausalLMCritic(llama(seed).model)
    torch.nn.init.normal_(module.net.value_head.weight)
    return module


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropies_are_those_of_transformers_row_by_row(tied, temperature):
    model = llama(tie_word_embeddings=tied)
    ours = outputs(CausalLMActor(model, temperature=temperature), 60, "padded")
    log_probs, entropies = [], []
    for one in ROWS:
        ids, mask = one.get(TOKENS), one.get(POLICY_MASK)
        full = (model(ids[None]).logits[0] / temperature).log_softmax(-1)[:-1]
        entropies.append(-(full.exp() * full).sum(-1)[mask[1:]])
        log_probs.append(full.gather(-1, ids[1:, None]).squeeze(-1)[mask[1:]])
    torch.testing.assert_close(ours["log_prob"], torch.cat(log_probs), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours["entropy"], torch.cat(entropies), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("max_tokens", [1, 50, 10_000])
@pytest.mark.parametrize("make", [lambda: CausalLMActor(llama()), critic], ids=["actor", "critic"])
def test_layout_micro_batch_size_and_padding_leave_outputs_unchanged(layout, max_tokens, make):
    module = make()
    reference = outputs(module, 1, "padded")
    for pad_id in (0, 17):
        for key, value in outputs(module, max_tokens, layout, pad_id).items():
            torch.testing.assert_close(value, reference[key], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("make", [lambda **k: CausalLMActor(llama(), **k)], ids=["actor"])
def test_gradient_checkpointing_changes_no_gradient(make):
    gradients = []
    for checkpointing in (False, True):
        module = make(gradient_checkpointing=checkpointing)
        (
            outputs(module, 60, "padded")["log_prob"] * torch.linspace(-1, 1, compress(ROWS).shape[1])
        ).sum().backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed, rtol=1e-5, atol=1e-6)


def test_dropout_is_switched_off_so_that_two_passes_agree():
    model = llama(attention_dropout=0.5)
    actor = CausalLMActor(model, gradient_checkpointing=True)
    assert model.training
    first, second = (outputs(actor, 60, "padded")["log_prob"] for _ in range(2))
    assert torch.equal(first, second)


def test_critic_starts_at_zero_and_reads_the_final_position_after_trailing_observations():
    values = outputs(CausalLMCritic(llama(1).model), 60, "padded")
    assert not values["state_value"].any() and not values["final_value"].any()
    module = critic()
    final = outputs(module, 60, "padded")["final_value"][2]
    ids = ROWS[2].get(TOKENS)
    assert not ROWS[2].get(POLICY_MASK)[-3:].any()
    expected = module.net.value_head(module.trunk(ids[None]).last_hidden_state[0, -1])
    torch.testing.assert_close(final, expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_actor_round_trip_through_transformers(tmp_path, tied):
    actor = CausalLMActor(llama(tie_word_embeddings=tied))
    actor.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert actor.tied_names == ({"lm_head.weight"} if tied else set())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, value in actor.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    again = outputs(CausalLMActor.from_pretrained(tmp_path), 60, "padded")["log_prob"]
    assert torch.equal(again, outputs(actor, 60, "padded")["log_prob"])


def test_critic_round_trip_and_start_from_an_actor_checkpoint(tmp_path):
    CausalLMActor(llama()).save_pretrained(tmp_path / "actor")
    fresh = CausalLMCritic.from_pretrained(tmp_path / "actor")
    assert torch.equal(fresh.trunk.embed_tokens.weight, llama().model.embed_tokens.weight)
    assert not fresh.net.value_head.weight.any()
    trained = critic()
    trained.save_pretrained(tmp_path / "critic")
    again = CausalLMCritic.from_pretrained(tmp_path / "critic")
    for key, value in outputs(trained, 60, "padded").items():
        assert torch.equal(outputs(again, 60, "padded")[key], value)


def test_heads_that_are_more_than_one_matrix_are_refused():
    with pytest.raises(ValueError, match="bias"):
        CausalLMActor(GPTJForCausalLM(GPTJConfig(vocab_size=8, n_embd=16, n_layer=1, n_head=2, rotary_dim=4)))
    model = llama()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="final_logit_softcapping=30"):
        CausalLMActor(model)
