"""Advantage channels: value estimators that correct for data sampled by an older policy."""

from __future__ import annotations

from torchrl_copc.value.copc import COPCEstimator
from torchrl_copc.value.estimator import OffPolicyValueEstimators
from torchrl_copc.value.functional import copc_advantage_estimate

__all__ = ["COPCEstimator", "OffPolicyValueEstimators", "copc_advantage_estimate"]
