"""Token-exact multi-turn text environments."""

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
