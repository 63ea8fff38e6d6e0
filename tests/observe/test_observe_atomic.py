import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ludus.observe import atomic_directory, atomic_file, atomic_write, checkpoint_problems
from ludus.observe.files import clean_leftovers, remove_directory
from ludus.observe.run_folder import (
    list_checkpoints,
    new_checkpoint,
    remove_checkpoints_after,
)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def save(folder: Path, step: int, text: str = "weights") -> None:
    with new_checkpoint(folder, step) as checkpoint:
        (checkpoint / "model").mkdir()
        (checkpoint / "model" / "weights.bin").write_text(text)
        (checkpoint / "state.json").write_text(str(step))


def test_a_file_is_replaced_whole(tmp_path):
    atomic_write(tmp_path / "new" / "a.txt", "one")
    atomic_write(tmp_path / "new" / "a.txt", b"two")
    assert (tmp_path / "new" / "a.txt").read_text() == "two"
    atomic_write(tmp_path / "new" / "a.txt", "lone \ud800")
    assert (tmp_path / "new" / "a.txt").read_text() == "lone \\ud800"
    assert names(tmp_path / "new") == ["a.txt"]


def test_a_write_that_raises_changes_nothing(tmp_path):
    target = tmp_path / "a.txt"
    atomic_write(target, "old")
    with pytest.raises(KeyboardInterrupt), atomic_file(target) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt), atomic_directory(tmp_path / "folder") as temporary:
        (temporary / "file").write_text("half")
        raise KeyboardInterrupt
    assert target.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("failing_call", range(4))
def test_a_disk_error_at_any_sync_leaves_all_or_nothing(tmp_path, monkeypatch, failing_call):
    calls = 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == failing_call + 1:
            raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="disk full"), atomic_directory(tmp_path / "c") as temporary:
        (temporary / "one").write_text("1")
        (temporary / "two").write_text("2")
    # the last sync is that of the parent folder, after the rename
    assert names(tmp_path) == (["c"] if failing_call == 3 else [])
    assert not (tmp_path / "c").exists() or names(tmp_path / "c") == ["one", "two"]


def test_a_folder_that_exists_is_refused(tmp_path):
    (tmp_path / "c").mkdir()
    with pytest.raises(FileExistsError, match="already there"), atomic_directory(tmp_path / "c"):
        pass


def test_a_second_writer_in_this_process_leaves_the_first_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with atomic_directory("folder") as first:  # the same place, spelled in another way
        (first / "file").write_text("x")
        atomic_write(tmp_path / "other", "")
    assert (tmp_path / "folder" / "file").read_text() == "x"


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    with atomic_file(tmp_path / "a") as mine:
        mine.write_text("x")
        theirs = mine.with_name(mine.name.replace(f"-{os.getpid()}-", f"-{dead.pid}-"))
        parents = mine.with_name(mine.name.replace(f"-{os.getpid()}-", f"-{os.getppid()}-"))
        elsewhere = mine.with_name(mine.name.replace(".ludus-", ".ludus-another-"))
        theirs.mkdir()
        (theirs / "half").write_text("")
        parents.write_text("")
        elsewhere.write_text("")
        (tmp_path / ".hidden.tmp").write_text("not ours")
        assert clean_leftovers(tmp_path) == [theirs]
        assert {mine.name, parents.name, elsewhere.name, ".hidden.tmp"} == set(names(tmp_path))
        os.utime(elsewhere, (0, 0))
        assert clean_leftovers(tmp_path) == [elsewhere]


def test_checkpoints_are_listed_removed_and_refused_twice(tmp_path):
    for step in (2, 1_000_000, 30):
        save(tmp_path, step)
    (tmp_path / "step-12").mkdir()
    (tmp_path / "notes.txt").write_text("")
    assert [c.step for c in list_checkpoints(tmp_path)] == [2, 30, 1_000_000]
    with pytest.raises(FileExistsError):
        save(tmp_path, 30)
    remove_directory(tmp_path / "step-000002")
    assert [c.step for c in remove_checkpoints_after(tmp_path, 30)] == [1_000_000]
    assert names(tmp_path) == ["notes.txt", "step-000030", "step-12"]
    assert list_checkpoints(tmp_path / "nowhere") == []


