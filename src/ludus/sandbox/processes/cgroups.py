"""A control group around the whole sandbox, where this user may create one: the last bound on memory and pids.

Each session is held to its limits by resource limits and by the fork server's monitor; the group bounds all of
them together, so that the kernel kills something in there and not the trainer beside it. The victim need not be
the one that filled the memory. So kills are counted: a session that was killed meanwhile is not at fault.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

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
