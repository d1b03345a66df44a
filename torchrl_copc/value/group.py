"""Advantages without a critic: responses to one prompt are each other's baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.objectives.utils import register_value_estimator

from torchrl_copc.value.estimator import OffPolicyEstimator, OffPolicyValueEstimators


@dataclass(frozen=True)
class _Responses:
    """The responses of a batch, in the order of its steps."""

    index: Tensor  # [steps] which response each step belongs to
    first: Tensor  # [R] first step of each response
    returns: Tensor  # [R] float64
    group: Tensor  # [R] 0, 1, ... for the groups that occur
    size: Tensor  # [G] responses per group, float64

    def group_sum(self, x: Tensor) -> Tensor:
        """Sums over the responses of each group, ``[G]``."""
        return torch.zeros_like(self.size).index_add(0, self.group, x)

    def sum(self, x: Tensor) -> Tensor:
        """Sums over the steps of each response, ``[R]``, float64."""
        zeros = torch.zeros(self.first.numel(), dtype=torch.float64, device=x.device)
        return zeros.index_add(0, self.index, x.flatten().double())


def _responses(reward: Tensor, done: Tensor, group_id: Tensor) -> _Responses:
    """All arguments have time as their last dimension; a response still running ends with the data."""
    starts = torch.nn.functional.pad(done[..., :-1], (1, 0), value=True)
    index = starts.flatten().cumsum(0) - 1
    first = starts.flatten().nonzero().squeeze(-1)
    # float64: the rounding error of a mean of equal returns must stay far below the least deviation of 1e-6
    returns = reward.new_zeros(first.numel(), dtype=torch.float64)
    returns = returns.index_add(0, index, reward.flatten().double())
    _, group, size = torch.unique(group_id.flatten()[first], return_inverse=True, return_counts=True)
    return _Responses(index, first, returns, group, size.to(returns))


def _check_shapes(**tensors: Tensor) -> None:
    if len({x.shape for x in tensors.values()}) > 1:
        raise ValueError(
            f"{', '.join(tensors)} must share one shape [*B, T, 1]; got {[tuple(x.shape) for x in tensors.values()]}"
        )


def group_relative_advantage_estimate(
    reward: Tensor,  # [*B, T, 1]
    done: Tensor,  # [*B, T, 1] bool
    group_id: Tensor,  # [*B, T, 1] integer
    *,
    standardize: bool = True,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    """The return of a token's response, centred (and standardised) within the group of its prompt.

    ``A = (R - mean) / std`` over the responses of the group, ``std`` with ``n - 1``, the same for every token of a
    response; 0 in a group whose returns are all equal, or of one response. Source: GRPO (arXiv 2402.03300), DAPO (arXiv
    2503.14476). Equal to :class:`~torchrl.objectives.llm.MCAdvantage` with ``trajectory_return="sum"``, but for all
    groups of a batch at once.

    Args:
        reward: reward of each token.
        done: True on the last token of each response; a response still running ends with the data.
        group_id: which prompt each token's response belongs to.
        standardize: divide by the standard deviation of the group.
        time_dim: dimension of time.

    Returns:
        ``(advantage, value_target)``, each ``[*B, T, 1]``; the target is the return of the response.

    Raises:
        ValueError: if shapes differ.

    Examples:
        >>> import torch
        >>> done = torch.tensor([False, True, True, True]).view(1, 4, 1)  # three responses
        >>> reward = torch.tensor([0.0, 1.0, 0.0, 5.0]).view(1, 4, 1)
        >>> group = torch.tensor([7, 7, 7, 9]).view(1, 4, 1)
        >>> group_relative_advantage_estimate(reward, done, group, standardize=False)[0].flatten()
        tensor([ 0.5000,  0.5000, -0.5000,  0.0000])
    """
    _check_shapes(reward=reward, done=done, group_id=group_id)
    reward, done, group_id = (x.movedim(time_dim, -1) for x in (reward, done, group_id))
    responses = _responses(reward, done, group_id)
    centred = responses.returns - (responses.group_sum(responses.returns) / responses.size)[responses.group]
    if standardize:
        variance = responses.group_sum(centred.square()) / (responses.size - 1).clamp(min=1)
        centred = centred / variance.sqrt().clamp(min=1e-6)[responses.group]
    return _to_steps(centred, responses, reward, time_dim), _to_steps(
        responses.returns, responses, reward, time_dim
    )


def minimum_variance_advantage_estimate(
    log_ratio: Tensor,  # [*B, T, 1]
    reward: Tensor,  # [*B, T, 1]
    done: Tensor,  # [*B, T, 1] bool
    group_id: Tensor,  # [*B, T, 1] integer
    grad_sq_norm: Tensor,  # [*B, T, 1]
    *,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    """The return of a token's response minus the baseline that gives an off-policy gradient the least variance.

    Within the group of a prompt, ``A_i = R_i - b`` with ``b = sum_i w_i^2 g_i R_i / sum_i w_i^2 g_i``: ``w_i`` is the
    ratio of the whole response and ``g_i`` the squared norm of the gradient of its log-probability. Among all constants
    this ``b`` minimises ``sum_i w_i^2 g_i (R_i - b)^2``. Ratios are whole also where the policy channel truncates them,
    as by default in the released code (https://github.com/mit-han-lab/vcpo, ``GradBaselineConfig`` in
    ``verl/workers/config/actor.py``). Where every weight of a group is 0 the baseline is the mean. Source: VCPO (arXiv
    2602.17616).

    Args:
        log_ratio: learner's log-prob minus the behaviour policy's, nats.
        reward: reward of each token.
        done: True on the last token of each response; a response still running ends with the data.
        group_id: which prompt each token's response belongs to.
        grad_sq_norm: ``g`` of each token's response, at least 0; the first token's counts.
        time_dim: dimension of time.

    Returns:
        ``(advantage, value_target)``, each ``[*B, T, 1]``; the target is the return of the response.

    Raises:
        ValueError: if shapes differ.

    Examples:
        >>> import torch
        >>> ones = torch.ones(1, 3, 1)  # three responses of one token
        >>> reward = torch.tensor([0.0, 1.0, 1.0]).view(1, 3, 1)
        >>> norm = torch.tensor([6.0, 1.0, 1.0]).view(1, 3, 1)
        >>> group = torch.zeros(1, 3, 1, dtype=torch.long)
        >>> minimum_variance_advantage_estimate(0 * ones, reward, ones.bool(), group, norm)[0].flatten()
        tensor([-0.2500,  0.7500,  0.7500])
    """
    _check_shapes(log_ratio=log_ratio, reward=reward, done=done, group_id=group_id, grad_sq_norm=grad_sq_norm)
    log_ratio, reward, done, group_id, grad_sq_norm = (
        x.movedim(time_dim, -1) for x in (log_ratio, reward, done, group_id, grad_sq_norm)
    )
    responses = _responses(reward, done, group_id)
    # in log space: the square of the ratio of a long response overflows
    log_weight = 2 * responses.sum(log_ratio) + grad_sq_norm.flatten()[responses.first].double().log()
    largest = torch.full_like(responses.size, -torch.inf).scatter_reduce(
        0, responses.group, log_weight, "amax"
    )
    relative = torch.where(largest > -torch.inf, largest, 0.0)[responses.group]
    weight = torch.where(largest[responses.group] > -torch.inf, (log_weight - relative).exp(), 1.0)
    baseline = responses.group_sum(weight * responses.returns) / responses.group_sum(weight)
    advantage = responses.returns - baseline[responses.group]
    return _to_steps(advantage, responses, reward, time_dim), _to_steps(
        responses.returns, responses, reward, time_dim
    )


def _to_steps(x: Tensor, responses: _Responses, like: Tensor, time_dim: int) -> Tensor:
    """A number per response, on each of its steps; in the reward's dtype unless that cannot hold a fraction."""
    dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
    return x[responses.index].to(dtype).reshape(like.shape).movedim(-1, time_dim)


