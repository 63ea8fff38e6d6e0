"""Writing in the background: a thread that does one write after another, while its caller goes on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class BackgroundWriter:
    """Does writes in the order in which they were given, in a thread of its own.

    At most `max_waiting` wait: a caller that is faster than the disk waits for it then. After the first error
    nothing more is written, and every further call raises it, so that it cannot be missed. One thread gives
    writes; the daemon thread that does them begins with the first and ends with `close`.
    """

    def __init__(self, max_waiting: int = 32) -> None:
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], object]] = deque()
        self._is_writing = False
        self._is_closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def submit(self, write: Callable[[], object]) -> None:
        """Have `write` called soon. Raises the error of an earlier one."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or len(self._waiting) < self._max_waiting)
            self._check()
            if self._is_closed:
                raise ValueError("this writer has been closed")
            self._waiting.append(write)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ludus-writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self) -> None:
        """Return when everything that was given is written. Raises the first error."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or not (self._waiting or self._is_writing))
            self._check()

    def close(self) -> None:
        """Flush, and end the thread. May be called twice; an error is raised each time."""
        try:
            self.flush()
        finally:
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()
            if self._thread is not None:
                self._thread.join()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting or self._error is not None:
                    return
                write = self._waiting.popleft()
                self._is_writing = True
            error: BaseException | None = None
            try:
                write()
            except BaseException as raised:  # noqa: BLE001 - raised where the caller is
                error = raised
            with self._changed:
                self._is_writing, self._error = False, error
                if error is not None:
                    self._waiting.clear()
                self._changed.notify_all()
            if error is not None:
                return
