"""`ludus mcp-rl`: from a server's list of tools to a trained model, with a scripted writer and judge."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cli_process import COMMAND as PROGRAM
from cli_process import Started
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ludus.cli.main import app
from ludus.cli.mcp_rl import _ranked
from ludus.core import Boundary, Group, Task, Trajectory
from ludus.core.failures import InfraError
from ludus.core.messages import Message
from ludus.llm import ChatError, load_chat_model
from ludus.observe import RunFolder
from ludus.rollouts.tasksets import load_tasks
from ludus.synth.scenarios import Scenario, ScenarioWriter, split_by_difficulty
from ludus.tools.mcp import mcp_tools
from openai_server import chat, error, serving

pytestmark = pytest.mark.timeout(300)  # on a busy machine a process takes long to start

SERVER = Path(__file__).parents[1] / "tools" / "mcp_server.py"
COMMAND = shlex.join([sys.executable, "-I", str(SERVER)])


def scenario(task: str, *calls: tuple[str, dict[str, Any]], difficulty: int = 1) -> dict[str, Any]:
    plan = [{"tool": tool, "arguments": arguments} for tool, arguments in calls]
    return {"task": task, "difficulty": difficulty, "plan": plan}


def add(a: int, b: int, difficulty: int = 1) -> dict[str, Any]:
    return scenario(f"What is {a} plus {b}, please?", ("add", {"a": a, "b": b}), difficulty=difficulty)


class Script:
    """A writer that proposes what it is given, and a judge that likes calls."""

    def __init__(self, *batches: list[dict[str, Any]]) -> None:
        self.batches = list(batches)
        self.asked: Counter[str] = Counter()
        self.questions: list[str] = []

    def __call__(self, body: dict[str, Any]) -> Any:
        text = body["messages"][-1]["content"]
        if text.startswith("Write "):
            self.asked["write"] += 1
            self.questions.append(text)
            return chat(json.dumps({"scenarios": self.batches.pop(0) if self.batches else [add(1, 1)]}))
        if text.startswith("A task for an AI agent"):
            self.asked["answer"] += 1
            done = "hopeless" not in text
            return chat(json.dumps({"done": done, "answer": re.findall(r"\d+", f"0 {text}")[-1]}))
        self.asked["judge"] += 1
        code = re.findall(r'"code": "([0-9a-f]+)"', text)[-1]
        found = re.findall(rf"<attempt-(\d+)-{code}>\n(.*?)\n</attempt-\1-{code}>", text, re.DOTALL)
        scores = [{"id": int(n), "score": min(1.0, 0.1 * len(said))} for n, said in found]
        return chat(json.dumps({"code": code, "scores": scores}))


async def test_scenarios_are_tried_before_they_are_kept() -> None:
    script = Script(
        [
            add(1, 2),
            scenario("What is 1 plus 2, please?", ("echo", {"text": "3"})),  # the same words
            scenario("Tell me the sum of two numbers", ("add", {"a": 1, "b": 2})),  # the same calls
            scenario("Multiply these numbers", ("multiply", {"a": 1, "b": 2})),
            scenario("Add a number to nothing", ("add", {"a": 1})),
            scenario("Be refused by the server", ("refuse", {})),
            scenario("Do something hopeless", ("echo", {"text": "x"})),
        ],
        [scenario("Count, and count once more", ("count", {}), ("count", {}), difficulty=2)],
        [scenario("Count a single time", ("count", {}), difficulty=3)],
    )
    tools = mcp_tools({"mcp": COMMAND, "per_episode": True})
    with serving(script) as server:
        model = load_chat_model(f"{server.url}#script")
        made = await ScenarioWriter(model, tools, about="It counts.").write(2, 1)
        await model.close()
    await tools.aclose()
    kept = sorted([*made.train, *made.held_out], key=lambda one: one.difficulty)
    assert [one.difficulty for one in kept] == [1, 2, 3] and len(made.held_out) == 1
    assert made.proposed == 9 and made.rejected == {
        "much like another one": 2,
        "calls a tool that is not there": 1,
        "a call fails (bad_arguments)": 1,
        "a call fails (tool_raised)": 1,
        "the results do not do the task": 1,
    }
    # the demonstration is what really happened, on a server of its own
    assert [message.content for message in kept[1].messages if message.role == "tool"] == ["1", "2"]
    assert [message.content for message in kept[2].messages if message.role == "tool"] == ["1"]
    assert kept[0].messages[-1] == Message("assistant", "3")
    assert '"name": "add"' in script.questions[0] and "It counts." in script.questions[0]
    assert "What is 1 plus 2" in script.questions[1]  # what there is already
    assert '- add {"a": 1}: ' in script.questions[1]  # and what was tried in vain


# What a model of 1.5B parameters wrote, shortened: it numbers its tasks in place of a difficulty, forgets a
# plan, and writes fewer than it was asked for.
NUMBERED = """```json
{
    "scenarios": [
        {
            "task": "What is 21 plus 4?",
            "difficulty": 1,
            "plan": [{"tool": "add", "arguments": {"a": 21, "b": 4}}]
        },
        {
            "task": "Have the words good morning echoed",
            "difficulty": 7,
            "plan": [{"tool": "echo", "arguments": {"text": "good morning"}}]
        },
        {
            "task": "Convert 3:00 PM to UTC",
            "difficulty": 8
        }
    ]
}
```"""


async def test_one_bad_entry_does_not_cost_the_others() -> None:
    def reply(body: dict[str, Any]) -> Any:
        asks_for_tasks = body["messages"][0]["content"].startswith("Write ")
        return chat(NUMBERED if asks_for_tasks else '{"done": true, "answer": "25"}')

    tools = mcp_tools({"mcp": COMMAND})
    with serving(reply) as server:
        model = load_chat_model(f"{server.url}#small")
        made = await ScenarioWriter(model, tools).write(1, 1)
        await model.close()
    await tools.aclose()
    assert sorted(one.difficulty for one in [*made.train, *made.held_out]) == [1, 5]
    assert made.proposed == 3 and made.rejected == {"not in the form that was asked for": 1}


async def test_a_writer_that_writes_one_at_a_time_is_asked_on() -> None:
    """A small model answers "write 8" with one, and with the same one again: more may still come."""
    script = Script(*[[add(number // 2, 7)] for number in range(20)])
    tools = mcp_tools({"mcp": COMMAND})
    with serving(script) as server:
        model = load_chat_model(f"{server.url}#small")
        made = await ScenarioWriter(model, tools).write(8, 2)
        await model.close()
    await tools.aclose()
    assert (len(made.train), len(made.held_out)) == (8, 2)
    assert made.rejected == {"much like another one": 9}


async def test_a_writer_that_fails_once_costs_one_question() -> None:
    script = Script([add(1, 2)], [add(3, 4)])
    tools = mcp_tools({"mcp": COMMAND})
    with serving(script) as server:
        model = load_chat_model({"address": f"{server.url}#slow", "retries": 0})
        server.faults.append(error(500))
        made = await ScenarioWriter(model, tools).write(1, 1)
        assert made.rejected == {"no answer of the writer": 1} and len(made.train) == 1
        server.faults += [error(500)] * 4
        with pytest.raises(ChatError, match="500"):
            await ScenarioWriter(model, tools).write(1, 1)
        await model.close()
    await tools.aclose()


def test_what_the_writer_said_is_not_asked_for_again(tmp_path: Path) -> None:
    """The scenarios of a command that was stopped are there when it is given again."""
    script = Script([add(1, 2)], [add(3, 4)])
    with serving(script) as server:
        command = ["mcp-rl", COMMAND, "--writer", f'{{ address = "{server.url}#s", retries = 0 }}']
        command += ["--scenarios", "2", "--held-out", "1", "--out", str(tmp_path / "made")]
        command += ["rl.no_such_key=1"]  # ends the command when the scenarios are written
        assert CliRunner().invoke(app, command).exit_code != 0
        asked = dict(script.asked)
        (tmp_path / "made" / "scenarios.json").unlink(missing_ok=True)
        assert CliRunner().invoke(app, command).exit_code != 0
        assert script.asked == asked


def test_answers_that_could_not_be_used_are_asked_for_again(tmp_path: Path) -> None:
    good = [add(1, 2), add(3, 4), add(5, 6)]
    script = Script(*[[scenario("Do something hopeless", ("echo", {"text": "x"}))]] * 4, good)
    with serving(script) as server:
        command = ["mcp-rl", COMMAND, "--writer", f"{server.url}#s", "--out", str(tmp_path / "made")]
        command += ["--scenarios", "2", "--held-out", "1", "rl.no_such_key=1"]
        first = CliRunner().invoke(app, command)
        assert "the same command asks again" in str(first.exception)
        second = CliRunner().invoke(app, command)
        assert "no_such_key" in str(second.exception), "the scenarios are there"
    assert script.asked["write"] == 5


@pytest.mark.parametrize("signalled", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_while_scenarios_are_written_says_how_to_go_on(tmp_path: Path, signalled: int) -> None:
    script, goes_on = Script([add(1, 2)]), threading.Event()

    def reply(body: dict[str, Any]) -> Any:
        if script.asked["answer"]:  # the second question is never answered
            goes_on.wait()
        return script(body)

    with serving(reply) as server:
        folder = tmp_path / "made"
        process = Started(
            PROGRAM, "mcp-rl", COMMAND, "--writer", f"{server.url}#s", "--out", str(folder)
        )
        process.wait_until(lambda: script.asked["answer"] == 1)
        process.send_signal(signalled)
        _, errors = process.communicate()
        goes_on.set()
    assert process.returncode == 128 + signalled and "Traceback" not in errors
    told = "stopped; the writer's answers are kept. Go on with the same command and --out"
    assert f"{told} {folder}" in errors
    assert list((folder / "answers").glob("*/*.json"))


def test_ctrl_c_in_its_training_names_the_command_itself(tmp_path: Path) -> None:
    script = Script([add(a, b) for a in range(2, 5) for b in range(2, 4)])
    with serving(script) as server:
        folder = tmp_path / "made {x}"
        command = [
            "mcp-rl",
            COMMAND,
            "--writer",
            f"{server.url}#s",
            "--allow",
            "add",
            "--out",
            str(folder),
        ]
        command += ["--scenarios", "4", "--held-out", "2", "--imitate", "100000", "warm_start.batch=2"]
        process = Started(PROGRAM, *command, "model.scratch.width=32", "run.checkpoint_every=1")
        process.wait_until(lambda: bool(RunFolder(folder / "run").checkpoints()))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130 and "saved after step" in errors
    assert f"Go on with: the same command and --out {folder}" in errors
    assert "--resume" not in errors


def test_a_model_from_scratch_writes_nothing() -> None:
    said = CliRunner().invoke(app, ["mcp-rl", COMMAND, "--writer", "policy", "--model", "scratch"])
    assert said.exit_code != 0 and "from scratch cannot write" in str(said.exception or said.output)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=40), st.integers(0, 1000))
def test_the_split_has_the_same_mix(levels: list[int], seed: int) -> None:
    all_of = [Scenario(f"task {n}", level, ()) for n, level in enumerate(levels)]
    held_out = len(levels) // 4
    first, second = split_by_difficulty(all_of, held_out, seed)
    assert (
        len(second) == held_out
        and {*first} | {*second} == {*all_of}
        and len(first) + len(second) == len(levels)
    )
    for level in set(levels):
        share = levels.count(level) * held_out / len(levels)
        assert abs(sum(one.difficulty == level for one in second) - share) < 2


@pytest.mark.parametrize("goes_on", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_whole_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_on: bool) -> None:
    """One tiny run: what is written, that RULER ranks groups, and that the same command goes on."""
    monkeypatch.chdir(tmp_path)
    script = Script([add(a, b) for a in range(2, 5) for b in range(2, 4)])
    with serving(script) as server:
        command = [
            "mcp-rl",
            COMMAND,
            "--writer",
            f"{server.url}#script",
            "--allow",
            "add",
            "--out",
            "made",
        ]
        command += ["--scenarios", "4", "--held-out", "2", "--imitate", "2"]
        small = [
            "rl.steps=1",
            "rl.tasks=2",
            "rl.attempts=2",
            "warm_start.batch=2",
            "model.scratch.width=32",
        ]
        small += ["budgets.max_turn_tokens=8", "budgets.max_turns=1"]
        said = CliRunner().invoke(app, [*command, *small])
        assert said.exit_code == 0, said.output
        first = dict(script.asked)
        if goes_on:
            again = CliRunner().invoke(app, [*command, *small])
            assert again.exit_code == 0, again.output
            assert script.asked["write"] == 1  # the scenarios are used again, and so is the run
        for option in (["--judge", f"{server.url}#other"], ["--imitate", "3"], ["--model", "org/other"]):
            other = CliRunner().invoke(app, [*command, *option])
            assert other.exit_code != 0
            said_of = str(other.exception)
            assert option[0] in said_of and "--out" in said_of, said_of
        assert "#other" not in (tmp_path / "made" / "report.md").read_text()
    assert first["write"] == 1 and first["answer"] == 6 and first["judge"] >= 1
    folder = tmp_path / "made"
    tasks = load_tasks(str(folder / "train.jsonl"))
    assert len(tasks) == 4 and tasks[0].metadata["plan"][0]["tool"] == "add"
    held_out = {json.dumps(task.metadata["plan"]) for task in load_tasks(str(folder / "held_out.jsonl"))}
    assert len(held_out) == 2 and not held_out & {json.dumps(task.metadata["plan"]) for task in tasks}
    run = RunFolder(folder / "run")
    assert run.recipe()["group_rewards"][0]["reward"] == "ruler"
    [played] = [file for file in run.trajectory_files() if file.split == "train"]
    assert all("ruler" in episode.rewards for episode in run.trajectories(played.step))
    report = (folder / "report.md").read_text()
    assert "at the start" in report and "after RL" in report
    assert "4 scenarios to train on, 2 held out" in report


class DumbJudge:
    async def score_group(self, group: Group) -> list[float]:
        if group.task.id == "1":
            raise InfraError(Boundary.REWARD, "the judge says nothing")
        return [0.25, 0.75]


async def test_a_scenario_without_a_verdict_has_a_reason() -> None:
    def played(*ids: str) -> list[Trajectory]:
        return [Trajectory(Task.of("?", id=one), reward=0.0) for one in ids]

    found = {"at the start": played("1", "2", "3"), "after RL": played("1", "2")}
    scores, reasons = await _ranked(DumbJudge(), found)
    assert scores == {"at the start": [0.25], "after RL": [0.75]}
    assert reasons.total() == 2 and any("the judge says nothing" in why for why in reasons)
    assert any("lost" in why for why in reasons)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["mcp-rl", COMMAND])
    assert said.exit_code != 0
    with serving(lambda body: {}) as server:
        gone = f"{server.url}#s"
    folder = tmp_path / "gone"
    said = CliRunner().invoke(app, ["mcp-rl", COMMAND, "--writer", gone, "--out", str(folder)])
    assert "there is no model server at" in str(said.exception) and not folder.exists()
    with serving(Script([scenario("Do something hopeless", ("echo", {"text": "x"}))] * 3)) as server:
        command = [
            "mcp-rl",
            COMMAND,
            "--writer",
            f"{server.url}#s",
            "--scenarios",
            "3",
            "--out",
            str(tmp_path),
        ]
        said = CliRunner().invoke(app, command)
    assert said.exit_code != 0 and "the results do not do the task" in str(said.exception or said.output)
