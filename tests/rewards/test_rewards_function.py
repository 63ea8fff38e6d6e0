"""`@reward`: what it takes, what it may return, and what happens when it breaks."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from ludus.core import Boundary, ConfigError, Failure, InfraError, MissingExtraError
from ludus.rewards import FunctionReward, FunctionTurnReward, Scorer, build_reward, reward


async def scored(function, trajectory, envs=None):
    made = function if hasattr(function, "score") else FunctionReward(function)
    return await made.score(trajectory, trajectory.task, envs or {})


def test_a_decorated_function_is_still_that_function():
    @reward
    def half(answer: str) -> float:
        """Half of it."""
        return len(answer) / 2

    assert half("abcd") == half(answer="abcd") == 2.0
    assert (half.name, half.weight, half.__doc__) == ("half", 1.0, "Half of it.")

    @reward(name="other", weight=0.25, timeout=3, retries=1)
    async def later(answer):
        return 1

    assert asyncio.run(later("x")) == 1
    assert (later.name, later.weight, later.timeout, later.retries) == ("other", 0.25, 3, 1)


async def test_parameters_are_matched_by_name_in_any_order_and_number(episode):
    trajectory = episode("Rome", "Paris")
    seen = {}

    @reward
    def everything(messages, env, target, answer, envs, task, trajectory):
        seen.update({k: v for k, v in locals().items() if k != "seen"})
        return 1

    assert await scored(everything, trajectory, {"shop": "the env"}) == {"everything": 1.0}
    assert seen == {
        "messages": trajectory.messages,
        "env": "the env",
        "target": "Paris",
        "answer": "Rome",
        "envs": {"shop": "the env"},
        "task": trajectory.task,
        "trajectory": trajectory,
    }

    @reward
    def nothing():
        return True

    assert await scored(nothing, trajectory) == {"nothing": 1.0}


def test_a_parameter_that_nothing_fills_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'anwser'.*trajectory, task, envs, env, answer, target"):

        @reward
        def typo(anwser):
            return 1

    with pytest.raises(ConfigError, match="'group'"):
        reward(lambda group: 1, name="x")
    with pytest.raises(ConfigError, match="name its parameters"):
        reward(lambda **kwargs: 1, name="x")
    with pytest.raises(ConfigError, match="'anwser'"):
        reward(lambda anwser="": 1, name="x")
    one_episode = r"one episode, not a batch.*docs/coming_from\.md"
    for batched in (
        lambda completions: 1,
        lambda prompts: 1,
        lambda completion_ids: 1,
        lambda answer, **kwargs: 1,
    ):
        with pytest.raises(ConfigError, match=one_episode):
            reward(batched, name="x")
    with pytest.raises(ConfigError, match=r"target, messages\. An option of its own"):
        reward(lambda anwser: 1, name="x")
    with pytest.raises(ConfigError, match=r"positional-only"):
        reward(lambda answer, /: 1, name="x")


@pytest.mark.parametrize("name", ["", "total", "tools", "<lambda>"])
def test_names_that_cannot_be_used_are_refused(name):
    with pytest.raises(ConfigError, match=r"name|called"):
        reward(lambda: 1, name=name)


async def test_options_are_keyword_only_and_set_by_using(episode):
    @reward
    def near(answer, *, scale=1.0):
        return scale

    assert await scored(near.using(scale=3, weight=2, name="far"), episode()) == {"far": 3.0}
    assert near.using(scale=3)("x") == 3
    assert near("x") == 1.0 and near.options == {}
    with pytest.raises(ConfigError, match=r"no option 'sclae'; it has: .*scale"):
        near.using(sclae=2)
    with pytest.raises(ConfigError, match="cannot be called 'weight'"):
        reward(lambda *, weight=1: weight, name="x")


async def test_an_episode_without_an_answer_is_scored_as_an_empty_one(episode):
    @reward
    def shouting(answer):
        return float(answer.isupper())

    assert await scored(shouting, episode(answer=None)) == {"shouting": 0.0}


async def test_env_needs_exactly_one(episode):
    @reward
    def state(env):
        return 1

    for envs in ({}, {"a": 1, "b": 2}):
        with pytest.raises(InfraError, match="exactly one environment"):
            await scored(state, episode(), envs)


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        (1, {"r": 1.0}),
        (True, {"r": 1.0}),
        (-0.5, {"r": -0.5}),
        (None, {}),
        ({}, {}),
        (Fraction(1, 4), {"r": 0.25}),
        (np.float32(0.5), {"r": 0.5}),
        (np.bool_(True), {"r": 1.0}),
        (torch.tensor(0.5), {"r": 0.5}),
        ({"a": 1, "b": 2.5}, {"r": 3.5, "a": 1.0, "b": 2.5}),
        ({"a": 1, "b": None}, {"r": 1.0, "a": 1.0}),
        ({"a": None}, {}),
        ({"r": 0.5, "a": 1}, {"r": 0.5, "a": 1.0}),
        ({"total": 0.5, "a": 1}, {"r": 0.5, "a": 1.0}),
        ({"total": None, "a": 1}, {"a": 1.0}),
        ({"reward": 0.5, "f1": 0.5, "em": 0.0}, {"r": 0.5, "f1": 0.5, "em": 0.0}),
        ({"reward": None, "f1": 0.5}, {"f1": 0.5}),
        ({"score": 0.5}, {"r": 0.5, "score": 0.5}),
    ],
)
async def test_what_may_be_returned(episode, value, parts):
    trajectory = episode()
    await Scorer([reward(lambda: value, name="r")]).score(trajectory)
    assert (trajectory.rewards, trajectory.reward) == (parts, parts.get("r"))
    assert await scored(reward(lambda: value, name="r"), episode()) == parts


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        "1",
        [1.0],
        (1,),
        object(),
        10**400,
        1j,
        np.zeros(3),
        {"a": math.nan},
        {"a": "good"},
        {"a": {"b": 1}},
        {1: 1.0},
        {"": 1.0},
        {"tools": 1.0},
        {"total": 1.0, "r": 2.0},
        {"a": 1e308, "b": 1e308},
        np.float64("nan"),
    ],
)
async def test_what_is_no_score_fails_the_episode_and_is_never_zero(episode, value):
    returned = reward(lambda: value, name="r", retries=3)
    with pytest.raises(InfraError) as caught:
        await scored(returned, episode())
    assert caught.value.boundary is Boundary.REWARD
    place = f"{Path(__file__).name}:{returned.function.__code__.co_firstlineno} in <lambda>)"
    assert "'r'" in str(caught.value) and str(caught.value).endswith(place)
    assert (caught.value.attempts, caught.value.retriable) == (1, False)


@pytest.mark.parametrize("is_async", [False, True])
async def test_an_exception_names_the_reward_and_the_cause(episode, is_async):
    def broken(answer):
        raise KeyError("judge")

    async def broken_later(answer):
        raise KeyError("judge")

    made = reward(broken_later if is_async else broken, name="judge")
    with pytest.raises(InfraError, match="'judge' failed: KeyError: 'judge'") as caught:
        await scored(made, episode())
    failure = Failure.of(caught.value, Boundary.AGENT)
    assert (failure.boundary, failure.kind, failure.attempts) == (Boundary.REWARD, "KeyError", 1)


async def test_even_an_exit_is_a_failure_and_ends_nothing(episode):
    async def leaves():
        raise SystemExit(3)

    for function in (lambda: exit(3), leaves):
        with pytest.raises(InfraError, match="SystemExit"):
            await scored(reward(function, name="leaves"), episode())


async def test_what_is_wrong_with_the_recipe_is_not_charged_to_an_episode(episode):
    def needs():
        raise MissingExtraError("judge", "judges", "this")

    with pytest.raises(MissingExtraError):
        await scored(reward(needs), episode())


async def test_a_failure_of_another_boundary_keeps_it(episode):
    def lost():
        raise InfraError(Boundary.SANDBOX, "the sandbox is gone")

    with pytest.raises(InfraError, match="gone") as caught:
        await scored(reward(lost, retries=1), episode())
    assert (caught.value.boundary, caught.value.attempts) == (Boundary.SANDBOX, 2)


async def test_hanging_rewards_time_out_and_block_nobody(episode):
    release = threading.Event()

    def hangs():
        release.wait(30)

    async def hangs_too():
        await asyncio.sleep(30)

    try:
        for function in (hangs, hangs_too):
            with pytest.raises(InfraError, match=r"TimeoutError|DeadlineExceeded") as caught:
                await scored(reward(function, timeout=0.05), episode())
            assert "0.05 seconds" in str(caught.value)
            assert caught.value.retriable
    finally:
        release.set()


@pytest.mark.parametrize(
    ("error", "retries", "attempts"),
    [(ConnectionResetError, 0, 3), (ConnectionError, 4, 5), (ValueError, 0, 1), (ValueError, 1, 2)],
)
async def test_retries(episode, error, retries, attempts):
    calls = []

    def flaky():
        calls.append(1)
        raise error("again")

    with pytest.raises(InfraError) as caught:
        await scored(reward(flaky, retries=retries), episode())
    assert (len(calls), caught.value.attempts) == (attempts, attempts)


async def test_a_retry_that_works_is_a_score(episode):
    calls = []

    async def flaky():
        calls.append(1)
        if len(calls) < 3:
            raise ConnectionError("down")
        return 0.5

    assert await scored(reward(flaky), episode()) == {"flaky": 0.5}


async def test_sync_functions_run_off_the_loop_and_beside_each_other(episode):
    barrier = threading.Barrier(4, timeout=20)

    @reward
    def meets():
        barrier.wait()
        return float(threading.current_thread() is not threading.main_thread())

    trajectory = episode()
    results = await asyncio.gather(*(scored(meets, trajectory) for _ in range(4)))
    assert results == [{"meets": 1.0}] * 4


async def test_a_sync_function_may_return_a_coroutine_and_objects_may_be_callable(episode):
    async def inner():
        return 0.25

    class Judge:
        async def __call__(self, answer):
            return len(answer)

    assert await scored(reward(lambda: inner(), name="r"), episode()) == {"r": 0.25}
    assert await scored(reward(Judge(), name="judge"), episode("abc")) == {"judge": 3.0}


async def test_cancellation_is_not_a_failure(episode):
    started = asyncio.Event()

    @reward
    async def waits():
        started.set()
        await asyncio.sleep(30)

    task = asyncio.create_task(scored(waits, episode()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_per_turn_rewards_return_one_score_for_each_action(episode):
    @reward(per_turn=True)
    def brevity(trajectory):
        return [None if action.calls else 0.5 for action in trajectory.actions]

    assert isinstance(brevity, FunctionTurnReward)
    trajectory = episode(turns=[["search"], []])
    assert await brevity.score_turns(trajectory, trajectory.task, {}) == [None, 0.5]


@pytest.mark.parametrize(
    "value", [[1.0], [1.0] * 3, 1.0, None, "ab", {"a": 1}, [1.0, math.nan], [1, "2"]]
)
async def test_per_turn_values_that_do_not_fit_fail_the_episode(episode, value):
    trajectory = episode(turns=[["search"], []])
    with pytest.raises(InfraError, match="'r' failed"):
        await reward(per_turn=True, name="r")(lambda: value).score_turns(trajectory, trajectory.task, {})


def test_settings_that_make_no_sense_are_refused():
    for settings in ({"timeout": 0}, {"retries": -1}, {"weight": math.nan}, {"weight": "2"}):
        with pytest.raises(ConfigError):
            reward(lambda: 1, name="x", **settings)


async def test_time_in_the_queue_is_not_charged(episode):
    """More calls than threads, each just under its deadline: none may fail for having waited."""

    @reward(timeout=10)
    def slow():
        time.sleep(0.01)
        return 1

    trajectory = episode()
    results = await asyncio.gather(*(scored(slow, trajectory) for _ in range(300)))
    assert results == [{"slow": 1.0}] * 300


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"bonus": True}, "bonus must be a number"),
        ({"bonus": "1"}, "bonus must be a number"),
        ({"strict": "no"}, "strict must be true or false"),
        ({"strict": 1}, "strict must be true or false"),
        ({"most": 1.5}, "most must be a whole number"),
        ({"how": "softly"}, "how must be 'mild', or 'harsh'"),
        ({"word": 3}, "word must be text"),
        ({"word": None}, "word must be text"),
        ({"weight": True}, "weight must be a number"),
        ({"timeout": "5"}, "timeout must be a number"),
        ({"retries": 1.5}, "retries must be a whole number"),
    ],
)
def test_options_of_the_wrong_kind_are_refused(tmp_path, options, problem):
    (tmp_path / "own_reward.py").write_text(OWN)
    name = f"{tmp_path / 'own_reward.py'}:scored"
    with pytest.raises(ConfigError, match=problem):
        build_reward({"reward": name, **options})


def test_options_of_the_right_kind_are_taken(tmp_path):
    (tmp_path / "own_reward.py").write_text(OWN)
    name = f"{tmp_path / 'own_reward.py'}:scored"
    options = {
        "bonus": 1,
        "strict": False,
        "most": 2.0,
        "how": "harsh",
        "word": "a",
        "words": [1],
        "maybe": None,
    }
    assert build_reward({"reward": name, **options, "timeout": None, "weight": 2}).options == options
    for more in (
        {"bonus": np.float64(0.5)},
        {"bonus": Fraction(1, 3)},
        {"most": np.int64(2)},
        {"open": None},
    ):
        build_reward({"reward": name, **more})
    for odd in ("described", "tabled"):
        build_reward({"reward": f"{tmp_path / 'own_reward.py'}:{odd}", "times": 2})
    for wrong in ({"rel_tol": True}, {"percent": "no"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            build_reward({"reward": "numeric", **wrong})


OWN = """
from typing import Literal
import ludus

