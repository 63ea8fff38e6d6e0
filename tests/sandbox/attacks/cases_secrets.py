"""Other people's files, memory, processes, and the network: rows 9 to 16."""
# ruff: noqa: E501 - the programs are data, and their lines are as long as they are

from __future__ import annotations

from attacks.case import FINE, REFUSED, ROOMY, TRIES, Case, ended, every, lacks, numbered, says

_OTHERS = """
def others():
    for pid in range(1, 5000):
        if pid != os.getpid():
            yield pid
visible = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
"""
_CALLS = numbered(
    {
        "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
        "pidfd_getfd": (438, 438), "pidfd_open": (434, 434), "kcmp": (312, 272),
        "process_madvise": (440, 440),
    }
)  # fmt: skip

_QUEUES = numbered(
    {
        "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
        "shmctl": (31, 195),
    }
)  # fmt: skip

SECRETS = [
    Case(
        "environment of every process",
        9,
        TRIES
        + _OTHERS
        + """
attempt("nothing", lambda: 1 / 0)
for pid in [1, *visible, @HOST@]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            print(pid, file.read()[:2000])
    except OSError as error:
        print("refused", pid, error)
""",
        every(FINE, lacks("BREACH")),
    ),
    Case(
        "memory of every process",
        9,
        TRIES
        + _OTHERS
        + """
def peek(pid):
    with open(f"/proc/{pid}/maps") as file:
        lines = file.read().splitlines()
    start = int(lines[0].split("-")[0], 16)
    fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    os.lseek(fd, start, 0)
    return os.read(fd, 16)
for pid in [@HOST@, os.getppid() or 99999, *visible]:
    attempt(f"memory of {pid}", lambda: peek(pid))
""",
        REFUSED,
    ),
    Case(
        "descriptors and folders of every process",
        9,
        TRIES
        + _OTHERS
        + """
for pid in [@HOST@, os.getppid() or 99999, *visible]:
    for name in ("cwd", "root", "map_files"):
        attempt(f"{name} of {pid}", lambda: os.listdir(f"/proc/{pid}/{name}/"))
    for name in ("exe", *(f"fd/{number}" for number in range(20))):
        attempt(f"{name} of {pid}", lambda: os.open(f"/proc/{pid}/{name}", os.O_RDONLY))
        attempt(f"name of {name} of {pid}", lambda: os.readlink(f"/proc/{pid}/{name}"))
""",
        REFUSED,
    ),
    Case(
        "files of the system",
        9,
        TRIES
        + """
for path in ("/etc/shadow", "/etc/gshadow", "/etc/sudoers", "/root/.ssh", "/root/.bash_history", "/proc/kcore", "/proc/kmsg",
             "/dev/mem", "/dev/kmsg", "/dev/sda", "/dev/vda", "/dev/fuse", "/dev/kvm", "/var/log", "/var/run",
             "/run/docker.sock", "/boot", "/sys/kernel", "/sys/firmware", "/lost+found", "/mnt", "/srv"):
    def look():
        if os.path.isdir(path):
            return os.listdir(path)[0]
        with open(path, "rb") as file:
            return file.read(10)
    attempt(path, look)
""",
        REFUSED,
    ),
    Case(
        "canaries in files",
        9,
        TRIES
        + """
for path in ("@HOME@", "@TMP@", "@PREFIX@"):
    attempt(path, lambda: open(path).read())
    attempt(path, lambda: open(os.path.realpath(path)).read())
    attempt(path, lambda: open("/proc/self/root" + path).read())
    attempt(path, lambda: open("/proc/1/root" + path).read())
    attempt(path, lambda: open("/home/agent/../.." + path).read())
    attempt(path, lambda: os.listdir(os.path.dirname(path))[0])
    attempt(path, lambda: os.link(path, "linked"))
    attempt(path, lambda: os.rename(path, "moved"))
    name = path.replace("/", "_")
    os.symlink(path, name)
    attempt(path, lambda: open(name).read())
""",
        REFUSED,
    ),
    Case(
        "canaries by programs",
        9,
        """
for f in @HOME@ @TMP@ @PREFIX@ /etc/shadow; do cat $f && echo BREACH; cp $f . && echo BREACH; tar cf x.tar $f && echo BREACH; done
ls -la $(dirname @TMP@) && echo BREACH
echo refused
""",
        every(says("refused"), lacks("BREACH")),
        kind="shell",
    ),
    Case(
        "folders above the interpreter",
        9,
        """
import os, sys
found = []
for start in {sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable))}:
    place = start
    while place != "/":
        place = os.path.dirname(place)
        try:
            for name in os.listdir(place):
                if os.path.isfile(os.path.join(place, name)) and name.startswith("ludus-canary"):
                    print("BREACH", place, name)
        except OSError as error:
            print("refused", place, error)
print("looked")
""",
        every(FINE, says("looked"), lacks("BREACH")),
    ),
    Case(
        "secrets in the environment",
        10,
        """
import os, subprocess
print(sorted(os.environ.items()))
print(subprocess.run(["env"], capture_output=True, text=True).stdout)
print(subprocess.run(["bash", "-lc", "env; set"], capture_output=True, text=True).stdout)
""",
        FINE,
    ),
    Case(
        "secrets in the memory that a fork inherits",
        10,
        """
import gc, re
pattern = r"canar[y]-value-[0-9a-f]{8}"  # does not match itself, wherever in memory it lies
for thing in gc.get_objects():
    try:
        text = repr(thing) if isinstance(thing, (dict, list, tuple)) and len(thing) < 2000 else ""
    except Exception:
        continue
    if re.search(pattern, text):
        print("BREACH", text[:300])
try:
    with open("/proc/self/maps") as file:
        lines = file.read().splitlines()
    memory = open("/proc/self/mem", "rb", buffering=0)
except OSError:
    lines = []
for line in lines:
    place, rights, *_ = line.split()
    if "r" not in rights or "[v" in line:
        continue
    start, end = (int(word, 16) for word in place.split("-"))
    try:
        memory.seek(start)
        data = memory.read(min(end - start, 1 << 26)) or b""
    except (OSError, ValueError, OverflowError):
        continue
    if re.search(pattern.encode(), data):
        print("BREACH memory", line)
print("searched")
""",
        every(ended("ok"), says("searched"), lacks("BREACH")),
        limits={**ROOMY, "memory_mb": 1024},
    ),
]

