"""Random rows and tiny Llamas for the model tests."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from transformers import LlamaConfig, LlamaForCausalLM

from torchrl_copc.trajectory import Completion, Episode, Prompt

VOCAB = 48


def llama_config(**overrides) -> LlamaConfig:
    settings = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return LlamaConfig(**(settings | overrides))


def llama(seed: int = 0, **overrides) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(llama_config(**overrides)).eval()


def row(seed: int, truncated: bool = False, trailing: int = 0, group: int | None = None) -> TensorDict:
    """Prompt, then one to three turns with observations between; ``trailing`` observation ids at the end.

    Without ``group`` every row is its own.
    """
    rng = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> list[int]:
        n = int(torch.randint(low, high, (1,), generator=rng))
        return torch.randint(1, VOCAB, (n,), generator=rng).tolist()

    episode = Episode(f"row-{seed}", Prompt(f"p{seed}", "?", ("!",)), f"g{seed if group is None else group}")
    episode.append_context(ids(2, 8))
    for turn in range(1 + seed % 3):
        if turn:
            episode.append_context(ids(1, 6))
        sampled = ids(1, 7)
        log_probs = (-4 * torch.rand(len(sampled), generator=rng)).tolist()
        episode.append_completion(
            Completion(tuple(sampled), tuple(log_probs), (seed,) * len(sampled), "stop")
        )
    if trailing:
        episode.append_context(ids(trailing, trailing + 1))
    episode.finish(float(seed % 2), "stop", truncated=truncated)
    return episode.to_row()
