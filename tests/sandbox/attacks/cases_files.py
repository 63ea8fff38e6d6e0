"""Filling the disk, and what is left behind: rows 17 to 20."""
# ruff: noqa: E501 - the programs are data, and their lines are as long as they are

from __future__ import annotations

from attacks.case import FINE, ROOMY, SHORT, TRIES, Case, counted, ended, every, lacks, says

_SMALL_DISK = {**ROOMY, "disk_mb": 8, "file_mb": 4}
_FILL = """
import os
def fill(folder, size=1 << 20):
    total = 0
    try:
        for number in range(400):
            with open(f"{folder}/fill-{number}", "wb") as file:
                file.write(bytes(size))
                total += size
    except OSError as error:
        print("stopped by", error)
    return total >> 20
"""
DISK = [
    Case(
        "disk filled at home",
        17,
        _FILL + "print('count', fill('.'))",
        every(FINE, counted(8), says("stopped")),
        limits=_SMALL_DISK,
        bare="skip",
    ),
    Case(
        "disk filled in /tmp",
        17,
        _FILL + "print('count', fill('/tmp'))",
        every(FINE, counted(8), says("stopped")),
        limits=_SMALL_DISK,
        bare="skip",
    ),
    Case(
        "disk filled in /dev/shm",
        17,
        _FILL + "print('count', fill('/dev/shm'))",
        every(FINE, counted(8), says("stopped")),
        limits=_SMALL_DISK,
        bare="skip",
    ),
    Case(
        "disk filled in bash",
        17,
        "cat /dev/zero > x & cat /dev/zero > /tmp/y; wait; echo count $(du -sm . /tmp | sort -n | tail -1 | cut -f1)",
        every(ended("ok", "raised", "timeout"), counted(9)),
        kind="shell",
        limits=_SMALL_DISK,
        bare="skip",
    ),
    Case(
        "one file too large",
        17,
        """
import os, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
fd = os.open("x", os.O_CREAT | os.O_WRONLY)
total = 0
try:
    while total < 100 << 20:
        total += os.write(fd, bytes(1 << 20))
except OSError as error:
    print("stopped by", error)
print("count", total >> 20)
""",
        every(FINE, counted(4)),
        limits=_SMALL_DISK,
    ),
    Case(
        "a sparse file",
        17,
        """
import os
try:
    with open("x", "wb") as file:
        file.truncate(1 << 40)
    print("count", os.stat("x").st_size >> 20)
except OSError as error:
    print("count 0", error)
""",
        every(FINE, counted(64)),
    ),
    Case(
        "inodes",
        17,
        """
count = 0
try:
    for count in range(200_000):
        open(f"f{count}", "w").close()
except OSError as error:
    print("stopped by", error)
print("count", count)
""",
        every(FINE, says("stopped"), counted(20_000)),
        limits=_SMALL_DISK,
        bare="skip",
    ),
    Case(
        "hard links and extended attributes",
        17,
        """
import os
open("x", "w").close()
count = 0
try:
    for count in range(200_000):
        os.link("x", f"l{count}")
except OSError as error:
    print("stopped by", error)
try:
    for number in range(200_000):
        os.setxattr("x", f"user.{number}", bytes(1000))
except OSError as error:
    print("stopped by", error)
print("count", count)
""",
        every(FINE, says("stopped"), counted(20_000)),
        limits=_SMALL_DISK,
        bare="skip",
    ),
    Case(
        "a deep tree",
        17,
        """
import os
for depth in range(1500):
    os.mkdir("deeper")
    os.chdir("deeper")
print("made")
""",
        every(ended("ok", "raised")),
        limits=ROOMY,
    ),
    Case(
        "folders without rights",
        17,
        """
import os
os.makedirs("a/b/c/d")
open("a/b/c/d/x", "w").close()
for path in ("a/b/c/d", "a/b/c", "a/b", "a"):
    os.chmod(path, 0)
os.chmod(".", 0)
print("made")
""",
        every(FINE, says("made")),
    ),
    Case(
        "strange names",
        17,
        """
import os
for name in (b"\\xff\\xfe", b"-rf", b"new\\nline", b"\\x01", b"a" * 255, "\\u202e".encode()):
    os.mkdir(name)
    os.symlink(b"/", name + b"/l" if len(name) < 250 else b"l")
print("made")
""",
        every(FINE, says("made")),
    ),
    Case(
        "the next one starts empty",
        17,
        """
import os
print(sorted(os.listdir(".")), sorted(name for name in os.listdir(os.environ["TMPDIR"]) if name.startswith("fill")))
""",
        every(FINE, says("[] []")),
    ),
    Case(
        "open files",
        17,
        """
count = 0
files = []
try:
    for count in range(100_000):
        files.append(open("/dev/null"))
except OSError as error:
    files.clear()
    print("stopped by", error)
print("count", count)
""",
        every(FINE, counted(256)),
    ),
    Case(
        "pipes",
        17,
        """
import fcntl, os
count = 0
ends = []
try:
    for count in range(100_000):
        ends += os.pipe()
        fcntl.fcntl(ends[-1], 1031, 1 << 20)
except OSError as error:
    for end in ends: os.close(end)
    print("stopped by", error)
print("count", count)
""",
        every(FINE, counted(256)),
    ),
]

