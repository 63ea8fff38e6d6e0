"""Evaluations: numbers against plain counting, lost episodes that are no zeros, folders that go on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_helpers import TINY, add, even, tasks

import ludus
from ludus.core import (
    Boundary,
    ConfigError,
    Failure,
    Group,
    LudusError,
    Sampling,
    StopReason,
    Trajectory,
)
from ludus.observe import read_groups, rollout_metrics
from ludus.training import Evaluation, Parts, Recipe, task_set_specs
from ludus.training.evaluation.evaluate import EvalModel, find_model
from ludus.training.evaluation.report import (
    comparison_table,
    full_table,
    pass_curves,
    short_table,
    single_table,
    study_json,
    study_markdown,
    study_warnings,
    turn_curves,
    write_report,
)
from ludus.training.evaluation.study import (
    EvalTasks,
    ModelResult,
    ResultsFolder,
    Study,
    StudyPlan,
    is_finished,
    run_study,
    settings_of,
)
from ludus.training.evaluation.summary import NAMELESS, SummaryOptions, compare, powers_of_two, summarise

QUICK = SummaryOptions()


def group(name: str, rewards: Sequence[float | None], **metadata: Any) -> Group:
    """A task's attempts; None is one that failed through our fault."""
    task = ludus.Task.of("?", id=name, **metadata)
    made = []
    for attempt, reward in enumerate(rewards):
        trajectory = Trajectory(task, stop=StopReason.ANSWERED, reward=reward, attempt=attempt)
        if reward is None:
            trajectory.failure = Failure(Boundary.ENGINE, "EngineError", "the server is down")
            trajectory.stop = StopReason.FAILED
        made.append(trajectory)
    return Group(task, made)


def evaluation(groups: Sequence[Group]) -> Evaluation:
    return Evaluation(rollout_metrics(groups), list(groups))


REWARDS = st.lists(
    st.lists(st.sampled_from([0.0, 1.0, None]), min_size=1, max_size=5), min_size=1, max_size=6
)


@given(REWARDS)
def test_numbers_are_plain_counts_over_what_was_scored(rewards: list[list[float | None]]) -> None:
    groups = [group(str(number), row) for number, row in enumerate(rewards)]
    found = evaluation(groups).summary(SummaryOptions(ks=(1, 2, 3)))
    scored = [[r for r in row if r is not None] for row in rewards]
    flat = [r for row in scored for r in row]
    assert found.episodes == sum(map(len, rewards))
    assert found.scored == len(flat) and found.failed == found.episodes - len(flat)
    assert found.left_out == 0
    if not flat:
        assert found.success is None and found.reward is None and found.passed == {}
        return
    assert found.success is not None and found.success.value == pytest.approx(sum(flat) / len(flat))
    for k in (1, 2, 3):
        enough = [row for row in scored if len(row) >= k]
        if not enough:
            assert k not in found.passed
            continue
        chosen = [list(combinations(row, k)) for row in enough]
        passed = sum(sum(any(s) for s in subsets) / len(subsets) for subsets in chosen) / len(enough)
        relied = sum(sum(all(s) for s in subsets) / len(subsets) for subsets in chosen) / len(enough)
        average = sum(sum(row[:k]) / k for row in enough) / len(enough)
        assert found.passed[k].value == pytest.approx(passed)
        assert found.relied[k].value == pytest.approx(relied)
        assert found.average[k].value == pytest.approx(average)


def test_a_failure_of_ours_is_no_zero() -> None:
    found = evaluation([group("a", [1, None]), group("b", [1, 1])]).summary(QUICK)
    assert found.success is not None and found.success.value == 1.0
    assert (found.failed, found.scored, found.tasks) == (1, 3, 2)
    assert found.passed[2].value == 1.0, "over the one task that has two attempts left"


def test_sub_tasks() -> None:
    groups = [group("a", [1, 0], level="easy"), group("b", [0, 0], level="hard"), group("c", [1, 1])]
    found = evaluation(groups).by_subtask("level", QUICK)
    assert {name: s.success.value for name, s in found.items() if s.success} == {
        NAMELESS: 1.0,
        "easy": 0.5,
        "hard": 0.0,
    }
    whole, *_ = summarise(groups, SummaryOptions(by="level"))
    assert whole.tasks == 3 and whole.passed.keys() == {1, 2}


