"""`ludus.log`: what it takes, how it averages, and how it comes out of worker processes."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ludus
from ludus.core import Boundary, InfraError
from ludus.envs import isolated
from ludus.remote import user_log
from ludus.remote.processes import ProcessExecutor


@pytest.fixture(autouse=True)
def open_log() -> Iterator[None]:
    with user_log.opened():
        yield


def logged() -> dict[str, float]:
    return user_log.means(user_log.swap())


def test_the_mean_is_exact_whatever_the_order() -> None:
    values = [1e16, 1.0, -1e16, 0.1, 0.2, 0.3]
    found = set()
    for seed in range(5):
        for value in random.Random(seed).sample(values, len(values)):
            ludus.log("custom/x", value)
        found.add(logged()["custom/x"])
    assert found == {math.fsum(values) / 6}
    assert logged() == {}


def test_all_kinds_of_numbers_from_all_threads() -> None:
    given: list[Any] = [1, True, 0.5, np.float32(1.5), np.int64(1)]
    threads = [threading.Thread(target=ludus.log, args=("custom/a/b-c_d.e", one)) for one in given]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert logged() == {"custom/a/b-c_d.e": 1.0}


@pytest.mark.parametrize(
    "name",
    ["x", "custom", "custom/", "custom//x", "/custom/x", "custom/two words", "custom/ä", "custom/x\n",
     "eval/custom/x", "custom/" + 80 * "x", 7],
)  # fmt: skip
def test_a_name_that_cannot_be_is_refused(name: Any) -> None:
    with pytest.raises(InfraError, match="a name is custom/") as refused:
        ludus.log(name, 1.0)
    assert refused.value.boundary is Boundary.AGENT and not refused.value.retriable
    assert logged() == {}


@pytest.mark.parametrize("value", [math.nan, math.inf, "1.0", b"1", None, [1.0], 10**400, 1j])
def test_a_value_that_is_no_finite_number_is_refused(value: Any) -> None:
    with pytest.raises(InfraError, match="the value of custom/x must be a finite number"):
        ludus.log("custom/x", value)
    assert logged() == {}


def test_names_are_limited_and_known_ones_go_on() -> None:
    for number in range(user_log.MOST_NAMES):
        ludus.log(f"custom/{number}", number)
    for name in ("custom/more", "custom/even-more"):
        with pytest.raises(InfraError, match=f"{name} is one name too many: a run logs at most 64"):
            ludus.log(name, 1.0)
    ludus.log("custom/3", 5.0)
    found = logged()
    assert len(found) == user_log.MOST_NAMES and found["custom/3"] == 4.0
    ludus.log("custom/0", 1.0)  # known, though nothing of it is kept
    with pytest.raises(InfraError, match="one name too many"):
        ludus.log("custom/more", 1.0)


def test_without_a_run_numbers_are_checked_and_dropped() -> None:
    ludus.log("custom/x", 1.0)
    with user_log.opened():
        assert logged() == {}
    ludus.log("custom/x", 2.0)
    with pytest.raises(InfraError, match="a name is custom/"):
        ludus.log("x", 1.0)
    assert logged() == {}


def test_a_process_that_is_no_runs_refuses() -> None:
    user_log.refuse()
    with pytest.raises(InfraError, match="'custom/x' cannot be logged here, in a tool server"):
        ludus.log("custom/x", 1.0)


def squared(number: int) -> int:
    ludus.log("custom/number", number)
    ludus.log("custom/ones", 1)
    if number < 0:
        raise ValueError("negative")
    return number * number


async def test_a_worker_process_sends_its_numbers_with_the_result() -> None:
    executor = ProcessExecutor(1)
    try:
        assert [await executor.run(squared, number) for number in (1, 2, 6)] == [1, 4, 36]
        assert logged() == {"custom/number": 3.0, "custom/ones": 1.0}
        with pytest.raises(ValueError, match="negative"):
            await executor.run(squared, -4)
        assert logged()["custom/number"] == -4.0
        assert await executor.run(abs, -1) == 1
        assert logged() == {}
    finally:
        await executor.close()


class Counting(ludus.Env):
    def reset(self, task: ludus.Task) -> str:
        ludus.log("custom/resets", 1.0)
        return "go"


def test_an_environment_in_a_process_of_its_own_logs(tmp_path: Path) -> None:
    env = isolated.IsolatedEnv(Counting, "counting")
    try:
        assert str(env.reset(ludus.Task.of("go", id="1"))) is not None
        assert logged() == {"custom/resets": 1.0}
    finally:
        env.close()
