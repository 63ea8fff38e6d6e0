"""Writing in the background: in order, bounded, and no error is missed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ludus.core import Task, Trajectory
from ludus.core.trajectory import Group
from ludus.observe import RunFolder, RunWriter
from ludus.observe.run_writer import BackgroundWriter


def test_writes_happen_in_order_and_are_done_after_a_flush() -> None:
    writer, done = BackgroundWriter(max_waiting=2), []
    for number in range(20):
        writer.submit(lambda number=number: done.append((number, threading.current_thread().name)))
    writer.flush()
    assert done == [(number, "ludus-writer") for number in range(20)]
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="has been closed"):
        writer.submit(lambda: None)


def test_a_caller_goes_on_until_too_many_wait() -> None:
    writer, gate, done = BackgroundWriter(max_waiting=1), threading.Event(), []
    writer.submit(gate.wait)
    submitted = threading.Thread(
        target=lambda: [writer.submit(lambda: done.append(1)) for _ in range(3)]
    )
    submitted.start()
    submitted.join(0.05)
    assert submitted.is_alive() and not done
    gate.set()
    submitted.join()
    writer.close()
    assert done == [1, 1, 1]


def test_an_error_is_raised_by_every_later_call_and_nothing_follows_it() -> None:
    writer, done = BackgroundWriter(), []

    def full() -> None:
        raise OSError(28, "No space left on device")

    writer.submit(lambda: done.append(1))
    writer.submit(full)
    for call in (writer.flush, lambda: writer.submit(lambda: done.append(2)), writer.close):
        with pytest.raises(OSError, match="No space left"):
            call()
    assert done == [1]


def test_a_run_that_is_written_in_the_background_is_whole_when_it_is_read(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "run", {}) as run:
        run.write_in_background()
        for step in range(30):
            run.log(step, {"reward": step})
        task = Task.of("1?", id="1")
        run.write_groups([Group(task, [Trajectory(task)])], 3)
        assert [row["step"] for row in run.metrics()] == list(range(30))
        assert [file.step for file in run.trajectory_files()] == [3]
        run.log(30, {"reward": 30})
        with run.checkpoint(30) as folder:
            assert RunFolder(tmp_path / "run").metrics()[-1]["step"] == 30
            (folder / "file").write_text("here")
        run.log(31, {"reward": 31})
    assert RunFolder(tmp_path / "run").metrics()[-1]["step"] == 31


def test_what_could_not_be_written_ends_the_run(tmp_path: Path) -> None:
    run = RunWriter.create(tmp_path / "run", {})
    run.write_in_background()
    run.log(1, {"reward": "none"})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="the metric 'reward' is not a number"), run.checkpoint(1):
        pass
    with pytest.raises(TypeError, match="the metric 'reward' is not a number"):
        run.close()
    RunWriter.resume(tmp_path / "run").close()
