"""Hostile programs against the sandbox: nothing escapes, nothing is left behind, honest work is unharmed.

The campaign runs in a process of its own, so that every descendant, descriptor and file can be counted, and so
that it can run as another user. The slow tests make every attack both in a slot and in a process of its own;
`LUDUS_ATTACK_ROUNDS` sets how often (20 when it is not given, 100 for a soak).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attacks import host
from attacks.campaign import CASES

import ludus

_HERE = Path(__file__).parent
_NOBODY = 65_534
_ROUNDS = int(os.environ.get("LUDUS_ATTACK_ROUNDS", "20"))
_SECONDS_A_ROUND = 60


@pytest.fixture
def folder() -> Iterator[Path]:
    """A place for temporary files, and a home, that any user can enter: pytest's own are closed to others."""
    place = Path(tempfile.mkdtemp(prefix="ludus-attacks-"))
    (place / "home").mkdir()
    for path in (place, place / "home"):
        path.chmod(0o777)
    yield place
    shutil.rmtree(place)


def campaign(folder: Path, *options: str, seconds: float) -> dict[str, Any]:
    """Run the attacks, and give back the report."""
    sources = [str(_HERE), str(Path(ludus.__file__).parents[1])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*sources, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(folder),
        "HOME": str(folder / "home"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "attacks", *options],
        cwd=_HERE,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout)
    left = sorted(path.name for path in folder.iterdir() if path.name != "home")
    assert left == []
    return report


def judged(report: dict[str, Any]) -> None:
    problems = report["problems"]
    assert problems == [], f"{len(problems)} problems:\n" + "\n".join(problems)
    assert report["honest"] >= 4


def users() -> list[Any]:
    """Whoever runs the tests, and where that is root, an ordinary user too."""
    other = pytest.param(["--uid", str(_NOBODY)], id="nobody")
    return [pytest.param([], id="self"), *([other] if os.geteuid() == 0 else [])]


def test_every_line_of_the_table_has_its_cases() -> None:
    assert {case.row for case in CASES} == set(range(1, 26))
    assert len({case.name for case in CASES}) == len(CASES) >= 60


def test_attacks_are_contained_and_honest_work_is_right(folder: Path) -> None:
    report = campaign(folder, "--at-once", "16", seconds=55)
    judged(report)
    assert report["attacks"] + len(report["skipped"]) >= len(CASES)


@pytest.mark.slow
@pytest.mark.timeout(_ROUNDS * _SECONDS_A_ROUND)
@pytest.mark.parametrize("arrangement", [[], ["--bare"]], ids=["namespaces", "bare"])
@pytest.mark.parametrize("user", users())
def test_attacks_again_and_again(folder: Path, user: list[str], arrangement: list[str]) -> None:
    if os.geteuid() == 0 and arrangement and not user and not host.others_can_enter():
        pytest.skip(
            "without namespaces root's sessions are other users, who cannot enter the folder of this Python"
        )
    options = [*user, *arrangement, "--rounds", str(_ROUNDS), "--at-once", "16", "--seed", str(_ROUNDS)]
    report = campaign(folder, *options, seconds=_ROUNDS * _SECONDS_A_ROUND)
    judged(report)
    assert report["attacks"] >= _ROUNDS * (len(CASES) - len(report["skipped"]))


_HOST = """
import asyncio, sys
from attacks.host import arrange
from ludus.sandbox import Sandbox, SandboxConfig
arrange(bare=sys.argv[1] == "bare")
DAEMON = "import os, time\\nif os.fork() == 0:\\n    os.setsid()\\n    os.fork()\\ntime.sleep(1000)"
CODES = [
    ("python", "import time; time.sleep(1000)"),
    ("python", "while True: pass"),
    ("python", DAEMON),
    ("shell", "sleep 1000 & sleep 1000"),
    ("shell", "trap '' TERM INT HUP; setsid sleep 1000 & while :; do sleep 1; done"),
]
async def main():
    sandbox = Sandbox(SandboxConfig(workers=2))
    await sandbox.start()
    sessions = [await sandbox.session() for _ in range(4)]
    forks = [await session.fork() for session in sessions]
    tasks = [asyncio.create_task(getattr(sandbox, kind)(code)) for kind, code in CODES * 10]
    while sandbox.alive < 50:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    print("under way", flush=True)
    await asyncio.gather(*tasks)
asyncio.run(main())
"""

_WATCHER = """
import os, signal, subprocess, sys, time
from attacks.host import adopt_orphans, descendants
adopt_orphans()
host = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], stdout=subprocess.PIPE)
assert host.stdout.readline() == b"under way\\n"
assert len(descendants(os.getpid())) > 50
os.kill(host.pid, signal.SIGKILL)
host.wait()
deadline = time.monotonic() + 20
while time.monotonic() < deadline:
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                break
        except ChildProcessError:
            break
    if not descendants(os.getpid()):
        break
    time.sleep(0.02)
print(descendants(os.getpid()))
"""


@pytest.mark.parametrize("arrangement", ["namespaces", pytest.param("bare", marks=pytest.mark.slow)])
def test_everything_ends_when_the_host_is_killed(folder: Path, arrangement: str) -> None:
    sources = [str(_HERE), str(Path(ludus.__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-c", _WATCHER, _HOST, arrangement],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sources), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.stdout == "[]\n", done.stderr[-2000:]
