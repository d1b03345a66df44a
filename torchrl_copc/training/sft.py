"""Supervised start of a tiny model: tokenizer, copying, reading, then habits to improve on.

A model of half a million parameters cannot know facts, but it can learn to copy them out of what its tool answers, if
it meets copying first on its own: random segments, repeated once. Then it reads: traces in which the tool is used
well and its answer is copied. A short last phase shows the poor habits that reinforcement learning starts from. What
the traces of a task are is its curriculum's.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata as distributions
from pathlib import Path
from typing import Any

import torch
from hydra.core.config_store import ConfigStore
from hydra.utils import get_class, instantiate
from omegaconf import MISSING
from torch.nn import functional as F

from torchrl_copc.training.sft_measure import measure
from torchrl_copc.training.traces import Curriculum, SFTRow, TraceWriter
from torchrl_copc.trajectory import Prompt

logger = logging.getLogger(__name__)

PAD, EOS = "<pad>", "<eos>"
_SEPARATOR = 2  # of the copied segments: the first tag
_VERSIONS = ("torch", "transformers", "tokenizers")


@dataclass
class TinyModelConfig:
    """Shape of the Llama that is trained from scratch."""

    vocab_size: int = 1024
    digits_per_token: int | None = None  # at most; None = as the merges have it
    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    max_positions: int = 1024


@dataclass
class CopyConfig:
    """First phase: random segments repeated once."""

    steps: int = 800  # at most
    accuracy: float = 0.98  # of the repeated tokens in a batch; the phase ends when it is reached
    batch_rows: int = 96
    row_tokens: int = 96


@dataclass
class SFTConfig:
    """Everything ``scripts/sft.py`` needs."""

    name: str = MISSING  # of the experiment
    output_dir: str = "runs/${name}"
    seed: int = 0
    num_threads: int = 2
    learning_rate: float = 2e-3
    warmup_steps: int = 50
    copy_share: float = 0.1  # of the later phases' steps that go on with the first
    eval_questions: int = 200  # held-out ones, per measurement
    task: dict[str, Any] = field(
        default_factory=dict
    )  # environment and prompts, as reinforcement learning uses them
    curriculum: str = MISSING  # class, see torchrl_copc.training.traces
    model: TinyModelConfig = field(default_factory=TinyModelConfig)
    copy: CopyConfig = field(default_factory=CopyConfig)
    reading: dict[str, Any] = field(default_factory=dict)  # second phase, settings of the curriculum's traces
    habits: dict[str, Any] = field(default_factory=dict)  # third phase


ConfigStore.instance().store(name="sft_schema", node=SFTConfig)


def train_tokenizer(texts: Iterator[str], config: TinyModelConfig, tags: Sequence[str]) -> Any:
    """A byte-level BPE with one token per tag, as a ``PreTrainedTokenizerFast``.

    Args:
        texts: what the merges are learned from.
        config: number of tokens, the tags and 256 bytes included, and how long a token of digits may be.
        tags: of the protocol.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    words: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if config.digits_per_token is not None:
        groups = pre_tokenizers.Split(Regex(rf"\d{{1,{config.digits_per_token}}}"), "isolated")
        words = pre_tokenizers.Sequence([groups, words])
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[PAD, EOS, *tags],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=list(tags),
        clean_up_tokenization_spaces=False,
    )


def build_model(config: TinyModelConfig, tokenizer: Any) -> Any:
    """A randomly initialised Llama in float32 with tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=3 * config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_heads,
            max_position_embeddings=config.max_positions,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


def copy_row(rng: random.Random, config: CopyConfig, ordinary: range) -> SFTRow:
    """Random prefix, a random segment, a separator and the segment again; only the repetition is learned.

    Args:
        rng: makes every choice.
        config: length of the row.
        ordinary: ids that are drawn from.
    """
    length = rng.randint(8, config.row_tokens // 2 - 8)
    segment = rng.choices(ordinary, k=length)
    prefix = rng.choices(ordinary, k=rng.randint(0, config.row_tokens - 1 - 2 * length))
    # The first repeated token follows from nothing.
    learn = [False] * (len(prefix) + length + 2) + [True] * (length - 1)
    return SFTRow([*prefix, *segment, _SEPARATOR, *segment], learn)


class Trainer:
    """AdamW on rows of any length, in bfloat16 with float32 weights.

    Args:
        model: a Llama.
        learning_rate: at its peak.
        warmup_steps: until the peak.
        decay_steps: until it has decayed linearly to a twentieth; None for no decay.
    """

    def __init__(
        self, model: Any, learning_rate: float, warmup_steps: int, decay_steps: int | None = None
    ) -> None:
        self.model = model
        # Twice as fast as scaled_dot_product_attention here: its CPU backward pass is slow for small heads.
        model.set_attn_implementation("eager")
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )

        def schedule(step: int) -> float:
            decay = 1.0 if decay_steps is None else max(0.05, 1 - step / decay_steps)
            return min(1.0, (step + 1) / warmup_steps) * decay

        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule)

    def step(self, rows: Sequence[SFTRow]) -> tuple[float, float]:
        """One update; returns mean loss (nats) and accuracy over the learned tokens."""
        num_learned = sum(sum(row.learn) for row in rows)
        loss = correct = 0.0
        for ids, learned, targets in _micro_batches(rows):
            with torch.autocast("cpu", torch.bfloat16):
                hidden = self.model.model(ids).last_hidden_state[:, :-1]
                logits = self.model.lm_head(hidden[learned]).float()
            micro_loss = F.cross_entropy(logits, targets, reduction="sum") / num_learned
            micro_loss.backward()
            loss += micro_loss.item()
            correct += (logits.argmax(-1) == targets).sum().item() / num_learned
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss, correct


def _micro_batches(rows: Sequence[SFTRow]) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Ids ``[B, T]``, whether a position predicts a learned token ``[B, T - 1]``, and those tokens ``[n]``.

    Padded on the right; short and long rows stay apart, so that little is padding.
    """
    ordered = sorted(rows, key=lambda row: len(row.token_ids))
    while ordered:
        shortest = len(ordered[0].token_ids)
        count = sum(len(row.token_ids) <= 2 * shortest for row in ordered)
        group, ordered = ordered[:count], ordered[count:]
        ids = torch.zeros(count, len(group[-1].token_ids), dtype=torch.long)
        learned = torch.zeros_like(ids, dtype=torch.bool)
        for i, row in enumerate(group):
            ids[i, : len(row.token_ids)] = torch.tensor(row.token_ids)
            learned[i, : len(row.learn)] = torch.tensor(row.learn)
        learned = learned[:, 1:]
        yield ids, learned, ids[:, 1:][learned]


