"""Estimators, aggregation and losses against plain loops written from the formulas."""

from __future__ import annotations

import math
import statistics

import torch
from hypothesis import given
from hypothesis import strategies as st

from ludus.algos import (
    Credit,
    by_sequence,
    by_token,
    clipped_surrogate,
    grpo,
    k3,
    policy_gradient,
    reinforce,
)

Batch = list[list[tuple[float, list[bool]]]]
"""Groups of attempts; an attempt is its reward and its action mask."""

attempts = st.tuples(
    st.floats(-5, 5, allow_nan=False).map(lambda x: round(x, 3)),
    st.lists(st.booleans(), min_size=1, max_size=6),
)
batches = st.lists(st.lists(attempts, min_size=1, max_size=5), min_size=1, max_size=4)


def credit_of(batch: Batch) -> Credit:
    flat = [(g, reward, mask) for g, group in enumerate(batch) for reward, mask in group]
    return Credit(
        rewards_N=torch.tensor([reward for _, reward, _ in flat], dtype=torch.float64),
        group_N=torch.tensor([g for g, _, _ in flat]),
        trajectory_T=torch.tensor([n for n, (_, _, mask) in enumerate(flat) for _ in mask]),
        action_T=torch.tensor([said for _, _, mask in flat for said in mask]),
    )


def spread(batch: Batch, advantages: list[float]) -> list[float]:
    masks = [mask for group in batch for _, mask in group]
    return [a if said else 0.0 for a, mask in zip(advantages, masks, strict=True) for said in mask]


@given(batches)
def test_grpo_is_the_group_normalised_reward(batch: Batch) -> None:
    expected = []
    for group in batch:
        rewards = [reward for reward, _ in group]
        deviation = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
        expected += [(r - statistics.fmean(rewards)) / (deviation + 1e-6) for r in rewards]
    # near-equal rewards divide rounding by epsilon, hence the tolerance
    torch.testing.assert_close(
        grpo(credit_of(batch)),
        torch.tensor(spread(batch, expected), dtype=torch.float64),
        atol=1e-6,
        rtol=1e-6,
    )


@given(batches)
def test_reinforce_subtracts_the_batch_mean(batch: Batch) -> None:
    rewards = [reward for group in batch for reward, _ in group]
    expected = [r - statistics.fmean(rewards) for r in rewards]
    torch.testing.assert_close(
        reinforce(credit_of(batch)), torch.tensor(spread(batch, expected), dtype=torch.float64)
    )


@given(attempts, st.integers(1, 5))
def test_equal_rewards_and_groups_of_one_teach_nothing(
    attempt: tuple[float, list[bool]], size: int
) -> None:
    assert grpo(credit_of([[attempt] * size])).abs().max() < 1e-6


@given(batches, batches)
def test_grpo_groups_do_not_see_each_other(one: Batch, other: Batch) -> None:
    alone, together = grpo(credit_of(one)), grpo(credit_of(one + other))
    torch.testing.assert_close(together[: len(alone)], alone)


@given(batches)
def test_weights_by_token_and_by_sequence(batch: Batch) -> None:
    credit = credit_of(batch)
    masks = [mask for group in batch for _, mask in group]
    said = sum(map(sum, masks))
    speaking = sum(any(mask) for mask in masks)
    by_tokens = [float(s) / max(1, said) for mask in masks for s in mask]
    by_sequences = [float(s) / max(1, sum(mask)) / max(1, speaking) for mask in masks for s in mask]
    tokens = by_token(credit.trajectory_T, credit.action_T)
    sequences = by_sequence(credit.trajectory_T, credit.action_T)
    torch.testing.assert_close(tokens, torch.tensor(by_tokens))
    torch.testing.assert_close(sequences, torch.tensor(by_sequences))


numbers = st.lists(
    st.tuples(st.floats(-4, 0), st.floats(-4, 0), st.floats(-3, 3)), min_size=1, max_size=12
)


@given(numbers, st.floats(0.05, 0.5), st.floats(0.05, 0.5))
def test_clipped_surrogate_by_hand(
    rows: list[tuple[float, float, float]], low: float, high: float
) -> None:
    new, old, advantage = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)
    )
    loss, metrics = clipped_surrogate(low, high)(new, old, advantage)
    for i, (p, q, a) in enumerate(rows):
        ratio = math.exp(p - q)
        bounded = min(max(ratio, 1 - low), 1 + high)
        assert math.isclose(loss[i], -min(ratio * a, bounded * a), abs_tol=1e-9)
        assert bool(metrics["clip_fraction"][i]) == (bounded * a < ratio * a)


def test_losses_agree_on_policy() -> None:
    """Where the samples are the policy's own, PPO's gradient is the plain policy gradient."""
    logprobs = torch.tensor([-1.0, -0.3, -2.0], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    gradients = [
        torch.autograd.grad(loss(logprobs, logprobs.detach(), advantage)[0].sum(), logprobs)[0]
        for loss in (clipped_surrogate(), policy_gradient)
    ]
    torch.testing.assert_close(gradients[0], gradients[1])


@given(st.integers(0, 10_000))
def test_k3_estimates_the_divergence(seed: int) -> None:
    """Its expectation under p, summed exactly over a small vocabulary, is KL(p || q)."""
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.randn(2, 7, generator=generator, dtype=torch.float64).log_softmax(-1)
    estimate = (p.exp() * k3(p, q)).sum()
    torch.testing.assert_close(estimate, (p.exp() * (p - q)).sum())
    assert (k3(p, q) >= 0).all()
