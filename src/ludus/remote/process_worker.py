"""The program of a worker process: reads calls from a socket, runs them, writes what they gave.

It is started as a script and imports the standard library only, so that a worker is up in a few
hundredths of a second; what a call needs is imported when the call is read. It ends, with everything it
started, when its parent does: the kernel watches a pipe that only the parent holds open and kills the
process group, even while some C code holds the interpreter; where the kernel cannot, a thread does.

The frames: an 8-byte length, then a pickle. In: the parent's `sys.path` first, then (files, call) each
time. Out: "started" when the call is read and its imports are done, then ("value", result) or
("error", exception) or ("lost", text) for what cannot be pickled; before it ("logged", values), where the call
used `ludus.log`.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import importlib.util
import io
import os
import pickle
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

_LENGTH = struct.Struct("!Q")

is_worker = False
"""Whether this process is a worker."""
is_reading = False
"""Whether this is a worker that imports what a call needs, which must not start workers of its own."""


def send(connection: socket.socket, data: bytes) -> None:
    """Write one frame."""
    connection.sendall(_LENGTH.pack(len(data)))
    connection.sendall(data)


def receive(connection: socket.socket) -> bytes:
    """Read one frame; `EOFError` when the other side is gone."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return bytes(_exactly(connection, length))


def _exactly(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = connection.recv_into(view)
        if not got:
            raise EOFError("the other side closed the connection")
        view = view[got:]
    return data


class _CallReader(pickle.Unpickler):
    """Finds modules as the parent had them: by name, else by the file they were loaded from."""

    main_loaded = False

    def __init__(self, data: bytes, files: dict[str, str]) -> None:
        super().__init__(io.BytesIO(data))
        self._files = files

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__" or module not in sys.modules:
            self._load(module)
        return super().find_class(module, name)

    def _load(self, module: str) -> None:
        file = self._files.get(module)
        if module == "__main__":
            if file and not _CallReader.main_loaded:
                # As multiprocessing does: the script under another name, so that its guard holds.
                sys.modules["__main__"] = _load_file("__mp_main__", file)
                _CallReader.main_loaded = True
            return
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            if not file:
                raise
            _load_file(module, file)


def _load_file(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"{file} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class _CallWriter(pickle.Pickler):
    """Notes the modules a call refers to, so that a worker can find those that no import path has."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.modules: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        module = getattr(obj, "__module__", None)
        if isinstance(module, str):
            self.modules.add(module)
        return NotImplemented


def pack_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """A call as the parent sends it; `TypeError` when it cannot be pickled."""
    buffer = io.BytesIO()
    writer = _CallWriter(buffer)
    try:
        writer.dump((function, args, kwargs))
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(
            f"{name} and its arguments must be picklable to run in a process (functions at the top of "
            f"a module and plain data are): {error}"
        ) from error
    files: dict[str, str] = {}
    for name in writer.modules:
        file = getattr(sys.modules.get(name), "__file__", None)
        if isinstance(file, str):
            files[name] = os.path.abspath(file)  # noqa: PTH100 - a path for another process
    if "__main__" in files:
        sys.modules.setdefault("__mp_main__", sys.modules["__main__"])  # what comes back refers to it
    return pickle.dumps((files, buffer.getvalue()))


def kill_group_at_end_of(lifeline: int, group: int) -> None:
    """Have the kernel kill a process group when the other end of `lifeline`, a pipe, is closed. Linux only.

    It does so as long as any process holds this end, whichever it is.
    """
    if hasattr(fcntl, "F_SETSIG"):
        with contextlib.suppress(OSError):
            fcntl.fcntl(lifeline, fcntl.F_SETOWN, -group)
            fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
            flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
            fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)


def end_with_parent(lifeline: int) -> None:
    """End this process group when the other end of `lifeline`, a pipe that the parent holds, is closed."""
    kill_group_at_end_of(lifeline, os.getpgrp())

    def watch() -> None:
        os.read(lifeline, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _answer(data: bytes, connection: socket.socket) -> bytes:
    global is_reading
    is_reading = True
    try:
        files, call = pickle.loads(data)
        function, args, kwargs = _CallReader(call, files).load()
    except BaseException as error:  # noqa: BLE001 - reported, and the worker lives on
        return pickle.dumps(("lost", f"the call could not be read: {type(error).__name__}: {error}"))
    finally:
        is_reading = False
    send(connection, pickle.dumps("started"))
    try:
        answer = pickle.dumps(("value", function(*args, **kwargs)))
    except BaseException as error:  # noqa: BLE001 - whatever it raised belongs to the caller
        answer = _pack_error(error)
    user_log = sys.modules.get("ludus.remote.user_log")  # there, if the call has logged a number
    if user_log is not None and (values := user_log.swap()):
        send(connection, pickle.dumps(("logged", values)))
    return answer


def _pack_error(error: BaseException) -> bytes:
    error.__traceback__ = error.__cause__ = error.__context__ = None
    try:
        data = pickle.dumps(("error", error))
        pickle.loads(data)  # exceptions with arguments of their own often pickle and do not unpickle
    except Exception:  # noqa: BLE001 - then its text is what can travel
        return pickle.dumps(("lost", f"{type(error).__name__}: {error}"))
    return data


def main() -> None:
    """Serve calls until the parent closes the connection."""
    # An import of this module in here gives this one, and not a second one that reads nothing.
    sys.modules["ludus.remote.process_worker"] = sys.modules["__main__"]
    global is_worker
    is_worker = True
    connection = socket.socket(fileno=int(sys.argv[1]))
    end_with_parent(int(sys.argv[2]))
    sys.path[:] = pickle.loads(receive(connection))
    while True:
        try:
            data = receive(connection)
        except (EOFError, ConnectionError):
            return
        send(connection, _answer(data, connection))


if __name__ == "__main__":
    main()
