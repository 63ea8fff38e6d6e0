"""Confinement of a guest process before it runs model-written code: users, files, limits, system calls.

Two arrangements (the host picks one): *namespaces*, where each session has its own user, pid and
mount namespace; and *bare*, where Landlock, seccomp and resource limits alone hold a session.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ludus.sandbox.guest import filesystem, kernel, seccomp

if TYPE_CHECKING:
    from ludus.sandbox.config import Limits

NAMESPACES = kernel.CLONE_NEWUSER | kernel.CLONE_NEWPID | kernel.CLONE_NEWNS
"""The namespaces of each session."""
AGENT = 1000
"""The user id that code sees as its own inside its user namespace."""
CONTROL, RULESET = 3, 4
"""Descriptors of the control socket to the host, and of the Landlock ruleset that slots enforce per program."""
FORK_FACTOR = 16
"""The hard process limit of a session and all its forks, as a multiple of one session's limit."""
_SHARED_USER_FACTOR = 4
"""How many times its processes a session may briefly have where all sessions run as one user."""
_PENDING_SIGNALS = 256
"""The kernel counts pending signals and timers of all sessions of a user together, so each gets few."""
MEMORY_RESERVE = 32 << 20
"""Address space beyond the soft limit, for reporting a `MemoryError`."""


@dataclass(frozen=True)
class IsolationPlan:
    """Which layers are used, and which paths are visible. The host decides, from what the machine allows."""

    namespaces: bool
    landlock: int
    seccomp: bool
    network: bool
    shown: tuple[str, ...]
    folder: str
    """Without namespaces: where sessions have their folders."""
    uid: int | None
    """As root: the first of the user ids that sessions get."""
    users: int = 1
    """How many user ids there are for sessions, from 0 on; with only one, all sessions are that user."""
    base_bytes: int = 0
    """Address space of the fork server itself."""
    ruleset: int = -1
    """With namespaces: the Landlock ruleset of all sessions, built once."""


@dataclass
class SessionPaths:
    home: str
    state: str
    folder: str | None = None


def confine(
    plan: IsolationPlan, limits: Limits, name: str, user: int, *, one_shot: bool, is_slot: bool
) -> SessionPaths:
    """Give up, layer by layer, everything that model-written code must not have.

    The order matters: mounts need capabilities, Landlock and seccomp come after everything that they forbid.
    A slot's first process runs no such code and stays outside the Landlock domain: each of its programs enters
    a domain of its own.
    """
    # 1. User and files: in a user and mount namespace, or in a private folder.
    if plan.namespaces:
        map_user("self", user)
        if user:  # real, effective and saved ids alike
            os.setresgid(AGENT, AGENT, AGENT)
            os.setresuid(AGENT, AGENT, AGENT)
        filesystem.enter_box(limits.disk_mb, plan.shown)
        paths = SessionPaths(filesystem.HOME, filesystem.STATE)
    else:
        paths = _own_folder(plan, name, user)
    temporary = "/tmp" if plan.namespaces else f"{paths.folder}/tmp"
    os.environ.update(HOME=paths.home, PWD=paths.home, TMPDIR=temporary)
    os.setsid()
    # 2. Resource limits of each process (setrlimit).
    _set_limits(plan, limits, one_shot)
    # 3. Privileges: the user, all capabilities, set-uid programs (no_new_privs); die with the fork server.
    if not plan.namespaces and plan.uid is not None:
        kernel.bar_capabilities()
        os.setgroups([])
        own = plan.uid + user
        os.setresgid(own, own, own)
        os.setresuid(own, own, own)
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if not plan.namespaces:
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    # 4. File access (Landlock), then system calls (seccomp), which would forbid the steps before.
    if plan.landlock and not is_slot:
        ruleset = RULESET if plan.namespaces else file_rules(plan, paths)
        kernel.landlock_enforce(ruleset)
        os.close(ruleset)
    if plan.seccomp:
        # the one process that signals may go to, where nothing but the filter keeps them inside
        keeps_signals = plan.namespaces or kernel.landlock_scopes_signals(plan.landlock)
        seccomp.install(call_filter(plan, one_shot, None if keeps_signals else os.getpid()))
    reseed_numpy()
    return paths


