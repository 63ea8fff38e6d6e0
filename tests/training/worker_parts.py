"""What tests of playing share: task sets on a fake engine whose words a function decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ludus.chat import Renderer, load_format
from ludus.core import ByteTokenizer, Task, ToolCall
from ludus.engine import FakeEngine
from ludus.rewards import Scorer, reward
from ludus.rollouts import Budgets, Rollout
from ludus.tools import as_toolset
from ludus.training import RLConfig, RolloutBatch, RolloutSettings, TaskSet

RENDERER = Renderer(ByteTokenizer(), load_format("hermes"))

Words = Callable[[str, int], str]
"""What the model says, given the task's id and the attempt."""


@reward(name="success")
def right(answer: str) -> float:
    return float(answer == "right")


def called(name: str, **arguments: Any) -> str:
    """What a model writes to call a tool."""
    return RENDERER.format.render_action("", [ToolCall(name, arguments)])


def tasks(count: int, prefix: str = "", **metadata: Any) -> list[Task]:
    return [Task.of(f"Task {n}.", id=f"{prefix}{n}", **metadata) for n in range(count)]


def engine(words: Words, **settings: Any) -> FakeEngine:
    def script(tokens: list[int], sampling: Any, session: str | None) -> str:
        assert session is not None
        _, task, attempt, _ = session.split("/")
        return words(task, int(attempt))

    return FakeEngine(script, RENDERER.tokenizer, **settings)


def task_set(
    given: Sequence[Task],
    words: Words | FakeEngine = lambda task, attempt: "right",
    *,
    name: str = "tasks",
    weight: float = 1.0,
    tools: Any = (),
    rewards: Sequence[Any] = (right,),
    group_rewards: Sequence[Any] = (),
    budgets: dict[str, Any] | None = None,
    **settings: Any,
) -> TaskSet:
    rollout = Rollout(
        engine=words if isinstance(words, FakeEngine) else engine(words),
        renderer=RENDERER,
        scorer=Scorer(rewards, group_rewards),
        tools=as_toolset(tools),
        budgets=Budgets.parse(budgets or {}),
        **settings,
    )
    return TaskSet(name, weight, given, [], rollout)


def rl(**settings: Any) -> RolloutSettings:
    return RLConfig.parse({"tasks": 4, "attempts": 2, **settings}).rollouts


def ids(played: RolloutBatch) -> list[str]:
    return [group.task.id for group in played.groups]


def seen(played: RolloutBatch) -> list[Any]:
    """All that a step's learning depends on."""
    groups = [
        [(t.task.id, t.seed, t.attempt, t.tokens, t.logprobs, t.reward) for t in group.trajectories]
        for group in played.groups
    ]
    return [groups, sorted(played.masked), played.sets, played.metrics]
