"""SIGTERM and Ctrl-C while rank 0 waits for other ranks.

Python runs the handlers of signals in the main thread, between two of its instructions. A collective is one
instruction, and may last for `cluster.timeout` where another rank hangs. So a thread gets the signals as well
(`signal.set_wakeup_fd`), and passes them on to the event loop, which would get them otherwise. After a signal
the ranks have a while for each of their collectives, so that an update in progress comes to its end and is
saved. A collective that lasts longer is given up: the other ranks are killed, which ends it; and where even
that does not end it, as when what is connected is no rank, this process ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

_STOPS = frozenset({signal.SIGINT, signal.SIGTERM})
_POLL_SECONDS, _END_SECONDS = 0.5, 10.0


class StopWatch:
    """Ends calls that make no progress after a signal to stop."""

    def __init__(self, give_up: Callable[[], None], seconds: float = 30.0) -> None:
        """`give_up` kills the other ranks, after so many seconds without progress."""
        self._give_up, self._seconds = give_up, seconds
        self._closed = threading.Event()
        self.progress: Callable[[], object] = str
        """None while nothing is waited for; else something that changes with each collective."""
        self.told: signal.Signals | None = None
        """The signal, once there was one."""
        self._write = -1
        if threading.current_thread() is not threading.main_thread():
            return  # the main thread is free to handle signals then
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def _listen(self) -> None:
        while heard := os.read(self._read, 4096):
            if self._before >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._before, heard)
            stops = [number for number in heard if number in _STOPS]
            if stops and self.told is None:
                self.told = signal.Signals(stops[0])
                threading.Thread(target=self._watch, name="stopping", daemon=True).start()
        os.close(self._read)

    def _watch(self) -> None:
        last, since = self.progress(), time.monotonic()
        while last is None or time.monotonic() - since < self._seconds:
            if self._closed.wait(_POLL_SECONDS):
                return
            if (now := self.progress()) != last:
                last, since = now, time.monotonic()
        self._give_up()
        if self._closed.wait(_END_SECONDS) or self.progress() != last:
            return
        assert self.told is not None
        print(
            f"ludus: told to stop ({self.told.name}), and what is connected as another trainer rank neither "
            "answered nor ended: the run ends here, and can go on from its last checkpoint (--resume)",
            file=sys.stderr,
            flush=True,
        )
        os._exit(128 + self.told)

    def close(self) -> None:
        self._closed.set()
        if self._write < 0 or threading.current_thread() is not threading.main_thread():
            return
        current = signal.set_wakeup_fd(self._before)
        if current != self._write:  # another one has been set since
            signal.set_wakeup_fd(current)
        os.close(self._write)
        self._write = -1
