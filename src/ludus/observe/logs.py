"""Logging: all to the run's log file, warnings to the console. Only the `ludus` logger is touched."""

from __future__ import annotations

import logging
import re
import sys
from contextlib import ExitStack

from ludus.observe.run import RunFolder

_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters, what turns the direction of text around, and halves of surrogate pairs."""
_CONSOLE_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


def printable(text: str) -> str:
    """The text with what a terminal would obey, or could not encode, shown as `\\x1b` or `\\ud800`."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def setup_logging(run: RunFolder | None = None, verbosity: int = 0) -> ExitStack:
    """Log to the run's file, and to the console: warnings at verbosity 0, information at 1, all at 2.

    Returns what undoes it: use it in `with`, or call its `close`.
    """
    undo = ExitStack()
    logger = logging.getLogger("ludus")
    level = _CONSOLE_LEVELS[max(0, min(verbosity, 2))]
    console = _ConsoleHandler(level)
    console.setFormatter(_PrintableFormatter("%(levelname)s %(name)s: %(message)s"))
    _attach(logger, console, undo)
    lowest = level
    if run is not None:
        run.log_path.parent.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(run.log_path, encoding="utf-8", errors="backslashreplace")
        file.setLevel(min(level, logging.INFO))
        file.setFormatter(_PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        _attach(logger, file, undo)
        lowest = min(level, logging.INFO)
    undo.callback(logger.setLevel, logger.level)
    logger.setLevel(lowest)
    undo.callback(setattr, logger, "propagate", logger.propagate)
    logger.propagate = False
    return undo


def _attach(logger: logging.Logger, handler: logging.Handler, undo: ExitStack) -> None:
    logger.addHandler(handler)
    undo.callback(handler.close)
    undo.callback(logger.removeHandler, handler)


class _PrintableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _ConsoleHandler(logging.Handler):
    """Looks up `sys.stderr` for each record: a live display replaces it while it is on the screen."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
            sys.stderr.write(text.encode(encoding, errors="backslashreplace").decode(encoding) + "\n")
        except Exception:  # noqa: BLE001 - logging's contract: report through handleError, never raise
            self.handleError(record)
