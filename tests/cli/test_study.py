"""Several runs of a recipe: seeds and sweeps, their failures, their interruption; and runs compared."""

from __future__ import annotations

import json
import math
import signal
import statistics
from pathlib import Path

import pytest
from cli_process import COMMAND, Started
from test_cli import MODULE, RECIPE, ludus, project  # noqa: F401 - a fixture
from typer.testing import CliRunner

from ludus.cli.main import app
from ludus.cli.study import StudyFolder, StudyOptions, _members, _share, study_settings
from ludus.core import ConfigError, Group, StopReason, Task, Trajectory
from ludus.observe import RunFolder, RunWriter, recorded_in
from ludus.training.evaluation.runs import compared_recipes, paired_table, recipe_key, recipes_table

pytestmark = pytest.mark.usefixtures("project")
RATE = "rl.optimizer.learning_rate"


def members(seeds: str | None, *sweep: str, **overrides: str) -> dict[str, dict[str, object]]:
    given = [f"{key}={value}" for key, value in overrides.items()]
    found: dict[str, dict[str, object]] = _members(
        Path("recipe.toml"), given, StudyOptions(seeds, sweep)
    )
    return found


def test_a_study_has_a_run_for_each_value_and_seed() -> None:
    found = members("0,1", f"{RATE}=1e-3,3e-3")
    assert list(found) == [
        f"learning-rate-{rate}-seed-{seed}" for rate in ("1e-3", "3e-3") for seed in (0, 1)
    ]
    settings = [(one["seed"], one["rl"]["optimizer"]["learning_rate"]) for one in found.values()]  # type: ignore[index]
    assert settings == [(0, 1e-3), (1, 1e-3), (0, 3e-3), (1, 3e-3)]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--seeds", "0,0"], "a run twice: seed=0"),
        (["--seeds", ""], "is written key=value"),
        (["--seeds", "one"], "seed"),
        (["--seeds", "0", "--sweep", "seed=1,2"], "seed is swept twice"),
        (["--sweep", "rl.stepz=1,2"], "rl.stepz"),
    ],
)
def test_a_study_that_cannot_be_is_refused_before_there_is_a_folder(
    arguments: list[str], told: str
) -> None:
    done = CliRunner().invoke(app, ["train", "recipe.toml", *arguments])
    assert isinstance(done.exception, ConfigError) and told in str(done.exception)
    assert not Path("runs").exists()


def test_a_study_is_for_a_recipe_and_goes_on_by_its_own() -> None:
    done = CliRunner().invoke(app, ["train", "--resume", "somewhere", "--seeds", "0,1"])
    assert isinstance(done.exception, ConfigError) and "are for a recipe" in str(done.exception)
    with StudyFolder(Path("study"), {"members": members("0,1")}):
        Path("study/seed-0").mkdir()
        Path("study/seed-0/recipe.json").write_text("{}")
    done = CliRunner().invoke(app, ["train", "--resume", "study", "rl.steps=9"])
    assert isinstance(done.exception, ConfigError) and "leave out rl.steps=9" in str(done.exception)


