"""Sums, gates, partial credit and efficiency: their truth tables, and that they nest."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.core import Boundary, ConfigError, Fault, InfraError, ToolCall
from ludus.rewards import (
    Efficiency,
    Format,
    FormatGate,
    Gate,
    Scorer,
    ToolBonus,
    Weighted,
    build_reward,
    combine,
    exact_match,
    f1,
    reward,
)


def fixed(name, value, **settings):
    return reward(lambda: value, name=name, **settings)


async def scored(made, trajectory, envs=None):
    return await made.score(trajectory, trajectory.task, envs or {})


async def test_a_weighted_sum_keeps_its_parts_unweighted(episode):
    made = Weighted({fixed("a", 1.0, weight=9): 0.5, fixed("b", {"b": 2, "note": 7}): 0.25})
    assert await scored(made, episode()) == {"weighted": 1.0, "a": 1.0, "b": 2.0, "note": 7.0}


async def test_combine_uses_the_rewards_own_weights_unless_given_others(episode):
    rewards = [fixed("a", 1.0, weight=3), lambda_named("b")]
    assert (await scored(combine(rewards), episode()))["combined"] == 5.0
    assert (await scored(combine(rewards, [1, 0]), episode()))["combined"] == 1.0
    with pytest.raises(ConfigError, match="1 weights for 2 rewards"):
        combine(rewards, [1])


def lambda_named(name):
    def function(answer):
        return 2.0

    function.__name__ = name
    return function


async def test_unscored_adds_nothing_and_nothing_at_all_is_unscored(episode):
    none, one = fixed("none", None), fixed("one", 1)
    assert await scored(combine([none, one]), episode()) == {"combined": 1.0, "one": 1.0}
    assert await scored(combine([none]), episode()) == {}
    assert await scored(Gate(none, one), episode()) == {}
    assert await scored(Gate(one, none), episode()) == {"one": 1.0}
    assert await scored(ToolBonus(none), episode(turns=[["search"]])) == {}
    assert await scored(Efficiency(none, 5), episode()) == {}


@pytest.mark.parametrize(
    ("form", "correct", "total"),
    [
        (1, 1, 1.0),
        (1, 0, 0.0),
        (0, 1, -1.0),
        (0, 0, -1.0),
        (0.5, 1, -0.5),
        (0.5, 0, -0.5),
        (1, 0.5, 0.5),
    ],
)
async def test_format_gate_truth_table(episode, form, correct, total):
    """Agent-R1's equation 6: EM if r_format = 1, else r_format - 1."""
    made = FormatGate(fixed("format", form), fixed("correct", correct))
    assert await scored(made, episode()) == {"format_gate": total, "format": form, "correct": correct}


async def test_the_penalty_is_fixed_whatever_the_inner_weight(episode):
    inner = fixed("correct", 1, weight=2)
    assert (await scored(FormatGate(fixed("f", 1), inner, -0.5), episode()))["format_gate"] == 2.0
    assert (await scored(FormatGate(fixed("f", 0), inner, -0.5), episode()))["format_gate"] == -0.5


@pytest.mark.parametrize(
    ("said", "faults", "form", "paid"),
    [
        ("<answer>Paris</answer>", [], 1.0, 1.0),
        ("<answer>Rome</answer>", [], 1.0, 0.0),
        ("<answer>Paris</answer>", [Fault.MALFORMED_CALL], 0.5, -0.5),
        ("Paris", [], 0.5, -0.5),
        ("Paris", [Fault.MALFORMED_CALL], 0.0, -1.0),
        ("<answer>Paris</answer>", [Fault.UNKNOWN_TOOL], 1.0, 1.0),
    ],
)
async def test_agent_r1_pays_half_for_half_a_format(episode, said, faults, form, paid):
    """r_format = (answer well formed + syntax of the calls valid) / 2, from a recipe."""
    recipe = {
        "reward": "format_gate",
        "format": {"reward": "format", "tags": ["answer"], "calls": True},
        "inner": "exact_match",
    }
    trajectory = episode(said, turns=[["search"], []], faults=[faults, []])
    trajectory.answer = said.removeprefix("<answer>").removesuffix("</answer>")
    await Scorer([build_reward(recipe)]).score(trajectory)
    assert (trajectory.rewards["format"], trajectory.reward) == (form, paid)


async def test_a_call_that_cannot_be_read_counts_even_where_the_episode_ended_with_it(episode):
    cut = episode("<answer>Paris</answer>")
    cut.actions[0].calls = (ToolCall("", fault=Fault.MALFORMED_CALL),)
    assert await scored(Format(tags=["answer"], calls=True), cut) == {"format": 0.5}


async def test_a_shut_gate_does_not_ask_the_inner_reward(episode):
    asked = []

    @reward
    def judge():
        asked.append(1)
        return 1

    for verdict, asks in ((0.0, 0), (0.69, 0), (0.7, 1)):
        asked.clear()
        parts = await scored(Gate(fixed("c", verdict), judge, threshold=0.7), episode())
        assert (len(asked), "judge" in parts, parts["gate"]) == (asks, bool(asks), float(asks))


