"""The fork server's start: imports once what sessions will need, enters its namespaces, then serves the host.

With namespaces it is pid 1 of a pid namespace, so when it ends, for whatever reason, the kernel kills every
session with it. It ends when the host closes the socket.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import resource
import signal
import socket
from dataclasses import replace
from typing import Any

from ludus.sandbox.guest import filesystem, frames, kernel, watch
from ludus.sandbox.guest.confinement import IsolationPlan, call_filter, file_rules
from ludus.sandbox.guest.fork_server import ForkServer

_ALWAYS = ("collections", "datetime", "functools", "itertools", "json", "math", "random", "re", "string")
_HIGH_FD = 64


def main(link_fd: int) -> None:
    """Everything from the host's first frame, which holds the settings, to the end; does not return."""
    link = socket.socket(fileno=link_fd)
    os.environ.pop("LD_BIND_NOW", None)  # not for sessions
    try:
        settings, _, _ = frames.receive(link)
        # Without namespaces a session's user may be unable to read this Python's modules, so they are loaded
        # now. With them, `subprocess` is loaded where it is needed: it imports `threading`, whose fork hook
        # would cost every fork 100 page faults.
        _preload([*settings["preload"], *(() if settings["namespaces"] else ("subprocess",))])
        if settings["namespaces"]:
            _enter_namespaces(
                link, settings["shown"], settings["resolver"], is_own_net=settings["own_net"]
            )
        else:
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
            _continue_as_child(link)
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        plan = _plan(settings)
        for one_shot in (True, False):
            call_filter(plan, one_shot)  # cached: sessions inherit it
        gc.collect()
        gc.freeze()  # a collection in a session must not touch, and thereby copy, shared pages
        frames.send(link, {"event": "ready", "landlock": plan.landlock, "base": plan.base_bytes})
        ForkServer(link, plan).serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the host has closed the socket: end
    except BaseException as error:  # noqa: BLE001 - reported to the host
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
            f"preloading {', '.join(names)} started {count - 1} thread(s), which a fork would not have"
        )


def _enter_namespaces(link: socket.socket, shown: list[str], resolver: str, *, is_own_net: bool) -> None:
    """Move to new user, pid, mount, ipc, uts and network namespaces, as root inside them.

    The kernel fixes the order: `unshare` makes the namespaces, only the host (outside) may write a uid map of
    several users, and `unshare(CLONE_NEWPID)` takes effect for children alone, so a child continues as pid 1.
    """
    kinds = kernel.CLONE_NEWUSER | kernel.CLONE_NEWPID | kernel.CLONE_NEWNS
    kinds |= kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | (kernel.CLONE_NEWNET if is_own_net else 0)
    has_root = _built_as_root(shown, resolver)
    # as root: each session has its own limit on pending signals, so there is none on all together
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_SIGPENDING, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    kernel.unshare(kinds)
    frames.send(link, {"event": "unshared"})
    frames.receive(link)  # the host has written the uid and gid maps
    _continue_as_child(link)
    with contextlib.suppress(
        PermissionError
    ):  # where only one user is mapped, groups cannot be given up
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # or our forks could not open their own files under /proc
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if not has_root:
        filesystem.build_root(shown, resolver)
    filesystem.mount_proc(for_code=False)


def _built_as_root(shown: list[str], resolver: str) -> bool:
    """As root, build the root while every folder is accessible: Python itself may lie in a closed one."""
    if os.getuid() != 0:
        return False
    try:
        os.setgroups([])
        kernel.unshare(kernel.CLONE_NEWNS)
    except PermissionError:
        return False  # root in a container without the capability
    filesystem.build_root(shown, resolver)
    return True


def _continue_as_child(link: socket.socket) -> None:
    """Fork, and continue in the child. The parent stays to kill and reap what the child leaves behind."""
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


def _plan(settings: dict[str, Any]) -> IsolationPlan:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    plan = IsolationPlan(
        namespaces=settings["namespaces"],
        landlock=kernel.landlock_version() if settings["landlock"] else 0,
        seccomp=settings["seccomp"],
        network=settings["network"],
        shown=tuple(settings["shown"]),
        folder=settings["folder"],
        uid=settings["uid"],
        users=_mapped_users() if settings["namespaces"] else settings["users"],
        base_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
    )
    if not plan.namespaces or not plan.landlock:
        return plan
    ruleset = file_rules(plan)
    # out of the way of the descriptors that `guest_main` arranges first
    high = fcntl.fcntl(ruleset, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD)
    os.close(ruleset)
    return replace(plan, ruleset=high)


def _mapped_users() -> int:
    """How many users the host has mapped into this user namespace."""
    with open("/proc/self/uid_map") as file:
        return sum(int(line.split()[2]) for line in file)
