"""Workflow memory: abstract, deduplicate, retrieve; and off where it would be measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ludus.chat import Renderer, load_format
from ludus.core import ByteTokenizer, ConfigError, Task, ToolCall, Trajectory
from ludus.core.failures import ToolFault
from ludus.engine import FakeEngine
from ludus.envs import Env, EnvPool
from ludus.envs.world import ExpertMoves
from ludus.rewards import Scorer, reward
from ludus.rollouts import Budgets, Rollout
from ludus.rollouts.agent import Demonstrator
from ludus.rollouts.workflows import (
    HEADER,
    Workflow,
    WorkflowConfig,
    WorkflowStep,
    extract_workflows,
    load_workflows,
    save_workflows,
    similar_workflows,
    with_workflows,
)
from ludus.tools import as_toolset, tool
from ludus.training import load_recipe
from ludus.training.config.parts import load_parts

DOORS = {"north": 4, "south": 2, "east": 5}


class House(Env):
    """One of six doors opens; which one depends on the house."""

    async def reset(self, task: Task, house: str) -> None:
        self.right, self.is_in = DOORS[house], False

    @tool
    async def look(self) -> str:
        """Look at the house; it shows a key number."""
        return f"a house, key {self.right * 111}"

    @tool
    async def open_door(self, door: int, key: str = "") -> str:
        """Try a door.

        Args:
            door: Its number.
            key: The key to try.
        """
        if door != self.right:
            raise ToolFault("it is shut")
        self.is_in = True
        return "it opens"


@reward(name="success")
async def inside(env: House) -> float:
    return float(env.is_in)


def task(house: str, number: int = 0, words: str = "Enter the {} house.") -> Task:
    return Task.of(words.format(house), id=f"{house}-{number}", envs={"house": {"house": house}})


async def play(expert: Any, tasks: Sequence[Task]) -> list[Trajectory]:
    pool = EnvPool(House, name="house", size=4)
    rollout = Rollout(
        engine=FakeEngine([]), renderer=Renderer(ByteTokenizer(), load_format("hermes")),
        scorer=Scorer([inside]), tools=as_toolset(()), pools={"house": pool}, agent=Demonstrator(expert),
        budgets=Budgets.parse({"max_turns": 20, "max_tokens": 100_000}),
    )  # fmt: skip
    try:
        found = [group.trajectories[0] async for group in rollout.groups(tasks, 0)]
    finally:
        await pool.close()
    return sorted(found, key=lambda one: one.task.id)


def explorer(given: Task) -> ExpertMoves:
    """Does what the prompt says has worked, and else tries one door after the other."""
    said = given.messages[0].content if given.messages[0].role == "system" else ""
    known = [int(part.split("door=")[1][0]) for part in said.splitlines() if "door=" in part]
    yield ToolCall("look")
    for door in [*known, *range(1, 7)]:
        seen = yield ToolCall("open_door", {"door": door})
        if "opens" in seen:
            break
    yield "I am in."


async def test_a_second_run_on_a_similar_task_needs_fewer_turns(tmp_path: Path) -> None:
    first = await play(explorer, [task(house, n) for house in DOORS for n in range(2)])
    save_workflows(tmp_path / "w.json", extract_workflows(first))
    config = WorkflowConfig.parse({"file": str(tmp_path / "w.json"), "best": 1})
    similar = [task(house, n, "Please get into the {} house") for house in DOORS for n in range(2, 4)]
    before, after = await play(explorer, similar), await play(explorer, with_workflows(similar, config))
    mean = [sum(one.turns for one in played) / len(played) for played in (before, after)]
    assert mean[1] < mean[0] - 1 and all(one.reward == 1 for one in after)
    assert {one.turns for one in after} == {3}  # look, the right door, the answer


async def test_detours_are_left_out_and_what_was_read_is_named() -> None:
    def by_key(given: Task) -> ExpertMoves:
        seen = yield ToolCall("look")
        key = seen.split("key ")[1][:3]
        yield ToolCall("open_door", {"door": 6, "key": "none"})
        yield ToolCall("open_door", {"door": int(key) // 111, "key": key})
        yield "I am in."

    [one] = extract_workflows(await play(by_key, [task("north")]))
    assert one.steps == (
        WorkflowStep("look"),
        WorkflowStep("open_door", {"door": 4, "key": "<key from look>"}),
    )
    assert (one.goals, one.episodes, one.turns) == (("Enter the north house.",), 1, 4)


async def test_equal_episodes_are_one_workflow_and_failures_none() -> None:
    def never(given: Task) -> ExpertMoves:
        yield ToolCall("look")
        yield "I give up."

    played = await play(explorer, [task("north", n) for n in range(3)])
    played += await play(never, [task("south", n) for n in range(3)])
    [one] = extract_workflows(played)
    assert one.episodes == 3 and one.goals == ("Enter the north house.",)
    # what differs between episodes that did the same is left open
    south = await play(explorer, [task("south")])
    renamed = [replace(t, task=replace(t.task, messages=task("north").messages)) for t in south]
    [both] = extract_workflows([*played[:1], *renamed])
    assert both.steps[1].arguments == {"door": "<door>"}


def test_the_most_similar_come_first_and_the_unlike_not_at_all() -> None:
    def flow(goal: str, turns: float = 3) -> Workflow:
        return Workflow((goal,), (WorkflowStep("look"),), 1, turns)

    flows = [flow("Order a pizza."), flow("Enter the north house.", 9), flow("Enter the south house.")]
    config = WorkflowConfig.parse({"file": "x.json", "best": 2})
    found = similar_workflows(flows, task("north"), config)
    assert [one.goals[0] for one in found] == ["Enter the north house.", "Enter the south house."]
    assert similar_workflows(flows, Task.of("Multiply 3 by 4."), config) == []
    assert similar_workflows([], task("north"), config) == []


@pytest.fixture
def recipe(tmp_path: Path) -> Iterator[Path]:
    flows = [Workflow(("What is 1 + 1?",), (WorkflowStep("add", {"a": "<a from the task>"}),))]
    save_workflows(tmp_path / "w.json", flows)
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"prompt": "What is 1 + 1?", "target": "2"}\n')
    text = """
    rewards = ["exact_match"]
    [model.scratch]
    [tasks]
    train = "train.jsonl"
    evaluation = "test.jsonl"
    [agent]
    system = "Be brief."
    [agent.workflows]
    file = "w.json"
    """
    (tmp_path / "r.toml").write_text(text)
    yield tmp_path / "r.toml"


def test_a_recipe_tells_training_tasks_and_not_held_out_ones(recipe: Path) -> None:
    parts = load_parts(load_recipe(recipe))
    system = parts.tasks[0].messages[0].content
    assert system.startswith("Be brief.") and HEADER in system and "add(a=<a from the task>)" in system
    assert parts.held_out[0].messages[0].content == "Be brief."
    asked = load_parts(load_recipe(recipe, ["agent.workflows.held_out=true"]))
    assert HEADER in asked.held_out[0].messages[0].content


def test_a_broken_file_is_refused_with_its_name(tmp_path: Path) -> None:
    for text in ("{", "[{}]", '[{"goals": [], "steps": []}]'):
        (tmp_path / "w.json").write_text(text)
        with pytest.raises(ConfigError, match=r"w\.json"):
            load_workflows(tmp_path / "w.json")
    with pytest.raises(ConfigError, match="none"):
        load_workflows(tmp_path / "none.json")
