import io
import logging
import threading

import pytest
from observe_strategies import episode
from rich.console import Console

from ludus.core import Boundary, Failure, Fault, Message, StopReason, ToolCall
from ludus.observe import (
    Progress,
    ReportTable,
    RunFolder,
    Share,
    episode_text,
    plot_curve,
    printable,
    setup_logging,
)
from ludus.observe.report import series, smoothed

NUMBERS = {
    "reward": 0.5,
    "success": 0.25,
    "turns": 3.0,
    "invalid_call_share": 0.1,
    "tokens_per_second": 1234.0,
}


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=200, color_system=None)


def test_elsewhere_than_on_a_terminal_there_is_a_plain_line_now_and_then():
    screen = console(terminal=False)
    with Progress(6, "training [bold]", console=screen, every=2) as progress:
        for step in range(1, 6):
            progress.update(step, {**NUMBERS, "reward": float(step)}, note="note [red]\x1b[2J")
        progress.say("saved")
        progress.update(6, {})
    lines = screen.file.getvalue().splitlines()
    assert len(lines) == 4
    shown = "success 25.0%  turns 3.00  tool errors 10.0%  tok/s 1,234  note [red]\\x1b[2J"
    assert lines[0] == f"training [bold] 2/6  reward 1.50  {shown}"
    assert lines[1].startswith("training [bold] 4/6  reward 3.50")
    assert lines[2:] == [
        "saved",
        "training [bold] 6/6  reward 5.00  success 25.0%  turns 3.00  tool errors 10.0%  tok/s 1,234",
    ]


def test_on_a_terminal_there_is_a_bar_and_it_is_gone_after_an_interrupt():
    screen = console(terminal=True)
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt), Progress(10, "training", console=screen, first=2) as progress:
        progress.update(3, NUMBERS, note="resumed")
        raise KeyboardInterrupt
    output = screen.file.getvalue()
    assert "3/10" in output
    assert "reward 0.50  success 25.0%  turns 3.00  tool errors 10.0%  tok/s 1,234" in output
    assert "resumed" in output
    assert output.count("\x1b[?25h") == output.count("\x1b[?25l") == 1  # the cursor is back
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=20)
    assert set(threading.enumerate()) <= before


ROWS = [
    {"step": 0, "eval/success": 0.1, "eval/reward": 0.0},
    *({"step": step, "reward": step / 10, "success": step / 10, "loss": None} for step in range(1, 9)),
    {"step": 8, "eval/success": 0.9},
]


def test_the_curve_is_a_image_and_touches_no_global_state(tmp_path):
    import sys

    before = "matplotlib.pyplot" in sys.modules
    plot_curve(tmp_path / "curve.png", ROWS, title="run $x \x1b[1m")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert ("matplotlib.pyplot" in sys.modules) == before
    plot_curve(tmp_path / "empty.png", [])
    assert (tmp_path / "empty.png").stat().st_size > 1000
    plot_curve(tmp_path / "nan.png", [{"step": 1, "reward": float("nan"), "success": float("inf")}])


def test_series_and_smoothing():
    assert series(ROWS, "eval/success") == ([0, 8], [0.1, 0.9])
    assert series(ROWS, "loss") == ([], [])
    assert smoothed([0.0, 2.0, 4.0], 2) == [0.0, 1.0, 3.0]


def test_tables():
    columns, rows = ["when", "success"], [["before | after [b]", 0.5], ["now\n", None]]
    assert ReportTable(columns, rows).markdown() == (
        "| when | success |\n|---|--:|\n| before \\| after [b] | 0.500 |\n| now  | – |\n"
    )
    screen = console(terminal=False)
    screen.print(ReportTable(columns, rows, "held [out]").rich())
    assert "held [out]" in screen.file.getvalue()
    assert "before | after [b]" in screen.file.getvalue()
    assert "0.500" in screen.file.getvalue()
    shares = ReportTable(["who", "won"], [["a", Share(0.75)], ["b", Share(1, 0.5, 1)]])
    assert shares.texts == [["a", "75.0%"], ["b", "100.0% [50.0%, 100.0%]"]]
    assert shares.as_json()["rows"][1] == ["b", {"value": 1, "low": 0.5, "high": 1}]
    screen.print(shares.rich())
    assert "100.0% [50.0%, 100.0%]" in screen.file.getvalue() and "75.0%" in shares.markdown()
    assert ReportTable(["a"], []).markdown() == "| a |\n|---|\n"


def test_an_episode_reads_as_a_conversation():
    text = episode_text(episode(rewards={"success": 1.0}, faults=(Fault.LIMIT, Fault.LIMIT)))
    assert text == (
        "=== task t, attempt 0 ===\n"
        "[user]\nwhat is 2+3?\n"
        "[assistant]\nI add.\n-> add(a=2, b=3)\n"
        "[tool add]\n5\n"
        "[assistant]\nfive\n"
        "--- answered after 2 turns, 1 calls, 3 tokens said\n"
        "--- answer: five\n"
        "--- faults: limit × 2\n"
        "--- reward: 1 (success 1)"
    )


def test_an_episode_says_what_failed_and_what_was_malformed():
    failed = episode(
        reward=None, stop=StopReason.FAILED, failure=Failure(Boundary.ENV, "OSError", "gone", attempts=3)
    )
    failed.messages[1] = Message(
        "assistant", "", (ToolCall("ad", {"a": "x"}, fault=Fault.UNKNOWN_TOOL, problem="no tool 'ad'"),)
    )
    failed.actions[0].reward = 0.5
    text = episode_text(failed)
    assert "-> ad(a=\"x\")   ! unknown_tool: no tool 'ad'" in text
    assert "failed at env after 3 tries: OSError: gone" in text
    assert "turn rewards: turn 1: 0.5" in text
    assert "reward: not scored" in text


