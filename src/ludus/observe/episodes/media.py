"""The bytes of images that episodes hold, by their hash, so that each is kept once."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from ludus.core.failures import ConfigError
from ludus.core.messages import Media, MediaSpan, Message
from ludus.core.trajectory import Group, Trajectory
from ludus.observe.files import atomic_write

_log = logging.getLogger(__name__)

MEDIA = "media"
_NAME = re.compile(r"[0-9a-f]{64}")
_MOST_BYTES = 1_000_000_000
"""Bytes of images that a run stores in all; of later images only the hash is recorded."""


class MediaStore:
    """A folder of images, each under the SHA-256 of its bytes."""

    def __init__(self, folder: Path, most_bytes: int = _MOST_BYTES) -> None:
        self.folder = folder
        self._most = most_bytes
        self._kept: set[str] | None = None
        self._bytes = 0
        self._is_full = False

    def path(self, sha256: str) -> Path | None:
        """Where an image is; None for what is no hash, or not kept."""
        file = self.folder / sha256
        return file if _NAME.fullmatch(sha256) and file.is_file() else None

    def keep(self, groups: Iterable[Group]) -> None:
        """Write the images of these episodes that are at hand and not kept yet."""
        for media in (one for g in groups for t in g.trajectories for one in _media_of(t)):
            if media.data is None:
                continue
            name = hashlib.sha256(media.data).hexdigest()
            if name != media.sha256 or name in self._known() or self._is_full:
                continue
            if self._bytes + len(media.data) > self._most:
                self._is_full = True
                _log.warning("%s is full (%d bytes): later images are not kept", self.folder, self._most)
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
    for span in _spans(trajectory):  # of conversations that the last one does not go on from
        yield Media("image", span.sha256, span.data)


def _spans(trajectory: Trajectory) -> Iterator[MediaSpan]:
    for sequence in trajectory.sequences:
        for segment in sequence.segments:
            yield from segment.media


def keep_images(folder: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write the images that models were shown to `folder`/media, beside a file of episodes to train on."""
    for span in (span for trajectory in trajectories for span in _spans(trajectory)):
        path = folder / MEDIA / span.sha256
        if span.data is not None and not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, span.data)


def with_images(trajectories: Iterable[Trajectory], file: Path) -> list[Trajectory]:
    """Episodes as they were read from a file, with the bytes of their images, which lie in a folder near it.

    One that a model was shown must be there: without it nothing can be learned from the episode.
    """
    folders = [parent / MEDIA for parent in list(file.absolute().parents)[:2]]
    known: dict[str, bytes | None] = {}

    def data(sha256: str) -> bytes | None:
        if sha256 not in known:
            paths = (MediaStore(folder).path(sha256) for folder in folders)
            found = next((path.read_bytes() for path in paths if path is not None), None)
            is_right = found is not None and hashlib.sha256(found).hexdigest() == sha256
            known[sha256] = found if is_right else None
        return known[sha256]

    def whole(message: Message) -> Message:
        if not message.media:
            return message
        return replace(
            message, media=tuple(replace(one, data=data(one.sha256)) for one in message.media)
        )

    given = list(trajectories)
    for trajectory in given:
        trajectory.messages = [whole(message) for message in trajectory.messages]
        if any(message.media for message in trajectory.task.messages):
            own = tuple(whole(message) for message in trajectory.task.messages)
            trajectory.task = replace(trajectory.task, messages=own)
        for segment in (one for sequence in trajectory.sequences for one in sequence.segments):
            if not segment.media:
                continue
            segment.media = tuple(replace(span, data=data(span.sha256)) for span in segment.media)
            if missing := next((span for span in segment.media if span.data is None), None):
                where = " nor in ".join(map(str, folders))
                raise ConfigError(
                    f"{file}: the image {missing.sha256} of task {trajectory.task.id!r} is neither in "
                    f"{where}, or is damaged: put it back, or leave these episodes out"
                )
    return given
