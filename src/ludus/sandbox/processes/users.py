"""A user id for each session where we are an ordinary user: subordinate ids (`man 5 subuid`).

The kernel keeps some of its counts per user (descriptors in flight, pages in pipes, `epoll` watches), so
sessions that are one user can keep each other from these. Root simply maps unused ids. An ordinary user may map
itself alone, unless the administrator has given it ids in /etc/subuid and /etc/subgid; the set-uid programs
`newuidmap` and `newgidmap` (package `uidmap`) then write the map. Rootless Podman works the same way.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ludus.sandbox.config import SandboxError

USERS_EACH = 1_000_000
"""User ids of one worker, as root."""
_EACH = 4_096
"""User ids of one worker. Workers take turns in the range, so that those of other processes get other ids."""
_FEWEST = 16
_SECONDS = 10.0


def subordinate_ids(folder: Path = Path("/etc"), shown: Sequence[str] = ()) -> tuple[int, int, int]:
    """The first user id, the first group id and how many there are; `SandboxError` says why there are none.

    `shown` are the paths that sessions must be able to read, also as other users than this one.
    """
    for path in shown:
        mode = Path(path).stat().st_mode
        if not mode & stat.S_IROTH or (stat.S_ISDIR(mode) and not mode & stat.S_IXOTH):
            raise SandboxError(
                f"all sessions are one user: {path} is not open to other users (chmod o+rX)"
            )
    for program in ("newuidmap", "newgidmap"):
        if shutil.which(program) is None:
            raise SandboxError(f"all sessions are one user: there is no {program} (package uidmap)")
    first_user, users = _range(folder / "subuid")
    first_group, groups = _range(folder / "subgid")
    return first_user, first_group, min(users, groups)


def share_of_subids(ids: Sequence[int], turn: int) -> list[int]:
    """The part of the range that the worker whose turn it is takes."""
    user, group, count = ids
    each = min(count, _EACH)
    offset = turn % (count // each) * each
    return [user + offset, group + offset, each]


def map_subids(pid: int, ids: Sequence[int]) -> None:
    """Map ourselves as root of the new user namespace of `pid`, and the subordinate ids after it."""
    user, group, count = ids
    for program, own, first in (("newuidmap", os.geteuid(), user), ("newgidmap", os.getegid(), group)):
        command = [program, str(pid), "0", str(own), "1", "1", str(first), str(count)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            raise SandboxError(f"{program} did not end within {_SECONDS:g} s") from None
        if done.returncode:
            raise SandboxError(f"{program} failed: {done.stderr.strip()[:200]}")


def _range(path: Path) -> tuple[int, int]:
    """The largest range of ids that the file gives this user."""
    names = {str(os.geteuid())}
    with contextlib.suppress(KeyError):  # a user without a name, as in some containers
        names.add(pwd.getpwuid(os.geteuid()).pw_name)
    ranges: list[tuple[int, int]] = []
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, numbers = line.strip().partition(":")
        start, _, length = numbers.partition(":")
        if name in names and start.isdecimal() and length.isdecimal():
            ranges.append((int(length), int(start)))
    count, first = max(ranges, default=(0, 0))
    if count < _FEWEST:
        raise SandboxError(f"all sessions are one user: {path} gives this user no ids")
    return first, count


_IN_A_CONTAINER = ((52_000, 8_000), (65_534, 1))
"""Unused user ids (first, count) where a container's root has only few mapped."""


def map_users(pid: int, first: int | None) -> None:
    """Write the uid and gid map of a new user namespace.

    As root: a range of unused ids, one for each session, because the kernel keeps many of its counts per user
    (descriptors in flight, pages in pipes, epoll watches). Otherwise the host's own user only (for an ordinary
    user with subordinate ids see `subids`).
    """
    folder = Path(f"/proc/{pid}")
    if first is None:
        (folder / "setgroups").write_text("deny")
        (folder / "uid_map").write_text(f"0 {os.geteuid()} 1")
        (folder / "gid_map").write_text(f"0 {os.getegid()} 1")
        return
    ranges = ((first, USERS_EACH), *_IN_A_CONTAINER)
    for position, (user, count) in enumerate(ranges):
        try:
            (folder / "uid_map").write_text(f"0 {user} {count}")
        except OSError:
            if position == len(ranges) - 1:
                raise
            continue
        (folder / "gid_map").write_text(f"0 {user} {count}")
        return
