"""What people look at: lost episodes, steps without signal, whose error it was, recorded episodes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ludus.cli.main import app
from ludus.observe import RunFolder

MODULE = '''
import ludus

@ludus.tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

@ludus.reward(name="success")
def fragile(trajectory, task) -> float:
    if int(task.id) % 5 in (1, 3):
        return {}["missing"]
    return 1.0

@ludus.reward(name="success")
def constant(trajectory) -> float:
    return 0.0

def tasks():
    return [ludus.Task.of(f"{n} plus {n}?", target=str(2 * n), id=str(n)) for n in range(10)]
'''
RECIPE = """
name = "adding"
threads = 1
rewards = ["task.py:fragile"]

[model.scratch]
layers = 1
width = 32
heads = 2
kv_heads = 1

[tasks]
train = "task.py:tasks"
evaluation = "task.py:tasks"

[agent]
tools = ["task.py:add"]

[budgets]
max_turns = 2
max_turn_tokens = 4

[engine]
cache_tokens = 4096
max_running = 16

[rl]
steps = 3
tasks = 10
attempts = 2
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "task.py").write_text(MODULE)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def ludus(*arguments: str) -> str:
    """Run a command in this process; the output of one that succeeded, on one line."""
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_lost_episodes_are_in_what_people_look_at(project: Path) -> None:
    said = ludus("train", "recipe.toml", "rl.steps=1")
    assert "success 100.0% (6 of 10 scored), 4 FAILED (95% interval" in said
    assert "FAILED 40%" in said, "in the progress line"
    assert "4 of 10 held-out episodes (40%) failed through no fault of the model's" in said
    assert "KeyError: 'missing'" in said
    report = RunFolder(project / "runs" / "adding-001").report_path.read_text()
    rows = [line for line in report.splitlines() if line.startswith("| a")]
    assert len(rows) == 2 and all("100.0% (6 of 10 scored)" in row for row in rows)
    assert all("| 4 of 10 |" in row and re.search(r"\| \d\d\.\d% to 100\.0% \|", row) for row in rows)
    assert "8 of 20 held-out episodes (40%)" in report and "8 of 20 training episodes" in report
    assert "Most often" in report and "KeyError: 'missing'" in report


def test_steps_without_signal_are_told_with_what_to_do(project: Path) -> None:
    said = ludus("train", "recipe.toml", 'rewards=["task.py:constant"]', "rl.steps=3", "rl.tasks=2")
    assert "NO SIGNAL 100%" in said and "no signal in 3 steps in a row" in said
    report = RunFolder(project / "runs" / "adding-001").report_path.read_text()
    assert "no signal in 3 of 3 steps" in report and "the tasks are too hard" in report
    assert "rl.attempts" in report
