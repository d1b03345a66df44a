"""Advantage channels: value estimators that correct for data sampled by an older policy."""

from __future__ import annotations

from torchrl_copc.value.brace import BRACEEstimator, brace_advantage_estimate
from torchrl_copc.value.copc import COPCEstimator
from torchrl_copc.value.estimator import OffPolicyEstimator, OffPolicyValueEstimators
from torchrl_copc.value.functional import copc_advantage_estimate
from torchrl_copc.value.gae import TokenGAE, length_adaptive_lmbda, token_gae_advantage_estimate
from torchrl_copc.value.group import (
    GroupRelativeAdvantage,
    MinimumVarianceAdvantage,
    group_relative_advantage_estimate,
    minimum_variance_advantage_estimate,
)
from torchrl_copc.value.retrace import RetraceEstimator, retrace_advantage_estimate
from torchrl_copc.value.vtrace import TokenVTrace, vtrace_advantage_estimate

__all__ = [
    "BRACEEstimator",
    "COPCEstimator",
    "GroupRelativeAdvantage",
    "MinimumVarianceAdvantage",
    "OffPolicyEstimator",
    "OffPolicyValueEstimators",
    "RetraceEstimator",
    "TokenGAE",
    "TokenVTrace",
    "brace_advantage_estimate",
    "copc_advantage_estimate",
    "group_relative_advantage_estimate",
    "length_adaptive_lmbda",
    "minimum_variance_advantage_estimate",
    "retrace_advantage_estimate",
    "token_gae_advantage_estimate",
    "vtrace_advantage_estimate",
]
