"""Groups, places, order, concurrency, and that nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from rollout_parts import assert_exact, attempt_of, called, fake, play, play_one, rollout, tokenizer

from ludus.chat import Renderer, load_format
from ludus.core import (
    ConfigError,
    Message,
    Sampling,
    StopReason,
    Task,
    ToolContext,
    ToolResult,
    ToolSpec,
    Trajectory,
)
from ludus.envs import Env, EnvPool, Step
from ludus.rewards import reward
from ludus.rollouts.rollout import opening_messages
from ludus.tools import tool


class Counter(Env):
    """Counts; it starts from what the task says."""

    async def reset(self, task: Task, start: int = 0) -> str:
        self.count, self.is_closed = start, False
        return f"The counter shows {start}."

    @tool
    async def increase(self) -> str:
        """Count one up."""
        self.count += 1
        return f"now {self.count}"

    def close(self) -> None:
        self.is_closed = True


def tasks(count: int) -> list[Task]:
    return [Task.of(f"Task {n}.", id=f"t{n}") for n in range(count)]


def no_other_tasks() -> bool:
    return asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_group_holds_every_attempt_with_a_seed_of_its_own() -> None:
    playing = rollout(lambda *_: "done", attempts=4)
    groups = await play(playing, *tasks(3), seed=7)
    assert [group.task.id for group in groups] == ["t0", "t1", "t2"]
    assert [[t.attempt for t in g.trajectories] for g in groups] == [[0, 1, 2, 3]] * 3
    played = [t for group in groups for t in group.trajectories]
    assert len({t.seed for t in played}) == 12
    assert len({call.sampling.seed for call in fake(playing).calls}) == 12
    for trajectory in played:
        assert_exact(trajectory, fake(playing))
    again = await play(rollout(lambda *_: "done", attempts=4), *tasks(3), seed=7)
    assert [t.logprobs for g in again for t in g.trajectories] == [t.logprobs for t in played]
    other = await play(rollout(lambda *_: "done", attempts=4), *tasks(3), seed=8)
    assert not {t.seed for g in other for t in g.trajectories} & {t.seed for t in played}


async def test_a_task_that_comes_twice_gets_new_attempts() -> None:
    [task] = tasks(1)
    groups = await play(rollout(lambda *_: "done", attempts=2), task, task)
    assert [[t.attempt for t in group.trajectories] for group in groups] == [[0, 1], [2, 3]]
    assert len({t.seed for group in groups for t in group.trajectories}) == 4


async def test_turns_draw_differently_and_ask_for_what_the_budget_leaves() -> None:
    @tool
    def look() -> str:
        """Look."""
        return "nothing"

    playing = rollout(
        [called("look"), "done"],
        tools=[look],
        budgets={"max_turn_tokens": 70},
        sampling=Sampling(temperature=0.7, stop=("STOP",)),
    )
    await play_one(playing)
    first, second = (call.sampling for call in fake(playing).calls)
    assert first.seed != second.seed
    assert first.temperature == 0.7 and "STOP" in first.stop
    assert first.max_tokens == 70
    assert set(playing.renderer.tokenizer.stop_tokens) <= set(first.stop_tokens)


@pytest.mark.parametrize("cap", [1, 3, 100])
async def test_no_more_than_the_cap_are_in_flight(cap: int) -> None:
    now, most = 0, 0

    class Watched(Counter):
        async def reset(self, task: Task) -> None:
            nonlocal now, most
            now += 1
            most = max(most, now)

    @reward
    async def leave(env: Any) -> float:
        nonlocal now
        await asyncio.sleep(0)
        now -= 1
        return 1.0

    pool = EnvPool(Watched, name="env", size=50)
    playing = rollout(
        lambda *_: "done", rewards=[leave], pools={"env": pool}, attempts=4, max_in_flight=cap
    )
    groups = await play(playing, *tasks(5))
    assert sum(len(group.trainable) for group in groups) == 20
    assert most == min(cap, 20)
    await pool.close()


async def test_calls_of_one_turn_run_at_the_same_time() -> None:
    """Each call waits for the other: one after the other, they would wait for ever."""
    arrived: dict[str, asyncio.Event] = {"a": asyncio.Event(), "b": asyncio.Event()}

    @tool
    async def meet(me: str, other: str) -> str:
        """Wait for the other."""
        arrived[me].set()
        await arrived[other].wait()
        return f"{me} met {other}"

    said = called("meet", me="a", other="b") + called("meet", me="b", other="a")
    trajectory = await play_one(rollout([said, "done"], tools=[meet]))
    results = [m.content for m in trajectory.messages if m.role == "tool"]
    assert results == ["a met b", "b met a"], "results come in the order of the calls"


async def test_episodes_do_not_wait_for_each_other() -> None:
    """The first task's tool waits for the last task's answer: in lock-step this would never end."""
    last_answered = asyncio.Event()

    @tool
    async def wait() -> str:
        """Wait."""
        await last_answered.wait()
        return "waited"

    @reward
    async def note(task: Task) -> float:
        if task.id == "t2":
            last_answered.set()
        return 1.0

    def script(tokens: list[int], sampling: Sampling, session: str | None) -> str:
        assert session is not None
        waits = "/t0/" in session and session not in asked
        asked.add(session)
        return called("wait") if waits else "done"

    asked: set[str] = set()
    playing = rollout(script, tools=[wait], rewards=[note])
    order = [group.task.id async for group in playing.groups(tasks(3), 0)]
    assert order[-1] == "t0", "groups arrive as they finish"
    assert sorted(order) == ["t0", "t1", "t2"]


@pytest.mark.parametrize(
    ("where", "how"),
    [(where, how) for where in ("engine", "tool", "reward") for how in ("close", "cancel")]
    + [("pool", "cancel")],  # while the pool is taken no group ends, so there is nothing to close after
)
async def test_stopping_releases_everything(where: str, how: str) -> None:
    reached = asyncio.Event()

    async def hang() -> None:
        reached.set()
        await asyncio.Event().wait()

    @tool(timeout=None)
    async def wait() -> str:
        """Wait."""
        await hang()
        return "never"

    @reward(timeout=None)
    async def slow(task: Task, env: Any) -> float:
        if where == "reward" and task.id != "t0":
            await hang()
        return 1.0

    def script(tokens: list[int], sampling: Sampling, session: str | None) -> str:
        assert session is not None
        if "/t0/" in session:
            return "done"
        if where == "engine":
            reached.set()
            return "a longer reply"
        return called("wait") if where == "tool" else "done"

    made: list[Counter] = []

    def factory() -> Counter:
        made.append(Counter())
        return made[-1]

    pool = EnvPool(factory, name="env", size=1 if where == "pool" else 8)
    playing = rollout(
        script,
        tools=[wait],
        rewards=[slow],
        pools={"env": pool},
        attempts=2,
        # by the reply's length: t0 must end whichever episode asks the engine first
        engine={"seconds": lambda produced: 1e6 if where == "engine" and produced > 8 else 0.0},
    )
    if where == "pool":
        held = await pool.acquire("somebody else", Task.of("x"))
        reached.set()
        assert held.env is made[0]

    async def consume() -> None:
        async for _ in playing.groups(tasks(4), 0):
            pass

    if how == "cancel":
        consumer = asyncio.create_task(consume())
        await reached.wait()
        await asyncio.sleep(0.01)
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
    else:
        groups = playing.groups(tasks(4), 0)
        first = await anext(groups)
        assert first.task.id == "t0"
        await reached.wait()
        await groups.aclose()  # type: ignore[attr-defined]
    if where == "pool":
        await pool.release("somebody else")
    assert fake(playing).sessions == {} and fake(playing).in_flight == 0
    assert pool.stats.in_use == 0 and pool.stats.waiting == 0
    await pool.close()
    assert all(env.is_closed for env in made if hasattr(env, "is_closed"))
    assert pool.stats.created == pool.stats.closed
    assert no_other_tasks()


async def test_rewards_see_the_environment_before_it_is_given_back() -> None:
    @reward
    async def shown(env: Counter) -> float:
        assert not env.is_closed
        return float(env.count)

    pool = EnvPool(Counter, name="counter", size=1)
    playing = rollout(
        lambda tokens, sampling, session: replies[session].pop(),
        rewards=[shown],
        pools={"counter": pool},
        attempts=2,
        max_in_flight=2,
    )
    replies = {
        f"0/t/{attempt}/0": ["done", *[called("increase")] * (attempt + 1)] for attempt in range(2)
    }
    task = Task.of("Count.", id="t", envs={"counter": {"start": 10}})
    [group] = await play(playing, task)
    assert [t.reward for t in group.trajectories] == [11.0, 12.0]
    assert pool.stats.created == 1, "the instance was reused, and reset"
    assert pool.stats.in_use == 0
    await pool.close()


async def test_the_first_observation_ends_the_last_user_message() -> None:
    pool = EnvPool(Counter, name="counter")
    playing = rollout(["done"], pools={"counter": pool})
    trajectory = await play_one(playing, Task.of("Count.", id="t", system="Be brief."))
    assert [(m.role, m.content) for m in trajectory.messages] == [
        ("system", "Be brief."),
        ("user", "Count.\n\nThe counter shows 0."),
        ("assistant", "done"),
    ]
    read = playing.renderer.tokenizer.decode(fake(playing).calls[0].consumed)
    assert "Count.\n\nThe counter shows 0.<|im_end|>" in read
    await pool.close()


def test_an_observation_without_a_user_message_becomes_one() -> None:
    system = Message("system", "s")
    assert opening_messages([system], ["seen"]) == [system, Message("user", "seen")]
    assert opening_messages([system], []) == [system]
    assert opening_messages([], ["a", "b"]) == [Message("user", "a\n\nb")]


async def test_an_unknown_environment_is_a_mistake_in_the_recipe() -> None:
    playing = rollout(["done"], pools={"counter": EnvPool(Counter, name="counter")})
    with pytest.raises(ConfigError, match=r"'cuonter'(.|\n)*counter"):
        await play_one(playing, Task.of("x", id="t", envs={"cuonter": {}}))


async def test_two_environments_in_any_order_never_wait_for_each_other() -> None:
    class Late(EnvPool):
        async def acquire(self, episode: str, task: Task) -> Any:
            lease = await super().acquire(episode, task)
            await asyncio.sleep(0)
            return lease

    pools = {name: Late(Bare, name=name, size=1, max_wait=20) for name in ("a", "b")}
    playing = rollout(lambda *_: "done", pools=pools)
    groups = await play(
        playing,
        Task.of("x", id="1", envs={"a": {}, "b": {}}),
        Task.of("y", id="2", envs={"b": {}, "a": {}}),
    )
    assert [len(group.trainable) for group in groups] == [1, 1]
    for pool in pools.values():
        await pool.close()


class Bare(Env):
    """Nothing to do, and nothing to see."""


class Hangman(Env):
    """Takes plain text."""

    def reset(self, task: Task) -> str:
        self.word, self.found = str(task.target), set[str]()
        return "_" * len(self.word)

    def step(self, action: str) -> Step:
        self.found.add(action.strip())
        shown = "".join(letter if letter in self.found else "_" for letter in self.word)
        return Step(shown, reward=float(action.strip() in self.word), terminated="_" not in shown)


async def test_plain_text_actions_are_steps_of_the_environment() -> None:
    by = Renderer(tokenizer("bytes"), load_format("plain"))
    pool = EnvPool(Hangman, name="hangman")
    playing = rollout(["a", "z", "b"], rewards=[], rendered_by=by, pools={"hangman": pool})
    trajectory = await play_one(playing, Task.of("Guess.", target="ab", id="t"))
    assert trajectory.stop is StopReason.TERMINATED
    assert [action.reward for action in trajectory.actions] == [1.0, 0.0, 1.0]
    shown = [m.content for m in trajectory.messages if m.role == "tool"]
    assert shown == ["a_", "a_", "ab"]
    assert trajectory.reward == 2.0
    await pool.close()


async def test_what_is_wrong_with_the_recipe_is_an_error_and_not_a_statistic() -> None:
    @tool
    def peek(env: Counter) -> str:
        """Look at the counter."""
        return str(env.count)

    playing = rollout(lambda *_: "done", tools=[peek], attempts=3)
    with pytest.raises(ConfigError, match="needs an environment of type Counter"):
        await play(playing, *tasks(3))
    assert fake(playing).sessions == {} and no_other_tasks()


class Flaky:
    """A tool set that cannot be closed."""

    async def open(self, context: ToolContext) -> None:
        pass

    async def list(self, context: ToolContext) -> Sequence[ToolSpec]:
        return []

    async def call(self, call: Any, context: ToolContext) -> ToolResult:
        return ToolResult("")

    async def close(self, context: ToolContext) -> None:
        raise ConnectionError("already gone")


async def test_tools_that_cannot_be_closed_do_not_undo_a_scored_episode() -> None:
    trajectory = await play_one(rollout(["done"], tools=Flaky()))
    assert trajectory.is_trainable and trajectory.reward == 1.0


async def test_where_the_time_went_is_written_down() -> None:
    trajectory: Trajectory = await play_one(rollout(["done"]))
    assert set(trajectory.seconds) == {"generate", "tools", "rewards", "total"}
    assert trajectory.seconds["total"] >= trajectory.seconds["generate"]


async def test_attempts_can_be_told_apart_by_their_session() -> None:
    playing = rollout(lambda tokens, sampling, session: f"I am {attempt_of(session)}", attempts=3)
    [group] = await play(playing)
    assert [t.answer for t in group.trajectories] == ["I am 0", "I am 1", "I am 2"]


async def test_a_prompt_that_leaves_no_room_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    playing = rollout(lambda *_: "done", budgets={"max_tokens": 100}, attempts=4)
    [group] = await play(playing, Task.of("far too long " * 50, id="long"))
    assert [t.turns for t in group.trajectories] == [0] * 4
    [told] = [record.message for record in caplog.records if "task long" in record.message]
    assert "budgets.max_tokens = 100" in told
