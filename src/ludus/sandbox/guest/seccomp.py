"""The seccomp filter: an allow list of system calls; the kernel refuses all others.

Left out on purpose, besides what needs privileges:
- namespaces and mounts; other processes' memory (`ptrace`, `process_vm_readv`, `pidfd_getfd`);
- `bpf`, `perf_event_open`, `userfaultfd`, `io_uring`, keys, and new filters (`seccomp`, Landlock rulesets);
- resources that the kernel counts per user or per machine, so that one session could exhaust them for all:
  `io_setup`, `inotify_init`, `fanotify_init`; `sync`, which keeps the machine's disks busy;
- memory that no limit counts: `memfd_create`, `vmsplice`, System V and POSIX queues and shared memory.
Allowed with conditions: `clone` without namespaces, except for the exact flags of `Session.fork`, in sessions
only (it gives capabilities in a namespace in which no user is mapped, and the calls that could use them are
refused); `socketpair` of Unix sockets; `setsockopt` without larger send buffers; `setrlimit` except
RLIMIT_NPROC; `fcntl` without leases (a lease blocks every other process that opens the file) and without
signals about descriptors.

Calls that are newer than this list fail with ENOSYS, so that C libraries fall back to older ones.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Iterable

from ludus.sandbox.guest import kernel

# name: number on x86_64, number on aarch64 (-1: does not exist there)
_ALLOWED = {
    # files: open, read, write, name, look at
    "read": (0, 63), "write": (1, 64), "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65),
    "writev": (20, 66), "preadv": (295, 69), "pwritev": (296, 70), "preadv2": (327, 286),
    "pwritev2": (328, 287), "open": (2, -1), "openat": (257, 56), "openat2": (437, 437), "creat": (85, -1),
    "close": (3, 57), "close_range": (436, 436), "lseek": (8, 62), "stat": (4, -1), "fstat": (5, 80),
    "lstat": (6, -1), "newfstatat": (262, 79), "statx": (332, 291), "statfs": (137, 43), "fstatfs": (138, 44),
    "access": (21, -1), "faccessat": (269, 48), "faccessat2": (439, 439), "getdents": (78, -1),
    "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "mkdir": (83, -1),
    "mkdirat": (258, 34), "rmdir": (84, -1), "rename": (82, -1), "renameat": (264, 38), "renameat2": (316, 276),
    "link": (86, -1), "linkat": (265, 37), "unlink": (87, -1), "unlinkat": (263, 35), "symlink": (88, -1),
    "symlinkat": (266, 36), "readlink": (89, -1), "readlinkat": (267, 78), "mknod": (133, -1),
    "mknodat": (259, 33), "truncate": (76, 45), "ftruncate": (77, 46), "fallocate": (285, 47),
    "fsync": (74, 82), "fdatasync": (75, 83), "sync_file_range": (277, 84), "readahead": (187, 213),
    "fadvise64": (221, 223), "copy_file_range": (326, 285), "sendfile": (40, 71), "splice": (275, 76),
    "tee": (276, 77), "umask": (95, 166), "flock": (73, 32), "fcntl": (72, 25), "ioctl": (16, 29),
    "dup": (32, 23), "dup2": (33, -1), "dup3": (292, 24), "pipe": (22, -1), "pipe2": (293, 59),
    "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, -1),
    "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54), "utime": (132, -1), "utimes": (235, -1),
    "utimensat": (280, 88), "futimesat": (261, -1), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "getxattr": (191, 8), "lgetxattr": (192, 9), "fgetxattr": (193, 10),
    "listxattr": (194, 11), "llistxattr": (195, 12), "flistxattr": (196, 13), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    # waiting for descriptors, and descriptors to wait for
    "poll": (7, -1), "ppoll": (271, 73), "select": (23, -1), "pselect6": (270, 72), "epoll_create": (213, -1),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, -1), "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441), "eventfd": (284, -1), "eventfd2": (290, 19), "timerfd_create": (283, 85),
    "timerfd_settime": (286, 86), "timerfd_gettime": (287, 87), "signalfd": (282, -1), "signalfd4": (289, 74),
    # sockets that one process gives to another; those of the network are in _NETWORK
    "socketpair": (53, 199), "accept": (43, 202), "accept4": (288, 242), "sendto": (44, 206),
    "recvfrom": (45, 207), "sendmsg": (46, 211), "recvmsg": (47, 212), "sendmmsg": (307, 269),
    "recvmmsg": (299, 243), "shutdown": (48, 210), "getsockname": (51, 204), "getpeername": (52, 205),
    "setsockopt": (54, 208), "getsockopt": (55, 209),
    # memory
    "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216), "msync": (26, 227),
    "mincore": (27, 232), "madvise": (28, 233), "brk": (12, 214), "mlock": (149, 228), "mlock2": (325, 284),
    "munlock": (150, 229), "mlockall": (151, 230), "munlockall": (152, 231), "membarrier": (324, 283),
    "pkey_mprotect": (329, 288), "pkey_alloc": (330, 289), "pkey_free": (331, 290),
    "map_shadow_stack": (453, 453), "get_mempolicy": (239, 236),
    # how a slot's programs enter their Landlock domain; useless without the right to create a ruleset
    "landlock_restrict_self": (446, 446),
    # processes and threads
    "clone": (56, 220), "fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "execveat": (322, 281),
    "exit": (60, 93), "exit_group": (231, 94), "wait4": (61, 260), "waitid": (247, 95), "futex": (202, 98),
    "futex_waitv": (449, 449), "futex_wake": (454, 454), "futex_wait": (455, 455), "futex_requeue": (456, 456),
    "set_tid_address": (218, 96), "set_robust_list": (273, 99), "get_robust_list": (274, 100),
    "rseq": (334, 293), "arch_prctl": (158, -1), "prctl": (157, 167), "sched_yield": (24, 124),
    "sched_setparam": (142, 118), "sched_getparam": (143, 121), "sched_setscheduler": (144, 119),
    "sched_getscheduler": (145, 120), "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126), "sched_rr_get_interval": (148, 127), "sched_setaffinity": (203, 122),
    "sched_getaffinity": (204, 123), "sched_setattr": (314, 274), "sched_getattr": (315, 275),
    "getpriority": (140, 141), "setpriority": (141, 140), "ioprio_set": (251, 30), "ioprio_get": (252, 31),
    "getcpu": (309, 168), "getrlimit": (97, 163), "setrlimit": (160, 164), "prlimit64": (302, 261),
    "getrusage": (98, 165), "times": (100, 153), "pidfd_open": (434, 434), "getpid": (39, 172),
    "getppid": (110, 173), "gettid": (186, 178), "getpgrp": (111, -1), "getpgid": (121, 155),
    "setpgid": (109, 154), "getsid": (124, 156), "setsid": (112, 157),
    # signals
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132),
    "restart_syscall": (219, 128), "pause": (34, -1), "kill": (62, 129), "tkill": (200, 130),
    "tgkill": (234, 131), "pidfd_send_signal": (424, 424),
    # time
    "time": (201, -1), "gettimeofday": (96, 169), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "nanosleep": (35, 101), "alarm": (37, -1), "getitimer": (36, 102),
    "setitimer": (38, 103), "timer_create": (222, 107), "timer_settime": (223, 110),
    "timer_gettime": (224, 108), "timer_getoverrun": (225, 109), "timer_delete": (226, 111),
    # user ids; no other user is mapped
    "getuid": (102, 174), "geteuid": (107, 175), "getresuid": (118, 148), "getgid": (104, 176),
    "getegid": (108, 177), "getresgid": (120, 150), "getgroups": (115, 158), "setuid": (105, 146),
    "setreuid": (113, 145), "setresuid": (117, 147), "setfsuid": (122, 151), "setgid": (106, 144),
    "setregid": (114, 143), "setresgid": (119, 149), "setfsgid": (123, 152), "setgroups": (116, 159),
    "capget": (125, 90), "capset": (126, 91), "uname": (63, 160), "sysinfo": (99, 179), "getrandom": (318, 278),
}  # fmt: skip
_NETWORK = {"socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201)}
# done to files by name or descriptor, and not governed by Landlock
_MODES = (
    "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat",
    "utime", "utimes", "utimensat", "futimesat",
)  # fmt: skip
_ATTRIBUTES = ("setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr")
_SIGNALLING = ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
_SIGNALLING_OTHERWISE = ("tkill", "pidfd_send_signal")
# what can be done to any process of the same user; 0 as first argument means oneself
_PRIORITIES = ("sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr")
_PRIORITIES_OTHERWISE = ("setpriority", "ioprio_set")
_CLONE3 = 435
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
_RLIMIT_NPROC, _AF_UNIX, _SOL_SOCKET, _SEND_BUFFERS = 6, 1, 1, (7, 32)  # SO_SNDBUF, SO_SNDBUFFORCE
# F_SETLEASE, F_NOTIFY, F_SETDELEG, F_SETOWN, F_SETSIG, F_SETOWN_EX
_GUARDED_FCNTL = (1024, 1026, 1040, 8, 10, 15)
_NEWEST_KNOWN = 456
_X32_BIT = 0x40000000
_NEW_NAMESPACES = 0x7E020080
# PR_SET_SECCOMP, PR_SET_MM: filters take the kernel's memory, and the other hides what a process is
_GUARDED_PRCTL = (kernel.PR_SET_PDEATHSIG, kernel.PR_SET_CHILD_SUBREAPER, 22, 35)
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Classic BPF. An instruction is a `struct sock_filter`: (code, jt, jf, k). A jump compares the accumulator with
# `k` and skips `jt` instructions if that holds, `jf` if not; a load takes 32 bits at offset `k` of the
# `struct seccomp_data` of the call; a return ends the program with the verdict `k`.
Instruction = tuple[int, int, int, int]
_LOAD, _RETURN = 0x20, 0x06  # BPF_LD | BPF_W | BPF_ABS, BPF_RET | BPF_K
_EQUAL, _AT_LEAST, _ANY_BIT = 0x15, 0x35, 0x45  # BPF_JMP with BPF_JEQ, BPF_JGE, BPF_JSET
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16  # offsets of nr, arch, args[0]
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000  # SECCOMP_RET_ALLOW, _ERRNO, _KILL_PROCESS
# SECCOMP_RET_ERRNO with 0: the call does nothing and reports success
_REFUSED, _UNKNOWN, _PRETENDED = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS, _ERRNO


def program(
    *,
    network: bool,
    fork_flags: int,
    own_pid: int | None,
    keep_modes: bool = False,
    sees_others: bool = False,
) -> list[Instruction]:
    """The BPF program. `fork_flags`: the exact clone flags that `Session.fork` uses, 0 to allow none.

    `own_pid`: allow signals to this process only; for machines where neither a pid namespace nor Landlock
    keeps signals inside. `keep_modes`: calls that change modes, owners and times of files do nothing and
    report success, as archivers and installers expect; for when the user's other files are reachable by name.
    `sees_others`: other processes and files are reachable by name, so a process may change only its own
    limits and priorities, and no extended attributes.

    Layout: check the architecture, refuse the x32 ABI, then the rules on arguments, then a binary search over
    the call numbers.
    """
    column = 0 if kernel.MACHINE == "x86_64" else 1
    numbers = {
        name: both[column] for name, both in {**_ALLOWED, **_NETWORK}.items() if both[column] >= 0
    }
    refused = {
        *(() if network else _NETWORK),
        *(_SIGNALLING_OTHERWISE if own_pid is not None else ()),
        *(_PRIORITIES_OTHERWISE if sees_others else ()),
    }
    pretended = {*(_MODES if keep_modes else ()), *(_ATTRIBUTES if sees_others else ())}
    verdicts = [_REFUSED] * _NEWEST_KNOWN + [_REFUSED, _UNKNOWN]
    verdicts[_CLONE3] = _UNKNOWN  # its flags lie in memory; the C library falls back
    for name in numbers.keys() - refused:
        verdicts[numbers[name]] = _PRETENDED if name in pretended else _ALLOW
    rules: dict[str, list[Instruction]] = {
        "clone": _clone_rule(fork_flags),
        "prctl": [r for option in _GUARDED_PRCTL for r in _when(_EQUAL, option, _REFUSED)],
        "fcntl": [
            *_load(1),
            *(r for command in _GUARDED_FCNTL for r in _when(_EQUAL, command, _REFUSED)),
        ],
        "socketpair": _only(_AF_UNIX),
        **({"socket": _any_of(_FAMILIES)} if network else {}),
        # A socket can pin as much kernel memory as its send buffer: it stays at the default size.
        "setsockopt": [
            *_load(1),
            *_unless(_SOL_SOCKET, _ALLOW),
            *_load(2),
            *(r for option in _SEND_BUFFERS for r in _when(_EQUAL, option, _PRETENDED)),
        ],
        # The hard limit on processes covers a session with all its forks; only the fork server raises it.
        "setrlimit": _when(_EQUAL, _RLIMIT_NPROC, _REFUSED),
        "prlimit64": [
            *(_only(0) if sees_others else ()),
            *_load(1),
            *_unless(_RLIMIT_NPROC, _ALLOW),
            *_load(2),  # where the new limit lies: nowhere when it is only read
            *_only(0),
            (_LOAD, 0, 0, _ARGUMENT + 20),  # the upper half of args[2]
            *_only(0),
        ],
    }
    rules |= dict.fromkeys(_SIGNALLING, _only(own_pid)) if own_pid is not None else {}
    rules |= dict.fromkeys(_PRIORITIES, _only(0)) if sees_others else {}
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        *_unless(_ARCHITECTURE[kernel.MACHINE], _KILL),
        (_LOAD, 0, 0, _NUMBER),
        *_when(_AT_LEAST, _X32_BIT, _REFUSED),
    ]
    for name, rule in rules.items():
        code += _argument_rule(numbers[name], rule)
    return [*code, *_search(verdicts)]


def packed(code: Iterable[Instruction]) -> bytes:
    return b"".join(
        op.to_bytes(2, "little") + bytes((yes, no)) + value.to_bytes(4, "little")
        for op, yes, no, value in code
    )


def install(packed: bytes) -> None:
    """Put the filter over this process and all it will start, for good."""
    # struct sock_fprog { unsigned short len; struct sock_filter *filter }, padded to 16 bytes
    buffer = ctypes.create_string_buffer(packed, len(packed))
    header = (len(packed) // 8).to_bytes(8, "little") + ctypes.addressof(buffer).to_bytes(8, "little")
    holder = ctypes.create_string_buffer(header, 16)
    kernel.prctl(22, 2, ctypes.addressof(holder))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def _when(comparison: int, value: int, verdict: int) -> list[Instruction]:
    """Return `verdict` if the comparison holds; otherwise go on with the next instruction."""
    return [(comparison, 0, 1, value), (_RETURN, 0, 0, verdict)]


def _unless(value: int, verdict: int) -> list[Instruction]:
    return [(_EQUAL, 1, 0, value), (_RETURN, 0, 0, verdict)]


def _only(value: int) -> list[Instruction]:
    return _unless(value, _REFUSED)


def _any_of(values: tuple[int, ...]) -> list[Instruction]:
    allowed = [r for value in values for r in _when(_EQUAL, value, _ALLOW)]
    return [*allowed, (_RETURN, 0, 0, _REFUSED)]


def _load(argument: int) -> list[Instruction]:
    """The lower half of an argument of the call, counted from 0."""
    return [(_LOAD, 0, 0, _ARGUMENT + 8 * argument)]


def _search(verdicts: list[int]) -> list[Instruction]:
    """The verdict on each number, found by halving; the last one holds for all numbers from there on."""
    starts = [n for n, verdict in enumerate(verdicts) if not n or verdict != verdicts[n - 1]]

    def half(starts: list[int]) -> list[Instruction]:
        if len(starts) == 1:
            return [(_RETURN, 0, 0, verdicts[starts[0]])]
        middle = len(starts) // 2
        low = half(starts[:middle])
        return [(_AT_LEAST, len(low), 0, starts[middle]), *low, *half(starts[middle:])]

    return half(starts)


def _argument_rule(number: int, rule: list[Instruction]) -> list[Instruction]:
    """`rule` on the first argument of one system call; what it does not refuse is allowed."""
    body = [*_load(0), *rule, (_RETURN, 0, 0, _ALLOW)]
    return [(_EQUAL, 0, len(body), number), *body]


def _clone_rule(fork_flags: int) -> list[Instruction]:
    exact: list[Instruction] = (
        [(_EQUAL, 0, 1, fork_flags), (_RETURN, 0, 0, _ALLOW)] if fork_flags else []
    )
    return [*exact, (_ANY_BIT, 0, 1, _NEW_NAMESPACES), (_RETURN, 0, 0, _REFUSED)]
