"""Programs that play episodes end with the process that started them, however that ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from cli_process import COMMAND, Started


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's doing")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_program_dies_with_the_process_that_plays_it(tmp_path: Path, how: signal.Signals) -> None:
    """With a child of its group that holds no descriptor of ours."""
    pids, agent = tmp_path / "pids", tmp_path / "agent.py"
    agent.write_text(f"""
import os, subprocess, time
child = subprocess.Popen(["sleep", "600"])
with open({str(pids)!r} + ".part", "w") as file:
    file.write(f"{{os.getpid()}} {{child.pid}}")
os.rename(file.name, {str(pids)!r})
time.sleep(600)
""")
    script = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "serve")!r})
from test_program_agents import ProgramAgent, play
asyncio.run(play(ProgramAgent({f"python {agent}"!r}), ["fine"]))
"""
    player = Started(script)
    try:
        player.wait_until(pids.exists)
        started = [int(pid) for pid in pids.read_text().split()]
        assert len(started) == 2 and not any(map(has_ended, started))
        player.send_signal(how)
        player.communicate()
        assert player.returncode == -how and all(map(ends, started))
    finally:
        if pids.exists():
            kill_left(*map(int, pids.read_text().split()))


def kill_left(*processes: int) -> None:
    for process in processes:
        if not has_ended(process):
            os.kill(process, signal.SIGKILL)


def test_check_recipe_stops_its_program_when_it_is_told_to(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    (tmp_path / "agent.sh").write_text(f"echo $$ > {pid}.part; mv {pid}.part {pid}; exec sleep 600")
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "hello"}\n')
    (tmp_path / "r.toml").write_text(
        'name = "x"\n[model.scratch]\n[tasks]\ntrain = "tasks.jsonl"\n[rl]\nsteps = 1\n'
        '[agent]\nloop = "command: sh agent.sh"\n'
    )
    checking = Started(COMMAND, "check", "recipe", str(tmp_path / "r.toml"), "--seconds", "100")
    try:
        checking.wait_until(pid.exists)
        checking.send_signal(signal.SIGTERM)
        _, told = checking.communicate()
        assert (checking.returncode, "Traceback" in told) == (143, False)
        assert ends(int(pid.read_text()))
    finally:
        if pid.exists():
            kill_left(int(pid.read_text()))


def ends(process: int, seconds: float = 20.0) -> bool:
    """Whether it is gone, or will be in a moment: a killed process is not gone at once."""
    deadline = time.monotonic() + seconds
    while not has_ended(process) and time.monotonic() < deadline:
        time.sleep(0.01)
    return has_ended(process)


def has_ended(process: int) -> bool:
    try:
        return "zombie" in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
