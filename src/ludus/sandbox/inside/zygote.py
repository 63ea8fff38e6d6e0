"""The warm interpreter: imports once what sessions will need, then forks a session whenever the host asks.

Single-threaded, and it never waits for a session: it polls the host's socket and a pipe that the kernel's
SIGCHLD writes to. It is the first process of a pid namespace where there is one, so when it ends, however
it ends, the kernel ends every session with it. It ends when the host closes the socket.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import time
from typing import Any

from ludus.sandbox.inside import branching, filesystem, frames, kernel, landlock, watch
from ludus.sandbox.inside.life import Bounds, Plan, live

_ALWAYS = ("collections", "datetime", "functools", "itertools", "json", "math", "random", "re", "string")
_WATCH_SECONDS = 0.1


def main(link_fd: int) -> None:
    """The whole life of the warm interpreter, from the host's first frame on."""
    link = socket.socket(fileno=link_fd)
    try:
        order, _, _ = frames.receive(link)
        _preload(order["preload"])
        if order["namespaces"]:
            _enter_namespaces(link, order["network"], order["shown"])
        plan = _plan(order)
        gc.collect()
        gc.freeze()  # so that a collection in a session does not touch, and thereby copy, what is shared
        frames.send(link, {"event": "ready", "landlock": plan.landlock, "base": plan.base_bytes})
        Zygote(link, plan).serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except BaseException as error:  # noqa: BLE001 - the host decides what a worker that cannot start means
        with contextlib.suppress(OSError):
            frames.send(link, {"event": "broken", "error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    os._exit(0)


def _preload(names: list[str]) -> None:
    for name in (*_ALWAYS, *names):
        importlib.import_module(name)
    count = len(os.listdir("/proc/self/task"))
    if count > 1:
        raise RuntimeError(
            f"preloading {', '.join(names)} started {count - 1} thread(s); a fork cannot carry them along"
        )


def _enter_namespaces(link: socket.socket, network: bool, shown: list[str]) -> None:
    kinds = kernel.CLONE_NEWUSER | kernel.CLONE_NEWPID | kernel.CLONE_NEWNS
    kinds |= kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | (0 if network else kernel.CLONE_NEWNET)
    if os.getuid() == 0:
        with contextlib.suppress(PermissionError):
            os.setgroups([])
    kernel.unshare(kinds)
    frames.send(link, {"event": "unshared"})
    frames.receive(link)  # the host has written which users there are
    child = os.fork()
    if child:
        link.close()
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    kernel.prctl(
        kernel.PR_SET_DUMPABLE, 1
    )  # or the files under /proc of our own forks would be closed to them
    filesystem.build_root(shown)


def _plan(order: dict[str, Any]) -> Plan:
    if not order["namespaces"]:
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    return Plan(
        namespaces=order["namespaces"],
        landlock=landlock.version() if order["landlock"] else 0,
        seccomp=order["seccomp"],
        network=order["network"],
        shown=tuple(order["shown"]),
        folder=order["folder"],
        uid=order["uid"],
        base_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
    )


class Zygote:
    """Forks sessions, and tells the host how they end."""

    def __init__(self, link: socket.socket, plan: Plan) -> None:
        self._link = link
        self._plan = plan
        self._sessions: dict[int, int] = {}
        """Pid by the host's number of the session."""
        self._numbers: dict[int, int] = {}
        """And back."""
        self._grafts: dict[int, int] = {}
        """Number of the session whose files a helper process copies, by the helper's pid."""
        self._forks: dict[int, int] = {}
        """Number by pidfd of the sessions that another session forked: they are not our children."""
        self._poll = select.poll()
        self._watched: dict[int, tuple[int, int]] = {}
        """Most bytes and most processes of the sessions to look after, by number."""

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
        look = time.monotonic()
        while True:
            ready = {fd for fd, _ in self._poll.poll(_WATCH_SECONDS * 1000 if self._watched else None)}
            if woken.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    woken.recv(4096)
                self._collect()
            for pidfd in ready & self._forks.keys():
                self._fork_ended(pidfd)
            if self._link.fileno() in ready:
                self._obey()
            if self._watched and time.monotonic() - look > _WATCH_SECONDS:
                look = time.monotonic()
                self._look_after()

    def _obey(self) -> None:
        header, _, fds = frames.receive(self._link)
        number = header["id"]
        operation = header["op"]
        if operation == "spawn":
            self._spawn(number, fds[0], Bounds(**header["bounds"]), header["one_shot"])
        elif operation == "adopt":
            self._adopt(number, fds.pop(), header["disk_mb"])
        elif operation == "signal":
            self._signal(number, header["signal"])
        elif operation == "kill":
            self._kill(number)
        elif operation == "watch":
            self._watched[number] = (header["bytes"], header["processes"])
        elif operation == "unwatch":
            self._watched.pop(number, None)
        elif operation == "retire":
            self._retire(number)
        frames.close_all(fds)

    def _spawn(self, number: int, control: int, bounds: Bounds, one_shot: bool) -> None:
        try:
            if self._plan.namespaces:
                pid, pidfd = kernel.fork_into(branching.NAMESPACES)
            else:
                pid, pidfd = os.fork(), -1
        except OSError as error:
            self._tell({"event": "failed", "id": number, "error": f"fork: {error.strerror}"})
            return
        if pid == 0:
            live(control, self._plan, bounds, number, one_shot)
        if pidfd >= 0:
            os.close(pidfd)
        self._sessions[number], self._numbers[pid] = pid, number

    def _adopt(self, number: int, pidfd: int, disk_mb: int) -> None:
        """Look after a session that another one forked, and give it files of its own."""
        self._forks[pidfd] = number
        self._poll.register(pidfd, select.POLLIN)
        pid = _pid_of(pidfd)
        self._sessions[number], self._numbers[pid] = pid, number
        if not self._plan.namespaces:
            self._tell({"event": "adopted", "id": number, "good": True})  # it copies its folder itself
            return
        helper = os.fork()
        if helper:
            self._grafts[helper] = number
            return
        code = 1
        try:
            kernel.setns(pidfd, kernel.CLONE_NEWPID | kernel.CLONE_NEWNS)
            inner = (
                os.fork()
            )  # only a child is in the pid namespace, whose processes its /proc shall show
            if inner == 0:
                filesystem.graft_copy(disk_mb, self._plan.shown)
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
        finally:
            os._exit(code)

    def _fork_ended(self, pidfd: int) -> None:
        number = self._forks.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        pid = self._sessions.get(number)
        if pid is not None:
            self._ended(pid, None, 0.0, 0)

    def _signal(self, number: int, which: int) -> None:
        pid = self._sessions.get(number)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, which)

    def _kill(self, number: int) -> None:
        pid = self._sessions.get(number)
        if pid is None:
            return
        if not self._plan.namespaces:
            watch.kill_tree(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _retire(self, number: int) -> None:
        """A closed session whose forks live on: stop it, and end what else it started."""
        pid = self._sessions.get(number)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
            watch.kill_own(pid)

    def _collect(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._grafts:
                self._tell({"event": "adopted", "id": self._grafts.pop(pid), "good": status == 0})
            elif pid in self._numbers:
                self._ended(pid, status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss)

    def _ended(self, pid: int, status: int | None, cpu: float, peak_kb: int) -> None:
        number = self._numbers.pop(pid)
        del self._sessions[number]
        self._watched.pop(number, None)
        if not self._plan.namespaces:
            shutil.rmtree(f"{self._plan.folder}/{number}-{pid}", ignore_errors=True)
        self._tell({"event": "exit", "id": number, "status": status, "cpu": cpu, "peak_kb": peak_kb})

    def _look_after(self) -> None:
        for number, (most_bytes, most_processes) in list(self._watched.items()):
            pid = self._sessions.get(number)
            if pid is None:
                continue
            excess = watch.excess(pid, most_bytes + self._plan.base_bytes, most_processes)
            if excess is not None:
                self._tell({"event": "excess", "id": number, "what": excess})
                self._kill(number)

    def _tell(self, event: dict[str, Any]) -> None:
        frames.send(self._link, event)


def _pid_of(pidfd: int) -> int:
    """The pid behind a pidfd, as numbered here."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))
