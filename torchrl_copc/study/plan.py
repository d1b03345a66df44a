"""What the study runs: tasks, models, methods, lags and seeds, and how its learning rates are chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torchrl_copc.study.methods import VARIANTS

REFERENCE = "copc_wo_rc"  # COPC without return correction: the same mask, plain GAE
FORMS = ("copc", "copc_continuation", "copc_product", "copc_continuation_product")
WIDE = ("copc_wide_advantage", "copc_wide")  # intervals of [0, 2.4] in place of [0.8, 1.28]
CRITIC = (*FORMS, REFERENCE, "ppo", "sao", "areal", "vtrace", "brace", "retrace", *WIDE)
CRITIC_FREE = ("grpo", "dapo", "m2po", "m2po_code", "vcpo")


@dataclass(frozen=True)
class Part:
    """One task with one model.

    Args:
        task: name in :data:`~torchrl_copc.study.tasks.TASKS`.
        model: ``"table"`` or ``"transformer"``.
        methods: compared with each other, in the order in which they run.
        lags: versions that the sampling policy is behind.
        seeds: number of runs of each method and lag.
        batches: of one run.
        rates: the actor's learning rate is chosen among these.
        critic_factor: times the actor's learning rate is the critic's.
        tuning_seeds: number of runs behind the choice, of seeds that are not used again.
        imitation_steps: before training, of the transformer.
        label: tells parts with the same task and model apart.
    """

    task: str
    model: str
    methods: tuple[str, ...]
    lags: tuple[int, ...]
    seeds: int
    batches: int
    rates: tuple[float, ...]
    critic_factor: float
    tuning_seeds: int
    imitation_steps: int = 300
    label: str = ""

    @property
    def name(self) -> str:
        return f"{self.task} {self.model}{self.label}"

    def cells(self) -> Iterator[Cell]:
        """Every method with every lag; at lag 0 all ratios are 1 and the variants of COPC are one method."""
        for method in self.methods:
            for lag in self.lags:
                if lag or method not in VARIANTS:
                    yield Cell(self, method, lag, tuple(range(self.seeds)))

    def tuning_cells(self, rate: float) -> Iterator[Cell]:
        """What one candidate of the learning rate is judged by: three methods at lag 16."""
        for method in ("copc", "ppo", "vtrace"):
            yield Cell(self, method, 16, tuple(range(1000, 1000 + self.tuning_seeds)), rate)


@dataclass(frozen=True)
class Cell:
    """All seeds of one method with one lag; ``rate`` is the actor's learning rate once it is known."""

    part: Part
    method: str
    lag: int
    seeds: tuple[int, ...]
    rate: float | None = None

    def overrides(self) -> tuple[str, ...]:
        """What the cell sets of a composed configuration."""
        assert self.rate is not None
        return (
            f"collector.lag={self.lag}",
            f"total_versions={self.part.batches}",
            f"learner.actor.lr={self.rate}",
            f"learner.critic.lr={self.rate * self.part.critic_factor}",
        )


TABLE_RATES, TRANSFORMER_RATES = (0.01, 0.03, 0.1, 0.3), (1e-4, 3e-4, 1e-3)
TRANSFORMER = Part(
    task="risky",
    model="transformer",
    methods=("copc", REFERENCE, "ppo", "vtrace", "copc_continuation"),
    lags=(16, 64, 0),
    seeds=20,
    batches=300,
    rates=TRANSFORMER_RATES,
    critic_factor=3.0,
    tuning_seeds=4,
)
TABLES = tuple(
    Part(
        task=task,
        model="table",
        methods=CRITIC + CRITIC_FREE,
        lags=(0, 8, 16, 64),
        seeds=20,
        batches=300,
        rates=TABLE_RATES,
        critic_factor=1.0,
        tuning_seeds=8,
    )
    for task in ("risky", "lock", "graph")
)
# What return correction gains depends on how fast the policy moves, so its forms are also compared at a slower rate.
SLOW_TABLES = tuple(
    replace(part, methods=(*FORMS, REFERENCE, "ppo", "vtrace", *WIDE), rates=(0.03,), label=" (slow)")
    for part in TABLES
)
FULL = (TRANSFORMER, *TABLES, *SLOW_TABLES)

# The same code in seconds: every task and model, but nothing can be concluded from it.
QUICK = (
    replace(
        TRANSFORMER,
        methods=(REFERENCE, "copc", "ppo"),
        lags=(16,),
        seeds=2,
        batches=4,
        rates=(3e-4,),
        tuning_seeds=2,
        imitation_steps=20,
    ),
    *(
        replace(part, methods=methods, lags=(0, 8), seeds=2, batches=6, rates=(0.03, 0.1), tuning_seeds=2)
        for part, methods in zip(
            TABLES,
            (CRITIC + CRITIC_FREE, (REFERENCE, *FORMS, "ppo"), (REFERENCE, "copc", "ppo", "vcpo")),
            strict=True,
        )
    ),
    replace(SLOW_TABLES[0], methods=(REFERENCE, "copc"), lags=(8,), seeds=2, batches=6, rates=(0.01,)),
)


def cells(parts: tuple[Part, ...]) -> list[Cell]:
    """All cells; methods without a critic come last."""
    found = [cell for part in parts for cell in part.cells()]
    return sorted(found, key=lambda cell: cell.method in CRITIC_FREE)  # stable
