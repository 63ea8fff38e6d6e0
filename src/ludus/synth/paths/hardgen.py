"""HardGen: examples that each pass through something that the model fails at.

In a dynamic graph of tool use, each step from one tool to the next, and each typed parameter of a tool, has a
tally of uses and of failures blamed on it. Paths are planned through the weak spots, in proportion to how weak
they are, and played with the real tools as Magnet's are. To blame for a failed episode are:

- the step to a call that was refused, and the parameters that it was given;
- where the expected calls are known (the task's target), the first call that differs from them: the step to it
  when another tool was called, the parameters that differ when it was the right one;
- otherwise every step of the episode, an equal part each.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ludus.core.messages import Json, ToolCall, ToolSpec
from ludus.core.trajectory import Trajectory, is_success
from ludus.observe import ReportTable, Share
from ludus.synth.episodes import EpisodesConfig, episodes_of
from ludus.synth.method import SynthContext, SynthMethod
from ludus.synth.paths.call_paths import CallPath, PathPlanner, path_text
from ludus.synth.paths.magnet import PathConfig, graph_of, planner_of, play_examples
from ludus.synth.paths.signatures import type_name
from ludus.synth.result import SynthResult

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class ToolPair:
    """A step from one tool to the next; None is the beginning."""

    first: str | None
    last: str

    def __str__(self) -> str:
        return f"{self.first or 'start'} → {self.last}"

    @property
    def tool(self) -> str:
        """The tool that is called wrongly."""
        return self.last

    def is_touched_by(self, path: CallPath) -> bool:
        return (self.first, self.last) in zip([None, *path.tools], path.tools, strict=False)


@dataclass(frozen=True, slots=True)
class TypedParameter:
    """A parameter of a tool, and its type."""

    tool: str
    name: str
    type: str

    def __str__(self) -> str:
        return f"{self.tool}.{self.name} ({self.type})"

    def is_touched_by(self, path: CallPath) -> bool:
        return any(call.tool == self.tool and self.name in call.arguments for call in path.calls)


Spot = ToolPair | TypedParameter


@dataclass(slots=True)
class Tally:
    uses: int = 0
    failures: float = 0.0

    @property
    def rate(self) -> float:
        return self.failures / self.uses if self.uses else 0.0

    @property
    def weight(self) -> float:
        """How much a generator should aim at it: often, and often wrong."""
        return self.failures * self.rate


@dataclass(slots=True)
class ApiGraph:
    """Tallies of the steps and parameters that episodes have used."""

    specs: Mapping[str, ToolSpec]
    tallies: dict[Spot, Tally] = field(default_factory=lambda: defaultdict(Tally))

    @classmethod
    def of(cls, specs: Sequence[ToolSpec], trajectories: Iterable[Trajectory]) -> ApiGraph:
        """The graph of these episodes; those that failed through our fault say nothing."""
        graph = cls({spec.name: spec for spec in specs})
        for one in trajectories:
            if one.is_trainable:
                graph.add(one)
        return graph

    @property
    def weaknesses(self) -> dict[Spot, float]:
        """The spots that failures were blamed on, the worst first, with their weights."""
        found = {spot: tally.weight for spot, tally in self.tallies.items() if tally.failures > 0}
        return dict(sorted(found.items(), key=lambda one: (-one[1], str(one[0]))))

    def add(self, trajectory: Trajectory) -> None:
        calls = trajectory.calls
        used: list[Spot] = [*_steps(calls)]
        used += [one for call in calls for one in self._parameters(call)]
        for spot in used:
            self.tallies[spot].uses += 1
        if is_success(trajectory):
            return
        for spot, part in self._blamed(trajectory).items():
            tally = self.tallies[spot]
            tally.failures += part
            tally.uses = max(tally.uses, 1)  # what should have been called, and was not

    def _blamed(self, trajectory: Trajectory) -> dict[Spot, float]:
        calls = trajectory.calls
        refused = _refused(trajectory)
        if refused is None and isinstance(trajectory.task.target, list):
            return self._difference(calls, trajectory.task.target)
        steps = _steps(calls)
        if refused is not None:
            spots: list[Spot] = [steps[refused], *self._parameters(calls[refused])]
        else:
            spots = list(steps)
        return {spot: 1 / len(spots) for spot in spots}

    def _difference(self, calls: Sequence[ToolCall], target: Sequence[Any]) -> dict[Spot, float]:
        wanted = [one for one in target if isinstance(one, Mapping) and one.get("name") in self.specs]
        before: str | None = None
        for place, one in enumerate(wanted):
            made = calls[place] if place < len(calls) else None
            if made is None or made.name != one["name"]:
                return {ToolPair(before, one["name"]): 1.0}
            given: Json = one.get("arguments") or {}
            differ = [
                spot
                for spot in self._parameters(ToolCall(made.name, {**made.arguments, **given}))
                if made.arguments.get(spot.name) != given.get(spot.name)
            ]
            if differ:
                return {spot: 1 / len(differ) for spot in differ}
            before = made.name
        return dict.fromkeys(_steps(calls)[-1:], 1.0)  # the right calls, and then too many or no answer

    def _parameters(self, call: ToolCall) -> list[TypedParameter]:
        spec = self.specs.get(call.name)
        properties = spec.parameters.get("properties", {}) if spec is not None else {}
        return [
            TypedParameter(call.name, name, type_name(properties[name]))
            for name in call.arguments
            if name in properties
        ]


def _steps(calls: Sequence[ToolCall]) -> list[ToolPair]:
    names = [call.name for call in calls]
    return [ToolPair(*pair) for pair in zip([None, *names], names, strict=False)]


def _refused(trajectory: Trajectory) -> int | None:
    """The number of the last call that was refused; None where none was."""
    found: int | None = None
    place = 0
    for action in trajectory.actions:
        faulted = list(action.faulted)
        for call in action.calls:
            if call.name in faulted:
                faulted.remove(call.name)
                found = place
            place += 1
    return found


def allocate(count: int, weights: Mapping[K, float]) -> dict[K, int]:
    """`count` in proportion to the weights, by largest remainder; equal shares where all weights are 0.

    The shares add up to `count`, and each is within 1 of its exact part.
    """
    if not weights:
        return {}
    if any(not weight >= 0 for weight in weights.values()):
        raise ValueError(f"weights are numbers of at least 0, not {dict(weights)!r:.200}")
    total = sum(weights.values())
    exact = {
        name: count * (weight / total if total else 1 / len(weights)) for name, weight in weights.items()
    }
    shares = {name: int(part) for name, part in exact.items()}
    left = count - sum(shares.values())
    by_rest = sorted(exact, key=lambda name: (shares[name] - exact[name], list(exact).index(name)))
    for name in by_rest[:left]:
        shares[name] += 1
    return shares


_TRIES = 20


class HardGenConfig(PathConfig, EpisodesConfig):
    """HardGen: examples aimed at what the model fails at."""


class HardGen(SynthMethod[HardGenConfig]):
    """Examples aimed at what the model fails at."""

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
        aimed = Counter(spot for spot, _ in planned)
        rows: list[list[Any]] = [
            [str(spot), weak.tallies[spot].uses, Share(weak.tallies[spot].rate), aimed[spot]]
            for spot in weak.weaknesses
        ]
        columns = ("weakness", "uses", "failed", "examples")
        result.tables.append(ReportTable(columns, rows, "Weaknesses"))
        return result


def plan_through(planner: PathPlanner, wanted: dict[Spot, int]) -> list[tuple[Spot, CallPath]]:
    """So many different paths through each spot, as far as there are that many."""
    found: dict[str, tuple[Spot, CallPath]] = {}
    for spot, count in wanted.items():
        mine = 0
        for _ in range(_TRIES * count):
            if mine >= count:
                break
            if isinstance(spot, ToolPair):
                first = spot.first if spot.first in planner.graph.specs else None
                path = planner.through(first, spot.last)
            else:
                path = planner.through(None, spot.tool, frozenset({spot.name}))
            if len(path.calls) <= planner.max_calls and spot.is_touched_by(path):
                mine += path_text(path) not in found
                found.setdefault(path_text(path), (spot, path))
    return list(found.values())
