"""Errors of user code (tools, rewards, environments, agents, experts): location, kind, logging.

A recorded error has its file and line. The first error from a location is logged with its traceback; after that
it is counted, and logged in one line at the 10th time, the 100th, and so on.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_BUGS = (NameError, ImportError)
"""Errors that no argument causes: a name or a module that the code lacks."""
_SUSPECTS = (
    *_BUGS,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    StopIteration,
    TypeError,
)
"""Errors that Python raises by itself, for a mistake in the code or for unusable arguments."""
_PACKAGE = str(Path(__file__).resolve().parent.parent) + os.sep
_LIBRARIES = tuple(
    {
        str(Path(path).resolve()) + os.sep
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        if (path := sysconfig.get_paths().get(name))
    }
)
_MOST_CHARS = 500
_MOST_TRACEBACK_CHARS = 6_000
_MOST_PLACES = 1_000


@dataclass(frozen=True, slots=True)
class UserError:
    """An error of user code as data: it can be sent from another process, which a traceback cannot."""

    kind: str
    """The name of its class."""
    text: str
    """Its kind and its message, in one bounded line."""
    place: str | None
    """Where user code raised it: file:line in function."""
    trace: str
    is_bug: bool
    """Whether user code, or Ludus, lacks a name or a module."""
    is_suspect: bool
    """Whether it may be a mistake in the code that raised it: Python raises errors of its kind by itself."""

    @classmethod
    def of(cls, error: BaseException) -> UserError:
        last = error.__traceback__
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        file = "" if last is None else last.tb_frame.f_code.co_filename
        # what a library raises, or text that is run (eval, exec), depends on what it was given
        is_of_code = _is_ours(file) or (last is not None and _is_own(file))
        return cls(
            type(error).__name__,
            error_text(error),
            error_location(error),
            traceback_text(error),
            is_of_code and isinstance(error, _BUGS),
            is_of_code and isinstance(error, _SUSPECTS),
        )

    def __str__(self) -> str:
        return self.text if self.place is None else f"{self.text} ({self.place})"


def error_text(error: BaseException) -> str:
    """An error in one bounded line: its kind and its message."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - its own __str__ is broken
        text = ""
    name = type(error).__name__
    return (f"{name}: {text}" if text else name)[:_MOST_CHARS]


def error_with_location(error: BaseException) -> str:
    """`error_text` with file and line: "KeyError: 'missing' (shop.py:41 in reset)"."""
    place = error_location(error)
    return error_text(error) if place is None else f"{error_text(error)} ({place})"


def error_location(error: BaseException) -> str | None:
    """The innermost frame of user code; of a library, where there is none; else None."""
    frames = [
        (f, line)
        for f, line in traceback.walk_tb(error.__traceback__)
        if not _is_ours(f.f_code.co_filename)
    ]
    own = [(frame, line) for frame, line in frames if _is_own(frame.f_code.co_filename)]
    if not frames:
        return None
    frame, line = (own or frames)[-1]
    return f"{_short(frame.f_code.co_filename)}:{line} in {frame.f_code.co_name}"


def defined_at(function: Callable[..., Any]) -> str | None:
    """Where user code defines a function: file:line in function. None for Ludus and for builtins."""
    code = _code_of(function)
    if code is None or _is_ours(code.co_filename):
        return None
    return f"{_short(code.co_filename)}:{code.co_firstlineno} in {code.co_name}"


def _code_of(function: Callable[..., Any]) -> CodeType | None:
    while isinstance(function, functools.partial):
        function = function.func
    found: CodeType | None = getattr(inspect.unwrap(function), "__code__", None)
    return found


_installed: set[str] = set()
"""Files and folders among the libraries that are user code all the same: packages with tools."""


def register_user_code(function: Callable[..., Any]) -> None:
    """The package of this function is user code, even where it is installed among libraries."""
    code = _code_of(function)
    if code is None or not {"site-packages", "dist-packages"} & set(Path(code.co_filename).parts):
        return
    if _is_ours(code.co_filename):
        return
    root = Path(code.co_filename)
    while (root.parent / "__init__.py").is_file():
        root = root.parent
    _installed.add(str(root) if root.suffix == ".py" else str(root) + os.sep)


def traceback_text(error: BaseException) -> str:
    """The traceback from the first frame of user code on; frames of Ludus above it are left out."""
    first = error.__traceback__
    while first is not None and _is_ours(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    lines = traceback.format_exception(type(error), error, first or error.__traceback__)
    return "".join(lines)[-_MOST_TRACEBACK_CHARS:].rstrip()


_lock = threading.Lock()
_counts: dict[tuple[str, str], int] = {}


def log_once(log: logging.Logger, what: str, error: BaseException | UserError) -> None:
    """Warn of an error of user code, with its traceback the first time that it comes from its place.

    `what` says what failed, such as "the reward 'success'".
    """
    found = error if isinstance(error, UserError) else UserError.of(error)
    # by its place, because messages may differ with every episode
    key = (what, f"{found.kind} {found.place}" if found.place else found.text)
    with _lock:
        if key not in _counts and len(_counts) >= _MOST_PLACES:
            _counts.clear()
        _counts[key] = count = _counts.get(key, 0) + 1
    if count == 1:
        log.warning("%s raised %s\n%s", what, found, found.trace)
    elif count in (10, 100, 1_000, 10_000, 100_000):
        log.warning("%s raised %s, %d times so far", what, found, count)


def reset_error_counts() -> None:
    """Show every traceback anew."""
    with _lock:
        _counts.clear()


def pending_locations() -> list[str]:
    """Where in user code the coroutines of this event loop are waiting: file:line in function."""
    import asyncio  # not above: this file is read by processes that do without

    found: list[str] = []
    for task in asyncio.all_tasks():
        coroutine: Any = task.get_coro()
        own: FrameType | None = None
        while coroutine is not None:
            frame = getattr(coroutine, "cr_frame", None)
            own = frame if frame is not None and _is_own(frame.f_code.co_filename) else own
            coroutine = getattr(coroutine, "cr_await", None)
        if own is not None:
            found.append(f"{_short(own.f_code.co_filename)}:{own.f_lineno} in {own.f_code.co_name}")
    return list(dict.fromkeys(found))


def thread_location(ident: int | None) -> str | None:
    """Where in user code a thread is: file:line in function; None where it is in none."""
    frame = sys._current_frames().get(ident or 0)
    while frame is not None and not _is_own(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None
    return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_ours(file: str) -> bool:
    return file.startswith(_PACKAGE)


def _is_own(file: str) -> bool:
    """Whether a file is user code: not of Ludus or a library, or of an installed package with tools."""
    if file.startswith(tuple(_installed)):
        return True
    if file.startswith("<") or _is_ours(file) or file.startswith(_LIBRARIES):
        return False
    return "site-packages" not in file and "dist-packages" not in file


def _short(file: str) -> str:
    """The file as people would name it: relative to where they stand, if it is below."""
    try:
        return str(Path(file).resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file
