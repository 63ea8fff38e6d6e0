"""One writer per run. The kernel holds the lock, so that it dies with the process that took it."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import weakref
from pathlib import Path

from ludus.core.failures import LudusError

_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


class FolderLock:
    """An exclusive lock on a folder, by a file in it that names the holder."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        return self._descriptor is not None

    def acquire(self) -> None:
        """Take the lock, or say who has it. A dead holder's lock is free."""
        if self._descriptor is not None:
            return
        descriptor = self._locked()
        while not _is_still(descriptor, self.file):  # its holder removed it after it was opened here
            os.close(descriptor)
            descriptor = self._locked()
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        self._descriptor = descriptor
        _held.add(self)

    def _locked(self) -> int:
        """The file, opened and locked."""
        descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 1000).decode("utf-8", errors="replace").strip()
            os.close(descriptor)
            raise LudusError(
                f"{self.file.parent} is being written by another run ({holder or 'unknown process'}); "
                "stop that one first, or choose another folder"
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def release(self) -> None:
        """Give the lock back. The file stays: removing it would race with the next holder."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            _held.discard(self)


def _is_still(descriptor: int, file: Path) -> bool:
    """Whether the file of that name is the one that was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _forget_in_child() -> None:
    """A forked worker must not keep the lock alive after its parent has died."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_forget_in_child)
