"""Exact expectations on small token MDPs: the estimates of the library, summed over every possible response."""

from __future__ import annotations

from torchrl_copc.theory.gradient import (
    gradient_mse,
    ideal_gradient,
    policy_weight,
    random_score,
    response_gradient,
    trace_covariance,
)
from torchrl_copc.theory.tree import PrefixTrees, advantage_estimate, random_trees, tilted_policy

__all__ = [
    "PrefixTrees",
    "advantage_estimate",
    "gradient_mse",
    "ideal_gradient",
    "policy_weight",
    "random_score",
    "random_trees",
    "response_gradient",
    "tilted_policy",
    "trace_covariance",
]
