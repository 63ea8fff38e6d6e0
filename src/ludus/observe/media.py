"""The bytes of pictures that episodes hold, by their hash, so that each is kept once."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from ludus.core.messages import Media
from ludus.core.trajectory import Group, Trajectory
from ludus.observe.files import atomic_write

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9a-f]{64}")
_MOST_BYTES = 1_000_000_000
"""What a run keeps in all; of later pictures only the hash is recorded."""


class MediaStore:
    """A folder of pictures, each under the SHA-256 of its bytes."""

    def __init__(self, folder: Path, most_bytes: int = _MOST_BYTES) -> None:
        self.folder = folder
        self._most = most_bytes
        self._kept: set[str] | None = None
        self._bytes = 0
        self._is_full = False

    def path(self, sha256: str) -> Path | None:
        """Where a picture is; None for what is no hash, or not kept."""
        file = self.folder / sha256
        return file if _NAME.fullmatch(sha256) and file.is_file() else None

    def keep(self, groups: Iterable[Group]) -> None:
        """Write the pictures of these episodes that are at hand and not kept yet."""
        for media in (one for g in groups for t in g.trajectories for one in _media_of(t)):
            if media.data is None:
                continue
            name = hashlib.sha256(media.data).hexdigest()
            if name != media.sha256 or name in self._known() or self._is_full:
                continue
            if self._bytes + len(media.data) > self._most:
                self._is_full = True
                _log.warning(
                    "%s is full (%d bytes): later pictures are not kept", self.folder, self._most
                )
                return
            atomic_write(self.folder / name, media.data)
            self._known().add(name)
            self._bytes += len(media.data)

    def _known(self) -> set[str]:
        if self._kept is None:
            entries = self.folder.iterdir() if self.folder.is_dir() else ()
            files = [file for file in entries if _NAME.fullmatch(file.name)]
            self._kept = {file.name for file in files}
            self._bytes = sum(file.stat().st_size for file in files)
        return self._kept


def _media_of(trajectory: Trajectory) -> Iterator[Media]:
    for message in (*trajectory.task.messages, *trajectory.messages):
        yield from message.media
    yield from (render.picture for render in trajectory.renders if render.picture is not None)
