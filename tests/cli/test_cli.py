"""The command line as a user meets it: real processes, real signals, messages that say what to do."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_process import COMMAND, Started
from typer.testing import CliRunner

from ludus.cli.main import app, run_command
from ludus.core import ConfigError
from ludus.core.failures import MissingExtraError
from ludus.observe import RunFolder
from ludus.training.config.recipe import packaged_recipes

pytestmark = pytest.mark.timeout(300)  # on a busy machine a process takes long to start

MODULE = '''
import ludus

@ludus.tool
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

@ludus.reward
async def short(trajectory) -> float:
    return 1.0 / (1 + sum(len(action.tokens) for action in trajectory.actions))

@ludus.reward
async def half(answer: str, target: str) -> float:
    return 0.5 * (answer == target)

@ludus.reward
async def later(trajectory) -> float:
    return trajectory.attempt / 10

def tasks():
    return [ludus.Task.of(f"{n} plus {n}?", target=str(2 * n), id=str(n)) for n in range(8)]

def held_out():
    return [ludus.Task.of(f"{n} plus {n}?", target=str(2 * n), id=str(n)) for n in range(20, 22)]
'''
GROWING = "rl.curriculum=[{setting='budgets.max_turns', schedule=[[0, 2], [5, VALUE]]}]"
RECIPE = """
name = "adding"
threads = 1
rewards = ["task.py:short"]

[model.scratch]
layers = 1
width = 32
heads = 2
kv_heads = 1

[tasks]
train = "task.py:tasks"
evaluation = "task.py:held_out"

[agent]
tools = ["task.py:add"]

[budgets]
max_turns = 2
max_turn_tokens = 8

[engine]
cache_tokens = 4096
max_running = 16

[rl]
steps = 2
tasks = 2
attempts = 2

[run]
checkpoint_every = 1
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "task.py").write_text(MODULE)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def ludus(*arguments: str) -> str:
    """Run a command in this process; the output of one that succeeded."""
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def wait_for_checkpoint(process: Started, run: RunFolder, step: int) -> None:
    process.wait_until(lambda: any(checkpoint.step >= step for checkpoint in run.checkpoints()))


def test_train_evaluate_look(project: Path) -> None:
    said = ludus("train", "recipe.toml", "rl.steps=1")
    run = RunFolder(project / "runs" / "adding-001")
    assert run.latest_checkpoint() is not None
    assert "runs/adding-001" in said
    assert "success" in ludus("eval", "runs/adding-001", "--attempts", "2")
    out = project / "episodes.parquet"
    said = ludus("rollout", "runs/adding-001", "--tasks", "1", "--top-p", "0.9", "--out", str(out))
    assert "0 plus 0?" in said and out.exists()


def test_checks(project: Path) -> None:
    assert "recipe.toml: ok" in ludus("check", "recipe", "recipe.toml", 'rewards=["exact_match"]')
    done = CliRunner().invoke(app, ["check", "recipe", "recipe.toml", 'rewards=["task.py:half"]'])
    assert done.exit_code == 1 and "gold_fails" in done.output, "a right answer must get full marks"
    said = " ".join(ludus("check", "recipe", "recipe.toml").split())
    assert "warning: the rewards score every answer alike, the right one too" in said
    done = CliRunner().invoke(app, ["check", "recipe", "recipe.toml", "budgets.max_tokens=4"])
    assert done.exit_code == 1 and "far longer than budgets.max_tokens = 4" in done.output
    said = ludus("check", "tool", "task.py:add", "--arguments", '{"a": "2", "b": 3}')
    assert '"integer"' in said and "result: 5" in said
    said = ludus("check", "tool", "task.py:add", "--arguments", '{"a": "two"}')
    assert "bad_arguments" in said
    said = ludus("check", "env", "safe", "--tasks", "ludus.worlds.safe:training_tasks")
    assert "safe: ok" in said
    done = CliRunner().invoke(app, ["check", "env", "ludus.worlds.safe:Safe"])
    assert done.exit_code == 1 and "give tasks of its own: --tasks" in done.output


