"""The warm interpreter: imports once what sessions will need, then forks a session whenever the host asks.

Single-threaded, and it never waits for a session: it polls the host's socket and a pipe that the kernel's
SIGCHLD writes to. It is the first process of a pid namespace where there is one, so when it ends, however
it ends, the kernel ends every session with it. It ends when the host closes the socket.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from ludus.sandbox.inside import branching, filesystem, frames, kernel, landlock, watch
from ludus.sandbox.inside.life import FAMILY, Bounds, Plan, call_filter, file_rules, live

T = TypeVar("T")

_ALWAYS = ("collections", "datetime", "functools", "itertools", "json", "math", "random", "re", "string")
_HIGH = 64
_OFTEN_SECONDS = 0.1
_SELDOM_SECONDS = 1.0
_MOST_ORDERS = 64
"""Orders that are obeyed before sessions are looked after again."""
_REST = 9.0
"""After a look at sessions, none for so many times as long as it took: the rest of the time is the host's."""
_COUNT_REST = 2.0
"""The same for a count of a session's memory, which a process of its own makes."""
_QUIET = 0.05
"""The share of a processor that a session may use while nothing was asked to run."""
_EXCEEDED, _UNREADABLE = 3, 4
_VERDICTS = {_EXCEEDED: "memory", _UNREADABLE: "unreadable"}
"""What a helper's exit status says about a session; one that was killed says nothing."""