_DAEMON = """
import os, time
def daemon(work):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 256)
            import ctypes, signal
            ctypes.CDLL(None).prctl(15, b"ludus-atk", 0, 0, 0)
            for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_IGN)
            work()
        os._exit(0)
def linger():
    while True:
        time.sleep(0.2)
        try:
            with open("@TMP@.marker", "w") as file:
                file.write("x")
        except OSError:
            pass
daemon(linger)
time.sleep(0.05)
"""
LEFT_BEHIND = [
    Case("a daemon", 18, _DAEMON + "print('left')", every(FINE, says("left"))),
    Case("a daemon, then os._exit", 18, _DAEMON + "os._exit(7)", ended("exited")),
    Case("a daemon, then a crash", 18, _DAEMON + "import ctypes\nctypes.string_at(0)", ended("killed")),
    Case("a daemon, then a timeout", 18, _DAEMON + "time.sleep(1e6)", ended("timeout"), limits=SHORT),
    Case(
        "a daemon, then too much output",
        18,
        _DAEMON + "while True: print('x' * 1000)",
        ended("output"),
        limits=ROOMY,
    ),
    Case(
        "a daemon, then no descriptor",
        18,
        _DAEMON + "os.closerange(0, 256)\ntime.sleep(1e6)",
        ended("killed", "timeout", "exited", "raised"),
        limits=SHORT,
    ),
    Case(
        "many daemons",
        18,
        _DAEMON + "for _ in range(20): daemon(linger)\nprint('left')",
        every(FINE, says("left")),
    ),
    Case(
        "daemons of bash",
        18,
        """
(setsid bash -c 'exec -a ludus-atk sleep 100000' </dev/null >/dev/null 2>&1 &) ; nohup sleep 100001 >/dev/null 2>&1 & disown
trap '' HUP; (trap '' TERM; sleep 100002) & echo left
""",
        every(FINE, says("left")),
        kind="shell",
    ),
    Case(
        "a grandchild holds standard output",
        18,
        """
import subprocess
subprocess.Popen(["bash", "-c", "sleep 100; echo late"])
print("main ended")
""",
        every(FINE, says("main ended"), lacks("late")),
    ),
    Case(
        "a grandchild writes on",
        18,
        """
import subprocess
subprocess.Popen(["bash", "-c", "while :; do echo more; done"])
print("main ended")
""",
        every(ended("ok"), says("main ended")),
    ),
    Case(
        "a job of bash holds standard output",
        18,
        "sleep 1000 & echo main ended",
        every(FINE, says("main ended")),
        kind="shell",
    ),
    Case(
        "threads that linger",
        19,
        """
import threading, time
def work():
    while True: time.sleep(0.01)
for _ in range(5): threading.Thread(target=work).start()
print("main ended")
""",
        every(FINE, says("main ended")),
    ),
    Case(
        "a busy thread that lingers",
        19,
        """
import threading
def work():
    while True: pass
threading.Thread(target=work).start()
print("main ended")
""",
        every(FINE, says("main ended")),
    ),
    Case(
        "atexit that lingers",
        19,
        "import atexit, time\natexit.register(time.sleep, 1e6)\nprint('main ended')",
        every(FINE, says("main ended")),
    ),
    Case(
        "a finalizer that lingers",
        19,
        """
import time
class Sticky:
    def __del__(self):
        time.sleep(1e6)
sticky = Sticky()
print("main ended")
""",
        every(FINE, says("main ended")),
    ),
]

