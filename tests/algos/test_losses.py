"""Losses, divergences, corrections and weights against plain arithmetic (`reference_losses`)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import reference_losses as reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import ludus.algos as algos
from ludus.algos import LossInputs, load_aggregation, load_correction, load_loss

STEP = 1e-6


class Case:
    """Sequences of random lengths, with log-probabilities near enough to each other to be clipped at times."""

    def __init__(self, seed: int) -> None:
        source = random.Random(seed)
        self.lengths = [source.randint(1, 4) for _ in range(source.randint(1, 5))]
        size = sum(self.lengths)
        self.old = [source.uniform(-3, -0.1) for _ in range(size)]
        self.new = [old + source.gauss(0, 0.5) for old in self.old]
        self.behaviour = [old + source.gauss(0, 0.5) for old in self.old]
        self.reference = [old + source.gauss(0, 0.5) for old in self.old]
        self.advantages = [source.choice([0.0, source.uniform(-2, 2)]) for _ in range(size)]
        self.sequence = [n for n, length in enumerate(self.lengths) for _ in range(length)]

    def sampled(self, logprobs: Tensor, advantages: list[float] | None = None) -> LossInputs:
        return LossInputs(
            logprobs,
            real(self.old),
            real(self.advantages if advantages is None else advantages),
            torch.tensor(self.sequence),
            real(self.behaviour),
        )

    def split(self, values: list[float]) -> list[list[float]]:
        pieces = torch.split(real(values), self.lengths)
        return [piece.tolist() for piece in pieces]

    def sequence_ratio(self, place: int) -> float:
        own = [i for i, n in enumerate(self.sequence) if n == self.sequence[place]]
        return math.exp(sum(self.new[i] - self.old[i] for i in own) / len(own))


cases = st.builds(Case, st.integers(0, 2**32))
OneToken = Callable[[Case, int, float], float]
"""(case, place, the live log-probability) -> loss; all other numbers are held."""
LOSSES: dict[str, tuple[dict[str, Any], OneToken]] = {
    "policy_gradient": (
        {},
        lambda c, i, p: reference.policy_gradient(p, c.old[i], c.advantages[i]),
    ),
    "clipped": (
        {"clip_low": 0.2, "clip_high": 0.28},
        lambda c, i, p: reference.clipped(p, c.old[i], c.advantages[i], 0.2, 0.28),
    ),
    "dual_clip": (
        {"clip_low": 0.2, "clip_high": 0.3, "bound": 1.5},
        lambda c, i, p: reference.dual_clip(p, c.old[i], c.advantages[i], 0.2, 0.3, 1.5),
    ),
    "gspo": (
        {"clip_low": 0.1, "clip_high": 0.2},
        lambda c, i, p: reference.gspo_token(
            p, c.new[i], c.sequence_ratio(i), c.advantages[i], 0.1, 0.2
        ),
    ),
    "cispo": (
        {"clip_low": 0.4, "clip_high": 0.5},
        lambda c, i, p: reference.cispo(p, c.new[i], c.old[i], c.advantages[i], 0.4, 0.5),
    ),
}
each_loss = pytest.mark.parametrize("name", list(algos.LOSSES))


def real(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def slope(function: Callable[[float], float], at: float) -> float:
    return (function(at + STEP) - function(at - STEP)) / (2 * STEP)


@each_loss
@given(case=cases)
def test_losses_and_their_gradients(name: str, case: Case) -> None:
    options, one_token = LOSSES[name]
    logprobs = real(case.new).requires_grad_()
    loss, metrics = load_loss(name, options)(case.sampled(logprobs))
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    expected = [one_token(case, i, p) for i, p in enumerate(case.new)]
    slopes = [slope(lambda p, i=i: one_token(case, i, p), at) for i, at in enumerate(case.new)]
    torch.testing.assert_close(loss.detach(), real(expected))
    torch.testing.assert_close(gradient, real(slopes), atol=1e-5, rtol=1e-5)
    assert metrics["clip_fraction"].shape == loss.shape
    assert set(metrics["clip_fraction"].tolist()) <= {0.0, 1.0}


@given(cases)
def test_clipping_is_counted_where_it_stops_the_gradient(case: Case) -> None:
    logprobs = real(case.new).requires_grad_()
    for name in ("clipped", "dual_clip"):
        loss, metrics = load_loss(name)(case.sampled(logprobs))
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        still = (gradient == 0) & (real(case.advantages) != 0)
        assert torch.equal(metrics["clip_fraction"].bool(), still)


@given(cases, st.integers(0, 1000))
def test_gspo_is_the_papers_objective_where_a_sequence_has_one_advantage(case: Case, seed: int) -> None:
    """Value and gradient of the sequence-level equation, by finite differences through the whole sequence."""
    source = random.Random(seed)
    shared = [source.uniform(-2, 2) for _ in case.lengths]
    logprobs = real(case.new).requires_grad_()
    sampled = case.sampled(logprobs, [shared[n] for n in case.sequence])
    loss, _ = algos.gspo(sampled, clip_low=0.1, clip_high=0.2)
    trained = torch.ones(len(case.new), dtype=torch.bool)
    weights = algos.by_sequence(sampled.row_A, trained).double()
    total = (loss * weights).sum()

    def objective(new: list[float]) -> float:
        return reference.gspo_objective(case.split(new), case.split(case.old), shared, 0.1, 0.2)

    def along(i: int) -> Callable[[float], float]:
        return lambda p: objective([*case.new[:i], p, *case.new[i + 1 :]])

    (gradient,) = torch.autograd.grad(total, logprobs)
    slopes = [slope(along(i), at) for i, at in enumerate(case.new)]
    torch.testing.assert_close(total.item(), objective(case.new), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradient, real(slopes), atol=1e-5, rtol=1e-4)


@each_loss
@given(case=cases)
def test_on_policy_all_losses_agree(name: str, case: Case) -> None:
    """Where the samples are the policy's own, every gradient is the plain policy gradient."""
    logprobs = real(case.old).requires_grad_()
    loss, _ = load_loss(name)(case.sampled(logprobs))
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    torch.testing.assert_close(gradient, -real(case.advantages))


