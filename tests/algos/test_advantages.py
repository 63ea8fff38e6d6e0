"""Estimators against nested loops written from the formulas (`reference_advantages`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import reference_advantages as reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_batches import batches
from torch import Tensor

import ludus.algos as algos
from ludus.algos import (
    AdvantageInputs,
    Advantages,
    Attempt,
    Need,
    TurnTokens,
    inputs_from,
    load_estimator,
    needs_of,
)

Reference = Callable[[list[Attempt]], reference.Tokens]
CASES: dict[str, tuple[str, dict[str, Any], Reference]] = {
    "grpo": ("grpo", {}, reference.grpo),
    "dr_grpo": ("dr_grpo", {}, reference.dr_grpo),
    "rloo": ("rloo", {}, reference.rloo),
    "reinforce": ("reinforce", {}, reference.reinforce),
    "reinforce_pp": ("reinforce_pp", {}, lambda b: reference.reinforce_pp(b, 1.0)),
    "reinforce_pp, discounted": (
        "reinforce_pp",
        {"discount": 0.9},
        lambda b: reference.reinforce_pp(b, 0.9),
    ),
    "reinforce_pp_baseline": ("reinforce_pp_baseline", {}, reference.reinforce_pp_baseline),
    "turn_grpo": ("turn_grpo", {}, lambda b: reference.turn_grpo(b, 1.0, True)),
    "turn_grpo, discounted": (
        "turn_grpo",
        {"discount": 0.8},
        lambda b: reference.turn_grpo(b, 0.8, True),
    ),
    "turn_grpo, centered": (
        "turn_grpo",
        {"discount": 0.8, "normalise": False},
        lambda b: reference.turn_grpo(b, 0.8, False),
    ),
    "gigpo": ("gigpo", {}, lambda b: reference.gigpo(b, 0.95, 1.0, True)),
    "gigpo, centered": (
        "gigpo",
        {"discount": 0.7, "step_weight": 0.5, "normalise": False},
        lambda b: reference.gigpo(b, 0.7, 0.5, False),
    ),
    # without branches they are these; with them, tests/algos/test_trees.py
    "tree_grpo": ("tree_grpo", {}, reference.grpo),
    "treepo": ("treepo", {}, reference.reinforce_pp_baseline),
    "tree_value": ("tree_value", {}, reference.dr_grpo),
    "gae": (
        "gae",
        {"discount": 0.97, "lam": 0.9},
        lambda b: reference.whitened(b, reference.gae(b, discount=0.97, lam=0.9)[0]),
    ),
}
each_case = pytest.mark.parametrize("case", list(CASES))
each_estimator = pytest.mark.parametrize("name", list(algos.ESTIMATORS))


def flat(rows: reference.Tokens) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


def assert_equal(found: Tensor, expected: reference.Tokens) -> None:
    torch.testing.assert_close(found, flat(expected), atol=1e-6, rtol=1e-6)


@each_case
@given(batch=batches)
def test_estimators_equal_their_formulas(case: str, batch: list[Attempt]) -> None:
    name, options, expected = CASES[case]
    assert_equal(load_estimator(name, options)(inputs_from(batch)).advantages_T, expected(batch))


def test_every_estimator_has_a_case() -> None:
    assert {name for name, _, _ in CASES.values()} == set(algos.ESTIMATORS)


@given(
    batch=batches,
    discount=st.sampled_from([1.0, 0.9, 0.0]),
    lam=st.sampled_from([1.0, 0.8, 0.0]),
    discount_per=st.sampled_from(["token", "turn"]),
    lam_per=st.sampled_from(["token", "turn"]),
    bootstrap=st.booleans(),
    skip_observations=st.booleans(),
)
def test_gae_with_every_switch(batch: list[Attempt], **options: Any) -> None:
    found = algos.gae(inputs_from(batch), normalise=False, **options)
    advantages, targets = reference.gae(batch, **options)
    # where the recursion runs through observations, only the actions are trained on all the same
    said = [
        [a if p in reference.said(b) else 0.0 for p, a in enumerate(row)]
        for b, row in zip(batch, advantages, strict=True)
    ]
    assert found.returns_T is not None
    whole = inputs_from(batch)
    trained = replace(whole, trained_T=algos.action_span(whole.trajectory_T, whole.action_T, len(batch)))
    if not options["skip_observations"]:
        assert_equal(algos.gae(trained, normalise=False, **options).advantages_T, advantages)
    assert_equal(found.advantages_T * whole.action_T, said)
    assert_equal(found.advantages_T, said)
    assert_equal(found.returns_T, targets)


@given(batches)
def test_a_critic_can_have_a_lambda_of_its_own(batch: list[Attempt]) -> None:
    inputs = inputs_from(batch)
    both = algos.gae(inputs, lam=0.5, critic_lam=1.0)
    assert torch.equal(both.advantages_T, algos.gae(inputs, lam=0.5).advantages_T)
    assert both.returns_T is not None
    torch.testing.assert_close(both.returns_T, algos.gae(inputs, lam=1.0).returns_T)


def test_gae_by_hand() -> None:
    """Two turns around an observation; gamma 0.5, lambda 1: credit passes the observation undiminished."""
    attempt = Attempt(
        reward=1.0,
        turns=[TurnTokens(1, observation=3), TurnTokens(2)],
        values=[9, 0.5, 9, 9, 9, 0.25, 0.125],
    )
    found = algos.gae(inputs_from([attempt]), discount=0.5, lam=1.0, normalise=False)
    last, middle = 1 - 0.125, 0.5 * 1 - 0.25
    expected = [0, 0.25 * 1 - 0.5, 0, 0, 0, middle, last]
    torch.testing.assert_close(found.advantages_T, torch.tensor(expected, dtype=torch.float64))


def test_truncation_is_not_termination() -> None:
    """A cut episode is followed to its last state, whose value stands for the outcome and all after it."""
    cut = Attempt(reward=1.0, turns=[TurnTokens(2)], values=[0, 2.0, 3.0], truncated=True)
    ended = replace(cut, truncated=False)
    options: dict[str, Any] = {"discount": 0.5, "lam": 1.0, "normalise": False}
    found = algos.gae(inputs_from([cut, ended]), bootstrap=True, **options)
    assert found.advantages_T.tolist() == [0, 0.5 * 3 - 2, 0, 0, 0.5 * 1 - 2, 1 - 3]
    assert found.returns_T is not None
    assert found.returns_T.tolist() == [0, 1.5, 3, 0, 0.5, 1]
    over = algos.gae(inputs_from([cut, ended]), **options)
    assert over.advantages_T.tolist() == [0, 0.5 - 2, -2, 0, 0.5 - 2, -2]


@pytest.mark.parametrize(("cut", "paid"), [(0.0, 1.0), (0.5, 1.0), (0.5, -3.0), (0.9, 1.0)])
def test_a_critic_of_cut_episodes_converges(cut: float, paid: float) -> None:
    """Ten episodes through the same two states; those that end get 1, those that are cut are paid as well.

    With the outcome added at each cut, V = cut * (paid + V) + (1 - cut) would be 1 + cut * paid / (1 - cut).
    """
    values = [0.0, 0.0]
    for _ in range(400):
        batch = [
            Attempt(
                paid if n < 10 * cut else 1.0,
                [TurnTokens(2)],
                values=[9.0, *values],
                truncated=n < 10 * cut,
            )
            for n in range(10)
        ]
        found = algos.gae(inputs_from(batch), bootstrap=True, normalise=False).returns_T
        assert found is not None
        values = found.reshape(10, 3).mean(0).tolist()[1:]
    assert values == pytest.approx([1.0, 1.0], abs=1e-6)


def test_a_critic_of_nothing_but_cut_episodes_stays() -> None:
    """Nothing says what comes after, so the last state's value is kept, however often it is paid 1."""
    values = [0.25, 0.5]
    for _ in range(50):
        cut = Attempt(1.0, [TurnTokens(2)], values=[9.0, *values], truncated=True)
        found = algos.gae(inputs_from([cut]), bootstrap=True, normalise=False).returns_T
        assert found is not None
        values = found.tolist()[1:]
    assert values == pytest.approx([0.5, 0.5])


