"""The checker finds what would bite, and finds nothing where there is nothing."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from ludus.core import Media, Task, ToolCall
from ludus.envs import (
    Env,
    Observation,
    Step,
    as_observation,
    as_step,
    reset_env,
    step_env,
)
from ludus.rollouts import Verdict, check_env
from ludus.tools import tool

TASK = Task.of("count", id="t")
ACTIONS = ["up", "up", "down"]


class Good(Env):
    def __init__(self) -> None:
        self.log: list[str] = []

    async def reset(self, task: Task) -> Observation:
        self.log = []
        return Observation("start")

    def step(self, action: str) -> Step:
        self.log.append(action)
        return Step(f"{len(self.log)} {action}", terminated=len(self.log) == 3)

    def snapshot(self) -> Any:
        return copy.deepcopy(self.log)

    def restore(self, saved: Any) -> None:
        self.log = copy.deepcopy(saved)

    @tool
    def look(self) -> str:
        """Look around."""
        return " ".join(self.log)

    @tool
    def jump(self, height: int) -> str:
        """Jump.

        Args:
            height: How high.
        """
        return "ok"


async def problems(factory: Any, actions: Any = ACTIONS, task: Task = TASK) -> list[tuple[str, str]]:
    return [(f.verdict.value, f.text) for f in await check_env(factory, task, actions)]


async def test_nothing_is_found_where_nothing_is_wrong():
    assert await check_env(Good, TASK, ACTIONS) == []
    assert await check_env(Good, TASK, [ToolCall("look"), "up", ToolCall("jump", {"height": 3})]) == []
    assert await check_env(Good, TASK) == []  # plays the tool that needs no arguments


async def test_actions_of_an_environment_with_tools_only_are_not_played_as_texts():
    class Tools(Env):
        @tool
        def act(self, action: str) -> str:
            """Act.

            Args:
                action: What to do.
            """
            return action

        def available_actions(self) -> list[str]:
            return ["north"]

    assert await check_env(Tools, TASK) == []


async def test_a_finding_reads_well():
    class NoText(Good):
        def reset(self, task: Task) -> Any:
            return 5

    (finding,) = await check_env(NoText, TASK, ACTIONS)
    assert finding.verdict is Verdict.FAILED
    assert "int" in finding.text and "Observation" in finding.text
    assert str(finding).startswith("failed: interface: ")


class SharedState(Good):
    board: list[str] = []  # noqa: RUF012 - the mistake to be found


class Forgetful(Good):
    """Its reset leaves something of the episode before."""

    async def reset(self, task: Task) -> Observation:
        return Observation("start")


class Dice(Good):
    def step(self, action: str) -> Step:
        return Step(str(random.random()))


class ReferenceSnapshot(Good):
    def step(self, action: str) -> Step:
        self.log.append(action)
        return Step(str(len(self.log)))

    def snapshot(self) -> Any:
        return self.log

    def restore(self, saved: Any) -> None:
        self.log = saved


class HalfSnapshot(Env):
    def step(self, action: str) -> str:
        return action

    def snapshot(self) -> None: ...


class BadClose(Good):
    def close(self) -> None:
        raise OSError("still busy")


class BadStep(Good):
    def step(self, action: str) -> Any:
        return {"reward": 1}


class RaisingStep(Good):
    def step(self, action: str) -> Any:
        raise KeyError(action)


class Undocumented(Good):
    @tool
    def act(self, how: str) -> str:
        return how


class Picky(Good):
    """Both of its tools need arguments, and one refuses what it does not know."""

    def step(self, action: str) -> Step:
        return Step(f"{action}: {len(self.log)}")

    @tool
    def look(self, where: str) -> str:
        """Look.

        Args:
            where: North or south.
        """
        return {"north": "a wall"}[where]


class Idle(Env): ...


class RaisingFactory(Good):
    def __init__(self) -> None:
        raise RuntimeError("no licence")


@pytest.mark.parametrize(
    ("factory", "severity", "words"),
    [
        (SharedState, "warning", "share the object in 'board'"),
        (Forgetful, "warning", "led to something else after a reset"),
        (Dice, "warning", "led to something else in a second instance"),
        (Dice, "warning", "led to something else after a reset"),
        (ReferenceSnapshot, "failed", "after restore"),
        (HalfSnapshot, "failed", "only one of snapshot and restore"),
        (BadClose, "failed", "OSError: still busy"),
        (BadStep, "failed", "must be text, an Observation or None"),
        (RaisingStep, "failed", "KeyError"),
        (Undocumented, "warning", "'act' has no description"),
        (Undocumented, "warning", "parameter 'how'"),
        (RaisingFactory, "failed", "no licence"),
    ],
)
async def test_each_mistake_is_found(factory: Any, severity: str, words: str):
    found = await problems(factory)
    assert any(kind == severity and words in problem for kind, problem in found), found


async def test_without_actions_the_tools_are_called_as_their_schemas_allow():
    assert await check_env(Picky, TASK) == []

    class Buggy(Picky):
        @tool
        def jump(self, height: int) -> str:
            """Jump.

            Args:
                height: How high.
            """
            return undefined_name  # type: ignore[name-defined]  # noqa: F821

    assert any("'jump' failed: NameError" in problem for _, problem in await problems(Buggy, None))
    assert await problems(Idle, None) == [
        ("warning", "it offers nothing to do; mark methods with @tool, or write step")
    ]


async def test_one_object_for_everybody_is_found():
    only = Good()
    assert any("same object twice" in problem for _, problem in await problems(lambda: only))


async def test_instances_are_closed_whatever_happens():
    closed: list[str] = []

    class Raising(RaisingStep):
        def close(self) -> None:
            closed.append("closed")

    await problems(Raising)
    assert closed == ["closed"]


# The shapes that reset and step may return -----------------------------------------------------------


async def test_sync_and_async_environments_are_called_alike():
    class Later(Env):
        async def reset(self, task: Task) -> str:
            return task.id

        async def step(self, action: str) -> Step:
            return Step(action, 1.0, True)

    class Now(Env):
        def reset(self, task: Task) -> str:
            return task.id

        def step(self, action: str) -> Step:
            return Step(action, 1.0, True)

    for env in (Later(), Now()):
        assert await reset_env(env, TASK) == Observation("t")
        assert await step_env(env, "x") == Step(Observation("x"), 1.0, True)


def test_one_shape_for_all():
    picture = Media("image", "00")
    assert as_observation(None) == Observation("")
    assert as_step("seen") == Step(Observation("seen"))
    assert as_step(("seen", 1, False, True, {"k": 1})) == Step(
        Observation("seen"), 1.0, False, True, {"k": 1}
    )
    result = as_step(Step(Observation("a", (picture,)), None, False, True)).as_result()
    assert (result.content, result.reward, result.terminated, result.media) == (
        "a",
        None,
        True,
        (picture,),
    )
    with pytest.raises(TypeError, match="int"):
        as_observation(3)
