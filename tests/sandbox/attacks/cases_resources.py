"""Too many processes, too much memory, too much output, too long: rows 1 to 8."""

from __future__ import annotations

from attacks.case import (
    FINE,
    SHORT,
    STOPPED,
    TIMEOUT,
    TRIES,
    Case,
    counted,
    ended,
    every,
    lacks,
    says,
    truncated,
)

_FEW = {"wall_seconds": 1.0, "processes": 32}
_SMALL = {"wall_seconds": 20.0, "memory_mb": 96}
_ENOUGH = {"wall_seconds": 20.0, "processes": 32}

PROCESSES = [
    Case(
        "fork bomb",
        1,
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        STOPPED,
        limits=_FEW,
    ),
    Case(
        "fork bomb in bash",
        1,
        ":(){ :|:& };:; wait",
        ended("ok", "raised", "timeout", "processes", "killed"),
        kind="shell",
        limits=_FEW,
    ),
    Case(
        "forks counted",
        1,
        """
import os, time
count = 0
try:
    while count < 500:
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        count += 1
except OSError as error:
    print("stopped by", error)
print("count", count)
""",
        every(ended("ok", "processes"), lacks("count 500")),
        limits=_ENOUGH,
    ),
    Case(
        "raw clone counted",
        1,
        TRIES
        + """
import platform, signal, time
number = 56 if platform.machine() == "x86_64" else 220
count = 0
try:
    while count < 500:
        if call(number, int(signal.SIGCHLD), 0, 0, 0, 0) == 0:
            time.sleep(30)
            os._exit(0)
        count += 1
except OSError as error:
    print("stopped by", error)
print("count", count)
""",
        every(ended("ok", "processes"), lacks("count 500")),
        limits=_ENOUGH,
    ),
    Case(
        "threads counted",
        1,
        """
import threading, time
count = 0
try:
    while count < 500:
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
        count += 1
except (RuntimeError, MemoryError) as error:
    print("stopped by", error)
print("count", count)
""",
        every(ended("ok", "memory"), counted(32)),
        limits=_ENOUGH,
    ),
    Case(
        "threads with small stacks, counted after the limit was raised",
        1,
        """
import resource, threading, time
for most in (500, resource.getrlimit(resource.RLIMIT_NPROC)[1]):
    try:
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    except (OSError, ValueError) as error:
        print("refused", error)
threading.stack_size(1 << 16)
count = 0
try:
    while count < 500:
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
        count += 1
except (RuntimeError, MemoryError) as error:
    print("stopped by", error)
print("count", count)
""",
        every(ended("ok"), says("refused"), counted(32)),
        limits=_ENOUGH,
        bare=every(
            ended("ok", "processes"), lacks("count 500")
        ),  # one user's threads count together there
    ),
    Case(
        "descriptors in flight",
        1,
        """
import socket, time
keep, count = [], 0
try:
    while count < 5000:
        keep += socket.socketpair()
        socket.send_fds(keep[-1], [b"x"], [0] * 100)
        count += 100
except OSError as error:
    print("stopped by", error)
print("count", count)
time.sleep(2)
""",
        every(ended("ok"), counted(600)),
    ),
    Case(
        "jobs in bash",
        1,
        "for i in $(seq 300); do sleep 30 & done 2>/dev/null; echo count $(jobs -p | wc -l)",
        every(ended("ok", "raised", "processes", "timeout"), lacks("count 300")),
        kind="shell",
        limits={"wall_seconds": 2.0, "processes": 32},
    ),
    Case(
        "fork bomb that never waits and changes its session",
        1,
        """
import os
while True:
    try:
        if os.fork() == 0:
            os.setsid()
    except OSError:
        pass
""",
        STOPPED,
        limits=_FEW,
    ),
]

