"""Hugging Face causal language models as TensorDict actor and critic.

Both read micro-batches made by :func:`~torchrl_copc.models.layout.micro_batches` under ``"lm"`` and apply
their heads only at the positions that predict policy tokens. Nothing here knows about ranks: the learner
shards ``.net`` from outside.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from torchrl_copc.models.linear_log_prob import linear_log_prob, score_sq_norm

__all__ = ["CausalLMActor", "CausalLMCritic", "linear_log_prob"]

_VALUE_HEAD_FILE = "value_head.safetensors"
# A head that does more than a matrix product would give other log-probs than `linear_log_prob`.
_HEAD_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "language models need transformers: pip install 'torchrl_copc[cpu]' or [vllm]"
        ) from error
    return transformers


def _prepare(trunk: Any, gradient_checkpointing: bool) -> None:
    """Switch dropout off (ratios compare two passes of one network), gradient checkpointing on when asked."""
    for module in trunk.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    if gradient_checkpointing:
        trunk.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # transformers checkpoints activations only in training mode; without dropout it changes nothing else.
    trunk.train(gradient_checkpointing)


def _hidden_states(trunk: Any, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    # No attention mask: causal attention never reaches right padding, and without one transformers finds
    # packed rows by their restarting positions.
    output = trunk(input_ids=input_ids, position_ids=position_ids, use_cache=False)
    return output.last_hidden_state.flatten(0, 1)


class _ActorNet(nn.Module):
    def __init__(self, model: Any, temperature: float, chunk_size: int | None) -> None:
        super().__init__()
        self.model, self.temperature, self.chunk_size = model, temperature, chunk_size

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        predict_index: Tensor,
        target_ids: Tensor,
        temperature: float | None = None,
        with_score: bool = False,
    ) -> tuple[Tensor, ...]:
        hidden = _hidden_states(self.model.get_decoder(), input_ids, position_ids)[predict_index]
        weight = self.model.get_output_embeddings().weight
        head = (hidden, weight, target_ids, temperature or self.temperature, self.chunk_size)
        outputs = linear_log_prob(*head)
        return (*outputs, score_sq_norm(*head)) if with_score else outputs


class _CriticNet(nn.Module):
    def __init__(self, trunk: Any) -> None:
        super().__init__()
        self.trunk = trunk
        self.value_head = nn.Linear(trunk.config.hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, input_ids: Tensor, position_ids: Tensor, index: Tensor) -> Tensor:
        hidden = _hidden_states(self.trunk, input_ids, position_ids)[index]
        return self.value_head(hidden.float())


class CausalLMActor(TensorDictModuleBase):
    """Log-prob and entropy of the stored policy tokens under a causal language model.

    Args:
        model: a transformers ``...ForCausalLM`` whose head is one matrix, tied to the embedding or not.

    Keyword Args:
        temperature: that of sampling; behaviour log-probs come from the tempered distribution. Defaults to
            ``1.0``.
        chunk_size: positions per chunk of the head. Defaults to what fits 256 MiB of logits.
        gradient_checkpointing: recompute activations in the backward pass. Defaults to ``False``.

    Reads ``("lm", "input_ids" | "position_ids" | "predict_index" | "target_ids")``, writes ``log_prob`` and
    ``entropy`` (nats, float32 ``[1, n, 1]``), and while :attr:`with_score` is set ``score_sq_norm``
    (:func:`~torchrl_copc.models.linear_log_prob.score_sq_norm`, alike). Where ``("lm", "outputs")`` holds outputs of an
    earlier pass with the same weights, they are taken from there.

    Raises:
        ValueError: if the model's head has a bias, a logit scale or soft-capping.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        ...                      num_attention_heads=2)
        >>> actor = CausalLMActor(LlamaForCausalLM(config))
        >>> lm = {"input_ids": torch.arange(6)[None], "position_ids": torch.arange(6)[None],
        ...       "predict_index": torch.tensor([3, 4]), "target_ids": torch.tensor([4, 5])}
        >>> actor(TensorDict({"lm": lm}))["log_prob"].shape
        torch.Size([1, 2, 1])
    """

    def __init__(
        self,
        model: Any,
        *,
        temperature: float = 1.0,
        chunk_size: int | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        head = model.get_output_embeddings()
        if getattr(head, "bias", None) is not None:
            raise ValueError(f"{type(model).__name__} has a bias in its output layer, which is not supported")
        for name in _HEAD_SETTINGS:
            if getattr(model.config, name, None) not in (None, 1.0):
                raise ValueError(
                    f"{type(model).__name__} sets {name}={getattr(model.config, name)}: not supported"
                )
        _prepare(model, gradient_checkpointing)
        self.in_keys = [("lm", k) for k in ("input_ids", "position_ids", "predict_index", "target_ids")]
        self.out_keys = ["log_prob", "entropy"]
        self.with_score = False
        self.net = _ActorNet(model, temperature, chunk_size)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        attn_implementation: str = "sdpa",
        **kwargs: Any,
    ) -> CausalLMActor:
        """Load from a Hugging Face folder or hub name.

        Args:
            path: folder or hub name.

        Keyword Args:
            dtype: of the weights; float32 keeps master weights for the optimizer. Defaults to
                ``torch.float32``.
            attn_implementation: ``"sdpa"``, ``"flash_attention_2"``, ``"flex_attention"``, ... Defaults to
                ``"sdpa"``.
            kwargs: as the constructor's.
        """
        model = _transformers().AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attn_implementation
        )
        return cls(model, **kwargs)

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self.net.model

    @property
    def trunk(self) -> Any:
        """The part of the model below the head; ``trunk.layers`` are its blocks."""
        return self.net.model.get_decoder()

    @property
    def tied_names(self) -> set[str]:
        """Names in the state dict that only repeat another parameter (a tied head)."""
        seen: set[int] = set()
        tied = set()
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if id(parameter) in seen:
                tied.add(name)
            seen.add(id(parameter))
        return tied

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        if (outputs := tensordict.get(("lm", "outputs"), None)) is not None:
            return tensordict.update(outputs)
        outputs = self.net(*(tensordict.get(key) for key in self.in_keys), with_score=self.with_score)
        for key, output in zip((*self.out_keys, "score_sq_norm"), outputs, strict=False):
            tensordict.set(key, output.reshape(1, -1, 1))
        return tensordict

    def save_pretrained(self, path: str | Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write config and safetensors that transformers and vLLM load.

        Args:
            path: folder, created when missing.
            state_dict: full tensors under the model's names, needed when the model is sharded.
        """
        self.model.save_pretrained(path, state_dict=state_dict)


