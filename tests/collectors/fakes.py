"""A scripted engine and environment for the collector's tests: real processes and pipes, no model.

A prompt's metadata holds the script of its episodes: ``turns``, ``tokens`` per turn, ``delay`` seconds per
turn, and ``fault``.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_copc.collectors.engine import EngineDeadError, WeightUpdate
from torchrl_copc.trajectory import Completion, Episode, Prompt

TURN_MARK = 1  # first id of every turn's context
STOP = 2  # last id of every sampled turn


def make_prompts(count: int, **script: Any) -> list[Prompt]:
    """``count`` prompts that share a script."""
    return [Prompt(f"p{i}", f"question {i}", (f"answer {i}",), metadata=script) for i in range(count)]


@dataclass(frozen=True)
class Turn:
    token_ids: list[int]
    max_tokens: int
    stop_token_ids: tuple[int, ...] = (STOP,)
    stop_strings: tuple[str, ...] = ()


class ScriptedEnv:
    """Turns and faults as the prompt says; reward 1 for every even prompt."""

    def __init__(self) -> None:
        self._advanced = itertools.count()  # of the fault "hang first"

    def begin(self, prompt: Prompt, row_id: str, group_id: str) -> Episode:
        episode = Episode(row_id, prompt, group_id)
        # The engine sees ids only: the script travels in them.
        script = prompt.metadata
        episode.append_context([TURN_MARK, script.get("tokens", 3), round(1000 * script.get("delay", 0.0))])
        if script.get("fault") == "bug":
            raise KeyError("a bug in a tool")
        return episode

    def next_turn(self, episode: Episode) -> Turn:
        return Turn(list(episode.token_ids), max_tokens=64)

    async def advance(self, episode: Episode, completion: Completion) -> None:
        script = episode.prompt.metadata
        fault = script.get("fault")
        if completion.finish_reason == "abort":
            episode.append_completion(completion)
            episode.finish(0.0, "abort", truncated=True)
            return
        if fault == "cancels itself once" and not episode.group_id.count("+"):
            raise asyncio.CancelledError
        if fault == "cannot be sent once" and not episode.group_id.count("+"):
            episode.metrics["hook"] = lambda: None
        if fault == "hang" or (fault == "hang first" and next(self._advanced) == 0):
            episode.append_completion(completion)
            await asyncio.sleep(3600)
        if fault == "block":
            time.sleep(3.0)
        if fault == "bug once" and not episode.group_id.count("+"):
            raise KeyError("a bug in a tool")
        if fault == "nothing sampled once" and not episode.group_id.count("+"):
            episode.finish(0.0, "abort", truncated=True)
            return
        if fault in ("nan", "-inf"):
            completion = Completion(
                completion.token_ids,
                (completion.log_probs[0], float(fault), *completion.log_probs[2:]),
                completion.versions,
                completion.finish_reason,
            )
        if fault == "engine dies":
            raise EngineDeadError("the engine core is gone")
        if fault == "hang once" and not episode.group_id.count("+"):
            episode.append_completion(completion)
            await asyncio.sleep(3600)
        if fault == "process dies":
            print("last words of the worker", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        episode.append_completion(completion)
        episode.num_tool_calls += 1
        if episode.num_turns >= script.get("turns", 2):
            episode.finish(float(int(episode.prompt.id[1:]) % 2 == 0), "stop")
        else:
            episode.append_context(
                [TURN_MARK, script.get("tokens", 3), round(1000 * script.get("delay", 0.0))]
            )

    def cut(self, episode: Episode, reason: str) -> None:
        episode.finish(0.0, reason, truncated=True)


class ScriptedEngine:
    """Samples the tokens that the last context asks for, one version per token, slowly if asked."""

    def __init__(self, start_fault: str = "") -> None:
        self.start_fault = start_fault
        self.version = 0
        self.seen: list[list[int]] = []
        self.greatest_concurrency = 0
        self._aborted: set[str] = set()
        self._running: set[str] = set()

    async def start(self) -> None:
        if self.start_fault == "hang":
            print("waiting for a port that never opens", flush=True)
            time.sleep(3600)
        if self.start_fault == "error":
            raise RuntimeError("no such checkpoint")
        if self.start_fault == "exit":
            os._exit(7)

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        stop_token_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        temperature: float = 1.0,
        seed: int | None = None,
        request_id: str,
    ) -> Completion:
        self.seen.append(list(token_ids))
        self._running.add(request_id)
        self.greatest_concurrency = max(self.greatest_concurrency, len(self._running))
        count, delay = token_ids[-2], token_ids[-1] / 1000
        ids: list[int] = []
        versions: list[int] = []
        try:
            for position in range(count):
                await asyncio.sleep(delay / count)
                if request_id in self._aborted:
                    return Completion(tuple(ids), (-0.5,) * len(ids), tuple(versions), "abort")
                ids.append(STOP if position == count - 1 else 10 + (seed or 0) % 1000 + position)
                versions.append(self.version)
        finally:
            self._running.discard(request_id)
        return Completion(tuple(ids), (-0.5,) * count, tuple(versions), "stop")

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[-1.0] * (len(sequence) - 1) for sequence in sequences]

    async def abort(self, request_id: str) -> None:
        self._aborted.add(request_id)

    async def update_weights(self, update: WeightUpdate, version: int) -> dict[str, float]:
        self.version = version
        return {"load": 0.0}

    async def weight_version(self) -> int:
        return self.version

    async def report(self) -> dict[str, Any]:
        """What the engine saw (a test's view; not part of the protocol)."""
        return {"seen": self.seen, "running": len(self._running), "concurrency": self.greatest_concurrency}

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def fail(self, kind: str) -> None:
        if kind == "dead":
            raise EngineDeadError("the engine core is gone")
        raise ValueError(kind)

    async def shutdown(self) -> None:
        return None


class HangingEngine(ScriptedEngine):
    def __init__(self) -> None:
        super().__init__("hang")


class FailingEngine(ScriptedEngine):
    def __init__(self) -> None:
        super().__init__("error")


class ExitingEngine(ScriptedEngine):
    def __init__(self) -> None:
        super().__init__("exit")
