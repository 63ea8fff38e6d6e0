"""The controller of rollouts and its player in this process, on a fake engine."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from worker_parts import PlainSteps, engine, right, rl, seen, task_set, tasks

import ludus
from ludus.core import ConfigError, EngineError
from ludus.rewards import reward
from ludus.training import RLConfig, TaskSet
from ludus.training.controller import NextBatch, RolloutController, StalledError, step_by_step
from ludus.training.ledger import Ledger, Phase
from ludus.training.player import LocalPlayer


def first_is_right(task: str, attempt: int) -> str:
    return "right" if attempt % 2 == 0 else "wrong"


def rollouts(
    sets: list[TaskSet],
    *,
    staleness: int = 1,
    window: int = 1,
    steps: int = 6,
    seed: int = 3,
    values_at: Any = lambda step: {},
    stall_seconds: float = 60.0,
    **settings: Any,
) -> RolloutController:
    config = rl(**settings)
    ledger = Ledger(config.tasks, staleness, window, steps * config.tasks)
    player = LocalPlayer(sets, config)
    return RolloutController(sets, config, seed, ledger, player, values_at, stall_seconds=stall_seconds)


async def train_all(playing: RolloutController, updates: Any = None) -> list[NextBatch]:
    """Take every batch and train it, which takes no time unless `updates` lets it."""
    batches = []
    while playing.ledger.phase is not Phase.ENDED:
        batch = await playing.next_batch()
        batches.append(batch)
        if updates is not None:
            await updates(batch)
        playing.trained(batch)
    await playing.close()
    return batches


def ordinals(batches: list[NextBatch]) -> list[list[int]]:
    return [[plan.ordinal for plan in batch.plans] for batch in batches]


def flat(batches: list[NextBatch]) -> list[int]:
    return [ordinal for batch in ordinals(batches) for ordinal in batch]


@pytest.mark.parametrize("refill", [{}, {"refill": {"rounds": 2}}], ids=["whole", "refilled"])
async def test_without_staleness_it_plays_what_a_plain_loop_plays(refill: dict[str, Any]) -> None:
    draw = random.Random(2)

    def words(task: str, attempt: int) -> str:
        return first_is_right(task, attempt) if int(task[-1]) % 2 else "right"

    def sets() -> list[TaskSet]:
        shared = engine(words, seconds=lambda tokens: draw.random() * 0.003)
        return [
            task_set(tasks(5), shared, name="a", weight=2),
            task_set(tasks(3, "b"), shared, name="b"),
        ]

    settings = {"tasks": 6, "attempts": 4, "keep_attempts": 2, **refill}
    plain = PlainSteps(sets(), rl(**settings), 3)
    expected = [await plain.play(step) for step in range(5)]
    found = await train_all(rollouts(sets(), staleness=0, steps=5, **settings))
    assert [seen(batch.played) for batch in found] == [seen(played) for played in expected]
    stepwise = step_by_step(sets(), rl(**settings), 3)
    for played in expected:
        batch = await stepwise.next_batch()
        assert seen(batch.played) == seen(played)
        stepwise.trained(batch)


async def test_batches_are_in_order_and_every_ordinal_comes_once() -> None:
    draw = random.Random(1)
    slow = engine(first_is_right, seconds=lambda tokens: draw.random() * 0.01)
    batches = await train_all(rollouts([task_set(tasks(6), slow)], staleness=2))
    assert ordinals(batches) == [list(range(4 * n, 4 * n + 4)) for n in range(6)]


async def test_within_a_window_a_straggler_is_passed() -> None:
    class Slow(ludus.Agent):
        async def run(self, episode: ludus.Episode) -> None:
            if episode.task.id == slowest:
                await asyncio.sleep(0.05)
            await super().run(episode)

    given = tasks(50)
    probe = rollouts([task_set(given, first_is_right)], steps=1)
    slowest = (await probe.next_batch()).plans[1].task.id
    await probe.close()
    playing = rollouts([task_set(given, first_is_right, agent=Slow())], window=4)
    batches = await train_all(playing)
    assert ordinals(batches)[0] == [0, 2, 3, 4] and 1 in ordinals(batches)[1]
    assert sorted(flat(batches)) == list(range(24))


async def test_groups_without_signal_are_replaced_by_further_ordinals() -> None:
    def only_odd_teach(task: str, attempt: int) -> str:
        return first_is_right(task, attempt) if int(task[-1]) % 2 else "right"

    playing = rollouts([task_set(tasks(10), only_odd_teach)], refill={"rounds": 9})
    batches = await train_all(playing)
    assert all(int(plan.task.id) % 2 for batch in batches for plan in batch.plans)
    trained = flat(batches)
    assert len(trained) == len(set(trained)) == 24 and playing.ledger.next_ordinal > 24
    dropped = [group.task.id for batch in batches for group in batch.played.dropped]
    assert dropped and not any(int(task) % 2 for task in dropped)
    assert sum(batch.played.metrics["refilled"] for batch in batches) > 0


async def test_refills_go_by_success_as_in_synchronous_training(tmp_path: Path) -> None:
    """And a resumed run counts the groups that are left without signal as the run before would have."""

    @ludus.reward
    def bonus(trajectory: ludus.Trajectory) -> float:
        return float(trajectory.attempt)

    settings = {"refill": {"rounds": 1}, "overlong": {"longest": 12, "buffer": 10}}

    def playing(**more: Any) -> RolloutController:
        one = task_set(tasks(4), rewards=[right, bonus])
        return rollouts([one], steps=2, **settings, **more)

    batches = await train_all(playing())
    assert [batch.played.metrics["without_signal"] for batch in batches] == [4, 4]
    assert {plan.refills for batch in batches for plan in batch.plans} == {1}
    first = playing(staleness=1)
    batch = await first.next_batch()
    first.trained(batch)
    await first.next_batch()
    await first.close()
    state = first.save(tmp_path)
    second = playing(staleness=1)
    second.load(tmp_path, json.loads(json.dumps(state)))
    assert (await second.next_batch()).played.metrics["without_signal"] == 4
    await second.close()


async def test_a_refill_ends_after_its_rounds() -> None:
    playing = rollouts([task_set(tasks(4))], steps=2, refill={"rounds": 1})
    batches = await train_all(playing)
    assert [batch.played.metrics["without_signal"] for batch in batches] == [4, 4]
    assert {plan.refills for batch in batches for plan in batch.plans} == {1}


async def test_a_group_that_failed_as_a_whole_is_played_again_under_its_ordinal() -> None:
    broken = {n: EngineError("no power", retriable=False) for n in range(2)}
    one = task_set(tasks(6), engine(first_is_right, failures=broken))
    batches = await train_all(rollouts([one], steps=2))
    assert ordinals(batches) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert all(group.trainable for batch in batches for group in batch.played.groups)
    assert [t.failure.boundary for g in batches[0].played.dropped for t in g.trajectories] == [
        "engine"
    ] * 2


async def test_a_group_that_fails_again_is_given_up_and_keeps_its_place() -> None:
    broken = {n: EngineError("no power", retriable=False) for n in range(1000)}
    one = task_set(tasks(6), engine(first_is_right, failures=broken))
    (batch,) = await train_all(rollouts([one], steps=1))
    assert ordinals([batch]) == [[0, 1, 2, 3]]
    failures = [t.failure for g in batch.played.groups for t in g.trajectories]
    assert all(failure is not None and failure.message == "no power" for failure in failures)


async def test_what_is_wrong_with_the_recipe_ends_the_run() -> None:
    one = task_set([ludus.Task.of("?", envs={"nowhere": {}})])
    playing = rollouts([one])
    with pytest.raises(ConfigError, match="asks for the environment 'nowhere'"):
        await playing.next_batch()
    await playing.close()


async def test_values_of_curricula_are_fixed_when_a_group_is_scheduled() -> None:
    value = 5.0

    def values_at(step: int) -> dict[str, float]:
        return {"budgets.max_turns": value + step}

    playing = rollouts([task_set(tasks(6), first_is_right)], values_at=values_at, steps=4)
    batch = await playing.next_batch()
    assert [plan.values for plan in batch.plans] == [{"budgets.max_turns": 5.0}] * 4
    value = 10.0
    playing.trained(batch)
    batch = await playing.next_batch()
    assert [plan.values for plan in batch.plans] == [{"budgets.max_turns": 6.0}] * 4
    playing.trained(batch)
    batch = await playing.next_batch()
    assert [plan.values for plan in batch.plans] == [{"budgets.max_turns": 12.0}] * 4
    assert playing.notes(batch)[0] == {
        "ordinal": 8, "set": "tasks", "curriculum": {"budgets.max_turns": 12.0}
    }  # fmt: skip
    await playing.close()


class Hanging(ludus.Agent):
    async def run(self, episode: ludus.Episode) -> None:
        if episode.task.id == "1":
            await episode.generate()
            await asyncio.sleep(1000)
        await super().run(episode)


async def test_a_wait_that_takes_too_long_says_what_for(caplog: pytest.LogCaptureFixture) -> None:
    playing = rollouts([task_set(tasks(4), first_is_right, agent=Hanging())], stall_seconds=0.2)
    with pytest.raises(StalledError) as caught:
        await train_all(playing)
    text = str(caught.value)
    assert "waited 0.2 s for the groups of step" in text and "task '1'" in text
    assert "2 at tools or rewards" in text and "rl.staleness.stall_seconds" in text
    assert text in caplog.text
    await playing.close()


async def test_while_it_is_held_no_request_reaches_the_engine_and_tools_go_on() -> None:
    called: list[str] = []

    class Busy(ludus.Agent):
        async def run(self, episode: ludus.Episode) -> None:
            await episode.generate()
            await asyncio.sleep(0.02)
            called.append(episode.task.id)
            await super().run(episode)

    shared = engine(first_is_right)
    playing = rollouts([task_set(tasks(6), shared, agent=Busy())], steps=2)
    waiting = asyncio.create_task(playing.next_batch())
    await asyncio.sleep(0.01)
    assert shared.calls
    await playing.hold()
    before = len(shared.calls)
    await asyncio.sleep(0.06)
    assert called and not waiting.done() and shared.in_flight == 0
    assert len(shared.calls) - before <= 16, "those that were at the engine already"
    at_rest = len(shared.calls)
    await asyncio.sleep(0.02)
    assert len(shared.calls) == at_rest
    playing.release()
    await waiting
    await playing.close()


async def test_with_rewards_that_remember_holding_waits_for_the_episodes_in_flight() -> None:
    class Memory:
        def __init__(self) -> None:
            self.count = 0

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    class Counting(Memory):
        name = "counting"

        async def score(self, trajectory: Any, task: Any, envs: Any) -> float:
            self.count += 1
            return float(self.count)

    class CountingGroups(Memory):
        name = "groups"

        async def score_group(self, group: ludus.Group) -> list[float]:
            await asyncio.sleep(0.02)
            self.count += 1
            return [0.0 for _ in group.trajectories]

    counting, groups = Counting(), CountingGroups()
    slow = engine(first_is_right, seconds=lambda tokens: 0.02)
    one = task_set(tasks(6), slow, rewards=[counting], group_rewards=[groups], max_in_flight=3)
    playing = rollouts([one], steps=2)
    waiting = asyncio.create_task(playing.next_batch())
    await asyncio.sleep(0.01)
    await playing.hold()
    held = counting.count, groups.count
    assert held == (3, 1), "an episode of the second group waits for its place"
    await asyncio.sleep(0.06)
    assert (counting.count, groups.count) == held
    playing.release()
    await waiting
    await playing.close()


@reward(name="success")
def told(answer: str) -> float:
    return float(answer == "right")


async def test_what_was_saved_is_trained_once_and_in_flight_begins_again(tmp_path: Path) -> None:
    """Saved with finished groups that wait and others in flight; what is finished is not played again."""
    settings = {"staleness": 2, "refill": {"rounds": 2}, "steps": 8}

    def sets(played: list[str]) -> list[TaskSet]:
        class Noting(ludus.Agent):
            async def run(self, episode: ludus.Episode) -> None:
                await asyncio.sleep(0.001 * (hash(episode.task.id) % 7))
                await super().run(episode)
                played.append(episode.task.id)

        return [task_set(tasks(7), first_is_right, agent=Noting(), rewards=(told,), name="a"),
                task_set(tasks(5, "b"), first_is_right, agent=Noting(), rewards=(told,), name="b")]  # fmt: skip

    first = rollouts(sets([]), **settings)
    batches = []
    for _ in range(3):
        batches.append(await first.next_batch())
        first.trained(batches[-1])
    await asyncio.sleep(0.003)
    first._receive(first._player.outcomes())
    state = first.save(tmp_path)
    finished = first.ledger.finished()
    await first.close()

    played: list[str] = []
    second = rollouts(sets(played), **settings)
    second.load(tmp_path, state)
    assert second.ledger.finished() == finished and second.ledger.to_play()
    rest = await train_all(second)
    trained = flat([*batches, *rest])
    assert sorted(trained) == list(range(32))
    assert len(played) == 2 * (32 - 12 - len(finished))
    reference = await train_all(rollouts(sets([]), **settings))
    assert [seen(batch.played)[0] for batch in [*batches, *rest]] == [
        seen(batch.played)[0] for batch in reference
    ]


async def test_other_tasks_than_those_of_the_saved_run_are_refused(tmp_path: Path) -> None:
    first = rollouts([task_set(tasks(6), first_is_right)])
    await first.next_batch()
    state = first.save(tmp_path)
    await first.close()
    second = rollouts([task_set(tasks(6, "other"), first_is_right)])
    with pytest.raises(ConfigError, match="give the run the tasks that it had"):
        second.load(tmp_path, state)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"staleness": {"window": 2}}, "staleness.window would have no effect"),
        ({"staleness": {"updates": True}}, "staleness.updates would have no effect"),
        ({"staleness": 1, "updates": 2}, "up to 2 optimizer updates old before the step"),
        ({"staleness": 2, "epochs": 3}, "up to 6 optimizer updates old before the step"),
        (
            {"staleness": 1, "loss": "policy_gradient", "correction": "none"},
            "neither clips nor corrects",
        ),
        ({"staleness": -1}, "staleness"),
    ],
)
def test_settings_that_contradict_staleness_are_refused(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RLConfig.parse(table)


@pytest.mark.parametrize(
    ("table", "correction"),
    [
        ({}, None),
        ({"correction": "masked"}, "masked"),
        ({"staleness": 1}, "truncated"),
        ({"staleness": 1, "correction": "masked"}, "masked"),
        ({"staleness": 1, "correction": "none"}, None),
        ({"staleness": 1, "loss": "policy_gradient"}, "truncated"),
        ({"staleness": {"steps": 1, "updates": True}, "updates": 2}, "truncated"),
    ],
)
def test_stale_samples_are_corrected_unless_asked_otherwise(table: Any, correction: Any) -> None:
    assert RLConfig.parse(table).importance_correction == correction
