"""The frontier: which prompt comes next, which are in flight, and what a resumed run has to start again."""

from __future__ import annotations

import functools
import hashlib
import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_copc.trajectory import Prompt


@dataclass(frozen=True, order=True)
class PromptTicket:
    """One place in the order of prompts; ``attempt`` counts how often it started again after a failure."""

    index: int
    attempt: int = 0

    @property
    def group_id(self) -> str:
        """Id of the rows sampled from this place in the order, the same after a resume."""
        return f"{self.index}" if self.attempt == 0 else f"{self.index}+{self.attempt}"

    def row_ids(self, group_size: int) -> list[str]:
        """Ids of the rows of the group, unique within a run."""
        return [f"{self.group_id}.{member}" for member in range(group_size)]


class PromptStream:
    """An endless, seeded order over a data set: every epoch is a new permutation of all prompts.

    A place in the order is *in flight* from :meth:`take` until :meth:`settle`; :meth:`requeue` puts it at the
    front. The state is one cursor and the places in flight, so that a resumed run continues the same order
    and starts those again.

    Args:
        prompts: the data set; ids must be unique.
        seed: of the order.

    Raises:
        ValueError: without prompts, or when two share an id.

    Example:
        >>> prompts = [Prompt(f"p{i}", "question", ("answer",)) for i in range(3)]
        >>> stream = PromptStream(prompts, seed=1)
        >>> first = stream.take()
        >>> stream.requeue(first)
        >>> stream.take() == PromptTicket(first.index, attempt=1)
        True
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int = 0) -> None:
        ids = [prompt.id for prompt in prompts]
        if not ids:
            raise ValueError("there are no prompts; check the data set and its split")
        if len(set(ids)) != len(ids):
            twice = next(id for id in ids if ids.count(id) > 1)
            raise ValueError(f"prompt id {twice!r} occurs more than once; ids must be unique")
        self.prompts = list(prompts)
        self.seed = seed
        self._fingerprint = hashlib.sha256("\n".join(ids).encode()).hexdigest()
        self._cursor = 0
        self._front: list[PromptTicket] = []
        self._in_flight: set[PromptTicket] = set()

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def epoch(self) -> float:
        """Epochs handed out so far, as a fraction."""
        return self._cursor / len(self.prompts)

    def prompt(self, ticket: PromptTicket) -> Prompt:
        """The prompt at a place in the order."""
        epoch, offset = divmod(ticket.index, len(self.prompts))
        return self.prompts[_order(len(self.prompts), self.seed, epoch)[offset]]

    def take(self) -> PromptTicket:
        """The next place in the order: re-queued ones first, the earliest of them first."""
        if self._front:
            ticket = heapq.heappop(self._front)
        else:
            ticket = PromptTicket(self._cursor)
            self._cursor += 1
        self._in_flight.add(ticket)
        return ticket

    def settle(self, ticket: PromptTicket) -> None:
        """A place is done with: its rows are safe in the buffer, or it was dropped for good."""
        self._in_flight.remove(ticket)

    def requeue(self, ticket: PromptTicket) -> None:
        """Put a place (in flight or settled) back to the front, as a new attempt."""
        self._in_flight.discard(ticket)
        heapq.heappush(self._front, PromptTicket(ticket.index, ticket.attempt + 1))

    def state_dict(self) -> dict[str, Any]:
        """The cursor and every place that has to start again: those in flight and those re-queued."""
        pending = sorted([*self._front, *self._in_flight])
        return {
            "seed": self.seed,
            "fingerprint": self._fingerprint,
            "cursor": self._cursor,
            "pending": [(ticket.index, ticket.attempt) for ticket in pending],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the order of a saved stream.

        Raises:
            ValueError: if the data set or the seed is not the one of the checkpoint.
        """
        if state["fingerprint"] != self._fingerprint or state["seed"] != self.seed:
            raise ValueError(
                f"the checkpoint's prompts or their order differ (seed {state['seed']}, now {self.seed}, and "
                f"{len(self.prompts)} prompts): resume with the data set and seed of the run"
            )
        self._cursor = int(state["cursor"])
        self._front = [PromptTicket(index, attempt) for index, attempt in state["pending"]]
        heapq.heapify(self._front)
        self._in_flight = set()


@functools.lru_cache(maxsize=4)
def _order(size: int, seed: int, epoch: int) -> list[int]:
    order = list(range(size))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order