MEMORY = [
    Case("3 GB of bytes", 2, "x = bytes(3 << 30)\nprint('GOT')", every(ended("memory"), lacks("GOT"))),
    Case(
        "a list that grows",
        2,
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
        ended("memory"),
        limits=_SMALL,
    ),
    Case("a string that doubles", 2, "x = 'x'\nwhile True: x += x", ended("memory"), limits=_SMALL),
    Case("many small things", 2, "x = []\nwhile True: x.append([])", ended("memory"), limits=_SMALL),
    Case(
        "many small texts",
        2,
        "x = {}\nwhile True: x[len(x)] = str(len(x))",
        ended("memory"),
        limits=_SMALL,
    ),
    Case(
        "a whole number of 8 GB",
        2,
        "x = 1 << (1 << 36)\nprint('GOT')",
        every(ended("memory", "raised"), lacks("GOT")),
    ),
    Case(
        "buffers of sockets in many processes",
        3,
        """
import os, socket, time
for _ in range(48):
    if os.fork() == 0:
        break
keep = []
try:
    while True:
        pair = socket.socketpair()
        keep += pair
        for end in pair:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
            end.setblocking(False)
            try:
                while True:
                    end.send(bytes(65536))
            except BlockingIOError:
                pass
except OSError:
    pass
time.sleep(20)
print("GOT")
""",
        every(ended("memory"), lacks("GOT")),
        limits={"wall_seconds": 20.0, "memory_mb": 256},
    ),
    Case(
        "anonymous mapping",
        2,
        "import mmap\nx = mmap.mmap(-1, 3 << 30)\nprint('GOT')",
        every(ended("raised", "memory"), lacks("GOT")),
    ),
    Case(
        "malloc in C",
        2,
        """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
total = 0
while libc.malloc(ctypes.c_size_t(1 << 24)):
    total += 16
print("count", total)
""",
        every(ended("ok"), counted(400)),
        limits={"wall_seconds": 20.0, "memory_mb": 256},
    ),
    Case(
        "memory files",
        2,
        TRIES
        + """
attempt("memfd", lambda: os.memfd_create("x"))
""",
        every(FINE, says("refused"), lacks("BREACH")),
    ),
    Case(
        "locked memory",
        2,
        TRIES
        + """
def lock():
    buffer = ctypes.create_string_buffer(64 << 20)
    if libc.mlock(buffer, ctypes.c_size_t(64 << 20)):
        raise OSError(ctypes.get_errno(), "mlock")
attempt("mlock", lock)
""",
        every(FINE, says("refused"), lacks("BREACH")),
    ),
    Case(
        "zip bomb",
        2,
        """
import zlib
packed = zlib.compress(bytes(50_000_000), 9)
for _ in range(2):
    packed = zlib.compress(zlib.decompress(packed) * 20, 9)
print('GOT')
""",
        every(ended("memory", "timeout"), lacks("GOT")),
        limits={"wall_seconds": 10.0, "memory_mb": 256},
    ),
    Case(
        "standard input that is written to",
        2,
        """
import os
os.lseek(0, 0, 2)
try:
    print("count", os.write(0, bytes(10_000_000)))
except OSError as error:
    print("count 0", error)
""",
        counted(0),
        stdin="hello",
    ),
    Case(
        "children with much memory",
        3,
        """
import os, time
for _ in range(12):
    if os.fork() == 0:
        x = bytearray(60 << 20)
        time.sleep(30)
        os._exit(0)
time.sleep(15)
""",
        ended("memory"),
        limits=_SMALL,
    ),
    Case(
        "children that hide how much memory they have",
        3,
        """
import ctypes, os, time
for _ in range(12):
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
        x = bytearray(60 << 20)
        time.sleep(30)
        os._exit(0)
time.sleep(15)
""",
        ended("memory"),
        limits=_SMALL,
    ),
    Case(
        "programs with much memory",
        3,
        """
for i in $(seq 10); do (x=$(head -c 20000000 /dev/zero | tr '\\0' x); sleep 30) & done; sleep 15
""",
        ended("memory", "raised", "ok"),
        kind="shell",
        limits=_SMALL,
    ),
]

_CAPPED = {"wall_seconds": 20.0, "cpu_seconds": 20.0, "output_bytes": 10_000}
OUTPUT = [
    Case(
        "endless output",
        4,
        "while True: print('x' * 50)",
        every(ended("output"), truncated),
        limits=_CAPPED,
    ),
    Case(
        "endless errors",
        4,
        "import sys\nwhile True: sys.stderr.write('x' * 5000)",
        every(ended("output"), truncated),
        limits=_CAPPED,
    ),
    Case(
        "endless output of a program",
        4,
        "yes",
        every(ended("output"), truncated),
        kind="shell",
        limits=_CAPPED,
    ),
    Case(
        "endless output on both, from threads",
        4,
        """
import os, threading
def write(fd):
    while True:
        os.write(fd, b"y" * 4096)
threading.Thread(target=write, args=(2,), daemon=True).start()
write(1)
""",
        every(ended("output"), truncated),
        limits=_CAPPED,
    ),
    Case(
        "100 MB without a newline",
        5,
        "import sys\nfor _ in range(100): sys.stdout.write('x' * 1_000_000)",
        every(ended("output"), truncated),
        limits=_CAPPED,
    ),
    Case(
        "more than is kept",
        5,
        "print('a' * 5_000_000 + 'the end')",
        every(FINE, truncated, says("the end")),
        limits=_CAPPED,
    ),
    Case(
        "a value that is too long", 5, "'v' * 3_000_000", every(FINE, says("left out")), limits=_CAPPED
    ),
    Case(
        "an error that is too long",
        5,
        "raise ValueError('v' * 3_000_000)",
        every(ended("raised"), says("left out")),
        limits=_CAPPED,
    ),
]

