"""Builds maths environments from plain values, as configs and spawned workers need them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torchrl_copc.envs.math.env import MathEnv
from torchrl_copc.envs.math.verify import AnswerVerifier
from torchrl_copc.envs.sandbox import Sandbox, SandboxConfig


def make_math_env(
    tokenizer_path: str,
    *,
    sandbox: Mapping[str, Any] | None = None,
    verifier: Mapping[str, Any] | None = None,
    **settings: Any,
) -> MathEnv:
    """A :class:`~torchrl_copc.envs.math.env.MathEnv` with a running sandbox, from arguments that pickle.

    Args:
        tokenizer_path: folder or hub name of the policy's tokenizer.
        sandbox: of :class:`~torchrl_copc.envs.sandbox.SandboxConfig`.
        verifier: of :class:`~torchrl_copc.envs.math.verify.AnswerVerifier`.
        settings: of :class:`~torchrl_copc.envs.math.env.MathEnv`.

    Raises:
        ImportError: if transformers is not installed.
        SandboxUnavailableError: if this host offers no isolation that the configuration allows.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ImportError('text environments need transformers: pip install "torchrl_copc[envs]"') from error
    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_path)
    options = dict(sandbox or {})
    if "packages" in options:
        options["packages"] = tuple(options["packages"])
    box = Sandbox(SandboxConfig(**options))
    env = MathEnv(tokenizer, box, AnswerVerifier(**(verifier or {})), **settings)
    # Before the engine starts, so that a host without isolation is found at once; a loop may run in this thread.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, box.start()).result()
    return env
