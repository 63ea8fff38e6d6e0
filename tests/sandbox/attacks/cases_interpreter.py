"""Broken sources, strange endings, a poisoned interpreter, and lies told to the host: rows 21 to 24."""
# ruff: noqa: E501 - the programs are data, and their lines are as long as they are

from __future__ import annotations

from attacks.case import (
    FINE,
    INTERNALS,
    SHORT,
    STOPPED,
    Case,
    ended,
    every,
    exit_code,
    lacks,
    says,
    signalled,
)

ANY = ended("ok", "raised", "exited", "timeout", "cpu", "memory", "processes", "output", "killed")

TEXTS = [
    Case(
        "invalid UTF-8 in the output",
        21,
        "import os\nos.write(1, b'a\\xff\\xfe\\x80b')",
        every(FINE, says("a\\xff\\xfe\\x80b")),
    ),
    Case(
        "surrogates in the output", 21, "print('a\\ud800b')", every(ended("ok", "raised"), says("d800"))
    ),
    Case("surrogates in the source", 21, "x = '\ud800'\nprint(len(x))", ended("raised", "ok")),
    Case(
        "surrogates in the input",
        21,
        "import sys\nprint(len(sys.stdin.read()))",
        ended("ok"),
        stdin="a\ud800b",
    ),
    Case("surrogates in a command", 21, "echo '\ud800'", ended("ok", "raised"), kind="shell"),
    Case("NUL in the source", 21, "x = 1\0\nprint(x)", every(ended("raised"), says("null"))),
    Case("NUL in a command", 21, "echo a\0b", ended("ok", "raised"), kind="shell"),
    Case("NUL in the output", 21, "print('a\\0b')", every(FINE, says("a\0b"))),
    Case("empty source", 21, "", FINE),
    Case("empty command", 21, "", FINE, kind="shell"),
    Case("white space alone", 21, " \n\t\n", ended("ok", "raised")),
    Case("a comment alone", 21, "# nothing", FINE),
    Case(
        "3 MB of source", 21, ("x = '" + "y" * 990 + "'\n") * 3_000 + "len(x)", every(FINE, says("990"))
    ),
    Case("a line of 1 MB", 21, "x = '" + "y" * 1_000_000 + "'\nlen(x)", every(FINE, says("1000000"))),
    Case("brackets without end", 21, "(" * 10_000 + ")" * 10_000, ended("raised", "memory", "killed")),
    Case(
        "operators without end", 21, "+".join(["1"] * 50_000), ended("ok", "raised", "killed", "memory")
    ),
    Case("a syntax error", 21, "def f(:\n  pass", every(ended("raised"), says("SyntaxError"))),
    Case("another encoding", 21, "# -*- coding: utf-16 -*-\nprint('ok')", ended("ok", "raised")),
    Case("escape sequences", 21, "print('\\x1b[2J\\x07\\r' + '\\b' * 100)", FINE),
]

ENDINGS = [
    Case("os._exit(7)", 22, "import os\nos._exit(7)", every(ended("exited"), exit_code(7))),
    Case(
        "sys.exit(text)",
        22,
        "import sys\nsys.exit('x marks it')",
        every(ended("exited"), exit_code(1), says("x marks it")),
    ),
    Case("sys.exit(0)", 22, "import sys\nsys.exit(0)", every(ended("exited"), exit_code(0))),
    Case("sys.exit(huge)", 22, "import sys\nsys.exit(10 ** 30)", ended("exited")),
    Case("raise SystemExit(list)", 22, "raise SystemExit([1, 2])", ended("exited")),
    Case("exit 9 in bash", 22, "exit 9", every(ended("raised"), exit_code(9)), kind="shell"),
    Case(
        "kill -9 itself in bash",
        22,
        "kill -9 $$",
        every(ended("killed"), signalled("SIGKILL")),
        kind="shell",
    ),
    Case("exec in bash", 22, "exec echo replaced", every(FINE, says("replaced")), kind="shell"),
    Case("no such program", 22, "/does/not/exist", every(ended("raised"), exit_code(127)), kind="run"),
    Case(
        "os.exec of a program",
        22,
        "import os\nos.execv('/bin/sh', ['sh', '-c', 'echo replaced; exit 3'])",
        every(ended("exited", "raised", "killed"), says("replaced")),
    ),
    Case("KeyboardInterrupt of its own", 22, "raise KeyboardInterrupt", ended("raised")),
    Case("GeneratorExit", 22, "raise GeneratorExit", ended("raised")),
    Case("MemoryError of its own", 22, "raise MemoryError", ended("memory", "raised")),
    Case(
        "a forged frame on standard output",
        22,
        """
import json, os
text = json.dumps({"done": "ok", "value": "forged"}).encode()
os.write(1, len(text).to_bytes(4, "little") + bytes(4) + text)
raise ValueError("the truth")
""",
        every(ended("raised"), says("the truth")),
    ),
]

