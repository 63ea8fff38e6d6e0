"""`ludus synth magnet` and `hardgen`: examples of the use of real tools."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synth_parts import ScriptedChat, Source, context, rollout
from travel import TOOLS, VALUES
from typer.testing import CliRunner

from ludus.cli.main import app
from ludus.core.failures import Fault
from ludus.core.messages import ToolCall
from ludus.core.task import Task
from ludus.core.trajectory import Segment, SegmentKind, StopReason, TokenSequence, Trajectory
from ludus.observe import read_trajectories, write_trajectories
from ludus.synth import provenance_of
from ludus.synth.paths.call_paths import PathPlanner, schema_values
from ludus.synth.paths.hardgen import (
    ApiGraph,
    HardGen,
    HardGenConfig,
    ToolPair,
    TypedParameter,
    allocate,
    plan_through,
)
from ludus.synth.paths.magnet import Magnet, MagnetConfig
from ludus.synth.paths.signatures import SignatureGraph
from ludus.tools import as_toolset
from ludus.training import read_conversations

HERE = Path(__file__).parent
RECIPE = f"""
name = "travel"
rewards = ["expected_calls"]
[model.scratch]
[agent]
tools = [{", ".join(f'"{HERE / "travel.py"}:{one.name}"' for one in TOOLS)}]
[synth.magnet]
count = 12
values = {{ city = ["Rome", "Oslo"], email = ["a@example.org"], passengers = [1, 2] }}
"""


def travel() -> Source:
    return Source([], replace(rollout(lambda task, attempt: []), tools=as_toolset(TOOLS), pools={}))


def test_the_command_writes_examples_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("travel.toml").write_text(RECIPE)
    command = ["synth", "magnet", "travel.toml", "--out", "made"]
    said = CliRunner().invoke(app, command)
    assert said.exit_code == 0, said.output
    kept = read_trajectories("made/examples.parquet")
    assert len(kept) >= 6 and len(read_conversations("made/examples.parquet")) == len(kept)
    report = json.loads(Path("made/report.json").read_text())
    assert report["numbers"]["schema_faults"] == 0 and report["numbers"]["edges"] == 3
    assert {one.task.metadata["capability"] for one in kept} >= {"chained_calls", "several_turns"}
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0 and "12 of 12 were there already" in again.output
    assert [one.messages for one in read_trajectories("made/examples.parquet")] == [
        one.messages for one in kept
    ]


async def test_a_language_model_writes_the_messages_and_must_say_every_value(tmp_path: Path) -> None:
    def answer(text: str) -> str:
        if text.startswith("system: You are the assistant"):
            return "Here is what I found."
        turns = json.loads(text.partition("user: ")[2].partition("\nassistant: ")[0])["turns"]
        texts = [f"Please see to it: {[call['said'] for call in turn]}" for turn in turns]
        return json.dumps({"turns": texts if "cannot be used" in text else ["No idea."] * len(turns)})

    writer = ScriptedChat(answer)
    made = context(tmp_path / "s", travel(), models={"w": writer})
    settings = MagnetConfig.parse({"count": 4, "values": VALUES, "writer": "w"})
    result = await Magnet(settings).run(made)
    assert result.kept and "Please see to it" in result.kept[0].messages[0].content
    assert result.kept[0].messages[-1].content == "Here is what I found."
    told = [text for text in writer.asked if "does not say" in text]
    assert told, "an instruction that leaves out a value was accepted"
    assert made.cost.model_calls == len(writer.asked) > 0


async def test_tools_that_feed_nothing_are_said(tmp_path: Path) -> None:
    lone = Source([], replace(travel().rollout, tools=as_toolset(TOOLS[-1:])))
    result = await Magnet(MagnetConfig.parse({"count": 3, "values": VALUES})).run(
        context(tmp_path / "s", lone)
    )
    assert result.numbers["edges"] == 0 and any("annotate" in one for one in result.warnings)


# HardGen


def episode(
    calls: list[ToolCall],
    *,
    success: bool,
    refused: int | None = None,
    target: list[ToolCall] | None = None,
) -> Trajectory:
    segments = [Segment(SegmentKind.PROMPT, [1])]
    for number, call in enumerate(calls):
        faults = (Fault.BAD_ARGUMENTS,) if number == refused else ()
        names = (call.name,) if faults else ()
        segments.append(
            Segment(SegmentKind.ACTION, [2], [0.0], calls=(call,), faults=faults, faulted=names)
        )
    labelled = None if target is None else [{"name": c.name, "arguments": c.arguments} for c in target]
    return Trajectory(
        Task.of("do", labelled, id="t"), [TokenSequence(segments)], stop=StopReason.ANSWERED,
        reward=float(success), rewards={"success": float(success)},
    )  # fmt: skip


SEARCH, COMPARE = (
    ToolCall("search_flights", {"city": "Rome"}),
    ToolCall("compare_prices", {"flight_id": "RO-1"}),
)
BOOK = ToolCall("book", {"offer_code": "x/1", "passengers": 2})
SPECS = [one.spec for one in TOOLS]


def test_failures_are_blamed_on_the_step_or_the_parameter() -> None:
    refused = ApiGraph.of(SPECS, [episode([SEARCH, COMPARE], success=False, refused=1)])
    assert refused.weaknesses.keys() == {
        ToolPair("search_flights", "compare_prices"),
        TypedParameter("compare_prices", "flight_id", "string"),
    }
    skipped = ApiGraph.of(
        SPECS, [episode([SEARCH, BOOK], success=False, target=[SEARCH, COMPARE, BOOK])]
    )
    assert list(skipped.weaknesses) == [ToolPair("search_flights", "compare_prices")]
    wrong = ToolCall("book", {"offer_code": "x/1", "passengers": 3})
    mistaken = ApiGraph.of(SPECS, [episode([wrong], success=False, target=[BOOK])])
    assert list(mistaken.weaknesses) == [TypedParameter("book", "passengers", "integer")]
    assert not ApiGraph.of(SPECS, [episode([SEARCH, COMPARE], success=True)]).weaknesses
    lost = episode([SEARCH], success=False)
    lost.stop = StopReason.ABORTED
    assert not ApiGraph.of(SPECS, [lost]).tallies, "our own failures say nothing of the model"


def test_what_fails_more_weighs_more() -> None:
    seen = [episode([SEARCH, COMPARE], success=True, target=[SEARCH, COMPARE])] * 8
    seen += [episode([SEARCH, SEARCH], success=False, target=[SEARCH, COMPARE])] * 2
    seen += [episode([SEARCH, SEARCH], success=False, target=[SEARCH, BOOK])] * 2
    graph = ApiGraph.of(SPECS, seen)
    often, never = ToolPair("search_flights", "compare_prices"), ToolPair("search_flights", "book")
    assert graph.weaknesses[never] > graph.weaknesses[often] > 0  # 2 of 2 against 2 of 10


@given(
    st.integers(0, 200), st.dictionaries(st.text(max_size=3), st.floats(0, 1e6), min_size=1, max_size=8)
)
def test_shares_add_up(count: int, weights: dict[str, float]) -> None:
    shares = allocate(count, weights)
    total = sum(weights.values())
    assert sum(shares.values()) == count and shares.keys() == weights.keys()
    for name, share in shares.items():
        exact = count * weights[name] / total if total else count / len(weights)
        assert abs(share - exact) < 1 + 1e-6


def test_every_planned_path_touches_its_weakness() -> None:
    graph = SignatureGraph.of(SPECS)
    planner = PathPlanner(graph, schema_values(VALUES), Random(1))
    wanted = {
        ToolPair("search_flights", "compare_prices"): 5,
        ToolPair("compare_prices", "book"): 5,
        ToolPair("find_hotels", "book"): 5,  # no data flows between these two
        ToolPair(None, "send_itinerary"): 2,
        TypedParameter("search_flights", "cabin", "enum"): 5,
        TypedParameter("find_hotels", "stars", "integer"): 3,
    }
    found = plan_through(planner, wanted)
    assert {spot for spot, _ in found} == wanted.keys()
    assert all(spot.is_touched_by(path) for spot, path in found)


async def test_every_output_names_the_weakness_that_it_touches(tmp_path: Path) -> None:
    failing = [episode([SEARCH, COMPARE, BOOK], success=False, refused=2)] * 3
    failing += [episode([SEARCH, BOOK], success=False, target=[SEARCH, COMPARE, BOOK])] * 2
    write_trajectories(tmp_path / "seen.parquet", failing)
    settings = {"count": 10, "values": VALUES, "source": str(tmp_path / "seen.parquet")}
    result = await HardGen(HardGenConfig.parse(settings)).run(context(tmp_path / "s", travel()))
    assert len(result.kept) >= 5 and result.numbers["schema_faults"] == 0
    for one in result.kept:
        name = provenance_of(one)["weakness"]
        tools = [call.name for call in one.calls]
        if "→" in name:
            first, last = name.split(" → ")
            assert (first, last) in pairwise(tools), (name, tools)
        else:
            tool, _, parameter = name.partition(" ")[0].partition(".")
            assert any(c.name == tool and parameter in c.arguments for c in one.calls), (name, one.calls)
        assert provenance_of(one)["failure_rate"] > 0