def test_two_models_are_paired_by_task() -> None:
    ours = [group(str(n), [1, 1, 0]) for n in range(8)] + [group("lost", [None, None, None])]
    theirs = [group(str(n), [0, 1, 0]) for n in range(7)] + [group("lost", [1, 1, 1])]
    found = evaluation(ours).against(evaluation(theirs), QUICK)
    assert found is not None
    assert (found.tasks, found.unpaired) == (7, 2)
    assert found.first - found.second == pytest.approx(1 / 3)
    assert (found.test.wins, found.test.losses, found.test.ties) == (7, 0, 0)
    assert found.test.p_flip == found.test.p_sign == pytest.approx(2 / 2**7)
    assert compare([group("a", [None])], [group("a", [1])]) == []
    assert evaluation([group("a", [1])]).against(evaluation([group("b", [1])])) is None


def test_powers_of_two() -> None:
    assert powers_of_two(0) == ()
    assert powers_of_two(1) == (1,)
    assert powers_of_two(6) == (1, 2, 4, 6)
    assert powers_of_two(8) == (1, 2, 4, 8)


# -- folders -------------------------------------------------------------------------------------------------


def test_a_folder_holds_one_set_of_settings(tmp_path: Path, recipe: Recipe, parts: Parts) -> None:
    sets = task_set_specs(recipe, parts)
    settings = settings_of(sets, [parts.held_out], 4, Sampling(), 0)
    with ResultsFolder(tmp_path / "r", settings), pytest.raises(LudusError, match="another run"):
        ResultsFolder(tmp_path / "r", settings)
    with ResultsFolder(tmp_path / "r", settings):
        pass
    other = settings_of(sets, [parts.held_out], 4, Sampling(temperature=0.5), 0)
    with pytest.raises(ConfigError, match=r"sampling.temperature: 1.0 there, 0.5 now"):
        ResultsFolder(tmp_path / "r", other)
    changed = settings_of(sets, [[ludus.Task.of("other", id="50")]], 4, Sampling(), 0)
    with pytest.raises(ConfigError, match=r"tasks\.digest"):
        ResultsFolder(tmp_path / "r", changed)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="something else"):
        ResultsFolder(tmp_path / "full", settings)
    (tmp_path / "r" / "settings.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        ResultsFolder(tmp_path / "r", settings)


def test_what_failed_is_played_again_and_newer_parts_count(tmp_path: Path) -> None:
    assert is_finished(group("a", [1, 0]), 2)
    assert not is_finished(group("a", [1, None]), 2)
    assert not is_finished(group("a", [1]), 2)
    with ResultsFolder(tmp_path, {"format": 1}) as results:
        cell = results.cell("some/model", {"name": "x"}, 4)
        first, second = group("a", [1.0, 0.0]), group("b", [None, 1.0])
        tasks = [first.task, second.task]
        for number, played in enumerate((first, second)):
            cell.write(played, number)
        cell.close([first, second])
        assert (
            not list(tmp_path.rglob("parts")) and len(read_groups(cell.path / "episodes.parquet")) == 2
        )
        mended = group("b", [0.0, 1.0])
        cell.write(mended, 1)
        found = cell.groups(tasks)
        assert [t.reward for t in found["b"].trajectories] == [0.0, 1.0]
        assert found["a"].task is first.task
        assert results.cell("some/model", {"name": "y"}, 4).path != cell.path


def test_a_folder_in_which_nothing_was_played_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LudusError), ResultsFolder.at(None, "a b/c", {"format": 1}) as results:
        assert results.path.name == "a-b-c-001"
        raise LudusError("no such model")
    assert list((tmp_path / "evaluations").iterdir()) == []


# -- studies with a real little model ------------------------------------------------------------------------


