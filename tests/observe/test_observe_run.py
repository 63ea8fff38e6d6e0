import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from observe_strategies import episode

from ludus.core import ConfigError, Group, LudusError, Task
from ludus.observe import FolderLock, RunFolder, RunWriter, TensorBoardSink, find_runs


def write_steps(run, steps):
    for step in steps:
        run.log(step, {"reward": step / 10})
        run.write_groups([Group(Task.of("q", id="t"), [episode()])], step)
        with run.checkpoint(step) as folder:
            (folder / "state").write_text(str(step))


def test_the_layout_and_reading_it_back(tmp_path):
    with RunWriter.create(tmp_path / "run", {"name": "demo", "lr": 1e-3}) as run:
        write_steps(run, [1, 2])
        run.write_groups([], 2, split="eval")
        run.log(2, {"eval/reward": 0.5})
    files = sorted(
        str(f.relative_to(tmp_path / "run")) for f in (tmp_path / "run").rglob("*") if f.is_file()
    )
    assert files == [
        ".lock",
        "checkpoints/step-000001/manifest.json",
        "checkpoints/step-000001/state",
        "checkpoints/step-000002/manifest.json",
        "checkpoints/step-000002/state",
        "metrics.jsonl",
        "recipe.json",
        "trajectories/step-000001.parquet",
        "trajectories/step-000002-eval.parquet",
        "trajectories/step-000002.parquet",
    ]
    read = RunFolder(tmp_path / "run")
    assert read.name == "run"
    assert read.recipe() == {"name": "demo", "lr": 1e-3}
    assert [(row["step"], row.get("reward"), row.get("eval/reward")) for row in read.metrics()] == [
        (1, 0.1, None),
        (2, 0.2, None),
        (2, None, 0.5),
    ]
    assert [(f.step, f.split) for f in read.trajectory_files()] == [
        (1, "train"),
        (2, "eval"),
        (2, "train"),
    ]
    assert read.trajectories(1) == [episode()]
    assert read.latest_checkpoint().step == 2


def test_an_empty_run_reads_as_empty(tmp_path):
    run = RunFolder(tmp_path / "nothing")
    assert not run.is_run
    assert run.metrics() == run.trajectory_files() == run.checkpoints() == []
    assert run.latest_checkpoint() is None
    with pytest.raises(ConfigError, match="not a run"):
        run.recipe()
    assert not run.path.exists()


def test_a_damaged_recipe_is_told(tmp_path):
    RunWriter.create(tmp_path / "run", {}).close()
    (tmp_path / "run" / "recipe.json").write_text("")
    with pytest.raises(ConfigError, match=r"recipe\.json is damaged"):
        RunFolder(tmp_path / "run").recipe()


def test_a_run_that_came_to_nothing_can_be_discarded(tmp_path):
    for begin in (
        lambda: RunWriter.create(tmp_path / "run", {}),
        lambda: RunWriter.create_numbered("a", {}, root=tmp_path),
    ):
        run = begin()
        run.log_path.parent.mkdir()
        run.log_path.write_text("begun")
        run.close()
        run.discard()
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("made", ["folder", "link", "here"])
def test_a_folder_that_was_there_before_stays_and_is_as_it_was(tmp_path, monkeypatch, made):
    path = tmp_path / "mine"
    path.mkdir()
    if made == "link":
        (tmp_path / "link").symlink_to(path)
    if made == "here":
        monkeypatch.chdir(path)
    run = RunWriter.create({"folder": path, "link": tmp_path / "link", "here": "."}[made], {})
    run.close()
    run.discard()
    assert path.is_dir() and list(path.iterdir()) == []
    assert (tmp_path / "link").is_symlink() is (made == "link")


@pytest.mark.parametrize(
    "what", ["metrics.jsonl", "trajectories", "checkpoints", "calls.sqlite", "notes.md"]
)
def test_a_run_that_holds_something_is_not_discarded(tmp_path, what):
    run = RunWriter.create(tmp_path / "run", {})
    (run.path / what).write_text("1")
    run.close()
    before = sorted(run.path.iterdir())
    run.discard()
    assert sorted(run.path.iterdir()) == before and run.is_run