@ludus.reward
def scored(
    answer: str, *, bonus: float = 0.0, strict: bool = True, most: int = 3,
    how: Literal["mild", "harsh"] = "mild", word: str = "", words: list[int] = (), maybe: int | None = 1,
    open: float = None,
) -> float:
    return 1.0

@ludus.reward
def described(answer: str, *, times: "how many times" = 1) -> float:
    return 1.0

@ludus.reward
def tabled(answer: str, *, times: {} = 1) -> float:
    return 1.0
"""


async def test_only_the_key_reward_is_paid_as_in_agentfly(episode):
    """AgentFly's figure 7: `{"reward": f1, "f1": f1, "em": em}` pays f1, and not the sum of all three."""

    @reward
    def qa(answer, target):
        said, wanted = set(answer.split()), set(target.split())
        f1 = 2 * len(said & wanted) / (len(said) + len(wanted))
        return {"reward": f1, "f1": f1, "em": float(answer == target)}

    trajectory = episode("Ada", "Ada Byron Lovelace")
    await Scorer([qa]).score(trajectory)
    assert trajectory.reward == 0.5
    assert trajectory.rewards == {"qa": 0.5, "f1": 0.5, "em": 0.0}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"reward": 1, "total": 1}, "both 'reward' and 'total'"),
        ({"reward": 1, "r": 1}, "both 'reward' and 'r'"),
        ({"score": 1, "acc": 1}, "'score' beside other parts"),
        ({"Reward": 1, "em": 1}, "'Reward' beside other parts"),
    ],
)
async def test_which_part_is_paid_is_never_guessed(episode, value, message):
    with pytest.raises(InfraError, match=message):
        await Scorer([reward(lambda: value, name="r")]).score(episode())


async def test_a_sum_of_parts_is_told_once(episode, caplog):
    summed = reward(lambda: {"left": 1, "right": 2}, name="told_once")
    for _ in range(3):
        await Scorer([summed]).score(episode())
    assert [r.message.count("its score is their sum") for r in caplog.records] == [1]
