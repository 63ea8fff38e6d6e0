"""The main loop of a session's guest process: confine itself, then serve the host's requests one at a time.

A request runs Python, a shell command or a program, reads or writes a file, or forks the session. A fork is
made by the session itself, since nothing else has its memory; its files are copied by the fork server, since
nothing in a session may mount. The fork is the first process of a pid namespace nested in its parent's; the
host sees to it that a process which has forks runs no code any more.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import socket
import stat
from typing import IO, TYPE_CHECKING, Any

from ludus.sandbox.guest import filesystem, frames, kernel, slot, watch
from ludus.sandbox.guest.confinement import (
    CONTROL,
    NAMESPACES,
    RULESET,
    IsolationPlan,
    SessionPaths,
    confine,
)
from ludus.sandbox.guest.interpreter import Interpreter, redirect, run_program, run_shell

if TYPE_CHECKING:
    from ludus.sandbox.config import Limits


def guest_main(
    control: int,
    plan: IsolationPlan,
    limits: Limits,
    name: str,
    user: int,
    *,
    one_shot: bool,
    is_slot: bool,
) -> None:
    """Everything from the fork to the end of the session; does not return.

    `name`: of its folder, without namespaces. `user`: its number among the user ids for sessions.
    """
    code = 1
    try:
        link = _only_link(control, plan.ruleset)
        paths = confine(plan, limits, name, user, one_shot=one_shot, is_slot=is_slot)
        if is_slot:
            slot.serve(link, bool(plan.landlock), limits.cpu_seconds)
        else:
            frames.send(link, {"state": "ready"})
            _serve(link, plan, limits, paths, one_shot)
        code = 0
    except (EOFError, BrokenPipeError, ConnectionResetError):
        code = 0  # the host has closed the session
    except MemoryError:
        code = frames.OUT_OF_MEMORY
    except BaseException as error:  # noqa: BLE001 - reported to the host
        with contextlib.suppress(BaseException):
            last = socket.socket(fileno=os.dup(CONTROL))  # in a fork this is another socket than `link`
            frames.send(last, {"broken": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(code)


def _only_link(control: int, ruleset: int) -> socket.socket:
    """Close all descriptors but the standard streams (null), the control socket, and the ruleset if any."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.dup2(control, CONTROL, inheritable=False)
    if ruleset >= 0:
        os.dup2(ruleset, RULESET, inheritable=False)
    os.closerange(CONTROL + 1 if ruleset < 0 else RULESET + 1, 1 << 20)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    return socket.socket(fileno=CONTROL)


def _serve(
    link: socket.socket,
    plan: IsolationPlan,
    limits: Limits,
    paths: SessionPaths,
    one_shot: bool,
) -> None:
    interpreter, orphans = Interpreter(), _Orphans()
    forks: set[int] = set()
    while True:
        header, body, fds = frames.receive(link)
        operation = header["op"]
        if operation == "fork":
            link = _fork(link, plan, paths, forks, fds)
        elif operation == "ended":
            frames.send(link, {"status": _fork_status(header["pid"], forks)})
        elif operation in ("write", "read"):
            frames.send(link, *_file(operation, header, body))
        else:
            undo = redirect(fds)
            outcome = _run_request(interpreter, operation, header, body, limits, paths)
            undo()
            frames.send(link, outcome)
            if one_shot:
                return
            orphans.after_python(forks) if operation == "python" else orphans.after_command(forks)


def _run_request(
    interpreter: Interpreter,
    operation: str,
    header: dict[str, Any],
    body: bytes,
    limits: Limits,
    paths: SessionPaths,
) -> dict[str, Any]:
    if operation == "python":
        interpreter.fresh_input()
        return interpreter.run(body.decode("utf-8", "surrogatepass"), limits.cpu_seconds)
    if operation == "shell":
        return run_shell(os.fsdecode(body), paths.state, header["wall"], limits.cpu_seconds)
    return run_program(header["argv"], header["wall"], limits.cpu_seconds)


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
            return {"done": "ok"}, file.read(min(header["most"], frames.MOST_BODY))
    except OSError as error:
        return {"done": "oserror", "errno": error.errno, "error": error.strerror}, b""
    except MemoryError:
        return {"done": "oserror", "errno": errno.ENOMEM, "error": "not enough memory"}, b""
    except (ValueError, RecursionError) as error:  # a NUL in the path; thousands of folders in it
        return {"done": "oserror", "errno": errno.EINVAL, "error": str(error)}, b""


def _regular(path: str, flags: int) -> IO[bytes]:
    """Open a regular file without blocking on a lease. Pipes, sockets and devices are refused: reading or
    writing them could block for ever."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    kind = os.fstat(fd).st_mode
    if not stat.S_ISREG(kind):
        os.close(fd)
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        raise OSError(errno.EINVAL, "not a regular file")
    return open(fd, "wb" if flags & os.O_WRONLY else "rb")


class _Orphans:
    """Reaps zombies: a session's first process inherits every orphan inside.

    What a shell command left behind is reaped as soon as it has ended. What ended under Python code may be a
    child that the code itself will wait for; it is kept until the end of the next execution.
    """

    def __init__(self) -> None:
        self._kept: set[int] = set()

    def after_python(self, forks: set[int]) -> None:
        """Reap those that had ended before this execution and that the code did not wait for."""
        ended = _children(ended=True) - forks
        _reap(ended & self._kept)
        self._kept = ended - self._kept

    def after_command(self, forks: set[int]) -> None:
        """Reap everything that a command left to us."""
        _reap(_children(ended=True) - forks - self._kept)


def _children(*, ended: bool) -> set[int]:
    """This process's children: the zombies (`ended`), or the living."""
    return {pid for pid in watch.children("self") if watch.is_dead(pid) is ended}


