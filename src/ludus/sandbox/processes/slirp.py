"""A network for sandboxed code that is not the machine's own, by slirp4netns."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import subprocess
from collections.abc import Callable

END_SECONDS = 5.0
"""Seconds that a process may take to end after it was asked to."""
RESOLVER = "nameserver 10.0.2.3\n"
"""slirp4netns's own name server, which asks the machine's."""
GATEWAY = "10.0.2.2"
"""The address of the machine's loopback, if slirp4netns did not disable it."""
_SLIRP_OPTIONS = ("--configure", "--mtu=65520", "--disable-host-loopback")
_HARDENING = ("--enable-sandbox", "--enable-seccomp")
"""Options that confine slirp4netns itself, which parses hostile traffic; older versions lack some."""


def slirp_program() -> str | None:
    """Path of slirp4netns; None where it is not installed."""
    return shutil.which("slirp4netns")


@functools.cache
def _hardening_options(path: str) -> tuple[str, ...]:
    """The options of `_HARDENING` that this version knows."""
    try:
        told = subprocess.run([path, "--help"], capture_output=True, timeout=END_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    said = (told.stdout + told.stderr).decode(errors="replace")
    return tuple(option for option in _HARDENING if option in said)


class Slirp:
    """A network for sandboxed code that is not the machine's own: slirp4netns, a TCP/IP stack in user space.

    It puts a device into the worker's network namespace and turns its traffic into ordinary connections of our
    user. So code reaches what this machine reaches, except its loopback addresses and abstract Unix sockets,
    where databases, notebooks and servers listen without a password. It ends when its end of a pipe is closed,
    also by the host's death.
    """

    def __init__(self, pid: int, on_ready: Callable[[str | None], None]) -> None:
        """For the namespaces of process `pid`; `on_ready` is called with why it does not work, or None."""
        self._on_ready = on_ready
        self._ready, ready = os.pipe2(os.O_CLOEXEC)
        ending, self._end = os.pipe2(os.O_CLOEXEC)
        path = slirp_program() or "slirp4netns"
        fds = ("--ready-fd", str(ready), "--exit-fd", str(ending))
        self._popen = subprocess.Popen(
            [path, *_SLIRP_OPTIONS, *_hardening_options(path), *fds, str(pid), "tap0"],
            pass_fds=(ready, ending),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for fd in (ready, ending):
            os.close(fd)
        asyncio.get_running_loop().add_reader(self._ready, self._on_word)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def close(self) -> None:
        """End it and wait until it is gone: up to seconds, so not on the event loop."""
        if self._end >= 0:
            os.close(self._end)
            self._end = -1
            wait_or_kill(self._popen)
            assert self._popen.stderr is not None
            self._popen.stderr.close()

    def _on_word(self) -> None:
        asyncio.get_running_loop().remove_reader(self._ready)
        works = bool(os.read(self._ready, 1))
        os.close(self._ready)
        if works:
            self._on_ready(None)
            return
        self._popen.kill()
        said = " ".join(self._popen.communicate()[1].decode(errors="replace").split())
        self._on_ready(f"slirp4netns: {said[-300:] or 'it ended without a message'}")


def wait_or_kill(popen: subprocess.Popen[bytes]) -> None:
    """Wait for a process that was asked to end; kill it if that takes too long."""
    try:
        popen.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait()
