"""The order of prompts: seeded, every prompt once per epoch, and the same after a resume."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from fakes import make_prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_copc.collectors.prompts import PromptStream, PromptTicket


def ids(stream: PromptStream, count: int) -> list[str]:
    return [stream.prompt(stream.take()).id for _ in range(count)]


def test_every_epoch_is_another_permutation_of_all_prompts() -> None:
    stream = PromptStream(make_prompts(20), seed=3)
    first, second = ids(stream, 20), ids(stream, 20)
    assert Counter(first) == Counter(second) == Counter(f"p{i}" for i in range(20))
    assert first != second
    assert first == ids(PromptStream(make_prompts(20), seed=3), 20)
    assert first != ids(PromptStream(make_prompts(20), seed=4), 20)


def test_requeued_places_come_first_in_their_order_with_new_row_ids() -> None:
    stream = PromptStream(make_prompts(10), seed=0)
    tickets = [stream.take() for _ in range(4)]
    stream.requeue(tickets[2])
    stream.requeue(tickets[1])
    again = [stream.take(), stream.take()]
    assert [ticket.index for ticket in again] == [1, 2]
    assert stream.prompt(again[0]) is stream.prompt(tickets[1])
    assert not set(again[0].row_ids(2)) & set(tickets[1].row_ids(2))
    assert stream.take().index == 4


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.integers(0, 60), st.integers(0, 2**32))
def test_a_resumed_stream_consumes_the_uninterrupted_order_each_place_once(
    size: int, steps: int, seed: int
) -> None:
    rng = random.Random(seed)
    stream = PromptStream(make_prompts(size), seed=1)
    flying: list[PromptTicket] = []
    consumed: list[int] = []

    def step(stream: PromptStream) -> None:
        if flying and rng.random() < 0.5:
            ticket = flying.pop(rng.randrange(len(flying)))
            if rng.random() < 0.3:
                stream.requeue(ticket)
            else:
                stream.settle(ticket)
                consumed.append(ticket.index)
        else:
            flying.append(stream.take())

    for _ in range(steps):
        step(stream)
    resumed = PromptStream(make_prompts(size), seed=1)
    resumed.load_state_dict(stream.state_dict())
    flying.clear()
    for _ in range(steps):
        step(resumed)
    for ticket in flying:
        resumed.settle(ticket)
        consumed.append(ticket.index)
    while resumed.state_dict()["pending"]:
        ticket = resumed.take()
        resumed.settle(ticket)
        consumed.append(ticket.index)
    assert sorted(consumed) == list(range(len(consumed)))
    uninterrupted = PromptStream(make_prompts(size), seed=1)
    assert [resumed.prompt(PromptTicket(i)).id for i in range(len(consumed))] == ids(
        uninterrupted, len(consumed)
    )


def test_another_data_set_or_seed_cannot_continue_an_order() -> None:
    state = PromptStream(make_prompts(5), seed=0).state_dict()
    with pytest.raises(ValueError, match="resume with the data set and seed"):
        PromptStream(make_prompts(6), seed=0).load_state_dict(state)
    with pytest.raises(ValueError, match="seed 0, now 1"):
        PromptStream(make_prompts(5), seed=1).load_state_dict(state)


def test_empty_and_ambiguous_data_sets_are_refused() -> None:
    with pytest.raises(ValueError, match="no prompts"):
        PromptStream([])
    with pytest.raises(ValueError, match="'p0' occurs more than once"):
        PromptStream([*make_prompts(2), *make_prompts(1)])