def plan_of(parts: Parts, models: Sequence[EvalModel], turns: tuple[int, ...] = (1, 3)) -> StudyPlan:
    tasks = (EvalTasks("tasks", tuple(parts.held_out), 3),)
    return StudyPlan(tuple(models), tasks, turns, attempts=2, sampling=Sampling())


def numbers(study: Study) -> list[Mapping[str, Any]]:
    return study_json(study)["measured"]


async def test_a_study_stops_and_goes_on(tmp_path: Path, recipe: Recipe, parts: Parts) -> None:
    """Interrupted after the first finished task, then continued: the same numbers as in one go."""
    model = await find_model(None, recipe)
    plan = plan_of(parts, [model])
    settings = settings_of(task_set_specs(recipe, parts), [parts.held_out], 2, Sampling(), 0)
    whole = await run_study(recipe, parts, plan, QUICK)

    class Stop(Exception):
        pass

    def stop(model: str, turns: int, done: int, total: int) -> None:
        raise Stop

    with pytest.raises(Stop), ResultsFolder(tmp_path / "r", settings) as results:
        await run_study(recipe, parts, plan, QUICK, results=results, on_group=stop)
    seen: list[tuple[int, int]] = []
    with ResultsFolder(tmp_path / "r", settings) as results:
        again = await run_study(
            recipe, parts, plan, QUICK, results=results, on_group=lambda m, t, d, n: seen.append((t, d))
        )
        assert seen == [(1, 2), (3, 1), (3, 2)], "the first task of the first budget is not played again"
        assert [m.kept for m in again.measured] == [1, 0]
        assert numbers(again) == numbers(whole)
        kept = await run_study(recipe, parts, plan, QUICK, results=results, on_group=stop)
        assert [m.kept for m in kept.measured] == [2, 2] and numbers(kept) == numbers(whole)


class Talker(ludus.Agent):
    """Goes on for as long as it may."""

    async def run(self, episode: ludus.Episode) -> None:
        while True:
            await episode.generate(max_tokens=4)
            episode.observe("and then?")


async def test_budgets_of_turns(recipe: Recipe, parts: Parts) -> None:
    parts.agent = Talker()
    study = await run_study(recipe, parts, plan_of(parts, [await find_model(None, recipe)]), QUICK)
    short, long = study.measured
    assert {t.turns for t in short.evaluation.trajectories} == {1}
    assert {t.turns for t in long.evaluation.trajectories} == {3}


async def test_all_failing_is_an_error_that_says_why(recipe: Recipe, parts: Parts) -> None:
    class Broken(ludus.Agent):
        async def run(self, episode: ludus.Episode) -> None:
            raise RuntimeError("no luck")

    parts.agent = Broken()
    with pytest.raises(LudusError, match=r"4 of 4 were lost .* 'agent': RuntimeError: no luck"):
        await run_study(recipe, parts, plan_of(parts, [await find_model(None, recipe)], (1,)), QUICK)


async def test_episodes_that_nobody_scores_are_a_mistake(recipe: Recipe, parts: Parts) -> None:
    parts.rewards = []
    with pytest.raises(ConfigError, match="none of 4 episodes was scored"):
        await run_study(recipe, parts, plan_of(parts, [await find_model(None, recipe)], (1,)), QUICK)


def test_plans_that_make_no_sense(parts: Parts) -> None:
    model = EvalModel("m", None)
    with pytest.raises(ConfigError, match="named 2 times"):
        plan_of(parts, [model, model])
    with pytest.raises(ConfigError, match="needs a model"):
        plan_of(parts, [])
    with pytest.raises(ConfigError, match="at least 1"):
        plan_of(parts, [model], (0,))


async def test_a_model_that_changed_is_another_one(tmp_path: Path, recipe: Recipe) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1")
    model = await find_model(str(tmp_path), recipe)
    before = model.identity(recipe)
    assert before == model.identity(recipe)
    (tmp_path / "model.safetensors").write_bytes(b"22")
    assert model.identity(recipe) != before