DESCRIPTORS = [
    Case(
        "closes all descriptors",
        20,
        "import os\nos.closerange(0, 256)",
        ended("killed", "exited", "ok", "raised"),
        limits={"wall_seconds": 3.0},
    ),
    Case(
        "closes all descriptors and waits",
        20,
        "import os, time\nos.closerange(0, 256)\ntime.sleep(1e6)",
        ended("killed", "exited", "timeout", "raised"),
        limits={"wall_seconds": 2.0},
    ),
    Case(
        "closes the standard streams",
        20,
        "import sys\nsys.stdout.close()\nsys.stderr.close()\nsys.stdin.close()\n1 + 1",
        ended("ok", "raised"),
    ),
    Case(
        "descriptors it was born with",
        20,
        """
import os
for fd in range(4096):
    try:
        print(fd, os.readlink(f"/proc/self/fd/{fd}"))
    except OSError:
        pass
print("count", len([name for name in os.listdir("/proc/self/fd")]))
""",
        every(FINE, counted(6), lacks("memory")),
    ),
    Case(
        "descriptors a program is born with",
        20,
        "ls /proc/self/fd | wc -l | sed 's/^/count /'",
        every(FINE, counted(4)),
        kind="shell",
    ),
    Case(
        "reads all descriptors",
        20,
        """
import os
for fd in range(4, 256):
    try:
        data = os.read(fd, 100)
    except OSError:
        continue
    if data:
        print("BREACH", fd, data)
print("done")
""",
        every(FINE, says("done"), lacks("BREACH")),
    ),
    Case("input", 20, "input('name? ')", every(ended("raised"), says("EOFError"))),
    Case(
        "input in bash",
        20,
        "read x; echo got=$x; cat",
        every(ended("ok", "raised"), says("got=")),
        kind="shell",
    ),
    Case(
        "input that is given",
        20,
        "print(input()[::-1], input())",
        every(FINE, says("olleh world")),
        stdin="hello\nworld\n",
    ),
    Case(
        "input that nobody reads", 20, "print('done')", every(FINE, says("done")), stdin="x" * 5_000_000
    ),
    Case(
        "leases and signals about descriptors",
        20,
        TRIES
        + """
import fcntl
with open("leased", "w") as file:
    file.write("x")
fd = os.open("leased", os.O_RDONLY)
for name, kind in (("write", fcntl.F_WRLCK), ("read", fcntl.F_RDLCK)):
    attempt(f"lease to {name}", lambda: fcntl.fcntl(fd, fcntl.F_SETLEASE, kind))
attempt("notify", lambda: fcntl.fcntl(os.open(".", os.O_RDONLY), fcntl.F_NOTIFY, 0x80000002))
attempt("owner", lambda: fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid()))
attempt("signal", lambda: fcntl.fcntl(fd, fcntl.F_SETSIG, 10))
fcntl.lockf(os.open("leased", os.O_RDWR), fcntl.LOCK_EX)
fcntl.flock(fd, fcntl.LOCK_EX)
""",
        every(FINE, says("refused"), lacks("BREACH")),
    ),
    Case(
        "a terminal",
        20,
        TRIES
        + """
import fcntl
attempt("tty", lambda: open("/dev/tty"))
for fd in range(4):
    attempt(f"typing {fd}", lambda: fcntl.ioctl(fd, 0x5412, b"x"))
""",
        every(FINE, says("refused"), lacks("BREACH")),
    ),
]

CASES = [*DISK, *LEFT_BEHIND, *DESCRIPTORS]