async def test_otherwise_may_be_a_reward(episode):
    made = Gate(exact_match, fixed("full", 1), f1)
    parts = await scored(made, episode("Paris France", "Paris"))
    assert parts["gate"] == parts["f1"] == pytest.approx(2 / 3)
    assert "full" not in parts


CALLED, SILENT = [["search"], []], [[]]


@pytest.mark.parametrize(
    ("form", "inner", "turns", "total"),
    [
        # AgentFly B.1: 0.1 if at least one tool call, 1.0 if the answer is right as well, otherwise 0.0
        ("agentfly", 1.0, CALLED, 1.0),
        ("agentfly", 1.0, SILENT, 0.0),
        ("agentfly", 0.0, CALLED, 0.1),
        ("agentfly", 0.0, SILENT, 0.0),
        ("agentfly", -1.0, SILENT, -1.0),
        ("agentfly", -1.0, CALLED, -1.0),
        # VerlTool, equation 12: R_acc + 0.1 if any tool was called
        ("verltool", 1.0, CALLED, 1.1),
        ("verltool", 1.0, SILENT, 1.0),
        ("verltool", 0.0, CALLED, 0.1),
        ("verltool", -1.0, CALLED, -0.9),
        ("verltool", -1.0, SILENT, -1.0),
        # a floor under the score of an episode that used a tool
        ("floor", 1.0, CALLED, 1.0),
        ("floor", 1.0, SILENT, 1.0),
        ("floor", 0.0, CALLED, 0.1),
        ("floor", 0.0, SILENT, 0.0),
        ("floor", 0.05, CALLED, 0.1),
        ("floor", 0.4, CALLED, 0.4),
        ("floor", -1.0, CALLED, -1.0),
    ],
)
async def test_tool_bonus_truth_tables(episode, form, inner, turns, total):
    made = build_reward({"reward": "tool_bonus", "inner": fixed("inner", inner), "form": form})
    assert await scored(made, episode(turns=turns)) == {
        "tool_bonus": pytest.approx(total),
        "inner": inner,
    }


async def test_the_bonus_of_the_library_is_agentflys(episode):
    made = build_reward({"reward": "tool_bonus", "inner": "exact_match"})
    right, guessed = episode("Paris", turns=CALLED), episode("Paris", turns=SILENT)
    assert [(await scored(made, one))["tool_bonus"] for one in (right, guessed)] == [1.0, 0.0]
    with pytest.raises(ConfigError, match="'agentfly', or 'verltool', or 'floor'"):
        ToolBonus(exact_match, form="agent_fly")


@pytest.mark.parametrize(
    ("fault", "papers", "floor"),
    [(Fault.UNKNOWN_TOOL, 0.0, 0.0), (Fault.TOOL_RAISED, 0.1, 0.0), (Fault.BAD_ARGUMENTS, 0.1, 0.0)],
)
async def test_which_calls_earn_the_bonus(episode, fault, papers, floor):
    faulty = episode(turns=[["serach"]], faults=[[fault]])
    for form, paid in (("agentfly", papers), ("verltool", papers), ("floor", floor)):
        made = ToolBonus(fixed("i", 0), form=form)
        assert (await scored(made, faulty))["tool_bonus"] == paid
    other = episode(turns=[["calculator"]])
    for form in ("agentfly", "verltool", "floor"):
        made = [ToolBonus(fixed("i", 0), form=form, tools=[name]) for name in ("search", "calculator")]
        assert [(await scored(one, other))["tool_bonus"] for one in made] == [0.0, 0.1]
    with pytest.raises(ConfigError, match="list of names"):
        ToolBonus(fixed("i", 0), tools="search")


async def test_what_is_unscored_inside_stays_unscored_in_the_total(episode):
    """The parts of a reward that scored nothing are shown, and never summed instead."""
    trajectory = episode()
    await Scorer([Gate(fixed("one", 1), fixed("none", None))]).score(trajectory)
    assert (trajectory.rewards, trajectory.reward) == ({"one": 1.0}, None)


async def test_they_nest_and_every_part_stays_visible(episode):
    inner = Efficiency(ToolBonus(exact_match), 3, lowest=0.0)
    made = combine([FormatGate(fixed("format", 1), inner), fixed("style", 0.5, weight=0.1)])
    parts = await scored(made, episode("Rome", turns=[["search"], []]))
    assert parts == {
        "combined": pytest.approx(0.1),
        "format_gate": pytest.approx(0.05),
        "format": 1.0,
        "efficiency": pytest.approx(0.05),
        "efficiency_factor": 0.5,
        "tool_bonus": 0.1,
        "exact_match": 0.0,
        "style": 0.5,
    }


@pytest.mark.parametrize(("turns", "factor"), [(1, 1.0), (2, 1.0), (3, 0.75), (4, 0.5), (9, 0.5)])
async def test_efficiency_is_linear_between_floor_and_budget(episode, turns, factor):
    made = Efficiency(fixed("won", 2), 4, floor=2, lowest=0.5)
    parts = await scored(made, episode(turns=[["t"]] * turns))
    assert parts == {"efficiency": 2 * factor, "efficiency_factor": factor, "won": 2.0}


