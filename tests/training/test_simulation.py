"""The simulated cluster: closed forms, the real controller's bound, deaths, and a clock that does not wait."""

from __future__ import annotations

import asyncio
import time

import pytest

from ludus.core import ConfigError
from ludus.training.controller import StalledError
from ludus.training.simulation import SimulationConfig, run_virtually, simulate, simulation_table

STEADY = {
    "tasks": 2, "attempts": 2, "steps": 3, "turns": [2, 2], "turn_tokens": 50, "tool_sigma": 0.0,
    "tool_seconds": 2.0, "request_seconds": 0.0, "train_efficiency": 1.0, "pause_seconds": 0.0,
}  # fmt: skip


def config(**settings: object) -> SimulationConfig:
    return SimulationConfig.parse({**STEADY, **settings}, "a test")


def test_time_is_virtual_and_what_waits_for_nothing_is_an_error() -> None:
    async def sleeper() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    began = time.monotonic()
    assert run_virtually(sleeper()) == pytest.approx(3600)
    assert time.monotonic() - began < 60

    async def waits_for_ever() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(StalledError, match="nothing is left"):
        run_virtually(waits_for_ever())


def test_a_step_that_waits_takes_its_longest_episode_and_its_update() -> None:
    """Tools take 2 s, actions almost nothing: one call between two turns, then 1 s of update."""
    run = simulate(
        config(
            staleness=0,
            decode_seconds=1e-7,
            prompt_tokens_per_second=1e12,
            train_seconds=1.0,
            train_tokens_per_second=1e12,
        )
    )
    assert run.seconds == pytest.approx(3 * (2.0 + 1.0), rel=1e-3)
    assert run.steps == 3
    assert (run.lag_max, run.lag_bound) == (0, 0)
    assert run.trainer_busy == pytest.approx(1 / 3, rel=1e-3)


def test_requests_share_an_engine_and_wait_in_line() -> None:
    """Without tools an engine says one action after the other, or all at once, in the same time a token."""
    loads = {"staleness": 0, "tool_seconds": 0.0, "steps": 1, "tasks": 8, "attempts": 4, "turns": [1, 1]}
    free = {"train_seconds": 0.0, "train_tokens_per_second": 1e12, "prompt_tokens_per_second": 1e12}
    alone = simulate(config(**loads, **free, max_requests=1, decode_seconds=0.01))
    together = simulate(config(**loads, **free, max_requests=32, decode_seconds=0.01))
    # 32 exponential lengths: their sum is about 32 means, their maximum about H(32) = 4.06 of them
    assert 4 < alone.seconds / together.seconds < 16
    doubled = simulate(config(**loads, **free, max_requests=1, decode_seconds=0.02))
    assert doubled.seconds == pytest.approx(2 * alone.seconds, rel=1e-6)
    assert alone.engine_busy == pytest.approx(1.0, rel=1e-6)


def test_prompts_are_read_and_after_an_update_contexts_again() -> None:
    slow = {"staleness": 1, "decode_seconds": 1e-6, "train_seconds": 0.5, "steps": 6, "turns": [6, 6]}
    fast = simulate(config(**slow, prompt_tokens_per_second=1e9))
    read = simulate(config(**slow, prompt_tokens_per_second=2e3))
    assert read.seconds > fast.seconds + 1.0


@pytest.mark.parametrize(("staleness", "window"), [(0, 1), (1, 1), (2, 1), (4, 1), (1, 5), (2, 9)])
def test_the_lag_never_exceeds_its_bound(staleness: int, window: int) -> None:
    run = simulate(
        config(
            tasks=8, attempts=2, steps=30, staleness=staleness, staleness_window=window, tool_sigma=1.5,
            hang_share=0.05, hang_seconds=60.0, turns=[1, 6],
        )
    )  # fmt: skip
    assert run.lag_max <= run.lag_bound
    assert run.steps == 30
    if window == 1:
        assert run.lag_max == staleness


def test_never_waiting_is_faster_the_more_tools_vary() -> None:
    load = {
        "tasks": 16,
        "attempts": 4,
        "steps": 10,
        "tool_sigma": 1.0,
        "turns": [3, 6],
        "train_seconds": 8.0,
    }
    waits, one, two = (simulate(config(**load, staleness=s)).step_seconds for s in (0, 1, 2))
    assert waits > 1.2 * one > 1.2 * 0.98 * two


def test_it_is_the_same_again_and_another_with_another_seed() -> None:
    load = {"tasks": 8, "steps": 5, "tool_sigma": 1.0, "engines": 3, "engine_mtbf_seconds": 40.0}
    first, again = simulate(config(**load)), simulate(config(**load))
    assert (first.seconds, first.deaths) == (again.seconds, again.deaths)
    assert simulate(config(**load, seed=1)).seconds != first.seconds


def test_engines_die_and_the_run_goes_on() -> None:
    load = {"tasks": 16, "attempts": 4, "steps": 12, "turns": [3, 6], "tool_sigma": 0.5, "engines": 4}
    whole = simulate(config(**load))
    dying = simulate(config(**load, engine_mtbf_seconds=60.0, restart_seconds=10.0))
    assert whole.deaths == 0 < dying.deaths
    assert dying.steps == whole.steps == 12
    assert dying.seconds > whole.seconds
    assert dying.lag_max <= dying.lag_bound
    assert dying.given_up < dying.deaths * 16


def test_gpus_that_train_leave_the_engines_playing() -> None:
    load = {
        "tasks": 16,
        "attempts": 4,
        "steps": 8,
        "turns": [3, 6],
        "train_seconds": 6.0,
        "staleness": 1,
    }
    shared = simulate(config(**load))
    apart = simulate(config(**load, trainers=1, weight_gb=0.0))
    assert apart.step_seconds <= shared.step_seconds
    synced = simulate(config(**load, trainers=1, weight_gb=40.0, sync_gb_per_second=8.0))
    assert synced.step_seconds > apart.step_seconds + 3


def test_turns_in_the_wrong_order_and_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"turns = \[5, 2\] must be the fewest and the most"):
        config(turns=[5, 2])
    with pytest.raises(ConfigError, match="turns"):
        config(turns=[0, 2])
    with pytest.raises(ConfigError, match="steps = 2 is too few to compare"):
        simulation_table(["steps=2"], [])
