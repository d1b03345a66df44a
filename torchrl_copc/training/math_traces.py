r"""Scripted episodes of the maths environment: what the tiny model is shown before reinforcement learning.

The environment itself writes the rows, so they are token for token what reinforcement learning will see. The
sandbox is left out: what good code prints is the gold answer. In part of the traces the output is a random number
instead, so that only copying explains the answer.

The behaviour shown last is meant to be improved on: most episodes guess without running code, and much of the code
computes something else.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_copc.envs.math.env import MathEnv
from torchrl_copc.envs.math.protocol import TINY_TAGS
from torchrl_copc.envs.sandbox import SandboxConfig, SandboxResult
from torchrl_copc.training.traces import SFTRow, play, trace, unfinished_trace
from torchrl_copc.trajectory import Prompt

_MOST_DIGITS = 10  # of a random output; products have as many
_NUMBER_TEXTS = 200  # times every number is shown to the tokenizer: more often than any word of a question


@dataclass(frozen=True)
class Solution:
    """How a generator's problems are solved.

    Args:
        numbers: finds what the code is about in the question, one group each.
        good: code that prints the answer, ``{0}`` standing for the first group.
        poor: code that seldom does.
    """

    numbers: re.Pattern[str]
    good: str
    poor: tuple[str, ...]

    def write(self, code: str, question: str) -> str:
        """One of the codes for a question.

        Raises:
            ValueError: if the question is worded in another way.
        """
        found = self.numbers.search(question)
        if found is None:
            raise ValueError(f"no {self.numbers.pattern!r} in {question!r}")
        return code.format(*found.groups())


#: By the generator's name in reasoning-gym.
SOLUTIONS: Mapping[str, Solution] = {
    "gcd": Solution(
        re.compile(r"numbers: ([\d, ]+\d)"),
        "import math\nmath.gcd({0})",
        ("import math\nmath.lcm({0})", "max({0})", "math.gcd({0})"),
    ),
    "lcm": Solution(
        re.compile(r"numbers: ([\d, ]+\d)"),
        "import math\nmath.lcm({0})",
        ("import math\nmath.gcd({0})", "max({0})", "math.lcm({0})"),
    ),
    "products": Solution(
        re.compile(r"multiplication: (\d+) \* (\d+)"), "{0} * {1}", ("{0} + {1}", "{0} - {1}", "{0}")
    ),
    "chain_sum": Solution(
        re.compile(r"problem: (.+) ([+-] \d+) ="), "{0} {1}", ("{0}", "max({0} {1})", "{1}")
    ),
    "count_bits": Solution(
        re.compile(r"number (\d+)"),
        "bin({0}).count('1')",
        ("bin({0}).count('0')", "len(bin({0}))", "bin({0})"),
    ),
    "count_primes": Solution(
        re.compile(r"between (\d+) and (\d+)"),
        "import sympy\nlen(list(sympy.primerange({0}, {1} + 1)))",
        ("len(range({0}, {1}))", "len(list(sympy.primerange({0}, {1} + 1)))", "{1} - {0}"),
    ),
}


@dataclass
class TraceConfig:
    """What a phase's traces show, and for how long. Shares are probabilities."""

    steps: int
    batch_rows: int
    direct: float  # of all traces: a guess without code
    good_code: float  # of the code; the rest computes something else
    random_output: float = 0.3  # of the good code: its output is a random number