def test_runs_side_by_side_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = {"cluster": {"engines": 0, "trainer_ranks": None, "address": None, "nodes": None}}
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert _share(0, 1, recipe) == {}
    assert [_share(slot, 3, recipe) for slot in (0, 1, 2)] == [
        {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": device} for device in ("4", "6", "4")
    ]
    assert _share(0, 3, {"cluster": {**recipe["cluster"], "engines": 2}}) == {"OMP_NUM_THREADS": "2"}


# Runs compared.


def group(task: str, outcomes: list[int]) -> Group:
    asked = Task.of(f"{task}?", id=task)
    return Group(
        asked,
        [
            Trajectory(
                asked, attempt=n, stop=StopReason.ANSWERED, reward=float(won), rewards={"success": won}
            )
            for n, won in enumerate(outcomes)
        ],
    )


def evaluated(folder: Path, seed: int, rate: float, outcomes: dict[str, list[int]]) -> None:
    recipe = {"name": "r", "seed": seed, "run": {"folder": str(folder)}, "rl": {"learning_rate": rate}}
    with RunWriter.create(folder, recipe) as run:
        run.write_groups([group(task, [0] * len(won)) for task, won in outcomes.items()], 0, "eval")
        run.write_groups([group(task, won) for task, won in outcomes.items()], 9, "eval")


def test_seeds_of_a_recipe_are_one_line_with_an_interval_over_seeds(tmp_path: Path) -> None:
    low = [{"a": [0, 0], "b": [1, 1]}, {"a": [0, 1], "b": [1, 1]}, {"a": [0, 0], "b": [0, 1]}]
    high = [{"a": [1, 1], "b": [1, 1]}, {"a": [1, 1], "b": [1, 1]}, {"a": [0, 1], "b": [1, 1]}]
    for seed in (0, 1, 2):
        evaluated(tmp_path / "study" / f"low-{seed}", seed, 1e-3, low[seed])
        evaluated(tmp_path / "study" / f"high-{seed}", seed, 3e-3, high[seed])
    with RunWriter.create(tmp_path / "study" / "unmeasured", {"name": "r", "seed": 0}):
        pass
    recipes, without = compared_recipes([tmp_path / "study"])
    assert without == ["study:unmeasured"]
    assert [(one.label, len(one.runs)) for one in recipes] == [
        ("learning_rate=0.003", 3),
        ("learning_rate=0.001", 3),
    ]
    means = [
        0.5,
        0.75,
        0.25,
    ]  # of the seeds with the low rate; Student's t with 2 degrees of freedom is 4.303
    reach = 4.30265 * statistics.stdev(means) / math.sqrt(3)
    estimate = recipes[1].estimate("success")
    assert estimate is not None and estimate.value == pytest.approx(statistics.fmean(means))
    assert (estimate.low, estimate.high) == (max(0.0, 0.5 - reach), min(1.0, 0.5 + reach))
    assert recipes_table(recipes).texts[1][:3] == ["learning_rate=0.001", "3", "9"]
    table = paired_table(recipes, recipes[1]).texts
    # by task: a 5/6 - 1/6, b 6/6 - 5/6; by seed: 1 - 0.5, 1 - 0.75, 0.75 - 0.25
    assert [row[1] for row in table] == ["2 tasks", "3 seeds"]
    assert table[0][2].startswith("41.7%") and table[1][2].startswith("41.7%")
    assert table[0][3:] == ["2/0/0", "0.5", "0.5"]  # both signs of two: 2 of 4 assignments as extreme
    assert table[1][3:] == ["3/0/0", "0.25", "0.25"]


def test_tasks_of_the_same_id_are_kept_apart(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "one", {"name": "r", "seed": 0}) as run:
        run.write_groups([group("a", [1]), group("a", [0])], 3, "eval")
    (recipe,), _ = compared_recipes([tmp_path / "one"])
    assert [one.task.id for one in recipe.pooled] == ["a", "a (2)"]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for folder, told in ((tmp_path, "holds no run"), (tmp_path / "none", "there is no folder")):
        done = CliRunner().invoke(app, ["compare", str(folder)])
        assert isinstance(done.exception, ConfigError) and told in str(done.exception)


# Real studies.


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_failed_run_stops_no_other_and_is_named() -> None:
    Path("broken.py").write_text("def broken(credit):\n    raise KeyError('nothing')\n")
    arguments = ["--sweep", "rl.algorithm=broken.py:broken,grpo", "--seeds", "0", "--parallel", "2"]
    process = Started(COMMAND, "train", "recipe.toml", *arguments, "rl.steps=1")
    _, errors = process.communicate()
    folder = Path("runs/adding-study-001")
    assert process.returncode == 2
    told = " ".join(errors.split())
    assert "1 of 2 runs failed: algorithm-broken.py-broken-seed-0: error: the estimator" in told
    assert f"ludus train --resume {folder}" in told
    assert RunFolder(folder / "algorithm-grpo-seed-0").curve_path.exists()
    Path("broken.py").write_text("from ludus.algos.advantages import grpo as broken\n")
    kept = (folder / "algorithm-grpo-seed-0" / "metrics.jsonl").read_bytes()
    process = Started(COMMAND, "train", "--resume", str(folder))
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "2 runs, 1 of them finished" in " ".join(errors.split())
    assert (folder / "algorithm-grpo-seed-0" / "metrics.jsonl").read_bytes() == kept
    names = [name for name, _ in sorted(recorded_in(folder))]
    assert names == [f"adding-study-001:algorithm-{one}-seed-0" for one in ("broken.py-broken", "grpo")]
    assert "algorithm=grpo" in ludus("compare", str(folder))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGHUP])
def test_a_stopped_study_goes_on_by_the_same_command(number: signal.Signals) -> None:
    """What is finished is not repeated, the interrupted run is resumed, and all is as if nothing had been."""
    command = ["train", "recipe.toml", "--seeds", "0,1", "rl.steps=12", "max_in_flight=1"]
    folder = Path("runs/adding-study-001")
    first, second = RunFolder(folder / "seed-0"), RunFolder(folder / "seed-1")
    process = Started(COMMAND, *command)
    process.wait_until(lambda: any(one.step > 2 for one in second.checkpoints()))
    process.send_signal(number)
    _, errors = process.communicate()
    assert number == signal.SIGKILL or (
        process.returncode == 128 + number and f"ludus train --resume {folder}" in errors
    )
    kept = first.metrics_path.read_bytes()
    process = Started(COMMAND, *command)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "2 runs, 1 of them finished" in errors and "seed-1: going on after step" in errors
    assert first.metrics_path.read_bytes() == kept
    assert [row["step"] for row in second.metrics() if "reward" in row] == list(range(1, 13))
    assert recipe_key(first.recipe()) == recipe_key(second.recipe()) is not None  # as the viewer asks
    assert study_settings(folder) is not None and not Path("runs/adding-study-002").exists()
    assert json.loads((folder / "seed-1" / "recipe.json").read_text())["seed"] == 1