def test_a_turns_pay_lands_on_its_last_token_and_the_rest_at_the_end() -> None:
    paid = Attempt(reward=1.0, prompt=2, turns=[TurnTokens(2, 2, reward=0.25), TurnTokens(3, 1)])
    assert algos.token_rewards(inputs_from([paid])).tolist() == [0, 0, 0, 0.25, 0, 0, 0, 0, 0.75, 0]


@given(batches)
def test_token_rewards_add_up_to_the_total(batch: list[Attempt]) -> None:
    inputs = inputs_from(batch)
    sums = torch.zeros(len(batch), dtype=torch.float64)
    sums = sums.index_add(0, inputs.trajectory_T, algos.token_rewards(inputs))
    spoke = torch.tensor([bool(reference.said(a)) for a in batch], dtype=torch.bool)
    torch.testing.assert_close(sums[spoke], inputs.totals[spoke])


@given(batches)
def test_turn_level_credit_without_turn_rewards_is_grpo(batch: list[Attempt]) -> None:
    plain = [replace(a, turns=[replace(t, reward=0.0) for t in a.turns], penalties=()) for a in batch]
    inputs = inputs_from(plain)
    torch.testing.assert_close(algos.turn_grpo(inputs).advantages_T, algos.grpo(inputs).advantages_T)


