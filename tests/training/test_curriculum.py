"""Settings that change while training."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ludus.core import ConfigError
from ludus.training import Curriculum, CurriculumConfig, Recipe

TURNS = "budgets.max_turns"


def adaptive(setting: str = TURNS, **how: Any) -> CurriculumConfig:
    return CurriculumConfig.parse({"setting": setting, "adaptive": how})


def values_over(curriculum: Curriculum, setting: str, shown: list[dict[str, float]]) -> list[float]:
    """The setting before each step and after the last."""
    values = []
    for step, metrics in enumerate(shown):
        values.append(curriculum.values(step)[setting])
        curriculum.observe(metrics)
    return [*values, curriculum.values(len(shown))[setting]]


def test_a_schedule_holds_from_its_steps_on() -> None:
    config = CurriculumConfig.parse({"setting": TURNS, "schedule": [[0, 5], [3, 10], [4, 15]]})
    curriculum = Curriculum([config])
    assert [curriculum.values(step)[TURNS] for step in range(7)] == [5, 5, 5, 10, 15, 15, 15]
    assert curriculum.state_dict() == {}


def test_it_grows_when_the_model_is_ready() -> None:
    curriculum = Curriculum([adaptive(start=2, stop=5, by=2, above=0.5, over=2)])
    shown = [{"success": s} for s in (0.9, 0.0, 0.5, 0.5, 0.5, 0.5, 0.5)]
    # pairs: (0.9, 0) no; (0, 0.5) no; (0.5, 0.5) moves; counted anew; moves, to the stop; stays
    assert values_over(curriculum, TURNS, shown) == [2, 2, 2, 2, 4, 4, 5, 5]


def test_it_can_fall_and_follow_any_metric() -> None:
    config = adaptive(
        "budgets.max_tokens", start=100, stop=70, by=20, metric="truncated", below=0.1, over=1
    )
    shown = [
        {"truncated": 0.5},
        {"truncated": 0.1},
        {"success": 1.0},
        {"truncated": 0.0},
        {"truncated": 0.0},
    ]
    values = values_over(Curriculum([config]), "budgets.max_tokens", shown)
    assert values == [100, 100, 80, 80, 70, 70]


@given(
    st.floats(-50, 50),
    st.floats(-50, 50),
    st.floats(0.01, 30),
    st.integers(1, 4),
    st.lists(st.one_of(st.floats(0, 1), st.just(float("nan"))), max_size=40),
)
def test_values_stay_between_start_and_stop_and_go_one_way(
    start: float, stop: float, by: float, over: int, shown: list[float]
) -> None:
    assume(start != stop)
    curriculum = Curriculum(
        [adaptive("tasks.difficulty", start=start, stop=stop, by=by, above=0.5, over=over)]
    )
    values = values_over(curriculum, "tasks.difficulty", [{"success": s} for s in shown])
    assert all(min(start, stop) <= value <= max(start, stop) for value in values)
    assert values == sorted(values, reverse=stop < start)


@given(st.lists(st.floats(0, 1), max_size=20), st.lists(st.floats(0, 1), max_size=20))
def test_a_saved_curriculum_goes_on_as_if_nothing_had_been(
    before: list[float], after: list[float]
) -> None:
    config = adaptive(start=1, stop=9, by=1, above=0.5, over=3)
    whole, again = Curriculum([config]), Curriculum([config])
    values_over(whole, TURNS, [{"success": s} for s in before])
    again.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    shown = [{"success": s} for s in after]
    assert values_over(whole, TURNS, shown) == values_over(again, TURNS, shown)


@pytest.mark.parametrize(
    "raw",
    [
        {"setting": TURNS},
        {"setting": TURNS, "schedule": [[1, 5]]},
        {"setting": TURNS, "schedule": [[0, 5], [0, 6]]},
        {
            "setting": TURNS,
            "schedule": [[0, 5]],
            "adaptive": {"start": 1, "stop": 2, "by": 1, "above": 1},
        },
        {"setting": TURNS, "adaptive": {"start": 1, "stop": 2, "by": 1}},
        {"setting": TURNS, "adaptive": {"start": 1, "stop": 2, "by": 1, "above": 1, "below": 0}},
        {"setting": TURNS, "adaptive": {"start": 1, "stop": float("inf"), "by": 1, "above": 1}},
        {"setting": "budgets.max_seconds", "schedule": [[0, 5]]},
    ],
)
def test_what_makes_no_sense_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CurriculumConfig.parse(raw)


def test_one_setting_cannot_be_moved_twice() -> None:
    config = CurriculumConfig.parse({"setting": TURNS, "schedule": [[0, 5]]})
    with pytest.raises(ConfigError, match="moved twice"):
        Curriculum([config, config])
    with pytest.raises(ConfigError, match=r"rl: budgets\.max_turns is moved twice"):
        Recipe.parse({"model": {"scratch": {}}, "rl": {"curriculum": [config, config]}})


def test_a_metric_that_there_is_not_is_refused() -> None:
    adaptive = {"start": 1, "stop": 2, "by": 1, "above": 0.5}
    for name in ("success", "reward/style", "sets/sums/success", "custom/mine"):
        CurriculumConfig.parse(
            {"setting": "budgets.max_turns", "adaptive": {**adaptive, "metric": name}}
        )
    with pytest.raises(ConfigError, match=r"adaptive: metric = 'sucess' is no metric"):
        CurriculumConfig.parse(
            {"setting": "budgets.max_turns", "adaptive": {**adaptive, "metric": "sucess"}}
        )


@pytest.mark.parametrize(
    ("setting", "how", "said"),
    [
        (TURNS, {"schedule": [[0, 2], [5, 0]]}, "budgets.max_turns: must be greater than or equal to 1"),
        (TURNS, {"schedule": [[0, 0.5]]}, "budgets.max_turns: must be a whole number (given: 0.5)"),
        ("budgets.max_tokens", {"schedule": [[0, 1]]}, "must be greater than or equal to 2"),
        (
            TURNS,
            {"adaptive": {"start": 0, "stop": 2, "by": 1, "above": 1}},
            "budgets.max_turns: must be",
        ),
        (
            TURNS,
            {"adaptive": {"start": 3, "stop": -1, "by": 1, "above": 1}},
            "budgets.max_turns: must be",
        ),
        (TURNS, {"adaptive": {"start": 1, "stop": 2, "by": 0.5, "above": 1}}, "by whole numbers"),
        (TURNS, {"adaptive": {"start": 2, "stop": 2, "by": 1, "above": 1}}, "would never move"),
        (
            TURNS,
            {"adaptive": {"start": 1, "stop": 2, "by": 1, "above": 1, "metric": "eval/success"}},
            "no metric of a step",
        ),
    ],
)
def test_what_a_budget_cannot_be_is_refused_when_it_is_read(
    setting: str, how: dict[str, Any], said: str
) -> None:
    stages = [{"kind": "rl"}, {"kind": "rl", "curriculum": [{"setting": setting, **how}]}]
    with pytest.raises(ConfigError) as error:
        Recipe.parse({"model": {"scratch": {}}, "stage": stages})
    _, line = str(error.value).splitlines()
    assert line.startswith("  stage.1.curriculum.0") and said in line


@pytest.mark.parametrize(
    ("metric", "names", "fits"),
    [
        ("sets/sums/success", ["sums", "words"], True),
        ("sets/smus/success", ["sums", "words"], False),
        ("sets/sums/sucess", ["sums", "words"], False),
        ("sets/sums/success", ["sums"], False),
        ("sets/sums/success", [], False),
    ],
)
def test_a_set_that_there_is_not_decides_nothing(metric: str, names: list[str], fits: bool) -> None:
    how = {"start": 1, "stop": 2, "by": 1, "above": 1, "metric": metric}
    raw = {
        "model": {"scratch": {}},
        "task_sets": [{"name": name, "train": "x.jsonl"} for name in names],
        "rl": {"curriculum": [{"setting": TURNS, "adaptive": how}]},
    }
    if fits:
        Recipe.parse(raw)
        return
    with pytest.raises(ConfigError, match=r"\n  rl\.curriculum\.0\.adaptive\.metric: no step has"):
        Recipe.parse(raw)
