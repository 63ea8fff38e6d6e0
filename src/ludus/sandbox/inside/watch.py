"""Looking after a session's processes from outside it: how many there are, what they take, ending them."""

from __future__ import annotations

import contextlib
import os
import signal

_PAGE = os.sysconf("SC_PAGE_SIZE")
_ROUNDS = 100


def tree(pid: int) -> list[int]:
    """`pid` and everything below it. The first process of a session adopts its orphans, so nothing hides."""
    found, place = [pid], 0
    while place < len(found):
        found += _children(found[place])
        place += 1
    return found


def excess(pid: int, most_bytes: int, most_processes: int) -> str | None:
    """Which limit on the whole of a session is exceeded: "memory", "processes", or None."""
    family = tree(pid)
    if len(family) > most_processes + 1:
        return "processes"
    if len(family) == 1:
        return None  # one process is held by the kernel itself
    if sum(map(_resident, family)) <= most_bytes:
        return None
    # Pages that a fork shares are counted in each process; the slower count divides them.
    return "memory" if sum(map(_proportional, family)) > most_bytes else None


def kill_tree(pid: int) -> None:
    """End everything below `pid`, which is stopped first so that it starts nothing new."""
    _send(pid, signal.SIGSTOP)
    for _ in range(_ROUNDS):
        below = tree(pid)[1:]
        for one in below:
            _send(one, signal.SIGKILL)
        if not [one for one in below if not _is_dead(one)]:
            return


def kill_own(pid: int) -> None:
    """End what a session started, apart from its forks, which live in pid namespaces of their own."""
    depth = _namespace_depth(pid)
    for _ in range(_ROUNDS):
        own = [one for one in tree(pid)[1:] if not _is_dead(one) and _namespace_depth(one) == depth]
        if not own:
            return
        for one in own:
            _send(one, signal.SIGKILL)


def _send(pid: int, which: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, which)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                found += [int(child) for child in file.read().split()]
    return found


def _is_dead(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _namespace_depth(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("NSpid:"):
                return len(line.split())
    return 0


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * _PAGE
    return 0


def _proportional(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