def _reap(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _fork_status(pid: int, forks: set[int]) -> int | None:
    """How a fork of this process ended, as `os.wait` gives it; None if it lives or is not a child."""
    if pid not in forks:
        return None
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        ended, status = pid, 0
    if not ended:
        return None
    forks.discard(pid)
    return status


def _fork(
    link: socket.socket, plan: IsolationPlan, paths: SessionPaths, forks: set[int], fds: list[int]
) -> socket.socket:
    """Fork on request. Returns the old link in the original, and the new one in the fork."""
    for pid in list(forks):
        _fork_status(pid, forks)  # those that have ended do not count as processes any more
    reason = _obstacle({CONTROL, *fds}, forks) if len(fds) == 1 else "it came without a socket"
    if reason is not None:
        frames.close_all(fds)
        frames.send(link, {"refused": reason})
        return link
    try:
        random_state = random.getstate()  # the fork continues the same sequence
        pid = kernel.fork_into(NAMESPACES) if plan.namespaces else os.fork()
        if pid == 0:
            random.setstate(random_state)
    except OSError as error:
        frames.close_all(fds)
        deep = error.errno in (errno.ENOSPC, errno.EUSERS)
        reason = "it has been forked as deep as the kernel allows" if deep else error.strerror
        frames.send(link, {"refused": str(reason)})
        return link
    if pid:
        frames.close_all(fds)
        forks.add(pid)
        # The pid alone: a pidfd would count among the user's descriptors in flight, which sessions may share.
        frames.send(link, {"forked": pid})
        return link
    forks.clear()
    return _resume(link, fds[0], plan, paths)


def _obstacle(ours: set[int], forks: set[int]) -> str | None:
    """Why the session cannot be forked: a resource that the fork would lose or share; None if it can.

    `ours` are the descriptors that are not the code's, `forks` the children that are forks themselves.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"{threads - 1} other thread(s) are running; a fork would not have them"
    children = _children(ended=False) - forks
    if children:
        return f"{len(children)} child process(es) are running; a fork would not have them"
    for fd in _open_files(ours):
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISCHR(mode)):
            return (
                f"descriptor {fd} is a pipe or a socket; both sessions would read and write the same one"
            )
        if stat.S_ISREG(mode) and os.fstat(fd).st_nlink == 0:
            return (
                f"descriptor {fd} is a deleted file; it has no name by which the fork could open its own"
            )
    return None


def _resume(
    link: socket.socket, control: int, plan: IsolationPlan, paths: SessionPaths
) -> socket.socket:
    """In the fork: wait for its files, then continue where the original stands."""
    working, old = os.getcwd(), paths.folder or filesystem.ABOVE
    link.close()
    os.dup2(control, CONTROL, inheritable=False)
    os.close(control)
    own_link = socket.socket(fileno=CONTROL)
    header, _, _ = frames.receive(own_link)  # the host says when the files are there
    if plan.namespaces:
        kernel.drop_capabilities()
    elif header["copy"]:
        working = _move_home(paths, working)
    os.chdir(working)
    if header["copy"]:
        _reopen_files(old, paths.folder or filesystem.ABOVE)
    frames.send(own_link, {"state": "ready"})
    return own_link


def _move_home(paths: SessionPaths, working: str) -> str:
    """Without namespaces: copy the folder beside the original; returns the new working directory."""
    assert paths.folder is not None
    old, new = paths.folder, f"{os.path.dirname(paths.folder)}/{os.getpid()}"
    os.mkdir(new, 0o700)
    filesystem.copy_tree(old, new)
    paths.folder, paths.home, paths.state = new, f"{new}/home", f"{new}/state"
    with contextlib.suppress(FileNotFoundError), open(f"{new}/state/shell", "rb+") as file:
        moved = file.read().replace(os.fsencode(old), os.fsencode(new))  # the shell's working directory
        file.seek(0)
        file.truncate()
        file.write(moved)
    os.environ.update(HOME=paths.home, PWD=paths.home, TMPDIR=f"{new}/tmp")
    return new + working[len(old) :] if working.startswith(old) else paths.home


def _reopen_files(old: str, new: str) -> None:
    """In the fork, once it has its own files: reopen them in place of the original's, at the same position.

    Files under `old` are now under `new`; in a mount namespace the two are the same path.
    """
    for fd in _open_files({CONTROL}):
        path = os.readlink(f"/proc/self/fd/{fd}")
        if not path.startswith(old + "/"):
            continue
        path = new + path[len(old) :]
        with open(f"/proc/self/fdinfo/{fd}") as file:
            info = dict(line.split(":", 1) for line in file.read().splitlines() if ":" in line)
        flags = int(info["flags"].strip(), 8) & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC)
        fresh = os.open(path, flags)
        if not stat.S_ISDIR(os.fstat(fresh).st_mode):
            os.lseek(fresh, int(info["pos"].strip()), os.SEEK_SET)
        os.dup2(fresh, fd, inheritable=not flags & os.O_CLOEXEC)
        os.close(fresh)


def _open_files(ours: set[int]) -> list[int]:
    fds = [int(name) for name in os.listdir("/proc/self/fd")]
    return [fd for fd in fds if fd > 2 and fd not in ours and _is_open(fd)]


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False  # the descriptor of the listing itself
    return True