class CausalLMCritic(TensorDictModuleBase):
    """Value of the state in which each policy token is sampled: a causal trunk and a linear float32 head,
    zero at first.

    Args:
        trunk: a transformers decoder without head (``AutoModel``).

    Keyword Args:
        gradient_checkpointing: recompute activations in the backward pass. Defaults to ``False``.

    Reads ``("lm", "input_ids" | "position_ids" | "predict_index" | "final_index")``, writes ``state_value``
    (float32 ``[1, n, 1]``, reward units) and ``final_value`` (float32 ``[B]``: the value after each row's
    last token, trailing observation included). Where ``("lm", "outputs")`` holds these two, of an earlier
    pass with the same weights, they are taken from there.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from transformers import LlamaConfig, LlamaModel
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        ...                      num_attention_heads=2)
        >>> critic = CausalLMCritic(LlamaModel(config))
        >>> lm = {"input_ids": torch.arange(6)[None], "position_ids": torch.arange(6)[None],
        ...       "predict_index": torch.tensor([3, 4]), "final_index": torch.tensor([5])}
        >>> critic(TensorDict({"lm": lm}))["state_value"].flatten().tolist()
        [0.0, 0.0]
    """

    def __init__(self, trunk: Any, *, gradient_checkpointing: bool = False) -> None:
        super().__init__()
        _prepare(trunk, gradient_checkpointing)
        self.in_keys = [("lm", k) for k in ("input_ids", "position_ids", "predict_index", "final_index")]
        self.out_keys = ["state_value", "final_value"]
        self.net = _CriticNet(trunk)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        attn_implementation: str = "sdpa",
        **kwargs: Any,
    ) -> CausalLMCritic:
        """Load the trunk of a Hugging Face model, and the value head when :meth:`save_pretrained` wrote one.

        Args:
            path: folder or hub name of a causal language model or of a saved critic.

        Keyword Args:
            dtype: of the weights. Defaults to ``torch.float32``.
            attn_implementation: as in transformers. Defaults to ``"sdpa"``.
            kwargs: as the constructor's.
        """
        trunk = _transformers().AutoModel.from_pretrained(
            path, dtype=dtype, attn_implementation=attn_implementation
        )
        critic = cls(trunk, **kwargs)
        head = Path(path) / _VALUE_HEAD_FILE
        if head.is_file():
            from safetensors.torch import load_file

            critic.net.value_head.load_state_dict(load_file(head))
        return critic

    @property
    def trunk(self) -> Any:
        """The transformers decoder; ``trunk.layers`` are its blocks."""
        return self.net.trunk

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        if (outputs := tensordict.get(("lm", "outputs"), None)) is not None:
            return tensordict.update(outputs)
        input_ids, position_ids, predict, final = (tensordict.get(key) for key in self.in_keys)
        value = self.net(input_ids, position_ids, torch.cat([predict, final]))
        tensordict.set("state_value", value[: predict.numel()].reshape(1, -1, 1))
        return tensordict.set("final_value", value[predict.numel() :].flatten())

    def save_pretrained(self, path: str | Path) -> None:
        """Write the trunk in Hugging Face format and the head to ``value_head.safetensors`` beside it."""
        from safetensors.torch import save_file

        self.trunk.save_pretrained(path)
        save_file(self.net.value_head.state_dict(), Path(path) / _VALUE_HEAD_FILE)
