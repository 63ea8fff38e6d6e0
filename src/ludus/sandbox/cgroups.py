"""A control group around the whole sandbox, where this user may make one: the last line for memory and pids.

Each session is held to its limits by the kernel's resource limits and by the worker that looks after it. The
group bounds all of them together, so that whatever happens inside, the kernel ends something in there and not
the trainer beside it. One group for all, because moving a process into a group costs milliseconds.

Whom the kernel then ends is its choice, and need not be who filled the memory. So it is counted how often that
happened: what ended meanwhile, killed, was not at fault (`Session` decides).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections import Counter
from pathlib import Path

_PREFIX = "ludus-sandbox-"
_MEMORY_SHARE = 0.75
_MOST_PIDS = 32_768
_COUNTERS = ("memory.events", "memory.oom_control")
"""Where the kernel counts whom it has ended, in either version."""
_KILLS = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)
_MOST_COUNTER = 4096
_REMOVE_SECONDS = 2.0


class ControlGroup:
    """One group in each hierarchy that counts memory or pids."""

    def __init__(self, folders: list[Path], memory_bytes: int) -> None:
        self._folders = folders
        self.memory_bytes = memory_bytes
        """What all sessions together may take."""
        self._counter: int | None = None
        for path in (folder / name for folder in folders for name in _COUNTERS):
            if self._counter is None and path.is_file():
                # kept open: it is read before every execution
                self._counter = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def counts(self) -> bool:
        """Whether anything is bounded by it."""
        return bool(self._folders)

    def add(self, pid: int) -> None:
        """Put a process into it; what that process starts is in it too."""
        for folder in list(self._folders):
            try:
                (folder / "cgroup.procs").write_text(str(pid))
            except OSError:  # made, but not ours to fill: then it bounds nothing
                self._folders.remove(folder)
                _release(folder)

    def kills(self) -> int:
        """How many processes in it the kernel has ended for want of memory; 0 where it does not tell."""
        if self._counter is None:
            return 0
        found = _KILLS.search(os.pread(self._counter, _MOST_COUNTER, 0))
        return int(found[1]) if found else 0

    def remove(self) -> None:
        """Take it away; its processes are gone by now."""
        if self._counter is not None:
            os.close(self._counter)
            self._counter = None
        folders, self._folders = self._folders, []
        for folder in folders:
            _release(folder)


_sharing: Counter[Path] = Counter()
"""How many sandboxes of this process are in a group: they have one together."""


def _release(folder: Path) -> None:
    """One sandbox less is in it; the last one removes it."""
    _sharing[folder] -= 1
    if _sharing[folder] <= 0:
        del _sharing[folder]
        _remove(folder)


def _remove(folder: Path) -> None:
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
    """A group of our own under each hierarchy that lets us; an empty one where none does."""
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
    """Where a group might be made: at the top, as root may; then in our own and around it, nearest first, as an
    ordinary user may whom systemd or an administrator has given a part of the hierarchy."""
    home = root / controller
    if not home.is_dir():
        return []
    own: list[Path] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                place = home / path.lstrip("/")
                own = [
                    one for one in (place, *place.parents) if one.is_relative_to(home) and one != home
                ]
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
    """Remove the groups of processes that were killed before they could."""
    for folder in parent.glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX)
        if owner.isdigit() and not Path("/proc", owner).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


def _memory_bytes(root: Path) -> int:
    """What the sandbox may take of this machine's memory, or of what our own container may have of it."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(min([machine, *_own_limits(root)]) * _MEMORY_SHARE)


def _own_limits(root: Path) -> list[int]:
    """The limits on memory of the groups that we are in, in either version, as far as they can be seen."""
    limits: list[int] = []
    for folder in _own_folders(root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # not there, or "max": no limit
                limits.append(int((folder / name).read_text()))
    return [limit for limit in limits if limit > 0]


def _own_folders(root: Path) -> set[Path]:
    """Our group and those around it. A container may be shown its own group as the root, or under its path."""
    found = {root, root / "memory"}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            home = root / "memory" if controllers else root
            own = home / path.lstrip("/")
            found |= {own, *(parent for parent in own.parents if parent.is_relative_to(home))}
    return found
