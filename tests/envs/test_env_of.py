"""`Env.of`: an environment from a generator function."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from guessing import closed, echo, guess

from ludus.core import ConfigError, Task
from ludus.envs import Env, EnvPool, Step, env_name, reset_env, step_env, tools_of
from ludus.rollouts import check_env

TASK = Task.of("Play.", id="t", envs={"guess": {"secret": 3}})


async def test_it_is_an_environment_like_any_other() -> None:
    env = guess()
    assert isinstance(env, Env) and env_name(guess) == "guess"
    assert (await reset_env(env, TASK, "guess")).text == "Which number?"
    steps = [await step_env(env, action) for action in ("1", "", "7", "3", "3")]
    assert [one.observation.text for one in steps] == [
        *("higher", "That is no number.", "lower", "The episode is over.", "The episode is over."),
    ]
    assert [one.reward for one in steps] == [None, -0.1, None, 0.25, None]
    assert [one.terminated for one in steps] == [False, False, False, True, True]
    assert (await reset_env(env, TASK, "guess")).text == "Which number?"
    assert (await step_env(env, "3")).reward == 1.0
    [tool] = await tools_of(env, "guess")
    assert tool.spec.name == "step" and tool.spec.description == "Guess a number."
    assert tool.spec.parameters["properties"]["action"]["description"] == "A number from 1 to 9."
    with pytest.raises(ConfigError, match="'level'"):
        await reset_env(env, Task.of("x", envs={"guess": {"level": 1}}), "guess")


async def test_async_generators_end_by_a_last_step_or_by_ending_and_clean_up() -> None:
    closed.clear()
    env = echo()
    assert (await reset_env(env, TASK)).text == "task t"
    assert (await step_env(env, "hello")).observation.text == "hello"
    last = await step_env(env, "end")
    assert (last.observation.text, last.reward, last.terminated) == ("bye", 1.0, True)
    assert (await step_env(env, "more")).terminated
    await reset_env(env, Task.of("x", id="second"))
    await reset_env(env, Task.of("x", id="third"))
    assert "second" in closed, "a reset ends what was going on"
    await env.close()
    await env.close()
    assert closed.count("third") == 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, Step("The episode is over.", None, True)),
        (1, Step("The episode is over.", 1.0, True)),
        ("won", Step("won", None, True)),
        (Step("won", 2.0), Step("won", 2.0, True)),
        (Step("late", 2.0, truncated=True), Step("late", 2.0, False, True)),
    ],
)
async def test_what_a_function_returns_is_its_last_step(value: object, expected: Step) -> None:
    def script(task: Task) -> Iterator[str]:
        yield "go"
        return value

    env = Env.of(script)()
    await reset_env(env, TASK)
    step = await step_env(env, "x")
    assert (step.observation.text, step.reward) == (expected.observation, expected.reward)
    assert (step.terminated, step.truncated) == (expected.terminated, expected.truncated)


async def test_what_is_no_such_function_is_refused() -> None:
    def plain(task: Task) -> str:
        return "x"

    def nothing() -> Iterator[str]:
        yield "x"

    def silent(task: Task) -> Iterator[str]:
        yield from ()

    with pytest.raises(ConfigError, match="plain is not: `action = yield observation`"):
        Env.of(plain)
    with pytest.raises(ConfigError, match="the first one is the task"):
        Env.of(nothing)
    with pytest.raises(ConfigError, match="ended before it yielded"):
        await reset_env(Env.of(silent)(), TASK)


async def test_the_checker_takes_it_and_a_process_can_hold_it() -> None:
    assert await check_env(guess, TASK, ["1", "", "3"], name="guess") == []
    pool = EnvPool(guess, name="guess", size=1, isolation="process")
    async with pool.lease("e", TASK) as env:
        assert (await step_env(env, "3")).reward == 1.0
    await pool.close()