def run(config: SFTConfig) -> dict[str, dict[str, float]]:
    """Train tokenizer and model, write them to ``config.output_dir`` and measure them.

    Returns:
        Metrics on the task's development split, as in ``provenance.json`` of the output folder.
    """
    started = time.monotonic()
    torch.set_num_threads(config.num_threads)
    torch.manual_seed(config.seed)
    rng = random.Random(config.seed)
    output = Path(config.output_dir)

    prompts = instantiate(config.task["train"], _convert_="all")
    curriculum: Curriculum = get_class(config.curriculum)(prompts, config.task["env"])
    tokenizer = train_tokenizer(curriculum.tokenizer_texts(), config.model, curriculum.tags)
    tokenizer.save_pretrained(output)
    env = instantiate(config.task["env"], tokenizer_path=str(output), _convert_="all")
    writers = [curriculum.writer(env, phase, rng) for phase in (config.reading, config.habits)]

    model = build_model(config.model, tokenizer)
    copies = CopyBatches(config, rng, first_id=2 + len(curriculum.tags))
    copy_steps = _learn_to_copy(model, config, copies)
    _learn_traces(model, config, copies, writers)
    model.save_pretrained(output)
    minutes = (time.monotonic() - started) / 60

    held_out = instantiate({**config.task["test"], "split": "dev"}, _convert_="all")[: config.eval_questions]
    metrics = asyncio.run(_measure_all(model.eval(), env, held_out, curriculum))
    provenance = {
        "command": f"python scripts/sft.py experiment={config.name}",
        "config": {name: value for name, value in asdict(config).items() if name != "output_dir"},
        "copy_steps": copy_steps,
        "minutes": round(minutes, 1),
        "held_out": {"split": "dev", "questions": len(held_out), **metrics},
        "versions": {name: distributions.version(name) for name in (*_VERSIONS, *curriculum.packages)},
    }
    (output / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")
    return metrics


class CopyBatches:
    """Batches of :func:`copy_row`.

    Args:
        config: of the whole build.
        rng: makes every choice.
        first_id: the first id that is no tag.
    """

    def __init__(self, config: SFTConfig, rng: random.Random, first_id: int) -> None:
        self.config, self.rng = config, rng
        self._ordinary = range(first_id, config.model.vocab_size)

    def batch(self) -> list[SFTRow]:
        """The rows of one training step."""
        copy = self.config.copy
        return [copy_row(self.rng, copy, self._ordinary) for _ in range(copy.batch_rows)]


def _learn_to_copy(model: Any, config: SFTConfig, copies: CopyBatches) -> int:
    trainer = Trainer(model, config.learning_rate, config.warmup_steps)
    step = 0
    for step in range(1, config.copy.steps + 1):
        loss, accuracy = trainer.step(copies.batch())
        _log_step("copy", step, loss, accuracy)
        if accuracy >= config.copy.accuracy:
            break
    return step


def _learn_traces(model: Any, config: SFTConfig, copies: CopyBatches, writers: Sequence[TraceWriter]) -> None:
    total_steps = sum(writer.config.steps for writer in writers)
    trainer = Trainer(model, config.learning_rate, config.warmup_steps, total_steps)
    step = 0
    for writer in writers:
        for _ in range(writer.config.steps):
            step += 1
            if copies.rng.random() < config.copy_share:
                trainer.step(copies.batch())
            else:
                loss, accuracy = trainer.step(asyncio.run(writer.batch()))
                _log_step("traces", step, loss, accuracy)


async def _measure_all(
    model: Any, env: Any, prompts: Sequence[Prompt], curriculum: Curriculum
) -> dict[str, dict[str, float]]:
    good = curriculum.good_turn
    return {
        "sampled": await measure(model, env, prompts, temperature=1.0),
        "greedy": await measure(model, env, prompts, temperature=0.0),
        "good_turn_then_sampled": await measure(model, env, prompts, temperature=1.0, first_turn=good),
        "good_turn_then_greedy": await measure(model, env, prompts, temperature=0.0, first_turn=good),
    }


def _log_step(phase: str, step: int, loss: float, accuracy: float) -> None:
    if step % 20 == 0:
        logger.info("%s step %d: loss %.3f, accuracy %.3f", phase, step, loss, accuracy)
