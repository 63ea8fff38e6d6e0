"""A slot: prepared namespaces in which one-shot programs run, one after the other.

Setting up namespaces, mounts, limits and filters costs several times what a short program costs. So a slot's
first process does it once, and forks a process for every program. The forked process adds what must be its own
(a Landlock domain, a POSIX session, a CPU limit) and runs the program. When it has ended, everything that it
left running is killed, and the slot's files, limits and priorities are compared with their state before. Any
difference ends the slot, and the host starts another; only a slot that is proven unchanged is used again.

Every program is forked from the first process, so the next program can read whatever that holds in memory. It
therefore never sees a program's bytes: the forked process reads the request from the host's socket, and reports
through its own pipe, which the host sent along.

What protects the first process from a program: it is pid 1 of the pid namespace (no signal from inside reaches
it), it is not dumpable (its memory and descriptors under /proc are closed), it lies outside the program's
Landlock domain, and what can be done to it by pid alone (limits, priorities) is compared.
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

from ludus.sandbox.guest import filesystem, frames, kernel
from ludus.sandbox.guest.confinement import CONTROL, RULESET, reseed_numpy
from ludus.sandbox.guest.interpreter import Interpreter

_ANSWER = b'{"status":%d,"cpu":%f,"peak_kb":%d,"total_cpu":%f,"began":%d,"clean":%d}'
_PLAIN_REPORT = b'{"done": "ok", "value": null}'
_CHUNK, _ROOM_FOR_FDS = 4096, socket.CMSG_SPACE(4 * 4)
_CLOEXEC = int(socket.MSG_CMSG_CLOEXEC)
_SIZES = struct.Struct("<II")
_DESCRIPTORS = {4 * count: struct.Struct(f"{count}i") for count in (3, 4)}
_LIMITS = tuple({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})
State = tuple[object, ...]


def serve(link: socket.socket, has_ruleset: bool, cpu_seconds: float) -> None:
    """Run the host's programs, each in its own process, until one leaves the slot changed."""
    interpreter = Interpreter()
    began = mmap.mmap(-1, mmap.PAGESIZE)
    """Memory shared with the forked process until its program begins: whether it ever did."""
    child = 0

    def interrupt(number: int, frame: object) -> None:  # the host's deadline
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
        # After a fork every page written here faults once more (copy on write), so this loop does little.
        if not link.recv(1, socket.MSG_PEEK):
            raise EOFError
        began[0] = 0
        child = os.fork()
        if not child:
            _execute(interpreter, link, began, has_ruleset, cpu_seconds)
        ended = os.wait4(child, 0)
        child = 0
        # a program that never began may have left part of its request in the socket
        is_clean = bool(began[0]) and _all_ended() and _is_unchanged(before)
        _send_result(link, ended, began[0], is_clean)
        del ended  # the next program is forked from here and can read these variables
        if not is_clean:
            return


def _send_result(
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
    """In the forked process: run one program; does not return."""
    code = 1
    try:
        source, fds = _receive(link)
        has_input = len(fds) > 3
        if not has_input:
            # a fresh one: locks and flags on the slot's own open file would stay for the next program
            fds.append(os.open("/dev/null", os.O_RDONLY))
        for target, fd in zip((CONTROL, 1, 2, 0), fds, strict=True):
            os.dup2(fd, target, inheritable=target != CONTROL)  # the pipe takes the socket's place
        if has_ruleset:
            kernel.landlock_enforce(RULESET)
        os.closerange(CONTROL + 1, 1 << 20)
        kernel.set_dumpable()
        os.setsid()
        most = int(cpu_seconds + 1)  # of which it has used nothing yet
        resource.setrlimit(resource.RLIMIT_CPU, (most, most + 1))
        if has_input:
            interpreter.fresh_input()
        reseed_numpy()
        gc.enable()
        began[0] = 1
        began.close()
        _report(interpreter.run(source.decode("utf-8", "surrogatepass")))
        code = 0
    except MemoryError:
        code = frames.OUT_OF_MEMORY
    except BaseException as error:  # noqa: BLE001 - the last thing this process says
        with contextlib.suppress(BaseException):
            _report({"broken": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(code)


def _receive(link: socket.socket) -> tuple[bytes, list[int]]:
    """The program and its descriptors. The header is not needed and not parsed."""
    data, ((_, _, raw),), _, _ = link.recvmsg(_CHUNK, _ROOM_FOR_FDS, _CLOEXEC)
    header, body = _SIZES.unpack_from(data)
    end = frames.PREFIX + header + body
    while len(data) < end:
        more = link.recv(min(end - len(data), 1 << 20))
        if not more:
            raise EOFError
        data += more
    return data[end - body :], list(_DESCRIPTORS[len(raw)].unpack(raw))


def _report(report: frames.Header) -> None:
    is_plain = report.get("done") == "ok" and report["value"] is None
    data = _PLAIN_REPORT if is_plain else json.dumps(report).encode()
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
    """Whether the slot is as before. If that cannot be checked, a program has caused it: False."""
    try:
        return _state() == before
    except Exception:  # noqa: BLE001 - a folder that is gone, a limit that leaves us no descriptor
        return False


def _state() -> State:
    """Everything that a program could change and that could affect the next one."""
    return (
        tuple(map(resource.getrlimit, _LIMITS)),
        os.sched_getaffinity(0),
        kernel.scheduling(),
        *filesystem.box_state(),
    )
