"""Environments from the command line: what is wrong with one is found soon, named, and has a fix."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ludus.cli.main import app, run_command

MODULE = '''
import time
import ludus
from ludus.envs import Step

class Corridor(ludus.Env):
    def reset(self, task, door):
        self.place, self.door = 5, door
        return f"A door, far on the {'right' if door > 5 else 'left'}."

    def step(self, action: str):
        """Take a step.

        Args:
            action: left or right.
        """
        if self.place != self.door and action in ("left", "right"):
            self.place += 1 if action == "right" else -1
            return Step("on", float(self.place == self.door), self.place == self.door)
        return Step("over", terminated=self.place == self.door)

class Hanging(Corridor):
    def step(self, action: str):
        """Take a step.

        Args:
            action: left or right.
        """
        time.sleep(100)

def several():
    return [1, 2]

def tasks():
    return [ludus.Task.of("Find it.", id=str(n), envs={"corridor": {"door": n}}) for n in (3, 7)]

def expert(task):
    while True:
        yield ludus.ToolCall("step", {"action": "right" if task.envs["corridor"]["door"] > 5 else "left"})

def spinning(task):
    time.sleep(100)
    yield "never"
'''
RECIPE = """
threads = 1
model = { scratch = { layers = 1, width = 32, heads = 2, kv_heads = 1 } }
tasks = { train = "corridor.py:tasks" }
agent = { envs = { corridor = "corridor.py:Corridor" } }
warm_start = { demonstrations = "corridor.py:expert", steps = 1, batch = 2 }
rl = { steps = 1, tasks = 2, attempts = 2 }
"""
NOWHERE = "http://nowhere.invalid:8400/corridor"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "corridor.py").write_text(MODULE)
    (tmp_path / "corridor.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(*words: str, code: int) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == code, done.output
    return done.output


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one message by which a command ends."""
    assert run_command(lambda **options: app(list(words), **options)) == 2
    return " ".join(capsys.readouterr().err.split())


def test_a_wrong_address_is_found_before_anything_is_tried(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = ("corridor.toml", f"agent.envs.corridor={NOWHERE}")
    problem = f"agent.envs.corridor: no environment server at {NOWHERE}"
    checked = said("check", "recipe", *elsewhere, code=1)
    assert checked.count("error:") == 1 and problem in checked and "was it started" in checked
    for command in ("train", "rollout"):
        told = refusal(capsys, command, *elsewhere)
        assert problem in told and "was it started" in told
    assert not (project / "runs").exists()
    assert "no environment server" in refusal(capsys, "check", "env", NOWHERE)


def test_what_makes_no_environment_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    message = "returned [1, 2], which has no method reset"
    assert message in said("check", "env", "corridor.py:several", code=1)
    assert message in said(
        "check", "recipe", "corridor.toml", "agent.envs.corridor=corridor.py:several", code=1
    )
    told = refusal(capsys, "check", "recipe", "corridor.toml", "agent.envs.corridor=ftp://host:3")
    assert "agent.envs: 'ftp://host:3' is no address of an environment" in told
