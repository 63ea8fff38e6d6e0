"""What people look at: lost episodes, steps without signal, whose error it was, recorded episodes."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ludus.cli.check.recipe import judge_tool_calls
from ludus.cli.main import app
from ludus.core import Fault, ToolResult
from ludus.observe import RunFolder, explain_silence
from ludus.training import Recipe, train
from ludus.training.early_end import best_of

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
    assert "success 100.0% (6 of 10 scored), 4 LOST (95% interval" in said
    assert "LOST 40.0%" in said, "in the progress line"
    assert "4 of 10 held-out episodes (40.0%) were lost to infrastructure failures" in said
    assert "KeyError: 'missing'" in said
    report = RunFolder(project / "runs" / "adding-001").report_path.read_text()
    rows = [line for line in report.splitlines() if line.startswith("| a")]
    assert len(rows) == 2 and all("| 6 of 10 |" in row for row in rows)
    assert all(
        "| 4 |" in row and re.search(r"\| 100\.0% \[\d\d\.\d%, 100\.0%\] \|", row) for row in rows
    )
    assert "8 of 20 held-out episodes (40.0%)" in report and "8 of 20 training episodes" in report
    assert "Most often" in report and "KeyError: 'missing'" in report


def test_going_on_with_a_finished_run(project: Path) -> None:
    ludus("train", "recipe.toml", "rl.steps=1", "rl.tasks=2", 'rewards=["task.py:constant"]')
    run = RunFolder(project / "runs" / "adding-001")
    said = ludus("train", "--resume", "runs/adding-001")
    assert "is finished: all 1 steps are done" in said and "rl.steps=2" in said
    ludus("train", "--resume", "runs/adding-001", "rl.steps=2", "evaluation.every=1")
    assert [row["step"] for row in run.metrics() if "reward" in row] == [1, 2]
    assert "all 2 steps are done" in ludus("train", "--resume", "runs/adding-001")
    again = ["rl.steps=2", "rl.tasks=2", 'rewards=["task.py:constant"]', "evaluation.every=1"]
    ludus("train", "--resume", "runs/adding-001", *again)
    assert [row["step"] for row in run.metrics() if "reward" in row] == [1, 2], "nothing has changed"
    done = CliRunner().invoke(app, ["train", "--resume", "runs/adding-001", "rl.attempts=4"])
    assert "rl.attempts cannot be changed" in str(done.exception)
    best = best_of(run.metrics(), Recipe.parse(run.recipe(), ""))
    assert best is not None and best.step == 1, "both are equal, and of equal ones the first is the best"
    assert "p-000001: 1 tasks" in ludus(
        "eval", "runs/adding-001", "--checkpoint", "best", "--tasks", "1"
    )
    assert "p-000002: 1 tasks" in ludus("eval", "runs/adding-001", "--checkpoint", "2", "--tasks", "1")
    ludus("rollout", "runs/adding-001", "--checkpoint", "last", "--tasks", "1")
    done = CliRunner().invoke(app, ["eval", "runs/adding-001", "--checkpoint", "7"])
    assert "has no such checkpoint" in str(done.exception)


def test_a_run_made_in_python_says_what_a_command_lacks(project: Path) -> None:
    text = RECIPE.replace("fragile", "constant")
    (project / "recipe.toml").write_text(text)
    namespace: dict[str, Any] = {}
    exec(compile(MODULE, str(project / "script.py"), "exec"), namespace)
    train(
        "recipe.toml",
        tools=[namespace["add"]],
        tasks=namespace["tasks"](),
        rl={"steps": 1, "tasks": 2},
    )
    for words in (["train", "--resume"], ["eval"], ["rollout"]):
        done = CliRunner().invoke(app, [*words, "runs/adding-001"])
        assert "made in Python" in str(done.exception), words
        assert "tasks = 10 tasks; tools = add" in str(done.exception)
    named = ['agent.tools=["task.py:add"]', 'tasks.train="task.py:tasks"']
    ludus("eval", "runs/adding-001", *named, "--tasks", "1")
    ludus("train", "--resume", "runs/adding-001", *named, "rl.steps=2")
    ludus("train", "--resume", "runs/adding-001", "rl.steps=3")
    assert "=== task" in ludus("show", "runs/adding-001")


def test_steps_without_signal_are_told_with_what_to_do(project: Path) -> None:
    said = ludus("train", "recipe.toml", 'rewards=["task.py:constant"]', "rl.steps=3", "rl.tasks=2")
    assert "NO SIGNAL 100.0%" in said
    assert "step 1: Nothing to learn from in 1 of the last 1 steps: 0.0% succeed" in said
    report = RunFolder(project / "runs" / "adding-001").report_path.read_text()
    assert "Nothing to learn from in 3 of the last 3 steps" in report
    assert "the tasks are too hard" in report and "The run goes on" not in report
    assert "rl.attempts" in report


BROKEN = '''
import ludus

PRICES = {"tea": 2}

@ludus.tool
def buggy(name: str) -> int:
    """Has a mistake."""
    return name.no_such_method()

@ludus.tool
def always(name: str, count: int = 1) -> int:
    """Looks up the wrong thing."""
    return PRICES["missing"]

@ludus.tool
def lookup(name: str) -> int:
    """Raises rightly where there is no such thing."""
    return PRICES[name]

@ludus.tool
def strict(code: str) -> int:
    """Says what it wants."""
    raise ValueError("a code has ten digits")

@ludus.reward
def right(answer: str, target: str) -> float:
    return float(answer == target)

@ludus.reward
def typo(trajectory) -> float:
    return trajectory.no_such_thing

class Room(ludus.Env):
    def reset(self, task):
        return task.metadata["missing"]

class Angry(ludus.Agent):
    async def run(self, episode):
        raise RuntimeError(f"no {episode.task.id}")

def expert(task):
    yield task.no_such_attribute

@ludus.tool
def partly(name: str) -> int:
    """Knows one of the names that a check tries."""
    return {"alpha": {"price": 2}}.get(name)["price"]
'''


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        ("buggy", "AttributeError: 'str' object has no attribute 'no_such_method' (broken.py:9 in buggy)"),
        ("always", "raises KeyError: 'missing' (broken.py:14 in always), whatever it is given"),
        ("lookup", None),
        ("strict", None),
        ("partly", None),
    ],
)  # fmt: skip
def test_check_finds_a_tool_that_always_raises(project: Path, tool: str, said: str | None) -> None:
    (project / "broken.py").write_text(BROKEN)
    asked = ["check", "recipe", "recipe.toml", f'agent.tools=["broken.py:{tool}"]']
    done = CliRunner().invoke(app, [*asked, 'rewards=["broken.py:right"]'])
    if said is None:
        assert done.exit_code == 0 and "recipe.toml: ok" in done.output, done.output
        assert ("took none of 3 generated calls" in done.output) == (tool != "partly")
        return
    assert done.exit_code == 1 and said in done.output, done.output
    done = CliRunner().invoke(app, [*asked, 'rewards=["broken.py:right"]', "--no-call-tools"])
    assert done.exit_code == 0


READS_CALLS = """
import ludus