PROCESSES = [
    Case(
        "ptrace and its kin",
        11,
        TRIES
        + _OTHERS
        + f"""
CALLS = {_CALLS!r}
"""
        + """
import struct
target = ctypes.create_string_buffer(8)
local = struct.pack("QQ", ctypes.addressof(target), 8)
remote = struct.pack("QQ", 0x400000, 8)
for pid in [1, @HOST@, os.getppid() or 99999, *visible]:
    attempt(f"ptrace attach {pid}", lambda: call(CALLS["ptrace"], 16, pid, 0, 0))
    attempt(f"ptrace seize {pid}", lambda: call(CALLS["ptrace"], 0x4206, pid, 0, 0))
    attempt(f"read {pid}", lambda: call(CALLS["process_vm_readv"], pid, local, 1, remote, 1, 0))
    attempt(f"write {pid}", lambda: call(CALLS["process_vm_writev"], pid, local, 1, remote, 1, 0))
    attempt(f"kcmp {pid}", lambda: call(CALLS["kcmp"], pid, os.getpid(), 0, 0, 0))
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        continue
    attempt(f"getfd {pid}", lambda: call(CALLS["pidfd_getfd"], fd, 0, 0))
    attempt(f"madvise {pid}", lambda: call(CALLS["process_madvise"], fd, local, 1, 4, 0))
attempt("traceme", lambda: call(CALLS["ptrace"], 0, 0, 0, 0))
""",
        REFUSED,
    ),
    Case(
        "kill everybody at once",
        12,
        "import os\ntry:\n    os.kill(-1, 9)\nexcept OSError as e: print(e)\nprint('done')",
        ended("ok", "killed"),
    ),
    Case(
        "kill everybody in bash",
        12,
        "kill -9 -1; kill -9 1; kill -9 $PPID; echo done",
        ended("ok", "raised", "killed", "exited", "timeout"),
        kind="shell",
        limits={"wall_seconds": 2.0},
    ),
    Case(
        "kill everybody one by one",
        12,
        """
import os, signal
own = {os.getpid(), os.getpgrp()}
hit = []
for pid in [*range(2, 33000)]:
    if pid in own: continue
    for which in (signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL):
        try:
            os.kill(pid, which)
            hit.append(pid)
        except OSError:
            pass
        try:
            os.killpg(pid, which)
            hit.append(-pid)
        except OSError:
            pass
print("count", len(hit), hit)
""",
        every(ended("ok"), says("count 0 ")),
        limits=ROOMY,
    ),
    Case(
        "kill the parent and its group",
        12,
        """
import os, signal
for target in (lambda: os.kill(os.getppid() or 99999, 9), lambda: os.killpg(os.getpgid(os.getppid() or 99999), 9),
               lambda: os.kill(@HOST@, 9), lambda: os.kill(@HOST@, 19), lambda: os.kill(@HOST@, 0)):
    try:
        target()
        print("BREACH")
    except OSError as error:
        print("refused", error)
""",
        REFUSED,
    ),
    Case(
        "priorities of others",
        12,
        TRIES
        + """
attempt("nice", lambda: os.setpriority(os.PRIO_PROCESS, 0, -10))
attempt("host's nice", lambda: os.setpriority(os.PRIO_PROCESS, @HOST@, 19))
attempt("user's nice", lambda: os.setpriority(os.PRIO_PROCESS, 0, -20))
attempt("real time", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50)))
attempt("host's affinity", lambda: os.sched_setaffinity(@HOST@, {0}))
import resource
attempt("host's limits", lambda: resource.prlimit(@HOST@, resource.RLIMIT_NOFILE, (5, 5)))
attempt("host's processor time", lambda: resource.prlimit(@HOST@, resource.RLIMIT_CPU, (1, 1)))
""",
        REFUSED,
    ),
]