@pytest.mark.parametrize(("unit", "used"), [("turns", 3), ("calls", 4), ("tokens", 21)])
async def test_efficiency_counts_what_it_says(episode, unit, used):
    trajectory = episode(turns=[["a", "b"], ["a"], ["c"]], tokens=7)
    made = Efficiency(fixed("won", 1), used * 2, floor=0, lowest=0.0, unit=unit)
    assert (await scored(made, trajectory))["efficiency"] == 0.5


async def test_efficiency_neither_pays_a_failure_nor_softens_a_penalty(episode):
    for value in (0, -1):
        parts = await scored(Efficiency(fixed("won", value), 2), episode(turns=[[]] * 5))
        assert parts == {"efficiency": value, "won": value}


@given(st.floats(0, 1), st.integers(0, 50), st.integers(0, 50))
def test_less_use_never_pays_less(lowest, one, other):
    made = Efficiency(fixed("won", 1), 20, floor=3, lowest=lowest)
    assert lowest <= made.factor(max(one, other)) <= made.factor(min(one, other)) <= 1.0


@pytest.mark.parametrize(
    "options", [{"budget": 1}, {"budget": 3, "unit": "hours"}, {"budget": 3, "lowest": 2}]
)
def test_impossible_efficiencies_are_refused(options):
    with pytest.raises(ConfigError, match="'efficiency'"):
        Efficiency(exact_match, **options)


def test_two_rewards_with_one_name_are_refused_wherever_they_hide():
    with pytest.raises(ConfigError, match="two rewards are called 'a'"):
        combine([fixed("a", 1), fixed("a", 2)])
    with pytest.raises(ConfigError, match="two rewards are called 'a'"):
        combine([fixed("a", 1), Gate(fixed("c", 1), fixed("a", 2))])
    with pytest.raises(ConfigError, match="two rewards are called 'gate'"):
        Gate(fixed("c", 1), Gate(fixed("d", 1), fixed("a", 2)))
    with pytest.raises(ConfigError, match="two rewards are called 'combined'"):
        combine([fixed("combined", 1)])


async def test_two_parts_with_one_name_and_different_values_fail(episode):
    with pytest.raises(InfraError, match="a part 'x' that another reward reports") as caught:
        await scored(combine([fixed("a", {"x": 1}), fixed("b", {"x": 2})]), episode())
    assert caught.value.boundary is Boundary.REWARD


def test_what_is_no_reward_is_refused():
    for thing, message in (
        (3, "not a reward"),
        (Efficiency, "is a class"),
        (turn_reward(), "cannot be combined"),
    ):
        with pytest.raises(ConfigError, match=message):
            combine([thing])
    with pytest.raises(ConfigError, match="no rewards"):
        Weighted({})


def turn_reward():
    @reward(per_turn=True)
    def turns():
        return []

    return turns


async def test_a_failure_inside_fails_the_whole_and_keeps_its_name(episode):
    def broken():
        raise ZeroDivisionError("oh")

    made = FormatGate(fixed("format", 1), ToolBonus(reward(broken)))
    with pytest.raises(InfraError, match="'broken' failed: ZeroDivisionError: oh"):
        await scored(made, episode())


async def test_classes_are_rewards_too_sync_or_async_and_are_guarded(episode):
    class Sync:
        name = "sync"

        def score(self, trajectory, task, envs):
            return {"sync": 1.0}

    class Wrong:
        name = "wrong"

        async def score(self, trajectory, task, envs):
            return {"wrong": math.nan}

    class Stuck:
        name = "stuck"
        timeout = 0.05

        async def score(self, trajectory, task, envs):
            await asyncio.sleep(30)

    assert await scored(combine([Sync()]), episode()) == {"combined": 1.0, "sync": 1.0}
    for made, message in (
        (Wrong(), r"must be finite \(.*compose\.py:\d+ in score\)"),
        (Stuck(), "0.05 seconds"),
    ):
        with pytest.raises(InfraError, match=message):
            await scored(combine([made]), episode())


async def test_rewards_overlap_but_share_an_environment_one_at_a_time(episode):
    """Two that need each other finish; two that touch the environment never meet."""
    both = asyncio.Barrier(2)
    inside = []

    @reward
    async def left():
        await both.wait()
        return 1

    @reward
    async def right():
        await both.wait()
        return 1

    def touching(name):
        async def touch(env):
            inside.append(name)
            await asyncio.sleep(0)
            assert inside.pop() == name and not inside
            return 1

        return reward(touch, name=name)

    trajectory = episode()
    async with asyncio.timeout(20):
        await Scorer([left, right, touching("a"), touching("b")]).score(trajectory, {"e": object()})
    assert trajectory.reward == 4.0


async def test_when_one_fails_the_others_are_cancelled(episode):
    cancelled = asyncio.Event()

    @reward
    async def slow():
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    @reward
    async def fails():
        await asyncio.sleep(0.01)
        raise ValueError("no")

    with pytest.raises(InfraError, match="'fails' failed"):
        await scored(combine([slow, fails]), episode())
    assert cancelled.is_set()
