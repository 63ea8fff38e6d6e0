"""Rewards over a whole group: ranking and curiosity."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.core import (
    ConfigError,
    Fault,
    Group,
    Segment,
    SegmentKind,
    StopReason,
    Task,
    TokenSequence,
    ToolCall,
    Trajectory,
)
from ludus.rewards import CountBonus, Curiosity, Ranking, Scorer, exact_match, group_reward
from ludus.rewards.conduct_rewards import normalised_ranks


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


async def test_count_bonus_pays_less_the_more_a_tool_is_used(episode):
    made = CountBonus(decay=1.0)
    often = grouped(*(episode(turns=[["search"]]) for _ in range(3)))
    assert await made.score_group(often) == [1.0, 1.0, 1.0]
    mixed = grouped(episode(turns=[["search"]]), episode(turns=[["calculator"]]), episode(turns=[[]]))
    search, calculator, nothing = await made.score_group(mixed)
    assert (search, calculator, nothing) == (0.5, 1.0, 0.0)
    assert made.counts == {"search": 4.0, "calculator": 1.0}


async def test_calling_twice_or_inventing_tools_pays_nothing_extra(episode):
    twice = episode(turns=[["search", "search"], ["search"]])
    invented = episode(turns=[["teleport"]], faults=[[Fault.UNKNOWN_TOOL]])
    assert await CountBonus().score_group(grouped(twice, invented)) == [1.0, 0.0]
    both = episode(turns=[["search", "calculator"]])
    assert await CountBonus(tools=["search"]).score_group(grouped(both)) == [1.0]
    assert await CountBonus().score_group(grouped(both)) == [2.0]


async def test_old_use_is_forgotten(episode):
    made = CountBonus(decay=0.5)
    await made.score_group(grouped(episode(turns=[["search"]])))
    for _ in range(20):
        await made.score_group(grouped(episode(turns=[[]])))
    assert made.bonus("search") == pytest.approx(1.0, abs=1e-5)


async def test_count_bonus_goes_on_from_a_saved_state(episode):
    one, other = CountBonus(), CountBonus()
    history = [grouped(episode(turns=[["a"]]), episode(turns=[["a", "b"]])) for _ in range(5)]
    for group in history:
        await one.score_group(group)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert await one.score_group(history[0]) == await other.score_group(history[0])
    for state in ({}, {"counts": 3}, {"counts": {"a": math.nan}}):
        with pytest.raises(ValueError, match="count"):
            other.load_state_dict(state)


def test_impossible_count_bonus_is_refused():
    for options in ({"decay": 0}, {"decay": 1.5}, {"tools": "search"}):
        with pytest.raises(ConfigError):
            CountBonus(**options)


def verltool_curiosity(calls: list[int], H=0.3, N=1, alpha=0.5, beta=0.05) -> list[float]:
    """Equations 9 to 11 of VerlTool's F.4, term by term."""
    rapr = len([n for n in calls if n >= 1]) / len(calls)
    scores = []
    for n in calls:
        seeks = max(H - rapr, 0) if n >= 1 else 0
        wastes = min(N - n, 0)
        scores.append(alpha * seeks + beta * wastes)
    return scores


async def test_curiosity_by_hand(episode):
    """One of 8 attempts calls a tool: RaPR = 0.125, so it is paid 0.5 * (0.3 - 0.125) = 0.0875."""
    one = grouped(episode(turns=[["zoom"]]), *(episode() for _ in range(7)))
    assert await Curiosity().score_group(one) == pytest.approx([0.0875] + [0.0] * 7)
    # half of them do: nothing is paid, and two calls more than N = 1 cost 2 * 0.05
    half = grouped(episode(turns=[["zoom"], ["zoom", "zoom"]]), episode())
    assert await Curiosity().score_group(half) == pytest.approx([-0.1, 0.0])


@given(calls=st.lists(st.integers(0, 5), min_size=1, max_size=12))
async def test_curiosity_is_verltools_formula(calls):
    group = grouped(*(played([["zoom"]] * n + [["other"]]) for n in calls))
    made = Curiosity(tools=["zoom"])
    assert await made.score_group(group) == pytest.approx(verltool_curiosity(calls))
    other = Curiosity(tools=["zoom"], min_rate=0.9, max_calls=2, alpha=2.0, beta=0.25)
    assert await other.score_group(group) == pytest.approx(
        verltool_curiosity(calls, H=0.9, N=2, alpha=2.0, beta=0.25)
    )


def played(turns):
    segments = [Segment(SegmentKind.PROMPT, [1])]
    segments += [
        Segment(SegmentKind.ACTION, [5], logprobs=[0.0], calls=tuple(map(ToolCall, names)))
        for names in turns
    ]
    return Trajectory(Task.of("?", id="t"), [TokenSequence(segments)], stop=StopReason.ANSWERED)


async def test_curiosity_is_added_to_the_reward_and_invented_tools_do_not_count(episode):
    attempts = [
        episode("Paris", turns=[["zoom"]]),
        episode("Rome", turns=[["zooom"]], faults=[[Fault.UNKNOWN_TOOL]]),
        *(episode("Rome") for _ in range(8)),
    ]
    scorer = Scorer([exact_match], [Curiosity()])
    for trajectory in attempts:
        await scorer.score(trajectory)
    await scorer.score_group(grouped(*attempts))
    assert [t.reward for t in attempts] == pytest.approx([1.0 + 0.5 * 0.2] + [0.0] * 9)
    assert attempts[0].rewards["curiosity"] == pytest.approx(0.1)


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
