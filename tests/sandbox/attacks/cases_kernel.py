"""Calls into the kernel that nobody who solves an exercise needs: row 25."""
# ruff: noqa: E501 - the programs are data, and their lines are as long as they are

from __future__ import annotations

import platform

from attacks.case import FINE, REFUSED, ROOMY, TRIES, Case, ended, every, lacks, numbered, says

_NUMBERS = {
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsmount": (432, 432), "mount_setattr": (442, 442), "bpf": (321, 280), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "userfaultfd": (323, 282), "perf_event_open": (298, 241), "clone": (56, 220),
    "clone3": (435, 435), "personality": (135, 92), "init_module": (175, 105), "finit_module": (313, 273),
    "kexec_load": (246, 104), "reboot": (169, 142), "swapon": (167, 224), "sethostname": (170, 161),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "syslog": (103, 116), "acct": (163, 89),
    "quotactl": (179, 60), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "ioperm": (173, -1),
    "iopl": (172, -1), "modify_ldt": (154, -1), "mknod": (133, -1), "mknodat": (259, 33), "capset": (126, 91),
    "fanotify_init": (300, 262), "memfd_secret": (447, 447), "lsm_set_self_attr": (460, 460),
    "io_setup": (206, 0), "vmsplice": (278, 75), "seccomp": (317, 277), "landlock_create_ruleset": (444, 444),
    "sync": (162, 81), "cachestat": (451, 451), "setsockopt": (54, 208), "socketpair": (53, 199),
    "open_tree_attr": (467, 467), "kcmp": (312, 272), "vhangup": (153, 58), "prctl": (157, 167),
}  # fmt: skip
_CALLS = f"N = {numbered(_NUMBERS)!r}\n"
_FLAGS = """
import signal
FLAGS = {"NEWNS": 0x20000, "NEWCGROUP": 0x2000000, "NEWUTS": 0x4000000, "NEWIPC": 0x8000000, "NEWUSER": 0x10000000,
         "NEWPID": 0x20000000, "NEWNET": 0x40000000, "NEWTIME": 0x80}
def clone(flags):
    pid = call(N["clone"], flags | int(signal.SIGCHLD), 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    return pid
"""

