"""Landlock: which files may be read and written, enforced by the kernel for an ordinary process."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ludus.sandbox.inside import kernel

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
_BASE = (1 << 13) - 1
_ABSTRACT_SOCKETS, _SIGNALS = 1, 2
_BIND_TCP, _CONNECT_TCP = 1, 2
_PATH_BENEATH = 1
_ASK_VERSION = 1

READ = _READ_FILE | _READ_DIR | _EXECUTE
DEVICE = _READ_FILE | _WRITE_FILE | _TRUNCATE | _IOCTL_DEV
_FOR_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV


def version() -> int:
    """The kernel's Landlock version; 0 where there is none."""
    try:
        return kernel.syscall(kernel.LANDLOCK_CREATE_RULESET, None, 0, _ASK_VERSION)
    except OSError:
        return 0


def keeps_signals(abi: int) -> bool:
    """Whether processes outside are safe from signals."""
    return abi >= 6


def ruleset(abi: int, rules: Iterable[tuple[str, int]], *, network: bool) -> int:
    """What `rules` (path, rights) allow and nothing else, as a descriptor; missing paths are skipped."""
    handled = _handled(abi)
    net = _BIND_TCP | _CONNECT_TCP if abi >= 4 and not network else 0
    scoped = _ABSTRACT_SOCKETS | _SIGNALS if abi >= 6 else 0
    attributes = b"".join(word.to_bytes(8, "little") for word in (handled, net, scoped))
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    made = kernel.syscall(kernel.LANDLOCK_CREATE_RULESET, attributes, size, 0)
    for path, rights in rules:
        _allow(made, path, rights & handled)
    return made


def enforce(ruleset: int) -> None:
    """Hold this process and all it will start to a ruleset, for good."""
    kernel.bare_syscall(kernel.LANDLOCK_RESTRICT_SELF, ruleset, 0)


def write_rights(abi: int) -> int:
    """Everything one does to files of one's own; making devices is not part of it."""
    return _handled(abi) & ~(_MAKE_CHAR | _MAKE_BLOCK)


def _handled(abi: int) -> int:
    rights = _BASE
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        rights |= right if abi >= since else 0
    return rights


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not os.path.isdir(path):
            rights &= _FOR_FILES
        rule = rights.to_bytes(8, "little") + fd.to_bytes(4, "little")
        kernel.syscall(kernel.LANDLOCK_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
    finally:
        os.close(fd)
