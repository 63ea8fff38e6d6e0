"""Subordinate user ids: each session of an ordinary user is a user of its own (with the real `newuidmap`)."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest
from attacks import user as other_user
from hypothesis import given
from hypothesis import strategies as st

import ludus
from ludus.sandbox import SandboxError
from ludus.sandbox.processes.machine import share_of_subids, subordinate_ids

_NOBODY = 65534
_NAME = pwd.getpwuid(os.geteuid()).pw_name

_HOST = """
import asyncio, json
from ludus.sandbox import Sandbox, SandboxConfig
IN_FLIGHT = '''
import socket
count = 0
try:
    while count < 5_000:
        ours, theirs = socket.socketpair()
        socket.send_fds(ours, [b"x"], [theirs.fileno()] * 200)
        kept = globals().setdefault("kept", [])
        kept.append((ours, theirs))
        count += 200
except OSError as error:
    pass
count
'''
async def main():
    async with Sandbox(SandboxConfig(workers=1)) as box:
        async with await box.session() as one, await box.session() as other:
            own = "open('/proc/self/uid_map').read().split()[1]"
            ids = [(await each.python(own)).value for each in (one, other)]
            flights = [(await each.python(IN_FLIGHT)).value for each in (one, other)]
            groups = (await one.python("import os; os.getgroups()")).value
            async with await box.session() as third, await third.fork() as twin:
                forked = (await twin.python("1 < 2")).value
        once = (await box.python("print(6 * 7)")).stdout
        print(json.dumps([box.layers.active["own user ids"], ids, flights, groups, forked, once]))
asyncio.run(main())
"""


def as_nobody(tmp_path: Path, program: str) -> subprocess.CompletedProcess[str]:
    start = "import os, sys; from attacks.user import exec_as; exec_as(65534, sys.argv[1:], dict(os.environ))"
    sources = [str(Path(other_user.__file__).parents[1]), str(Path(ludus.__file__).parents[1])]
    tmp_path.chmod(0o777)
    return subprocess.run(
        [sys.executable, "-c", start, sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sources), "TMPDIR": "/tmp", "HOME": "/tmp"},
        capture_output=True,
        text=True,
        timeout=50,
    )


def test_an_ordinary_users_sessions_are_users_of_their_own(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become an ordinary user; others run the tests as one")
    probe = as_nobody(
        tmp_path,
        "from ludus.sandbox.processes.machine import subordinate_ids; print(subordinate_ids())",
    )
    if probe.returncode:
        pytest.skip(f"uid {_NOBODY}: {probe.stderr.splitlines()[-1]}")
    done = as_nobody(tmp_path, _HOST)
    assert done.returncode == 0, done.stderr[-2000:]
    own, ids, flights, groups, forked, once = json.loads(done.stdout)
    assert own and ids[0] != ids[1] and "0" not in ids
    assert int(flights[0]) >= 200 and int(flights[1]) >= int(flights[0]), (
        "the second has all that the first had"
    )
    assert groups == "[]" and forked == "True" and once == "42\n"


def subid_files(tmp_path: Path, text: str) -> Path:
    for name in ("subuid", "subgid"):
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`newuidmap` and `newgidmap` can be found; these tests do not run them."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("newuidmap", "newgidmap"):
        (folder / name).write_text("#!/bin/sh\nexit 1\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.usefixtures("programs")
def test_the_largest_range_of_this_user_is_taken_by_name_or_number(tmp_path: Path) -> None:
    text = f"other:5:70000\n{_NAME}:100:20\nbroken\n{os.geteuid()}:300:65536\n{_NAME}:x:y\n"
    assert subordinate_ids(subid_files(tmp_path, text)) == (300, 300, 65536)


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    "text", ["", "other:5:70000\n", f"{_NAME}:100:3\n", f"{_NAME}:-1:-1\n", "\0\xff:::"]
)
def test_a_user_without_ids_is_told_which_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(SandboxError, match="subuid gives this user no ids"):
        subordinate_ids(subid_files(tmp_path, text))


def test_missing_programs_are_named_with_their_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"newuidmap \(package uidmap\)"):
        subordinate_ids(tmp_path)


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(("mode", "is_open"), [(0o755, True), (0o700, False), (0o754, False)])
def test_what_other_users_cannot_read_keeps_sessions_one_user(
    tmp_path: Path, mode: int, is_open: bool
) -> None:
    etc = subid_files(tmp_path, f"{_NAME}:100:65536\n")
    folder = tmp_path / "data"
    folder.mkdir()
    folder.chmod(mode)
    if is_open:
        assert subordinate_ids(etc, [str(folder)]) == (100, 100, 65536)
        return
    with pytest.raises(SandboxError, match="data is not open to other users"):
        subordinate_ids(etc, [str(folder)])


@given(st.integers(1, 10**6), st.integers(16, 200_000), st.integers(0, 10**6))
def test_every_share_lies_within_the_range_and_neighbours_do_not_overlap(
    first: int, count: int, turn: int
) -> None:
    one, two = (
        share_of_subids([first, first + 7, count], turn),
        share_of_subids([first, first + 7, count], turn + 1),
    )
    for user, group, each in (one, two):
        assert first <= user and user + each <= first + count and group == user + 7
    assert one == two or one[0] + one[2] <= two[0] or two[0] + two[2] <= one[0]
