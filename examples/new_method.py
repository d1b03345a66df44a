"""A new method: CISPO's policy channel, with any advantage channel. ``docs/howto/new_method.md`` walks through it.

python examples/new_method.py                                                             # on a toy batch
PYTHONPATH=examples python scripts/train_search.py --config-dir examples/configs method=cispo
"""

from __future__ import annotations

from functools import partial

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor

from torchrl_copc.objectives import PolicyCriticLoss
from torchrl_copc.objectives.policy import PolicyTerm


def clipped_weight(
    log_ratio: Tensor,  # [*B, T, 1], carries gradient
    frozen_log_ratio: Tensor,  # [*B, T, 1], not read
    advantage: Tensor,  # [*B, T, 1]
    *,
    eps_high: float,
) -> PolicyTerm:
    """CISPO (arXiv 2506.13585): ``-min(r_t, 1 + eps_high) * A_t * log pi_t`` with a detached weight.

    No token is dropped; the ratio of each is only kept from growing large.
    """
    weight = log_ratio.detach().exp().clamp(max=1 + eps_high)
    return PolicyTerm(-weight * advantage * log_ratio, torch.ones_like(advantage, dtype=torch.bool))


class Table(torch.nn.Module):
    """The simplest policy there is: one logit for each action."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(4))

    def forward(self, action: Tensor) -> Tensor:
        return self.logits.log_softmax(-1)[action]


def main() -> None:
    """Two responses of two tokens to one prompt; the first was rewarded."""
    tokens = TensorDict(
        {
            "action": torch.tensor([0, 1, 2, 3]).view(1, 4, 1),
            "action_log_prob": torch.tensor([-1.4, -5.0, -1.4, -1.4]).view(
                1, 4, 1
            ),  # the second was unlikely then
            "group_id": torch.zeros(1, 4, 1, dtype=torch.long),
            "next": {
                "reward": torch.tensor([0.0, 1.0, 0.0, 0.0]).view(1, 4, 1),
                "done": torch.tensor([False, True, False, True]).view(1, 4, 1),
            },
        },
        batch_size=[1, 4],
    )
    policy = Table()
    actor = TensorDictModule(policy, in_keys=["action"], out_keys=["log_prob"])
    loss = PolicyCriticLoss(actor, channel=partial(clipped_weight, eps_high=3.0), functional=False)
    loss.make_value_estimator("group_relative")
    losses = loss(tokens)
    losses["loss_objective"].backward()
    print(f"loss {losses['loss_objective']:.3f}, ESS {losses['ESS']:.2f}")
    print("gradient of the logits:", [round(x, 3) for x in policy.logits.grad.tolist()])


if __name__ == "__main__":
    main()
