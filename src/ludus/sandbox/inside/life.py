"""The life of a session: lock the doors, then do what the host asks for, one thing at a time, until it ends."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import resource
import signal
import socket
import stat
from dataclasses import dataclass
from typing import IO, Any

from ludus.sandbox.inside import branching, commands, filesystem, frames, kernel, landlock, seccomp, slot
from ludus.sandbox.inside.interpreter import OUT_OF_MEMORY, RESERVE, Interpreter, redirect
from ludus.sandbox.inside.orphans import Orphans

_CONTROL = slot.CONTROL
FAMILY = 16
"""How many times the processes of one session its whole family of forks may have."""
_CROWD = 4
"""How many times its processes a session may have for a moment, where all sessions are the same user."""
_SIGNALS = 256
"""Signals and timers that may wait; the kernel counts those of all sessions together against the worker's."""
_MOST_READ = frames.MOST_BODY


@dataclass(frozen=True)
class Plan:
    """Which layers hold, and what is to be seen. Decided by the host from what the machine allows."""

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
    """How many users there are for sessions, from 0 on; with one alone, all sessions are that user."""
    base_bytes: int = 0
    """Address space that the warm interpreter takes itself."""
    ruleset: int = -1
    """With namespaces: the Landlock ruleset of all sessions, made once."""


@dataclass(frozen=True)
class Bounds:
    """The limits of one session."""

    cpu_seconds: float
    memory_mb: int
    processes: int
    open_files: int
    file_mb: int
    disk_mb: int


@dataclass
class Places:
    """Where the session's own files are."""

    home: str
    state: str
    folder: str | None = None