@each_loss
def test_far_apart_is_still_finite(name: str) -> None:
    """A token that became e^200 times likelier, or less likely, or impossible under the old weights."""
    logprobs = torch.tensor([-0.1, -200.0, -0.5], requires_grad=True)
    sampled = LossInputs(
        logprobs, torch.tensor([-200.0, -0.1, -1e4]), torch.tensor([-1.0, 1.0, 0.0]), torch.arange(3)
    )
    loss, _ = load_loss(name)(sampled)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert loss.isfinite().all() and gradient.isfinite().all()


@each_loss
def test_no_tokens_no_loss(name: str) -> None:
    empty = torch.zeros(0)
    loss, _ = load_loss(name)(LossInputs(empty, empty, empty, torch.zeros(0, dtype=torch.long), empty))
    assert loss.shape == (0,)


@given(cases, st.sampled_from(["token", "sequence"]), st.sampled_from(["truncated", "masked"]))
def test_importance_corrections(case: Case, level: str, name: str) -> None:
    options = {"level": level, "high": 1.5} | ({"low": 0.7} if name == "masked" else {})
    weights = load_correction(name, options)(case.sampled(real(case.new).requires_grad_()))
    mode = "truncate" if name == "truncated" else "mask"
    expected = [
        weight
        for old, behaviour in zip(case.split(case.old), case.split(case.behaviour), strict=True)
        for weight in reference.importance(old, behaviour, level, 0.7, 1.5, mode)
    ]
    torch.testing.assert_close(weights, real(expected))
    assert not weights.requires_grad


@given(cases)
def test_a_corrected_loss_is_weighted_token_by_token(case: Case) -> None:
    sampled = case.sampled(real(case.new))
    algorithm = algos.load_algorithm("grpo", correction="truncated", correction_options={"high": 1.2})
    loss, metrics = algorithm.loss(sampled)
    plain, _ = algos.clipped_surrogate(sampled)
    torch.testing.assert_close(loss, plain * metrics["importance_weight"])
    own = LossInputs(sampled.logprobs_A, sampled.old_logprobs_A, sampled.advantages_A, sampled.row_A)
    assert torch.equal(algos.truncated_importance(own), torch.ones_like(own.old_logprobs_A))


