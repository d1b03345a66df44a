"""Token-exact multi-turn text environments."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_copc.envs.codec import TokenCodec
    from torchrl_copc.envs.token_env import (
        Final,
        Observation,
        PrefixError,
        TokenEnv,
        TokenEpisode,
        TurnLimits,
        TurnRequest,
    )

__all__ = [
    "Final",
    "Observation",
    "PrefixError",
    "TokenCodec",
    "TokenEnv",
    "TokenEpisode",
    "TurnLimits",
    "TurnRequest",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for: the sandbox, in this package too, starts without waiting for torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "codec" if name == "TokenCodec" else "token_env"
    return getattr(import_module(f"{__name__}.{module}"), name)
