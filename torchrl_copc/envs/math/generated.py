"""Problems made by reasoning-gym's generators (https://arxiv.org/abs/2505.24760): as many as wanted, no download."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any, Literal

from torchrl_copc.envs.math.verify import check_gold
from torchrl_copc.envs.records import DataError
from torchrl_copc.trajectory import Prompt

Split = Literal["train", "dev", "test"]

# Generators whose problems a few lines of code solve, with settings; all their answers are integers.
MIXTURE: Mapping[str, Mapping[str, Any]] = {
    "chain_sum": {"min_terms": 4, "max_terms": 8, "min_digits": 2, "max_digits": 5},
    # With "/" some of its answers round a quotient that the question leaves exact.
    "basic_arithmetic": {"min_terms": 4, "max_terms": 8, "operators": ["+", "-", "*"]},
    "gcd": {"max_numbers": 3, "max_value": 10_000},
    "lcm": {"max_numbers": 3, "max_value": 200},
    "count_primes": {"max_n": 10_000},
    # Of its other tasks, one prints a wrong year, one knows a few hundred questions, and the rest ask for words.
    "calendar_arithmetic": {"tasks": ["count_days"], "offset_upper_bound": 300},
    "letter_counting": {},
    "count_bits": {},
    "gsm_symbolic": {},
}

# Item i of a generator depends on its seed plus i alone: seeds of two splits must lie further apart than a data set
# is long. And of every ten different questions, seven train, one is for development and two test.
_FIRST_SEED: Mapping[Split, int] = {"train": 0, "dev": 10**9, "test": 2 * 10**9}
_TENTHS: Mapping[Split, range] = {"train": range(7), "dev": range(7, 8), "test": range(8, 10)}
_CHUNK = 1_000  # problems of one generator object; some prepare them all
_MOST_MISSES = 5_000  # problems in a row that are not new, before a generator counts as exhausted


def load_reasoning_gym(
    split: Split, size: int, tasks: Mapping[str, Mapping[str, Any]] | None = None
) -> list[Prompt]:
    """Generated problems, the generators taking turns, with an integer (or other verifiable) answer each.

    No question of one split occurs in another: the seeds are disjoint, and which split may hold a question is
    decided by its text, so this also holds for generators with few different questions. A smaller ``size``
    gives the first problems of a larger one. ``metadata`` holds ``data_source`` and ``task``. What splits share
    is the wording: ``gsm_symbolic`` fills 85 stories with names and numbers.

    Answers are verified like those of every other set (:func:`~torchrl_copc.envs.math.verify_answer`), not by
    the generators' own scorers, which give part of the reward to a wrong answer.

    Args:
        split: ``"train"``, ``"dev"`` or ``"test"``.
        size: problems.
        tasks: settings of each generator by its name in reasoning-gym; None for :data:`MIXTURE`.

    Raises:
        ValueError: for an unknown split or generator, settings it refuses, or a size below 1.
        DataError: if a generator has too few different questions, or its answers cannot be verified.
        ImportError: if reasoning-gym is not installed.

    Example:
        >>> prompts = load_reasoning_gym("train", 3, {"gcd": {}, "lcm": {}})
        >>> [prompt.metadata["task"] for prompt in prompts]
        ['gcd', 'lcm', 'gcd']
    """
    if split not in _FIRST_SEED:
        raise ValueError(f"split={split!r}: choose one of {', '.join(_FIRST_SEED)}")
    if size < 1:
        raise ValueError(f"size={size}; it must be at least 1")
    tasks = MIXTURE if tasks is None else tasks
    if not tasks:
        raise ValueError("tasks is empty; name at least one generator")
    streams = [_problems(task, settings, split) for task, settings in tasks.items()]
    return [next(streams[n % len(streams)]) for n in range(size)]


def _problems(task: str, settings: Mapping[str, Any], split: Split) -> Iterator[Prompt]:
    """The different questions of one generator that belong to ``split``."""
    seen: set[str] = set()
    misses = 0
    for seed, item in _items(task, settings, _FIRST_SEED[split]):
        question, answer = item["question"].strip(), item["answer"].strip()
        key = " ".join(question.lower().split())
        if key in seen or _tenth(key) not in _TENTHS[split]:
            misses += 1
            if misses == _MOST_MISSES:
                raise DataError(
                    f"{task} with {dict(settings)} has only {len(seen)} different questions for split {split!r}; "
                    "ask for fewer (size), or widen the generator's settings (tasks)"
                )
            continue
        misses = 0
        seen.add(key)
        try:
            check_gold(answer)
        except ValueError as error:
            raise DataError(f"{task}, seed {seed}: {error}; leave this generator out of tasks") from error
        yield Prompt(f"{task}-{seed}", question, (answer,), {"data_source": "reasoning_gym", "task": task})


def _items(task: str, settings: Mapping[str, Any], first_seed: int) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError(
            'generated problems need the package reasoning-gym: pip install "torchrl-copc[envs]"'
        ) from error
    for chunk_seed in count(first_seed, _CHUNK):
        try:
            chunk = reasoning_gym.create_dataset(task, seed=chunk_seed, size=_CHUNK, **settings)
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(
                f"tasks: {task} with {dict(settings)} is refused by reasoning-gym: {error}"
            ) from error
        for index in range(_CHUNK):
            yield chunk_seed + index, chunk[index]


def _tenth(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") % 10
