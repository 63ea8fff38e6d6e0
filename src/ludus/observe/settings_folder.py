"""A folder whose contents all come from one set of settings; an interrupted command resumes in it.

`settings.json` says what was asked for. The same command finds its folder again, whatever killed it; another
one is refused, with the settings that differ. One process writes at a time.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from ludus.core.failures import ConfigError
from ludus.observe.files import FolderLock, atomic_write

SETTINGS = "settings.json"


class SettingsFolder:
    """A new folder, or one that was written under the same settings."""

    holds: ClassVar[str] = "results"
    """One word for its contents."""
    root: ClassVar[str] = "results"
    """Where numbered ones are made."""

    def __init__(self, path: str | Path, settings: Mapping[str, Any]) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file, not a folder of {self.holds}")
        stored = self.path / SETTINGS
        if not stored.is_file() and self.path.is_dir() and any(_visible(self.path)):
            raise ConfigError(
                f"{self.path} holds something else than {self.holds}; choose another folder"
            )
        self._was_there = stored.is_file()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self.path / ".lock")
        self._lock.acquire()
        try:
            if stored.is_file():
                _check_same(stored, settings, self.holds)
            else:
                atomic_write(stored, json.dumps(settings, indent=2) + "\n")
        except BaseException:
            self._lock.release()
            raise

    @classmethod
    def numbered(cls, name: str, settings: Mapping[str, Any], root: str | Path | None = None) -> Self:
        """A new folder ROOT/NAME-001, counted up."""
        slug = slug_of(name)
        for number in range(1, 1_000_000):
            path = Path(root or cls.root) / f"{slug}-{number:03d}"
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            return cls(path, settings)
        raise ConfigError(f"{root or cls.root} is full of {cls.holds} called {slug}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A new folder into which nothing was written, because something was wrong, is removed."""
        if error is not None and not self._was_there and not any(self.path.rglob("*.parquet")):
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def slug_of(name: str) -> str:
    """The name as part of a path."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.")[-60:].strip("-.") or "model"


def _visible(folder: Path) -> Iterator[Path]:
    return (entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _check_same(stored: Path, settings: Mapping[str, Any], holds: str) -> None:
    try:
        found = json.loads(stored.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{stored} cannot be read: {error}") from None
    differing = list(_differences(found, dict(settings), ""))
    if differing:
        raise ConfigError(
            f"{stored.parent} holds {holds} of other settings:\n"
            + "\n".join(f"  {line}" for line in differing[:20])
            + "\ngive the same settings, or another folder"
        )


def _differences(old: Any, new: Any, where: str) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            yield from _differences(old.get(name), new.get(name), f"{where}.{name}" if where else name)
    elif old != new:
        yield f"{where}: {old!r:.80} there, {new!r:.80} now"