@given(cases, st.sampled_from([None, 0.2]))
def test_value_loss(case: Case, bound: float | None) -> None:
    values = real(case.new).requires_grad_()
    loss, metrics = algos.value_loss(values, real(case.old), real(case.reference), bound=bound)
    (gradient,) = torch.autograd.grad(loss.sum(), values)

    def one(i: int, value: float) -> float:
        return reference.value_loss(value, case.old[i], case.reference[i], bound)

    torch.testing.assert_close(loss.detach(), real([one(i, v) for i, v in enumerate(case.new)]))
    slopes = [slope(lambda v, i=i: one(i, v), at) for i, at in enumerate(case.new)]
    torch.testing.assert_close(gradient, real(slopes), atol=1e-5, rtol=1e-5)
    assert torch.equal(metrics["value_clip_fraction"].bool(), (gradient == 0))


def backwards(formula: Callable[[float, float], float], q: float, p: float) -> float:
    return formula(p, q)


@given(cases)
def test_divergences(case: Case) -> None:
    for name in algos.DIVERGENCES:
        new = real(case.new).requires_grad_()
        found = algos.load_divergence(name)(new, real(case.reference))
        formula = getattr(reference, name)
        pairs = list(zip(case.new, case.reference, strict=True))
        torch.testing.assert_close(found.detach(), real([formula(p, q) for p, q in pairs]))
        (gradient,) = torch.autograd.grad(found.sum(), new)
        slopes = [slope(partial(backwards, formula, q), p) for p, q in pairs]
        torch.testing.assert_close(gradient, real(slopes), atol=1e-5, rtol=1e-5)


@given(st.integers(0, 10_000))
def test_what_the_divergences_estimate_and_what_they_pull_towards(seed: int) -> None:
    """Expectations under p, summed exactly over a small vocabulary, as the notes in `kl` state them."""
    logits, other = torch.randn(2, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logits.requires_grad_()
    p, q = logits.log_softmax(-1), other.log_softmax(-1)
    forward, backward = (p.exp() * (p - q)).sum(), (q.exp() * (q - p)).sum()

    def pull(loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    def expected(divergence: algos.Divergence) -> Tensor:
        """The sampled tokens are held; the gradient passes through their log-probabilities alone."""
        return (p.exp().detach() * divergence(p, q)).sum()

    torch.testing.assert_close(expected(algos.k1), forward)
    torch.testing.assert_close(expected(algos.k3), forward)
    assert (algos.k3(p, q) >= 0).all() and (algos.k2(p, q) >= 0).all()
    torch.testing.assert_close(pull(expected(algos.k1)), torch.zeros_like(logits))
    torch.testing.assert_close(pull(expected(algos.k2)), pull(forward))
    torch.testing.assert_close(pull(expected(algos.k3)), pull(backward))


def test_k3_far_from_the_reference() -> None:
    """It still pulls back where the policy is e^50 times surer, and is finite where the reference is."""
    new = torch.tensor([-0.1, -50.1], requires_grad=True)
    found = algos.k3(new, torch.tensor([-50.1, -0.1]))
    (gradient,) = torch.autograd.grad(found.sum(), new)
    assert found[0].item() == pytest.approx(49) and gradient[0].item() == pytest.approx(1)
    assert found.isfinite().all() and gradient.isfinite().all()


def test_a_divergence_as_reward_lies_on_the_actions() -> None:
    action = torch.tensor([False, True, False, True])
    new, other = torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([-1.5, -1.0])
    penalty = algos.kl_reward(new, other, action, beta=0.1)
    torch.testing.assert_close(penalty, torch.tensor([0.0, -0.05, 0.0, 0.1]))
    assert not penalty.requires_grad


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), max_size=6))
def test_weights(masks: list[list[bool]]) -> None:
    trajectory = torch.tensor([n for n, mask in enumerate(masks) for _ in mask], dtype=torch.long)
    said = torch.tensor([value for mask in masks for value in mask], dtype=torch.bool)
    for name in algos.AGGREGATIONS:
        weigh = load_aggregation(name, {"length": 5} if name == "length" else None)
        expected = torch.tensor(reference.weights(masks, name, 5), dtype=torch.float32)
        torch.testing.assert_close(weigh(trajectory, said), expected)
    if any(map(any, masks)):
        for weigh in (algos.by_token, algos.by_sequence):
            assert math.isclose(float(weigh(trajectory, said).sum()), 1, rel_tol=1e-6)