NETWORK = [
    Case(
        "sockets of every family",
        13,
        TRIES
        + """
import socket
for family in range(46):
    for kind in (1, 2, 3, 5):
        if family == socket.AF_UNIX:
            continue
        attempt(f"{family}/{kind}", lambda: socket.socket(family, kind))
attempt("vsock", lambda: socket.socket(40, 1).connect((2, 1)))
attempt("connect", lambda: socket.create_connection(("127.0.0.1", @PORT@), 1))
attempt("name", lambda: socket.getaddrinfo("example.org", 80))
""",
        REFUSED,
    ),
    Case(
        "programs that use the network",
        13,
        """
timeout 2 bash -c 'echo > /dev/tcp/127.0.0.1/@PORT@' && echo BREACH
timeout 2 bash -c 'echo > /dev/udp/8.8.8.8/53' && echo BREACH
echo refused
""",
        every(ended("ok"), says("refused"), lacks("BREACH")),
        kind="shell",
    ),
    Case(
        "unix sockets",
        14,
        TRIES
        + """
import socket
attempt("abstract", lambda: socket.socket(socket.AF_UNIX).connect("\\0/tmp/.X11-unix/X0"))
attempt("abstract canary", lambda: socket.socket(socket.AF_UNIX).connect("\\0ludus-canary-stream-@HOST@"))
attempt("bind abstract", lambda: socket.socket(socket.AF_UNIX).bind("\\0ludus"))
attempt("path", lambda: socket.socket(socket.AF_UNIX).connect("/run/docker.sock"))
attempt("bus", lambda: socket.socket(socket.AF_UNIX).connect("/run/dbus/system_bus_socket"))
""",
        REFUSED,
    ),
    Case(
        "a pair's end sent to a named socket",
        14,
        TRIES
        + """
import socket
one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
attempt("sendto path", lambda: one.sendto(b"x", "/run/systemd/journal/socket"))
attempt("sendto abstract", lambda: one.sendto(b"x", "\\0ludus-canary-@HOST@"))
""",
        REFUSED,
    ),
    Case(
        "shared memory and queues",
        14,
        TRIES
        + f"CALLS = {_QUEUES!r}"
        + """
attempt("shmget", lambda: call(CALLS["shmget"], 0x1234, 4096, 0o1666))
attempt("shmctl", lambda: call(CALLS["shmctl"], 0, 0, 0))
attempt("semget", lambda: call(CALLS["semget"], 0x1234, 1, 0o1666))
attempt("msgget", lambda: call(CALLS["msgget"], 0x1234, 0o1666))
attempt("mq_open", lambda: call(CALLS["mq_open"], b"ludus", 0o102, 0o666, 0))
""",
        REFUSED,
    ),
]

