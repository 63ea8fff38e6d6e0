"""Resource accounting of sessions from the fork server: processes, memory, CPU time; and killing process trees.

Kernel limits hold single processes; `UsageMonitor` holds all processes of a session together to its limits.
Everything under /proc is read as bytes: code names its processes as it likes (`prctl(PR_SET_NAME)`), with bytes
that are not UTF-8, spaces, line breaks and parentheses.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ludus.sandbox.config import Limits

_COUNT_REST = 2.0
"""After an exact memory count, none of the same session for so many times as long as it took."""
_IDLE_SHARE = 0.05
"""The share of a CPU that a session may use while it runs nothing for the host."""
_EXCEEDED, _UNREADABLE = 3, 4
_VERDICTS = {_EXCEEDED: "memory", _UNREADABLE: "unreadable"}
"""Meaning of a memory counter's exit status; a killed counter has no verdict."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_ROUNDS = 100
_FEW_DESCRIPTORS = 64
_SOCKET_BYTES = 320 << 10
"""Most bytes that a Unix socket holds: its send buffer (208 kB, which code cannot raise) and one message."""

Excess = tuple[int, str]
"""A session's number, and the limit that it has exceeded."""


@dataclass(slots=True)
class SessionRecord:
    pid: int
    """Its first process."""
    limits: Limits
    user: int | None = None
    """Its number among the user ids for sessions; None for a fork, which has its parent's."""
    is_slot: bool = False
    """Each program in a slot has limits of its own."""
    pidfd: int | None = None
    """Of a session that another session forked: not our child, so its pid may be reused before we notice."""


class UsageMonitor:
    """Checks sessions against their limits; the fork server kills those it returns.

    A look at a session may fail, because the code in it has made that impossible: "unreadable", which ends
    that session and not the fork server.
    """

    def __init__(self, sessions: Mapping[int, SessionRecord], base_bytes: int) -> None:
        """`sessions`: the living sessions by number, read at each check."""
        self._sessions, self._base_bytes = sessions, base_bytes
        self._counters: dict[int, tuple[int, float]] = {}
        """Helper processes that count a session's memory, by pid: the session's number, and since when."""
        self._next_counts: dict[int, float] = {}
        """When a session's memory may be counted again."""
        self._idle_use: dict[int, tuple[float, float]] = {}
        """For each idle session: CPU time used, and how much of it is more than idling needs."""

    @property
    def counters(self) -> Collection[int]:
        """Pids of the helper processes that count memory."""
        return self._counters.keys()

    def check_totals(self, numbers: set[int]) -> list[Excess]:
        """Sessions whose processes together exceed a limit. A fork counts for itself."""
        others = self._first_pids()
        found: list[Excess] = []
        for number in numbers & self._sessions.keys():
            pid, limits = self._sessions[number].pid, self._sessions[number].limits
            most = (limits.memory_mb << 20) + self._base_bytes
            try:
                excess = suspected(pid, others, most, limits.processes)
            except Exception:  # noqa: BLE001 - whatever it is, the inspected session has caused it
                excess = "unreadable"
            if excess == "memory":
                self._start_count(number, pid, others, most)
            elif excess is not None:
                found.append((number, excess))
        return found

    def _start_count(self, number: int, pid: int, others: set[int], most: int) -> None:
        """Count memory exactly in a helper process: with dozens of large forks that takes seconds."""
        now = time.monotonic()
        is_counted = any(number == one for one, _ in self._counters.values())
        if is_counted or now < self._next_counts.get(number, 0.0):
            return
        try:
            helper = os.fork()
        except OSError:
            return  # the next check tries again
        if helper:
            self._counters[helper] = number, now
            return
        code = _UNREADABLE
        try:
            code = _EXCEEDED if uses_more(pid, others, most) else 0
        finally:
            os._exit(code)

    def counted(self, helper: int, status: int) -> list[Excess]:
        """The verdict of a helper that has ended with `status`."""
        number, since = self._counters.pop(helper)
        if number not in self._sessions:
            return []
        now = time.monotonic()
        self._next_counts[number] = now + _COUNT_REST * (now - since)
        verdict = _VERDICTS.get(os.waitstatus_to_exitcode(status))
        return [] if verdict is None else [(number, verdict)]

    def check_idle(self, numbers: set[int], seconds: float) -> list[Excess]:
        """Sessions (of `numbers`, which run nothing for the host) that keep a CPU busy all the same."""
        others = self._first_pids()
        found: list[Excess] = []
        for number in numbers:
            try:
                used = cpu_seconds(self._sessions[number].pid, others)
            except Exception:  # noqa: BLE001 - as above
                found.append((number, "unreadable"))
                continue
            before, undue = self._idle_use.get(number, (used, 0.0))
            # Not the share of a CPU that it keeps busy: among many that spin, each gets a small part of one.
            undue = max(0.0, undue + used - before - _IDLE_SHARE * seconds)
            self._idle_use[number] = (used, undue)
            if undue > self._sessions[number].limits.cpu_seconds:
                found.append((number, "cpu"))
        for number in self._idle_use.keys() - numbers:
            del self._idle_use[number]
        return found

    def _first_pids(self) -> set[int]:
        return {session.pid for session in self._sessions.values()}

    def forget(self, number: int) -> None:
        self._next_counts.pop(number, None)