def test_an_environment_in_a_file_is_what_the_tasks_call_it(tmp_path: Path) -> None:
    (tmp_path / "grid.py").write_text(
        "import ludus\n\nclass Grid(ludus.Env):\n    def reset(self, task, size):\n        return 'x' * size\n"
    )
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text('{"prompt": "go", "envs": {"board": {"size": 3}}}\n')
    two.write_text('{"prompt": "go", "envs": {"board": {"size": 3}, "shop": {}}}\n')
    check = ("check", "env", f"{tmp_path}/grid.py:Grid", "--tasks")
    assert "grid.py:Grid: ok" in ludus(*check, str(one))
    done = CliRunner().invoke(app, [*check, str(two)])
    assert done.exit_code == 1 and "--name" in str(done.exception) + done.output
    assert "grid.py:Grid: ok" in ludus(*check, str(two), "--name", "board")


@pytest.mark.parametrize(
    ("staleness", "number"), [(0, signal.SIGINT), (1, signal.SIGINT), (0, signal.SIGHUP)]
)
def test_ctrl_c_and_a_hangup_save_and_say_how_to_go_on(
    project: Path, staleness: int, number: signal.Signals
) -> None:
    settings = ["rl.steps=100000", "run.folder=stopped", f"rl.staleness={staleness}"]
    process = Started(COMMAND, "train", "recipe.toml", *settings)
    run = RunFolder(project / "stopped")
    wait_for_checkpoint(process, run, step=1)
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == 128 + number
    assert "ludus train --resume" in errors and "Traceback" not in errors
    latest = run.latest_checkpoint()
    assert latest is not None and latest.step == max(row["step"] for row in run.metrics())


NOHUP = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + COMMAND


def test_under_nohup_a_hangup_ends_nothing(project: Path) -> None:
    process = Started(NOHUP, "train", "recipe.toml", "rl.steps=6", "run.folder=kept")
    run = RunFolder(project / "kept")
    wait_for_checkpoint(process, run, step=1)
    process.send_signal(signal.SIGHUP)
    process.communicate()
    assert process.returncode == 0 and run.report_path.exists()


HUNG_UP = """
import os, pty, sys
ours, theirs = pty.openpty()
if os.fork():
    os.close(theirs)
    while not os.path.exists("closed/trajectories/step-000002.parquet"):
        os.read(ours, 65536)  # what a terminal does, until it is closed
    os.close(ours)
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
os.close(ours)
os.setsid()
for number in (0, 1, 2):
    os.dup2(theirs, number)
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from ludus.cli.main import run
run()
"""


