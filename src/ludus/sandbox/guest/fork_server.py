"""The fork server (zygote): forks a session whenever the host asks, and holds sessions to their limits.

Single-threaded, and it never waits for a session: it polls the host's socket, a socket that SIGCHLD writes to
(wakeup fd), and a pidfd for each fork of a session.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from ludus.sandbox.guest import filesystem, frames, kernel, watch
from ludus.sandbox.guest.confinement import AGENT, FORK_FACTOR, NAMESPACES, IsolationPlan, map_user
from ludus.sandbox.guest.guest_main import guest_main

if TYPE_CHECKING:
    from ludus.sandbox.config import Limits

_OFTEN_SECONDS = 0.1
_SELDOM_SECONDS = 1.0
_MOST_REQUESTS = 64
"""Requests that are handled before limits are checked again."""
_REST = 9.0
"""After a check of limits, none for so many times as long as it took: the rest of the time is the host's."""


class ForkServer:
    """Forks sessions, holds them to their limits, and tells the host how they end.

    The host names sessions by numbers.
    """

    def __init__(self, link: socket.socket, plan: IsolationPlan) -> None:
        self._link = link
        self._plan = plan
        self._sessions: dict[int, watch.SessionRecord] = {}
        """Living sessions by number."""
        self._numbers: dict[int, int] = {}
        """Number of each session by the pid of its first process."""
        self._completions: dict[int, tuple[int, int]] = {}
        """Helper processes that complete a fork, by pid: its number, and the pipe for the helper's report."""
        self._removals: set[int] = set()
        """Helper processes that remove folders."""
        self._forks: dict[int, int] = {}
        """Number by pidfd of the sessions that another session forked: they are not our children."""
        self._taken: set[int | None] = set()
        """The users of living sessions."""
        self._last_user = int.from_bytes(os.urandom(4)) % max(plan.users - 1, 1)
        self._poll = select.poll()
        self._watched: set[int] = set()
        """Sessions to check often: those that have been running something for a while."""
        self._monitor = watch.UsageMonitor(self._sessions, plan.base_bytes)

    def serve(self) -> None:
        """Handle requests, reap processes and check limits, until the host closes the socket (`EOFError`)."""
        woken, waker = socket.socketpair()
        for end in (woken, waker):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the host
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        self._poll.register(self._link, select.POLLIN)
        self._poll.register(woken, select.POLLIN)
        checked = checked_all = time.monotonic()
        rest_until = 0.0
        while True:
            ready = {fd for fd, _ in self._poll.poll(self._poll_timeout())}
            if woken.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    woken.recv(4096)
                self._reap()
            for pidfd in ready & self._forks.keys():
                self._fork_ended(pidfd)
            if self._link.fileno() in ready:
                self._handle_waiting()
            now = time.monotonic()
            if now < rest_until or now - checked <= _OFTEN_SECONDS:
                continue
            checked = now
            if now - checked_all > _SELDOM_SECONDS:
                self._enforce(self._monitor.check_totals(set(self._sessions)))
                slots = {number for number, session in self._sessions.items() if session.is_slot}
                idle = self._sessions.keys() - self._watched - slots
                self._enforce(self._monitor.check_idle(idle, now - checked_all))
                checked_all = now
            else:
                self._enforce(self._monitor.check_totals(self._watched))
            done = time.monotonic()
            rest_until = done + _REST * (done - now)

    def _poll_timeout(self) -> float | None:
        """Milliseconds until the next check of limits; None without sessions."""
        if self._watched:
            return _OFTEN_SECONDS * 1000
        return _SELDOM_SECONDS * 1000 if self._sessions else None

    def _handle_waiting(self) -> None:
        """Handle all requests that have come: a check of busy sessions may take long, and one may kill them."""
        waiting = select.poll()
        waiting.register(self._link, select.POLLIN)
        for _ in range(_MOST_REQUESTS):
            self._handle()
            if not waiting.poll(0):
                return

    def _handle(self) -> None:
        header, _, fds = frames.receive(self._link)
        number = header["id"]
        operation = header["op"]
        if operation == "spawn":
            self._spawn(number, fds[0], header)
        elif operation == "adopt":
            self._adopt(number, header)
        elif operation == "widen":
            self._set_process_limit(number, header["wide"])
            self._tell({"event": "widened", "id": number})
        elif operation == "signal":
            self._signal(number, header["signal"])
        elif operation == "kill":
            self._kill(number)
        elif operation == "watch":
            self._watched.add(number)
        elif operation == "unwatch":
            self._watched.discard(number)
        frames.close_all(fds)

    def _spawn(self, number: int, control: int, header: dict[str, Any]) -> None:
        # the fields of the host's `Limits` on a plain object: the guest has no pydantic
        limits = cast("Limits", SimpleNamespace(**header["limits"]))
        is_slot = header["slot"]
        user = self._free_user()
        try:
            pid = self._forked(user)
        except OSError as error:
            self._tell({"event": "failed", "id": number, "error": f"fork: {error.strerror}"})
            return
        if pid == 0:
            guest_main(
                control,
                self._plan,
                limits,
                str(number),
                user,
                one_shot=header["one_shot"],
                is_slot=is_slot,
            )
        self._taken.add(user)
        self._sessions[number] = watch.SessionRecord(pid, limits, user, is_slot)
        self._numbers[pid] = number

    def _forked(self, user: int) -> int:
        """Fork as `user` of those for sessions; returns the pid, and 0 in the child."""
        if not self._plan.namespaces:
            return os.fork()
        if not user:
            return kernel.fork_into(NAMESPACES)
        # Without privileges a uid map may only hold the user who made the namespace (user_namespaces(7)). So
        # this process is that user for the moment of the clone; the saved id 0 lets it become root again.
        os.setresgid(user, user, 0)
        os.setresuid(user, user, 0)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # or its files under /proc would belong to root
        pid = -1
        try:
            pid = kernel.fork_into(NAMESPACES)
        finally:
            if pid:
                os.setresuid(0, 0, 0)
                os.setresgid(0, 0, 0)
                kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # reset by every change of user
        return pid

    def _free_user(self) -> int:
        """A user that no living session has, while there is one; 0 where there is only one user."""
        others = self._plan.users - 1
        for _ in range(min(others, len(self._taken) + 1)):
            self._last_user = self._last_user % others + 1
            if self._last_user not in self._taken:
                break
        return self._last_user if others else 0

    def _set_process_limit(self, number: int, wide: bool) -> None:
        """Set RLIMIT_NPROC for a session with its forks (`wide`), or for one session alone.

        A session that is about to be forked needs room for its forks' processes, which the kernel counts in the
        same user. It cannot raise the limit itself, or its code could as well.
        """
        session = self._sessions.get(number)
        if session is not None:
            with contextlib.suppress(OSError):
                _, hard = resource.prlimit(session.pid, resource.RLIMIT_NPROC)
                own = min(max(hard // FORK_FACTOR, session.limits.processes), hard)
                resource.prlimit(session.pid, resource.RLIMIT_NPROC, (hard if wide else own, hard))

    def _adopt(self, number: int, header: dict[str, Any]) -> None:
        """Take over a session that another one forked, and give it its own files.

        The pid is the forking session's claim, and that may be hostile: it must be a child of it.
        """
        parent, claimed = self._sessions.get(header["parent"]), header["pid"]
        found = None
        if parent is not None:
            try:
                found = self._fork_of(parent.pid, claimed)
            except Exception:  # noqa: BLE001 - whatever it is, the session's code has caused it
                self._enforce([(header["parent"], "unreadable")])
        if parent is None or found is None:
            self._tell({"event": "failed", "id": number, "error": "what it forked is not its child"})
            return
        pid, pidfd = found
        self._forks[pidfd] = number
        self._poll.register(pidfd, select.POLLIN)
        self._sessions[number] = watch.SessionRecord(pid, parent.limits, pidfd=pidfd)
        self._numbers[pid] = number
        self._set_process_limit(number, wide=False)
        if not self._plan.namespaces:
            self._tell({"event": "adopted", "id": number, "good": True})  # it copies its folder itself
            return
        report, reporter = os.pipe()
        try:
            helper = os.fork()
        except OSError as error:
            frames.close_all([report, reporter])
            self._tell(
                {"event": "adopted", "id": number, "good": False, "failed": f"fork: {error.strerror}"}
            )
            return
        if not helper:
            copy_mb = header["disk_mb"] if header["copy"] else None
            _complete_fork(pid, pidfd, parent.pid, copy_mb, self._plan.shown, reporter)
        os.close(reporter)
        self._completions[helper] = (number, report)

    def _fork_of(self, parent: int, claimed: int) -> tuple[int, int] | None:
        """Pid and pidfd of the child that has the pid `claimed` where `parent` lives, if it is a fork of it."""
        deeper = 1 if self._plan.namespaces else 0
        depth = len(watch.namespace_pids(parent)) + deeper
        for child in watch.children(parent):
            numbers = watch.namespace_pids(child)
            if child in self._numbers or len(numbers) != depth or numbers[-1 - deeper] != claimed:
                continue
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(child)
                if child in watch.children(parent):  # and its pid was not reused meanwhile
                    return child, pidfd
                os.close(pidfd)
        return None

    def _fork_ended(self, pidfd: int) -> None:
        session = self._sessions.get(self._forks.pop(pidfd))
        self._poll.unregister(pidfd)
        os.close(pidfd)
        if session is not None:
            session.pidfd = None
            self._ended(session.pid, None, 0.0, 0)

    def _signal(self, number: int, which: int) -> None:
        session = self._sessions.get(number)
        if session is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if session.pidfd is not None:
                signal.pidfd_send_signal(session.pidfd, which)
            else:
                os.kill(session.pid, which)  # our own child: its pid is not reused before it is reaped

    def _kill(self, number: int) -> None:
        session = self._sessions.get(number)
        if session is not None and not self._plan.namespaces:
            self._signal(number, signal.SIGSTOP)
            watch.kill_below(session.pid, keep=set(self._numbers))
        self._signal(number, signal.SIGKILL)

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._completions:
                number, report = self._completions.pop(pid)
                kind, _, problem = os.read(report, 500).decode(errors="replace").partition(":")
                os.close(report)
                good = status == 0 and not kind
                kind = kind or "failed"
                reason = {} if good else {kind: problem or f"its helper ended with status {status}"}
                self._tell({"event": "adopted", "id": number, "good": good, **reason})
            elif pid in self._removals:
                self._removals.discard(pid)
            elif pid in self._monitor.counters:
                self._enforce(self._monitor.counted(pid, status))
            elif pid in self._numbers:
                self._ended(pid, status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss)

    def _ended(self, pid: int, status: int | None, cpu: float, peak_kb: int) -> None:
        number = self._numbers.pop(pid)
        self._taken.discard(self._sessions.pop(number).user)
        self._watched.discard(number)
        self._monitor.forget(number)
        if not self._plan.namespaces:
            # what it left running was reparented to us (subreaper)
            helpers = {*self._completions, *self._removals, *self._monitor.counters}
            watch.kill_below(os.getpid(), keep={*self._numbers, *helpers})
            self._remove(f"{self._plan.folder}/{number}-{pid}")
        self._tell({"event": "exit", "id": number, "status": status, "cpu": cpu, "peak_kb": peak_kb})

    def _remove(self, folder: str) -> None:
        """Remove a session's folder in a helper process: hostile code may have made that slow."""
        if not os.path.isdir(folder):
            return
        helper = os.fork()
        if helper:
            self._removals.add(helper)
            return
        try:
            filesystem.remove_folder(folder)
        finally:
            os._exit(0)

    def _enforce(self, found: list[watch.Excess]) -> None:
        for number, what in found:
            self._tell({"event": "excess", "id": number, "what": what})
            self._kill(number)

    def _tell(self, event: dict[str, Any]) -> None:
        frames.send(self._link, event)


def _complete_fork(
    pid: int, pidfd: int, parent: int, copy_mb: int | None, shown: tuple[str, ...], reporter: int
) -> None:
    """In a helper process: enter a fork's namespaces and set up its user map and files; does not return.

    The fork itself could write its user map, but then Landlock would have to let it write under /proc.
    """
    code = 1
    try:
        kernel.setns(os.pidfd_open(parent), kernel.CLONE_NEWUSER)
        os.setresgid(AGENT, AGENT, AGENT)
        os.setresuid(AGENT, AGENT, AGENT)
        map_user(pid, AGENT)
        kernel.setns(pidfd, kernel.CLONE_NEWPID | kernel.CLONE_NEWNS)
        inner = os.fork()  # only a child enters the pid namespace that its /proc shows
        if inner:
            code = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
        else:
            filesystem.complete_fork(copy_mb, shown)
            code = 0
    except filesystem.CannotCopy as error:  # the session's code has made its files impossible to copy
        # a file's name may be any bytes
        os.write(reporter, f"refused:{error}".encode(errors="backslashreplace")[:500])
    except BaseException as error:  # noqa: BLE001 - reported to the host
        os.write(
            reporter, f"failed:{type(error).__name__}: {error}".encode(errors="backslashreplace")[:500]
        )
    finally:
        os._exit(code)
