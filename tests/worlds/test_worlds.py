"""The prebuilt environments: what each needs is said before anything is imported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ludus.cli.main import app
from ludus.core import ConfigError
from ludus.envs import WORLDS, env_name, load_env
from ludus.observe import read_trajectories
from ludus.training import load_parts, load_recipe
from ludus.worlds.maths import gsm8k_training_tasks
from ludus.worlds.search import evaluation_questions

ROOT = Path(__file__).parent.parent.parent


def test_each_is_listed_with_what_it_needs() -> None:
    shown = CliRunner().invoke(app, ["envs"], env={"COLUMNS": "200"})
    assert "gymnasium:ID" in shown.output
    assert shown.exit_code == 0
    for world in WORLDS.values():
        assert world.name in shown.output and world.summary.split()[0] in shown.output


def test_what_is_not_installed_is_named_with_its_extra() -> None:
    world = replace(
        WORLDS["safe"],
        packages=("json", "no_such_package"),
        extra="worlds",
        programs=("sh|bash", "no-such-program"),
        data="LUDUS_NO_SUCH_DATA",
    )
    missing = world.missing()
    assert missing == [
        "no_such_package (pip install 'ludus-rl[worlds]')",
        "the program no-such-program",
        "data: set LUDUS_NO_SUCH_DATA to its folder (docs/envs/safe.md)",
    ]
    with pytest.raises(ConfigError, match="'safe' needs no_such_package"):
        world.tasks("train")


def test_data_that_is_named_and_not_there_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = WORLDS["alfworld"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "games").mkdir()
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "games"))
    monkeypatch.delenv("LUDUS_ALFWORLD_DATA", raising=False)
    assert world.missing() == []
    monkeypatch.setenv("LUDUS_ALFWORLD_DATA", "games")  # comes first, as for those who read it
    where = f"set it to its folder (docs/envs/alfworld.md), such as {tmp_path / 'games'}"
    assert world.missing() == [f"data: LUDUS_ALFWORLD_DATA = 'games' is no absolute path: {where}"]
    monkeypatch.setenv("LUDUS_ALFWORLD_DATA", "~/no-such-games")
    assert "'~/no-such-games' is no absolute path" in world.missing()[0]
    monkeypatch.setenv("LUDUS_ALFWORLD_DATA", str(tmp_path / "absent"))
    told = f"LUDUS_ALFWORLD_DATA = '{tmp_path / 'absent'}' does not exist"
    assert world.missing()[0].startswith(f"data: {told}")
    with pytest.raises(ConfigError, match="does not exist"):
        world.tasks("train")
    for variable, load in (
        ("LUDUS_GSM8K", gsm8k_training_tasks),
        ("LUDUS_QA_DATA", evaluation_questions),
    ):
        for value, problem in (("games", "is no absolute path"), (f"{tmp_path}/x", "does not exist")):
            monkeypatch.setenv(variable, value)
            with pytest.raises(ConfigError, match=f"{variable} = .* {problem}: set it to the f"):
                load()


def test_prebuilt_and_own_environments_are_loaded_by_name() -> None:
    assert load_env("safe") is load_env("ludus.worlds.safe:Safe")
    with pytest.raises(ConfigError, match="Did you mean 'safe'"):
        load_env("sfae")


RECIPE = """
rewards = ["outside_ludus.depot:fetched"]
[tasks]
train = "outside_ludus.depot:training_tasks"
[agent]
envs = { depot = "depot" }
[model.scratch]
layers = 1
width = 32
[budgets]
max_turns = 2
max_turn_tokens = 8
[warm_start]
demonstrations = "outside_ludus.depot:expert"
steps = 2
batch = 2
[rl]
steps = 1
attempts = 2
tasks = 1
[run]
folder = "run"
"""


def test_a_world_of_an_installed_package_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "outside_package"))
    monkeypatch.chdir(tmp_path)
    run = CliRunner()
    shown = run.invoke(app, ["envs"], env={"COLUMNS": "200"})
    assert "depot" in shown.output and "Fetch a box from a numbered shelf." in shown.output
    small = WORLDS["small_depot"]
    assert small.env is WORLDS["depot"].env and small.summary == "Fetch a box from a numbered shelf."
    assert env_name(load_env("depot")) == "depot"
    checked = run.invoke(app, ["check", "env", "depot", "--episodes", "4"])
    assert checked.exit_code == 0, checked.output
    assert "the expert succeeds on 3 of 3 tasks" in checked.output
    Path("recipe.toml").write_text(RECIPE)
    trained = run.invoke(app, ["train", "recipe.toml"], catch_exceptions=False)
    assert trained.exit_code == 0, trained.output
    [episodes] = Path("run").rglob("*.parquet")
    played = read_trajectories(episodes)
    assert played and all(one.failure is None and set(one.rewards) == {"fetched"} for one in played)


def test_training_and_held_out_tasks_are_disjoint() -> None:
    for world in WORLDS.values():
        if world.missing():
            continue
        train, held_out = world.tasks("train"), world.tasks("held_out")
        assert train and held_out
        assert not {task.id for task in train} & {task.id for task in held_out}


def test_tools_without_an_environment_are_held_to_the_contract() -> None:
    shown = CliRunner().invoke(app, ["check", "env", "maths", "--episodes", "4"])
    assert shown.exit_code == 0, shown.output
    clauses = ("determinism", "bad actions", "concurrent instances", "leaks", "gold solution")
    assert all(f"ok: {clause}: " in shown.output for clause in clauses)
    assert "the expert succeeds on 5 of 5 tasks" in shown.output


@pytest.mark.parametrize("name", ["babyai", "babyai_cpu", "code", "maths", "sql", "textcraft"])
def test_recipes_fit_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = WORLDS[name.partition("_")[0]]
    if world.missing():
        pytest.skip(f"needs ludus-rl[{world.extra}]")
    recipe = load_recipe(ROOT / "recipes" / f"{name}.toml")
    parts = load_parts(recipe)
    assert parts.held_out and all(task.metadata["subtask"] for task in parts.tasks)
    assert recipe.budgets.max_turns == world.max_turns or name.endswith("_cpu")
