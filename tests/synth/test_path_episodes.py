"""Paths played with real tools: no call is refused by its schema, and the user has said all that is needed."""

from __future__ import annotations

import json
from random import Random

from travel import TOOLS, VALUES, Library

from ludus.core.task import Task
from ludus.envs import EnvPool
from ludus.synth.call_paths import PathPlanner, plan_paths, schema_values
from ludus.synth.instructions import template_turns, unsaid
from ludus.synth.magnet import path_task
from ludus.synth.path_episodes import offered_tools, play_path
from ludus.synth.signature_graph import SignatureGraph
from ludus.tools import as_toolset


async def test_paths_run_without_a_schema_fault() -> None:
    tools = as_toolset(TOOLS)
    graph = SignatureGraph.of(await offered_tools(tools))
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
    graph = SignatureGraph.of(await offered_tools(tools))
    path = PathPlanner(graph, schema_values(VALUES), Random(0), optional=0).magnify("book", depth=3)
    assert path.tools == ["search_flights", "compare_prices", "book"]
    played = await play_path(
        path_task("p", path, template_turns(path, graph), Task(), {"capability": ""}), graph, tools
    )
    search, compare, book = played.trajectory.calls
    place = search.arguments["city"][:2].upper()
    assert compare.arguments == {"flight_id": f"{place}-1"}
    assert book.arguments["offer_code"] == f"{place}-1/x"


async def test_a_path_whose_result_lacks_the_value_is_no_example() -> None:
    tools = as_toolset(TOOLS)
    graph = SignatureGraph.of(await offered_tools(tools))
    planner = PathPlanner(graph, schema_values({"flight_id": ["nonsense"], **VALUES}), Random(0))
    path = planner.magnify("compare_prices", depth=0)
    planned = path_task("p", path, template_turns(path, graph), Task(), {"capability": ""})
    played = await play_path(planned, graph, tools)
    assert "there is no flight nonsense" in played.problem and played.trajectory.reward == 0.0


async def test_the_tools_of_an_environment_are_nodes_too() -> None:
    pool = EnvPool(Library, name="library", size=2)
    try:
        specs = await offered_tools(as_toolset([]), {"library": pool})
        graph = SignatureGraph.of(specs)
        assert graph.successors("find_book") == ["borrow"]
        path = PathPlanner(graph, schema_values({"title": ["Emma"]}), Random(0)).magnify("borrow")
        planned = path_task("p", path, template_turns(path, graph), Task(), {"capability": ""})
        played = await play_path(planned, graph, as_toolset([]), {"library": pool})
        assert not played.problem
        assert json.dumps(played.trajectory.task.target[1]["arguments"]) == '{"book_id": "b-Emma"}'
    finally:
        await pool.close()
