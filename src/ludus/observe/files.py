"""Atomic writes, reads that never wait, and a lock that lets one process at a time write to a folder.

A write happens entirely or not at all, whenever the process is killed: it goes under a hidden name beside
its target, is synced to the disk, and renamed into place. A killed writer leaves only its hidden name
behind; readers do not look at hidden names, and the next writer into the same folder removes those whose
process is gone.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import stat
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ludus.core.failures import ConfigError, LudusError

_LEFTOVER = re.compile(r"\..*\.ludus-(?P<host>[^.]*)-(?P<pid>\d+)-[0-9a-f]{8}\.tmp", re.DOTALL)
_STALE_SECONDS = 24 * 3600
_active: set[str] = set()
"""The hidden names this process is writing to now. A name with our pid that is not among them is a dead
process's: in a container that restarts, pids come again."""


def atomic_write(path: str | Path, data: bytes | str) -> None:
    """Write a small file. In text, what UTF-8 cannot hold (lone surrogates) is written as `\\udc80`."""
    raw = data.encode("utf-8", errors="backslashreplace") if isinstance(data, str) else data
    with atomic_file(path) as temporary:
        temporary.write_bytes(raw)


def open_regular(path: str | Path) -> BinaryIO:
    """A file to read. What is no regular file is an `OSError`: a pipe would be waited at, for good."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "this is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: str | Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


@contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """A path to write a file to; it replaces `path` when the block ends, and vanishes when it raises."""
    with _temporary(Path(path)) as temporary:
        try:
            yield temporary
            _sync(temporary)
        except OSError as error:  # of a full disk, Python does not say where
            if error.errno is None or error.filename is not None:
                raise
            raise OSError(error.errno, error.strerror, str(path)) from error
        temporary.replace(path)
        _sync(Path(path).parent)


@contextmanager
def atomic_directory(path: str | Path) -> Iterator[Path]:
    """A new folder to fill; it appears as `path` when the block ends, and vanishes when it raises.

    A folder that is already there is refused: no rename replaces a full folder in one step.
    """
    target = Path(path)
    if os.path.lexists(target):
        raise FileExistsError(f"{target} is already there; remove it first, or choose another name")
    with _temporary(target) as temporary:
        temporary.mkdir()
        yield temporary
        _sync_tree(temporary)
        temporary.rename(target)
        _sync(target.parent)


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"no folder can be made at {path} ({error.strerror}); name another one as run.folder"
        ) from None


def numbered_folder(root: str | Path, name: str) -> Path:
    """Make the folder `<root>/<name>-001`, or the next number that is free."""
    make_folder(Path(root))
    stem = re.sub(r"[^\w.-]+", "-", name).strip("-.")[:80] or "run"
    taken = [re.fullmatch(re.escape(stem) + r"-(\d+)", entry.name) for entry in Path(root).iterdir()]
    number = 1 + max((int(match[1]) for match in taken if match), default=0)
    while True:
        path = Path(root) / f"{stem}-{number:03d}"
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path


def slug_of(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.")[-60:].strip("-.") or "model"


def remove_directory(path: Path) -> None:
    """Remove a folder atomically: readers see all of it or nothing."""
    with _temporary(path) as temporary:
        path.rename(temporary)


@contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """A hidden name beside `target`; whatever is still there under it at the end is removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    clean_leftovers(target.parent)
    owner = f"ludus-{_host()}-{os.getpid()}-{secrets.token_hex(4)}"
    # The name is cut: the whole must fit in the 255 bytes of a file name.
    temporary = target.with_name(f".{target.name[:40]}.{owner}.tmp")
    _active.add(temporary.name)
    try:
        yield temporary
    finally:
        remove(temporary)
        _active.discard(temporary.name)


def clean_leftovers(folder: Path) -> list[Path]:
    """Remove what killed writers have left in `folder`, and say what that was."""
    leftovers = [entry for entry in folder.iterdir() if _is_abandoned(entry)]
    for leftover in leftovers:
        remove(leftover)
    return leftovers


def is_hidden_write(name: str) -> bool:
    """Whether a file of this name is being written, or was left by a writer that was killed."""
    return _LEFTOVER.fullmatch(name) is not None


def _is_abandoned(entry: Path) -> bool:
    match = _LEFTOVER.fullmatch(entry.name)
    if match is None or entry.name in _active:
        return False
    if match["host"] != _host():
        # Another machine's processes cannot be asked, so its leftovers go by their age.
        try:
            return time.time() - entry.lstat().st_mtime > _STALE_SECONDS
        except FileNotFoundError:
            return False
    pid = int(match["pid"])
    return pid == os.getpid() or not _is_running(pid)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9]", "-", socket.gethostname())[:60]


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, or nothing where there is nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync_tree(folder: Path) -> None:
    """Sync every file below, then every folder, the innermost first."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            if (file := Path(parent, name)).is_file() and not file.is_symlink():
                _sync(file)
        _sync(Path(parent))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


class FolderLock:
    """An exclusive lock on a folder: `flock` on a file that names the holder. It ends with its process."""

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
