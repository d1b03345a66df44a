"""Losses that correct for data sampled by an older policy, as TorchRL loss modules."""

from __future__ import annotations

from torchrl_copc.objectives.aggregate import loss_weights
from torchrl_copc.objectives.base import PolicyCriticLoss
from torchrl_copc.objectives.copc import COPCLoss
from torchrl_copc.objectives.methods import (
    AReaLLoss,
    AsyncPPOLoss,
    BRACELoss,
    DAPOLoss,
    GRPOLoss,
    M2POLoss,
    RetraceLoss,
    SAOLoss,
    VCPOLoss,
    VTraceLoss,
)

__all__ = [
    "AReaLLoss",
    "AsyncPPOLoss",
    "BRACELoss",
    "COPCLoss",
    "DAPOLoss",
    "GRPOLoss",
    "M2POLoss",
    "PolicyCriticLoss",
    "RetraceLoss",
    "SAOLoss",
    "VCPOLoss",
    "VTraceLoss",
    "loss_weights",
]