@given(cases, st.integers(0, 1000))
def test_rloo_sums_over_the_sequence(case: Case, seed: int) -> None:
    """The gradient of -mean_i A_i p(y_i) / p_old(y_i), the whole sequence being one action (paper, TRL)."""
    source = random.Random(seed)
    shared = [source.uniform(-2, 2) for _ in case.lengths]
    logprobs = real(case.old).requires_grad_()
    sampled = case.sampled(logprobs, [shared[n] for n in case.sequence])
    algorithm = algos.load_algorithm("rloo")
    loss, _ = algorithm.loss(sampled)
    everything = torch.ones(len(case.old), dtype=torch.bool)
    weights = algorithm.weigh(sampled.row_A, everything).double()
    (gradient,) = torch.autograd.grad((loss * weights).sum(), logprobs)

    def objective(new: list[float]) -> float:
        pairs = zip(case.split(new), case.split(case.old), shared, strict=True)
        return -sum(a * math.exp(sum(p) - sum(q)) for p, q, a in pairs) / len(shared)

    def along(i: int) -> Callable[[float], float]:
        return lambda p: objective([*case.old[:i], p, *case.old[i + 1 :]])

    slopes = [slope(along(i), at) for i, at in enumerate(case.old)]
    torch.testing.assert_close(gradient, real(slopes), atol=1e-5, rtol=1e-4)


@given(cases)
def test_clip_fractions_are_told_apart(case: Case) -> None:
    """As TRL defines them: low where A < 0 and w < 1 - low, high where A > 0 and w > 1 + high."""
    _, metrics = algos.clipped_surrogate(case.sampled(real(case.new)), clip_low=0.2, clip_high=0.28)
    ratios = [math.exp(new - old) for new, old in zip(case.new, case.old, strict=True)]
    pairs = list(zip(ratios, case.advantages, strict=True))
    assert metrics["clip_fraction_low"].tolist() == [float(a < 0 and w < 0.8) for w, a in pairs]
    assert metrics["clip_fraction_high"].tolist() == [float(a > 0 and w > 1.28) for w, a in pairs]
    for name in algos.LOSSES:
        _, metrics = load_loss(name)(case.sampled(real(case.new)))
        both = metrics["clip_fraction_low"] + metrics["clip_fraction_high"]
        assert torch.equal(both, metrics["clip_fraction"])


def test_the_adaptive_coefficient() -> None:
    """Ziegler et al., equations of section 2.2: a proportional error within a fifth, scaled by n / horizon."""
    adapted = partial(algos.adapted_kl_coefficient, 0.1, target=2.0, horizon=1000)
    assert adapted(2.2, 100) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert adapted(50.0, 100) == pytest.approx(0.1 * (1 + 0.2 * 0.1))
    assert adapted(-1.0, 500) == pytest.approx(0.1 * (1 - 0.2 * 0.5))
    assert adapted(2.0, 500) == 0.1
    for episodes in (1000, 5000, 10**9):  # more than a horizon in one step: a fifth, and never below 0
        assert adapted(0.0, episodes) == pytest.approx(0.08)
        assert adapted(50.0, episodes) == pytest.approx(0.12)


def test_the_adaptive_coefficient_brings_a_divergence_to_its_target() -> None:
    """A policy whose divergence falls as the coefficient grows, KL = 0.04 / beta, ends at the target."""
    beta = 0.01
    for _ in range(8000):
        beta = algos.adapted_kl_coefficient(beta, 0.04 / beta, 64, target=0.1, horizon=10000)
    assert 0.04 / beta == pytest.approx(0.1, rel=1e-2)


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=20))
def test_effective_sample_share(weights: list[float]) -> None:
    """verl's form: 1 / mean((w / mean w)^2)."""
    mean = sum(weights) / len(weights)
    share = algos.effective_sample_size(mean, sum(w**2 for w in weights) / len(weights))
    assert share == pytest.approx(len(weights) / sum((w / mean) ** 2 for w in weights))
    assert 1 / len(weights) - 1e-9 <= share <= 1 + 1e-9


def test_regularisers() -> None:
    loss, entropy, kl = (torch.tensor([value]) for value in (1.0, 0.5, 0.25))
    found = algos.with_regularization(
        loss, entropy_A=entropy, entropy_weight=0.1, kl_A=kl, kl_weight=2.0
    )
    torch.testing.assert_close(found, torch.tensor([1 - 0.05 + 0.5]))
    assert algos.with_regularization(loss) is loss