def test_python_gets_the_statistics_too(parts: Parts) -> None:
    tables = {key: value for key, value in TINY.items() if key not in ("rl", "run")}
    found = ludus.evaluate(
        held_out=parts.held_out, tools=parts.tools, rewards=parts.rewards, attempts=2, **tables
    )
    summary = found.summary(QUICK)
    assert (summary.tasks, summary.episodes) == (2, 4)
    assert summary.success is not None and summary.success.value == found.metrics["success"]
    assert found.against(found, QUICK) is not None


# -- reports -------------------------------------------------------------------------------------------------


@pytest.fixture
def study() -> Study:
    easy = [group(str(n), [1, 1, 0, 1], level="$x^2|") for n in range(5)]
    hard = [group(str(n + 5), [0, 1, None, 0], level="b") for n in range(5)]
    worse = [group(str(n), [0, 0, 0, 1], level="$x^2|") for n in range(10)]
    measured = [
        ModelResult(model, turns, evaluation(groups), 0)
        for model, groups in (("_first $model$ | [red]", easy + hard), ("second", worse))
        for turns in (2, 8)
    ]
    return Study(tuple(measured), SummaryOptions(by="level"), against="second")


def test_reports_hold_every_number(tmp_path: Path, study: Study, real_curves: None) -> None:
    paths = write_report(tmp_path, study)
    assert [path.name for path in paths] == ["report.md", "report.json", "plot.png"]
    assert paths[2].read_bytes().startswith(b"\x89PNG")
    found = json.loads(paths[1].read_text())
    assert len(found["measured"]) == 4 + 2 * 2 + 2 and found["against"] == "second"
    first = found["measured"][0]
    assert first["subtask"] == "all" and first["failed"] == 5 and first["episodes"] == 40
    assert first["success"]["value"] == pytest.approx(20 / 35)
    assert first["pass@4"]["value"] == 1.0, "the hard tasks have lost an attempt each"
    text = paths[0].read_text()
    assert "pass@4" in text and "p flip" in text and "\\|" in text
    header = text.splitlines()[2]
    assert all(row.count(" | ") == header.count(" | ") for row in text.splitlines()[4:14])


def test_tables_and_curves(study: Study) -> None:
    for table in (full_table(study), short_table(study), comparison_table(study), single_table(study)):
        assert table.rows and all(len(row) == len(table.columns) for row in table.rows)
    assert [row[0] for row in short_table(study).rows][:3] == ["A", "A", "A"]
    assert next(label for label, _ in pass_curves(study)).endswith("2 turns")
    assert [[turns for turns, _ in points] for _, points in turn_curves(study)] == [[2, 8], [2, 8]]
    assert "minus that of second" in study_markdown(study)


def test_the_terminal_shows_every_k_that_was_asked_for() -> None:
    groups = [group(str(n), [1, 0, 0, 1]) for n in range(4)]
    asked = SummaryOptions(ks=(1, 2, 4))
    several = Study(tuple(ModelResult(m, 2, evaluation(groups), 0) for m in "xy"), asked)
    assert [c for c in short_table(several).columns if "@" in c] == ["pass@1", "pass@2", "pass@4"]
    one = Study((ModelResult("x", 2, evaluation(groups), 0),), asked)
    names = [str(row[0]) for row in single_table(one).rows]
    assert {f"{what}@{k}" for what in ("pass", "average") for k in (1, 2, 4)} <= set(names)
    usual = Study(several.measured, QUICK)
    assert [c for c in short_table(usual).columns if "@" in c] == ["pass@4"]


def test_a_report_of_nothing_scored(tmp_path: Path) -> None:
    nothing = Study((ModelResult("m", 2, evaluation([group("a", [None])]), 0),), QUICK)
    assert (tmp_path / "plot.png") in write_report(tmp_path, nothing)
    assert single_table(nothing).rows[0] == ["success", None]


# -- lost episodes -------------------------------------------------------------------------------------------


