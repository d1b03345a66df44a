"""Runs untrusted Python."""

from torchrl_copc.envs.sandbox.client import Sandbox
from torchrl_copc.envs.sandbox.config import (
    SandboxConfig,
    SandboxError,
    SandboxResult,
    SandboxUnavailableError,
)

__all__ = ["Sandbox", "SandboxConfig", "SandboxError", "SandboxResult", "SandboxUnavailableError"]
