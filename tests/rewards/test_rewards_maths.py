"""Mathematical equivalence: right, and never at the mercy of what a model writes."""

from __future__ import annotations

import asyncio
import builtins
import os
import signal
import subprocess
import sys
import time
from functools import cache

import pytest

from ludus.core import InfraError, MissingExtraError
from ludus.remote.processes import ProcessExecutor
from ludus.rewards import Scorer, maths
from ludus.rewards.text_rewards import LimitExceeded, delimited, limited, run_limited


@pytest.mark.parametrize(
    ("answer", "target", "score"),
    [
        ("1/2", "0.5", 1.0),
        (r"$\frac{1}{2}$", "1/2", 1.0),
        ("x+1", "1+x", 1.0),
        (r"The area is $2\pi$.", r"2\pi", 1.0),
        (r"2\pi", "2", 0.0),
        (r"so \boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        ("x+2", "1+x", 0.0),
        ("1,234", 1234, 1.0),
        (r"$\sqrt{8}$", r"2\sqrt{2}", 1.0),
        ("5", ["4", "5"], 1.0),
        ("", "3", 0.0),
        ("I do not know", "3", 0.0),
    ],
)
async def test_equivalence(answer, target, score):
    assert await maths(answer, target) == score


@pytest.mark.parametrize(
    "hostile",
    [
        "9**9**9**9",
        "$9^{9^{9^9}}$",
        r"$\sum_{k=1}^{10^9} k^k$",
        "(" * 5000,
        r"\sqrt{" * 2000,
        "\x00\ud800$\\frac{",
    ],
    ids=["power", "latex power", "sum", "brackets", "roots", "broken text"],
)
@pytest.mark.timeout(60)
async def test_hostile_answers_are_wrong_answers(hostile):
    strict = maths.using(cpu_seconds=0.2)
    score, beside = await asyncio.gather(strict(hostile, "5"), maths("2", "2"))
    assert (score, beside) == (0.0, 1.0)


async def test_a_cold_workers_imports_are_not_the_answers(monkeypatch):
    """0.2 s suffice for any of these answers; importing sympy alone takes more, on a machine that is idle."""
    monkeypatch.setattr("ludus.rewards.text_rewards._workers", cache(lambda _: ProcessExecutor(1)))
    assert await maths.using(cpu_seconds=0.2)("1/2", "0.5") == 1.0
    assert (
        await maths.using(cpu_seconds=0.2)("(" * 5000, "5") == 0.0
    )  # ends the worker; the next is cold
    assert await maths.using(cpu_seconds=0.2)("1/2", "0.5") == 1.0


@pytest.mark.parametrize(
    "how", [ValueError, RecursionError, KeyError, SystemExit, "SIGKILL", "SIGFPE", 3]
)
async def test_an_answer_that_breaks_the_comparison_is_wrong(monkeypatch, how):
    """Whatever sympy or its parser does over an answer: the same target is fine with another one."""
    monkeypatch.setattr("ludus.rewards.text_rewards.are_equivalent", break_over)
    monkeypatch.setattr("ludus.rewards.text_rewards.warm_up", list)
    said = how if isinstance(how, str | int) else how.__name__
    assert await maths.using(retries=0)(f"break {said}", "5") == 0.0
    assert await maths.using(retries=0)("5", "5") == 1.0


def break_over(target, answer):
    """Stands for a comparison that breaks over some answers, in whatever way. Runs in the worker."""
    if not answer.startswith("break "):
        return target == answer
    how = answer.removeprefix("break ")
    if how.isdigit():
        os._exit(int(how))
    if how.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[how])
        time.sleep(10)
    raise getattr(builtins, how)("over this answer")


async def test_it_works_as_a_reward_from_many_episodes_at_once(episode):
    scorer = Scorer([maths])
    trajectories = [episode(f"${i}+{i}$", str(2 * (i // 2) * 2)) for i in range(20)]
    await asyncio.gather(*(scorer.score(t) for t in trajectories))
    assert [t.reward for t in trajectories] == [float(i % 2 == 0) for i in range(20)]


async def test_a_target_that_cannot_be_read_is_our_failure(episode):
    for target in ("the cat sat", "", None):
        trajectory = episode("3", target)
        with pytest.raises(InfraError, match="target"):
            await maths.score(trajectory, trajectory.task, {})


@pytest.mark.timeout(60)
async def test_a_target_that_exceeds_the_limits_is_our_failure_too(episode):
    trajectory = episode("3", r"$\sum_{k=1}^{10^9} k^k$")
    with pytest.raises(InfraError, match="too much for math-verify"):
        await maths.using(cpu_seconds=0.5, retries=0).score(trajectory, trajectory.task, {})


async def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"ludus-rl\[maths\]"):
        await maths("1", "1")


async def test_memory_is_bounded_and_the_next_call_is_fine():
    with pytest.raises(LimitExceeded, match="256 MiB"):
        await run_limited(bytes, 1 << 30, cpu_seconds=5, memory=1 << 28)
    assert await run_limited(len, "abc", cpu_seconds=5) == 3


async def test_an_error_of_the_function_is_its_own():
    with pytest.raises(ValueError, match="invalid literal"):
        await run_limited(int, "x", cpu_seconds=5)


def test_the_timer_is_off_when_the_function_is_done():
    """A worker lives on between calls; a timer left running would kill it under the next one."""
    with pytest.raises(ValueError, match="invalid literal"):
        limited(int, ("x",), cpu_seconds=50, memory=1 << 60)
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_only_bare_expressions_are_delimited():
    assert delimited(" x+1 ") == "$x+1$"
    for text in ("", "$x$", r"\boxed{3}", "the answer is 3", r"\(x\)"):
        assert delimited(text) == text


def test_importing_rewards_imports_nothing_heavy():
    code = (
        "import sys, ludus.rewards; "
        "heavy = {'math_verify', 'sympy', 'numpy', 'torch', 'transformers'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
