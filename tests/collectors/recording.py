"""The real engine and search environment, with what a test needs to see and to provoke."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrl_copc.collectors.engine import VLLMEngine
from torchrl_copc.envs.search.env import SearchEnv
from torchrl_copc.envs.search.factory import make_retriever
from torchrl_copc.envs.token_env import Final, Observation, TokenEpisode
from torchrl_copc.trajectory import Completion, Prompt


class RecordingEngine(VLLMEngine):
    """Keeps the ids of every request and what came back."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.requests: list[tuple[str, list[int], list[int]]] = []

    async def generate(self, token_ids: Sequence[int], *, request_id: str, **settings: Any) -> Completion:
        completion = await super().generate(token_ids, request_id=request_id, **settings)
        self.requests.append((request_id, list(token_ids), list(completion.token_ids)))
        return completion

    async def recorded(self) -> list[tuple[str, list[int], list[int]]]:
        return self.requests

    async def core_pids(self) -> list[int]:
        return [process.pid for process in self.processes if process.pid is not None]


class TalkativeSearchEnv(SearchEnv):
    """Real searches and passages for a policy that has not learned the tags: common letters end its turns."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._stop_strings = ("e", "a", "o", "t", "s", " ")

    def render_prompt(self, prompt: Prompt) -> list[int]:
        return self.codec.ordinary(prompt.question)  # the tiny model's context is short

    async def respond(self, episode: TokenEpisode, text: str) -> Observation | Final:
        return await super().respond(episode, f"<search> capital {text} </search>")


def make_env(tokenizer_path: str) -> TalkativeSearchEnv:
    from transformers import AutoTokenizer

    return TalkativeSearchEnv(
        AutoTokenizer.from_pretrained(tokenizer_path),
        make_retriever("factbook"),
        search_turns=4,
        max_turn_tokens=40,
        max_observation_tokens=96,
        max_response_tokens=420,
    )