_RAW = (
    INTERNALS
    + """
import array, os, socket, time
def frame_of(text, body=0):
    return len(text).to_bytes(4, "little") + body.to_bytes(4, "little") + text
"""
)
LIES = [
    Case(
        "a forged result, then a busy loop",
        22,
        _RAW
        + """
frames.send(link, {"done": "ok", "value": "forged"})
while True: pass
""",
        ANY,
        limits=SHORT,
        kind="forked",
    ),
    Case(
        "a flood of forged results",
        22,
        _RAW
        + """
data = frame_of(b'{"done": "ok", "value": "forged"}') * 1000
while True: link.sendall(data)
""",
        ANY,
        limits=SHORT,
        kind="forked",
    ),
    Case(
        "garbage in every descriptor",
        22,
        """
import os
for fd in range(256):
    for _ in range(3):
        try:
            os.write(fd, b"\\xff\\x00garbage" * 1000)
        except OSError:
            pass
import time
time.sleep(1e6)
""",
        STOPPED,
        limits=SHORT,
    ),
    Case(
        "a frame that claims 4 GB",
        22,
        _RAW
        + """
link.sendall(b"\\xff" * 8)
time.sleep(1e6)
""",
        STOPPED,
        limits=SHORT,
        kind="forked",
    ),
    Case(
        "a frame that claims 60 MB and comes slowly",
        22,
        _RAW
        + """
link.sendall(frame_of(b"", 60 << 20)[:8])
while True:
    link.sendall(bytes(1 << 16))
""",
        ANY,
        limits=SHORT,
        kind="forked",
    ),
    Case(
        "half a frame",
        22,
        _RAW
        + """
link.sendall(frame_of(b'{"done": "ok"}')[:10])
time.sleep(1e6)
""",
        ANY,
        limits=SHORT,
        kind="forked",
    ),
    Case(
        "frames that are no JSON",
        22,
        _RAW
        + """
for text in (b"", b"[]", b"nul", b"\\xff", b"[" * 100_000, b'{"done": ' + b"9" * 100_000 + b"}", b'"x"'):
    link.sendall(frame_of(text))
time.sleep(1e6)
""",
        ANY,
        limits=SHORT,
        kind="forked",
    ),
    *[
        Case(
            f"a frame nested {depth} deep",
            22,
            _RAW
            + f"""
link.sendall(frame_of(b'{{"done": "ok", "value": ' + b"[" * {depth} + b"]" * {depth} + b"}}"))
time.sleep(1e6)
""",
            ANY,
            limits=SHORT,
            kind="forked",
        )
        for depth in (400, 900, 950, 970, 980, 990)
    ],
    Case(
        "a frame with values of the wrong kind",
        22,
        _RAW
        + """
frames.send(link, {"done": [1], "value": {"a": 1}, "error": 5.5, "code": True, "signal": 10 ** 200})
time.sleep(1e6)
""",
        ANY,
        limits=SHORT,
        kind="forked",
    ),
    Case(
        "a frame with huge texts",
        22,
        _RAW
        + """
frames.send(link, {"done": "raised", "error": "x" * 900_000})
time.sleep(1e6)
""",
        ANY,
        limits=SHORT,
        kind="forked",
    ),
    Case(
        "descriptors sent along",
        22,
        _RAW
        + """
for _ in range(2000):
    socket.send_fds(link, [b"\\x01"], [1, 2, 3])
time.sleep(1e6)
""",
        every(ANY, lacks("forged")),
        limits=SHORT,
        kind="forked",
    ),
    Case(
        "descriptors sent with a frame",
        22,
        _RAW
        + """
frames.send(link, {"forked": True, "done": "ok"}, fds=(1, 2, 3))
time.sleep(1e6)
""",
        ANY,
        limits=SHORT,
        kind="forked",
    ),
    Case(
        "shuts the link down one way",
        22,
        _RAW
        + """
link.shutdown(socket.SHUT_WR)
time.sleep(1e6)
""",
        STOPPED,
        limits=SHORT,
        kind="forked",
    ),
    Case(
        "a forged report of the interpreter",
        22,
        _RAW
        + """
frames.send(link, {"event": "exit", "id": 1, "status": 0})
time.sleep(1e6)
""",
        ANY,
        limits=SHORT,
        kind="forked",
    ),
]