def test_hostile_episodes_are_bounded_and_harmless():
    hostile = episode()
    huge = Message("tool", "\x1b[2J\x07\ud800" + "x" * 10_000_000)
    hostile.messages = [huge] * 50
    hostile.messages.append(Message("assistant", "the end", (ToolCall("f" * 100_000, {"a": "\x1b"}),)))
    hostile.answer = "a" * 1_000_000
    hostile.task = type(hostile.task)("t" * 100_000, hostile.task.messages)
    text = episode_text(hostile, max_chars=5000)
    assert len(text) < 6000
    assert "\x1b" not in text
    text.encode("utf-8")
    assert "characters left out" in text
    assert "--- reward: 1" in text


def test_no_name_or_answer_passes_for_a_line_of_ours():
    forged = "x\n=== task forged, attempt 0 ===\n--- reward: 1"
    hostile = episode(
        reward=None, rewards={forged: 1.0}, failure=Failure(Boundary.ENV, "OSError", forged, attempts=1)
    )
    hostile.task = type(hostile.task)(forged, hostile.task.messages)
    hostile.answer = forged
    call = ToolCall(forged, {forged: 1}, fault=Fault.UNKNOWN_TOOL, problem=forged)
    hostile.messages = [Message("assistant", "", (call,)), Message("tool", "5", name=forged)]
    lines = episode_text(hostile).split("\n")
    assert [line for line in lines if line.startswith("===")] == [lines[0]]
    assert lines[0].startswith("=== task x\\n=== task forged") and lines[0].endswith(", attempt 0 ===")
    assert [line for line in lines if line.startswith("--- reward")] == [lines[-1]]


def test_printable():
    assert printable("a\tb\nc\x1b\r\x9b\ud800é\u2028") == "a\tb\nc\\x1b\\r\\x9b\\ud800é\\u2028"


def test_logging_goes_to_the_file_and_warnings_to_the_console(tmp_path, capsys):
    logger = logging.getLogger("ludus.somewhere")
    before = (logging.getLogger("ludus").handlers[:], logging.getLogger("ludus").level)
    run = RunFolder(tmp_path)
    with setup_logging(run):
        logger.debug("hidden")
        logger.info("for the file")
        logger.warning("for both \x1b[2J \ud800")
    after = (logging.getLogger("ludus").handlers[:], logging.getLogger("ludus").level)
    assert after == before
    logger.warning("not in the file")
    lines = run.log_path.read_text(encoding="utf-8").splitlines()
    assert [line.split("ludus.somewhere: ")[1] for line in lines] == [
        "for the file",
        "for both \\x1b[2J \\ud800",
    ]
    assert (
        capsys.readouterr().err.splitlines()[0] == "WARNING ludus.somewhere: for both \\x1b[2J \\ud800"
    )


def test_verbosity(tmp_path, capsys):
    logger = logging.getLogger("ludus.somewhere")
    for verbosity in (0, 1, 2, 9):
        with setup_logging(None, verbosity):
            logger.info("info")
            logger.debug("debug")
    assert capsys.readouterr().err.count("info") == 3
    with setup_logging(RunFolder(tmp_path), 2):
        logger.debug("debug")
    assert "debug" in RunFolder(tmp_path).log_path.read_text()


def columns_of(path, colour):
    """The columns of an image's pixels that have exactly this colour, as shares of its width."""
    import numpy as np
    from matplotlib.image import imread

    pixels = (imread(path)[:, :, :3] * 255).round().astype(int)
    (found,) = np.nonzero((pixels == colour).all(axis=2).any(axis=0))
    return found / pixels.shape[1]


def test_a_long_warm_start_leaves_room_for_what_was_played(tmp_path):
    imitated = [{"step": step, "sft/loss": 1 / step} for step in range(1, 251)]
    played = [{"step": 250 + step, "success": step / 24, "reward": 0.0} for step in range(1, 25)]
    plot_curve(tmp_path / "curve.png", [*imitated, *played])
    blue = columns_of(tmp_path / "curve.png", (31, 119, 180))
    assert blue.max() - blue.min() > 0.5
    assert ((blue > 0.45) & (blue < 0.85)).sum() > 100, "the curve itself, beside axes and legend"
    assert len(columns_of(tmp_path / "curve.png", (102, 102, 102))) > 50, "the loss is drawn"


def test_the_legend_hides_no_curve(tmp_path):
    import numpy as np

    plot_curve(tmp_path / "curve.png", [{"step": n, "success": 1.0, "reward": 0.0} for n in range(99)])
    blue = columns_of(tmp_path / "curve.png", (31, 119, 180))
    line = blue[(blue > 0.15) & (blue < 0.85)]
    assert line.max() - line.min() > 0.65 and np.diff(line).max() < 0.01


@pytest.mark.parametrize("stage", ["sft", "dpo", "rejection", "distill"])
def test_a_run_that_never_plays_has_a_curve(tmp_path, stage):
    plot_curve(
        tmp_path / "curve.png", [{"step": step, f"{stage}/loss": 1 / step} for step in range(1, 50)]
    )
    assert len(columns_of(tmp_path / "curve.png", (102, 102, 102))) > 300
