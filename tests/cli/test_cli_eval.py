"""`ludus eval` as a process: stopped by Ctrl-C or killed, it goes on where it was."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from cli_process import COMMAND, Started
from typer.testing import CliRunner

from ludus.cli.main import app

pytestmark = pytest.mark.timeout(300)  # on a busy machine a process takes long to start

MODULE = """
import asyncio
import os
import ludus

class Short(ludus.Agent):
    async def run(self, episode):
        turn = await episode.generate(max_tokens=3)
        with open("played.txt", "a") as file:
            file.write(episode.task.id + "\\\\n")
        await asyncio.sleep(float(os.environ.get("ODD_SECONDS", "0")))
        episode.answer(turn.text)

@ludus.reward
async def success(trajectory) -> float:
    return float(trajectory.actions[0].tokens[0] % 2)

def held_out():
    return [ludus.Task.of(f"{n}?", id=str(n)) for n in range(10)]
"""
RECIPE = """
name = "odd"
threads = 1
max_in_flight = 1
rewards = ["odd_task.py:success"]

[model.scratch]
layers = 1
width = 32
heads = 2
kv_heads = 1

[tasks]
train = "odd_task.py:held_out"
evaluation = "odd_task.py:held_out"

[agent]
loop = "odd_task.py:Short"

[engine]
cache_tokens = 4096
max_running = 16
"""
MEASURE = ("eval", "recipe.toml", "--attempts", "2", "--results")


def ludus(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def measured(folder: Path) -> object:
    return json.loads((folder / "report.json").read_text())["measured"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "odd_task.py").write_text(MODULE.replace("\\\\n", "\\n"))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path


@pytest.mark.parametrize("ending", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_an_evaluation_that_was_stopped_goes_on(
    project: Path, ending: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    process = Started(COMMAND, *MEASURE, "stopped", ODD_SECONDS="0.15")
    process.wait_until(lambda: len(list(project.glob("stopped/*/*/parts/*.parquet"))) >= 3)
    process.send_signal(ending)
    said, errors = process.communicate()
    assert process.returncode == (130 if ending is signal.SIGINT else -signal.SIGKILL), errors
    assert "Traceback" not in errors
    if ending is signal.SIGINT:
        assert "--results stopped" in said
    kept = len(list(project.glob("stopped/*/*/parts/*.parquet")))
    assert 3 <= kept < 10
    (project / "played.txt").unlink()

    assert f"{kept} tasks had been played before" in ludus(*MEASURE, "stopped")
    assert len((project / "played.txt").read_text().split()) == 2 * (10 - kept)
    ludus(*MEASURE, "whole")
    assert measured(project / "stopped") == measured(project / "whole")
