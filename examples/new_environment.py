"""A new text environment: sums with a calculator. ``docs/howto/new_environment.md`` walks through it.

python examples/new_environment.py
"""

from __future__ import annotations

import ast
import asyncio
import operator
import re

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from torchrl_copc.envs import Final, Observation, TokenEnv, TokenEpisode, TurnLimits
from torchrl_copc.trajectory import Completion, Prompt, check_row

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(expression: str) -> str:
    """The value of a sum, difference or product of integers, or what is wrong with it."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError("only integers with + - * are understood")

    try:
        return str(value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"error: {error}"


class CalculatorEnv(TokenEnv):
    """``<calc> 2 * 3 </calc>`` is answered with ``<result>6</result>``; ``<answer> 6 </answer>`` ends the episode."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, prompts: tuple[Prompt, ...] = ()) -> None:
        limits = TurnLimits(
            max_turns=3, max_turn_tokens=64, max_observation_tokens=64, max_response_tokens=256
        )
        super().__init__(tokenizer, limits, stop_tags=("</calc>", "</answer>"), prompts=prompts)

    def initial_metrics(self) -> dict[str, float]:
        return {"correct": 0.0}

    def render_prompt(self, prompt: Prompt) -> list[int]:
        before = self.codec.control(
            "Calculate with <calc> ... </calc>, then write <answer> ... </answer>.\nQuestion:"
        )
        return [*before, *self.codec.ordinary(f" {prompt.question}"), *self.codec.control("\n")]

    async def respond(self, episode: TokenEpisode, text: str) -> Observation | Final:
        if answer := re.search(r"<answer>(.*?)</answer>", text, re.DOTALL):
            episode.metrics["correct"] = float(answer[1].strip() in episode.prompt.answers)
            return Final(reward=episode.metrics["correct"])
        if call := re.search(r"<calc>(.*?)</calc>", text, re.DOTALL):
            episode.num_tool_calls += 1
            return Observation((calculate(call[1]),), opening="\n<result>", closing="</result>\n")
        return Observation(("Write <calc> or <answer>.",), opening="\n", closing="\n")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: enough to see the ids; a real run takes the policy's tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [], trainers.BpeTrainer(special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


async def play(env: CalculatorEnv, prompt: Prompt, turns: list[str]) -> TokenEpisode:
    """One episode. Here turns are scripted; in training an engine samples them from ``request``."""
    episode = env.begin(prompt, row_id="row-0", group_id=prompt.id)
    for text in turns:
        request = env.next_turn(episode)
        ids = env.codec.control(text)[: request.max_tokens]
        completion = Completion(tuple(ids), (-0.1,) * len(ids), (0,) * len(ids), finish_reason="stop")
        await env.advance(episode, completion)
        if episode.done:
            break
    return episode


def main() -> None:
    env = CalculatorEnv(byte_tokenizer())
    prompt = Prompt(id="sum-1", question="What is 17 * 3 + 4?", answers=("55",))
    script = ["I need <calc> 17 * 3 + 4 </calc> and this is dropped", "<answer> 55 </answer>"]
    episode = asyncio.run(play(env, prompt, script))
    row = episode.to_row()
    check_row(row)
    print(env.codec.decode(episode.token_ids))
    print(f"reward {episode.reward}, {episode.num_policy_tokens} policy tokens of {len(row)}")


if __name__ == "__main__":
    main()
