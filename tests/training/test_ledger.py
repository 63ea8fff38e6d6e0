"""The ledger of asynchronous training: the bound on the lag, every ordinal once, and no way to get stuck."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.training.ledger import GroupState, Ledger, Phase

Event = tuple[str, int]


def bound(staleness: int, window: int, batch: int) -> int:
    """The claim, written down a second time."""
    return staleness + math.ceil((window - 1) / batch)


def possible(ledger: Ledger, extra: int) -> Iterator[Event]:
    """Everything that can happen next; at most `extra` groups are scheduled in place of others."""
    ready = ledger.take()
    if ledger.can_schedule:
        yield "plan", -1
    for ordinal in ledger.to_play():
        yield "start", ordinal
    for ordinal in ledger.in_flight():
        yield "finish", ordinal
        yield "fail", ordinal
        yield "interrupt", ordinal
    if ledger.next_ordinal < extra:
        for ordinal, entry in ledger.entries.items():
            if entry.state is GroupState.FINISHED and ordinal not in ledger.taken:
                yield "replace", ordinal
    if ready is not None:
        yield "train", -1


def happen(ledger: Ledger, event: Event, trained: list[int]) -> int:
    """Let it happen; the largest lag that it trained with."""
    what, ordinal = event
    if what == "plan":
        ledger.schedule()
    elif what != "train":
        getattr(ledger, what)(ordinal)
    else:
        batch = ledger.take()
        assert batch is not None and batch == sorted(batch)
        lags = [ledger.lag(one) for one in batch]
        trained += batch
        ledger.train(batch)
        return max(lags)
    return 0


def frozen(ledger: Ledger) -> Any:
    entries = tuple((o, e.version, e.state, e.tries) for o, e in ledger.entries.items())
    return entries, tuple(ledger.taken), ledger.next_ordinal, ledger.version, ledger.settled


@pytest.mark.parametrize(
    ("batch", "staleness", "window", "total"),
    [
        *[(1, 0, 1, 3), (2, 0, 1, 4), (1, 1, 1, 4), (1, 1, 2, 4), (1, 2, 1, 3)],
        pytest.param(2, 1, 1, 4, marks=pytest.mark.slow),
        pytest.param(2, 1, 2, 6, marks=pytest.mark.slow),
        pytest.param(1, 2, 1, 4, marks=pytest.mark.slow),
    ],
)
def test_every_sequence_of_events_keeps_the_bound_and_gets_to_the_end(
    batch: int, staleness: int, window: int, total: int
) -> None:
    """All reachable states, one by one. A death of whoever plays is an event of every state."""
    start = Ledger(batch, staleness, window, total)
    seen, todo, largest, endings = {frozen(start)}, [(start, ())], 0, 0
    while todo:
        ledger, trained = todo.pop()
        events = list(possible(ledger, extra=total + 1))
        if not events:
            assert ledger.phase is Phase.ENDED, "stuck"
            assert ledger.settled == total and len(set(trained)) == total
            endings += 1
        assert len(ledger.entries) <= ledger.capacity
        for event in events:
            entries = {ordinal: replace(entry) for ordinal, entry in ledger.entries.items()}
            following = replace(ledger, entries=entries, taken=list(ledger.taken))
            done = list(trained)
            lag = happen(following, event, done)
            assert lag <= ledger.max_lag == (bound(staleness, window, batch) if staleness else 0)
            largest = max(largest, lag)
            if (key := frozen(following)) not in seen:
                seen.add(key)
                todo.append((following, tuple(done)))
    assert endings
    assert largest == min(ledger.max_lag, total // batch - 1), "the bound is not only kept but met"


@given(st.data())
@settings(max_examples=60)
def test_any_run_with_deaths_and_restarts_trains_every_ordinal_once(data: st.DataObject) -> None:
    draw = random.Random(data.draw(st.integers(0, 2**32)))
    batch, staleness = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 4))
    window = data.draw(st.integers(1, 3 * batch))
    steps = data.draw(st.integers(1, 8))
    ledger = Ledger(batch, staleness, window, steps * batch)
    trained: list[int] = []
    replaced: set[int] = set()
    saved, saved_trained = copy.deepcopy(ledger.state_dict()), 0
    limit = bound(staleness, window, batch)
    for _ in range(100_000):
        if ledger.phase is Phase.ENDED:
            break
        if draw.random() < 0.01:  # the process dies: back to what was saved last
            ledger = Ledger(batch, staleness, window, steps * batch)
            ledger.load_state_dict(saved)
            del trained[saved_trained:]
            replaced = {one for one in replaced if one < ledger.next_ordinal} - ledger.entries.keys()
        events = list(possible(ledger, extra=3 * steps * batch))
        assert events, "stuck"
        event = draw.choice(events)
        assert happen(ledger, event, trained) <= limit
        replaced |= {event[1]} if event[0] == "replace" else set()
        if event[0] == "train":
            saved, saved_trained = copy.deepcopy(ledger.state_dict()), len(trained)
    assert ledger.phase is Phase.ENDED
    assert len(trained) == len(set(trained)) == steps * batch
    assert set(trained) | replaced == set(range(ledger.next_ordinal)), "one was lost"


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.integers(0, 2**32))
def test_under_random_delays_the_largest_lag_is_the_bound(
    batch: int, staleness: int, window: int, seed: int
) -> None:
    """Groups take random times, now and then very long ones; the trainer is as fast as the groups allow."""
    draw = random.Random(seed)
    ledger, due, now, largest = Ledger(batch, staleness, window, 200 * batch), {}, 0.0, 0
    while ledger.phase is not Phase.ENDED:
        while ledger.can_schedule:
            ledger.schedule()
        for ordinal in ledger.to_play():
            ledger.start(ordinal)
            due[ordinal] = now + (1000.0 if draw.random() < 0.05 else draw.random())
        ready = ledger.take()
        if ready is None:
            ordinal = min(due, key=due.__getitem__)
            now = due.pop(ordinal)
            ledger.finish(ordinal)
            continue
        largest = max(largest, *map(ledger.lag, ready), 0)
        ledger.train(ready)
    assert largest == bound(staleness, window, batch)


def test_strict_order_takes_the_batches_as_they_were_scheduled() -> None:
    ledger = Ledger(2, 1, 1, 4)
    for ordinal in [ledger.schedule() for _ in range(4)]:
        ledger.start(ordinal)
    for ordinal in (3, 2, 1):
        ledger.finish(ordinal)
        assert ledger.take() is None
    ledger.finish(0)
    assert ledger.take() == [0, 1]
    ledger.train([0, 1])
    assert ledger.take() == [2, 3] and ledger.phase is Phase.DRAINING
    ledger.train([2, 3])
    assert ledger.phase is Phase.ENDED and not ledger.can_schedule


def test_a_window_lets_others_pass_a_straggler_and_no_further() -> None:
    ledger = Ledger(1, 2, 3, 10)
    for ordinal in [ledger.schedule() for _ in range(3)]:
        ledger.start(ordinal)
    ledger.finish(1)
    ledger.finish(2)
    for ordinal in (1, 2):
        assert ledger.take() == [ordinal]
        ledger.train([ordinal])
    ledger.start(ledger.schedule())
    ledger.finish(3)
    assert ledger.take() is None, "the third is three ordinals behind the straggler"


def test_a_failed_group_keeps_its_slot_until_it_is_given_up() -> None:
    ledger = Ledger(1, 0, 1, 2)
    ledger.start(ledger.schedule())
    assert ledger.fail(0) and ledger.to_play() == [0] and not ledger.can_schedule
    ledger.start(0)
    assert not ledger.fail(0)
    assert ledger.entries[0].state is GroupState.GIVEN_UP and ledger.take() == [0]
    ledger.train([0])
    assert ledger.schedule() == 1


def test_the_end_of_the_tasks_makes_a_last_smaller_batch() -> None:
    ledger = Ledger(3, 1, total=4)
    for ordinal in [ledger.schedule() for _ in range(4)]:
        ledger.start(ordinal)
    for ordinal in range(4):
        ledger.finish(ordinal)
    assert ledger.phase is Phase.DRAINING and ledger.take() == [0, 1, 2]
    ledger.train([0, 1, 2])
    assert ledger.take() == [3]
    ledger.train([3])
    assert ledger.phase is Phase.ENDED and ledger.take() is None


def test_what_does_not_follow_is_refused() -> None:
    ledger = Ledger(1, 0, 1, 1)
    ledger.schedule()
    with pytest.raises(ValueError, match="no group can be scheduled"):
        ledger.schedule()
    with pytest.raises(ValueError, match="group 0 is to_play, and should be in_flight"):
        ledger.finish(0)
    with pytest.raises(ValueError, match="the batch to train is"):
        ledger.train([0])
    with pytest.raises(ValueError, match="batch 0"):
        Ledger(0)
