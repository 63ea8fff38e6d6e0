"""HardGen: examples that each pass through something that the model fails at.

The model plays the recipe's tasks (or the episodes of an earlier run are read); what it fails at is in a
dynamic graph of tool use (`api_graph`); paths are planned through the weak spots of that graph, in proportion
to how weak they are, and played with the real tools as Magnet's are. Every example names the weakness that it
touches.
"""

from __future__ import annotations

from typing import Any

from ludus.observe import ReportTable, Share
from ludus.synth.episodes import EpisodesConfig, episodes_of
from ludus.synth.magnet import PathConfig, graph_of, planner_of, play_examples
from ludus.synth.method import SynthContext, SynthMethod
from ludus.synth.paths.api_graph import ApiGraph, Spot, ToolPair, allocate
from ludus.synth.paths.call_paths import CallPath, PathPlanner, path_text
from ludus.synth.result import SynthResult

_TRIES = 20


class HardGenConfig(PathConfig, EpisodesConfig):
    """HardGen: examples aimed at what the model fails at."""


class HardGen(SynthMethod[HardGenConfig]):
    """Examples through weak spots."""

    title = "HardGen"
    settings_type = HardGenConfig

    async def run(self, context: SynthContext) -> SynthResult:
        settings = self.settings
        source, graph = await graph_of(context)
        seen = [one.trajectory for one in await episodes_of(context, settings)]
        weak = ApiGraph.of(list(graph.specs.values()), seen)
        weaknesses = {
            spot: weight for spot, weight in weak.weaknesses.items() if spot.tool in graph.specs
        }
        if not weaknesses:
            return SynthResult(
                warnings=[f"none of {len(seen)} episodes failed at a call: there is nothing to aim at"]
            )
        planned = plan_through(
            planner_of(graph, settings, context.seed), allocate(settings.count, weaknesses)
        )
        told = [{"weakness": str(spot), "failure_rate": weak.tallies[spot].rate} for spot, _ in planned]
        paths = [path for _, path in planned]
        result = await play_examples(context, "hardgen", settings, source, graph, paths, told)
        result.tables.append(_table(weak, [spot for spot, _ in planned]))
        return result


def plan_through(planner: PathPlanner, wanted: dict[Spot, int]) -> list[tuple[Spot, CallPath]]:
    """So many different paths through each spot, as far as there are that many."""
    found: dict[str, tuple[Spot, CallPath]] = {}
    for spot, count in wanted.items():
        mine = 0
        for _ in range(_TRIES * count):
            if mine >= count:
                break
            path = _through(planner, spot)
            if len(path.calls) <= planner.max_calls and spot.is_touched_by(path):
                mine += path_text(path) not in found
                found.setdefault(path_text(path), (spot, path))
    return list(found.values())


def _through(planner: PathPlanner, spot: Spot) -> CallPath:
    if isinstance(spot, ToolPair):
        first = spot.first if spot.first in planner.graph.specs else None
        return planner.through(first, spot.last)
    return planner.through(None, spot.tool, frozenset({spot.name}))


def _table(weak: ApiGraph, aimed: list[Spot]) -> ReportTable:
    rows: list[list[Any]] = [
        [str(spot), weak.tallies[spot].uses, Share(weak.tallies[spot].rate), aimed.count(spot)]
        for spot in weak.weaknesses
    ]
    return ReportTable(("weakness", "uses", "failed", "examples"), rows, "Weaknesses")
