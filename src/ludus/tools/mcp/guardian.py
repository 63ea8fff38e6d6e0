"""The parent of a server process: it ends when the run does, and kills all of the server's processes.

A program of its own (`python -I -S guardian.py PARENT COMMAND...`). The command inherits standard input,
output and error. When its parent dies (the kernel sends `PR_SET_PDEATHSIG`), when it is sent SIGTERM, or when
the server exits, it kills every descendant, daemons too (it is their subreaper), and exits with the server's
status.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
CANNOT_RUN = 127
"""The status when the command could not be run at all; the reason is on standard error."""


def _prctl(option: int, value: int) -> None:
    words = [ctypes.c_ulong(word) for word in (value, 0, 0, 0)]
    ctypes.CDLL(None, use_errno=True).prctl(ctypes.c_int(option), *words)


def _children() -> list[int]:
    """Our children now: those of the server that lost their parents are among them."""
    own, found = str(os.getpid()), []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue  # it has just ended
        if fields[1].decode() == own and fields[0] != b"Z":
            found.append(int(entry.name))
    return found


def _kill_all() -> None:
    """Kill until no process is left. The children of a killed process become this one's."""
    while True:
        for pid in _children():
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _exec(command: list[str]) -> None:
    """In the child: become the server."""
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot run {command[0]!r}: {error.strerror}\n".encode())
    finally:
        os._exit(CANNOT_RUN)


def main(parent: int, command: list[str]) -> int:
    """Run the command until it ends, or until our parent does; returns the exit status."""
    signals = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 1  # it died before the kernel knew that we want to hear of it
    server = os.fork()
    if server == 0:
        _exec(command)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    status = 1
    while True:
        if signal.sigwait(signals) is not signal.SIGCHLD:
            break
        ended = None
        while ended != 0:
            try:
                ended, how = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if ended == server:
                status = os.waitstatus_to_exitcode(how)
                _kill_all()
                return status if status >= 0 else 128 - status
    _kill_all()
    return status


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
