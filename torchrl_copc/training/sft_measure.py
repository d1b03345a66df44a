"""How a model behaves in its environment, sampled in plain transformers, one episode at a time.

Only for the few hundred episodes after supervised training: no batching, no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchrl_copc.envs.token_env import TokenEnv, TurnRequest
from torchrl_copc.training.traces import play
from torchrl_copc.trajectory import Completion, FinishReason, Prompt


async def measure(
    model: Any,
    env: TokenEnv,
    prompts: Sequence[Prompt],
    *,
    temperature: float,
    seed: int = 0,
    first_turn: Callable[[Prompt], str] | None = None,
) -> dict[str, float]:
    """Mean reward and metrics of the environment.

    Args:
        model: a Hugging Face causal LM.
        env: the environment.
        prompts: its tasks.
        temperature: of the sampling; 0 is greedy.
        seed: of the sampling.
        first_turn: writes the first turn instead of the model; what is left is how well the model goes on.
    """
    generator = torch.Generator().manual_seed(seed)
    totals: dict[str, float] = {}
    for number, prompt in enumerate(prompts):
        episode = env.begin(prompt, f"measure-{number}", prompt.id)
        if first_turn is not None:
            await play(env, episode, first_turn(prompt))
        while not episode.done:
            await env.advance(episode, sample_turn(model, env.next_turn(episode), temperature, generator))
        for name, value in {**episode.metrics, "reward": episode.reward}.items():
            totals[name] = totals.get(name, 0.0) + value
    return {name: total / len(prompts) for name, total in totals.items()}


@torch.inference_mode()
def sample_turn(
    model: Any, request: TurnRequest, temperature: float, generator: torch.Generator
) -> Completion:
    """One turn, up to a stop token or the turn's budget."""
    step_ids, cache = torch.tensor([request.token_ids]), None
    sampled: list[int] = []
    while len(sampled) < request.max_tokens and not (sampled and sampled[-1] in request.stop_token_ids):
        output = model(step_ids, past_key_values=cache, use_cache=True)
        logits, cache = output.logits[0, -1].float(), output.past_key_values
        if temperature == 0:
            token = int(logits.argmax())
        else:
            token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        sampled.append(token)
        step_ids = torch.tensor([[token]])
    finish_reason: FinishReason = "stop" if sampled[-1] in request.stop_token_ids else "length"
    # Log-probs and versions are for training; nobody reads them here.
    return Completion(tuple(sampled), (0.0,) * len(sampled), (0,) * len(sampled), finish_reason)
