"""The scorer: how a total is made, and what is left alone."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.core import Boundary, ConfigError, Group, InfraError, StopReason
from ludus.rewards import (
    CountBonus,
    Gate,
    Ranking,
    Scorer,
    exact_match,
    group_reward,
    is_success,
    reward,
)
from ludus.rewards.scorer import turn_totals


def fixed(name, value, **settings):
    return reward(lambda: value, name=name, **settings)


def per_turn(name, values, **settings):
    return reward(per_turn=True, name=name, **settings)(lambda: values)


async def test_total_is_weighted_outcomes_plus_the_turns_each_counted_once(episode):
    trajectory = episode(turns=[["search"], ["search"], []], paid=[0.5, None, None])
    scorer = Scorer(
        [
            exact_match.using(weight=2.0),
            fixed("style", {"tone": 0.25, "length": 0.25}, weight=0.1),
            per_turn("brevity", [1.0, 2.0, None], weight=0.1),
            per_turn("progress", [None, None, None]),
        ]
    )
    await scorer.score(trajectory)
    assert trajectory.rewards == {
        "tools": 0.5,
        "brevity": 3.0,
        "exact_match": 1.0,
        "style": 0.5,
        "tone": 0.25,
        "length": 0.25,
    }
    assert [action.reward for action in trajectory.actions] == [pytest.approx(0.6), 0.2, None]
    outcome = 2.0 * 1.0 + 0.1 * 0.5
    assert trajectory.reward == pytest.approx(outcome + 0.6 + 0.2)


async def test_what_tools_paid_counts_once_without_any_per_turn_reward(episode):
    trajectory = episode(turns=[["a"], ["b"]], paid=[0.25, -1.0])
    await Scorer([exact_match]).score(trajectory)
    assert trajectory.rewards == {"tools": -0.75, "exact_match": 1.0}
    assert trajectory.reward == 0.25
    assert [action.reward for action in trajectory.actions] == [0.25, -1.0]


async def test_unscored_stays_none_and_is_not_trained_on(episode):
    for scorer in (Scorer([]), Scorer([fixed("none", None)]), Scorer([per_turn("t", [None])])):
        trajectory = episode()
        await scorer.score(trajectory)
        assert trajectory.reward is None and not trajectory.is_trainable
        assert trajectory.rewards == {}


async def test_weight_zero_is_shown_and_counts_as_a_score_of_nothing(episode):
    trajectory = episode()
    await Scorer([fixed("shown", 7, weight=0)]).score(trajectory)
    assert (trajectory.rewards, trajectory.reward) == ({"shown": 7.0}, 0.0)


async def test_scoring_twice_is_refused(episode):
    trajectory = episode(paid=[0.5])
    scorer = Scorer([exact_match])
    await scorer.score(trajectory)
    with pytest.raises(ValueError, match="scored already"):
        await scorer.score(trajectory)
    assert trajectory.reward == 1.5


async def test_failed_and_aborted_episodes_are_not_scored(episode):
    asked = []
    scorer = Scorer([reward(lambda: asked.append(1) or 1.0, name="r")])
    for trajectory in (episode(failed=True), episode(stop=StopReason.ABORTED)):
        await scorer.score(trajectory)
        assert (trajectory.reward, trajectory.rewards, asked) == (None, {}, [])
    truncated = episode(answer=None, stop=StopReason.MAX_TURNS)
    await scorer.score(truncated)
    assert truncated.reward == 1.0


@pytest.mark.parametrize(
    "bad",
    [
        fixed("nan", math.nan),
        per_turn("short", []),
        fixed("huge", 1e308, weight=1e308),
        fixed("exact_match_too", {"exact_match": 0.5}),
    ],
)
async def test_a_failure_leaves_the_trajectory_as_it_was(episode, bad):
    trajectory = episode(paid=[0.5])
    with pytest.raises(InfraError) as caught:
        await Scorer([exact_match, per_turn("t", [1.0]), bad]).score(trajectory)
    assert caught.value.boundary is Boundary.REWARD
    assert (trajectory.reward, trajectory.rewards) == (None, {})
    assert trajectory.actions[0].reward == 0.5


@pytest.mark.parametrize(
    ("rewards", "paid", "said"),
    [
        ([fixed("huge", 1e300)], None, "the score of 'huge', times its weight, is 1e+300"),
        ([fixed("huge", -2e6)], None, "the score of 'huge', times its weight, is -2e+06"),
        ([fixed("a", 9e5), fixed("b", 9e5)], None, "the total is 1.8e+06"),
        ([per_turn("t", [1e9])], None, "the reward of an action is 1e+09"),
        ([exact_match], 1e300, "the reward of an action is 1e+300"),
    ],
)
async def test_a_reward_that_float32_cannot_train_on_is_a_failure(episode, rewards, paid, said):
    trajectory = episode(paid=[paid])
    with pytest.raises(InfraError, match=re.escape(said)) as caught:
        await Scorer(rewards).score(trajectory)
    assert caught.value.boundary is Boundary.REWARD and "divide" in str(caught.value)
    assert (trajectory.reward, trajectory.rewards) == (None, {})


async def test_a_large_score_counts_by_its_weight_and_a_logged_part_may_be_anything(episode):
    trajectory = episode()
    given = fixed("profit", {"reward": 5e7, "tokens": 1e300}, weight=1e-7)
    await Scorer([given]).score(trajectory)
    assert trajectory.reward == pytest.approx(5.0) and trajectory.rewards["tokens"] == 1e300


async def test_a_group_reward_is_bounded_with_the_rest(episode):
    first, second = episode(), episode()
    scorer = Scorer([], [group_reward(lambda group: [1.0, 1e300], name="judge")])
    with pytest.raises(InfraError, match=re.escape("the total is 1e+300")):
        await scorer.score_group(Group(first.task, [first, second]))


async def test_a_tools_reward_that_is_no_number_is_a_failure(episode):
    with pytest.raises(InfraError, match="a tool's reward is nan"):
        await Scorer([exact_match]).score(episode(paid=[math.nan]))


async def test_plain_functions_are_wrapped(episode):
    def polite(answer):
        return float("please" in answer)

    trajectory = episode("please")
    await Scorer([polite]).score(trajectory)
    assert trajectory.rewards == {"polite": 1.0}


def test_names_must_differ_across_all_kinds():
    with pytest.raises(ConfigError, match="'a'"):
        Scorer([fixed("a", 1), per_turn("a", [1])])
    with pytest.raises(ConfigError, match="'ranking'"):
        Scorer([fixed("ranking", 1)], [Ranking()])
    with pytest.raises(ConfigError, match="listed twice"):
        Scorer([exact_match, exact_match])
    with pytest.raises(ConfigError, match="'a'"):
        Scorer([fixed("a", 1), Gate(fixed("c", 1), fixed("a", 1))])
    with pytest.raises(ConfigError, match="among the group rewards"):
        Scorer([Ranking()])
    with pytest.raises(ConfigError, match="among the rewards"):
        Scorer([], [exact_match])


async def test_group_rewards_neither_see_nor_score_failed_attempts(episode):
    seen = []

    @group_reward(weight=0.5)
    def longest(trajectories, group, task):
        assert trajectories is group.trajectories and task is group.task
        seen.extend(trajectories)
        return [float(len(t.answer)) for t in trajectories]

    attempts = [episode("Paris"), episode(failed=True), episode("Rome"), episode("x", failed=True)]
    unscored, aborted = episode("Oslo"), episode(stop=StopReason.ABORTED)
    scorer = Scorer([exact_match], [longest])
    for trajectory in [*attempts, aborted]:
        await scorer.score(trajectory)
    group = Group(attempts[0].task, [*attempts, unscored, aborted])
    await scorer.score_group(group)
    assert seen == [attempts[0], attempts[2]]
    assert [t.reward for t in group.trajectories] == [3.5, None, 2.0, None, None, None]
    assert attempts[0].rewards == {"exact_match": 1.0, "longest": 5.0}
    assert attempts[1].rewards == {}


async def test_group_rewards_alone_make_an_episode_scored(episode):
    scorer = Scorer([], [group_reward(lambda group: [1.0, 3.0], name="judge")])
    attempts = [episode(), episode(failed=True), episode()]
    for trajectory in attempts:
        await scorer.score(trajectory)
    await scorer.score_group(Group(attempts[0].task, attempts))
    assert [t.reward for t in attempts] == [1.0, None, 3.0]


@pytest.mark.parametrize("value", [[1.0], [1.0, None], None, 3.0, [1.0, math.nan], "ab"])
async def test_a_group_reward_that_breaks_writes_nothing(episode, value):
    attempts = [episode(reward=1.0), episode(reward=0.0)]
    scorer = Scorer([exact_match], [Ranking(), group_reward(lambda group: value, name="judge")])
    with pytest.raises(InfraError, match="'judge' failed"):
        await scorer.score_group(Group(attempts[0].task, attempts))
    assert [(t.reward, t.rewards) for t in attempts] == [(1.0, {}), (0.0, {})]


async def test_a_group_is_scored_once_and_an_empty_one_not_at_all(episode):
    scorer = Scorer([exact_match], [Ranking()])
    group = Group(episode().task, [episode(reward=1.0), episode(reward=0.0)])
    await scorer.score_group(group)
    assert [t.reward for t in group.trajectories] == [2.0, 0.0]
    with pytest.raises(ValueError, match="scored already"):
        await scorer.score_group(group)
    await scorer.score_group(Group(group.task, [episode(failed=True)]))


async def test_state_is_collected_by_name_and_restored(episode):
    scorer = Scorer([exact_match], [CountBonus(), Ranking()])
    await scorer.score_group(Group(episode().task, [episode(turns=[["search"]], reward=1.0)]))
    state = scorer.state_dict()
    assert state == {"count_bonus": {"counts": {"search": 1.0}}}
    other = Scorer([exact_match], [CountBonus()])
    other.load_state_dict(state)
    assert other.state_dict() == state
    with pytest.raises(ConfigError, match="'count_bonus'"):
        Scorer([exact_match]).load_state_dict(state)


maybe = st.none() | st.floats(-10, 10)


@given(
    st.integers(0, 5).flatmap(lambda n: st.lists(st.lists(maybe, min_size=n, max_size=n), min_size=1))
)
def test_turns_add_up_to_what_the_parts_say(rows):
    tools, *scores = rows
    rewards = [per_turn(f"r{i}", []) for i in range(len(scores))]
    parts, paid = turn_totals(tools, rewards, scores)
    assert math.fsum(v for v in paid if v is not None) == pytest.approx(math.fsum(parts.values()))
    for i, value in enumerate(paid):
        assert (value is None) == all(row[i] is None for row in rows)


@pytest.mark.parametrize(
    ("parts", "total", "threshold", "success"),
    [
        ({}, 1.0, 1.0, True),
        ({}, 0.99, 1.0, False),
        ({}, 0.7 + 0.2 + 0.1, 1.0, True),
        ({}, 0.5, 0.5, True),
        ({"success": 1.0}, -3.0, 1.0, True),
        ({"success": 0.0}, 5.0, 1.0, False),
        ({}, None, 0.0, False),
    ],
)
def test_what_success_means(episode, parts, total, threshold, success):
    trajectory = episode(reward=total)
    trajectory.rewards = parts
    assert is_success(trajectory, threshold) is success


def test_a_failed_episode_is_no_success(episode):
    assert not is_success(episode(reward=1.0, failed=True))
