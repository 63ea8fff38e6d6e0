"""What callers give to a session, as the bytes and descriptors that go inside."""

from __future__ import annotations

import fcntl
import os

_MOST_SOURCE = 4 << 20
_ADD_SEALS, _ALL_SEALS = 1033, 0x000F


def source(code: str) -> bytes:
    """Python code, if it is a text of a reasonable size."""
    if not isinstance(code, str):
        raise TypeError(f"code is a text, not {type(code).__name__}")
    data = text(code)
    if len(data) > _MOST_SOURCE:
        raise ValueError(f"the code has {len(data):,} bytes; {_MOST_SOURCE:,} are accepted")
    return data


def text(given: str) -> bytes:
    """Bytes for text that may hold what UTF-8 cannot carry."""
    return given.encode("utf-8", "surrogatepass")


def argument(word: str) -> bytes:
    """A word of a command line, which cannot hold everything that a text can."""
    return word.replace("\0", "\\0").encode("utf-8", "backslashreplace")


def standard_input(given: str) -> int | None:
    """Standard input as a file in memory that cannot be changed; None for none."""
    if not given:
        return None
    data = text(given)
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, _ADD_SEALS, _ALL_SEALS)
    return fd
