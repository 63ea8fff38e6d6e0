"""Environments from the command line: what is wrong with one is found soon, named, and has a fix."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ludus.cli.main import app, run_command
from ludus.envs.served import load_served
from ludus.serve import ToolServer
from ludus.tools.hosting import LocalHost

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
    assert "agent.envs: 'ftp://host:3' is not a valid environment address" in told


def test_an_expert_that_never_yields_is_named_with_its_place(project: Path) -> None:
    words = ("warm_start.demonstrations=corridor.py:spinning", "--seconds", "1")
    checked = said("check", "recipe", "corridor.toml", *words, code=1)
    assert "error: the expert corridor.py:spinning on 2 tasks did not end within 1 s" in checked
    line = 1 + MODULE[: MODULE.index("time.sleep(100)\n    yield")].count("\n")
    assert f"corridor.py:{line} in spinning" in checked and "rewards" not in checked


def test_a_step_that_hangs_is_named_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludus.rollouts.checked_instance._STEP_SECONDS", 0.5)
    line = 1 + MODULE[: MODULE.index("time.sleep(100)\n\ndef several")].count("\n")
    place = f"did not return within 0.5 s: it was at corridor.py:{line} in step then"
    words = ("check", "recipe", "corridor.toml", "agent.envs.corridor=corridor.py:Hanging")
    checked = said(*words, code=1)
    assert place in checked and checked.count("error:") == 1
    assert place in said("check", "env", "corridor.py:Hanging", "--tasks", "corridor.py:tasks", code=1)


def test_tasks_that_differ_by_their_seeds_alone_are_held_out() -> None:
    pytest.importorskip("gymnasium", reason="the extra gymnasium")
    words = ["agent.envs={lake='gymnasium:FrozenLake-v1'}", "warm_start.demonstrations=corridor.py:left"]
    Path("corridor.py").write_text(MODULE + "\ndef left(task):\n    yield 'I give up.'\n")
    train, other = "gymnasium:FrozenLake-v1?size=SIZE", "gymnasium:FrozenLake-v1@held_out?size=3"
    for size in ("1", "5"):
        tasks = [f"tasks.train={train.replace('SIZE', size)}", f"tasks.evaluation={other}"]
        checked = said("check", "recipe", "corridor.toml", *words, *tasks, code=0)
        assert "3 held out" in checked and "trained on too" not in checked
    same = [
        f"tasks.train={train.replace('SIZE', '5')}",
        f"tasks.evaluation={train.replace('SIZE', '2')}",
    ]
    checked = said("check", "recipe", "corridor.toml", *words, *same, code=0)
    assert "2 held-out tasks are trained on too" in checked


def test_worlds_that_are_tools_are_known_and_told_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = refusal(capsys, "serve", "env", "maths")
    assert "ludus serve tools python" in told and "agent.tools = ['python']" in told
    told = refusal(capsys, "serve", "env", "mathss")
    assert (
        "Did you mean 'maths'?" in told and "tools alone, which need no environment: code, maths" in told
    )


def test_what_was_not_tried_is_not_ok() -> None:
    Path("endless.py").write_text(
        "import ludus\n\nclass Endless(ludus.Env):\n    def step(self, action: str) -> str:\n"
        '        """Wait.\n\n        Args:\n            action: Any.\n        """\n        return \'on\'\n'
    )
    checked = said("check", "env", "endless.py:Endless", code=0)
    assert "skipped: action after done: not tried" in checked
    assert "ok: action after done" not in checked


def test_an_environment_on_a_server_is_checked_with_its_rewards(project: Path) -> None:
    """In a thread, so that the server and the command have an event loop each."""
    with in_thread([{"env": "corridor.py:Corridor"}, {"env": "safe"}]) as address:
        told = said("check", "env", f"{address}/corridor", code=1)
        assert "cannot be reset with an empty task" in told and "--tasks FILE.jsonl" in told
        assert "let reset accept" not in told
        own = ("--tasks", "corridor.py:tasks", "--expert", "corridor.py:expert")
        gold = "ok: gold solution: the expert succeeds on 2 of 2 tasks"
        assert gold in said("check", "env", f"{address}/corridor", *own, "--episodes", "2", code=0)
        told = said("check", "env", f"{address}/safe", "--episodes", "2", code=0)
        assert "the server calls it 'safe', like the prebuilt environment" in told
        assert "ok: gold solution: the expert succeeds on 5 of 5 tasks" in told
        theirs = ("--tasks", "ludus.worlds.safe:held_out_tasks", "--expert", "ludus.worlds.safe:expert")
        named = ("--reward", "ludus.worlds.safe:opened", "--episodes", "2")
        told = said("check", "env", f"{address}/safe", *theirs, *named, code=0)
        assert "ok: gold solution" in told and "prebuilt" not in told


@contextmanager
def in_thread(envs: list[Any]) -> Iterator[str]:
    """Serve environments from a thread of this process; the address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = ToolServer(LocalHost(partial(load_served, envs)))
    try:
        yield asyncio.run_coroutine_threadsafe(server.start(), loop).result(30)
    finally:
        asyncio.run_coroutine_threadsafe(server.drain_and_stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_an_override_leaves_a_table_out() -> None:
    checked = said("check", "recipe", "corridor.toml", code=0)
    assert "the expert, given all the turns it needs" in checked
    checked = said("check", "recipe", "corridor.toml", "warm_start=none", code=0)
    assert "the expert" not in checked
    assert "warm_start=none" in " ".join(said("train", "--help", code=0).replace("│", " ").split())
