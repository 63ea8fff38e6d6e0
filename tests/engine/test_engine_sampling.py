"""What is drawn, against exact probabilities computed another way."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ludus.core import Sampling
from ludus.engine.embedded.runner import sample_with_params

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0, 1.5])
DRAWS = 20_000


def _reference(s: Sampling, seen: set[int]) -> np.ndarray:
    """The distribution by definition: loops over a list, in the order transformers applies filters."""
    logits = LOGITS.double().numpy().copy()
    for token in seen:
        logits[token] = (
            logits[token] / s.repetition_penalty
            if logits[token] > 0
            else logits[token] * s.repetition_penalty
        )
    p = np.exp(logits / s.temperature)
    p /= p.sum()
    if s.top_k:
        p[np.argsort(-p)[s.top_k :]] = 0
        p /= p.sum()
    if s.top_p < 1:
        total = 0.0
        for token in np.argsort(-p):
            if total >= s.top_p:
                p[token] = 0
            total += p[token]
        p /= p.sum()
    p[p < s.min_p * p.max()] = 0
    return np.asarray(p / p.sum())


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7),
        Sampling(temperature=1.8),
        Sampling(top_k=3),
        Sampling(top_p=0.8),
        Sampling(top_p=0.3),
        Sampling(min_p=0.3),
        Sampling(repetition_penalty=1.5),
        Sampling(temperature=0.8, top_k=6, top_p=0.9, min_p=0.05, repetition_penalty=1.2),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    marked = {0, 4}
    seen = np.isin(np.arange(len(LOGITS)), list(marked)) if sampling.repetition_penalty != 1 else None
    tokens, logprobs, sound = sample_with_params(
        LOGITS.expand(DRAWS, -1), [sampling] * DRAWS, range(DRAWS), [seen] * DRAWS
    )
    assert all(sound)
    counts = np.bincount(tokens, minlength=len(LOGITS))
    expected = _reference(sampling, marked if seen is not None else set()) * DRAWS
    assert (counts[expected == 0] == 0).all()
    possible = expected > 0
    chi_square = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    # 24.3 is the 99.9% point for 7 degrees of freedom; fewer degrees have a lower one.
    assert chi_square < 24.3
    reported = (LOGITS.double() / sampling.temperature).log_softmax(-1)
    assert logprobs[:50] == pytest.approx([float(reported[t]) for t in tokens[:50]], abs=1e-5)


def test_temperature_zero_is_the_maximum() -> None:
    tokens, logprobs, _ = sample_with_params(LOGITS[None], [Sampling(temperature=0)], [0], [None])
    assert tokens == [0]
    assert logprobs[0] == pytest.approx(float(LOGITS.log_softmax(-1)[0]), abs=1e-6)


def test_a_tiny_temperature_is_nearly_greedy_and_finite() -> None:
    tokens, logprobs, sound = sample_with_params(
        LOGITS[None], [Sampling(temperature=1e-30)], [0], [None]
    )
    assert (tokens, logprobs, sound) == ([0], [0.0], [True])


@given(st.integers(0, 2**63), st.integers(0, 1000), st.integers(1, 9), st.integers(0, 8))
def test_a_row_draws_the_same_whatever_it_is_batched_with(
    seed: int, position: int, rows: int, place: int
) -> None:
    own = Sampling(seed=seed, temperature=0.9)
    place = min(place, rows - 1)
    others = [Sampling(seed=i, temperature=0.5 * i, top_k=i % 3) for i in range(rows)]
    logits = torch.randn(rows, 8, generator=torch.Generator().manual_seed(1))
    alone = sample_with_params(logits[place][None], [own], [position], [None])
    samplings = [own if i == place else other for i, other in enumerate(others)]
    positions = [position if i == place else i for i in range(rows)]
    together = sample_with_params(logits, samplings, positions, [None] * rows)
    assert together[0][place] == alone[0][0]
    assert together[1][place] == pytest.approx(alone[1][0], abs=1e-6)


def test_what_is_not_a_number_is_noticed() -> None:
    logits = torch.stack([LOGITS, torch.full_like(LOGITS, math.nan)])
    for sampling in (Sampling(), Sampling(temperature=0), Sampling(top_k=2)):
        assert sample_with_params(logits, [sampling] * 2, [0, 0], [None] * 2)[2] == [True, False]


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((4000, 6), -math.inf)
    logits[:, [1, 4]] = 0.0
    tokens, _, sound = sample_with_params(logits, [Sampling()] * 4000, range(4000), [None] * 4000)
    assert set(tokens) == {1, 4}
    assert all(sound)