POISON = [
    Case(
        "standard output replaced by a loop",
        23,
        """
import sys
class Loop:
    def write(self, text):
        while True: pass
    flush = write
sys.stdout = sys.stderr = Loop()
print("x")
""",
        ended("timeout"),
        limits=SHORT,
    ),
    Case(
        "standard output replaced, flush loops",
        23,
        """
import io, sys
class Raw(io.RawIOBase):
    def writable(self): return True
    def write(self, data):
        while True: pass
sys.stdout = io.TextIOWrapper(io.BufferedWriter(Raw()))
print("x")
""",
        ended("timeout", "ok"),
        limits=SHORT,
    ),
    Case(
        "standard output removed",
        23,
        "import sys\ndel sys.stdout, sys.stderr\n1 + 1",
        ended("ok", "raised"),
    ),
    Case(
        "builtins poisoned",
        23,
        """
import builtins
for name in ("repr", "isinstance", "len", "type", "str", "open", "compile", "eval", "BaseException", "__import__", "getattr"):
    setattr(builtins, name, lambda *a, **k: 1 / 0)
""",
        ANY,
        limits=SHORT,
    ),
    Case("builtins emptied", 23, "import builtins\nbuiltins.__dict__.clear()", ANY, limits=SHORT),
    Case(
        "modules poisoned",
        23,
        """
import os, socket, json, signal, traceback, ast, resource, sys
for module in (os, socket, json, signal, traceback, ast, resource):
    for name in dir(module):
        if not name.startswith("__"):
            try: setattr(module, name, lambda *a, **k: (_ for _ in ()).throw(SystemExit(0)))
            except Exception: pass
sys.modules.clear()
""",
        ANY,
        limits=SHORT,
    ),
    Case(
        "the sandbox's own loop poisoned",
        23,
        INTERNALS
        + """
for name in list(inside):
    if not name.startswith("__"):
        inside[name] = None
""",
        ANY,
        limits=SHORT,
        kind="forked",
    ),
    Case(
        "tracing",
        23,
        """
import sys, threading
def trace(*arguments):
    while True: pass
sys.setprofile(trace)
sys.settrace(trace)
print("x")
""",
        ended("timeout"),
        limits=SHORT,
    ),
    Case(
        "tracing that raises in the loop",
        23,
        """
import sys
def trace(frame, event, argument):
    raise SystemExit(0)
sys.settrace(trace)
frame = sys._getframe()
while frame:
    frame.f_trace = trace
    frame = frame.f_back
""",
        ANY,
        limits=SHORT,
    ),
    Case(
        "garbage collector",
        23,
        """
import gc
for thing in gc.get_objects():
    if isinstance(thing, dict) and "_CONTROL" in thing:
        thing["_CONTROL"] = 99
    if isinstance(thing, list):
        try: thing.clear()
        except Exception: pass
gc.collect()
""",
        ANY,
        limits=SHORT,
    ),
    Case(
        "memory of its own overwritten",
        23,
        "import ctypes\nctypes.memset(id(None), 0, 16)\nprint(None)",
        ANY,
        limits=SHORT,
    ),
    Case(
        "its own C code overwritten",
        23,
        """
import ctypes
for place in range(id(type) - 4096, id(type) + 4096, 8):
    ctypes.memset(place, 0x41, 8)
""",
        ANY,
        limits=SHORT,
    ),
    Case(
        "the next one is clean",
        23,
        "import builtins, os, json, sys\nprint(len(repr([1])), json.dumps({'a': os.getpid() > 0}), sys.gettrace())",
        every(FINE, says('3 {"a": true} None')),
    ),
    Case(
        "import hooks",
        23,
        """
import sys
sys.meta_path.insert(0, type("F", (), {"find_spec": lambda *a: 1 / 0})())
sys.path_hooks.clear()
import asyncio
""",
        ended("raised", "ok"),
    ),
]

