"""Tables and small transformers, one network for each seed of a study, evaluated together.

All parameters have a leading dimension ``S`` (seeds), and nothing mixes its entries: the gradient of a sum over seeds
is the gradient of each. A network maps responses to one output vector for each place of each response.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.nn import functional as F

from torchrl_copc.study.tasks import TokenTask

Decoder = Callable[[Tensor, Tensor | None], Tensor]
"""Called for one place after the other with the state ``[S, R]`` and the token before it (None at first)."""


class Network(Protocol):
    """What training needs of a network."""

    def __call__(self, prompt: Tensor, state: Tensor, action: Tensor) -> Tensor:
        """Outputs ``[S, R, T, out]`` from the prompt ``[S, R]`` and the states and tokens ``[S, R, T]``."""

    def decoder(self, prompt: Tensor) -> Decoder:
        """The same outputs place by place, ``[S, R, out]`` at each call."""

    def expected_return(self, task: TokenTask) -> Tensor:
        """Exact expected reward ``[S]`` of the network as a policy."""


class Table(nn.Module):
    """One row of parameters for each state.

    Args:
        weight: first values, ``[S, N, out]``.

    Examples:
        >>> from torchrl_copc.study.tasks import lock
        >>> task = lock([0, 1], prompts=2, length=3)
        >>> Table(task.initial_logits).expected_return(task)
        tensor([0.3430, 0.3430])
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, prompt: Tensor, state: Tensor, action: Tensor) -> Tensor:
        index = state.flatten(1)[..., None].expand(-1, -1, self.weight.shape[-1])
        return self.weight.gather(1, index).view(*state.shape, -1)

    def decoder(self, prompt: Tensor) -> Decoder:
        return lambda state, _: self(prompt, state, state)

    @torch.no_grad()
    def expected_return(self, task: TokenTask) -> Tensor:
        return task.expected_return(self.weight.softmax(-1))


