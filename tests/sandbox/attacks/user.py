"""Running something as an ordinary user, from root, with this very interpreter.

The interpreter may lie in a folder that other users cannot enter, such as root's home. So in a mount
namespace of its own, the folders in the way are covered by enterable ones that show only what is needed.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_NEWNS, _BIND, _REC, _PRIVATE = 0x20000, 4096, 16384, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


def exec_as(uid: int, argv: list[str], environment: dict[str, str]) -> None:
    """Become user `uid`, for good, and then `argv`. Root alone can."""
    _check(_libc.unshare(_NEWNS))
    _mount("none", "/", _REC | _PRIVATE)
    _open_ways(_needed())
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.execve(argv[0], argv, environment)


def _needed() -> list[Path]:
    """What this interpreter and these tests are made of."""
    paths = [sys.prefix, sys.base_prefix, sys.executable, os.path.realpath(sys.executable), *sys.path]
    found = [Path(path).absolute() for path in paths if path and Path(path).exists()]
    return list(dict.fromkeys(path.parent if path.is_file() else path for path in found))


def _open_ways(paths: list[Path]) -> None:
    hidden: dict[Path, list[Path]] = {}
    for path in paths:
        for folder in reversed(path.parents):
            if not folder.stat().st_mode & 0o001:
                hidden.setdefault(folder, []).append(path)
                break
    for folder, inside in hidden.items():
        opened = [(path, os.open(path, os.O_PATH)) for path in inside]
        _check(_libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"mode=755"))
        for path, fd in opened:
            if not path.exists():
                path.mkdir(parents=True)
                _mount(f"/proc/self/fd/{fd}", str(path), _BIND | _REC)
            os.close(fd)


def _mount(source: str, target: str, flags: int) -> None:
    _check(_libc.mount(source.encode(), target.encode(), None, ctypes.c_ulong(flags), None))


def _check(result: int) -> None:
    if result:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