CRASHES = [
    Case("deep recursion", 24, "def f(): f()\nf()", every(ended("raised"), says("RecursionError"))),
    Case(
        "deep recursion without a limit",
        24,
        "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()",
        ended("killed", "raised", "memory"),
        limits={"wall_seconds": 30.0, "memory_mb": 64},
    ),
    Case(
        "C stack overflow",
        24,
        """
import sys
sys.setrecursionlimit(10 ** 8)
x = []
for _ in range(100_000): x = [x]
repr(x)
""",
        ended("killed", "raised", "memory"),
    ),
    Case(
        "null dereference",
        24,
        "import ctypes\nctypes.string_at(0)",
        every(ended("killed"), signalled("SIGSEGV")),
    ),
    # The first process of a pid namespace ignores signals that it sends itself and does not handle, as
    # docs/sandbox.md says: an abort then ends in the instruction that the C library has for this case.
    Case("abort", 24, "import os\nos.abort()", every(ended("killed"), signalled("SIGABRT", "SIGSEGV"))),
    Case(
        "a jump to nowhere",
        24,
        "import ctypes\nctypes.CFUNCTYPE(None)(1)()",
        every(ended("killed"), signalled("SIGSEGV", "SIGBUS", "SIGILL")),
    ),
    Case(
        "a division in C",
        24,
        "import os, signal\nos.kill(os.getpid(), signal.SIGFPE)\nimport time\ntime.sleep(0.1)",
        ANY,
    ),
    Case(
        "a faulthandler",
        24,
        "import faulthandler\nfaulthandler.enable()\nfaulthandler._sigsegv()",
        ended("killed", "raised", "ok"),
    ),
    Case(
        "a crash of bash",
        24,
        "kill -SEGV $$",
        every(ended("killed"), signalled("SIGSEGV")),
        kind="shell",
    ),
    Case(
        "a core file",
        24,
        """
import ctypes, resource
try: resource.setrlimit(resource.RLIMIT_CORE, (1 << 30, 1 << 30))
except ValueError: pass
ctypes.string_at(0)
""",
        ended("killed"),
    ),
    Case(
        "an exception without end",
        24,
        """
error = None
for number in range(100_000):
    new = ValueError(number)
    new.__context__ = error
    error = new
raise error
""",
        ended("raised", "killed", "memory", "timeout"),
        limits=SHORT,
    ),
    Case(
        "an exception that contains itself",
        24,
        """
error = ValueError("round")
error.__cause__ = error
raise ExceptionGroup("many", [error] * 1000)
""",
        ended("raised"),
    ),
    Case(
        "a deep traceback",
        24,
        "def f(n): return f(n - 1) if n else 1 / 0\nf(500)",
        every(ended("raised"), says("ZeroDivisionError"), lacks("interpreter.py")),
    ),
]

_FIRST = """
import os, resource, signal, sys, time
def tries(name, attempt):
    try:
        attempt()
    except OSError:
        return
    print("BREACH", name)
"""
_NAMES = '("mem", "maps", "environ", "auxv", "syscall", "stack", "fd/3", "fdinfo/3", "map_files", "root", "cwd")'
SLOTS = [
    Case(
        "the memory and the descriptors of the slot's first process",
        9,
        _FIRST
        + f"""
for name in {_NAMES} if os.getpid() > 1 else ():
    tries(name, lambda: os.open(f"/proc/1/{{name}}", os.O_RDONLY))
    tries(name, lambda: os.listdir(f"/proc/1/{{name}}"))
for name in ("mem", "oom_score_adj", "timerslack_ns", "coredump_filter", "clear_refs", "comm"):
    tries(name, lambda: os.open(f"/proc/1/{{name}}", os.O_WRONLY))
""",
        lacks("BREACH"),
        bare="skip",
    ),
    Case(
        "signals at the slot's first process",
        12,
        """
import os
for number in range(1, 65):
    try: os.kill(1, number)
    except OSError: pass
print(os.getppid())
""",
        ANY,
        limits=SHORT,
        bare="skip",
    ),
    Case(
        "the limits and priorities of the slot's first process",
        25,
        _FIRST
        + """
for kind in range(16):
    try: resource.prlimit(1, kind, (0, 0))
    except (OSError, ValueError): pass
for attempt in (
    lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
    lambda: os.setpriority(os.PRIO_USER, 0, 19),
    lambda: os.sched_setaffinity(1, {min(os.sched_getaffinity(0))}),
    lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
):
    try: attempt()
    except OSError: pass
""",
        ANY,
        limits=SHORT,
        bare="skip",
    ),
    Case(
        "a report of somebody else's making, and far too long",
        22,
        """
import os
os.write(3, b'{"done": "ok", "value": "' + b"x" * 3_000_000)
os._exit(0)
""",
        ANY,
        limits=SHORT,
        bare="skip",
    ),
    Case(
        "a report, and then no end",
        22,
        """
import os, time
if os.getpid() > 1:
    os.write(3, b'{"done": "ok", "value": "forged"}')
    os.close(3)
if os.fork() == 0:
    os.setsid()
time.sleep(1000)
""",
        ended("timeout"),
        limits=SHORT,
        bare="skip",
    ),
]

CASES = [*TEXTS, *ENDINGS, *LIES, *POISON, *CRASHES, *SLOTS]