WRITING = [
    Case(
        "writes outside",
        15,
        TRIES
        + """
for path in ("/usr/x", "/etc/x", "/x", "/bin/x", "/dev/x", "/proc/x", "/var/tmp/x", "/home/x", "/run/x", "/opt/x",
             "@HOME@.new", "@TMP@.new", "@PREFIX@.new", "../../../../../../usr/x", sys.prefix + "/x",
             "/dev/null/x", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger",
             "/proc/self/oom_score_adj.x", "/sys/kernel/x", "/proc/1/oom_adj.x"):
    def write():
        with open(path, "w") as file:
            file.write("x")
    attempt(path, write)
for path in ("/usr/x", "/etc/x", "@TMP@.folder", sys.prefix + "/folder"):
    attempt(path, lambda: os.mkdir(path))
attempt("remove", lambda: os.unlink("/usr/bin/env"))
attempt("rename", lambda: os.rename("/usr/bin/env", "/usr/bin/env2"))
""",
        REFUSED,
    ),
    Case(
        "changes to files it may read",
        15,
        TRIES
        + """
def state(path):
    found = os.stat(path)
    try:
        names = os.listxattr(path)
    except OSError:
        names = []
    return found.st_mode, found.st_uid, found.st_gid, found.st_mtime_ns, found.st_size, found.st_nlink, names
def changes(path, function):
    before = state(path)
    function()
    if state(path) == before:
        raise PermissionError("without effect")
def through_descriptor(path):
    fd = os.open(path, os.O_RDONLY)
    os.fchmod(fd, 0o700)
for path in (sys.prefix, os.path.realpath(sys.executable), os.__file__, "/usr", "/usr/bin/env", "@TMP@", "@HOME@",
             os.path.dirname("@TMP@"), "/"):
    for name, function in {
        "chmod": lambda: os.chmod(path, 0o700), "utime": lambda: os.utime(path, (1, 1)),
        "chown": lambda: os.chown(path, os.getuid(), os.getgid()), "truncate": lambda: os.truncate(path, 0),
        "setxattr": lambda: os.setxattr(path, "user.ludus", b"x"), "link": lambda: os.link(path, "hard"),
        "fchmod": lambda: through_descriptor(path),
    }.items():
        attempt(f"{name} {path}", lambda: changes(path, function))
""",
        REFUSED,
    ),
    Case(
        "writes outside by programs",
        15,
        """
touch @TMP@.new; touch /usr/x; rm -f /usr/bin/env; cp /bin/true ../../../../../../bin/true2; echo x > @HOME@; chmod 700 @TMP@
(cd /; echo x > x); (cd /tmp/..; mkdir y)
for f in @TMP@.new /usr/x /bin/true2 /x /y; do [ -e $f ] && echo BREACH $f; done
[ -e /usr/bin/env ] || echo BREACH env
echo refused
""",
        every(ended("ok"), says("refused"), lacks("BREACH")),
        kind="shell",
    ),
    Case(
        "links out of the working directory",
        16,
        TRIES
        + """
os.symlink("/", "root")
os.symlink("/etc", "etc")
os.symlink("@TMP@", "canary")
os.symlink(os.path.dirname("@TMP@"), "folder")
os.symlink("/proc/self/root", "again")
for path in ("root/etc/shadow", "etc/shadow", "canary", "folder/new", "again@TMP@", "root/usr/new", "again/usr/new"):
    def write():
        with open(path, "a") as file:
            file.write("x")
    attempt(path, write)
""",
        REFUSED,
    ),
    Case(
        "links exchanged while it ends",
        16,
        """
import os, threading, time
os.makedirs("a/b/c")
os.symlink(os.path.dirname("@TMP@"), "link")
def race():
    n = 0
    while True:
        n += 1
        try:
            os.rename("a/b", "a/x")
            os.rename("link", "a/b")
            os.rename("a/b", "link")
            os.rename("a/x", "a/b")
        except OSError:
            pass
for _ in range(2):
    if os.fork() == 0:
        race()
time.sleep(0.2)
print("left racing")
""",
        every(FINE, says("left racing")),
    ),
]

CASES = [*SECRETS, *PROCESSES, *NETWORK, *WRITING]