def test_intervals_allow_for_lost_episodes() -> None:
    """12 of 20 scored, all of them successes: between 60% and 100%, and below 60% by chance."""
    groups = [group(str(n), [1]) for n in range(12)] + [group(str(n), [None]) for n in range(12, 20)]
    found = evaluation(groups).summary(SummaryOptions())
    assert found.success is not None and found.success.value == 1.0
    assert found.bounds == (0.6, 1.0)
    zeros = evaluation([group(str(n), [float(n < 12)]) for n in range(20)]).summary(SummaryOptions())
    assert zeros.success is not None
    assert found.success.low == zeros.success.low and found.success.low < 0.6
    assert found.success.high == 1.0
    whole = evaluation(groups[:12]).summary(SummaryOptions())
    assert whole.bounds == (1.0, 1.0)
    assert whole.success is not None and whole.success.low is not None and whole.success.low > 0.7


@given(REWARDS)
def test_intervals_hold_what_any_fate_of_the_lost_ones_would_have_given(
    rewards: list[list[float | None]],
) -> None:
    how = SummaryOptions(ks=(1, 2))
    found = evaluation([group(str(n), row) for n, row in enumerate(rewards)]).summary(how)
    if found.success is None:
        return
    for fate in (0.0, 1.0):
        filled = [[fate if r is None else r for r in row] for row in rewards]
        imagined = evaluation([group(str(n), row) for n, row in enumerate(filled)]).summary(how)
        assert imagined.success is not None
        for k in found.passed:
            if found.passed[k].low is not None:
                low, high = found.passed[k].low, found.passed[k].high
                assert low - 1e-9 <= imagined.passed[k].value <= high + 1e-9
        if found.success.low is not None:
            assert found.success.low - 1e-9 <= imagined.success.value <= found.success.high + 1e-9


def test_a_difference_allows_for_lost_episodes() -> None:
    ours = [group(str(n), [1, None]) for n in range(6)]
    theirs = [group(str(n), [0, 0]) for n in range(6)]
    found = evaluation(ours).against(evaluation(theirs), QUICK)
    assert found is not None and found.test.difference.value == 1.0
    assert (found.test.difference.low, found.test.difference.high) == (0.5, 1.0)


def test_reports_say_what_was_lost(tmp_path: Path) -> None:
    groups = [group(str(n), [1]) for n in range(12)] + [group(str(n), [None]) for n in range(12, 20)]
    one = Study((ModelResult("model", 2, evaluation(groups), 0),), QUICK)
    shown = {str(row[0]): row[1] for row in single_table(one).rows}
    assert shown["scored episodes"] == "12 of 20" and shown["lost episodes"] == 8
    assert shown["success, lost ones as 0 / as 1"] == "60.0% / 100.0%"
    text = study_markdown(one)
    assert "8 of 20 model's episodes (40.0%) were lost" in text and "Most often (8 times)" in text


def test_a_single_task_is_told_to_have_no_interval() -> None:
    lone = Study((ModelResult("m", 2, evaluation([group("a", [1, 0])]), 0),), QUICK)
    assert "a single task has no interval" in study_markdown(lone)
    groups = [group("a", [1], level="x"), group("b", [1], level="y"), group("c", [0], level="y")]
    by_level = SummaryOptions(by="level")
    assert "a single task (x) has no interval" in study_markdown(
        Study((ModelResult("m", 2, evaluation(groups), 0),), by_level)
    )
    assert study_warnings(Study((ModelResult("m", 2, evaluation(groups), 0),), QUICK)) == []


def test_a_recipe_says_how_evaluations_are_drawn() -> None:
    tables = {name: TINY[name] for name in ("model", "budgets", "engine", "threads")}
    given = {"tasks": tasks(3), "held_out": tasks(3), "tools": [add], "rewards": [even]}

    def played(**sampling: float) -> list[list[int]]:
        found = ludus.evaluate(**tables, **given, evaluation={"attempts": 2, **sampling})
        return [one.tokens for one in found.trajectories]

    greedy = played(temperature=0)
    assert played(top_k=1) == played(min_p=1.0) == greedy
    assert played(temperature=1) != greedy


def test_what_would_bias_training_is_still_refused_there() -> None:
    with pytest.raises(ConfigError, match="importance ratios wrong"):
        ludus.train(**TINY, tasks=tasks(2), rewards=[even], sampling={"top_p": 0.9})
