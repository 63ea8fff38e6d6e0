"""Files that users write, as text and JSON: what is wrong is one `ConfigError` with file, line and fix.

Editors and exports leave byte-order marks, other encodings and null bytes; paths lead to folders, pipes and
loops of links. JSON is read strictly: a key that comes twice, a number that is not finite and nesting without
end would be found later, when the line that they come from is unknown.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError, not_there
from ludus.core.strict_json import strict_decoder

_DECODER = strict_decoder()


def file_problem(path: str | Path, *, beside_recipe: bool = True) -> str | None:
    """Why there is no regular file that can be read; None where there is one."""
    shown = str(path)
    try:
        mode = Path(path).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if Path(path).is_symlink():
            return f"{shown} is a link to {Path(path).readlink()}, which is not there"
        return not_there(path, beside_recipe=beside_recipe)
    except OSError as error:
        return f"{shown} cannot be read: {error.strerror or error}"
    except ValueError as error:  # a null byte
        return f"{shown!r} is no path: {error}"
    if stat.S_ISDIR(mode):
        return f"{shown} is a folder, and a file is expected"
    if not stat.S_ISREG(mode):  # opening a pipe waits for its writer
        return f"{shown} is a pipe or a device: write its content to a file"
    if not os.access(path, os.R_OK):
        return f"{shown} cannot be read: you have no permission to (chmod u+r)"
    return None


def read_user_text(path: str | Path, *, beside_recipe: bool = True) -> str:
    """The text of a file in UTF-8, with or without a byte-order mark."""
    if (problem := file_problem(path, beside_recipe=beside_recipe)) is not None:
        raise ConfigError(problem)
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    return decode_user_text(data, str(path))


def decode_user_text(data: bytes, where: str, first: int = 1) -> str:
    """The text of these bytes in UTF-8, with plain line ends; they begin with the file's line `first`."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise ConfigError(f"{where} is in UTF-16, and is read as UTF-8: save it as UTF-8")

    def line_of(place: int) -> int:
        return first + data.count(b"\n", 0, place)

    if (null := data.find(b"\0")) >= 0:
        raise ConfigError(
            f"{where}, line {line_of(null)}, has a null byte: it is no text, or was damaged; save it as UTF-8"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        wrong = f"is not in UTF-8 (byte 0x{data[error.start]:02x})"
        raise ConfigError(
            f"{where}, line {line_of(error.start)}, {wrong}: save it as UTF-8, for instance by "
            "iconv -f latin1 -t utf-8"
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def parse_user_json(text: str, where: str) -> Any:
    """The value of a JSON text; the error begins with `where`."""
    try:
        return _DECODER.decode(text)
    except JSONDecodeError as error:
        at = (
            f"line {error.lineno}, column {error.colno}"
            if "\n" in text.strip()
            else f"column {error.colno}"
        )
        raise ConfigError(f"{where} is not JSON: {error.msg} at {at}") from None
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON that is read: {error!s:.300}") from None
    except RecursionError:
        raise ConfigError(f"{where} is not JSON that is read: it is nested too deeply") from None


def read_user_json(path: str | Path, *, beside_recipe: bool = True) -> Any:
    """The value of a JSON file."""
    return parse_user_json(read_user_text(path, beside_recipe=beside_recipe), str(path))


def json_lines(text: str, name: str) -> Iterator[tuple[str, Any]]:
    """The values of JSON lines, each with where it stands; empty lines are left out."""
    # not `splitlines`, which also splits at characters that a text in JSON may hold (U+2028, U+0085)
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{name}, line {number}"
            yield where, parse_user_json(line, f"{where},")
