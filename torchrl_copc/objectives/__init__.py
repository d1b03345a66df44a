"""Losses that correct for data sampled by an older policy, as TorchRL loss modules."""

from __future__ import annotations

from torchrl_copc.objectives.aggregate import loss_weights
from torchrl_copc.objectives.copc import COPCLoss

__all__ = ["COPCLoss", "loss_weights"]
