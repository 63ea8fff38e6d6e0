"""Trying an environment that a language model wrote. Its code is only parsed here; it runs in the sandbox.

What is tried, in this order, the first that fails ending the examination: the module parses and has its
functions; `reset` and `task` depend on the seed alone; doing nothing does not reach a goal; `solve` reaches
every goal through the agent's own tools; wrong solutions (cut short, another task's, with another argument,
at random) do not; and the environment keeps the contract of `ludus check env`.
"""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ludus.core.failures import LudusError
from ludus.core.messages import Json, Message
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory, is_success
from ludus.envs import EnvPool
from ludus.envs.sandboxed import (
    FUNCTIONS,
    RulesBroken,
    WorldSession,
    WorldSpec,
    recorded_solution,
    solved,
    world_factory,
)
from ludus.observe import share_text
from ludus.rollouts.agent import Demonstrator, Expert
from ludus.rollouts.env_contract import EnvContract
from ludus.synth.episodes import demonstration_rollout
from ludus.tools import as_toolset, example_of

_MOST_TURNS = 40
_LEAST_CAUGHT = 0.5
"""Of solutions that are cut short or another task's, which may happen to be right."""
_LEAST_RANDOM = 0.9
_REPEATED = 4


@dataclass(slots=True)
class Examination:
    """Findings, and the tasks that were made on the way."""

    findings: list[str] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    refused: dict[str, float] = field(default_factory=dict)
    """The share of wrong solutions that scored 0, by how they were made wrong."""


class _Wrong(Exception):
    """A finding; it begins with its kind."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")


async def examine(folder: Path, spec: WorldSpec, rules: str, sample: int = 8) -> Examination:
    """Try the environment of a folder on so many tasks."""
    found = Examination()
    try:
        check_source(spec, rules)
        found.tasks = await make_tasks(spec, rules, range(sample))
        await _try_solutions(folder, spec, found)
        await _try_wrong_solutions(folder, spec, found)
        await _try_contract(folder, spec, found.tasks)
    except _Wrong as wrong:
        found.findings.append(str(wrong))
    except RulesBroken as broken:
        found.findings.append(f"rules: {broken}")
    return found


def check_source(spec: WorldSpec, rules: str) -> None:
    """Refuse rules that do not parse, or lack a function; nothing is run."""
    try:
        tree = ast.parse(rules)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _Wrong("syntax", f"world.py does not parse: {error}") from error
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    wanted: dict[str, list[str]] = {name: [] for name in FUNCTIONS}
    wanted |= {tool.name: [one.name for one in tool.parameters] for tool in spec.tools}
    found = []  # all at once: a draft for each would use the attempts up
    absent = [name for name in wanted if name not in functions]
    if absent:
        found.append(f"world.py has no function {', '.join(absent)}")
    for name, parameters in wanted.items():
        if name in functions:
            arguments = functions[name].args
            taken = {one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
            lacking = [one for one in parameters if one not in taken]
            if lacking and arguments.kwarg is None:
                found.append(f"the function {name} does not take {', '.join(lacking)}")
    if found:
        raise _Wrong("missing", "; ".join(found))


async def make_tasks(spec: WorldSpec, rules: str, seeds: Sequence[int]) -> list[Task]:
    """A task for each seed, with its solution; the same tasks again in a second session."""
    made = await _tasks_in_session(spec, rules, seeds)
    again = await _tasks_in_session(spec, rules, [*reversed(seeds[:_REPEATED])])
    for one in again:
        before = next(task for task in made if task.id == one.id)
        if before != one:
            raise _Wrong(
                "nondeterministic",
                f"reset, task or solve gave something else for seed {one.envs[spec.name]['seed']} in a new "
                "session: draw from random.Random(seed) alone, and keep nothing in global variables",
            )
    distinct = {
        (one.messages[-1].content, json.dumps(one.metadata["state"], sort_keys=True)) for one in made
    }
    if len(distinct) < max(2, len(made) // 4):
        raise _Wrong("alike", f"{len(made)} seeds give {len(distinct)} different tasks")
    return made


async def _tasks_in_session(spec: WorldSpec, rules: str, seeds: Sequence[int]) -> list[Task]:
    world = await WorldSession.start(rules)
    try:
        return [await _task(world, spec, seed) for seed in seeds]
    finally:
        await world.close()


async def _task(world: WorldSession, spec: WorldSpec, seed: int) -> Task:
    state = await world.reset(seed)
    prompt, goal = await world.task(seed)
    await world.begin(goal)
    if await world.check(""):
        raise _Wrong("verifier", f"check is True for seed {seed} though nothing has been done")
    solution = _checked_plan(await world.solve(), spec, seed)
    metadata = {"solution": solution, "state": state}
    return Task(
        f"{spec.name}-{seed}", (Message("user", prompt),), goal, {spec.name: {"seed": seed}}, metadata
    )


def _checked_plan(plan: Sequence[Json], spec: WorldSpec, seed: int) -> list[Json]:
    known = {tool.name for tool in spec.tools}
    for step in plan:
        if "tool" in step and step["tool"] not in known:
            raise _Wrong("solution", f"solve calls {step['tool']!r:.60}, which is no tool (seed {seed})")
        if not isinstance(step.get("arguments", {}), dict):
            raise _Wrong("solution", f"solve gives arguments that are no table (seed {seed})")
    if not any("tool" in step for step in plan):
        raise _Wrong("solution", f"solve makes no call at all (seed {seed})")
    return list(plan)


async def play_solutions(
    folder: Path, spec: WorldSpec, tasks: Sequence[Task], expert: Expert = recorded_solution
) -> list[Trajectory]:
    """Episodes in which a demonstrator acts, through the agent's own tools; in order."""
    pool = EnvPool(world_factory(folder), name=spec.name, size=8)
    rollout = demonstration_rollout(Demonstrator(expert), as_toolset([]), {spec.name: pool}, [solved])
    rollout = replace(rollout, budgets=rollout.budgets.model_copy(update={"max_turns": _MOST_TURNS}))
    try:
        played = {group.task.id: group.trajectories[0] async for group in rollout.groups(tasks, seed=0)}
    finally:
        await pool.close()
    return [played[task.id] for task in tasks]