def test_damage_is_found_and_a_damaged_checkpoint_is_passed_over_and_replaced(tmp_path, caplog):
    for step in (1, 2, 3):
        save(tmp_path, step)
    weights = tmp_path / "step-000002" / "model" / "weights.bin"
    weights.write_text("WEIGHTS")
    assert checkpoint_problems(tmp_path / "step-000002") == []
    assert checkpoint_problems(tmp_path / "step-000002", thorough=True) == [
        "weights.bin has other content than was written"
    ]
    (tmp_path / "step-000003" / "state.json").unlink()
    assert [c.step for c in list_checkpoints(tmp_path)] == [1, 2]
    assert "state.json is missing" in caplog.text
    (tmp_path / "step-000002" / "manifest.json").write_text("{")
    assert "cannot be read" in checkpoint_problems(tmp_path / "step-000002")[0]
    (tmp_path / "step-000001" / "manifest.json").unlink()
    assert checkpoint_problems(tmp_path / "step-000001") == ["it has no manifest.json"]
    save(tmp_path, 3)
    assert [c.step for c in list_checkpoints(tmp_path)] == [3]


KILLED_WRITERS = """
import os, random, signal, sys, time
from pathlib import Path
from ludus.observe import checkpoint_problems
from ludus.observe.run_folder import list_checkpoints, new_checkpoint
from ludus.observe.files import remove_directory

folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
rng = random.Random(7)
cut_short = 0
# one write in peace: a kill comes within about three times as long, whatever the load
started = time.monotonic()
with new_checkpoint(folder, 0) as checkpoint:
    for name in ("weights.bin", "optimizer.bin", "state.bin"):
        (checkpoint / name).write_bytes(bytes(32000))
longest = max(0.05, 3 * (time.monotonic() - started))
for _ in range(rounds):
    writer = os.fork()
    if writer == 0:
        latest = list_checkpoints(folder)
        step = latest[-1].step + 1 if latest else 0
        while True:
            with new_checkpoint(folder, step) as checkpoint:
                for name in ("weights.bin", "optimizer.bin", "state.bin"):
                    (checkpoint / name).write_bytes(step.to_bytes(8, "big") * 4000)
            for old in list_checkpoints(folder)[:-3]:
                remove_directory(old.path)
            step += 1
    time.sleep(rng.uniform(0.0, longest))
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    entries = list(folder.iterdir()) if folder.is_dir() else []
    cut_short += any(entry.name.startswith(".") for entry in entries)
    visible = [entry for entry in entries if not entry.name.startswith(".")]
    for entry in visible:
        problems = checkpoint_problems(entry, thorough=True)
        assert problems == [], (entry, problems)
    found = list_checkpoints(folder)
    assert sorted(visible) == [checkpoint.path for checkpoint in found]
    if found:
        content = (found[-1].path / "weights.bin").read_bytes()
        assert content == found[-1].step.to_bytes(8, "big") * 4000
with new_checkpoint(folder, 10**6) as checkpoint:
    (checkpoint / "x").write_text("")
assert not [entry for entry in folder.iterdir() if entry.name.startswith(".")]
print(cut_short, len(list_checkpoints(folder)))
"""


def test_killing_the_writer_at_random_corrupts_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED_WRITERS, str(tmp_path / "checkpoints"), "25"],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    cut_short, complete = map(int, done.stdout.split())
    assert cut_short >= 1  # at least one writer died in the middle of a checkpoint
    assert complete >= 2


HALF_WAY = """
import sys, time
from pathlib import Path
from ludus.observe import atomic_directory
with atomic_directory(sys.argv[1]) as folder:
    (folder / "half").write_text("x")
    print("half way", flush=True)
    time.sleep(60)
"""


def test_killed_half_way_leaves_nothing_visible(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HALF_WAY, str(tmp_path / "c")], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout.readline() == "half way\n"
        writer.send_signal(signal.SIGKILL)
        writer.wait(timeout=20)
    (leftover,) = tmp_path.iterdir()
    assert leftover.name.startswith(".c.")
    atomic_write(tmp_path / "other", "")
    assert names(tmp_path) == ["other"]