@ludus.reward(name="success")
def called(trajectory) -> float:
    return float(any(call.name == "add" for call in trajectory.calls))

@ludus.reward(name="success")
def backwards(answer: str, target: str) -> float:
    return float(answer == "") / 2
"""


def test_check_does_not_refuse_a_reward_that_reads_calls_and_not_the_answer(project: Path) -> None:
    (project / "reads.py").write_text(READS_CALLS)
    asked = ["check", "recipe", "recipe.toml"]
    done = CliRunner().invoke(app, [*asked, 'rewards=["reads.py:called"]'])
    said = " ".join(done.output.split())
    assert done.exit_code == 0 and "warning" in said and "every answer alike" in said, said
    done = CliRunner().invoke(app, [*asked, 'rewards=["reads.py:backwards"]'])
    assert done.exit_code == 1 and "gold_fails" in done.output, "it does read the answer"


WIPE = """
from pathlib import Path
from mcp.server.mcpserver import MCPServer
from mcp_types import ToolAnnotations

server = MCPServer("shop")

def note(word):
    with Path("called.txt").open("a") as file:
        file.write(word + "\\n")
    return word

@server.tool(annotations=ToolAnnotations(destructive_hint=True))
def wipe() -> str:
    return note("wipe")

@server.tool()
def pay(amount: int, to: str) -> str:
    return note("pay")

@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def look() -> str:
    return note("look")