@register_value_estimator(
    OffPolicyValueEstimators.GROUP_RELATIVE, default_kwargs={"gamma": 1.0, "differentiable": False}
)
class GroupRelativeAdvantage(OffPolicyEstimator):
    """Critic-free advantages, see :func:`group_relative_advantage_estimate`.

    Reads ``group_id`` (integer, ``[*B, T, 1]``) in place of values and log-probs. Returns are sums: ``gamma`` and
    ``lmbda`` have no effect.

    Keyword Args:
        standardize (bool): divide by the standard deviation of the group. Defaults to ``True``.
        value_network: a critic that is trained beside; the advantages do not use it. Defaults to ``None``.
        **kwargs: of :class:`~torchrl_copc.value.estimator.OffPolicyEstimator`.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> end = torch.ones(1, 3, 1, dtype=torch.bool)  # three responses of one token, two to the same prompt
        >>> after = {"reward": torch.tensor([1.0, 0.0, 1.0]).view(1, 3, 1), "done": end, "terminated": end}
        >>> tokens = TensorDict({"group_id": torch.tensor([4, 4, 5]).view(1, 3, 1), "next": after}, batch_size=[1, 3])
        >>> GroupRelativeAdvantage()(tokens)["advantage"].flatten()
        tensor([ 0.7071, -0.7071,  0.0000])
    """

    needs_ratio = False
    needs_value = False
    entries = ("group_id",)

    def __init__(
        self, *, value_network: TensorDictModuleBase | None = None, standardize: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(value_network=value_network, **kwargs)
        self.standardize = standardize

    def estimate(
        self,
        gamma: Tensor,
        log_ratio: Tensor,
        value: Tensor,
        next_value: Tensor,
        reward: Tensor,
        done: Tensor,
        terminated: Tensor,
        *,
        time_dim: int,
        **entries: Tensor,
    ) -> tuple[Tensor, Tensor]:
        return group_relative_advantage_estimate(
            reward, done, entries["group_id"], standardize=self.standardize, time_dim=time_dim
        )


@register_value_estimator(
    OffPolicyValueEstimators.MINIMUM_VARIANCE, default_kwargs={"gamma": 1.0, "differentiable": False}
)
class MinimumVarianceAdvantage(OffPolicyEstimator):
    """Critic-free advantages, see :func:`minimum_variance_advantage_estimate`.

    Reads ``group_id`` (integer) and ``grad_sq_norm``, both ``[*B, T, 1]``, in place of values. For language models the
    learner writes a proxy to ``grad_sq_norm``, see :func:`~torchrl_copc.models.linear_log_prob.score_sq_norm`. Returns
    are sums: ``gamma`` and ``lmbda`` have no effect.

    Keyword Args:
        value_network: a critic that is trained beside; the advantages do not use it. Defaults to ``None``.
        **kwargs: of :class:`~torchrl_copc.value.estimator.OffPolicyEstimator`.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> end = torch.ones(1, 2, 1, dtype=torch.bool)  # two responses of one token to one prompt
        >>> tokens = TensorDict(
        ...     {
        ...         "action_log_prob": torch.zeros(1, 2, 1),
        ...         "learner_log_prob": torch.zeros(1, 2, 1),
        ...         "group_id": torch.zeros(1, 2, 1, dtype=torch.long),
        ...         "grad_sq_norm": torch.tensor([3.0, 1.0]).view(1, 2, 1),
        ...         "next": {"reward": torch.tensor([1.0, 0.0]).view(1, 2, 1), "done": end, "terminated": end},
        ...     },
        ...     batch_size=[1, 2],
        ... )
        >>> MinimumVarianceAdvantage()(tokens)["advantage"].flatten()
        tensor([ 0.2500, -0.7500])
    """

    needs_value = False
    entries = ("group_id", "grad_sq_norm")

    def __init__(self, *, value_network: TensorDictModuleBase | None = None, **kwargs: Any) -> None:
        super().__init__(value_network=value_network, **kwargs)

    def estimate(
        self,
        gamma: Tensor,
        log_ratio: Tensor,
        value: Tensor,
        next_value: Tensor,
        reward: Tensor,
        done: Tensor,
        terminated: Tensor,
        *,
        time_dim: int,
        **entries: Tensor,
    ) -> tuple[Tensor, Tensor]:
        return minimum_variance_advantage_estimate(
            log_ratio, reward, done, entries["group_id"], entries["grad_sq_norm"], time_dim=time_dim
        )
