"""System calls that Python does not wrap, and Landlock. Wrappers raise `OSError` with the kernel's reason.

This module imports little, because every session inherits what the fork server has loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_NOATIME = 2, 4, 8, 1024
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_TID_FLAGS = 0x00200000 | 0x01000000  # CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_GET_TID_ADDRESS = 36, 38, 40
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4

_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_LAST_CAPABILITY = 63

MACHINE = os.uname().machine
_CLONE = {"x86_64": 56, "aarch64": 220}.get(MACHINE)
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(MACHINE)
_PRCTL = {"x86_64": 157, "aarch64": 167}.get(MACHINE)
_CAPSET = {"x86_64": 126, "aarch64": 91}.get(MACHINE)
_SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}.get(MACHINE)
_IOPRIO_GET = {"x86_64": 252, "aarch64": 31}.get(MACHINE)
_MOUNT_SETATTR = 442
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446

# PyDLL keeps the GIL during a call: a child made by `clone` then owns it, as after `os.fork`.
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_bare = ctypes.PyDLL(None).syscall
_attributes = ctypes.create_string_buffer(56)
_attributes_address = ctypes.c_void_p(ctypes.addressof(_attributes))


def supported() -> bool:
    """Whether the system call numbers of this architecture are known here."""
    return _CLONE is not None


def syscall(number: int, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Any system call; integers are passed as machine words."""
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result: int = _libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def bare_syscall(number: int, *arguments: int | ctypes.c_void_p) -> int:
    """A system call with small integers only; an error does not carry its reason.

    For the hot path right after a fork, where every object that is created or touched costs a page fault.
    """
    result: int = _bare(number, *arguments)
    if result < 0:
        raise OSError(f"system call {number} was refused")
    return result