class MathCurriculum:
    """Generated problems of :data:`SOLUTIONS`: write the line of code that solves them, copy its output.

    Args:
        prompts: problems of :func:`~torchrl_copc.envs.math.generated.load_reasoning_gym`.
        env: settings of the maths environment; not looked at.
    """

    tags = TINY_TAGS
    packages = ("reasoning_gym",)

    def __init__(self, prompts: Sequence[Prompt], env: Mapping[str, Any]) -> None:
        self.prompts = prompts

    def tokenizer_texts(self) -> Iterator[str]:
        """Numbers of up to three digits, and questions, codes and answers without theirs."""
        for _ in range(_NUMBER_TEXTS):
            yield " ".join(f"{number:0{width}d}" for width in (2, 3) for number in range(10**width))
        for prompt in self.prompts[: 20 * len(SOLUTIONS)]:
            solution = solution_of(prompt)
            codes = (solution.write(code, prompt.question) for code in (solution.good, *solution.poor))
            for text in (prompt.question, r"\boxed{}", *codes):
                yield re.sub(r"\d", "", text)

    def writer(self, env: MathEnv, phase: Mapping[str, Any], rng: random.Random) -> TraceWriter:
        """Writes the traces of a phase with the settings of :class:`TraceConfig`."""
        return TraceWriter(env, self.prompts, TraceConfig(**phase), rng)

    def good_turn(self, prompt: Prompt) -> str:
        """Code that prints the answer."""
        solution = solution_of(prompt)
        return f"<code>{solution.write(solution.good, prompt.question)}</code>"


class KnownOutput:
    """Stands in for the sandbox: every code prints the same."""

    config = SandboxConfig()

    def __init__(self, stdout: str) -> None:
        self.result = SandboxResult("ok", f"{stdout}\n", "", 0.0)

    async def run(self, code: str, *, print_last: bool) -> SandboxResult:
        """The output, whatever the code."""
        return self.result


class TraceWriter:
    """Plays scripted episodes and returns them as training rows.

    Args:
        env: the environment, as reinforcement learning uses it.
        prompts: problems of :data:`SOLUTIONS`.
        config: what the traces show.
        rng: makes every choice.
    """

    def __init__(
        self, env: MathEnv, prompts: Sequence[Prompt], config: TraceConfig, rng: random.Random
    ) -> None:
        self.env, self.prompts, self.config, self.rng = env, prompts, config, rng
        self._guesses: dict[str, list[str]] = {}
        for prompt in prompts:
            self._guesses.setdefault(prompt.metadata["task"], []).append(prompt.answers[0])

    async def batch(self) -> list[SFTRow]:
        """The rows of one training step."""
        return [await self.row() for _ in range(self.config.batch_rows)]

    async def row(self) -> SFTRow:
        """One trace. It ends with poor code: what would follow is no answer."""
        prompt = self.rng.choice(self.prompts)
        solution = solution_of(prompt)
        episode = self.env.begin(prompt, "trace", "trace")
        if self.rng.random() < self.config.direct:
            guess = self.rng.choice(self._guesses[prompt.metadata["task"]])
            await play(self.env, episode, self._answer(guess))
            return trace(episode)
        if self.rng.random() >= self.config.good_code:
            code = solution.write(self.rng.choice(solution.poor), prompt.question)
            return unfinished_trace(self.env, episode, f"<code>{code}</code>")
        code = solution.write(solution.good, prompt.question)
        output = prompt.answers[0]
        if self.rng.random() < self.config.random_output:
            output = str(
                self.rng.choice((1, 1, 1, -1)) * self.rng.randrange(10 ** self.rng.randint(1, _MOST_DIGITS))
            )
        sandbox = self.env.sandbox
        self.env.sandbox = KnownOutput(output)  # type: ignore[assignment]
        try:
            await play(self.env, episode, f"<code>{code}</code>")
        finally:
            self.env.sandbox = sandbox
        await play(self.env, episode, self._answer(output))
        return trace(episode)

    def _answer(self, number: str) -> str:
        return rf"\boxed{{{number}}}{self.env.codec.tokenizer.eos_token}"


def solution_of(prompt: Prompt) -> Solution:
    """How a generated problem is solved.

    Raises:
        ValueError: for a generator without a solution here.
    """
    task = prompt.metadata["task"]
    if task not in SOLUTIONS:
        raise ValueError(f"no traces can be written for {task!r}; there are for {', '.join(SOLUTIONS)}")
    return SOLUTIONS[task]