class _Linear(nn.Module):
    """``S`` linear maps on ``[S, n, inputs]``."""

    def __init__(self, inputs: int, outputs: int, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.stack([torch.randn(inputs, outputs, generator=g) for g in generators]) / math.sqrt(inputs)
        )
        self.bias = nn.Parameter(torch.zeros(len(generators), 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


class _Norm(nn.Module):
    def __init__(self, width: int, seeds: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(seeds, 1, width))
        self.bias = nn.Parameter(torch.zeros(seeds, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, F.layer_norm(x, x.shape[-1:]), self.weight)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (_Norm(width, len(generators)) for _ in range(2))
        self.qkv = _Linear(width, 3 * width, generators)
        self.out = _Linear(width, width, generators)
        self.up, self.down = _Linear(width, 2 * width, generators), _Linear(2 * width, width, generators)

    def forward(self, x: Tensor, rows: int, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``x`` is ``[S, rows * T, width]``; ``past`` holds the keys and values of earlier places."""
        seeds, _, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(seeds * rows, -1, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        if past is not None:
            key, value = torch.cat((past[0], key), 2), torch.cat((past[1], value), 2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=past is None)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x)))), torch.stack((key, value))


class Transformer(nn.Module):
    """A decoder over the prompt's token and the tokens of the response; it sees no states.

    Args:
        prompts: number of prompts, each a token of its own.
        tokens: size of the vocabulary of responses.
        max_tokens: length of the longest response.
        outputs: size of the output vector.
        seeds: one network each.
        width: of the residual stream.
        layers: number of blocks.
        heads: of the attention.

    Examples:
        >>> net = Transformer(8, 4, 7, outputs=4, seeds=[0, 1])
        >>> sum(p[0].numel() for p in net.parameters())  # of one network
        17892
    """

    def __init__(
        self,
        prompts: int,
        tokens: int,
        max_tokens: int,
        *,
        outputs: int,
        seeds: Sequence[int],
        width: int = 32,
        layers: int = 2,
        heads: int = 2,
    ) -> None:
        super().__init__()
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.tokens = tokens
        # tokens of the response first, then prompts; places are embedded in the same way
        self.embedding, self.place = (
            nn.Parameter(scale * torch.stack([torch.randn(n, width, generator=g) for g in generators]))
            for n, scale in ((tokens + prompts, 1.0), (max_tokens, 0.5))
        )
        self.blocks = nn.ModuleList(_Block(width, heads, generators) for _ in range(layers))
        self.norm = _Norm(width, len(seeds))
        self.head = _Linear(width, outputs, generators)

    def forward(self, prompt: Tensor, state: Tensor, action: Tensor) -> Tensor:
        inputs = torch.cat((prompt[..., None] + self.tokens, action[..., :-1]), -1)  # [S, R, T]
        x = self._embed(inputs, slice(0, inputs.shape[-1]))
        for block in self.blocks:
            x, _ = block(x, inputs.shape[1])
        return self.head(self.norm(x)).view(*inputs.shape, -1)

    def _embed(self, inputs: Tensor, places: slice) -> Tensor:
        index = inputs.flatten(1)[..., None].expand(-1, -1, self.embedding.shape[-1])
        x = self.embedding.gather(1, index).view(*inputs.shape, -1)
        return (x + self.place[:, None, places]).flatten(1, 2)

    def decoder(self, prompt: Tensor) -> Decoder:
        past: list[Tensor | None] = [None] * len(self.blocks)
        place = 0

        def step(state: Tensor, action: Tensor | None) -> Tensor:
            nonlocal place
            inputs = prompt + self.tokens if action is None else action
            x = self._embed(inputs[..., None], slice(place, place + 1))
            for i, block in enumerate(self.blocks):
                x, past[i] = block(x, inputs.shape[1], past[i])
            place += 1
            return self.head(self.norm(x))

        return step

    @torch.no_grad()
    def expected_return(self, task: TokenTask) -> Tensor:
        paid = task.rewarded_responses
        log_prob = token_log_prob(self(paid.prompt, paid.state, paid.action), paid.action)
        likelihood = torch.where(paid.mask, log_prob, 0.0).sum(-1).exp()
        return (likelihood * paid.reward).sum(-1) / task.starts.numel()


def token_log_prob(logits: Tensor, action: Tensor) -> Tensor:
    """Log-prob (nats) of each token, ``[S, R, T]``, from logits ``[S, R, T, K]``."""
    return logits.log_softmax(-1).gather(-1, action[..., None]).squeeze(-1)


_ROWS = [("rows", "prompt"), ("rows", "state"), ("rows", "action"), ("rows", "index")]


class _TokenLogProb(nn.Module):
    def __init__(self, net: Network) -> None:
        super().__init__()
        self.net = net

    def forward(self, prompt: Tensor, state: Tensor, action: Tensor, index: Tensor) -> Tensor:
        return token_log_prob(self.net(prompt, state, action), action).flatten()[index].view(1, -1, 1)


class _TokenValue(nn.Module):
    def __init__(self, net: Network) -> None:
        super().__init__()
        self.net = net

    def forward(self, prompt: Tensor, state: Tensor, action: Tensor, index: Tensor) -> Tensor:
        return self.net(prompt, state, action).flatten()[index].view(1, -1, 1)


def actor_module(net: nn.Module) -> TensorDictModule:
    """The actor of a loss: reads the nested ``"rows"``, writes ``log_prob`` ``[1, n, 1]`` of their stored tokens."""
    return TensorDictModule(_TokenLogProb(cast(Network, net)), in_keys=_ROWS, out_keys=["log_prob"])


def critic_module(net: nn.Module) -> TensorDictModule:
    """The critic of a loss: reads the nested ``"rows"``, writes ``state_value`` ``[1, n, 1]`` of their tokens."""
    return TensorDictModule(_TokenValue(cast(Network, net)), in_keys=_ROWS, out_keys=["state_value"])
