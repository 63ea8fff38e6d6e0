"""Seccomp: the system calls that model-written code has no business with are refused by the kernel.

A deny list rather than an allow list, because people's programs use more of the kernel than one would think;
but calls newer than this list are refused as unknown, so that a new kernel opens no new door.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Iterable

from ludus.sandbox.inside import kernel

# name: number on x86_64, number on aarch64 (0: does not exist there)
_DENIED = {
    # the shape of the system: mounts, namespaces, roots
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "unshare": (272, 97), "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "quotactl": (179, 60), "quotactl_fd": (443, 443),
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    # the kernel itself
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "create_module": (174, 0), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "lookup_dcookie": (212, 18),
    "syslog": (103, 116), "acct": (163, 89), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "vhangup": (153, 58), "nfsservctl": (180, 42), "uselib": (134, 0),
    "_sysctl": (156, 0), "ioperm": (173, 0), "iopl": (172, 0), "modify_ldt": (154, 0),
    "personality": (135, 92), "ustat": (136, 0),
    # watches, of which a user has few: one session could take them from everybody
    "inotify_init": (253, 0), "inotify_init1": (294, 26), "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    # the clock and the name of the machine
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266),
    "adjtimex": (159, 171), "sethostname": (170, 161), "setdomainname": (171, 162),
    # memory that no limit counts
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "mbind": (237, 235), "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
    # queues and memory that outlive their makers
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190),
    "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186),
    "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180),
    "mq_unlink": (241, 181), "mq_timedsend": (242, 182), "mq_timedreceive": (243, 183),
    "mq_notify": (244, 184), "mq_getsetattr": (245, 185),
}  # fmt: skip
_SOCKETS = {"socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201)}
# done to files by name or descriptor, and not governed by Landlock
_MODES = {
    "chmod": (90, 0), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, 0), "fchown": (93, 55), "lchown": (94, 0), "fchownat": (260, 54),
    "utime": (132, 0), "utimes": (235, 0), "utimensat": (280, 88), "futimesat": (261, 0),
}  # fmt: skip
_ATTRIBUTES = {
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
}  # fmt: skip
_CLONE, _CLONE3, _PRCTL = (56, 220), (435, 435), (157, 167)
_PRLIMIT, _SETRLIMIT, _RLIMIT_NPROC = (302, 261), (160, 164), 6
_SIGNALLING = {
    "kill": (62, 129), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}  # fmt: skip
# what can be done to any process of the same user; 0 as first argument means oneself
_PRIORITIES = {
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274),
}  # fmt: skip
_PRIORITIES_OTHERWISE = {"setpriority": (141, 140), "ioprio_set": (251, 30)}
_SIGNALLING_OTHERWISE = {"tkill": (200, 130), "pidfd_send_signal": (424, 424)}
_NEWEST_KNOWN = 456
_X32_BIT = 0x40000000
_NEW_NAMESPACES = 0x7E020080
_GUARDED_PRCTL = (kernel.PR_SET_PDEATHSIG, kernel.PR_SET_CHILD_SUBREAPER, 35)  # 35: PR_SET_MM
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_REFUSED, _UNKNOWN, _PRETENDED = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS, _ERRNO

Instruction = tuple[int, int, int, int]


def program(
    *,
    network: bool,
    branching: int,
    own_pid: int | None,
    keep_modes: bool = False,
    sees_others: bool = False,
) -> list[Instruction]:
    """The filter. `branching`: the exact clone flags that `Session.fork` uses, 0 to allow none.

    `own_pid`: allow signals to this process alone; for machines where neither a pid namespace nor Landlock
    keeps signals inside. `keep_modes`: calls that change modes, owners and times of files do nothing, and say
    that they did, as archivers and installers expect; for when the user's other files could be named.
    `sees_others`: others' processes and files can be named, so only one's own limits and priorities may be
    changed, and no attributes of files.
    """
    column = 0 if kernel.MACHINE == "x86_64" else 1
    denied = [numbers[column] for numbers in _DENIED.values()]
    if not network:
        denied += [numbers[column] for numbers in _SOCKETS.values()]
    if own_pid is not None:
        denied += [numbers[column] for numbers in _SIGNALLING_OTHERWISE.values()]
    if sees_others:
        denied += [numbers[column] for numbers in _PRIORITIES_OTHERWISE.values()]
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _ARCHITECTURE[kernel.MACHINE]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        *_when(_AT_LEAST, _X32_BIT, _REFUSED),
        *_when(_AT_LEAST, _NEWEST_KNOWN + 1, _UNKNOWN),
        *_when(_EQUAL, _CLONE3[column], _UNKNOWN),  # its flags lie in memory; the C library falls back
    ]
    for number in sorted(filter(None, denied)):
        code += _when(_EQUAL, number, _REFUSED)
    pretended = {**(_MODES if keep_modes else {}), **(_ATTRIBUTES if sees_others else {})}
    for number in sorted(filter(None, (numbers[column] for numbers in pretended.values()))):
        code += _when(_EQUAL, number, _PRETENDED)
    code += _argument_rule(_CLONE[column], _clone_rule(branching))
    code += _argument_rule(
        _PRCTL[column], [r for o in _GUARDED_PRCTL for r in _when(_EQUAL, o, _REFUSED)]
    )
    for numbers in _SIGNALLING.values() if own_pid is not None else ():
        code += _argument_rule(numbers[column], _only(own_pid or 0))
    for numbers in _PRIORITIES.values() if sees_others else ():
        code += _argument_rule(numbers[column], _only(0))
    # The hard limit on processes is that of a whole family of forks; the warm interpreter raises it for them.
    code += _argument_rule(_SETRLIMIT[column], _when(_EQUAL, _RLIMIT_NPROC, _REFUSED))
    code += _argument_rule(
        _PRLIMIT[column],
        [
            *(_only(0) if sees_others else ()),
            (_LOAD, 0, 0, _ARGUMENT + 8),
            (_EQUAL, 1, 0, _RLIMIT_NPROC),
            (_RETURN, 0, 0, _ALLOW),
            (_LOAD, 0, 0, _ARGUMENT + 16),  # where the new limit lies; nowhere when it is only read
            *_only(0),
            (_LOAD, 0, 0, _ARGUMENT + 20),
            *_only(0),
        ],
    )
    return [*code, (_RETURN, 0, 0, _ALLOW)]


def packed(code: Iterable[Instruction]) -> bytes:
    """The filter as the kernel takes it."""
    return b"".join(
        op.to_bytes(2, "little") + bytes((yes, no)) + value.to_bytes(4, "little")
        for op, yes, no, value in code
    )


def install(packed: bytes) -> None:
    """Put the filter over this process and all it will start, for good."""
    buffer = ctypes.create_string_buffer(packed, len(packed))
    header = (len(packed) // 8).to_bytes(8, "little") + ctypes.addressof(buffer).to_bytes(8, "little")
    holder = ctypes.create_string_buffer(header, 16)
    kernel.prctl(22, 2, ctypes.addressof(holder))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def _when(comparison: int, value: int, verdict: int) -> list[Instruction]:
    return [(comparison, 0, 1, value), (_RETURN, 0, 0, verdict)]


def _only(value: int) -> list[Instruction]:
    return [(_EQUAL, 1, 0, value), (_RETURN, 0, 0, _REFUSED)]


def _argument_rule(number: int, rule: list[Instruction]) -> list[Instruction]:
    """`rule` on the first argument of one system call; what it does not refuse is allowed."""
    body = [(_LOAD, 0, 0, _ARGUMENT), *rule, (_RETURN, 0, 0, _ALLOW)]
    return [(_EQUAL, 0, len(body), number), *body]


def _clone_rule(branching: int) -> list[Instruction]:
    exact: list[Instruction] = [(_EQUAL, 0, 1, branching), (_RETURN, 0, 0, _ALLOW)] if branching else []
    return [*exact, (_ANY_BIT, 0, 1, _NEW_NAMESPACES), (_RETURN, 0, 0, _REFUSED)]
