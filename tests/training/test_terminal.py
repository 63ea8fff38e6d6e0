"""What a person sees of a run: findings while it goes on, the result first, all within the terminal."""

from __future__ import annotations

import io
import logging
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text
from stage_runs import Talker
from training_helpers import TINY, add, tasks

import ludus
from ludus.cli.train import show_ending
from ludus.core import (
    Fault,
    Message,
    Segment,
    SegmentKind,
    StopReason,
    TokenSequence,
    ToolCall,
)
from ludus.observe import EpisodeTally, Share, folded_episode, large, share_lines
from ludus.training import Recipe
from ludus.training.display import _duration

COPIED = (
    "model",
    "report",
    "best",
    "look inside",
    "what still",
    "watch it",
    "talk to it",
    "use it",
    "go on",
    "the command",
    "to install",
)
"""How lines begin that are there to be copied: they are never broken."""


@ludus.reward
async def later(trajectory: ludus.Trajectory) -> float:
    return float(trajectory.seed % 2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> ludus.Result:
    folder = tmp_path_factory.mktemp("terminal") / "run"
    base = {name: table for name, table in TINY.items() if name != "rl"}
    rl = {"kind": "rl", "steps": 4, "tasks": 2, "attempts": 2, "optimizer": {"learning_rate": 1e-3}}
    tables = {**base, "max_in_flight": 1, "stage": [rl], "run": {"folder": str(folder)}}
    return ludus.train(
        **tables, tasks=tasks(6), held_out=tasks(4, 50), rewards=[later], agent=Talker(), progress=False
    )


def ending(result: ludus.Result, width: int, *, is_terminal: bool = True) -> str:
    console = Console(
        file=io.StringIO(),
        force_terminal=is_terminal,
        width=width,
        color_system="standard" if is_terminal else None,
    )
    show_ending(console, result, Recipe.parse(result.run.recipe(), "run"))
    said: str = console.file.getvalue()  # type: ignore[attr-defined]
    return said


@pytest.mark.parametrize("width", [40, 60, 80, 120, 300])
def test_the_end_of_a_run_fits_the_terminal_and_has_the_result_first(
    finished: ludus.Result, width: int
) -> None:
    lines = [Text.from_ansi(line) for line in ending(finished, width).splitlines()]
    shown = [line.plain.rstrip() for line in lines]
    assert next(line for line in shown if line) == "held-out success"
    for line in shown:
        assert len(line) <= width or line.strip().startswith(COPIED), line
    text = "\n".join(shown)
    assert re.search(r"at the start +\d+\.\d% ", text) and re.search(r"after RL +\d+\.\d% ", text)
    assert ("━━▶" in text) == (width >= 60)
    assert text.index("held-out success") < text.index("before RL: task") < text.index("tool errors")
    assert text.index("tool errors") < text.index("ludus view") < text.index("ludus train --resume")
    assert text.count("reward   ") >= 2, "what each reward gave"


def test_without_a_terminal_there_are_plain_lines_alone(finished: ludus.Result) -> None:
    said = ending(finished, 80, is_terminal=False)
    assert "\x1b" not in said and not re.search("[━╌▪┏▶]", said)
    assert re.search(r"at the start +\d+\.\d%  \d+\.\d% to \d+\.\d%\n", said)


def test_commands_whose_packages_are_missing_come_with_their_installation(
    finished: ludus.Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "duckdb", None)
        assert re.search(
            r"\.venv/bin/pip install -e '\.\[view\]'\): for ludus view\n", ending(finished, 80)
        )
        patched.setitem(sys.modules, "aiohttp", None)
        assert "for ludus view and ludus serve\n" in ending(finished, 80)
    assert "to install first" not in ending(finished, 80)


def test_the_command_is_named_where_the_shell_does_not_find_it(
    finished: ludus.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("python", "ludus"):
        (tmp_path / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
        (tmp_path / ".venv" / "bin" / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nothing")
    assert re.search(r"the command ludus +\.venv/bin/ludus\n", ending(finished, 80, is_terminal=False))
    monkeypatch.setenv("PATH", str(tmp_path / ".venv" / "bin"))
    assert "the command ludus" not in ending(finished, 80)


@pytest.mark.parametrize(
    ("seconds", "told"), [(50, "1 minute"), (125, "2 minutes"), (9000, "2.5 hours")]
)
def test_durations_are_in_words(seconds: float, told: str) -> None:
    assert _duration(seconds) == told


def test_no_color_is_respected(finished: ludus.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3[1-7]", ending(finished, 80))


def test_the_log_of_a_run_says_what_happened(finished: ludus.Result) -> None:
    log = finished.run.log_path.read_text()
    assert re.search(
        r"^\d{4}-\d\d-\d\d .* INFO ludus\.training\.loop: step 1: RL 1/4  reward", log, re.M
    )
    assert "model: from scratch" in log and "evaluation  success" in log and "step 4: saved" in log


def test_shares_are_bars_with_their_intervals() -> None:
    lines = share_lines([("at the start", Share(0.25, 0.0, 0.5)), ("after RL", None)], 80)
    solid, light = lines[0].plain.count("━"), lines[0].plain.count("╌")
    assert abs(solid - light) <= 1 and solid > 5, "0.25, and up to 0.5"
    assert lines[0].plain.endswith("0.0% to 50.0%") and lines[1].plain.endswith("–")
    figures = large([("0.0%", "bold"), ("100.0%", "bold green")], 80)
    assert figures is not None and len(figures.plain.splitlines()) == 3
    assert large([("0.0%", "bold"), ("100.0%", "bold green")], 30) is None


def episode(said: str, *calls: ToolCall, faults: tuple[Fault, ...] = ()) -> ludus.Trajectory:
    action = Segment(
        SegmentKind.ACTION,
        [1],
        [0.0],
        calls=calls,
        faults=faults,
        faulted=tuple(c.name for c in calls[: len(faults)]),
    )
    task = ludus.Task.of("What is 2 + 3?", target="5", id="sum")
    return ludus.Trajectory(
        task,
        [TokenSequence([Segment(SegmentKind.PROMPT, [2]), action])],
        [*task.messages, Message("assistant", said, calls)],
        stop=StopReason.ANSWERED,
        reward=0.0,
        rewards={"success": 0.0},
    )


@pytest.mark.parametrize(
    "said",
    [
        'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>',
        'I add.\n```json\n{"name": "add", "arguments": {"a": 2}}\n```',
        "I add.\nAction: add\nAction Input: {}",
    ],
)
def test_each_call_is_shown_once(said: str) -> None:
    text = folded_episode(episode(said, ToolCall("add", {"a": 2})), "before", 80).plain
    assert "I add. add(a=2)" in text and text.count("add(") == 1 and "tool_call" not in text
    assert re.search("target +5\n", text) and re.search(r"reward +0 \(success 0\)", text)


def test_the_answer_is_shown_once_and_results_have_their_tools_name() -> None:
    one = episode("It is 5.", ToolCall("add", {"a": 2}, id="c1"))
    one.messages = [
        *one.messages,
        Message("tool", "5", tool_call_id="c1"),
        Message("assistant", "It is 5."),
    ]
    one.answer = "It is 5."
    text = folded_episode(one, "before", 80).plain
    assert "answer" not in text and "tool add" in text
    one.answer = "5"  # what a program printed
    assert re.search("answer +5\n", folded_episode(one, "before", 80).plain)


def test_long_episodes_are_folded() -> None:
    one = episode("word " * 2000)
    one.messages = [*one.messages] * 30
    text = folded_episode(one, "before", 80).plain
    assert len(text.splitlines()) < 25 and "more messages" in text
    assert max(map(len, text.splitlines())) <= 80


def found(has_tools: bool, *episodes: ludus.Trajectory, times: int = 20) -> set[str]:
    tally = EpisodeTally(has_tools=has_tools)
    for step in (1, 2):
        tally.add(step, [one for one in episodes for _ in range(times)])
    return {one.kind for one in tally.findings()}


def test_findings_are_counted_while_a_run_goes_on() -> None:
    idle, caller = episode("5"), episode("", ToolCall("add", {"a": 2}))
    broken = episode("", ToolCall("add", {"a": 2}), faults=(Fault.TOOL_RAISED,))
    unread = episode("", ToolCall("", fault=Fault.MALFORMED_CALL), faults=(Fault.MALFORMED_CALL,))
    assert found(True, idle) == {"never_calls", "never_succeeds"}
    assert found(False, idle) == {"never_succeeds"}, "there is nothing to call"
    assert "never_calls" not in found(True, idle, caller)
    assert "tool" in found(True, broken) and "tool" not in found(True, caller)
    assert "malformed" in found(True, unread) and "malformed" not in found(True, caller)
    idle.reward, idle.rewards = 1.0, {"success": 1.0}
    assert found(True, idle) == set(), "what is solved without tools needs none"


def test_a_model_that_never_calls_its_tools_is_told_while_it_trains(
    tmp_path: Path,
) -> None:
    @ludus.reward(name="success")
    async def never(trajectory: ludus.Trajectory) -> float:
        return 0.0

    base = {name: table for name, table in TINY.items() if name != "rl"}
    stage = {"kind": "rl", "steps": 2, "tasks": 4, "attempts": 4, "optimizer": {"learning_rate": 1e-3}}
    tables = {**base, "stage": [stage], "run": {"folder": str(tmp_path / "run")}}
    result = ludus.train(
        **tables,
        tasks=tasks(6),
        held_out=tasks(4, 50),
        rewards=[never],
        tools=[add],
        agent=Talker(),
        progress=False,
    )
    log, report = result.run.log_path.read_text(), result.run.report_path.read_text()
    assert "The model does not call its tools: 0 of" in log and "WARNING" in log
    assert "The model does not call its tools" in report and "tool_choice" in report
    assert "efficiency" not in report
    assert logging.getLogger("py.warnings").handlers == []