def main(link_fd: int) -> None:
    """The whole life of the warm interpreter, from the host's first frame on."""
    link = socket.socket(fileno=link_fd)
    os.environ.pop("LD_BIND_NOW", None)  # meant for us alone
    try:
        order, _, _ = frames.receive(link)
        # Without namespaces sessions may be users who cannot read this Python's own modules. With them, what
        # brings `threading` along is left to who needs it: its hook would cost every fork 100 page faults.
        _preload([*order["preload"], *(() if order["namespaces"] else ("subprocess",))])
        if order["namespaces"]:
            _enter_namespaces(link, order["shown"], order["resolver"], is_own_net=order["own_net"])
        else:
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
            _continue_as_child(link)
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        plan = _plan(order)
        for one_shot in (True, False):
            call_filter(plan, one_shot)  # kept: sessions find it made
        gc.collect()
        gc.freeze()  # so that a collection in a session does not touch, and thereby copy, what is shared
        frames.send(link, {"event": "ready", "landlock": plan.landlock, "base": plan.base_bytes})
        Zygote(link, plan).serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the host has closed the socket, which is how it says that we shall end
    except BaseException as error:  # noqa: BLE001 - the host decides what a worker that cannot start means
        with contextlib.suppress(OSError):
            frames.send(link, {"event": "broken", "error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    os._exit(0)


def _preload(names: list[str]) -> None:
    for name in (*_ALWAYS, *names):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ImportError(f"preload names {name!r}, which cannot be imported: {error}") from error
    count = len(os.listdir("/proc/self/task"))
    if count > 1:
        raise RuntimeError(
            f"preloading {', '.join(names)} started {count - 1} thread(s); a fork cannot carry them along"
        )


def _enter_namespaces(link: socket.socket, shown: list[str], resolver: str, *, is_own_net: bool) -> None:
    kinds = kernel.CLONE_NEWUSER | kernel.CLONE_NEWPID | kernel.CLONE_NEWNS
    kinds |= kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | (kernel.CLONE_NEWNET if is_own_net else 0)
    has_root = _built_as_root(shown, resolver)
    with contextlib.suppress(
        OSError, ValueError
    ):  # as root: sessions are bounded each, not all together
        resource.setrlimit(resource.RLIMIT_SIGPENDING, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    kernel.unshare(kinds)
    frames.send(link, {"event": "unshared"})
    frames.receive(link)  # the host has written which users there are
    _continue_as_child(link)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    kernel.prctl(
        kernel.PR_SET_DUMPABLE, 1
    )  # or files under /proc of our own forks would be closed to them
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if not has_root:
        filesystem.build_root(shown, resolver)
    filesystem.mount_proc(for_code=False)


def _built_as_root(shown: list[str], resolver: str) -> bool:
    """As root, show the folders while we may still enter them all: Python itself may lie in a closed one."""
    if os.getuid() != 0:
        return False
    try:
        os.setgroups([])
        kernel.unshare(kernel.CLONE_NEWNS)
    except PermissionError:
        return False  # root in a container: what else it may not do will show
    filesystem.build_root(shown, resolver)
    return True


def _continue_as_child(link: socket.socket) -> None:
    """Fork, and go on in the child. The parent stays to end whatever the child leaves behind."""
    child = os.fork()
    if not child:
        return
    link.close()
    status = 0
    while True:
        try:
            pid, ended = os.waitpid(-1, 0)
        except ChildProcessError:
            break
        if pid == child:
            status = ended
            watch.kill_below(os.getpid(), keep=set())
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _plan(order: dict[str, Any]) -> Plan:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    plan = Plan(
        namespaces=order["namespaces"],
        landlock=landlock.version() if order["landlock"] else 0,
        seccomp=order["seccomp"],
        network=order["network"],
        shown=tuple(order["shown"]),
        folder=order["folder"],
        uid=order["uid"],
        users=_users() if order["namespaces"] else order["users"],
        base_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
    )
    if not plan.namespaces or not plan.landlock:
        return plan
    ruleset = file_rules(plan)
    # out of the way of the descriptors that a session arranges first
    high = fcntl.fcntl(ruleset, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    os.close(ruleset)
    return replace(plan, ruleset=high)


def _users() -> int:
    """How many users the host has given to our namespace."""
    with open("/proc/self/uid_map") as file:
        return int(file.read().split()[2])


class Zygote:
    """Forks sessions, and tells the host how they end."""

    def __init__(self, link: socket.socket, plan: Plan) -> None:
        self._link = link
        self._plan = plan
        self._sessions: dict[int, int] = {}
        """Pid by the host's number of the session."""
        self._numbers: dict[int, int] = {}
        """And back."""
        self._grafts: dict[int, tuple[int, int]] = {}
        """Number of the session that a helper process completes, and what the helper says, by its pid."""
        self._removals: set[int] = set()
        """Helper processes that remove folders."""
        self._counts: dict[int, tuple[int, float]] = {}
        """Helper processes that count a session's memory: its number, and since when."""
        self._next_counts: dict[int, float] = {}
        """When the memory of a session may be counted again, by number."""
        self._forks: dict[int, int] = {}
        """Number by pidfd of the sessions that another session forked: they are not our children."""
        self._pidfds: dict[int, int] = {}
        """And back: they are signalled by descriptor, because their pid may be another's by now."""
        self._users: dict[int, int] = {}
        """Which of the users for sessions a session is, by number; its forks are that user too."""
        self._taken: set[int] = set()
        """The users that living sessions are."""
        self._last_user = int.from_bytes(os.urandom(4)) % max(plan.users - 1, 1)
        self._poll = select.poll()
        self._bounds: dict[int, Bounds] = {}
        """The limits of each session, by number."""
        self._idle_use: dict[int, tuple[float, float]] = {}
        """Of sessions that should be idle: processor time used, and how much of it a quiet one would not."""
        self._slots: set[int] = set()
        """Sessions that run one program after the other, each under its own limits."""
        self._watched: set[int] = set()
        """Sessions to look after often: those that have been running something for a while."""

    def serve(self) -> None:
        """Until the host closes the socket."""
        woken, waker = socket.socketpair()
        for end in (woken, waker):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the host's business
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        self._poll.register(self._link, select.POLLIN)
        self._poll.register(woken, select.POLLIN)
        soon = later = time.monotonic()
        rested = 0.0
        while True:
            ready = {fd for fd, _ in self._poll.poll(self._patience())}
            if woken.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    woken.recv(4096)
                self._collect()
            for pidfd in ready & self._forks.keys():
                self._fork_ended(pidfd)
            if self._link.fileno() in ready:
                self._obey_waiting()
            now = time.monotonic()
            if now < rested or now - soon <= _OFTEN_SECONDS:
                continue
            soon = now
            if now - later > _SELDOM_SECONDS:
                self._look_after(set(self._sessions))
                self._look_for_restless(now - later)
                later = now
            else:
                self._look_after(self._watched)
            done = time.monotonic()
            rested = done + _REST * (done - now)

    def _patience(self) -> float | None:
        """Milliseconds until somebody must be looked after; for ever where there is nobody."""
        if self._watched:
            return _OFTEN_SECONDS * 1000
        return _SELDOM_SECONDS * 1000 if self._sessions else None

    def _obey_waiting(self) -> None:
        """All orders that have come: a look at busy sessions may take long, and one may order their end."""
        waiting = select.poll()
        waiting.register(self._link, select.POLLIN)
        for _ in range(_MOST_ORDERS):
            self._obey()
            if not waiting.poll(0):
                return

    def _obey(self) -> None:
        header, _, fds = frames.receive(self._link)
        number = header["id"]
        operation = header["op"]
        if operation == "spawn":
            self._spawn(number, fds[0], header)
        elif operation == "adopt":
            self._adopt(number, header)
        elif operation == "widen":
            self._widen(number, header["wide"])
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
        bounds, is_slot = Bounds(**header["bounds"]), header["slot"]
        user = self._free_user()
        try:
            pid = self._forked(user)
        except OSError as error:
            self._tell({"event": "failed", "id": number, "error": f"fork: {error.strerror}"})
            return
        if pid == 0:
            live(
                control,
                self._plan,
                bounds,
                str(number),
                user,
                one_shot=header["one_shot"],
                is_slot=is_slot,
            )
        self._users[number] = user
        self._taken.add(user)
        self._sessions[number], self._numbers[pid] = pid, number
        self._bounds[number] = bounds
        if is_slot:
            self._slots.add(number)

    def _forked(self, user: int) -> int:
        """Fork, as `user` of those for sessions; the pid, and 0 in the child."""
        if not self._plan.namespaces:
            return os.fork()
        if not user:
            return kernel.fork_into(branching.NAMESPACES)
        # Who makes a user namespace may say that he is somebody in it; so we are that user for a moment.
        os.setresgid(user, user, 0)
        os.setresuid(user, user, 0)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # or its files under /proc would not be its own
        pid = -1
        try:
            pid = kernel.fork_into(branching.NAMESPACES)
        finally:
            if pid:
                os.setresuid(0, 0, 0)
                os.setresgid(0, 0, 0)
                kernel.prctl(
                    kernel.PR_SET_PDEATHSIG, signal.SIGKILL
                )  # forgotten at every change of user
        return pid

    def _free_user(self) -> int:
        """A user that no living session is, as long as there is one; 0 where there is one user alone."""
        others = self._plan.users - 1
        for _ in range(min(others, len(self._taken) + 1)):
            self._last_user = self._last_user % others + 1
            if self._last_user not in self._taken:
                break
        return self._last_user if others else 0

    def _widen(self, number: int, wide: bool) -> None:
        """Let a session that is about to be forked have its forks' processes too: they count in its user.

        It cannot do so itself, or its code could as well. Its forks are held to one session's share again.
        """
        if number in self._sessions:
            with contextlib.suppress(OSError):
                pid = self._sessions[number]
                _, family = resource.prlimit(pid, resource.RLIMIT_NPROC)
                own = min(max(family // FAMILY, self._bounds[number].processes), family)
                resource.prlimit(pid, resource.RLIMIT_NPROC, (family if wide else own, family))

    def _adopt(self, number: int, header: dict[str, Any]) -> None:
        """Look after a session that another one forked, and give it files of its own.

        Its pid comes from the session, which may be hostile: it must be that of its child.
        """
        parent, claimed = self._sessions.get(header["parent"]), header["pid"]
        found = None
        if parent is not None:
            stem = parent
            found = self._seen(header["parent"], lambda: self._fork_of(stem, claimed))
        if parent is None or found is None:
            self._tell({"event": "failed", "id": number, "error": "what it forked is not its child"})
            return
        pid, pidfd = found
        self._forks[pidfd], self._pidfds[number] = number, pidfd
        self._poll.register(pidfd, select.POLLIN)
        self._sessions[number], self._numbers[pid] = pid, number
        self._bounds[number] = self._bounds[header["parent"]]
        self._widen(number, False)
        if not self._plan.namespaces:
            self._tell({"event": "adopted", "id": number, "good": True})  # it copies its folder itself
            return
        said, says = os.pipe()
        try:
            helper = os.fork()
        except OSError as error:
            frames.close_all([said, says])
            self._tell(
                {"event": "adopted", "id": number, "good": False, "ours": f"fork: {error.strerror}"}
            )
            return
        if not helper:
            copy_mb = header["disk_mb"] if header["copy"] else None
            _graft(pid, pidfd, parent, copy_mb, self._plan.shown, says)
        os.close(says)
        self._grafts[helper] = (number, said)

    def _fork_of(self, parent: int, claimed: int) -> tuple[int, int] | None:
        """Pid and pidfd of the child that `parent` calls `claimed`, if it is a fork of the right kind."""
        deeper = 1 if self._plan.namespaces else 0
        depth = len(watch.namespace_pids(parent)) + deeper
        for child in watch.children(parent):
            numbers = watch.namespace_pids(child)
            if child in self._numbers or len(numbers) != depth or numbers[-1 - deeper] != claimed:
                continue
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(child)
                if child in watch.children(parent):  # and not another that has its number by now
                    return child, pidfd
                os.close(pidfd)
        return None

    def _fork_ended(self, pidfd: int) -> None:
        number = self._forks.pop(pidfd)
        del self._pidfds[number]
        self._poll.unregister(pidfd)
        os.close(pidfd)
        pid = self._sessions.get(number)
        if pid is not None:
            self._ended(pid, None, 0.0, 0)

    def _signal(self, number: int, which: int) -> None:
        pid = self._sessions.get(number)
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if number in self._pidfds:
                signal.pidfd_send_signal(self._pidfds[number], which)
            else:
                os.kill(pid, which)  # our own child: the pid is its own until we have collected it

    def _kill(self, number: int) -> None:
        pid = self._sessions.get(number)
        if pid is not None and not self._plan.namespaces:
            self._signal(number, signal.SIGSTOP)
            watch.kill_below(pid, keep=set(self._numbers))
        self._signal(number, signal.SIGKILL)

    def _collect(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._grafts:
                number, said = self._grafts.pop(pid)
                whose, _, problem = os.read(said, 500).decode(errors="replace").partition(":")
                os.close(said)
                good = status == 0 and not whose
                whose = whose or "ours"
                told = {} if good else {whose: problem or f"its helper ended with status {status}"}
                self._tell({"event": "adopted", "id": number, "good": good, **told})
            elif pid in self._removals:
                self._removals.discard(pid)
            elif pid in self._counts:
                self._counted(*self._counts.pop(pid), status)
            elif pid in self._numbers:
                self._ended(pid, status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss)

    def _ended(self, pid: int, status: int | None, cpu: float, peak_kb: int) -> None:
        number = self._numbers.pop(pid)
        del self._sessions[number], self._bounds[number]
        self._taken.discard(self._users.pop(number, 0))
        self._watched.discard(number)
        self._slots.discard(number)
        self._next_counts.pop(number, None)
        if not self._plan.namespaces:
            # what it had started and left is ours now, as we adopt orphans
            watch.kill_below(os.getpid(), keep={*self._numbers, *self._helpers()})
            self._remove(f"{self._plan.folder}/{number}-{pid}")
        self._tell({"event": "exit", "id": number, "status": status, "cpu": cpu, "peak_kb": peak_kb})

    def _remove(self, folder: str) -> None:
        """Remove a session's folder in a process of its own: hostile code may have made that long work."""
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

    def _helpers(self) -> set[int]:
        return {*self._grafts, *self._removals, *self._counts}

    def _seen(self, number: int, look: Callable[[], T]) -> T | None:
        """What a look at a session shows. One that its code has made impossible ends the session, not us."""
        try:
            return look()
        except Exception:  # noqa: BLE001 - whatever it is, it comes from what is looked at
            self._end(number, "unreadable")
            return None

    def _end(self, number: int, what: str) -> None:
        """End a session for what it does."""
        self._tell({"event": "excess", "id": number, "what": what})
        self._kill(number)

    def _look_after(self, numbers: set[int]) -> None:
        """Hold all processes of a session together to its limits; a stem's branches count for themselves."""
        others = set(self._numbers)
        for number in numbers & self._sessions.keys():
            pid, bounds = self._sessions[number], self._bounds[number]
            most = (bounds.memory_mb << 20) + self._plan.base_bytes
            look = functools.partial(watch.suspected, pid, others, most, bounds.processes)
            match self._seen(number, look):
                case "memory":
                    self._count(number, pid, others, most)
                case str(excess):
                    self._end(number, excess)

    def _count(self, number: int, pid: int, others: set[int], most: int) -> None:
        """Count a session's memory in a process of its own: dozens of large forks are long work."""
        now = time.monotonic()
        is_counted = any(number == one for one, _ in self._counts.values())
        if is_counted or now < self._next_counts.get(number, 0.0):
            return
        try:
            helper = os.fork()
        except OSError:
            return  # the next look tries again
        if helper:
            self._counts[helper] = number, now
            return
        code = _UNREADABLE
        try:
            code = _EXCEEDED if watch.uses_more(pid, others, most) else 0
        finally:
            os._exit(code)

    def _counted(self, number: int, since: float, status: int) -> None:
        if number not in self._sessions:
            return
        now = time.monotonic()
        self._next_counts[number] = now + _COUNT_REST * (now - since)
        code = os.waitstatus_to_exitcode(status)
        if code in _VERDICTS:
            self._end(number, _VERDICTS[code])

    def _look_for_restless(self, seconds: float) -> None:
        """End sessions in which nothing was asked to run, and which keep a processor busy all the same."""
        others = set(self._numbers)
        for number in self._sessions.keys() - self._watched - self._slots:
            look = functools.partial(watch.cpu_seconds, self._sessions[number], others)
            used = self._seen(number, look)
            if used is None:
                continue
            before, undue = self._idle_use.get(number, (used, 0.0))
            # Not how much of a processor it keeps busy: among many that spin, each gets a small part of one.
            undue = max(0.0, undue + used - before - _QUIET * seconds)
            self._idle_use[number] = (used, undue)
            if undue > self._bounds[number].cpu_seconds:
                self._end(number, "cpu")
        for number in self._idle_use.keys() - (self._sessions.keys() - self._watched):
            del self._idle_use[number]

    def _tell(self, event: dict[str, Any]) -> None:
        frames.send(self._link, event)


def _graft(
    pid: int, pidfd: int, stem: int, copy_mb: int | None, shown: tuple[str, ...], says: int
) -> None:
    """In a process of its own: enter a fork's namespaces and complete it; does not return.

    The fork itself could write its user map, but then Landlock would have to let it write under /proc.
    """
    code = 1
    try:
        kernel.setns(os.pidfd_open(stem), kernel.CLONE_NEWUSER)
        os.setresgid(branching.AGENT, branching.AGENT, branching.AGENT)
        os.setresuid(branching.AGENT, branching.AGENT, branching.AGENT)
        branching.map_user(pid, branching.AGENT)
        kernel.setns(pidfd, kernel.CLONE_NEWPID | kernel.CLONE_NEWNS)
        inner = os.fork()  # only a child is in the pid namespace, whose processes its /proc shall show
        if inner:
            code = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
        else:
            filesystem.graft(copy_mb, shown)
            code = 0
    except filesystem.CannotCopy as error:  # what the session's code has made is not to be copied
        # a file's name may be any bytes
        os.write(says, f"refused:{error}".encode(errors="backslashreplace")[:500])
    except BaseException as error:  # noqa: BLE001 - told to whoever asked for the fork
        os.write(says, f"ours:{type(error).__name__}: {error}".encode(errors="backslashreplace")[:500])
    finally:
        os._exit(code)
