"""The latency benchmark runs, plays every episode, and computes what it says. How fast is no test's affair."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ludus.core.registry import import_object

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "latency.py"


def part(name: str):  # type: ignore[no-untyped-def]
    return import_object(f"{BENCHMARK}:{name}")


async def test_both_loops_run_on_the_same_draws() -> None:
    workload = part("draw")(episodes=6, turns=2, mean=0.005, sigma=1.0, generation=0.001, seed=3)
    outcome = await part("measure")(workload)
    # sleeping is never shorter than asked for, so these hold on any machine
    assert outcome.ludus >= outcome.bound * 0.99
    assert outcome.lock_step >= outcome.bound * 0.99
    shown = part("table")([outcome, outcome])
    assert f"{outcome.ludus:.2f}s" in shown and f"{outcome.lock_step / outcome.ludus:.2f}x" in shown


def test_the_bound_is_the_longest_episode() -> None:
    workload = part("Workload")(np.array([[1.0, 2.0], [0.5, 4.0]]), 0.25)
    assert workload.bound == pytest.approx(4.5 + 3 * 0.25)


def test_the_draws_have_the_mean_that_was_asked_for() -> None:
    workload = part("draw")(episodes=5000, turns=4, mean=1.0, sigma=1.0, generation=0.0, seed=0)
    assert workload.latency_EN.mean() == pytest.approx(1.0, rel=0.1)
