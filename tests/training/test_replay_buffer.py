"""Experience replay with expiry: what is stored, what expires and why, what a resumed run makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stage_runs import assert_same_runs
from training_helpers import TINY, Chatty, add, even, tasks

import ludus
from ludus.core import ConfigError, Group, Segment, SegmentKind, StopReason, Task, ToolCall, Trajectory
from ludus.core.generation import VersionSpan
from ludus.envs import EnvPool
from ludus.tools import as_toolset
from ludus.tools.versions import tool_versions
from ludus.training import Recipe, RolloutBatch
from ludus.training.config.rl import ReplayBufferConfig, RolloutSettings
from ludus.training.data.rollout_batch import ReplayBuffer
from ludus.training.data.tasks import TaskSet
from ludus.worlds.safe import Safe

CODE = {"tool add": "1", "tool find": "7", "env desk": "e1"}


def group(name: str, tool: str, version: int, rewards: tuple[float, ...] = (0.0, 1.0)) -> Group:
    """Attempts that call one tool, played by one version of the policy."""
    task = Task.of(name, id=name, envs={"desk": {}} if name.startswith("desk") else {})
    attempts = []
    for number, reward in enumerate(rewards):
        action = Segment(
            SegmentKind.ACTION, [1, 2], [-0.5, -0.5], (VersionSpan(0, version),), calls=(ToolCall(tool),)
        )
        one = Trajectory(task, attempt=number, reward=reward, stop=StopReason.ANSWERED)
        one.sequences[0].segments = [Segment(SegmentKind.PROMPT, [0]), action]
        attempts.append(one)
    return Group(task, attempts)


def buffer(code: dict[str, str] | None = None, **given: Any) -> ReplayBuffer:
    sets: Any = [TaskSet("tasks", 1.0, [], [], None)]  # type: ignore[arg-type]
    config = ReplayBufferConfig.parse({"groups": 10, "uses": 9, **given})
    return ReplayBuffer(config, RolloutSettings(2, 2), sets, [CODE if code is None else code], seed=0)


def batch(*groups: Group) -> RolloutBatch:
    return RolloutBatch(list(groups), frozenset(), [0] * len(groups), {})


def names(found: RolloutBatch) -> list[str]:
    return [one.task.id for one in found.groups]


def test_groups_without_signal_are_not_stored_and_the_oldest_make_room() -> None:
    held = buffer(capacity=2)
    held.add(batch(group("a", "add", 0), group("dull", "add", 0, (1.0, 1.0)), group("b", "add", 0)), 0)
    held.add(batch(group("c", "find", 1)), 1)
    assert [one.group.task.id for one in held.stored] == ["b", "c"]
    found = held.mixed(batch(group("new", "add", 2)), 2, 2)
    assert sorted(names(found)) == ["b", "c", "new"] and found.sets == [0, 0, 0]
    assert found.metrics["replay/groups"] == 2 and found.metrics["replay/lag_mean"] == 1.5


def test_editing_a_tool_empties_its_share() -> None:
    held = buffer()
    held.add(batch(*(group(f"{tool}{n}", tool, 0) for tool in ("add", "find") for n in range(3))), 0)
    held.code = [{**CODE, "tool find": "8"}]
    found = held.mixed(batch(), 1, 1)
    assert sorted(names(found)) == ["add0", "add1", "add2"]
    assert found.metrics["replay/expired_tools"] == 3 and found.metrics["replay/stored"] == 3


def test_a_changed_environment_and_a_tool_that_is_gone_expire_too() -> None:
    held = buffer()
    held.add(batch(group("desk1", "add", 0), group("a", "add", 0), group("b", "find", 0)), 0)
    held.code = [{"tool add": "1", "env desk": "e2"}]
    # a task that names no environment is played in all of them
    assert names(held.mixed(batch(), 1, 1)) == []
    held = buffer({"tool add": "1", "tool find": "7"})
    held.add(batch(group("a", "add", 0), group("b", "find", 0)), 0)
    held.code = [{"tool add": "1"}]
    assert names(held.mixed(batch(), 1, 1)) == ["a"]


def test_age_versions_and_uses_expire() -> None:
    held = buffer(max_age=60.0, max_lag=3, uses=2)
    held.add(batch(group("old", "add", 5)), 5, now=0.0)
    held.add(batch(group("late", "add", 1)), 5, now=100.0)
    held.add(batch(group("good", "add", 5)), 5, now=100.0)
    found = held.mixed(batch(), 1, 5, now=110.0)
    assert names(found) == ["good"]
    assert (found.metrics["replay/expired_age"], found.metrics["replay/expired_versions"]) == (1, 1)
    assert names(held.mixed(batch(), 2, 5, now=111.0)) == ["good"]
    found = held.mixed(batch(), 3, 5, now=112.0)
    assert names(found) == [] and found.metrics["replay/expired_uses"] == 1


def test_stored_groups_are_spread_over_the_updates() -> None:
    held = buffer(groups=2)
    held.add(batch(group("a", "add", 0), group("b", "add", 0)), 0)
    found = held.mixed(batch(*(group(f"new{n}", "add", 1) for n in range(4))), 1, 1)
    places = [place for place, name in enumerate(names(found)) if not name.startswith("new")]
    assert places == [1, 3]


async def test_versions_follow_schema_and_source() -> None:
    def made(text: str) -> Any:
        space: dict[str, Any] = {}
        exec(text, space)
        return as_toolset([ludus.tool(space["look"])])

    first = 'async def look(at: str) -> str:\n    """Look."""\n    return at\n'
    same, wider = (
        await tool_versions(made(first)),
        await tool_versions(made(first.replace("str)", "int)"))),
    )
    assert same == await tool_versions(made(first)) and same["look"] != wider["look"]

    class Other(Safe):
        async def reset(self, task: Task, combination: Any) -> None:
            await super().reset(task, combination)

    assert EnvPool(Safe).version == EnvPool(Safe).version != EnvPool(Other).version


REPLAYED: dict[str, Any] = {
    **TINY,
    "max_in_flight": 1,  # what is batched with what changes last bits
    "rl": {
        "steps": 4, "tasks": 2, "attempts": 3, "replay_buffer": {"groups": 2, "max_lag": 2},
        "optimizer": {"learning_rate": 1e-2},
    },
}  # fmt: skip
PARTS: dict[str, Any] = {"tasks": tasks(6), "rewards": [even], "progress": False}


def run(folder: Path, **given: Any) -> list[dict[str, Any]]:
    result = ludus.train(
        Recipe.parse({**REPLAYED, "run": {**TINY["run"], "folder": str(folder)}}),
        agent=Chatty(),
        **{"tools": [add], **PARTS, **given},
    )
    return result.metrics


def test_a_run_trains_on_stored_groups_and_goes_on_as_it_was(tmp_path: Path) -> None:
    rows = run(tmp_path / "whole")
    steps = [row for row in rows if "replay/groups" in row]
    assert [row["replay/groups"] for row in steps] == [0, 2, 2, 2]
    assert [row["episodes"] for row in steps] == [6] * 4, "what was played, without what was stored"
    assert steps[2]["replay/lag_mean"] > 0 and steps[3]["replay/stored"] >= 4
    assert steps[2]["importance_weight"] != pytest.approx(1, abs=1e-3), "of another policy"
    with pytest.raises(Stopped):
        run(tmp_path / "cut", on_step=_stop_after(2))
    ludus.train(resume=tmp_path / "cut", tools=[add], agent=Chatty(), **PARTS)
    assert_same_runs(tmp_path / "whole", tmp_path / "cut")


class Stopped(Exception):
    """A run is cut off."""


def _stop_after(steps: int) -> Any:
    def on_step(phase: str, step: int, total: int, metrics: dict[str, float]) -> None:
        if phase != "evaluation" and step >= steps:
            raise Stopped

    return on_step


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"algorithm": "ppo"}, "a critic's advantages"),
        ({"loss": "policy_gradient", "correction": "none"}, "neither clips nor corrects"),
    ],
)
def test_what_cannot_be_corrected_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Recipe.parse({**REPLAYED, "rl": {**REPLAYED["rl"], **given}})
