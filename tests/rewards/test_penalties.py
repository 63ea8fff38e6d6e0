"""Additive penalties and the three-dimensional reward, against formulas written out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.core import (
    ConfigError,
    Fault,
    Group,
    Message,
    Segment,
    SegmentKind,
    StopReason,
    Task,
    TokenSequence,
    ToolCall,
    Trajectory,
)
from ludus.rewards import (
    Curiosity,
    Format,
    FormatGate,
    Scorer,
    Weighted,
    build_reward,
    exact_match,
)
from ludus.rewards.conduct import (
    call_records,
    effective_share,
    made_calls,
    needless_calls,
    recovery_share,
    repeated_calls,
)

Step = tuple[list[tuple[str, dict[str, Any], str]], list[Fault]]


def episode(*steps: Step, answer: str = "Paris", target: Any = "Paris", **metadata: Any) -> Trajectory:
    """Turns of (calls as (tool, arguments, result), faults), and an answer."""
    task = Task.of("Capital of France?", target, id="t", metadata=metadata)
    segments, messages = [Segment(SegmentKind.PROMPT, [1])], list(task.messages)
    for number, (calls, faults) in enumerate(steps):
        made = tuple(ToolCall(name, arguments) for name, arguments, _ in calls)
        faulted = tuple(call.name for call in made)[: len(faults)]
        segments.append(
            Segment(
                SegmentKind.ACTION,
                [5] * 10,
                [-0.1] * 10,
                calls=made,
                faults=tuple(faults),
                faulted=faulted,
            )
        )
        messages.append(Message("assistant", f"step {number}", made))
        messages += [Message("tool", result, name=name) for name, _, result in calls]
    segments.append(Segment(SegmentKind.ACTION, [5] * 10, [-0.1] * 10))
    messages.append(Message("assistant", answer))
    return Trajectory(task, [TokenSequence(segments)], messages, answer, StopReason.ANSWERED)


def search(query: str, result: str) -> Step:
    return [("search", {"q": query}, result)], []


async def scored(spec: Any, one: Trajectory) -> dict[str, float]:
    found: dict[str, float] = await build_reward(spec).score(one, one.task, {})  # type: ignore[union-attr]
    return found


async def test_the_total_is_task_less_turns_less_format_errors() -> None:
    """R = R_task - 0.1 * turns / max_turns - 0.5 * [a malformed call] (B42), and - 0.05 * searches (B43)."""
    one = episode(
        search("a", "x"), ([("search", {}, "what?")], [Fault.MALFORMED_CALL]), search("b", "y")
    )
    rewards = [
        {"reward": "exact_match", "name": "success"},
        {"reward": "turn_penalty", "price": 0.1, "budget": 8},
        {"reward": "fault_penalty"},
        {"reward": "call_penalty", "tools": ["search"]},
    ]
    await Scorer([build_reward(spec) for spec in rewards]).score(one)
    assert one.rewards["turn_penalty"] == pytest.approx(-0.1 * 4 / 8)
    assert one.rewards["fault_penalty"] == -0.5
    assert one.rewards["call_penalty"] == pytest.approx(-0.05 * 3)
    assert one.reward == pytest.approx(1 - 0.05 - 0.5 - 0.15)


async def test_slow_tools_cost_within_bounds() -> None:
    one = episode(search("a", "x"))
    spec = {"reward": "time_penalty", "price": 0.2, "budget": 10, "free": 1}
    for seconds, expected in ((0.5, 0.0), (6.0, -0.1), (1000.0, -0.2)):
        one.seconds["tools"] = seconds
        assert (await scored(spec, one))["time_penalty"] == pytest.approx(expected)


_COUNTING = "with recursive n(i) as (select 1 union all select i + 1 from n where i < 300000) "


@pytest.mark.parametrize("is_nested", [False, True])
async def test_a_slow_scored_query_costs(tmp_path: Path, is_nested: bool) -> None:
    """No tool was called: all the time is in the query that `sql_match` runs, listed after the penalty."""
    (tmp_path / "a.sql").write_text("create table t(x); insert into t values (1);")
    one = episode(answer=f"{_COUNTING} select count(*) from n", target="select 300000")
    match = {"reward": "sql_match", "database": "a.sql", "folder": str(tmp_path), "name": "success"}
    penalty = build_reward({"reward": "time_penalty", "price": 0.2, "budget": 100.0})
    rewards = [penalty, build_reward(match)]
    if is_nested:
        rewards = [Weighted(dict.fromkeys(rewards, 1.0))]  # type: ignore[misc]
    await Scorer(rewards).score(one)
    assert one.rewards["success"] == 1.0 and one.seconds["execution"] > 0.0
    assert one.rewards["time_penalty"] == pytest.approx(-0.2 * one.seconds["execution"] / 100.0)


@pytest.mark.parametrize(
    "tests",
    [["assert f(2) == 4"], [{"args": [2], "expected": 4}], [{"stdin": "2", "stdout": "4"}]],
)
async def test_the_seconds_of_scored_code_are_noted(tests: list[Any]) -> None:
    code = "def f(x):\n    return x * 2\nif __name__ == '__main__':\n    print(f(int(input())))"
    one = episode(answer=code, tests=tests, function="f")
    spec: dict[str, Any] = {"reward": "unit_tests", "name": "success"}
    await Scorer([build_reward(spec)]).score(one)
    assert one.rewards["success"] == 1.0 and one.seconds["execution"] > 0.0
    assert "execution" not in one.rewards


async def test_repeats_and_needless_searches_are_found() -> None:
    one = episode(
        search("france", "a country"),
        search("france", "a country"),  # the same again
        search("france", "a republic"),  # the same call, another result: the world changed
        search("capital", "It is Paris."),  # enough is known
        search("capital", "It is Paris."),
        search("river", "Seine"),
    )
    records = call_records(one)
    assert repeated_calls(records) == 2
    assert needless_calls(records, ["paris"]) == 2
    assert needless_calls(records, ["Lyon"]) == 0
    assert needless_calls(records, ["par"]) == 0  # part of a word is no answer
    assert (await scored({"reward": "repeat_penalty"}, one))["repeat_penalty"] == pytest.approx(-0.2)
    found = await scored({"reward": "enough_known_penalty", "tools": ["search"]}, one)
    assert found["enough_known_penalty"] == pytest.approx(-0.1)


@pytest.mark.parametrize(
    "spec",
    [
        {"reward": "turn_penalty", "price": -1},
        {"reward": "turn_penalty", "budget": 0},
        {"reward": "fault_penalty", "faults": ["rude"]},
        {"reward": "call_penalty", "tools": "search"},
    ],
)
async def test_mistakes_are_refused(spec: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        await scored(spec, episode())


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.booleans()), max_size=8))
def test_effective_calls_are_faultless_and_new(calls: list[tuple[str, str, bool]]) -> None:
    steps: list[Step] = [
        ([("search", {"q": q}, result)], [Fault.TOOL_RAISED] if is_bad else [])
        for q, result, is_bad in calls
    ]
    one = episode(*steps)
    good = sum(not bad and r not in [x for _, x, _ in calls[:n]] for n, (_, r, bad) in enumerate(calls))
    assert effective_share(call_records(one)) == pytest.approx(good / len(calls) if calls else 0.0)
    faulty = [n for n, (*_, bad) in enumerate(calls) if bad]
    recovered = sum(any(not bad for *_, bad in calls[n + 1 :]) for n in faulty)
    assert recovery_share(one) == pytest.approx(recovered / len(faulty) if faulty else 1.0)


async def test_three_dimensions() -> None:
    one = episode(
        ([("search", {}, "bad arguments")], [Fault.BAD_ARGUMENTS]),
        search("a", "x"),
        search("b", "x"),  # seen before
        search("c", "y"),
        expected={"turns": 4, "calls": 8},
    )
    found = await scored({"reward": "three_dimensional", "completion": "exact_match"}, one)
    process = 0.4 * 2 / 4 + 0.3 * 1 + 0.3 * 1
    efficiency = (4 / 5 + 1) / 2
    assert found["three_dimensional_process"] == pytest.approx(process)
    assert found["three_dimensional_efficiency"] == pytest.approx(efficiency)
    assert found["three_dimensional"] == pytest.approx(0.5 + 0.3 * process + 0.2 * efficiency)


async def test_three_dimensions_by_type_and_only_where_complete() -> None:
    options = {
        "reward": "three_dimensional",
        "completion": "exact_match",
        "by_type": {"speed": {"efficiency": 1.0}},
        "expected": {"turns": 1},
    }
    fast = await scored(options, episode(search("a", "x"), type="speed"))
    assert fast["three_dimensional"] == 0.5
    lazy = episode(answer="Rome")
    assert (await scored(options, lazy))["three_dimensional"] == pytest.approx(0.3 * 0.6 + 0.2)
    assert (await scored(options | {"only_complete": True}, lazy))["three_dimensional"] == 0.0
    for wrong in ({"weights": {"speed": 1}}, {"expected": {"pages": 1}}, {"expected": {"turns": 0}}):
        with pytest.raises(ConfigError):
            build_reward(options | wrong)


async def test_agent_r1_pays_minus_one_minus_a_half_or_the_match() -> None:
    """r = EM if r_format = 1, else r_format - 1; r_format = (answer well formed + call syntax valid) / 2."""
    gate = FormatGate(Format(tags=["answer"], calls=True), exact_match)
    bad_call: Step = ([("search", {}, "?")], [Fault.MALFORMED_CALL])
    good, bare = "<answer>Paris</answer>", "Paris"
    for steps, text, expected in (
        ((), good, 1.0),
        ((), bare, -0.5),
        ((bad_call,), good, -0.5),
        ((bad_call,), bare, -1.0),
    ):
        one = episode(*steps)
        one.messages[-1] = Message("assistant", text)
        assert (await gate.score(one, one.task, {}))["format_gate"] == expected


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8))
async def test_curiosity_is_verltools(calls: list[int]) -> None:
    """alpha * max(H - RaPR, 0) * [y calls a tool] + beta * min(N - n(y), 0)."""
    group = Group(
        Task.of("?"), [episode(*[search(str(n), "x") for n in range(count)]) for count in calls]
    )
    rate = sum(count > 0 for count in calls) / len(calls)
    expected = [0.5 * max(0.3 - rate, 0) * (n > 0) + 0.05 * min(1 - n, 0) for n in calls]
    assert await Curiosity().score_group(group) == pytest.approx(expected)


@given(st.lists(st.lists(st.tuples(st.sampled_from("abx"), st.booleans()), max_size=4), max_size=4))
def test_an_unknown_tool_takes_no_other_call_with_it(turns: list[list[tuple[str, bool]]]) -> None:
    """Tool x is not there; others may answer with an error, and are called all the same."""
    steps: list[Segment] = []
    for turn in turns:
        made = tuple(ToolCall(name, {"n": n}) for n, (name, _) in enumerate(turn))
        wrong = [
            (name, Fault.UNKNOWN_TOOL if name == "x" else Fault.TOOL_RAISED)
            for name, is_bad in turn
            if is_bad or name == "x"
        ]
        steps.append(
            Segment(
                SegmentKind.ACTION,
                [5],
                [-0.1],
                calls=made,
                faults=tuple(fault for _, fault in wrong),
                faulted=tuple(name for name, _ in wrong),
            )
        )
    one = Trajectory(Task.of("?"), [TokenSequence(steps)], stop=StopReason.ANSWERED)
    names = [name for turn in turns for name, _ in turn]
    assert [call.name for call in made_calls(one)] == [name for name in names if name != "x"]
    for tools in ("a", "b", "x"):
        found = [call.name for call in made_calls(one, [tools])]
        assert found == [name for name in names if name == tools != "x"]


async def test_one_unknown_tool_among_calls_is_paid_as_the_others_are() -> None:
    both: Step = (
        [("python", {}, "4"), ("oracle", {}, "there is no tool 'oracle'")],
        [Fault.UNKNOWN_TOOL],
    )
    one = episode(both, target=4, answer="\\boxed{4}")
    one.actions[0].faulted = ("oracle",)
    assert await Curiosity(min_rate=1.0, max_calls=0).score_group(Group(one.task, [one])) == [-0.05]
    assert (await scored({"reward": "call_penalty"}, one))["call_penalty"] == pytest.approx(-0.05)
    assert (await scored("ludus.worlds.maths:vt_math", one))["vt_math"] == 1.0
    assert (await scored({"reward": "tool_bonus", "inner": "numeric"}, one))["tool_bonus"] == 1.0
    none = episode(([("oracle", {}, "?")], [Fault.UNKNOWN_TOOL]), target=4, answer="\\boxed{4}")
    assert (
        made_calls(none) == [] and (await scored("ludus.worlds.maths:vt_math", none))["vt_math"] == 0.75
    )
