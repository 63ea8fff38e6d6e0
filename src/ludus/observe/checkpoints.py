"""Checkpoints: folders `step-000012` that are complete whenever they are visible.

Each holds a `manifest.json` with the size and the CRC-32 of every other file. The atomic rename is what
makes a checkpoint complete; the manifest shows what happened to it since: a copy that stopped half-way,
a disk that lost blocks.
"""

from __future__ import annotations

import json
import logging
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ludus.core.messages import Json
from ludus.observe.files import atomic_directory, read_regular, remove_directory

MANIFEST = "manifest.json"
_CHANGEABLE = ("adapter_config.json", "base.json")
"""Files that say where an adapter's base is and what it was, which a person may have to change: not proven."""
_NAME = re.compile(r"step-(\d{6,})")
_CHUNK = 1 << 22
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class Checkpoint:
    """A complete checkpoint in a folder of checkpoints."""

    step: int
    path: Path


@contextmanager
def new_checkpoint(folder: Path, step: int) -> Iterator[Path]:
    """A folder to write the files of a checkpoint to; it appears, whole, when the block ends.

    A damaged checkpoint of that step is replaced; a good one is refused.
    """
    if step < 0:
        raise ValueError(f"a step is 0 or more, not {step}")
    target = folder / f"step-{step:06d}"
    if target.is_dir() and (problems := checkpoint_problems(target)):
        _log.warning("the damaged checkpoint %s is replaced: %s", target, problems[0])
        remove_directory(target)
    with atomic_directory(target) as temporary:
        yield temporary
        files = {
            str(file.relative_to(temporary)): {"bytes": file.stat().st_size, "crc32": _crc32(file)}
            for file in sorted(temporary.rglob("*"))
            if file.is_file()
        }
        (temporary / MANIFEST).write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """The checkpoints in `folder`, the oldest first. Damaged ones are left out, with a warning."""
    good: list[Checkpoint] = []
    for checkpoint in _named(folder):
        if problems := checkpoint_problems(checkpoint.path):
            _log.warning("the checkpoint %s is left out: %s", checkpoint.path, problems[0])
        else:
            good.append(checkpoint)
    return good


def remove_checkpoints_after(folder: Path, step: int) -> list[Checkpoint]:
    """Remove the checkpoints, damaged or not, of later steps, and say which."""
    removed = [checkpoint for checkpoint in _named(folder) if checkpoint.step > step]
    for checkpoint in removed:
        remove_directory(checkpoint.path)
    return removed


def checkpoint_problems(checkpoint: Path, *, thorough: bool = False) -> list[str]:
    """Problems of a checkpoint: files missing or of another size; with `thorough`, also other content."""
    try:
        files: dict[str, Json] = json.loads(read_regular(checkpoint / MANIFEST))["files"]
    except FileNotFoundError:
        return [f"it has no {MANIFEST}"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"its {MANIFEST} cannot be read: {error}"]
    return [
        problem
        for name, expected in files.items()
        if name not in _CHANGEABLE
        and (problem := _problem(checkpoint / name, expected, thorough)) is not None
    ]


def _named(folder: Path) -> list[Checkpoint]:
    """Whatever is called like a checkpoint, by step."""
    entries = folder.iterdir() if folder.is_dir() else ()
    matches = [(entry, _NAME.fullmatch(entry.name)) for entry in entries if entry.is_dir()]
    return sorted(Checkpoint(int(match[1]), entry) for entry, match in matches if match)


def _problem(file: Path, expected: Json, thorough: bool) -> str | None:
    try:
        if not file.is_file():
            return f"{file.name} is missing"
        if (size := file.stat().st_size) != expected["bytes"]:
            return f"{file.name} has {size} bytes instead of {expected['bytes']}"
        if thorough and _crc32(file) != expected["crc32"]:
            return f"{file.name} has other content than was written"
    except OSError as error:
        return f"{file.name} cannot be read: {error}"
    return None


def _crc32(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value