def _checked(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def prctl(option: int, value: int = 0, third: int = 0) -> None:
    words = [ctypes.c_ulong(word) for word in (value, third, 0, 0)]
    _checked(_libc.prctl(ctypes.c_int(option), *words), f"prctl {option}")


def set_dumpable() -> None:
    """Make this process the owner of its files under /proc again."""
    assert _PRCTL is not None
    bare_syscall(_PRCTL, PR_SET_DUMPABLE, 1, 0, 0, 0)


def unshare(flags: int) -> None:
    _checked(_libc.unshare(ctypes.c_int(flags)), f"unshare {flags:#x}")


def setns(fd: int, kinds: int) -> None:
    _checked(_libc.setns(ctypes.c_int(fd), ctypes.c_int(kinds)), f"setns {kinds:#x}")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    result = _libc.mount(
        source.encode(),
        target.encode(),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        data.encode(),
    )
    _checked(result, f"mount {target}")


def bind(source: str, target: str) -> None:
    """Bind-mount `source` at `target`, with all mounts below it."""
    mount(source, target, None, MS_BIND | MS_REC)


def protect(target: str) -> None:
    """Make `target` and every mount below it read-only, without devices or set-uid programs."""
    # struct mount_attr { set, clear, propagation, userns_fd }
    wanted = (_ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV).to_bytes(8, "little") + bytes(24)
    syscall(_MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, wanted, len(wanted))


def unmount(target: str) -> None:
    _checked(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    assert _PIVOT_ROOT is not None
    syscall(_PIVOT_ROOT, new.encode(), old.encode())


def bar_capabilities() -> None:
    """Empty the capability bounding set: no program started from here can gain a capability."""
    for capability in range(_LAST_CAPABILITY + 1):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            return  # past the last one this kernel knows, or no right to drop any of them


def drop_capabilities() -> None:
    """Give up every capability, for this process and for all it may ever start."""
    bar_capabilities()
    with contextlib.suppress(OSError):
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    assert _CAPSET is not None
    header = (0x20080522).to_bytes(4, "little") + bytes(4)
    syscall(_CAPSET, header, bytes(24))


def scheduling() -> tuple[bytes, int]:
    """Scheduling policy, priorities and clamps of this process, and its I/O priority."""
    assert _SCHED_GETATTR is not None and _IOPRIO_GET is not None
    bare_syscall(_SCHED_GETATTR, 0, _attributes_address, 56, 0)
    return _attributes.raw, bare_syscall(_IOPRIO_GET, 1, 0)


def thread_id_address() -> int:
    """Where the C library stores this thread's id; 0 where the kernel does not say."""
    address = ctypes.c_ulong(0)
    words = (ctypes.byref(address), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))
    return address.value if _libc.prctl(ctypes.c_int(PR_GET_TID_ADDRESS), *words) == 0 else 0


def clone_flags(namespaces: int) -> int:
    """The flags that `fork_into` passes to `clone`: seccomp allows a session exactly these."""
    return namespaces | signal.SIGCHLD | (_TID_FLAGS if thread_id_address() else 0)


def fork_into(namespaces: int) -> int:
    """Fork with the child in new `namespaces`; returns its pid, and 0 in the child.

    Runs the same interpreter hooks as `os.fork`, so that Python's state and registered modules are right in
    the child.
    """
    assert _CLONE is not None
    tid = thread_id_address()
    last = (tid, 0) if MACHINE == "x86_64" else (0, tid)  # argument order differs
    ctypes.pythonapi.PyOS_BeforeFork()
    try:
        pid = syscall(_CLONE, clone_flags(namespaces), 0, 0, *last)
    except OSError:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
        raise
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    return pid


# Landlock: which files may be read and written, enforced by the kernel for an unprivileged process.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
_BASE_RIGHTS = (1 << 13) - 1
_ABSTRACT_SOCKETS, _SIGNALS = 1, 2
_BIND_TCP, _CONNECT_TCP = 1, 2
_PATH_BENEATH = 1
_ASK_VERSION = 1
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV

LANDLOCK_READ = _READ_FILE | _READ_DIR | _EXECUTE
LANDLOCK_DEVICE = _READ_FILE | _WRITE_FILE | _TRUNCATE | _IOCTL_DEV


def landlock_version() -> int:
    """The kernel's Landlock ABI version; 0 where there is none."""
    try:
        return syscall(_LANDLOCK_CREATE_RULESET, None, 0, _ASK_VERSION)
    except OSError:
        return 0


def landlock_scopes_signals(abi: int) -> bool:
    """Whether Landlock keeps signals inside the domain."""
    return abi >= 6


def landlock_ruleset(abi: int, rules: Iterable[tuple[str, int]], *, network: bool) -> int:
    """A ruleset descriptor that allows `rules` (path, rights) and nothing else; missing paths are skipped."""
    handled = _handled_rights(abi)
    net = _BIND_TCP | _CONNECT_TCP if abi >= 4 and not network else 0
    scoped = _ABSTRACT_SOCKETS | _SIGNALS if abi >= 6 else 0
    attributes = b"".join(word.to_bytes(8, "little") for word in (handled, net, scoped))
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    made = syscall(_LANDLOCK_CREATE_RULESET, attributes, size, 0)
    for path, rights in rules:
        _add_rule(made, path, rights & handled)
    return made


def landlock_enforce(ruleset: int) -> None:
    """Restrict this process and everything it will start to a ruleset, irrevocably."""
    bare_syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0)


def landlock_write_rights(abi: int) -> int:
    """All rights on a process's own files, except creating devices."""
    return _handled_rights(abi) & ~(_MAKE_CHAR | _MAKE_BLOCK)


def _handled_rights(abi: int) -> int:
    rights = _BASE_RIGHTS
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        rights |= right if abi >= since else 0
    return rights


def _add_rule(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not os.path.isdir(path):
            rights &= _FILE_RIGHTS
        rule = rights.to_bytes(8, "little") + fd.to_bytes(4, "little")
        syscall(_LANDLOCK_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
    finally:
        os.close(fd)