def test_ragged_turn_counts_do_not_bias_turn_level_credit() -> None:
    """Two alike fail in four turns, one succeeds in one: the long ones must not count four times."""
    long, short = Attempt(0.0, [TurnTokens(1)] * 4), Attempt(1.0, [TurnTokens(1)])
    found = algos.turn_grpo(inputs_from([long, long, short]), normalise=False)
    advantages = found.advantages_T[inputs_from([long, long, short]).action_T]
    torch.testing.assert_close(advantages, torch.tensor([-1 / 3] * 8 + [2 / 3], dtype=torch.float64))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("said", [[1], [3, 1], [2, 2, 1, 4]])
def test_identical_siblings_teach_nothing_at_any_turn(said: list[int], size: int) -> None:
    twin = Attempt(1.0, [TurnTokens(n, 1, reward=0.1, anchor=i) for i, n in enumerate(said)])
    for name, options in (("turn_grpo", {"discount": 0.5}), ("gigpo", {}), ("grpo", {}), ("rloo", {})):
        found = load_estimator(name, options)(inputs_from([twin] * size)).advantages_T
        assert not found.any(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 3, 7, 10, 17])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.7, 1e6 + 0.1])
def test_equal_rewards_are_exactly_nothing(reward: float, size: int, dtype: torch.dtype) -> None:
    """Not nearly: a rounding of the mean, divided by a deviation of the same size, would be a signal."""
    inputs = inputs_from([Attempt(reward, [TurnTokens(2)])] * size, dtype)
    for name in ("grpo", "dr_grpo", "rloo", "reinforce", "reinforce_pp_baseline", "turn_grpo", "gigpo"):
        assert not load_estimator(name)(inputs).advantages_T.any(), name


@each_estimator
def test_edges_are_defined(name: str) -> None:
    """No trajectories; none that spoke; one alone; a batch in which only some spoke."""
    silent = Attempt(1.0, [], values=[0.5], penalties=[0.0])
    speaking = Attempt(0.0, [TurnTokens(1)], values=[0.5, 0.25], penalties=[0.0, 0.0])
    for batch in ([], [silent], [silent, silent], [speaking], [silent, speaking]):
        found = load_estimator(name)(inputs_from(batch))
        assert found.advantages_T.shape == (sum(map(reference.length, batch)),)
        assert found.advantages_T.isfinite().all()
    assert not load_estimator(name)(inputs_from([speaking])).advantages_T.any()


def test_a_silent_attempt_is_in_the_baseline() -> None:
    """It was scored, so it counts; it has no tokens that could be credited."""
    batch = [Attempt(1.0, []), Attempt(0.0, [TurnTokens(1)])]
    for name in ("dr_grpo", "turn_grpo"):
        options = {"normalise": False} if name == "turn_grpo" else {}
        assert load_estimator(name, options)(inputs_from(batch)).advantages_T.tolist() == [0, 0, -0.5]


