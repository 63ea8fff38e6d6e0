"""Paths in a recipe: what lies beside it is found from any working directory, also by a run that goes on."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import datasets
import pytest
from training_helpers import TINY, expert, tasks
from typer.testing import CliRunner

import ludus
from ludus.cli.main import app
from ludus.core import ConfigError
from ludus.training import Recipe, load_parts, load_recipe
from ludus.training.api import new_run

CODE = """
import ludus

@ludus.reward
def even(answer: str) -> float:
    return float(len(answer) % 2 == 0)

def expert(task):
    yield "4"
"""
RECIPE = """
name = "beside"
threads = 1
rewards = ["code/own.py:even", { reward = "sql_match", folder = "data", database = "shop.db", weight = 0.5 }]
[model]
name = "models/tiny"
[agent]
tools = [{ tool = "sql", database = "data/shop.db" }]
system = "data/rows.jsonl"
[tasks]
train = "data/rows.jsonl"
evaluation = "dataset:data/sums:main@test"
columns = { prompt = "question", target = "answer" }
[budgets]
max_turns = 1
max_turn_tokens = 4
[engine]
cache_tokens = 4096
[[stage]]
kind = "sft"
demonstrations = "code/own.py:expert"
held_out = "data/shown.json"
columns = { prompt = "question", completion = "answer" }
steps = 1
batch = 1
[[stage]]
kind = "dpo"
pairs = "data/pairs.parquet"
[[stage]]
kind = "distill"
teacher = "models/tiny"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe and all that it names; the working directory is another one."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for folder in ("code", "data/sums/main", "models/tiny"):
        (home / folder).mkdir(parents=True)
    elsewhere.mkdir()
    row = {"question": "2+2?", "answer": "select 4"}
    for name in ("data/rows.jsonl", "data/sums/main/test.jsonl"):
        (home / name).write_text(json.dumps(row))
    (home / "data/shown.json").write_text(json.dumps([row]))
    (home / "data/pairs.parquet").touch()
    (home / "data/sums/README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files: [{split: test, path: main/test.jsonl}]\n---\n"
    )
    (home / "code/own.py").write_text(CODE)
    sqlite3.connect(home / "data/shop.db").execute("create table t (x)").connection.close()
    (home / "recipe.toml").write_text(RECIPE)
    monkeypatch.chdir(elsewhere)
    return home


def test_every_kind_of_path_follows_the_recipe(home: Path) -> None:
    written = 'folder = "data/shop.db"\nwandb = "data/rows.jsonl"'
    text = RECIPE.replace("[budgets]", f'[run]\nsinks = ["code/own.py:even"]\n{written}\n[budgets]')
    (home / "recipe.toml").write_text(text)
    recipe = load_recipe(home / "recipe.toml")
    assert recipe.run.sinks == (f"{home}/code/own.py:even",)
    assert (recipe.run.folder, recipe.run.wandb.project) == ("data/shop.db", "data/rows.jsonl"), (
        "not read from"
    )
    sft, dpo, distill = recipe.stage
    shop = str(home / "data/shop.db")
    assert recipe.model.name == distill.teacher == str(home / "models/tiny")  # type: ignore[union-attr]
    assert recipe.tasks.train == str(home / "data/rows.jsonl")
    assert recipe.tasks.evaluation == f"dataset:{home}/data/sums:main@test"
    assert recipe.rewards[0] == f"{home}/code/own.py:even"
    assert recipe.rewards[1]["folder"] == str(home / "data")  # type: ignore[index]
    assert recipe.agent.tools[0]["database"] == shop  # type: ignore[index]
    assert recipe.agent.system == "data/rows.jsonl", "a text, not a path"
    assert sft.demonstrations == f"{home}/code/own.py:expert"  # type: ignore[union-attr]
    assert sft.held_out == str(home / "data/shown.json")  # type: ignore[union-attr]
    assert dpo.pairs == str(home / "data/pairs.parquet")  # type: ignore[union-attr]
    parts = load_parts(recipe)
    assert [task.target for task in (*parts.tasks, *parts.held_out)] == ["select 4"] * 2


def test_the_working_directory_is_asked_second(home: Path) -> None:
    """As recipes were read before: what is not beside the recipe, and what is typed on the command line."""
    (home / "data/rows.jsonl").unlink()
    with pytest.raises(
        ConfigError,
        match=r"tasks\.train: there is no file /.*/elsewhere/data/rows\.jsonl .*beside the recipe first",
    ):
        load_parts(load_recipe(home / "recipe.toml"))
    Path("data").mkdir()
    for name in ("rows.jsonl", "typed.jsonl"):
        Path("data", name).write_text(json.dumps({"question": "3+3?", "answer": "6"}))
    assert load_parts(load_recipe(home / "recipe.toml")).tasks[0].target == "6"
    shutil.copy(home / "data/shown.json", home / "data/typed.jsonl")
    typed = load_recipe(home / "recipe.toml", ["tasks.train=data/typed.jsonl"])
    assert load_parts(typed).tasks[0].target == "6"


def test_a_run_finds_them_again_from_anywhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(home / "models")
    whole = {name: table for name, table in TINY.items() if name not in ("rl", "run")}
    made = ludus.train(
        **whole,
        tasks=tasks(2),
        demonstrations=expert,
        stage=[{"kind": "sft", "steps": 1, "batch": 1}],
        run={"folder": "first"},
    )
    shutil.copytree(made.model, home / "models/tiny")
    text = (home / "recipe.toml").read_text()
    (home / "recipe.toml").write_text(text[: text.index('[[stage]]\nkind = "dpo"')])
    result = ludus.train(home / "recipe.toml", run={"folder": "second"})
    assert result.run.path.resolve() == Path("second").resolve(), "what is written is written here"
    second = Path("second").resolve()
    monkeypatch.chdir(home.parent)
    ludus.train(resume=second)
    done = CliRunner().invoke(app, ["eval", str(second), "--tasks", "1"], catch_exceptions=False)
    assert done.exit_code == 0, done.output


def test_folders_relative_to_the_working_directory_are_kept_absolute(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is resumed elsewhere has its teacher again."""
    monkeypatch.chdir(home)
    stage = [{"kind": "distill", "teacher": "models/tiny"}]
    recipe = Recipe.parse({"model": {"name": "models/tiny"}, "stage": stage, "run": {"folder": "third"}})
    with new_run(recipe) as run:
        assert run.recipe()["stage"][0]["teacher"] == str(home / "models/tiny")
