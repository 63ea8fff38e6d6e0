"""Runs in a container: keeps one interpreter, and runs the statements that come on its standard input.

A request is a line of JSON: code, stdin, cpu_seconds and a mark that only the host knows. The report is written
after the mark on stdout; the mark on stderr says that nothing more comes there.
"""

from __future__ import annotations

import json
import os
import tempfile

from ludus.sandbox.guest.interpreter import Interpreter


def serve() -> None:
    """Answer requests until standard input ends."""
    requests = os.fdopen(os.dup(0), "rb")
    out, err = os.dup(1), os.dup(2)
    interpreter = Interpreter()
    os.write(out, f"{os.getpid()}\n".encode())
    for line in requests:
        asked = json.loads(line)
        with tempfile.TemporaryFile() as given:
            given.write(asked["stdin"].encode("utf-8", "surrogatepass"))
            given.seek(0)
            os.dup2(given.fileno(), 0)
        interpreter.fresh_input()
        said = interpreter.run(asked["code"], asked["cpu_seconds"])
        _write(out, f"{asked['mark']}{json.dumps(said)}\n")
        _write(err, f"{asked['mark']}\n")


def _write(fd: int, text: str) -> None:
    data = text.encode("utf-8", "backslashreplace")
    while data:
        data = data[os.write(fd, data) :]