def test_a_terminal_that_is_closed_loses_nothing(project: Path) -> None:
    """The kernel sends SIGHUP, and all that is written to the terminal fails from then on."""
    process = Started(HUNG_UP, "train", "recipe.toml", "rl.steps=100000", "run.folder=closed")
    run = RunFolder(project / "closed")
    process.communicate()
    latest = run.latest_checkpoint()
    assert latest is not None and latest.step == max(row["step"] for row in run.metrics()) > 0


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["serve", "model", "x"], "a model server needs the package 'aiohttp': pip install 'ludus-rl[serve]'"),
        (["serve", "tools", "python"], "a tool server needs the package 'aiohttp'"),
        (["serve", "env", "textcraft"], "an environment server needs the package 'aiohttp'"),
        (["serve", "mcp", "python"], "an MCP server needs the package 'aiohttp'"),
        (["view"], "the viewer needs the package 'aiohttp': pip install 'ludus-rl[view]'"),
    ],
)  # fmt: skip
def test_a_missing_package_is_told_with_what_was_asked_for(
    words: list[str], asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(MissingExtraError, match=re.escape(asked)):
        CliRunner().invoke(app, words, catch_exceptions=False)


INTERRUPTED = """
import os, signal
import ludus.observe.report as tables
import ludus.training.api as api
from ludus.cli.main import run

def interrupted(work):
    def done(*given):
        os.kill(os.getpid(), signal.SIGINT)
        return work(*given)
    return done

WHERE.NAME = interrupted(WHERE.NAME)
run()
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "api.write_report",
            "stopped; saved after step 1 in .*Go on with: ludus train --resume stopped",
        ),
        (
            "tables.ReportTable.rich",
            "stopped; the run has ended: stopped/report.md, stopped/checkpoints/",
        ),
    ],
)
def test_ctrl_c_in_the_report_says_what_is_saved(project: Path, name: str, told: str) -> None:
    program = INTERRUPTED.replace("WHERE.NAME", name)
    process = Started(program, "train", "recipe.toml", "rl.steps=1", "run.folder=stopped")
    _, errors = process.communicate()
    assert process.returncode == 130 and "Traceback" not in errors
    assert re.search(told, " ".join(errors.split())), errors


def test_replay_trains_again_from_the_record(project: Path) -> None:
    ludus("train", "recipe.toml", "rl.staleness=1", "run.folder=recorded")
    said = ludus("train", "--replay", "recorded")
    assert "runs/adding-replay-001" in said
    found = [RunFolder(folder).latest_checkpoint() for folder in ("recorded", "runs/adding-replay-001")]
    one, other = [(c.path / "model.safetensors").read_bytes() for c in found if c is not None]
    assert one == other
    with pytest.raises(ConfigError, match="a replay has the recipe of its run"):
        ludus("train", "recipe.toml", "--replay", "recorded")
    with pytest.raises(ConfigError, match="give one of them"):
        ludus("train", "--resume", "recorded", "--replay", "recorded")


def test_stopping_in_the_warm_start_loses_nothing(project: Path) -> None:
    """SIGTERM stops as Ctrl-C does, also while imitating, and the run goes on where it was."""
    demonstrations = project / "demos.jsonl"
    demonstrations.write_text(
        '{"messages": [{"role": "user", "content": "1 plus 1?"}, {"role": "assistant", "content": "2"}]}\n'
    )
    warm = ["warm_start.demonstrations=demos.jsonl", "warm_start.steps=100000", "run.folder=imitating"]
    process = Started(COMMAND, "train", "recipe.toml", *warm)
    run = RunFolder(project / "imitating")
    wait_for_checkpoint(process, run, step=2)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 143 and "ludus train --resume" in errors
    latest = run.latest_checkpoint()
    assert latest is not None and latest.step == max(row["step"] for row in run.metrics())


def test_a_run_can_be_used_from_another_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ludus("train", "recipe.toml", "rl.steps=1", "run.folder=here")
    (project / "elsewhere").mkdir()
    monkeypatch.chdir(project / "elsewhere")
    assert "success" in ludus("eval", "../here")


@pytest.mark.parametrize("words", [["--bogus"], ["train", "--bogus"], ["nonsense"], ["eval"], []])
def test_usage_errors_are_no_tracebacks(words: list[str]) -> None:
    """Through the real entry point, where the command line's own exceptions must be caught."""
    done = subprocess.run([sys.executable, "-c", COMMAND, *words], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    if words == ["nonsense"]:
        told = " ".join(done.stderr.split()).partition("The commands are: ")[2].rstrip(".").split(", ")
        assert {"train", "eval", "rollout", "synth", "show", "view", "check", "serve"} <= set(told)


def test_an_unknown_command_is_answered_with_those_like_it_or_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, said in (
        (["trian"], "Did you mean 'train'?"),
        (["check", "everything"], "The commands are: recipe, model, env, tool, data, reward, sandbox."),
    ):
        assert run_command(lambda words=words, **options: app(words, **options)) == 2
        assert said in " ".join(capsys.readouterr().err.split())


def test_a_killed_run_goes_on(project: Path) -> None:
    """SIGKILL at any moment: the run resumes from its last checkpoint, and no step is recorded twice."""
    process = Started(COMMAND, "train", "recipe.toml", "rl.steps=4", "run.folder=killed")
    run = RunFolder(project / "killed")
    wait_for_checkpoint(process, run, step=1)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    ludus("train", "--resume", "killed")
    steps = [row["step"] for row in run.metrics() if "reward" in row]
    assert steps == [1, 2, 3, 4]


NAMED = ", ".join(packaged_recipes())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train",), "give either a recipe, or --resume"),
        (("train", "nothing.toml"), "nothing.toml ('nothing.toml' in the working directory)"),
        (("train", "."), ". is a folder, and a recipe is a TOML file: did you mean recipe.toml?"),
        (("check", "recipe", "data"), "data is a folder, and a recipe is a TOML file; it holds none"),
        (("train", "a-run"), "it is a run's, and `ludus train --resume a-run` resumes it"),
        (("train", "a-model"), "it holds a model, which a recipe trains by model.name=a-model"),
        (("train", "recipe.toml", "model.scratch.width=6400000"), "lower model.scratch.width (6400000)"),
        (
            ("train", "recipe.toml", "model.scratch.layers=9999999"),
            "GiB: lower model.scratch.width (32)",
        ),
        (("train", "recipe.toml", "rl.stepz=3"), "did you mean 'steps'"),
        (("train", "recipe.toml", "rl.steps"), "key=value"),
        (("train", "--resume", "nowhere"), "is not a run"),
        (("eval", "recipe.toml", "-m", "./no-such-folder"), "no-such-folder"),
        (("check", "tool", "task.py:nothing"), "has no 'nothing'"),
        (("check", "env", "sofe"), "Did you mean 'safe'"),
        (("train", "recipe.toml", "run.folder=/proc/nothing"), "name another one as run.folder"),
        (("train", "recipe.toml", "sampling.top_k=5"), "importance ratios"),
        (("train", "recipe.toml", "--resume", "somewhere"), "goes on by its own recipe"),
        (("train", "rl.steps=9", "--resume", "somewhere"), "is not a run"),
        (("train", "recipe.toml", "rl.attempts=1"), "can teach nothing"),
        (("train", "recipe.toml", "rl.updates=3"), "cannot split"),
        (("train", "recipe.toml", "rewards=[]"), "nothing is rewarded"),
        (
            ("train", "recipe.toml", "agent.tools=['mcp:no-such-program --x']"),
            "agent.tools: the MCP server 'no-such-program --x' cannot be started: there is no program "
            "'no-such-program'. Install it",
        ),
        (
            ("mcp-rl", "no-such-program", "--model", "scratch", "--writer", "http://127.0.0.1:1/v1#m"),
            "there is no program 'no-such-program'",
        ),
        (("train", "recipe.toml", "model.device=junk"), "models run on cpu and cuda devices"),
        (("train", "recipe.toml", "stage=[]"), "stage = [] has no table"),
        (("train", "recipe.toml", "warm_start.steps=1"), "warm_start has no demonstrations"),
        (("train", "recipe.toml", "model.name=http://127.0.0.1:1/v1"), "can be evaluated only"),
        (("eval", "runs/nope"), "there is no run folder HERE/runs/nope ('runs/nope' in the working"),
        (
            ("rollout", "runs/nope"),
            f"there are no runs in runs/ (recipes that come with Ludus: {NAMED})",
        ),
        (("show", "runs/nope"), "there is no run folder HERE/runs/nope ('runs/nope' in the working"),
        (("eval", "nope.toml"), "there is no recipe HERE/nope.toml"),
        (("train", "recipe.toml", "rl.algorithm=grpo_roc"), "attempts = 16, keep_attempts = 8"),
        (("check", "recipe", "recipe.toml", "agent.format=hermse"), "Did you mean 'hermes'"),
        (("check", "recipe", "recipe.toml", "agent.loop=task:tasks"), "no coroutine"),
        (("eval", "recipe.toml", "--top-p", "0"), "error: --top-p cannot be 0.0"),
        (("rollout", "recipe.toml", "--temperature", "inf"), "error: --temperature cannot be inf"),
        (("eval", "recipe.toml", "--temperature", "nan"), "--temperature"),
        (("train", "recipe.toml", "rewards=[{reward = 'f1', weight = inf}]"), "rewards.0.weight: must"),
        (
            ("train", "recipe.toml", "tasks.train=no.jsonl"),
            "tasks.train: there is no file HERE/no.jsonl (",
        ),
        (("train", "recipe.toml", "tasks.train=no.parquet"), "there is no file HERE/no.parquet ("),
        (
            ("train", "recipe.toml", "tasks.train=no.py:f"),
            "there is no file HERE/no.py ('no.py' in the working",
        ),
        (
            ("train", "recipe.toml", "model.name=./no"),
            "there is no folder HERE/no ('./no' in the working",
        ),
        (
            ("check", "recipe", "recipe.toml", GROWING.replace("VALUE", "0")),
            "rl.curriculum.0: budgets.max",
        ),
    ],
)
def test_mistakes_are_explained(
    project: Path, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("data/x", "a-run/recipe.json", "a-model/config.json"):
        (project / name).parent.mkdir()
        (project / name).write_text("{}")
    code = run_command(lambda **options: app(list(arguments), **options))
    said = capsys.readouterr().err
    assert code == 2
    assert message.replace("HERE", str(project)) in " ".join(said.split()) and "Traceback" not in said
    assert not (project / "runs").exists(), "what is refused leaves no folder"


def test_a_check_finds_an_mcp_program_that_is_not_there(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["check", "recipe", "recipe.toml", "agent.tools=['mcp:./no/program']"]
    assert run_command(lambda **options: app(arguments, **options)) == 1
    said = " ".join("".join(capsys.readouterr()).split())
    assert "agent.tools: the MCP server './no/program' cannot be started" in said


def test_rollouts_that_all_failed_are_a_failure(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (project / "task.py").open("a") as file:
        file.write("\n@ludus.reward\nasync def broken(trajectory):\n    raise OSError('no judge')\n")
    arguments = [
        "rollout",
        "recipe.toml",
        "rewards=['task.py:broken']",
        "--tasks",
        "1",
        "--out",
        "e.parquet",
    ]
    code = run_command(lambda **options: app(arguments, **options))
    said = " ".join(capsys.readouterr().err.split())
    assert code == 2
    assert "all episodes were lost to infrastructure failures" in said and "no judge" in said
    assert (project / "e.parquet").exists(), "they can be looked at"


STAGES = """
[[stage]]
kind = "dpo"
steps = 1
tasks = 2
attempts = 2

[[stage]]
kind = "dpo"
loss = "kto"
steps = 1
tasks = 2
attempts = 2

[[stage]]
kind = "rejection"
steps = 1
tasks = 2
attempts = 2
threshold = 0.0

[[stage]]
kind = "rl"
steps = 5
tasks = 2
attempts = 2

[[stage]]
kind = "rl"
steps = 1
tasks = 2
attempts = 2

[[stage]]
kind = "eval"
attempts = 2
"""


def test_every_stage_has_its_own_line_with_numbers(project: Path) -> None:
    recipe = RECIPE.replace("[rl]\nsteps = 2\ntasks = 2\nattempts = 2\n", "") + STAGES
    (project / "recipe.toml").write_text(recipe)
    said = ludus("train", "recipe.toml", "stage.3.steps=1", "rewards=['task.py:later']")
    lines = {line.split("/")[0]: line for line in said.splitlines() if "/1 " in line}
    assert set(lines) == {"DPO 1", "KTO 1", "rejection sampling 1", "RL (1 of 2) 1", "RL (2 of 2) 1"}
    assert "reward" in lines["DPO 1"] and "pairs 2" in lines["DPO 1"]
    assert "episodes 4" in lines["KTO 1"] and "pairs" not in lines["KTO 1"]
    assert "kept 2" in lines["rejection sampling 1"] and "loss" in lines["rejection sampling 1"]
    assert "reward" in lines["RL (2 of 2) 1"]
    (measured,) = [line for line in said.splitlines() if "pass@2" in line]
    assert measured.startswith("held-out tasks after step 6: success 0.0%, pass@1 0.0%, pass@2 0.0%")


def test_a_curriculum_that_cannot_be_run_is_no_ok(project: Path) -> None:
    strict = "rl.curriculum=[{setting='rewards.strictness', schedule=[[0, 1]]}]"
    done = CliRunner().invoke(app, ["check", "recipe", "recipe.toml", strict])
    assert done.exit_code == 1
    assert "rl.curriculum.0 moves rewards.strictness, but no reward takes it" in done.output


OWN = """
import torch
from ludus.algos import Advantages

def advantages(credit):
    return helper(credit)

def helper(credit):
    return Advantages(torch.ones(3) @ torch.ones(4))

def loss(sampled):
    return {}["nothing"]
"""


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("algorithm", "the estimator 'own.py:advantages' raised RuntimeError: "),
        ("loss", "the loss 'own.py:loss' raised KeyError: 'nothing' (own.py:12 in loss)"),
    ],
)
def test_mistakes_in_code_of_ones_own_are_told_in_a_line(
    project: Path, setting: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "own.py").write_text(OWN)
    name = "own.py:advantages" if setting == "algorithm" else "own.py:loss"
    arguments = ["train", "recipe.toml", "rewards=['task.py:later']", f"rl.{setting}={name}"]
    code = run_command(lambda **options: app(arguments, **options))
    said = capsys.readouterr().err
    assert code == 2 and "Traceback" not in said
    (line,) = [text for text in said.splitlines() if text.startswith("error: ")]
    assert line.startswith(f"error: {message}")
    if setting == "algorithm":
        assert line.endswith("(own.py:6 in advantages, own.py:9 in helper)")


def test_a_checkpoint_is_told_from_a_run(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ludus("train", "recipe.toml", "rl.steps=1")
    checkpoint = "runs/adding-001/checkpoints/step-000001"
    assert run_command(lambda **options: app(["eval", checkpoint], **options)) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"the checkpoint as the model: runs/adding-001 -m {checkpoint}" in said


def test_an_untrained_model_is_said_to_be_one(project: Path) -> None:
    assert "learned nothing yet" in ludus("eval", "recipe.toml", "--tasks", "1")
    assert "learned nothing yet" in ludus("rollout", "recipe.toml", "--tasks", "1")
    ludus("train", "recipe.toml", "rl.steps=1")
    assert "learned nothing yet" not in ludus("eval", "runs/adding-001", "--tasks", "1")
    found = CliRunner().invoke(app, ["eval", "runs/adding-002"])
    assert "did you mean runs/adding-001" in str(found.exception)


SCRIPT = """
import ludus, sys
from task import add, later, short, tasks, held_out

if __name__ == "__main__":
    result = ludus.train(
        model={"scratch": {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1}}, threads=1,
        tasks=tasks(), held_out=held_out(), tools=[add], rewards=[short],
        budgets={"max_turns": 2, "max_turn_tokens": 8}, engine={"cache_tokens": 4096, "max_running": 16},
        rl={"steps": int(sys.argv[1]), "tasks": 2, "attempts": 2},
        run={"checkpoint_every": 1, "folder": "made"},
    )
    print(repr(result))
    print(result)
"""


def test_a_script_shows_its_folder_and_progress_and_a_short_result(project: Path) -> None:
    said, errors = Started(SCRIPT, "2").communicate()
    assert "run folder: made" in errors
    assert "RL 2/2" in errors and "held-out tasks after step 2: success" in errors
    assert said.startswith("Result(run=") and len(said.splitlines()[0]) < 300
    assert "after RL" in said and "model: " in said


def test_ctrl_c_in_a_script_says_what_was_saved_and_how_to_go_on(project: Path) -> None:
    process = Started(SCRIPT, "100000")
    run = RunFolder(project / "made")
    wait_for_checkpoint(process, run, step=1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    latest = run.latest_checkpoint()
    assert latest is not None
    assert f"stopped; saved after step {latest.step} in " in errors
    assert "Go on with: ludus.train(resume='made'" in errors


SHOWN = '{"messages": [{"role": "user", "content": "%d?"}, {"role": "assistant", "content": "yes"}]}\n'


def test_a_run_of_imitation_alone_has_a_table_a_curve_and_a_next_that_works(project: Path) -> None:
    (project / "shown.jsonl").write_text("".join(SHOWN % n for n in range(8)))
    head, _, _ = RECIPE.partition("[tasks]")
    stage = "[[stage]]\nkind = 'sft'\ndemonstrations = 'shown.jsonl'\nsteps = 3\nbatch = 4\n"
    (project / "sft.toml").write_text(head.replace('rewards = ["task.py:short"]', "") + stage)
    said = ludus("train", "sft.toml", "run.folder=imitated")
    assert "loss at the end" in said
    report = (project / "imitated" / "report.md").read_text()
    assert "loss at the end" in report and "held-out tasks" not in report, "no empty table"
    for label, name, more in (
        ("watch it play", "rollout", ["--show", "0"]),
        ("use it elsewhere", "export", []),
    ):
        (following,) = [line for line in said.splitlines() if line.startswith(f"  {label}")]
        words = following.removeprefix(f"  {label}").split()
        assert words[:2] == ["ludus", name]
        ludus(*(word.replace("RECIPE", "recipe.toml") for word in words[1:]), *more)


WAITING = """
import asyncio, ludus
from ludus.core.messages import ToolSpec

loops = set()

class Endless:
    async def open(self, context):
        await asyncio.Event().wait()
    async def list(self, context):
        return [ToolSpec("nap", "Sleep.", {"type": "object", "properties": {}})]
    async def call(self, call, context):
        raise AssertionError
    async def close(self, context):
        pass

@ludus.tool
async def noting() -> str:
    \"\"\"Note the event loop.\"\"\"
    return "noted"

@ludus.reward(name="success")
async def right(answer, target) -> float:
    loops.add(id(asyncio.get_running_loop()))
    assert len(loops) == 1, "a second event loop"
    return float(answer == target)

endless = Endless()
"""


def test_a_check_in_which_something_never_ends_says_so_and_where(project: Path) -> None:
    (project / "waiting.py").write_text(WAITING)
    words = ["check", "recipe", "recipe.toml", 'agent.tools=["waiting.py:endless"]', "--seconds", "0.5"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert "an episode did not end within 0.5 s: it waits at waiting.py:9 in open" in done.output


def test_a_check_runs_in_one_event_loop(project: Path) -> None:
    (project / "waiting.py").write_text(WAITING)
    words = ['agent.tools=["waiting.py:noting"]', 'rewards=["waiting.py:right"]']
    assert "recipe.toml: ok" in ludus("check", "recipe", "recipe.toml", *words)


@pytest.mark.parametrize(
    ("text", "reference", "message"),
    [
        ("import nothing_there\n", "tasks", "No module named 'nothing_there' (broken.py:1 in <module>)"),
        ("def tasks(:\n", "tasks", "broken.py, line 1: SyntaxError: invalid syntax"),
        ("def tasks(path): return []\n", "tasks", "missing 1 required positional argument: 'path'"),
        ("def tasks():\n    return {}['k']\n", "tasks", "raised KeyError: 'k' (broken.py:2 in tasks)"),
    ],
)
def test_code_that_cannot_be_loaded_is_told_with_its_line(
    project: Path, text: str, reference: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "broken.py").write_text(text)
    words = ["train", "recipe.toml", f"tasks.train=broken.py:{reference}"]
    code = run_command(lambda **options: app(words, **options))
    said = capsys.readouterr().err
    assert code == 2
    assert message in " ".join(said.split()) and "tasks.train: " in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("envs", {"grid": 3}, "the environment 'grid' is 3: give a class"),
        ("rewards", [3], "3 is not a reward"),
        ("group_rewards", [3], "3 is not a group reward"),
    ],
)
def test_parts_of_the_wrong_kind_are_refused_before_there_is_a_folder(
    project: Path, part: str, value: object, message: str
) -> None:
    import ludus as package

    given = {"rewards": ["exact_match"], "tasks": [{"prompt": "x", "target": "y"}], part: value}
    with pytest.raises(ConfigError, match=message):
        package.train(model="scratch", **given)
    assert not (project / "runs").exists()


def test_the_first_page_begins_with_what_a_newcomer_needs() -> None:

    said = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).output
    names = re.findall(r"^│ ([a-z-]+)  ", said.partition("Commands")[2], re.MULTILINE)
    assert names[:9] == ["train", "eval", "rollout", "show", "view", "init", "check", "serve", "synth"]
    assert said.index("Further commands") < said.index("settings")


@pytest.mark.parametrize("command", ["train", "eval", "rollout", "settings"])
def test_help_names_everything_that_a_recipe_can_name(command: str) -> None:
    from ludus.algos.specs import ALGORITHMS
    from ludus.envs import WORLDS
    from ludus.rewards import GROUP_REWARDS, REWARDS
    from ludus.synth.method import METHODS

    said = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "120"}).output
    words = set(re.findall(r"\w+", said))
    for names in (ALGORITHMS, WORLDS, REWARDS, GROUP_REWARDS, METHODS):
        assert names and words.issuperset(names)


def test_the_help_of_synth_names_every_method() -> None:
    from ludus.synth.method import METHODS

    said = CliRunner().invoke(app, ["synth", "--help"], env={"COLUMNS": "120"})
    lines = [line.strip().split(maxsplit=1) for line in said.stdout.splitlines()]
    described = {words[0] for words in lines if len(words) == 2 and words[0] in METHODS}
    assert described == set(METHODS)
