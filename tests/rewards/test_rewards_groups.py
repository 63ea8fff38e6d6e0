"""Rewards over a whole group: ranking and curiosity."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.core.failures import ConfigError, Fault
from ludus.core.trajectory import Group
from ludus.rewards import Curiosity, Ranking, Scorer, exact_match, group_reward
from ludus.rewards.ranking import normalised_ranks


def ranks_by_counting(keys):
    """The definition: the share of the others one beats, a tie counting half."""
    others = len(keys) - 1
    return [(sum(o < k for o in keys) + 0.5 * (sum(o == k for o in keys) - 1)) / others for k in keys]


@given(st.lists(st.integers(0, 5).map(lambda n: (float(n),)), min_size=2, max_size=12))
def test_ranks_are_the_share_of_the_others_one_beats(keys):
    ranks = normalised_ranks(keys)
    assert ranks == pytest.approx(ranks_by_counting(keys))
    assert math.fsum(ranks) == pytest.approx(len(keys) / 2)


def grouped(*trajectories):
    return Group(trajectories[0].task, list(trajectories))


async def test_ranking_by_total_with_ties_and_a_range(episode):
    group = grouped(*(episode(reward=value) for value in (0.0, 1.0, 1.0, 5.0)))
    assert await Ranking().score_group(group) == [0.0, 0.5, 0.5, 1.0]
    assert await Ranking(low=-1, high=1).score_group(group) == [-1.0, 0.0, 0.0, 1.0]


async def test_fewer_turns_or_tokens_break_ties_and_nothing_else(episode):
    group = grouped(
        episode(reward=1.0, turns=[[]] * 3, tokens=1),
        episode(reward=1.0, turns=[[]] * 2, tokens=9),
        episode(reward=0.0, turns=[[]], tokens=1),
    )
    assert await Ranking(tie_breaker="turns").score_group(group) == [0.5, 1.0, 0.0]
    assert await Ranking(tie_breaker="tokens").score_group(group) == [1.0, 0.5, 0.0]
    with pytest.raises(ConfigError, match="tie_breaker"):
        Ranking(tie_breaker="luck")


async def test_ranking_by_a_part_that_does_not_count_itself(episode):
    attempts = [episode("Paris"), episode("Rome"), episode("Paris", failed=True)]
    scorer = Scorer([exact_match.using(weight=0)], [Ranking(by="exact_match")])
    for trajectory in attempts:
        await scorer.score(trajectory)
    await scorer.score_group(grouped(*attempts))
    assert [t.reward for t in attempts] == [1.0, 0.0, None]


async def test_one_attempt_and_no_attempt_rank_in_the_middle(episode):
    assert await Ranking().score_group(grouped(episode(reward=3.0))) == [0.5]
    assert normalised_ranks([]) == []


async def test_curiosity_pays_less_the_more_a_tool_is_used(episode):
    made = Curiosity(decay=1.0)
    often = grouped(*(episode(turns=[["search"]]) for _ in range(3)))
    assert await made.score_group(often) == [1.0, 1.0, 1.0]
    mixed = grouped(episode(turns=[["search"]]), episode(turns=[["calculator"]]), episode(turns=[[]]))
    search, calculator, nothing = await made.score_group(mixed)
    assert (search, calculator, nothing) == (0.5, 1.0, 0.0)
    assert made.counts == {"search": 4.0, "calculator": 1.0}


async def test_calling_twice_or_inventing_tools_pays_nothing_extra(episode):
    twice = episode(turns=[["search", "search"], ["search"]])
    invented = episode(turns=[["teleport"]], faults=[[Fault.UNKNOWN_TOOL]])
    assert await Curiosity().score_group(grouped(twice, invented)) == [1.0, 0.0]
    both = episode(turns=[["search", "calculator"]])
    assert await Curiosity(tools=["search"]).score_group(grouped(both)) == [1.0]
    assert await Curiosity().score_group(grouped(both)) == [2.0]


async def test_old_use_is_forgotten(episode):
    made = Curiosity(decay=0.5)
    await made.score_group(grouped(episode(turns=[["search"]])))
    for _ in range(20):
        await made.score_group(grouped(episode(turns=[[]])))
    assert made.bonus("search") == pytest.approx(1.0, abs=1e-5)


async def test_curiosity_goes_on_from_a_saved_state(episode):
    one, other = Curiosity(), Curiosity()
    history = [grouped(episode(turns=[["a"]]), episode(turns=[["a", "b"]])) for _ in range(5)]
    for group in history:
        await one.score_group(group)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert await one.score_group(history[0]) == await other.score_group(history[0])
    for state in ({}, {"counts": 3}, {"counts": {"a": math.nan}}):
        with pytest.raises(ValueError, match="count"):
            other.load_state_dict(state)


def test_impossible_curiosity_is_refused():
    for options in ({"decay": 0}, {"decay": 1.5}, {"tools": "search"}):
        with pytest.raises(ConfigError):
            Curiosity(**options)


async def test_group_functions_may_be_async_have_options_and_stay_callable(episode):
    @group_reward
    async def spread(group, *, scale=1.0):
        return [scale * i for i, _ in enumerate(group.trajectories)]

    group = grouped(episode(), episode())
    assert await spread(group) == [0.0, 1.0]
    assert await spread.using(scale=2.0, name="wide").score_group(group) == [0.0, 2.0]
    with pytest.raises(ConfigError, match="known: group, trajectories, task"):
        group_reward(lambda answer: [], name="x")


def test_a_class_in_place_of_an_instance_is_pointed_out():
    with pytest.raises(ConfigError, match=r"Ranking\(\.\.\.\)"):
        Scorer([exact_match], [Ranking])
