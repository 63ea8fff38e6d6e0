"""From tasks to the groups of a step, without staleness."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from worker_parts import Steps, called, engine, ids, right, rl, seen, task_set, tasks

import ludus
from ludus.core import ConfigError, EngineError, Group, StopReason, Task, Trajectory, key
from ludus.rewards import FormatGate
from ludus.training import RolloutBatch, TaskSet, items_of_step


def first_is_right(task: str, attempt: int) -> str:
    return "right" if attempt % 2 == 0 else "wrong"


def only_odd_teach(task: str, attempt: int) -> str:
    """Tasks with an even number are always right, and so teach nothing."""
    return first_is_right(task, attempt) if int(task[-1]) % 2 else "right"


async def play_steps(playing: Steps, steps: range) -> list[RolloutBatch]:
    return [await playing.play(step, {}) for step in steps]


async def test_one_set_plays_what_a_plain_loop_would() -> None:
    given, seed = tasks(6), 3
    one = task_set(given, first_is_right, attempts=99)
    played = await play_steps(Steps([one], rl(), seed), range(4))
    for step, result in enumerate(played):
        expected = items_of_step(given, step, 4, seed)
        assert ids(result) == [task.id for task in expected]
        assert result.sets == [0] * 4 and not result.masked and not result.dropped
        for group in result.groups:
            for trajectory in group.trajectories:
                run = key(seed, "rl", step)
                assert trajectory.seed == key(run, group.task.id, trajectory.attempt)
                assert trajectory.reward == float(trajectory.attempt % 2 == 0)


async def test_a_task_scheduled_twice_has_new_attempts_in_its_own_place() -> None:
    played = await Steps([task_set(tasks(2), first_is_right)], rl(tasks=5), 0).play(0, {})
    order = ids(played)
    for task in set(order):
        places = [place for place, own in enumerate(order) if own == task]
        attempts = [[t.attempt for t in played.groups[place].trajectories] for place in places]
        assert attempts == [[2 * n, 2 * n + 1] for n in range(len(places))]


async def test_who_finishes_first_decides_nothing() -> None:
    def sets(slowness: list[float]) -> list[TaskSet]:
        pauses = iter(slowness * 100)
        shared = engine(first_is_right, seconds=lambda tokens: next(pauses))
        return [
            task_set(tasks(5), shared, name="a", weight=2),
            task_set(tasks(5), shared, name="b"),  # the same task ids as in the other set
        ]

    config = rl(tasks=6, keep_attempts=2, attempts=3, refill={"rounds": 2})
    quick = await play_steps(Steps(sets([0.0]), config, 5), range(3))
    slow = await play_steps(Steps(sets([0.02, 0.0, 0.01]), config, 5), range(3))
    assert [seen(p) for p in quick] == [seen(p) for p in slow]
    episodes = [t for p in quick for g in [*p.groups, *p.dropped] for t in g.trajectories]
    assert len({t.seed for t in episodes}) == len(episodes)


async def test_sets_are_mixed_by_weight_each_with_its_own_tools_and_rewards() -> None:
    @ludus.tool
    async def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    @ludus.tool
    async def ask() -> str:
        """Ask."""
        return "42"

    @ludus.reward
    def short(answer: str) -> float:
        return 1.0 / len(answer)

    def words(task: str, attempt: int) -> str:
        return called("add", a=1, b=2) if task[0] == "s" else called("ask")

    shared = engine(words)
    budgets = {"max_turns": 2}
    sums = task_set(tasks(4, "s"), shared, name="sums", weight=3, tools=[add], budgets=budgets)
    facts = task_set(
        tasks(4, "f"),
        shared,
        name="facts",
        tools=[ask],
        rewards=[ludus.reward(lambda: 2.0, name="always")],
        budgets={"max_turns": 3},
    )
    played = await Steps([sums, facts], rl(tasks=8), 0).play(0, {})
    assert sorted(played.sets) == [0] * 6 + [1] * 2
    for group, number in zip(played.groups, played.sets, strict=True):
        for one in group.trajectories:
            assert one.task.id[0] == "sf"[number]
            assert not one.faults and {c.name for c in one.calls} == {("add", "ask")[number]}
            assert set(one.rewards) == {("success", "always")[number]}
            assert one.turns == (2, 3)[number]
    metrics = played.metrics
    assert metrics["sets/sums/reward"] == 0.0 and metrics["sets/facts/reward"] == 2.0
    assert metrics["sets/sums/turns"] == 2.0 and metrics["sets/facts/turns"] == 3.0
    assert metrics["sets/facts/success"] == 1.0 and metrics["sets/sums/episodes"] == 12
    alone = await Steps([facts], rl(), 0).play(0, {})
    assert not any(name.startswith("sets/") for name in alone.metrics)


async def test_sets_share_the_places_in_flight() -> None:
    shared = engine(first_is_right, seconds=0.001)
    sets = [task_set(tasks(9), shared, name=name, max_in_flight=6) for name in "abc"]
    await Steps(sets, rl(tasks=9, attempts=4), 0).play(0, {})
    assert shared.most_in_flight <= 6


async def test_groups_without_signal_are_replaced_by_further_tasks() -> None:
    one = task_set(tasks(50), only_odd_teach)
    steps = Steps([one], rl(tasks=4, refill={"rounds": 10}), 1)
    first = await steps.play(0, {})
    order = [task.id for task in items_of_step(tasks(50), 0, 50, 1)]
    assert all(int(task) % 2 for task in ids(first))
    plain = order[:4]
    kept = [task for task in plain if int(task) % 2]
    assert [task for task in ids(first) if task in plain] == kept
    assert first.metrics["refilled"] == 4 - len(kept) and first.metrics["without_signal"] == 0
    # replacements come from where the order goes on, and the next step goes on after them
    used = [*ids(first), *(group.task.id for group in first.dropped)]
    assert sorted(used) == sorted(order[: len(used)])
    second = await steps.play(1, {})
    then = [*ids(second), *(group.task.id for group in second.dropped)]
    assert sorted(then) == sorted(order[len(used) : len(used) + len(then)])


@ludus.reward
def shortness(trajectory: Trajectory) -> float:
    """A bonus in which attempts differ whatever they answer."""
    return 1 / (2 + trajectory.attempt)


def by_number(task: str, attempt: int) -> str:
    """Of ten tasks one in three is always right, one in three never, and the others sometimes."""
    kind = int(task[-1]) % 3
    return ("right", "wrong", first_is_right(task, attempt))[kind]


SHAPED: list[dict[str, Any]] = [
    {"overlong": {"longest": 12, "buffer": 10}},
    {"broken": {"void_turn": -0.5}},
    {},
]


@pytest.mark.parametrize("shaping", SHAPED)
async def test_refills_go_by_success_and_not_by_bonuses_and_prices(shaping: dict[str, Any]) -> None:
    """DAPO replaces groups whose accuracy is 0 or 1, however their totals differ."""
    words = {"right": "right", "wrong": "wrong"}

    def said(task: str, attempt: int) -> str:
        return words[by_number(task, attempt)]

    one = task_set(tasks(30), said, rewards=[right, shortness])
    played = await Steps([one], rl(tasks=4, refill={"rounds": 9}, **shaping), 0).play(0, {})
    assert {int(task[-1]) % 3 for task in ids(played)} == {2}
    assert played.metrics["without_signal"] == 0 and played.metrics["refilled"] > 0
    assert any(len({t.reward for t in group.trajectories}) > 1 for group in played.dropped)


@pytest.mark.parametrize("shaping", SHAPED)
async def test_refills_go_by_the_total_before_prices_where_no_success_is_told(
    shaping: dict[str, Any],
) -> None:
    """Partial credit is signal; the price of length is none."""

    @ludus.reward
    def credit(answer: str) -> float:
        return {"right": 0.5, "wrong": 0.25}.get(answer, 0.25)

    def said(task: str, attempt: int) -> str:
        answer = by_number(task, attempt)
        return answer if answer == "right" or attempt % 2 else "wrong, and at length"

    one = task_set(tasks(30), said, rewards=[credit])
    played = await Steps([one], rl(tasks=4, refill={"rounds": 9}, **shaping), 0).play(0, {})
    assert {int(task[-1]) % 3 for task in ids(played)} == {2}
    assert played.metrics["without_signal"] == 0


async def test_refills_are_bounded() -> None:
    fake = engine(lambda task, attempt: "right")
    steps = Steps([task_set(tasks(3), fake)], rl(tasks=4, refill={"rounds": 2}), 0)
    played = await steps.play(0, {})
    assert len(fake.calls) == 4 * 2 * 3  # tasks, attempts, the first round and two more
    assert len(played.groups) == 4 and len(played.dropped) == 8
    assert played.metrics["refilled"] == 0 and played.metrics["without_signal"] == 4
    seeds = [t.seed for g in [*played.groups, *played.dropped] for t in g.trajectories]
    assert len(set(seeds)) == len(seeds)


async def test_a_group_that_failed_is_replaced_and_still_counted() -> None:
    def words(task: str, attempt: int) -> str:
        if task == broken:
            raise EngineError("gone", retriable=False)
        return first_is_right(task, attempt)

    broken = items_of_step(tasks(5), 0, 1, 0)[0].id
    played = await Steps([task_set(tasks(5), words)], rl(tasks=2, refill={"rounds": 1}), 0).play(0, {})
    assert broken not in ids(played) and played.metrics["refilled"] == 1
    [dropped] = played.dropped
    assert dropped.task.id == broken and not dropped.trainable


def mixed_sets() -> list[TaskSet]:
    return [
        task_set(tasks(7, "a"), only_odd_teach, name="a", weight=2),
        task_set(tasks(5, "b"), only_odd_teach, name="b"),
    ]


@pytest.mark.parametrize("stopped_after", [1, 2, 3])
async def test_a_resumed_run_plays_what_it_would_have_played(stopped_after: int, tmp_path: Path) -> None:
    config = rl(tasks=3, refill={"rounds": 2}, attempts=3, keep_attempts=2)
    whole = [seen(p) for p in await play_steps(Steps(mixed_sets(), config, 9), range(5))]
    steps = Steps(mixed_sets(), config, 9)
    await play_steps(steps, range(stopped_after))
    state = json.loads(json.dumps(steps.controller.save(tmp_path)))
    await steps.controller.next_batch()  # and is stopped before it is learned from
    untrained = json.loads(json.dumps(steps.controller.save(tmp_path)))
    assert untrained == state
    again = Steps(mixed_sets(), config, 9)
    again.controller.load(tmp_path, state)
    assert [seen(p) for p in await play_steps(again, range(stopped_after, 5))] == whole[stopped_after:]
    for _ in range(2):  # a batch that is not learned from is played again
        assert seen((await steps.controller.next_batch()).played) == whole[stopped_after]


async def test_a_cancelled_step_leaves_the_controller_as_it_was(tmp_path: Path) -> None:
    limit, hanging = 10_000, asyncio.Event()

    def seconds(tokens: int) -> float:
        if len(fake.calls) <= limit:
            return 0.0
        hanging.set()
        return 60.0

    fake = engine(only_odd_teach, seconds=seconds)
    config = rl(refill={"rounds": 3})
    steps = Steps([task_set(tasks(7), fake)], config, 2)
    whole = await play_steps(Steps([task_set(tasks(7), only_odd_teach)], config, 2), range(2))
    await steps.play(0, {})
    state = steps.controller.save(tmp_path)
    limit = len(fake.calls) + 8  # the whole first round, so that it hangs among the refills
    running = asyncio.create_task(steps.play(1, {}))
    await hanging.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert steps.controller.save(tmp_path) == state and not fake.in_flight and not fake.sessions
    limit = 10_000
    assert seen(await steps.play(1, {})) == seen(whole[1])


async def test_an_error_in_one_set_ends_the_others() -> None:
    async def impossible(answer: str) -> float:
        raise ConfigError("no such judge")

    fake = engine(first_is_right, seconds=lambda tokens: 30.0)
    sets = [
        task_set(tasks(2), fake, name="slow"),
        task_set(tasks(2), name="wrong", rewards=[ludus.reward(impossible)]),
    ]
    with pytest.raises(ConfigError, match="no such judge"):
        await asyncio.wait_for(Steps(sets, rl(), 0).play(0, {}), 20)
    assert not fake.in_flight


async def test_resampling_keeps_some_of_each_and_masks_follow_them() -> None:
    """Of 8 attempts, those divisible by 3 are right; every third is too long, and is masked."""

    def words(task: str, attempt: int) -> str:
        if attempt % 3 == 2:
            return "x" * 99
        return "right" if attempt % 3 == 0 else "wrong"

    one = task_set(tasks(6), words, budgets={"max_turn_tokens": 20})
    config = rl(attempts=8, keep_attempts=4, broken={"over_length": "mask"})
    played = await Steps([one], config, 0).play(0, {})
    masked = {
        (number, place)
        for number, group in enumerate(played.groups)
        for place, t in enumerate(group.trajectories)
        if t.stop is StopReason.MAX_TOKENS
    }
    assert played.masked == masked and masked
    assert played.metrics["masked"] == played.metrics["broken/over_length"] == len(masked)
    for group in played.groups:
        assert len(group.trajectories) == 4
        assert sum(t.reward == 1.0 for t in group.trajectories) == 2  # 3 of 8 were right
    assert played.metrics["resampled"] == 16 == sum(len(g.trajectories) for g in played.dropped)
    whole = {id(t) for g in [*played.groups, *played.dropped] for t in g.trajectories}
    assert len(whole) == 32


async def test_resampling_draws_anew_in_every_step() -> None:
    steps = Steps([task_set(tasks(1))], rl(tasks=1, attempts=4, keep_attempts=2), 0)
    kept = [[t.attempt for t in p.groups[0].trajectories] for p in await play_steps(steps, range(8))]
    assert len({tuple(attempts) for attempts in kept}) > 1


async def test_resampling_leaves_failed_attempts_where_they_are() -> None:
    def words(task: str, attempt: int) -> str:
        if attempt == 1:
            raise EngineError("gone", retriable=False)
        return first_is_right(task, attempt)

    config = rl(tasks=1, attempts=5, keep_attempts=2)
    played = await Steps([task_set(tasks(1), words)], config, 0).play(0, {})
    [group] = played.groups
    assert len(group.trainable) == 2 and [t.attempt for t in group.trajectories if t.failure] == [1]


async def test_untidy_successes_are_kept_less_often() -> None:
    @ludus.tool
    async def add(a: int) -> int:
        """Add."""
        return a

    said: dict[tuple[str, int], int] = {}

    def words(task: str, attempt: int) -> str:
        """Attempt 0 is clean, attempt 1 calls wrongly first; both are right. The third is wrong."""
        turn = said[task, attempt] = said.get((task, attempt), 0) + 1
        if turn == 1:
            return called("add", a=1) if attempt != 1 else called("add", b=1)
        return "wrong" if attempt == 2 else "right"

    one = task_set(tasks(60), words, tools=[add])
    played = await Steps([one], rl(tasks=60, attempts=3, keep_attempts=2), 0).play(0, {})
    right_ones = [t.attempt for g in played.groups for t in g.trajectories if t.reward == 1.0]
    assert len(right_ones) == 60 and right_ones.count(0) > 45  # 11 of 12 are expected


async def test_length_has_its_price_and_success_stays_success() -> None:
    @ludus.reward(name="starts")
    def starts(answer: str) -> float:
        return float(answer.startswith("right"))

    def words(task: str, attempt: int) -> str:
        return ("right", "right" + "x" * 9, "right" + "x" * 40)[attempt]

    one = task_set(tasks(1), words, rewards=[starts])
    config = rl(tasks=1, attempts=3, overlong={"longest": 20, "buffer": 10, "price": 0.5})
    played = await Steps([one], config, 0).play(0, {})
    lengths = [sum(map(len, (a.tokens for a in t.actions))) for t in played.groups[0].trajectories]
    assert lengths == [6, 15, 46]
    assert [t.reward for t in played.groups[0].trajectories] == [1.0, 0.75, 0.5]
    assert [t.rewards["overlong"] for t in played.groups[0].trajectories] == [0.0, -0.25, -0.5]
    assert all(ludus.core.trajectory.is_success(t) for t in played.groups[0].trajectories)
    assert all(t.rewards["starts"] == 1.0 for t in played.groups[0].trajectories)


async def test_penalties_are_added_and_shown() -> None:
    one = task_set(tasks(1), lambda task, attempt: ("right", "")[attempt])
    config = rl(tasks=1, broken={"void_turn": -0.5, "tool_error": -3})
    played = await Steps([one], config, 0).play(0, {})
    assert [t.reward for t in played.groups[0].trajectories] == [1.0, -0.5]
    assert [t.rewards["broken"] for t in played.groups[0].trajectories] == [0.0, -0.5]
    taken = task_set(tasks(1), rewards=[right.using(name="broken")])
    with pytest.raises(ConfigError, match="'broken'"):
        await Steps([taken], config, 0).play(0, {})


async def test_a_group_in_which_all_are_masked_teaches_nothing() -> None:
    @ludus.reward
    def by_seed(trajectory: Trajectory) -> float:
        return trajectory.seed / 2**63

    one = task_set(tasks(3), lambda task, attempt: "", rewards=[by_seed])
    config = rl(tasks=1, broken={"void_turn": "mask"}, refill={"rounds": 1})
    played = await Steps([one], config, 0).play(0, {})
    assert played.metrics["without_signal"] == 1 and len(played.masked) == 2


async def test_a_curriculum_moves_budgets_and_difficulty() -> None:
    @ludus.tool
    async def look() -> str:
        """Look."""
        return "nothing"

    given = [*tasks(2, "easy", difficulty=1), *tasks(6, "hard", difficulty=2)]
    one = task_set(given, lambda task, attempt: called("look"), tools=[look], budgets={"max_turns": 9})
    steps = Steps([one], rl(), 0)
    short = await steps.play(0, {"budgets.max_turns": 2.0, "tasks.difficulty": 1})
    assert {t.turns for g in short.groups for t in g.trajectories} == {2}
    assert {i[:4] for i in ids(short)} == {"easy"}
    longer = await steps.play(1, {"budgets.max_turns": 3.7, "tasks.difficulty": 2})
    assert {t.turns for g in longer.groups for t in g.trajectories} == {3}
    assert "hard" in {i[:4] for i in ids(longer)}
    assert one.rollout.budgets.max_turns == 9
    with pytest.raises(ConfigError, match=r"the curriculum.*\n.*max_turns"):
        await steps.play(2, {"budgets.max_turns": 0})


@ludus.reward
def strict(answer: str, *, strictness: float = 0.25) -> float:
    return strictness


class Stern:
    """A reward that is a class, and takes the setting when it is asked."""

    name = "stern"

    async def score(
        self, trajectory: Trajectory, task: Task, envs: Any, strictness: float = 0.5
    ) -> float:
        return strictness


@ludus.reward(name="well_formed")
def well_formed() -> float:
    return 1.0


async def rewards_at(values: dict[str, float], *rewards: Any) -> list[dict[str, float]]:
    steps = Steps([task_set(tasks(1), rewards=rewards)], rl(tasks=1), 0)
    played = await steps.play(0, values)
    return [t.rewards for t in played.groups[0].trajectories]


async def test_strictness_reaches_the_rewards_that_take_it() -> None:
    rewards = [FormatGate(well_formed, strict), Stern(), right]
    [before, _] = await rewards_at({}, *rewards)
    assert before["strict"] == before["format_gate"] == 0.25 and before["stern"] == 0.5
    [after, _] = await rewards_at({"rewards.strictness": 0.75}, *rewards)
    assert after["strict"] == after["format_gate"] == after["stern"] == 0.75
    assert after["success"] == 1.0
    with pytest.raises(ConfigError, match="no reward takes it"):
        await rewards_at({"rewards.strictness": 0.75}, right)
    assert strict.options == {}


async def test_strictness_reaches_turn_and_group_rewards() -> None:
    @ludus.reward(per_turn=True)
    def each(trajectory: Trajectory, *, strictness: float = 0.0) -> list[float]:
        return [strictness] * trajectory.turns

    @ludus.group_reward
    def together(group: Group, *, strictness: float = 0.0) -> list[float]:
        return [10 * strictness for _ in group.trajectories]

    one = task_set(tasks(1), rewards=[right, each], group_rewards=[together])
    played = await Steps([one], rl(tasks=1), 0).play(0, {"rewards.strictness": 0.5})
    for trajectory in played.groups[0].trajectories:
        assert trajectory.rewards == {"success": 1.0, "each": 0.5, "together": 5.0}
        assert trajectory.reward == 6.5