def map_user(process: int | str, parent: int) -> None:
    """Make a process in a new user namespace the agent, who is user `parent` in the enclosing namespace."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{AGENT} {parent} 1"),
        ("gid_map", f"{AGENT} {parent} 1"),
    ):
        fd = os.open(f"/proc/{process}/{name}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)


def reseed_numpy() -> None:
    """Give numpy its own random state; Python's generator is reseeded by the fork itself."""
    numbers = sys.modules.get("numpy.random")
    if numbers is not None:
        numbers.seed()


def _own_folder(plan: IsolationPlan, name: str, user: int) -> SessionPaths:
    """Without namespaces: a folder for the session, beside which its forks will have theirs."""
    family = f"{plan.folder}/{name}-{os.getpid()}"
    home = f"{family}/0"
    for path in (family, home, f"{home}/home", f"{home}/tmp", f"{home}/state"):
        os.mkdir(path, 0o700)
        if plan.uid is not None:
            os.chown(path, plan.uid + user, plan.uid + user)
    os.chdir(f"{home}/home")
    return SessionPaths(f"{home}/home", f"{home}/state", home)


def _set_limits(plan: IsolationPlan, limits: Limits, one_shot: bool) -> None:
    mega = 1 << 20
    cpu = int(limits.cpu_seconds + 2) if one_shot else resource.RLIM_INFINITY
    wanted = {
        resource.RLIMIT_FSIZE: limits.file_mb * mega,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: cpu,
        resource.RLIMIT_MEMLOCK: mega,
        resource.RLIMIT_SIGPENDING: _PENDING_SIGNALS,
    }
    for kind, value in wanted.items():
        _, hard = resource.getrlimit(kind)
        if kind == resource.RLIMIT_NOFILE and hard != resource.RLIM_INFINITY:
            # RLIMIT_NOFILE also bounds the user's descriptors in flight (SCM_RIGHTS): one session must not be
            # able to take all that the host's own user may have.
            value = min(value, max(hard // 2, 16))
        if hard != resource.RLIM_INFINITY and (value == resource.RLIM_INFINITY or value > hard):
            value = hard
        resource.setrlimit(kind, (value, value))
    most = plan.base_bytes + limits.memory_mb * mega
    # the hard limit leaves room for reporting that the soft limit was reached
    resource.setrlimit(resource.RLIMIT_AS, _within((most, most + MEMORY_RESERVE), resource.RLIMIT_AS))
    most = limits.processes
    if _shares_user(plan):
        # The kernel counts all processes of the user, and a fork bomb in one session must not use up another's
        # share before it is killed. Here only the monitor (`watch`) holds each session to its own limit.
        most = _user_threads() + _SHARED_USER_FACTOR * limits.processes
    nproc = _within((most, most * FORK_FACTOR), resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, nproc)


def _within(limits: tuple[int, int], kind: int) -> tuple[int, int]:
    _, hard = resource.getrlimit(kind)
    return limits if hard == resource.RLIM_INFINITY else (min(limits[0], hard), min(limits[1], hard))


def _shares_user(plan: IsolationPlan) -> bool:
    return not plan.namespaces and plan.uid is None


def _user_threads() -> int:
    """Threads of this user, all of which the kernel counts against RLIMIT_NPROC."""
    own, count = os.getuid(), 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == own:
                    count += len(os.listdir(f"/proc/{name}/task"))
    return count


def file_rules(plan: IsolationPlan, paths: SessionPaths | None = None) -> int:
    """The Landlock ruleset of a session. With namespaces it is the same for all sessions."""
    writable, readable = [filesystem.ABOVE], ["/"]
    if paths is not None:
        # its forks need /proc too; environments and memory of other processes stay closed to it there
        writable, readable = [os.path.dirname(str(paths.folder))], [*plan.shown, "/proc"]
    everything = kernel.landlock_write_rights(plan.landlock)
    rules = [(path, kernel.LANDLOCK_READ) for path in readable]
    rules += [(path, everything) for path in writable]
    rules += [(f"/dev/{name}", kernel.LANDLOCK_DEVICE) for name in filesystem.DEVICES]
    return kernel.landlock_ruleset(plan.landlock, rules, network=plan.network)


@functools.cache
def call_filter(plan: IsolationPlan, one_shot: bool, own_pid: int | None = None) -> bytes:
    """The seccomp filter of a session. Mostly the same for all, and then built before the fork."""
    code = seccomp.program(
        network=plan.network,
        fork_flags=kernel.clone_flags(NAMESPACES) if plan.namespaces and not one_shot else 0,
        own_pid=own_pid,
        keep_modes=_shares_user(plan),
        sees_others=not plan.namespaces,
    )
    return seccomp.packed(code)