TIME = [
    Case("busy loop", 6, "while True: pass", TIMEOUT, limits=SHORT),
    Case("sleep for ever", 6, "import time\ntime.sleep(1e6)", TIMEOUT, limits=SHORT),
    Case("sleep for ever in bash", 6, "sleep 1000000", TIMEOUT, kind="shell", limits=SHORT),
    Case("a program that sleeps for ever", 6, "sleep 1000000", TIMEOUT, kind="run", limits=SHORT),
    Case(
        "bash ignores all signals",
        6,
        "trap '' INT TERM HUP; while :; do sleep 1; done",
        TIMEOUT,
        kind="shell",
        limits=SHORT,
    ),
    Case(
        "waits for a child for ever",
        6,
        "import subprocess\nsubprocess.run(['sleep', '1000000'])",
        TIMEOUT,
        limits=SHORT,
    ),
    Case(
        "waits on a lock",
        6,
        "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()",
        TIMEOUT,
        limits=SHORT,
    ),
    Case(
        "processor time",
        6,
        "while True: pass",
        ended("cpu"),
        limits={"wall_seconds": 30.0, "cpu_seconds": 0.5},
    ),
    Case(
        "processor time, its signal ignored",
        6,
        """
import signal
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
while True: pass
""",
        ended("cpu"),
        limits={"wall_seconds": 30.0, "cpu_seconds": 0.5},
    ),
    Case("a power in C", 7, "pow(3, 10 ** 9)", ended("timeout", "memory"), limits=SHORT),
    Case(
        "a regular expression in C",
        7,
        "import re\nre.match(r'(a+)+$', 'a' * 40 + 'b')",
        TIMEOUT,
        limits=SHORT,
    ),
    Case(
        "a long number as text",
        7,
        """
import sys
sys.set_int_max_str_digits(0)
print(len(str(7 ** 3_000_000)))
""",
        ended("timeout", "ok"),
        limits=SHORT,
    ),
    Case("a sum in C", 7, "sum(range(10 ** 12))", TIMEOUT, limits=SHORT),
    Case("a search in C", 7, "10 ** 9 in iter(int, 1)", TIMEOUT, limits=SHORT),
    Case(
        "a repr that loops",
        7,
        """
class Value:
    def __repr__(self):
        while True: pass
Value()
""",
        TIMEOUT,
        limits=SHORT,
    ),
    Case(
        "an exception whose text loops",
        7,
        """
class Bad(Exception):
    def __str__(self):
        while True: pass
raise Bad
""",
        ended("timeout", "raised"),
        limits=SHORT,
    ),
    Case(
        "all signals ignored",
        8,
        """
import signal
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True: pass
""",
        TIMEOUT,
        limits=SHORT,
    ),
    Case(
        "interrupts caught",
        8,
        """
while True:
    try:
        while True: pass
    except BaseException:
        pass
""",
        TIMEOUT,
        limits=SHORT,
    ),
    Case(
        "all signals blocked",
        8,
        """
import signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
time.sleep(1e6)
""",
        TIMEOUT,
        limits=SHORT,
    ),
    Case(
        "stops itself",
        8,
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(1e6)",
        ended("timeout"),
        limits=SHORT,
    ),
    Case(
        "a program stops itself", 8, "kill -STOP $$; sleep 1000000", TIMEOUT, kind="shell", limits=SHORT
    ),
    Case(
        "children that stop and ignore",
        8,
        """
import os, signal, time
for _ in range(5):
    if os.fork() == 0:
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        os.kill(os.getpid(), signal.SIGSTOP)
        while True: time.sleep(1)
time.sleep(1e6)
""",
        TIMEOUT,
        limits=SHORT,
    ),
]

CASES = [*PROCESSES, *MEMORY, *OUTPUT, *TIME]