async def _try_solutions(folder: Path, spec: WorldSpec, found: Examination) -> None:
    for played in await play_solutions(folder, spec, found.tasks):
        if played.failure is not None:
            raise _Wrong("rules", f"the solution of {played.task.id} cannot be played: {played.failure}")
        if not is_success(played):
            last = played.messages[-2].content if len(played.messages) > 1 else ""
            faults = f"; {len(played.faults)} calls were refused" if played.faults else ""
            raise _Wrong(
                "unsolvable",
                f"solve does not reach the goal of {played.task.id} ({played.turns} turns{faults}): check is "
                f"False at its end. The last thing that it read: {last:.200}",
            )


async def _try_wrong_solutions(folder: Path, spec: WorldSpec, found: Examination) -> None:
    for name, wrong, least in _wrong_ways(spec, found.tasks):
        if not wrong:
            continue
        played = await play_solutions(folder, spec, wrong)
        scored = [one for one in played if one.failure is None]
        if not scored:
            raise _Wrong("rules", f"no {name} solution can be played: {played[0].failure}")
        share = sum(not is_success(one) for one in scored) / len(scored)
        found.refused[name] = share
        if share < least:
            raise _Wrong(
                "verifier",
                f"check is True after {share_text(1 - share)} of {len(scored)} {name} solutions: it has to "
                "look at what the goal asks for",
            )


def _wrong_ways(spec: WorldSpec, tasks: Sequence[Task]) -> list[tuple[str, list[Task], float]]:
    """Tasks whose recorded solution is wrong, by how it was made wrong; and the share that must score 0."""
    draw = random.Random(spec.name)
    schemas = {
        tool.name: {
            "type": "object",
            "properties": {one.name: _schema(one) for one in tool.parameters},
            "required": [one.name for one in tool.parameters if one.required],
        }
        for tool in spec.tools
    }
    short, others, at_random, altered = [], [], [], []
    for place, task in enumerate(tasks):
        plan = task.metadata["solution"]
        short.append(_with_solution(task, [step for step in plan if "tool" in step][:-1]))
        other = tasks[(place + 1) % len(tasks)]
        if other.metadata["solution"] != plan:
            others.append(_with_solution(task, other.metadata["solution"]))
        if (mistaken := _altered(plan, schemas)) is not None:
            altered.append(_with_solution(task, mistaken))
        names = [draw.choice(list(schemas)) for _ in range(3)]
        calls = [
            {"tool": one, "arguments": example_of(schemas[one], draw.randrange(50))} for one in names
        ]
        at_random.append(_with_solution(task, calls))
    return [
        ("random", at_random, _LEAST_RANDOM),
        ("shortened", short, _LEAST_CAUGHT),
        ("exchanged", others, _LEAST_CAUGHT),
        ("altered", altered, _LEAST_CAUGHT),
    ]


def _altered(plan: Sequence[Json], schemas: Mapping[str, Json]) -> list[Json] | None:
    """The plan with another choice, the other truth value or another number in the last call that has one."""
    for place in reversed(range(len(plan))):
        step = plan[place]
        properties = schemas[step["tool"]]["properties"] if "tool" in step else {}
        for name, value in (step.get("arguments") or {}).items():
            other = _other_value(value, properties.get(name, {}))
            if other is not None:
                changed = {**step, "arguments": {**step["arguments"], name: other}}
                return [*plan[:place], changed, *plan[place + 1 :]]
    return None


def _other_value(value: Any, schema: Json) -> Any:
    if "enum" in schema:
        return next((one for one in schema["enum"] if one != value), None)
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else None


def _schema(parameter: Any) -> Json:
    if parameter.choices:
        return {"type": "string", "enum": parameter.choices}
    if parameter.type == "list":
        return {"type": "array", "items": {"type": "string"}}
    return {"type": parameter.type}


def _with_solution(task: Task, plan: Sequence[Json]) -> Task:
    return replace(task, metadata={**task.metadata, "solution": list(plan)})


async def _try_contract(folder: Path, spec: WorldSpec, tasks: Sequence[Task]) -> None:
    contract = EnvContract(
        world_factory(folder),
        list(tasks),
        spec.name,
        expert=recorded_solution,
        rewards=[solved],
        max_turns=10,
        episodes=6,
        instances=3,
        sample=2,
        gold=len(tasks),
        seconds=60.0,
    )
    try:
        async for clause in contract.clauses():
            if clause.ok is False:
                raise _Wrong("contract", f"{clause.name}: {clause.text}")
    except LudusError as error:
        raise _Wrong("contract", str(error)) from error
