"""What must not matter: order, packing, observations, duplicates, micro-batches."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_batches import batch_from, batches
from reference_advantages import length
from torch import Tensor

import ludus.algos as algos
from ludus.algos import (
    AdvantageInputs,
    Attempt,
    LossInputs,
    inputs_from,
    load_aggregation,
    load_estimator,
    load_loss,
)

each_estimator = pytest.mark.parametrize("name", list(algos.ESTIMATORS))
each_loss = pytest.mark.parametrize("name", list(algos.LOSSES))


def rows(values_T: Tensor, batch: list[Attempt]) -> list[Tensor]:
    return list(torch.split(values_T, [length(attempt) for attempt in batch]))


def advantages(name: str, batch: list[Attempt]) -> list[Tensor]:
    return rows(load_estimator(name)(inputs_from(batch)).advantages_T, batch)


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


@each_estimator
@given(batch=batches, seed=st.integers(0, 1000))
def test_the_order_of_trajectories_does_not_matter(name: str, batch: list[Attempt], seed: int) -> None:
    order = list(range(len(batch)))
    random.Random(seed).shuffle(order)
    shuffled = advantages(name, [batch[i] for i in order])
    plain = advantages(name, batch)
    assert_same(shuffled, [plain[i] for i in order])


@each_estimator
@given(batch=batches, seed=st.integers(0, 1000))
def test_the_way_tokens_are_packed_does_not_matter(name: str, batch: list[Attempt], seed: int) -> None:
    """Tokens of different trajectories may lie interleaved, as long as each one's stay in order."""
    inputs = inputs_from(batch)
    places = list(inputs.trajectory_T.tolist())
    random.Random(seed).shuffle(places)  # a random interleaving: whose token comes next
    queues = {n: iter((inputs.trajectory_T == n).nonzero().squeeze(1).tolist()) for n in set(places)}
    order = torch.tensor([next(queues[n]) for n in places], dtype=torch.long)
    mixed = replace(
        inputs,
        **{
            field: value[order]
            for field in AdvantageInputs.__slots__
            if field.endswith("_T") and (value := getattr(inputs, field)) is not None
        },
    )
    estimate = load_estimator(name)
    found, expected = estimate(mixed), estimate(inputs)
    torch.testing.assert_close(found.advantages_T, expected.advantages_T[order])
    if expected.returns_T is not None:
        torch.testing.assert_close(found.returns_T, expected.returns_T[order])


@each_estimator
@given(batch=batches, seed=st.integers(0, 1000))
def test_observations_do_not_matter(name: str, batch: list[Attempt], seed: int) -> None:
    """More tokens heard, whatever a critic or a penalty says at them: what was said is worth the same."""
    source = random.Random(seed)

    def longer(attempt: Attempt) -> Attempt:
        heard = [source.randint(0, 3) for _ in attempt.turns]
        values, penalties = (
            list(attempt.values[: attempt.prompt]),
            list(attempt.penalties[: attempt.prompt]),
        )
        at = attempt.prompt
        for turn, more in zip(attempt.turns, heard, strict=True):
            end = at + turn.action + turn.observation
            values += [*attempt.values[at:end], *(source.uniform(-9, 9) for _ in range(more))]
            penalties += [*attempt.penalties[at:end], *(source.uniform(-9, 9) for _ in range(more))]
            at = end
        turns = [
            replace(t, observation=t.observation + n) for t, n in zip(attempt.turns, heard, strict=True)
        ]
        return replace(attempt, turns=turns, values=values, penalties=penalties)

    stretched = [longer(attempt) for attempt in batch]
    estimate = load_estimator(name)
    one, other = inputs_from(batch), inputs_from(stretched)
    torch.testing.assert_close(
        estimate(one).advantages_T[one.action_T], estimate(other).advantages_T[other.action_T]
    )


@each_estimator
@given(batch=batches)
def test_another_copy_of_each_group_does_not_matter(name: str, batch: list[Attempt]) -> None:
    """Beside its groups, a batch has the same ones again, as groups of their own."""
    again = [replace(attempt, group=attempt.group + 4) for attempt in batch]
    inputs, double = inputs_from(batch), inputs_from(batch + again)
    estimate = load_estimator(name)
    found = estimate(double).advantages_T
    torch.testing.assert_close(found[: len(found) // 2], found[len(found) // 2 :])
    expected = estimate(inputs).advantages_T
    if name in ("gae", "reinforce_pp", "reinforce_pp_baseline", "treepo"):
        # deviations over twice the tokens divide by 2n - 1, not by 2 (n - 1); the scale apart, nothing changes
        for number in set(inputs.sets.tolist()):
            mine = inputs.action_T & (inputs.sets[inputs.trajectory_T] == number)
            size = int(mine.sum())
            if size > 1:
                scale = ((2 * size - 1) / (2 * (size - 1))) ** 0.5
                # this share of (deviation + 1e-8) is the deviation, and scaled
                share = float((expected[mine].square().sum() / (size - 1)).sqrt())
                torch.testing.assert_close(
                    found[: len(expected)][mine],
                    expected[mine] / (share / scale + 1 - share),
                    atol=1e-6,
                    rtol=1e-6,
                )
    else:
        torch.testing.assert_close(found[: len(expected)], expected)


@each_estimator
@given(batch=batches)
def test_only_actions_are_credited(name: str, batch: list[Attempt]) -> None:
    inputs = inputs_from(batch)
    assert not load_estimator(name)(inputs).advantages_T[~inputs.action_T].any()


@each_loss
@given(
    aggregation=st.sampled_from(sorted(algos.AGGREGATIONS)),
    count=st.integers(1, 7),
    seed=st.integers(0, 2**32),
)
def test_micro_batches_do_not_change_the_gradient(
    name: str, aggregation: str, count: int, seed: int
) -> None:
    """The weighted losses of whole rows add up, in whatever portions and order they come."""
    batch = batch_from(count, seed)
    inputs = inputs_from(batch)
    size = int(inputs.action_T.sum())
    weigh = load_aggregation(aggregation, {"length": 8} if aggregation == "length" else None)
    weights = weigh(inputs.trajectory_T, inputs.action_T)[inputs.action_T].double()
    source = torch.Generator().manual_seed(seed)
    logprobs, old, advantages = torch.randn(3, size, generator=source, dtype=torch.float64) * 0.3
    row = inputs.trajectory_T[inputs.action_T]

    def gradient(portions: list[list[int]]) -> Tensor:
        leaf = logprobs.clone().requires_grad_()
        for portion in portions:
            chosen = torch.cat([(row == n).nonzero().squeeze(1) for n in portion])
            renumbered = torch.searchsorted(torch.tensor(sorted(portion)), row[chosen])
            loss, _ = load_loss(name)(
                LossInputs(leaf[chosen], old[chosen], advantages[chosen], renumbered)
            )
            (loss * weights[chosen]).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    order = list(range(count))
    random.Random(seed).shuffle(order)
    cut = random.Random(seed + 1).randint(0, count)
    portions = [part for part in (order[:cut], order[cut:]) if part]
    torch.testing.assert_close(gradient([list(range(count))]), gradient(portions))
    torch.testing.assert_close(gradient([list(range(count))]), gradient([[n] for n in order]))
