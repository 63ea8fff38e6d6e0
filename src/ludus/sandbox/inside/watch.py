"""Looking after a session's processes from outside it: how many there are, what they take, ending them."""

from __future__ import annotations

import contextlib
import os
import signal

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_ROUNDS = 100
_FEW_DESCRIPTORS = 64
_SOCKET_BYTES = 320 << 10
"""What a Unix socket holds at most: its send buffer (208 kB, which code cannot raise) and one message."""


def tree(pid: int, without: set[int] | None = None) -> list[int]:
    """`pid` and everything below it. The first process of a session adopts its orphans, so nothing hides."""
    found, place = [pid], 0
    while place < len(found):
        found += [child for child in children(found[place]) if not without or child not in without]
        place += 1
    return found


def excess(pid: int, others: set[int], most_bytes: int, most_processes: int) -> str | None:
    """Which limit on the whole of a session is exceeded: "memory", "processes", or None.

    `others` are the first processes of sessions, which count for themselves.
    """
    family = tree(pid, others)
    if sum(map(_threads, family)) > most_processes + 1:
        return "processes"
    buffers = _socket_bytes(family)
    if len(family) == 1 and not buffers:
        return None  # one process is held by the kernel itself
    resident = [_resident(one) for one in family]
    total = sum(resident) + buffers
    # Pages that a fork shares are counted in each process; a count that is far slower divides them, and is made
    # of as few processes as it takes.
    for one, counted in zip(family, resident, strict=True):
        if total <= most_bytes:
            return None
        total += _proportional(one) - counted
    return "memory" if total > most_bytes else None


def cpu_seconds(pid: int, others: set[int]) -> float:
    """Processor time that a session's processes have used, those that have ended and were collected too."""
    ticks = 0
    for one in tree(pid, others):
        with contextlib.suppress(OSError), open(f"/proc/{one}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
            ticks += sum(int(fields[place]) for place in (11, 12, 13, 14))
    return ticks / _TICKS


def kill_below(pid: int, keep: set[int]) -> None:
    """End what a stopped session started, apart from its forks (`keep`) and what those started.

    In rounds, because what dies leaves its children to `pid`, and a process may fork while others die.
    """
    for _ in range(_ROUNDS):
        below = [one for one in tree(pid, keep)[1:] if not _is_dead(one)]
        if not below:
            return
        for one in below:
            _send(one, signal.SIGKILL)


def _send(pid: int, which: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, which)


def children(pid: int) -> list[int]:
    """The processes that `pid` or one of its threads has started, or adopted."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                found += [int(child) for child in file.read().split()]
    return found


def _socket_bytes(family: list[int]) -> int:
    """What the kernel may hold for the sockets of a session, whether they hold it now or not; 0 for a few.

    Nobody but a control group counts what is in them, so each is charged with as much as can be sent into it.
    """
    counts = {one: _descriptors(one) for one in family}
    if sum(counts.values()) <= _FEW_DESCRIPTORS:
        return 0
    sockets: set[str] = set()
    hidden = 0
    for one, count in counts.items():
        try:
            for fd in os.listdir(f"/proc/{one}/fd"):
                with contextlib.suppress(FileNotFoundError):
                    target = os.readlink(f"/proc/{one}/fd/{fd}")
                    if target.startswith("socket:"):
                        sockets.add(target)  # a fork shares its parent's
        except PermissionError:
            hidden += count  # it has closed itself to us: then it is charged for all of them
        except OSError:
            continue  # it has ended
    return (len(sockets) + hidden) * _SOCKET_BYTES


def _descriptors(pid: int) -> int:
    """How many descriptors a process has open; many where the kernel is too old to tell in this way."""
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{pid}/fd").st_size or _FEW_DESCRIPTORS + 1
    return 0


def _threads(pid: int) -> int:
    """How many threads a process has; counted by the links of the folder that they are in."""
    with contextlib.suppress(OSError):
        return max(1, os.stat(f"/proc/{pid}/task").st_nlink - 2)
    return 1


def _is_dead(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def namespace_pids(pid: int) -> list[int]:
    """The numbers of a process in the pid namespaces around it, ours first, its own last."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("NSpid:"):
                return [int(number) for number in line.split()[1:]]
    return []


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * _PAGE
    return 0


def _proportional(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return _resident(pid)  # it has closed itself to us: then it is charged for all of it
