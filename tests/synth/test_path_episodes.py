"""Paths played with real tools: no call is refused by its schema, and the user has said all that is needed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

from travel import TOOLS, VALUES, Library

from ludus.core import Task, ToolCall, ToolContext
from ludus.envs import EnvPool
from ludus.rollouts.agent import Agent
from ludus.synth.episodes import demonstration_rollout, offered_tools
from ludus.synth.paths.call_paths import PathPlanner, plan_paths, schema_values, value_of
from ludus.synth.paths.magnet import path_task, play_path, template_turns, unsaid
from ludus.synth.paths.signatures import SignatureGraph, inlined
from ludus.tools import as_toolset
from ludus.tools.mcp import mcp_tools


async def test_paths_run_without_a_schema_fault() -> None:
    tools = as_toolset(TOOLS)
    graph = SignatureGraph.of(await offered_tools(demonstration_rollout(Agent(), tools)))
    planner = PathPlanner(graph, schema_values(VALUES), Random(3), max_calls=6)
    paths = plan_paths(planner, 60, max_turns=3)
    assert len(paths) == 60 and {path.operation for path in paths} == {"magnify", "connect"}
    kept = 0
    for number, path in enumerate(paths):
        turns = template_turns(path, graph)
        assert unsaid(path, turns) == ""
        planned = path_task(f"p{number}", path, turns, Task(), {"capability": "x"})
        played = await play_path(planned, graph, tools)
        assert played.schema_faults == 0, played.problem
        if played.problem:
            continue
        kept += 1
        made = [{"name": c.name, "arguments": c.arguments} for c in played.trajectory.calls]
        assert made == played.trajectory.task.target and [c["name"] for c in made] == path.tools
        users = [m.content for m in played.trajectory.messages if m.role == "user"]
        assert users == turns and not played.trajectory.faults
        assert played.trajectory.messages[-1].role == "assistant"
    assert kept >= 40  # a flight number or an offer that a user made up is refused by the tool itself


async def test_results_feed_later_calls() -> None:
    tools = as_toolset(TOOLS)
    graph = SignatureGraph.of(await offered_tools(demonstration_rollout(Agent(), tools)))
    path = PathPlanner(graph, schema_values(VALUES), Random(0), optional=0).magnify("book", depth=3)
    assert path.tools == ["search_flights", "compare_prices", "book"]
    played = await play_path(
        path_task("p", path, template_turns(path, graph), Task(), {"capability": ""}), graph, tools
    )
    search, compare, book = played.trajectory.calls
    place = search.arguments["city"][:2].upper()
    assert compare.arguments == {"flight_id": f"{place}-1"}
    assert book.arguments["offer_code"] == f"{place}-1/x"


async def test_results_of_a_real_mcp_server_feed_later_calls() -> None:
    """Its schemas have references, and what is no table stands as `result` in them, but not in the text."""
    program = Path(__file__).with_name("mcp_travel.py")
    tools = mcp_tools({"mcp": f"{sys.executable} {program}"})
    context = ToolContext("episode", Task.of("?"))
    try:
        await tools.open(context)
        specs = await tools.list(context)
        graph = SignatureGraph.of(specs)
        fed = {(source.tool, source.place, taken.tool, taken.name) for source, taken in graph.edges}
        assert fed >= {
            ("search_flights", ("result", 0, "flight_id"), "quote", "flight_id"),
            ("quote", ("best", "offer_code"), "book", "offer_code"),
            ("quote", ("others", 0, "offer_code"), "book", "offer_code"),
            ("find_booking_code", ("result",), "cancel", "booking_code"),
        }
        values: dict[str, object] = {}
        for spec in specs:
            arguments = {
                "quote": {"flight_id": "RO-1"},
                "book": {"offer_code": "c", "passenger": {"name": "Ada", "age": 36}},
                "cancel": {"booking_code": "77"},
            }.get(spec.name, {"city": "Rome"})
            result = await tools.call(ToolCall(spec.name, arguments), context)
            assert result.fault is None, result
            values[spec.name] = value_of(result, spec.returns)
    finally:
        await tools.close(context)
    offer = {"offer_code": "RO-1/x", "flight": {"flight_id": "RO-1", "price": 90}}
    assert values == {
        "search_flights": {
            "result": [{"flight_id": "RO-1", "price": 1}, {"flight_id": "RO-2", "price": 2}]
        },
        "quote": {"best": offer, "others": [offer]},
        "book": {"result": "c/Ada"},
        "find_booking_code": {"result": "77"},
        "cancel": {"result": True},
        "list_hotel_names": {"result": ["Rome Plaza", "1999"]},
        "nearest_exits": {"result": [7]},
    }
    for last, before in (("book", ["search_flights", "quote"]), ("cancel", ["find_booking_code"])):
        planner = PathPlanner(graph, schema_values({"city": ["Rome"]}), Random(0), optional=0)
        path = planner.magnify(last, depth=3)
        assert path.tools == [*before, last]
        planned = path_task(last, path, template_turns(path, graph), Task(), {"capability": ""})
        played = await play_path(planned, graph, tools)
        assert not played.problem, played.problem
        code = played.trajectory.calls[-1].arguments
        assert code.get("offer_code", code.get("booking_code")) in ("RO-1/x", "77")
    await tools.aclose()


def test_references_are_followed_as_far_as_they_go() -> None:
    """Recursion and references to nothing allow anything, and a schema that explodes ends."""
    node = {"type": "object", "properties": {"label": {"type": "string"}, "next": {"$ref": "#/$defs/N"}}}
    found = inlined({"$ref": "#/$defs/N", "$defs": {"N": node}})
    assert found["properties"] == {"label": {"type": "string"}, "next": {}}
    assert inlined({"$ref": "#/$defs/absent", "title": "x"}) == {"title": "x"}
    assert inlined(
        {"allOf": [{"$ref": "#/$defs/S"}], "default": "", "$defs": {"S": {"type": "string"}}}
    ) == {
        "type": "string",
        "default": "",
    }
    bomb = {f"L{n}": {"items": [{"$ref": f"#/$defs/L{n + 1}"}] * 10} for n in range(30)}
    assert len(json.dumps(inlined({"$ref": "#/$defs/L0", "$defs": bomb}))) < 10**6


async def test_a_path_whose_result_lacks_the_value_is_no_example() -> None:
    tools = as_toolset(TOOLS)
    graph = SignatureGraph.of(await offered_tools(demonstration_rollout(Agent(), tools)))
    planner = PathPlanner(graph, schema_values({"flight_id": ["nonsense"], **VALUES}), Random(0))
    path = planner.magnify("compare_prices", depth=0)
    planned = path_task("p", path, template_turns(path, graph), Task(), {"capability": ""})
    played = await play_path(planned, graph, tools)
    assert "there is no flight nonsense" in played.problem and played.trajectory.reward == 0.0


async def test_the_tools_of_an_environment_are_nodes_too() -> None:
    pool = EnvPool(Library, name="library", size=2)
    try:
        specs = await offered_tools(demonstration_rollout(Agent(), as_toolset([]), {"library": pool}))
        graph = SignatureGraph.of(specs)
        assert graph.successors("find_book") == ["borrow"]
        path = PathPlanner(graph, schema_values({"title": ["Emma"]}), Random(0)).magnify("borrow")
        planned = path_task("p", path, template_turns(path, graph), Task(), {"capability": ""})
        played = await play_path(planned, graph, as_toolset([]), {"library": pool})
        assert not played.problem
        assert json.dumps(played.trajectory.task.target[1]["arguments"]) == '{"book_id": "b-Emma"}'
    finally:
        await pool.close()