def tree(pid: int, without: set[int] | None = None) -> list[int]:
    """`pid` and its descendants. The first process of a session adopts orphans, so nothing escapes."""
    found, place = [pid], 0
    while place < len(found):
        found += [child for child in children(found[place]) if not without or child not in without]
        place += 1
    return found


def suspected(pid: int, others: set[int], most_bytes: int, most_processes: int) -> str | None:
    """Which limit on the whole of a session may be exceeded: "memory", "processes", or None.

    Cheap, because it runs often for every session: too many processes are certain, but pages and sockets that
    several processes share are counted for each of them; `uses_more` divides them. `others` are the first
    processes of sessions, which count for themselves.
    """
    family = tree(pid, others)
    if sum(map(_threads, family)) > most_processes + 1:
        return "processes"
    descriptors = sum(map(_descriptors, family))
    buffers = descriptors * _SOCKET_BYTES if descriptors > _FEW_DESCRIPTORS else 0
    if len(family) == 1 and not buffers:
        return None  # RLIMIT_AS holds a single process
    return "memory" if sum(map(_resident, family)) + buffers > most_bytes else None


def uses_more(pid: int, others: set[int], most_bytes: int) -> bool:
    """Whether a session exceeds its memory limit. Slow: dozens of large forks take seconds."""
    family = tree(pid, others)
    buffers = _socket_bytes(family)
    if len(family) == 1 and not buffers:
        return False
    resident = [_resident(one) for one in family]
    total = sum(resident) + buffers
    for one, counted in zip(family, resident, strict=True):  # exactly, for as few processes as it takes
        if total <= most_bytes:
            return False
        total += _proportional(one) - counted
    return total > most_bytes


def cpu_seconds(pid: int, others: set[int]) -> float:
    """CPU time of a session's processes, including those that have ended and were reaped."""
    fields = [_stat(one) for one in tree(pid, others)]
    return sum(int(ticks) for one in fields for ticks in one[11:15]) / _TICKS


def kill_below(pid: int, keep: set[int]) -> None:
    """Kill what a stopped session started, except its forks (`keep`) and what those started.

    In rounds, because orphans are reparented to `pid`, and a process may fork while others die.
    """
    for _ in range(_ROUNDS):
        below = [one for one in tree(pid, keep)[1:] if not is_dead(one)]
        if not below:
            return
        for one in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)


def children(pid: int | str) -> list[int]:
    """The processes that `pid` or one of its threads has started, or adopted."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += [int(child) for child in _read(f"/proc/{pid}/task/{task}/children").split()]
    return found


def _socket_bytes(family: list[int]) -> int:
    """Kernel memory that a session's sockets may hold; 0 for a few of them.

    Only a control group counts what is in them, so each is charged with as much as can be sent into it.
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
            hidden += count  # not dumpable: charged for all its descriptors
        except OSError:
            continue  # it has ended
    return (len(sockets) + hidden) * _SOCKET_BYTES


def _descriptors(pid: int) -> int:
    """How many descriptors a process has open; many where the kernel is too old to say."""
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{pid}/fd").st_size or _FEW_DESCRIPTORS + 1
    return 0


def _threads(pid: int) -> int:
    """How many threads a process has, from the link count of its task folder."""
    with contextlib.suppress(OSError):
        return max(1, os.stat(f"/proc/{pid}/task").st_nlink - 2)
    return 1


def is_dead(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    return not (fields := _stat(pid)) or fields[0] in b"ZX"


def namespace_pids(pid: int) -> list[int]:
    """The pids of a process in all its pid namespaces, this process's first, its innermost last."""
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith(b"NSpid:"):
            return [int(number) for number in line.split()[1:]]
    return []


def _read(path: str) -> bytes:
    """A file under /proc; empty for a process that has ended."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read()
    return b""


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the state on; none where there is no such process."""
    return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()


def _resident(pid: int) -> int:
    fields = _read(f"/proc/{pid}/statm").split()
    return int(fields[1]) * _PAGE if fields else 0


def _proportional(pid: int) -> int:
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return _resident(pid)  # not dumpable: charged for all its pages
