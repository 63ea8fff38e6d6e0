"""The command line as a process of its own, in which Ctrl-C works."""

from __future__ import annotations

# A background job of a shell begins with SIGINT ignored and hands that on: no Ctrl-C would reach the command.
PROGRAM = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from ludus.cli.main import run; run()"
)
