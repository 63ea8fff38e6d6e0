"""Several task sets from the command line: train, check, eval and rollout know all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ludus.cli.main import app, run_command
from ludus.observe import read_trajectories

MODULE = '''
import ludus

@ludus.tool
async def shout(text: str) -> str:
    """Say it loudly."""
    return text.upper()

@ludus.reward
async def success(answer, task) -> float:
    return float(answer == task.target)

@ludus.reward(name="success")
async def always(answer, task) -> float:
    return 1.0

def _tasks(word, first, last):
    return [ludus.Task.of(f"{word} {n}?", target=str(n), id=str(n)) for n in range(first, last)]

def sums():
    return _tasks("sum", 0, 4)

def sums_held_out():
    return _tasks("sum", 8, 10)

def words():
    return _tasks("word", 0, 4)

def words_held_out():
    return _tasks("word", 8, 11)
'''
RECIPE = """
name = "mixed"
threads = 1
rewards = ["task.py:success"]

[model.scratch]
layers = 1
width = 32
heads = 2
kv_heads = 1

[[task_sets]]
name = "sums"
train = "task.py:sums"
evaluation = "task.py:sums_held_out"

[[task_sets]]
name = "words"
train = "task.py:words"
evaluation = "task.py:words_held_out"
tools = ["task.py:shout"]
rewards = ["task.py:always"]
budgets = { max_turns = 1 }

[budgets]
max_turns = 2
max_turn_tokens = 8

[engine]
cache_tokens = 4096
max_running = 16

[rl]
steps = 1
tasks = 2
attempts = 2
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "task.py").write_text(MODULE)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


def ludus(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.output


def test_check_looks_at_every_set(project: Path) -> None:
    said = ludus("check", "recipe", "recipe.toml", "task_sets.1.rewards=['exact_match']")
    assert "sums: 4 tasks, 2 held out" in said and "words: 4 tasks, 3 held out" in said
    assert said.count("an episode was played") == 2 and "recipe.toml: ok" in said
    said = ludus("check", "recipe", "recipe.toml", code=1)
    assert "error: words:" in said and "error: sums:" not in said, "a reward that pays for anything"


def test_training_then_measuring_every_set(project: Path) -> None:
    ludus("train", "recipe.toml")
    said = ludus("eval", "runs/mixed-001", "--attempts", "2", "--results", "found")
    assert "task set" in said and "sums" in said and "words" in said
    found = json.loads((project / "found" / "report.json").read_text())
    by_set = {row["subtask"]: row for row in found["measured"]}
    assert {name: (row["tasks"], row["episodes"]) for name, row in by_set.items()} == {
        "all": (5, 10), "sums": (2, 4), "words": (3, 6)}  # fmt: skip
    assert by_set["words"]["success"]["value"] == 1.0 and by_set["words"]["turns"] == 1
    again = ludus("eval", "runs/mixed-001", "--attempts", "2", "--results", "found")
    assert "5 tasks had been played before" in again
    episodes = [read_trajectories(file) for file in sorted((project / "found").rglob("*.parquet"))]
    assert sorted(map(len, episodes)) == [4, 6], (
        "a file for each set, though their tasks have the same ids"
    )


def test_measuring_under_budgets_of_turns(project: Path) -> None:
    ludus("eval", "recipe.toml", "--turns", "1,2", "--tasks", "1", "--results", "found")
    found = json.loads((project / "found" / "report.json").read_text())
    assert [(row["max_turns"], row["subtask"], row["episodes"]) for row in found["measured"]] == [
        (turns, name, episodes)
        for turns in (1, 2)
        for name, episodes in (("all", 2), ("sums", 1), ("words", 1))
    ]


def test_rollouts_of_all_sets_and_of_one(project: Path) -> None:
    said = ludus("rollout", "recipe.toml", "--tasks", "1", "--out", "all.parquet")
    assert "sum 0?" in said and "word 0?" in said and "2 tasks × 1" in said
    assert len(read_trajectories("all.parquet")) == 2
    said = ludus("rollout", "recipe.toml", "--tasks", "1", "--set", "words")
    assert "word 0?" in said and "sum 0?" not in said and "1 tasks × 1" in said
    said = ludus("rollout", "recipe.toml", "--tasks", "1", "--set", "words", "--set", "sums")
    assert "sum 0?" in said and "word 0?" in said and "2 tasks × 1" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rollout", "recipe.toml", "--set", "wrds"), "no task set 'wrds'; there are: sums, words"),
        (("train", "recipe.toml", "task_sets.2.weight=2"), "there are 2, numbered from 0"),
        (("train", "recipe.toml", "task_sets.0.wight=2"), "task_sets.0.wight: unknown key; did you mean"),
        (("eval", "recipe.toml", "--by", "level"), "it has: task_set"),
    ],
)  # fmt: skip
def test_mistakes_are_explained(
    project: Path, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_command(lambda **options: app(list(arguments), **options))
    said = " ".join(capsys.readouterr().err.split())
    assert code == 2 and message in said and "Traceback" not in said