server.run("stdio")
"""


@pytest.mark.parametrize(
    ("option", "called"),
    [([], {"look"}), (["--no-call-tools"], set()), (["--call-tools"], {"look", "pay", "wipe"})],
)
def test_check_calls_no_mcp_tool_that_may_change_something(
    project: Path, option: list[str], called: set[str]
) -> None:
    (project / "broken.py").write_text(BROKEN)
    (project / "wipe.py").write_text(WIPE)
    tools = f'agent.tools=["mcp:{sys.executable} wipe.py"]'
    asked = ["check", "recipe", "recipe.toml", tools, 'rewards=["broken.py:right"]', *option]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    notes = project / "called.txt"
    assert set(notes.read_text().split() if notes.exists() else []) == called
    said = " ".join(done.output.split())
    is_told = "skipped" in said and "'pay', 'wipe'" in said and "--call-tools" in said
    assert is_told == (not option)


ODD = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
              "serverInfo": {"name": "odd", "version": "1"}}
    if asked["method"] == "tools/list":
        inner = {"n": {"type": "intger"}, "who": {"$ref": "#/$defs/Person"}, "ok": {"$ref": "#/$defs/Good"}}
        schema = {"type": "object", "properties": inner, "$defs": {"Good": {"type": ["string", "null"]}}}
        result = {"tools": [{"name": "odd", "description": "Odd.", "inputSchema": schema}]}
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


def test_check_tool_names_the_mistakes_in_a_schema(project: Path) -> None:
    (project / "odd.py").write_text(ODD)
    done = CliRunner().invoke(app, ["check", "tool", f"mcp:{sys.executable} odd.py"])
    said = " ".join(done.output.split())
    assert done.exit_code == 0, said
    assert "warning: odd: properties.n: there is no type 'intger'" in said, said
    assert "properties.who: '#/$defs/Person' names nothing in the schema" in said
    assert "Good' names" not in said


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ('rewards=["broken.py:typo"]', "broken.py:32 in typo"),
        ('agent.envs={room="broken.py:Room"}', "KeyError: 'missing' (broken.py:36 in reset)"),
        ('agent.loop="broken.py:Angry"', "broken.py:40 in run"),
        ('warm_start={steps=1, demonstrations="broken.py:expert"}', "broken.py:43 in expert"),
    ],
)
def test_errors_of_user_code_have_file_and_line(project: Path, override: str, said: str) -> None:
    (project / "broken.py").write_text(BROKEN)
    recipe = ["recipe.toml", 'rewards=["broken.py:right"]', override]
    done = CliRunner().invoke(app, ["train", *recipe, "run.folder=run"])
    assert said in str(done.exception), "in the error that ends the run"
    place = said.rpartition("(")[2].rstrip(")").split(" in ")[0]
    file, line = place.split(":")
    trace = f'{file}", line {line}, in'
    assert done.output.count(trace) == 1, "the traceback, once on the screen"
    log = (project / "run" / "logs" / "ludus.log").read_text()
    assert log.count(trace) == 1 and "going on after" not in log


def test_recorded_episodes_are_shown(project: Path) -> None:
    hostile = "ludus.Task.of('\\x1b[2J\\u202eevil', id='0', target='0')"
    module = MODULE + f"\n\ndef hostile():\n    return [{hostile}, *tasks()[1:4]]\n"
    (project / "task.py").write_text(module)
    ludus("train", "recipe.toml", "rl.steps=1", "rl.tasks=4", 'tasks.train="task.py:hostile"')
    run = "runs/adding-001"
    said = ludus("show", run, "--step", "1", "--split", "train", "--limit", "0")
    assert said.count("=== task") == 8
    assert "\x1b" not in said and "\\x1b[2J\\u202eevil" in said
    said = ludus("show", run, "--failed", "--limit", "2")
    assert said.count("=== task") == 2 and said.count("KeyError: 'missing'") == 2
    assert "task.py:12 in fragile" in said and "the first 2; for more, --limit N" in said
    said = ludus("show", run, "--task", "2", "--attempt", "1", "--split", "train", "--prompt")
    assert said.count("=== task") == 1 and "--- prompt, " in said and "--- action, " in said
    assert "<|im_start|>user\n2 plus 2?<|im_end|>" in said and "<tools>" in said, "what the model read"
    said = ludus("show", run, "--failed", "--task", "2")
    assert "no recorded episode" in said and "was lost" in said and "=== task" not in said
    assert "--wrong shows" in said
    wrong = ["rl.tasks=1", 'rewards=["task.py:constant"]', "run.folder=wrong"]
    ludus("train", "recipe.toml", "rl.steps=1", *wrong)
    said = ludus("show", "wrong", "--wrong", "--split", "train", "--limit", "0")
    assert said.count("=== task") == 2, "scored, and no success"
    file = next((project / run / "trajectories").glob("*1.parquet"))
    assert ludus("show", str(file), "--task", "[12]", "--full").count("=== task") == 4
    budget = project / "measured" / "model" / "turns-1"
    budget.mkdir(parents=True)
    for place in (project / "measured" / "settings.json", budget.parent / "model.json"):
        place.write_text("{}")
    shutil.copy(file, budget / "episodes.parquet")
    (project / "silent").mkdir()
    (project / "silent" / "recipe.json").write_text("{}")
    said = ludus("show", "measured", "--task", "2")
    assert (
        said.count("=== task") == 2 and "step 0, eval: measured/model/turns-1/episodes.parquet" in said
    )
    for words, problem in (
        ([run, "--step", "7"], "there are episodes of the steps 0, 1"),
        ([run, "--task", "nobody"], "no episode"),
        ([run, "--wrong"], "no episode"),
        ([run, "--task", "nobody", "--failed"], "no episode"),
        (["runs/adding-01"], "did you mean runs/adding-001?"),
        (["runs/other"], "there is no run folder"),
        (["runs/other"], "; there are: runs/adding-001"),
        (["recipe.toml"], "cannot be read"),
        ([str(project)], "neither a folder of a run"),
        (["measured", "--split", "train"], "of the splits eval"),
        (["silent"], "has recorded none (run.trajectories_every)"),
        (["silent", "--tree"], "has recorded none (run.trajectories_every)"),
    ):
        done = CliRunner().invoke(app, ["show", *words])
        assert done.exit_code and problem in str(done.exception)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"reward_std": 0.0, "reward": 0.0, "success": 0.0}, "too hard"),
        ({"reward_std": 0.0, "reward": 1.0, "success": 1.0}, "too easy"),
        ({"reward_std": 0.0, "reward": 0.5, "success": 0.0}, "pays every episode the same"),
        ({"reward_std": 0.4, "reward": 0.5, "success": 0.5}, "almost deterministic"),
    ],
)
def test_why_there_is_no_signal(row: dict[str, float], expected: str) -> None:
    why = explain_silence(row)
    assert expected in why.likely and why.advice


@pytest.mark.parametrize("setting", ["seed=99999999999999999999999", "seed=-1", "threads=100000"])
def test_numbers_beyond_reason_are_refused(setting: str) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "safe.toml"
    answer = CliRunner().invoke(app, ["check", "recipe", str(recipe), setting])
    assert answer.exit_code != 0
    assert setting.split("=")[0] in str(answer.output) + str(answer.exception)


def test_a_judge_that_is_not_there_is_told_before_an_episode_waits_for_it() -> None:
    recipe = str(Path(__file__).parents[2] / "recipes" / "tickets.toml")
    rewards = 'rewards=[{reward="judge",model="http://127.0.0.1:9/v1#x"}]'
    said = CliRunner().invoke(app, ["check", "recipe", recipe, rewards]).output
    assert "error: there is no model server at http://127.0.0.1:9/v1" in said and "played" not in said


def test_a_tool_that_never_returns_is_warned_of() -> None:
    timed_out = ToolResult("took too long", fault=Fault.TOOL_TIMEOUT)
    [(kind, text)] = judge_tool_calls("buy", [(timed_out, None)] * 3)
    assert kind == "warning"
    assert "does it ever return" in text


def test_check_data_takes_settings_that_hold_an_address(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []
    monkeypatch.setattr("ludus.cli.check.data.check_data", lambda *arguments: given.extend(arguments))
    asked = ["check", "data", "a.parquet", "embedder=http://127.0.0.1:9/v1#e", "min_turns=1"]
    assert CliRunner().invoke(app, asked).exit_code == 0
    assert given[0] == [Path("a.parquet")]
    assert given[2] == ["embedder=http://127.0.0.1:9/v1#e", "min_turns=1"]
