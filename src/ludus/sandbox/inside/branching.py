"""A second live session with the state of the first: memory by copy-on-write, files by copy.

The fork is made by the session itself, since nothing else has its memory; the files are copied by the warm
interpreter, since nothing in a session may mount. The forked process is the first of a pid namespace that lies
inside its parent's; the host sees to it that a process which has forks runs no code any more.
"""

from __future__ import annotations

import os
import random
import stat

from ludus.sandbox.inside import kernel, watch

NAMESPACES = kernel.CLONE_NEWUSER | kernel.CLONE_NEWPID | kernel.CLONE_NEWNS
AGENT = 1000


def obstacle(ours: set[int], own: set[int]) -> str | None:
    """What would be lost or shared by a fork, in words; None when nothing stands in the way.

    `ours` are the descriptors that are not the code's, `own` the children that are forks themselves.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"{threads - 1} other thread(s) are running; a fork would not have them"
    children = living_children() - own
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


def status_of(pid: int, forks: set[int]) -> int | None:
    """How a fork of ours ended, as `os.wait` gives it; None when it has not, or is not ours."""
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


def collect(forks: set[int]) -> None:
    """Forget the forks that have ended, so that they count as processes no more."""
    for pid in list(forks):
        status_of(pid, forks)


def living_children() -> set[int]:
    """The pids of this process's children that have not ended."""
    return {pid for pid in watch.children("self") if not watch.is_dead(pid)}


def ended_children() -> set[int]:
    """The pids of this process's children that have ended and that nobody has collected."""
    return {pid for pid in watch.children("self") if watch.is_dead(pid)}


def fork_session(namespaces: bool) -> int:
    """Fork this process: the pid, and 0 in the child, which keeps the random state too."""
    dice = random.getstate()
    pid = kernel.fork_into(NAMESPACES) if namespaces else os.fork()
    if pid == 0:
        random.setstate(dice)
    return pid


def map_user(process: int | str, parent: int) -> None:
    """Let a process in a new user namespace be the agent, who is user `parent` in the namespace around it."""
    _put(f"/proc/{process}/setgroups", "deny")
    _put(f"/proc/{process}/uid_map", f"{AGENT} {parent} 1")
    _put(f"/proc/{process}/gid_map", f"{AGENT} {parent} 1")


def _put(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def reopen_files(control: int, old: str, new: str) -> None:
    """In the fork, once it has its own files: open them in place of the original's, at the same position.

    What lay under `old` lies under `new`; where the fork has its own view of the files, they are the same.
    """
    for fd in _open_files({control}):
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