def test_open_sinks_are_no_record(tmp_path):
    run = RunWriter.create(tmp_path / "run", {})
    run.add_sink(lambda: TensorBoardSink(run.tensorboard_path, 0))
    assert run.metrics_path.exists()
    run.close()
    run.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_was_removed_meanwhile_is_taken_anew(tmp_path, monkeypatch):
    """Whoever opened it before its holder removed it would lock a file that nobody else sees."""
    file = tmp_path / ".lock"
    real, opened = os.open, []

    def slow(path, *given):
        descriptor = real(path, *given)
        opened.append(descriptor)
        if len(opened) == 1:
            file.unlink()
        return descriptor

    monkeypatch.setattr(os, "open", slow)
    lock = FolderLock(file)
    lock.acquire()
    monkeypatch.undo()
    assert len(opened) == 2 and file.exists()
    with pytest.raises(LudusError, match="is being written by another run"):
        FolderLock(file).acquire()
    lock.release()


def test_a_checkpoint_that_cannot_be_read_is_left_out(tmp_path, monkeypatch, caplog):
    with RunWriter.create(tmp_path / "run", {}) as run:
        for step in (1, 2):
            with run.checkpoint(step) as folder:
                (folder / "weights").write_text("1")
    real = Path.open

    def broken(self, *given, **named):
        if self.parent.name == "step-000002" and self.name == "weights":
            raise OSError(5, "Input/output error")
        return real(self, *given, **named)

    monkeypatch.setattr(Path, "open", broken)
    assert RunFolder(tmp_path / "run").latest_checkpoint(thorough=True).step == 1
    assert "Input/output error" in caplog.text


def test_only_who_began_a_run_discards_it(tmp_path):
    begun = RunWriter.create(tmp_path / "run", {})
    begun.close()
    with RunWriter.resume(tmp_path / "run") as resumed:
        begun.discard()
        assert resumed.is_run, "it is being written by another"
    resumed.discard()
    assert resumed.is_run


def test_only_new_or_empty_folders_are_taken(tmp_path):
    (tmp_path / "empty").mkdir()
    RunWriter.create(tmp_path / "empty", {}).close()
    with pytest.raises(ConfigError, match=r"already holds a run.*--resume"):
        RunWriter.create(tmp_path / "empty", {})
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        RunWriter.create(tmp_path / "home", {})
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        RunWriter.create(tmp_path / "file", {})
    with pytest.raises(ConfigError, match="not a run"):
        RunWriter.resume(tmp_path / "home")
    with pytest.raises(ConfigError, match="cannot be stored as JSON"):
        RunWriter.create(tmp_path / "nan", {"lr": float("nan")})
    RunWriter.create(
        tmp_path / "nan", {"lr": 1.0}
    ).close()  # a start that failed does not block the next
    # refusing left nobody locked out
    RunWriter.resume(tmp_path / "empty").close()


def test_numbered_names(tmp_path):
    first, second = (RunWriter.create_numbered("my task!/x", {}, root=tmp_path) for _ in range(2))
    (tmp_path / "my-task-x-041").mkdir()
    third = RunWriter.create_numbered("my task!/x", {}, root=tmp_path)
    assert [run.name for run in (first, second, third)] == [
        "my-task-x-001",
        "my-task-x-002",
        "my-task-x-042",
    ]
    hostile = RunWriter.create_numbered("../..", {}, root=tmp_path)
    assert hostile.path.parent == tmp_path
    for run in (first, second, third, hostile):
        run.close()
    os.utime(first.path / "recipe.json", (2e9, 2e9))
    assert find_runs(tmp_path)[-1].name == "my-task-x-001"
    assert len(find_runs(tmp_path)) == 4
    assert find_runs(tmp_path / "nowhere") == []


