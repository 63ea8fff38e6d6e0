"""What a sandbox takes from the machine: a control group around it, user ids and a network for its namespaces.

*Control group*, where this user may create one: the last bound on memory and pids. Each session is held to its
limits by resource limits and by the fork server's monitor; the group bounds all of them together, so that the
kernel kills something in there and not the trainer beside it. The victim need not be the one that filled the
memory. So kills are counted: a session that was killed meanwhile is not at fault.

*User ids*: the kernel keeps some of its counts per user, so sessions that are one user can keep each other from
these. Root maps unused ids. An ordinary user needs subordinate ids (`man 5 subuid`), and the set-uid programs
`newuidmap` and `newgidmap` (package `uidmap`), which write the map; rootless Podman works the same way.

*Network*: slirp4netns, a TCP/IP stack in user space.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import pwd
import re
import shutil
import stat
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ludus.sandbox.config import SandboxError

_PREFIX = "ludus-sandbox-"
_MEMORY_SHARE = 0.75
_MOST_PIDS = 32_768
_COUNTERS = ("memory.events", "memory.oom_control")
"""Where the kernel counts its out-of-memory kills, in cgroup v2 and v1."""
_KILLS = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)
_MOST_COUNTER = 4096
_REMOVE_SECONDS = 2.0


class ControlGroup:
    """One group in each hierarchy that counts memory or pids."""

    def __init__(self, folders: list[Path], memory_bytes: int) -> None:
        self._folders = folders
        self.memory_bytes = memory_bytes
        """The limit of all sessions together."""
        self._counter: int | None = None
        for path in (folder / name for folder in folders for name in _COUNTERS):
            if self._counter is None and path.is_file():
                # kept open: it is read before every execution
                self._counter = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def counts(self) -> bool:
        """Whether it bounds anything."""
        return bool(self._folders)

    def add(self, pid: int) -> None:
        """Put a process into it; its children inherit the group."""
        for folder in list(self._folders):
            try:
                (folder / "cgroup.procs").write_text(str(pid))
            except OSError:  # created, but this user may not add processes: it would bound nothing
                self._folders.remove(folder)
                _release(folder)

    def kills(self) -> int:
        """How many processes in it the kernel has killed for lack of memory; 0 where unknown."""
        if self._counter is None:
            return 0
        found = _KILLS.search(os.pread(self._counter, _MOST_COUNTER, 0))
        return int(found[1]) if found else 0

    def remove(self) -> None:
        """Remove it; its processes have ended by now."""
        if self._counter is not None:
            os.close(self._counter)
            self._counter = None
        folders, self._folders = self._folders, []
        for folder in folders:
            _release(folder)


_sharing: Counter[Path] = Counter()
"""How many sandboxes of this process share a group."""


def _release(folder: Path) -> None:
    """One sandbox less uses it; the last one removes it."""
    _sharing[folder] -= 1
    if _sharing[folder] <= 0:
        del _sharing[folder]
        _remove_folder(folder)


def _remove_folder(folder: Path) -> None:
    """Remove a group whose processes have ended; the kernel may need a moment to notice."""
    deadline = time.monotonic() + _REMOVE_SECONDS
    while True:
        try:
            folder.rmdir()
        except OSError as error:
            if error.errno == errno.EBUSY and time.monotonic() < deadline:
                time.sleep(0.005)
                continue
        return


def make_group(root: Path = Path("/sys/fs/cgroup"), pid: int | None = None) -> ControlGroup:
    """A new group in each hierarchy that permits it; an empty `ControlGroup` where none does."""
    pid = os.getpid() if pid is None else pid
    memory = _memory_bytes(root)
    if (root / "cgroup.controllers").is_file():
        wanted = {"": {"memory.max": memory, "pids.max": _MOST_PIDS}}
    else:
        wanted = {
            "memory": {"memory.limit_in_bytes": memory},
            "pids": {"pids.max": _MOST_PIDS},
        }
    folders: list[Path] = []
    for controller, limits in wanted.items():
        for parent in _parents(root, controller):
            _sweep(parent)
            folder = parent / f"{_PREFIX}{pid}"
            if _is_made(folder, limits):
                folders.append(folder)
                _sharing[folder] += 1
                break
    return ControlGroup(folders, memory)


def _parents(root: Path, controller: str) -> list[Path]:
    """Where a group might be created: at the top (root); then in our own group and its parents, nearest first
    (an ordinary user to whom systemd or an administrator has delegated a part of the hierarchy)."""
    home = root / controller
    if not home.is_dir():
        return []
    own: list[Path] = []
    for controllers, path in _own_groups():
        if controller in controllers:
            place = home / path
            own = [one for one in (place, *place.parents) if one.is_relative_to(home) and one != home]
    return [home, *(one for one in own if one.is_dir())]


def _is_made(folder: Path, limits: dict[str, int]) -> bool:
    try:
        folder.mkdir(exist_ok=True)
        for name, value in limits.items():
            (folder / name).write_text(str(value))
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()
        return False
    return True


def _sweep(parent: Path) -> None:
    """Remove the groups of processes that were killed before they could do so."""
    for folder in parent.glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX)
        if owner.isdigit() and not Path("/proc", owner).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


def _memory_bytes(root: Path) -> int:
    """The sandbox's share of the machine's memory, or of the limit of the container that it runs in."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    # a container may see its own group as the root, or under its path
    folders = {root, root / "memory"}
    for controllers, path in _own_groups():
        if "memory" in controllers or "" in controllers:
            home = root / "memory" if "memory" in controllers else root
            own = home / path
            folders |= {own, *(parent for parent in own.parents if parent.is_relative_to(home))}
    for folder in folders:
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # not there, or "max": no limit
                limits.append(int((folder / name).read_text()))
    return int(min(limit for limit in limits if limit > 0) * _MEMORY_SHARE)


