"""Ending a stage when tool use has levelled off: numbers beside references, and a run that ends so."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_helpers import TINY, add, even, tasks

import ludus
from ludus.core import ConfigError
from ludus.observe import RunFolder
from ludus.training import Recipe
from ludus.training.config.rl import PlateauConfig
from ludus.training.early_end import find_plateau, fit_power_law, plateau_report

SHORT = PlateauConfig(after=6, window=4)


def test_rising_is_no_plateau_and_level_is_one() -> None:
    assert find_plateau([1.0, 1.2, 1.4, 1.6, 1.8, 2.0], SHORT) is None
    flat = find_plateau([0.1, 0.5, 1.0, 1.01, 0.99, 1.0], SHORT)
    assert flat is not None and flat.mean == pytest.approx(1.0) and abs(flat.rise) < 0.05
    assert "has stopped rising" in str(flat)
    falling = find_plateau([3.0, 2.5, 2.0, 1.5, 1.0, 0.5], SHORT)
    assert falling is not None and "falls" in str(falling)
    never = find_plateau([0.0] * 6, SHORT)
    assert never is not None and never.rise == 0
    assert find_plateau([1.0] * 5, SHORT) is None, "not before `after` steps"


@given(st.lists(st.floats(0.1, 9), min_size=4, max_size=30), st.floats(0, 0.5))
def test_the_trend_is_that_of_least_squares(values: list[float], tolerance: float) -> None:
    n = len(values)
    centre, mean = (n - 1) / 2, sum(values) / n
    slope = sum((i - centre) * (v - mean) for i, v in enumerate(values)) / sum(
        (i - centre) ** 2 for i in range(n)
    )
    rise = slope * (n - 1) / mean
    found = find_plateau(values, PlateauConfig(after=3, window=n, tolerance=tolerance))
    if abs(rise - tolerance) > 1e-9:
        assert (found is None) == (rise > tolerance)
    if found is not None:
        assert found.rise == pytest.approx(rise, abs=1e-9)


@given(st.floats(0.01, 10), st.floats(-2, 2))
def test_a_power_law_is_found_again(scale: float, exponent: float) -> None:
    steps = [1, 2, 5, 10, 40, 100]
    law = fit_power_law(steps, [scale * x**exponent for x in steps])
    assert law is not None
    assert math.isclose(law.scale, scale, rel_tol=1e-6) and math.isclose(
        law.exponent, exponent, abs_tol=1e-6
    )
    assert law(200) == pytest.approx(scale * 200**exponent, rel=1e-5)
    assert fit_power_law([1, 2, 3], [0.0, -1.0, 2.0]) is None, "too few positive values"


def test_the_report_extrapolates_and_success_stays_a_share() -> None:
    rows = [
        {"step": 5 + n, "episodes_scored": 8.0, "tool_calls": 0.5 * n**0.5, "success": n / 10}
        for n in range(1, 11)
    ]
    text = plateau_report(rows, PlateauConfig(), 5, 15)
    assert "0.5 · step^0.5 (R² 1.00)" in text and "2.24 at 20" in text
    assert "`success` = 0.1 · step^1 (R² 1.00): 1 at step 10, 1 at 20" in text
    assert "still rises" in text


class Silent(ludus.Agent):
    """Never calls a tool."""

    async def run(self, episode: ludus.Episode) -> None:
        await episode.generate(max_tokens=4)
        episode.answer("no")


def test_a_stage_ends_at_a_plateau_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plateau = {"metric": "tool/add/calls", "after": 3, "window": 3}
    rl = {**TINY["rl"], "steps": 6, "plateau": plateau}
    code = {"tasks": tasks(4), "held_out": tasks(2, 50), "tools": [add], "rewards": [even]}
    ludus.train(**{**TINY, "rl": rl, "run": {"folder": str(tmp_path / "run")}}, **code, agent=Silent())  # type: ignore[arg-type]
    run = RunFolder(tmp_path / "run")
    assert max(row["step"] for row in run.metrics()) == 3 and run.recipe()["rl"]["steps"] == 3
    assert "rl.plateau: tool/add/calls has stopped rising" in capfd.readouterr().err
    report = run.report_path.read_text()
    assert "## Tool use" in report and "## Failure modes, after RL" in report
    assert (tmp_path / "run" / "diagnosis.md").read_text().startswith("## Failure modes, after RL")
    last = [row for row in run.metrics() if "eval/success" in row][-1]
    shares = [value for name, value in last.items() if name.startswith("eval/failure_mode/")]
    assert sum(shares) == pytest.approx(1 - last["eval/success"])
    ludus.train(resume=run.path, rl={"steps": 5}, **code, agent=Silent())  # type: ignore[arg-type]
    assert max(row["step"] for row in run.metrics()) == 5, "who extends it wants it to go on"
    with pytest.raises(ConfigError, match=r"rl\.plateau\.window"):
        Recipe.parse({**TINY, "rl": {"plateau": {"window": 1}}})