def test_sets_are_normalised_apart() -> None:
    """One set's rewards are a hundred times the other's; neither sees the other's scale."""
    batch = [Attempt(r, [TurnTokens(2)], group=g) for g in (0, 1) for r in (0.0, 1.0, 1.0)]
    batch += [replace(a, reward=100 * a.reward, group=a.group + 2, set=1) for a in batch]
    for name in ("reinforce_pp", "reinforce_pp_baseline"):
        found = load_estimator(name)(inputs_from(batch)).advantages_T
        torch.testing.assert_close(found[: len(found) // 2], found[len(found) // 2 :])
    found = algos.reinforce(inputs_from(batch)).advantages_T
    torch.testing.assert_close(100 * found[: len(found) // 2], found[len(found) // 2 :])


class TestMasks:
    """The loss mask and the advantage mask are separate switches."""

    attempt = Attempt(
        1.0,
        [TurnTokens(1, observation=2), TurnTokens(1, observation=1)],
        values=[0, 0.5, 0.2, 0.3, 0.6, 0.1],
    )

    def inputs(self, *, loss_mask: bool) -> AdvantageInputs:
        inputs = inputs_from([self.attempt])
        span = algos.action_span(inputs.trajectory_T, inputs.action_T, 1)
        assert span.tolist() == [False, True, True, True, True, False]
        return inputs if loss_mask else replace(inputs, trained_T=span)

    def gae(self, *, loss_mask: bool, advantage_mask: bool) -> list[float]:
        found = algos.gae(
            self.inputs(loss_mask=loss_mask), lam=0.0, skip_observations=advantage_mask, normalise=False
        )
        return [round(value, 6) for value in found.advantages_T.tolist()]

    def test_all_four_combinations(self) -> None:
        # with lambda 0, an advantage is r + V_next - V
        assert self.gae(loss_mask=True, advantage_mask=True) == [0, 0.1, 0, 0, 0.4, 0]
        assert self.gae(loss_mask=True, advantage_mask=False) == [0, -0.3, 0, 0, 0.4, 0]
        assert self.gae(loss_mask=False, advantage_mask=False) == [0, -0.3, 0.1, 0.3, 0.4, 0]
        # outside of the recursion, an observation has what the next action has
        assert self.gae(loss_mask=False, advantage_mask=True) == [0, 0.1, 0.4, 0.4, 0.4, 0]

    def test_without_the_loss_mask_a_group_trains_observations_too(self) -> None:
        winner, loser = self.attempt, replace(self.attempt, reward=0.0)
        inputs = inputs_from([winner, loser])
        span = algos.action_span(inputs.trajectory_T, inputs.action_T, 2)
        found = algos.dr_grpo(replace(inputs, trained_T=span)).advantages_T
        assert found.tolist() == [0, 0.5, 0.5, 0.5, 0.5, 0, 0, -0.5, -0.5, -0.5, -0.5, 0]


def test_what_is_missing_is_named() -> None:
    bare = AdvantageInputs(
        rewards_N=torch.tensor([1.0]),
        group_N=torch.tensor([0]),
        trajectory_T=torch.tensor([0, 0]),
        action_T=torch.tensor([False, True]),
    )
    for name, missing in (("gae", "values_T"), ("turn_grpo", "trajectory_U"), ("gigpo", "trajectory_U")):
        with pytest.raises(ValueError, match=missing):
            load_estimator(name)(bare)
    with pytest.raises(ValueError, match="turn_T"):
        algos.gae(replace(bare, values_T=torch.zeros(2)), discount_per="turn")
    with pytest.raises(ValueError, match="truncated_N"):
        algos.gae(replace(bare, values_T=torch.zeros(2)), bootstrap=True)
    with pytest.raises(ValueError, match=r"values_T has the shape \(3,\), not \(2,\)"):
        replace(bare, values_T=torch.zeros(3))
    with pytest.raises(ValueError, match="rewards_U counts turns"):
        replace(bare, rewards_U=torch.zeros(1))


def test_needs_are_written_down() -> None:
    assert needs_of(algos.gae) == {Need.CRITIC}
    assert needs_of(algos.gigpo) == {Need.SIBLINGS, Need.TURNS, Need.ANCHORS}
    assert needs_of(algos.reinforce) == frozenset()
    assert isinstance(algos.grpo(inputs_from([])), Advantages)


@pytest.mark.parametrize("name", ["reinforce_pp", "gae"])
def test_rounding_noise_in_a_penalty_is_no_signal(name: str) -> None:
    """A policy that has not left its reference yet has a divergence of some 1e-8: nothing to learn from."""
    attempts = [Attempt(0.0, [TurnTokens(4)]) for _ in range(4)]
    inputs = inputs_from(attempts)
    size, dtype = len(inputs.trajectory_T), inputs.rewards_N.dtype
    noise_T = torch.linspace(-3e-8, 3e-8, size, dtype=dtype) * inputs.action_T
    zeros_T = torch.zeros_like(noise_T)
    noisy = replace(inputs, penalty_T=noise_T, values_T=zeros_T)
    assert not load_estimator(name)(noisy).advantages_T.any()