def live(
    control: int,
    plan: Plan,
    bounds: Bounds,
    name: str,
    user: int,
    *,
    one_shot: bool,
    is_slot: bool,
) -> None:
    """Everything from the fork to the end of the session; does not return.

    `name`: of its folder, where it has one. `user`: who it is among the users for sessions.
    """
    code = 1
    try:
        link = _only_link(control, plan.ruleset)
        places = isolate(plan, bounds, name, user, one_shot=one_shot, is_slot=is_slot)
        if is_slot:
            slot.serve(link, bool(plan.landlock), bounds.cpu_seconds)
        else:
            frames.send(link, {"state": "ready"})
            _serve(link, plan, bounds, places, one_shot)
        code = 0
    except (EOFError, BrokenPipeError, ConnectionResetError):
        code = 0  # the host has closed the session
    except MemoryError:
        code = OUT_OF_MEMORY
    except BaseException as error:  # noqa: BLE001 - the last thing this process says
        with contextlib.suppress(BaseException):
            last = socket.socket(fileno=os.dup(_CONTROL))  # in a fork this is another socket than `link`
            frames.send(last, {"broken": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(code)


def isolate(
    plan: Plan, bounds: Bounds, name: str, user: int, *, one_shot: bool, is_slot: bool
) -> Places:
    """Give up, layer by layer, everything that model-written code must not have.

    No such code runs in a slot's first process, and it must stay out of the programs' Landlock domain: each of
    them enters one of its own.
    """
    if plan.namespaces:
        branching.map_user("self", user)
        if user:  # and nobody else in any respect
            os.setresgid(branching.AGENT, branching.AGENT, branching.AGENT)
            os.setresuid(branching.AGENT, branching.AGENT, branching.AGENT)
        filesystem.enter_box(bounds.disk_mb, plan.shown)
        places = Places(filesystem.HOME, filesystem.STATE)
    else:
        places = _own_folder(plan, name, user)
    os.environ.update(HOME=places.home, PWD=places.home, TMPDIR=_temporary(plan, places))
    os.setsid()
    _limit(plan, bounds, one_shot)
    if not plan.namespaces and plan.uid is not None:
        _become(plan.uid + user)
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if not plan.namespaces:
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    if plan.landlock and not is_slot:
        ruleset = slot.RULESET if plan.namespaces else file_rules(plan, places)
        landlock.enforce(ruleset)
        os.close(ruleset)
    if plan.seccomp:
        seccomp.install(call_filter(plan, one_shot, _own_pid(plan)))
    slot.new_dice()
    return places


def _become(user: int) -> None:
    """Where we are root and have no namespaces: a user that nobody else is."""
    kernel.bar_capabilities()
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _only_link(control: int, ruleset: int) -> socket.socket:
    """The control socket as the one descriptor left beside the standard streams, and the ruleset if any."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.dup2(control, _CONTROL, inheritable=False)
    if ruleset >= 0:
        os.dup2(ruleset, slot.RULESET, inheritable=False)
    os.closerange(_CONTROL + 1 if ruleset < 0 else slot.RULESET + 1, 1 << 20)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    return socket.socket(fileno=_CONTROL)


def _own_folder(plan: Plan, name: str, user: int) -> Places:
    """Without namespaces: a folder of its own, beside which its forks will have theirs."""
    family = f"{plan.folder}/{name}-{os.getpid()}"
    home = f"{family}/0"
    for path in (family, home, f"{home}/home", f"{home}/tmp", f"{home}/state"):
        os.mkdir(path, 0o700)
        if plan.uid is not None:
            os.chown(path, plan.uid + user, plan.uid + user)
    os.chdir(f"{home}/home")
    return Places(f"{home}/home", f"{home}/state", home)


def _temporary(plan: Plan, places: Places) -> str:
    return "/tmp" if plan.namespaces else f"{places.folder}/tmp"


def _limit(plan: Plan, bounds: Bounds, one_shot: bool) -> None:
    mega = 1 << 20
    cpu = int(bounds.cpu_seconds + 2) if one_shot else resource.RLIM_INFINITY
    limits = {
        resource.RLIMIT_FSIZE: bounds.file_mb * mega,
        resource.RLIMIT_NOFILE: bounds.open_files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: cpu,
        resource.RLIMIT_MEMLOCK: mega,
        resource.RLIMIT_SIGPENDING: _SIGNALS,
    }
    for kind, value in limits.items():
        _, hard = resource.getrlimit(kind)
        if kind == resource.RLIMIT_NOFILE and hard != resource.RLIM_INFINITY:
            # It bounds descriptors in flight too, of which our own user may have as many as we may open files:
            # what one session can take must leave us some.
            value = min(value, max(hard // 2, 16))
        if hard != resource.RLIM_INFINITY and (value == resource.RLIM_INFINITY or value > hard):
            value = hard
        resource.setrlimit(kind, (value, value))
    most = plan.base_bytes + bounds.memory_mb * mega
    # a little more than it may use, for saying that it has used it up
    resource.setrlimit(resource.RLIMIT_AS, _within((most, most + RESERVE), resource.RLIMIT_AS))
    most = bounds.processes
    if _shares_user(plan):
        # The kernel counts all that the user runs, and a fork bomb beside us must not take our share before it
        # is ended: here the watch alone holds each session to its own.
        most = _user_processes() + _CROWD * bounds.processes
    resource.setrlimit(resource.RLIMIT_NPROC, _within((most, most * FAMILY), resource.RLIMIT_NPROC))


def _within(limits: tuple[int, int], kind: int) -> tuple[int, int]:
    _, hard = resource.getrlimit(kind)
    return limits if hard == resource.RLIM_INFINITY else (min(limits[0], hard), min(limits[1], hard))


def _shares_user(plan: Plan) -> bool:
    return not plan.namespaces and plan.uid is None


def _user_processes() -> int:
    """Threads that this user has already, since the kernel counts them all against the limit."""
    own, count = os.getuid(), 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == own:
                    count += len(os.listdir(f"/proc/{name}/task"))
    return count


def file_rules(plan: Plan, places: Places | None = None) -> int:
    """The Landlock ruleset of a session. With namespaces all sessions see their files at the same place."""
    writable, readable = [filesystem.ABOVE], ["/"]
    if places is not None:
        # its forks need /proc too; environments and memory of others stay closed to it there
        writable, readable = [os.path.dirname(str(places.folder))], [*plan.shown, "/proc"]
    everything = landlock.write_rights(plan.landlock)
    rules = [(path, landlock.READ) for path in readable]
    rules += [(path, everything) for path in writable]
    rules += [
        (f"/dev/{name}", landlock.DEVICE) for name in ("null", "zero", "full", "random", "urandom")
    ]
    return landlock.ruleset(plan.landlock, rules, network=plan.network)


def _own_pid(plan: Plan) -> int | None:
    """The one process that signals may go to, where nothing but the filter keeps them inside."""
    keeps = plan.namespaces or landlock.keeps_signals(plan.landlock)
    return None if keeps else os.getpid()


@functools.cache
def call_filter(plan: Plan, one_shot: bool, own_pid: int | None = None) -> bytes:
    """The system calls that a session may make. Mostly the same for all, and then made before the fork."""
    code = seccomp.program(
        network=plan.network,
        branching=kernel.clone_flags(branching.NAMESPACES) if plan.namespaces and not one_shot else 0,
        own_pid=own_pid,
        keep_modes=_shares_user(plan),
        sees_others=not plan.namespaces,
    )
    return seccomp.packed(code)


def _serve(link: socket.socket, plan: Plan, bounds: Bounds, places: Places, one_shot: bool) -> None:
    interpreter, orphans = Interpreter(), Orphans()
    forks: set[int] = set()
    while True:
        header, body, fds = frames.receive(link)
        operation = header["op"]
        if operation == "fork":
            link = _branch(link, plan, places, forks, fds)
        elif operation == "ended":
            frames.send(link, {"status": branching.status_of(header["pid"], forks)})
        elif operation in ("write", "read"):
            frames.send(link, *_file(operation, header, body))
        else:
            undo = redirect(fds)
            outcome = _run(interpreter, operation, header, body, bounds, places)
            undo()
            frames.send(link, outcome)
            if one_shot:
                return
            orphans.after_python(forks) if operation == "python" else orphans.after_command(forks)


def _run(
    interpreter: Interpreter,
    operation: str,
    header: dict[str, Any],
    body: bytes,
    bounds: Bounds,
    places: Places,
) -> dict[str, Any]:
    if operation == "python":
        interpreter.fresh_input()
        return interpreter.run(body.decode("utf-8", "surrogatepass"), bounds.cpu_seconds)
    if operation == "shell":
        return commands.run_shell(os.fsdecode(body), places.state, header["wall"], bounds.cpu_seconds)
    return commands.run_program(header["argv"], header["wall"], bounds.cpu_seconds)


def _file(operation: str, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    path = header["path"]
    try:
        if operation == "write":
            folder = os.path.dirname(path)
            if folder:
                os.makedirs(folder, exist_ok=True)
            with _regular(path, os.O_WRONLY | os.O_CREAT) as file:
                file.truncate()
                file.write(body)
            return {"done": "ok"}, b""
        with _regular(path, os.O_RDONLY) as file:
            return {"done": "ok"}, file.read(min(header["most"], _MOST_READ))
    except OSError as error:
        return {"done": "oserror", "errno": error.errno, "error": error.strerror}, b""
    except MemoryError:
        return {"done": "oserror", "errno": errno.ENOMEM, "error": "not enough memory"}, b""
    except (ValueError, RecursionError) as error:  # a NUL in the path; thousands of folders in it
        return {"done": "oserror", "errno": errno.EINVAL, "error": str(error)}, b""


def _regular(path: str, flags: int) -> IO[bytes]:
    """A regular file, opened without waiting: not for the other end of a pipe, nor for a lease to end.

    Whatever else there is (pipes, sockets, devices) is refused: reading or writing it could wait for ever.
    """
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    kind = os.fstat(fd).st_mode
    if not stat.S_ISREG(kind):
        os.close(fd)
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        raise OSError(errno.EINVAL, "not a regular file")
    return open(fd, "wb" if flags & os.O_WRONLY else "rb")


def _branch(
    link: socket.socket, plan: Plan, places: Places, forks: set[int], fds: list[int]
) -> socket.socket:
    """Fork on request. Goes on with the old link in the original, and with the new one in the fork."""
    branching.collect(forks)
    reason = branching.obstacle({_CONTROL, *fds}, forks) if len(fds) == 1 else "it came without a socket"
    if reason is not None:
        frames.close_all(fds)
        frames.send(link, {"refused": reason})
        return link
    try:
        pid = branching.fork_session(plan.namespaces)
    except OSError as error:
        frames.close_all(fds)
        deep = error.errno in (errno.ENOSPC, errno.EUSERS)
        reason = "it has been forked as deep as the kernel allows" if deep else error.strerror
        frames.send(link, {"refused": str(reason)})
        return link
    if pid:
        frames.close_all(fds)
        forks.add(pid)
        # The number alone: a pidfd would count among the descriptors in flight of a user who may be others too.
        frames.send(link, {"forked": pid})
        return link
    forks.clear()
    return _awake(link, fds[0], plan, places)


def _awake(link: socket.socket, control: int, plan: Plan, places: Places) -> socket.socket:
    """As a fork: wait for our files, and go on where the original stands."""
    working, old = os.getcwd(), places.folder or filesystem.ABOVE
    link.close()
    os.dup2(control, _CONTROL, inheritable=False)
    os.close(control)
    twin = socket.socket(fileno=_CONTROL)
    header, _, _ = frames.receive(twin)  # the host says when the files are there
    if plan.namespaces:
        kernel.drop_capabilities()
    elif header["copy"]:
        working = _move_home(places, working)
    os.chdir(working)
    if header["copy"]:
        branching.reopen_files(_CONTROL, old, places.folder or filesystem.ABOVE)
    frames.send(twin, {"state": "ready"})
    return twin


def _move_home(places: Places, working: str) -> str:
    """Without namespaces: copy the folder beside the original, and say where the working directory went."""
    assert places.folder is not None
    old, new = places.folder, f"{os.path.dirname(places.folder)}/{os.getpid()}"
    os.mkdir(new, 0o700)
    filesystem.copy_folder(old, new)
    places.folder, places.home, places.state = new, f"{new}/home", f"{new}/state"
    with contextlib.suppress(FileNotFoundError), open(f"{new}/state/shell", "rb+") as file:
        moved = file.read().replace(os.fsencode(old), os.fsencode(new))  # where the shell stands
        file.seek(0)
        file.truncate()
        file.write(moved)
    os.environ.update(HOME=places.home, PWD=places.home, TMPDIR=f"{new}/tmp")
    return new + working[len(old) :] if working.startswith(old) else places.home
