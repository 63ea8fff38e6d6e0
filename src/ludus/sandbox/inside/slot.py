"""A slot: one prepared set of namespaces in which one-shot programs run, one after the other.

Setting up namespaces, mounts, limits and filters costs several times what a short program costs. So a slot's
first process does it once, and forks a process for every program. That process adds what must be its own (a
Landlock domain, a session, a processor limit) and runs the program. When it has ended, everything that it left
behind is killed, and the slot is compared with what it was before: files, limits, priorities. Any difference
ends the slot, and the host makes another; only a slot that is proven unchanged is used again.

The first process is what every program is forked from, so whatever it holds in memory the next program can
read. It therefore never sees a program's bytes: the forked process reads the request from the host's socket,
and reports through a pipe of its own that the host sent along.

What keeps a program from the slot's first process: it is pid 1 of the pid namespace (no signal from inside
reaches it), it is not dumpable (its memory and descriptors under /proc are closed), it lies outside the
program's Landlock domain, and what can be done to it by number alone (limits, priorities) is compared.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import resource
import signal
import socket
import struct
import sys

from ludus.sandbox.inside import filesystem, frames, kernel, landlock
from ludus.sandbox.inside.interpreter import OUT_OF_MEMORY, Interpreter

CONTROL, RULESET = 3, 4
"""Where the socket to the host lies, and the Landlock ruleset that programs enforce on themselves."""
MOST_REPORT = 1 << 20
"""Bytes that a program's report may have; anything longer was not written by our own code."""
_ANSWER = b'{"status":%d,"cpu":%f,"peak_kb":%d,"total_cpu":%f,"began":%d,"clean":%d}'
_NOTHING_TO_SAY = b'{"done": "ok", "value": null}'
_CHUNK, _ROOM_FOR_FDS = 4096, socket.CMSG_SPACE(4 * 4)
_CLOEXEC = int(socket.MSG_CMSG_CLOEXEC)
_SIZES = struct.Struct("<II")
_DESCRIPTORS = {4 * count: struct.Struct(f"{count}i") for count in (3, 4)}
_LIMITS = tuple({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})
State = tuple[object, ...]


def serve(link: socket.socket, has_ruleset: bool, cpu_seconds: float) -> None:
    """Run what the host sends, each program in a process of its own, until the slot is not as it was."""
    interpreter = Interpreter()
    began = mmap.mmap(-1, mmap.PAGESIZE)
    """Shared with the program's process until the program begins: whether it ever did."""
    child = 0

    def interrupt(number: int, frame: object) -> None:  # the host's deadline; here, and then in the fork
        if child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)
        else:
            interpreter.interrupt(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    gc.disable()  # until a program begins
    gc.freeze()
    before = _state()
    frames.send(link, {"state": "ready"})
    while True:
        # After a fork every page that we write faults once more: so this loop does as little as it can.
        if not link.recv(1, socket.MSG_PEEK):
            raise EOFError
        began[0] = 0
        child = os.fork()
        if not child:
            _execute(interpreter, link, began, has_ruleset, cpu_seconds)
        ended = os.wait4(child, 0)
        child = 0
        # one that never began may have left a part of its request in the socket
        is_clean = bool(began[0]) and _all_ended() and _is_unchanged(before)
        _answer(link, ended, began[0], is_clean)
        del ended  # the next program can look at these variables
        if not is_clean:
            return


def _answer(
    link: socket.socket, ended: tuple[int, int, resource.struct_rusage], began: int, is_clean: bool
) -> None:
    _, status, usage = ended
    cpu, total = usage.ru_utime + usage.ru_stime, sum(os.times()[:4])
    text = _ANSWER % (status, cpu, usage.ru_maxrss, total, began, is_clean)
    link.sendall(len(text).to_bytes(4, "little") + bytes(4) + text)


def _execute(
    interpreter: Interpreter,
    link: socket.socket,
    began: mmap.mmap,
    has_ruleset: bool,
    cpu_seconds: float,
) -> None:
    """The life of one program; does not return."""
    code = 1
    try:
        source, fds = _request(link)
        has_input = len(fds) > 3
        if not has_input:
            # not the slot's own: locks and flags on an open file would stay for the next program
            fds.append(os.open("/dev/null", os.O_RDONLY))
        for target, fd in zip((CONTROL, 1, 2, 0), fds, strict=True):
            os.dup2(fd, target, inheritable=target != CONTROL)  # the pipe takes the socket's place
        if has_ruleset:
            landlock.enforce(RULESET)
        os.closerange(CONTROL + 1, 1 << 20)
        kernel.set_dumpable()
        os.setsid()
        most = int(cpu_seconds + 1)  # of which it has used nothing yet
        resource.setrlimit(resource.RLIMIT_CPU, (most, most + 1))
        if has_input:
            interpreter.fresh_input()
        new_dice()
        gc.enable()
        began[0] = 1
        began.close()
        _say(interpreter.run(source.decode("utf-8", "surrogatepass")))
        code = 0
    except MemoryError:
        code = OUT_OF_MEMORY
    except BaseException as error:  # noqa: BLE001 - the last thing this process says
        with contextlib.suppress(BaseException):
            _say({"broken": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(code)


def _request(link: socket.socket) -> tuple[bytes, list[int]]:
    """The program and its descriptors. Of the header nothing is needed, so nobody parses it."""
    data, ((_, _, raw),), _, _ = link.recvmsg(_CHUNK, _ROOM_FOR_FDS, _CLOEXEC)
    header, body = _SIZES.unpack_from(data)
    end = frames.PREFIX + header + body
    while len(data) < end:
        more = link.recv(min(end - len(data), 1 << 20))
        if not more:
            raise EOFError
        data += more
    return data[end - body :], list(_DESCRIPTORS[len(raw)].unpack(raw))


def _say(report: frames.Header) -> None:
    is_plain = report.get("done") == "ok" and report["value"] is None
    data = _NOTHING_TO_SAY if is_plain else json.dumps(report).encode()
    while data:
        data = data[os.write(CONTROL, data) :]


def _all_ended() -> bool:
    """Kill and collect everything else in the pid namespace; whether nothing is left."""
    while True:
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            return True
        try:
            while True:
                os.waitpid(-1, 0)
        except ChildProcessError:
            pass


def _is_unchanged(before: State) -> bool:
    """Whether the slot is as it was. Where that cannot even be looked at, a program has seen to it."""
    try:
        return _state() == before
    except Exception:  # noqa: BLE001 - a folder that is gone, a limit that leaves us no descriptor
        return False


def _state() -> State:
    """Everything that a program could have changed and that the next one could see or suffer from."""
    return (
        tuple(map(resource.getrlimit, _LIMITS)),
        os.sched_getaffinity(0),
        kernel.scheduling(),
        *filesystem.box_state(),
    )


def new_dice() -> None:
    """Random numbers of its own; the standard generator is reseeded by the fork itself."""
    numbers = sys.modules.get("numpy.random")
    if numbers is not None:
        numbers.seed()