def _own_groups() -> Iterator[tuple[list[str], str]]:
    """(controllers, path) of each group that this process is in; the one of cgroup v2 has the controller ""."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            yield controllers.split(","), path.lstrip("/")


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
    user with subordinate ids see `subordinate_ids`).
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


END_SECONDS = 5.0
"""Seconds that a process may take to end after it was asked to."""
RESOLVER = "nameserver 10.0.2.3\n"
"""slirp4netns's own name server, which asks the machine's."""
GATEWAY = "10.0.2.2"
"""The address of the machine's loopback, if slirp4netns did not disable it."""
_SLIRP_OPTIONS = ("--configure", "--mtu=65520", "--disable-host-loopback")
_HARDENING = ("--enable-sandbox", "--enable-seccomp")
"""Options that confine slirp4netns itself, which parses hostile traffic; older versions lack some."""


def slirp_program() -> str | None:
    return shutil.which("slirp4netns")


@functools.cache
def _hardening_options(path: str) -> tuple[str, ...]:
    """The options of `_HARDENING` that this version knows."""
    try:
        told = subprocess.run([path, "--help"], capture_output=True, timeout=END_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    said = (told.stdout + told.stderr).decode(errors="replace")
    return tuple(option for option in _HARDENING if option in said)


class Slirp:
    """A network for sandboxed code that is not the machine's own: slirp4netns, a TCP/IP stack in user space.

    It puts a device into the worker's network namespace and turns its traffic into ordinary connections of our
    user. So code reaches what this machine reaches, except its loopback addresses and abstract Unix sockets,
    where databases, notebooks and servers listen without a password. It ends when its end of a pipe is closed,
    also by the host's death.
    """

    def __init__(self, pid: int, on_ready: Callable[[str | None], None]) -> None:
        """For the namespaces of process `pid`; `on_ready` is called with why it does not work, or None."""
        self._on_ready = on_ready
        self._ready, ready = os.pipe2(os.O_CLOEXEC)
        ending, self._end = os.pipe2(os.O_CLOEXEC)
        path = slirp_program() or "slirp4netns"
        fds = ("--ready-fd", str(ready), "--exit-fd", str(ending))
        self._popen = subprocess.Popen(
            [path, *_SLIRP_OPTIONS, *_hardening_options(path), *fds, str(pid), "tap0"],
            pass_fds=(ready, ending),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for fd in (ready, ending):
            os.close(fd)
        asyncio.get_running_loop().add_reader(self._ready, self._on_word)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def close(self) -> None:
        """End it and wait until it is gone: up to seconds, so not on the event loop."""
        if self._end >= 0:
            os.close(self._end)
            self._end = -1
            wait_or_kill(self._popen)
            assert self._popen.stderr is not None
            self._popen.stderr.close()

    def _on_word(self) -> None:
        asyncio.get_running_loop().remove_reader(self._ready)
        works = bool(os.read(self._ready, 1))
        os.close(self._ready)
        if works:
            self._on_ready(None)
            return
        self._popen.kill()
        said = " ".join(self._popen.communicate()[1].decode(errors="replace").split())
        self._on_ready(f"slirp4netns: {said[-300:] or 'it ended without a message'}")


def wait_or_kill(popen: subprocess.Popen[bytes]) -> None:
    try:
        popen.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait()