def test_resuming_leaves_no_duplicates(tmp_path):
    with RunWriter.create(tmp_path / "run", {}) as run:
        write_steps(run, range(1, 6))
    (tmp_path / "run" / "checkpoints" / "step-000005" / "state").unlink()  # damaged, and of a later step
    with (tmp_path / "run" / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 6, "rew')
    with RunWriter.resume(tmp_path / "run") as run:
        run.truncate_after(3)
        with pytest.raises(ValueError, match="before its first metrics"):
            run.log(4, {})
            run.truncate_after(3)
        write_steps(run, [4, 5])
        assert [c.step for c in run.checkpoints()] == [1, 2, 3, 4, 5]
    read = RunFolder(tmp_path / "run")
    assert [row["step"] for row in read.metrics()] == [1, 2, 3, 4, 4, 5]
    assert [file.step for file in read.trajectory_files()] == [1, 2, 3, 4, 5]
    assert [c.step for c in read.checkpoints()] == [1, 2, 3, 4, 5]
    with RunWriter.resume(tmp_path / "run") as run:
        run.truncate_after(-1)
    assert read.metrics() == read.trajectory_files() == read.checkpoints() == []
    assert read.is_run


def test_a_closed_run_is_not_written(tmp_path):
    run = RunWriter.create(tmp_path / "run", {})
    run.close()
    run.close()
    with pytest.raises(ValueError, match="is not open"):
        run.log(1, {"reward": 1.0})
    with pytest.raises(ValueError, match="is not open"):
        run.write_groups([], 1)
    with pytest.raises(ValueError, match="is not open"), run.checkpoint(1):
        pass
    with pytest.raises(ValueError, match="a split is a word"):
        run.trajectory_path(1, "../x")


def test_two_writers_in_one_process(tmp_path):
    with RunWriter.create(tmp_path / "run", {}):
        with pytest.raises(LudusError, match=f"being written by another run.*{os.getpid()}"):
            RunWriter.resume(tmp_path / "run")
        assert RunFolder(tmp_path / "run").metrics() == []  # reading needs no lock
    RunWriter.resume(tmp_path / "run").close()


HOLDER = """
import os, sys, time
from ludus.observe import RunWriter
run = RunWriter.create(sys.argv[1], {})
run.log(1, {"reward": 1.0})
if os.fork() == 0:
    print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_a_killed_writer_frees_the_run_even_while_its_workers_live(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    ) as holder:
        worker = int(holder.stdout.readline())
        try:
            with pytest.raises(LudusError, match=str(holder.pid)):
                RunWriter.resume(tmp_path / "run")
            holder.send_signal(signal.SIGKILL)
            holder.wait(timeout=20)
            with RunWriter.resume(tmp_path / "run") as run:
                run.log(2, {"reward": 2.0})
                assert [row["step"] for row in run.metrics()] == [1, 2]
        finally:
            os.kill(worker, signal.SIGKILL)


METRICS_WRITER = """
import sys
from ludus.observe import RunWriter
with RunWriter.create(sys.argv[1], {}) as run:
    step = 0
    while True:
        run.log(step, {f"custom/{i}": step + i / 7 for i in range(50)})
        if step == 20:
            print("going", flush=True)
        step += 1
"""


def test_metrics_of_a_killed_writer_are_complete_lines(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", METRICS_WRITER, str(tmp_path / "run")], stdout=subprocess.PIPE
    ) as writer:
        writer.stdout.readline()
        writer.kill()
        writer.wait(timeout=20)
    rows = RunFolder(tmp_path / "run").metrics()
    assert len(rows) > 20
    assert [row["step"] for row in rows] == list(range(len(rows)))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(json.loads(lines[20])) == 52


def test_what_cannot_be_stored_leaves_no_folder(tmp_path):
    with pytest.raises(ConfigError, match="cannot be stored"):
        RunWriter.create(tmp_path / "run", {"rate": float("inf")})
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="cannot be stored"):
        RunWriter.create_numbered("x", {"rate": float("nan")}, root=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_folder_of_others_gets_no_lock(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        RunWriter.create(tmp_path, {})
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]


def test_a_run_whose_first_file_cannot_be_written_vanishes(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr("ludus.observe.run_writer.atomic_write", full)
    with pytest.raises(OSError, match="no space"):
        RunWriter.create(tmp_path / "run", {})
    assert not (tmp_path / "run").exists()
