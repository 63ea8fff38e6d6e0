"""Looking after a session's processes from outside it: how many there are, what they take, ending them.

Everything under /proc is read as bytes: code gives its processes any name it likes (`prctl(PR_SET_NAME)`), with
bytes that are no UTF-8, spaces, line breaks and parentheses.
"""

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


def suspected(pid: int, others: set[int], most_bytes: int, most_processes: int) -> str | None:
    """Which limit on the whole of a session may be exceeded: "memory", "processes", or None.

    Cheap, as it is asked often of everybody: too many processes are certain, but pages and sockets that several
    processes share are counted for each of them; `uses_more` divides them. `others` are the first processes of
    sessions, which count for themselves.
    """
    family = tree(pid, others)
    if sum(map(_threads, family)) > most_processes + 1:
        return "processes"
    descriptors = sum(map(_descriptors, family))
    buffers = descriptors * _SOCKET_BYTES if descriptors > _FEW_DESCRIPTORS else 0
    if len(family) == 1 and not buffers:
        return None  # one process is held by the kernel itself
    return "memory" if sum(map(_resident, family)) + buffers > most_bytes else None


def uses_more(pid: int, others: set[int], most_bytes: int) -> bool:
    """Whether a session uses more memory than it may. Slow: dozens of large forks take seconds."""
    family = tree(pid, others)
    buffers = _socket_bytes(family)
    if len(family) == 1 and not buffers:
        return False
    resident = [_resident(one) for one in family]
    total = sum(resident) + buffers
    for one, counted in zip(family, resident, strict=True):  # of as few processes as it takes
        if total <= most_bytes:
            return False
        total += _proportional(one) - counted
    return total > most_bytes


def cpu_seconds(pid: int, others: set[int]) -> float:
    """Processor time that a session's processes have used, those that have ended and were collected too."""
    fields = [_stat(one) for one in tree(pid, others)]
    return sum(int(ticks) for one in fields for ticks in one[11:15]) / _TICKS


def kill_below(pid: int, keep: set[int]) -> None:
    """End what a stopped session started, apart from its forks (`keep`) and what those started.

    In rounds, because what dies leaves its children to `pid`, and a process may fork while others die.
    """
    for _ in range(_ROUNDS):
        below = [one for one in tree(pid, keep)[1:] if not is_dead(one)]
        if not below:
            return
        for one in below:
            _send(one, signal.SIGKILL)


def _send(pid: int, which: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, which)


def children(pid: int | str) -> list[int]:
    """The processes that `pid` or one of its threads has started, or adopted."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += [int(child) for child in _read(f"/proc/{pid}/task/{task}/children").split()]
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


def is_dead(pid: int) -> bool:
    """Whether a process has ended, collected or not."""
    return not (fields := _stat(pid)) or fields[0] in b"ZX"


def namespace_pids(pid: int) -> list[int]:
    """The numbers of a process in the pid namespaces around it, ours first, its own last."""
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith(b"NSpid:"):
            return [int(number) for number in line.split()[1:]]
    return []


def _read(path: str) -> bytes:
    """A file under /proc; nothing of a process that has ended."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read()
    return b""


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat after the name, from the state on; none where there is no such process."""
    return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()


def _resident(pid: int) -> int:
    fields = _read(f"/proc/{pid}/statm").split()
    return int(fields[1]) * _PAGE if fields else 0


def _proportional(pid: int) -> int:
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return _resident(pid)  # it has closed itself to us: then it is charged for all of it
