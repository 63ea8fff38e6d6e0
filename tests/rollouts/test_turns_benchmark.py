"""The benchmark of what a turn costs plays the same turns on both sides. How fast is no test's affair."""

from __future__ import annotations

from pathlib import Path

from ludus.core.registry import import_object

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "turns.py"


def part(name: str):  # type: ignore[no-untyped-def]
    return import_object(f"{BENCHMARK}:{name}")


def test_both_loops_play_the_same_turns() -> None:
    outcomes = part("measure")(3, 2, part("fitted")())
    assert [outcome.company for outcome in outcomes] == ["nothing", "a busy thread"]
    assert outcomes[0].turns == outcomes[1].turns >= 3 * 2 * 2
    shown = part("table")(outcomes)
    assert all(f"| {outcome.ludus:.3f} | {outcome.bare:.3f} |" in shown for outcome in outcomes)