KERNEL = [
    Case(
        "namespaces, mounts and roots",
        25,
        TRIES
        + _CALLS
        + _FLAGS
        + """
for name, flag in FLAGS.items():
    attempt(f"unshare {name}", lambda: call(N["unshare"], flag))
    attempt(f"clone {name}", lambda: clone(flag))
    for other, second in FLAGS.items():
        if other < name:
            attempt(f"clone {name}+{other}", lambda: clone(flag | second))
attempt("clone all", lambda: clone(0x7E020000))
attempt("clone high bits", lambda: clone(0x10000000 | 1 << 32))
for name in ("user", "pid", "mnt", "net"):
    fd = os.open(f"/proc/self/ns/{name}", os.O_RDONLY)
    attempt(f"setns {name}", lambda: call(N["setns"], fd, 0))
attempt("mount", lambda: call(N["mount"], b"none", b"/tmp", b"tmpfs", 0, 0))
attempt("bind", lambda: call(N["mount"], b"/", b"/tmp", 0, 4096, 0))
attempt("remount", lambda: call(N["mount"], b"none", b"/usr", 0, 32 | 4096, 0))
attempt("umount", lambda: call(N["umount2"], b"/proc", 2))
attempt("pivot_root", lambda: call(N["pivot_root"], b".", b"."))
attempt("chroot", lambda: os.chroot("."))
attempt("open_tree", lambda: call(N["open_tree"], -100, b"/", 1))
attempt("fsopen", lambda: call(N["fsopen"], b"tmpfs", 0))
attempt("mount_setattr", lambda: call(N["mount_setattr"], -100, b"/usr", 0, bytes(32), 32))
attempt("open_tree_attr", lambda: call(N["open_tree_attr"], -100, b"/", 1, bytes(32), 32))
attempt("clone3", lambda: call(N["clone3"], bytes(88), 88))
""",
        REFUSED,
    ),
    Case(
        "the flags that forks of a session use",
        25,
        TRIES
        + _CALLS
        + """
import itertools, signal
base = 0x10000000 | 0x20000000 | 0x20000 | int(signal.SIGCHLD)
extra = (0x1000, 0x200000, 0x1000000)
def inside(flags):
    holder = ctypes.c_long(0)
    reader, writer = os.pipe()
    pid = call(N["clone"], flags, 0, ctypes.addressof(holder), ctypes.addressof(holder), ctypes.addressof(holder))
    if pid == 0:
        report = []
        def tries(name, function):
            try:
                function()
                report.append(name)
            except OSError:
                pass
        tries("mount", lambda: call(N["mount"], b"none", b"/tmp", b"tmpfs", 0, 0))
        tries("remount", lambda: call(N["mount"], b"none", b"/usr", 0, 32 | 4096, 0))
        tries("umount", lambda: call(N["umount2"], b"/proc", 2))
        tries("unshare", lambda: call(N["unshare"], 0x40000000))
        tries("setns", lambda: call(N["setns"], os.open("/proc/self/ns/mnt", 0), 0))
        tries("chroot", lambda: os.chroot("/usr"))
        tries("pivot", lambda: call(N["pivot_root"], b".", b"."))
        tries("hostname", lambda: call(N["sethostname"], b"x", 1))
        tries("usr", lambda: open("/usr/x", "w"))
        tries("mknod", lambda: os.mknod("/tmp/n", 0o60644, os.makedev(254, 0)))
        tries("kill outside", lambda: os.kill(@HOST@, 0))
        for path in ("@TMP@", "@HOME@", "/etc/shadow"):
            tries(path, lambda: open(path))
            tries(path, lambda: os.chmod(path, 0o777))
        os.write(writer, (" ".join(report) or "nothing").encode())
        os._exit(0)
    os.close(writer)
    return os.read(reader, 1000).decode()
found = 0
for count in range(4):
    for some in itertools.combinations(extra, count):
        flags = base
        for flag in some:
            flags |= flag
        try:
            got = inside(flags)
        except OSError as error:
            print("refused", hex(flags), error)
            continue
        found += 1
        print("refused" if got == "nothing" else "BREACH", hex(flags), "inside:", got)
print("entered", found)
""",
        REFUSED,
        limits=ROOMY,
    ),
    Case(
        "parts of the kernel",
        25,
        TRIES
        + _CALLS
        + """
page = ctypes.create_string_buffer(4096)
at = ctypes.addressof(page)
for name, arguments in {
    "bpf": (5, at, 120), "io_uring_setup": (8, at), "io_uring_enter": (0, 0, 0, 0, 0, 0), "io_uring_register": (0, 0, 0, 0),
    "keyctl": (0, -3, 0), "add_key": (b"user", b"x", b"y", 1, -3), "request_key": (b"user", b"x", 0, -3),
    "userfaultfd": (0,), "perf_event_open": (at, 0, -1, -1, 0), "init_module": (at, 10, b""),
    "finit_module": (0, b"", 0), "kexec_load": (0, 0, 0, 0), "reboot": (0xFEE1DEAD, 672274793, 0, 0),
    "swapon": (b"x", 0), "sethostname": (b"x", 1), "settimeofday": (at, 0), "clock_settime": (0, at),
    "syslog": (3, at, 100), "acct": (0,), "quotactl": (0, 0, 0, 0), "name_to_handle_at": (-100, b"/", at, at, 0),
    "open_by_handle_at": (0, at, 0), "fanotify_init": (0, 0), "memfd_secret": (0,), "kcmp": (1, 1, 0, 0, 0),
    "personality": (0x0040000,), "ioperm": (0, 1, 1), "iopl": (3,), "modify_ldt": (0, at, 10), "vhangup": (),
    "lsm_set_self_attr": (0, at, 10, 0), "io_setup": (8, at), "vmsplice": (1, at, 0, 0), "seccomp": (2, 0, at),
    "landlock_create_ruleset": (0, 0, 1), "cachestat": (0, at, at, 0), "sync": (),
}.items():
    if name in N:
        attempt(name, lambda: call(N[name], *arguments))
attempt("mknod", lambda: os.mknod("disk", 0o60644, os.makedev(254, 0)))
attempt("mknod character", lambda: os.mknod("tty", 0o20644, os.makedev(5, 0)))
attempt("death signal", lambda: call(N["prctl"], 1, 0, 0, 0, 0))
attempt("subreaper", lambda: call(N["prctl"], 36, 0, 0, 0, 0))
attempt("a filter of its own", lambda: call(N["prctl"], 22, 2, at, 0, 0))
for family in range(46):
    for kind in (1, 2, 3, 5):
        if family != 1:
            attempt(f"socketpair {family} {kind}", lambda: call(N["socketpair"], family, kind, 0, at))
""",
        REFUSED,
    ),
    Case(
        "becoming somebody else",
        25,
        TRIES
        + _CALLS
        + """
attempt("setuid 0", lambda: os.setuid(0))
attempt("setgid 0", lambda: os.setgid(0))
attempt("setresuid", lambda: os.setresuid(0, 0, 0))
attempt("setuid 1", lambda: os.setuid(1))
attempt("setgroups", lambda: os.setgroups([0]))
attempt("setfsuid", lambda: 1 / 0 if libc.setfsuid(0) == libc.setfsuid(0) else None)
attempt("all capabilities", lambda: call(N["capset"], (0x20080522).to_bytes(4, "little") + bytes(4), b"\\xff" * 24))
with open("/proc/self/status") as file:
    for line in file:
        name, _, value = line.partition(":")
        if name in ("CapEff", "CapPrm", "CapInh", "CapAmb") and int(value, 16):
            print("BREACH", line)
        if name == "NoNewPrivs" and value.strip() != "1":
            print("BREACH", line)
        if name == "Seccomp" and value.strip() != "2":
            print("BREACH", line)
import glob, subprocess
for path in ("/usr/bin/su", "/usr/bin/sudo", "/usr/bin/passwd", "/usr/bin/mount", "/usr/bin/newgrp"):
    if os.path.exists(path):
        done = subprocess.run(["bash", "-c", f"echo | {path} -c id 2>&1"], capture_output=True, text=True, timeout=20)
        print("BREACH" if "uid=0" in done.stdout else "refused", path)
""",
        REFUSED,
        limits=ROOMY,
    ),
    Case(
        "raising the limits",
        25,
        TRIES
        + """
import resource
for name in ("AS", "NPROC", "NOFILE", "FSIZE", "CORE", "MEMLOCK", "CPU", "RTPRIO", "NICE", "MSGQUEUE"):
    kind = getattr(resource, f"RLIMIT_{name}", None)
    if kind is None:
        continue
    soft, hard = resource.getrlimit(kind)
    if hard == resource.RLIM_INFINITY:
        print("BREACH" if name in ("AS", "NPROC", "NOFILE", "FSIZE", "CORE") else "unlimited", name)
        continue
    attempt(name, lambda: resource.setrlimit(kind, (hard + 1, hard + 1)))
    attempt(name, lambda: resource.setrlimit(kind, (-1, -1)))
""",
        REFUSED,
    ),
    Case(
        "files of the kernel",
        25,
        TRIES
        + """
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches", "/proc/sys/kernel/modprobe", "/proc/sysrq-trigger",
             "/proc/sys/net/ipv4/ip_forward", "/proc/sys/kernel/msgmax", "/proc/sys/fs/mqueue/msg_max", "/proc/sys/kernel/shmmax",
             "/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/memory/cgroup.procs", "/sys/fs/cgroup/pids/pids.max",
             "/sys/kernel/mm/ksm/run"):
    attempt(path, lambda: os.close(os.open(path, os.O_WRONLY)))
def lower():
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("-1000")
attempt("oom", lower)
""",
        REFUSED,
    ),
    Case(
        "what /proc shows of the machine",
        25,
        """
import os
machine = [name for name in os.listdir("/proc") if not name.isdigit() and name not in ("self", "thread-self")]
print("BREACH" if machine else "refused", machine)
""",
        REFUSED,
        bare="skip",
    ),
    Case(
        "random numbers",
        25,
        """
import os, random, secrets, tempfile, uuid, ssl
print("random", random.random(), random.getrandbits(128), uuid.uuid4(), secrets.token_hex(8), os.urandom(8).hex(),
      next(tempfile._get_candidate_names()), ssl.RAND_bytes(8).hex())
""",
        every(FINE, says("random ")),
    ),
]

if platform.machine() == "x86_64":
    KERNEL += [
        Case(
            "system calls of the x32 kind",
            25,
            TRIES
            + """
for number in (39, 41, 57, 101, 165, 272, 321, 425, 512, 520, 521, 540, 547):
    attempt(f"x32 {number}", lambda: call(0x40000000 + number, 0, 0, 0, 0, 0, 0))
for number in (457, 460, 470, 500, 1000, 0x7FFFFFFF, -1):
    attempt(f"unknown {number}", lambda: call(number, 0, 0, 0, 0, 0, 0))
""",
            REFUSED,
        ),
        Case(
            "system calls of 32 bits",
            25,
            """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("b814000000cd80c3"))  # eax = 20 (getpid), int 0x80
print("BREACH", ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())
""",
            every(ended("killed"), lacks("BREACH")),
        ),
    ]

CASES = KERNEL
__all__ = ["CASES", "FINE"]
