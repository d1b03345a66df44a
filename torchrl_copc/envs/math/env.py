"""Maths with a Python interpreter, one token-exact row an episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchrl_copc.envs.chat import choose_protocol
from torchrl_copc.envs.math.output import cut_middle, output_text
from torchrl_copc.envs.math.protocol import PROTOCOLS, Answer, CodeRules
from torchrl_copc.envs.math.verify import AnswerVerifier
from torchrl_copc.envs.sandbox import Sandbox
from torchrl_copc.envs.token_env import Final, Observation, TokenEnv, TokenEpisode, TurnLimits
from torchrl_copc.trajectory import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_METRICS = (
    "correct",
    "ran_code",
    "tool_calls",
    "tool_errors",
    "tool_timeouts",
    "invalid_actions",
    "verification_timeouts",
)


class MathEnv(TokenEnv):
    r"""The policy may run code in all its turns but the last; a verified answer earns 1, everything else 0.

    A turn that runs code is answered with the output. A turn without code that the policy ends itself is the final one:
    the last ``\boxed{}`` among its tokens counts, never one in the problem, in an output or in an earlier turn.
    A response that a budget ends earns nothing. An exception of the sandbox itself (not of the code) is raised: the
    collector starts the episode again and stops the run if that keeps happening. ``episode.metrics`` holds ``correct``,
    ``ran_code`` (0 or 1), ``tool_calls``, ``tool_errors``, ``tool_timeouts``, ``invalid_actions`` (code that
    is not marked as the protocol wants it) and ``verification_timeouts``; ``episode.timings["tool"]`` the
    seconds spent on running code and verifying.

    Args:
        tokenizer: a fast Hugging Face tokenizer, the policy's.
        sandbox: what runs the code, and for how long; the caller closes it.
        verifier: what compares answers; None for a new one.
        protocol: ``"python_block"``, ``"hermes"`` or ``"tiny"``.
        max_turns: completions the policy may sample, the final one included.
        max_turn_tokens: ids sampled in one turn.
        max_observation_tokens: ids of one observation, its frame included.
        max_response_tokens: everything after the prompt, observations included.
        max_output_characters: of one output that are shown; what is cut out lies in the middle.
        prompts: tasks that ``reset`` takes in turn; :meth:`begin` needs none.

    Raises:
        ValueError: for a setting that cannot work, with its name and value.

    Example:
        >>> import asyncio
        >>> from importlib.resources import files
        >>> from transformers import AutoTokenizer
        >>> from torchrl_copc.envs.sandbox import SandboxConfig
        >>> from torchrl_copc.trajectory import Completion
        >>> async def play(turns):
        ...     async with Sandbox(SandboxConfig(workers=1)) as sandbox:
        ...         tokenizer = AutoTokenizer.from_pretrained(files("torchrl_copc") / "assets" / "math_tiny")
        ...         env = MathEnv(tokenizer, sandbox, protocol="tiny")
        ...         episode = env.begin(Prompt("p", "What is 6 times 7?", ("42",)), "row", "group")
        ...         for text in turns:
        ...             ids = tuple(env.codec.control(text))
        ...             await env.advance(episode, Completion(ids, (-0.1,) * len(ids), (0,) * len(ids), "stop"))
        ...         return env.codec.decode(episode.token_ids), episode.reward
        >>> text, reward = asyncio.run(play(["<code>6 * 7</code>", r"\boxed{42}<eos>"]))
        >>> print(text, reward)
        <user>What is 6 times 7?<assistant><code>6 * 7</code><output>42</output>\boxed{42}<eos> 1.0
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        sandbox: Sandbox,
        verifier: AnswerVerifier | None = None,
        *,
        protocol: str = "python_block",
        max_turns: int = 8,
        max_turn_tokens: int = 4096,
        max_observation_tokens: int = 1024,
        max_response_tokens: int = 16384,
        max_output_characters: int = 2000,
        prompts: Sequence[Prompt] = (),
    ) -> None:
        if max_output_characters < 1:
            raise ValueError(f"max_output_characters={max_output_characters}; it must be at least 1")
        limits = TurnLimits(max_turns, max_turn_tokens, max_observation_tokens, max_response_tokens)
        chosen = choose_protocol(protocol, PROTOCOLS)
        super().__init__(tokenizer, limits, stop_tags=chosen.stop_tags, prompts=prompts)
        config = sandbox.config
        rules = CodeRules(max_turns - 1, config.timeout, max_output_characters, config.packages)
        self.protocol = chosen(self.codec, rules)
        self.sandbox = sandbox
        self.verifier = verifier or AnswerVerifier()
        self._max_output_characters = max_output_characters
        # Tags without room for text are found here and not at the first call.
        self._room = min(
            self._text_room(self.protocol.observation("x", last_turn=last_turn, after_eos=after_eos))
            for last_turn in (False, True)
            for after_eos in (False, True)
        )

    def render_prompt(self, prompt: Prompt) -> list[int]:
        """Instructions and problem, as the protocol writes them."""
        return self.protocol.render_prompt(prompt.question)

    def initial_metrics(self) -> dict[str, float]:
        """All at zero."""
        return dict.fromkeys(_METRICS, 0.0)

    async def respond(self, episode: TokenEpisode, text: str) -> Observation | Final:
        """Run the code, verify the answer, or say what was wrong with the turn."""
        action = self.protocol.parse(text)
        if isinstance(action, Answer):
            return Final(await self._verify(episode, action.text))
        if action is None:
            episode.metrics["invalid_actions"] += 1
            return self._reply(episode, self.protocol.invalid_action.rstrip("\n"))
        if episode.num_turns >= self.limits.max_turns:  # the last turn may only answer
            return Final(0.0, "length")
        return self._reply(episode, await self._run_code(episode, action.source))

    async def _run_code(self, episode: TokenEpisode, source: str) -> str:
        episode.num_tool_calls += 1
        episode.metrics["tool_calls"] += 1
        episode.metrics["ran_code"] = 1.0
        result = await self.sandbox.run(source, print_last=True)
        if result.status == "timeout":
            episode.metrics["tool_timeouts"] += 1
        elif result.status != "ok":
            episode.metrics["tool_errors"] += 1
        return self._fit(output_text(result, self.sandbox.config) or self.protocol.no_output)

    async def _verify(self, episode: TokenEpisode, text: str) -> float:
        for gold in episode.prompt.answers:
            verdict = await self.verifier.verify_async(gold, text)
            if verdict.how in ("timeout", "crash"):
                episode.metrics["verification_timeouts"] += 1
            if verdict.correct:
                episode.metrics["correct"] = 1.0
                break
        return episode.metrics["correct"]

    def _reply(self, episode: TokenEpisode, text: str) -> Observation:
        return self.protocol.observation(
            text,
            last_turn=episode.num_turns == self.limits.max_turns - 1,
            after_eos=episode.token_ids[-1] == self.codec.tokenizer.eos_token_id,
        )

    def _fit(self, text: str) -> str:
        """The text within the limits on characters and tokens, whichever is less."""
        limit = self._max_output_characters
        shown = cut_middle(text, limit)
        while limit > 1 and (length := len(self.encode_chunk(shown))) > self._room:
            limit = min(limit - 1, limit * self._room // length)
            shown = cut_middle(text, max(limit, 1))
        return shown

    def _text_room(self, observation: Observation) -> int:
        frame = Observation(("",), observation.opening, observation.closing)
        return self.limits.max_observation_tokens - len(self.encode_observation(frame))
