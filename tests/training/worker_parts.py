"""What tests of playing share: task sets on a fake engine whose words a function decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ludus.chat import Renderer, load_format
from ludus.core import ByteTokenizer, Task, ToolCall, key
from ludus.engine import FakeEngine
from ludus.rewards import Scorer, reward
from ludus.rollouts import Budgets, Rollout
from ludus.tools import as_toolset
from ludus.training import RLConfig, RolloutBatch, RolloutSettings, TaskSampler, TaskSet
from ludus.training.controller import step_by_step
from ludus.training.data.rollout_batch import GroupFilter, KeptGroup
from ludus.training.data.tasks import SampledTask, seed_of_set
from ludus.training.player import rollouts_at

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


class Steps:
    """The steps of a stage without staleness, one after the other; each is trained as soon as it is played."""

    def __init__(self, sets: Sequence[TaskSet], settings: RolloutSettings, seed: int) -> None:
        self.values: Mapping[str, float] = {}
        self.controller = step_by_step(sets, settings, seed, lambda step: self.values)

    async def play(self, step: int, values: Mapping[str, float]) -> RolloutBatch:
        assert step == self.controller.ledger.version
        self.values = values
        batch = await self.controller.next_batch()
        self.controller.trained(batch)
        return batch.played


class PlainSteps:
    """The steps that a plain loop plays: written down once more, without controller, ledger and player."""

    def __init__(self, sets: Sequence[TaskSet], settings: RolloutSettings, seed: int) -> None:
        self.sets, self.settings, self.seed = list(sets), settings, seed
        self.sampler = TaskSampler(self.sets, seed)

    async def play(self, step: int) -> RolloutBatch:
        kept = GroupFilter(self.sets, self.settings)
        seed, refilled = key(self.seed, "rl", step), 0
        sampled = self.sampler.sample(self.settings.tasks)
        groups = await self._round(kept, sampled, seed)
        for number in range(self.settings.refill.rounds if self.settings.refill else 0):
            empty = [place for place, one in enumerate(groups) if not one.is_informative]
            further = self.sampler.sample_from([sampled[place].set for place in empty])
            found = await self._round(kept, further, key(seed, "refill", number))
            for place, one in zip(empty, found, strict=True):
                kept.dropped[sampled[place].set].append(groups[place].group)
                groups[place] = one
                refilled += one.is_informative
        return kept.batch(groups, [one.set for one in sampled], refilled)

    async def _round(
        self, kept: GroupFilter, sampled: Sequence[SampledTask], seed: int
    ) -> list[KeptGroup]:
        found = []
        rollouts = rollouts_at(self.sets, self.settings, {})
        for number, one in enumerate(self.sets):
            tasks_ = [each.task for each in sampled if each.set == number]
            own = seed_of_set(seed, number, one.name)
            groups = [group async for group in rollouts[number].groups(tasks_, own)]
            by_attempt = {(g.task.id, g.trajectories[0].attempt): g for g in groups}
            seen_: Counter[str] = Counter()
            for place, each in enumerate(sampled):
                if each.set == number:
                    first = seen_[each.task.id] * self.settings.attempts
                    found.append((place, by_attempt[each.task.id, first]))
                    seen_[each.task.id] += 1
        return [
            kept.keep(group, sampled[place].set, key(seed, "resample", place))
            for place, group in sorted(found, key=lambda pair: pair[0])
        ]


def ids(played: RolloutBatch) -> list[str]:
    return [group.task.id for group in played.groups]


def seen(played: RolloutBatch) -> list[Any]:
    """All that a step's learning depends on."""
    groups = [
        [(t.task.id, t.seed, t.attempt, t.tokens, t.logprobs, t.reward) for t in group.trajectories]
        for group in played.groups
    ]
    return [groups, sorted(played.masked), played.sets, played.metrics]
