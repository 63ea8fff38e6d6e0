"""Where new weights are put for replicas: a folder for each version, in shared memory where there is room.

A folder appears whole, is never changed, and stays for as long as somebody reads it or it is the newest: a
replica that comes back after a crash starts from it. What a killed process has left is removed by the next
one.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from ludus.core.messages import MediaSpan
from ludus.engine.canary import Canary
from ludus.remote.processes import ScratchFolder, remove_left_folders

log = logging.getLogger(__name__)

PREFIX = "ludus-weights-"
_SHARED_MEMORY = Path("/dev/shm")
_VERSIONS = 2
"""How many folders there are at once while replicas go from one to the next."""


class WeightSource(Protocol):
    """The trainer, as far as engines know it."""

    @property
    def size(self) -> int:
        """Bytes that the weights take."""

    def write(self, folder: Path) -> None:
        """Write model and tokenizer in Hugging Face format into an empty folder."""

    def score(self, tokens: Sequence[int], media: Sequence[MediaSpan] = ()) -> list[float]:
        """The log-probability of each token given those before it; the first one's is 0."""


class Published:
    """The weights of one version, and what the trainer says of the canary with them.

    The trainer scores it while engines load; whoever publishes waits for both, because weights change then.
    """

    def __init__(self, folder: Path, version: int, expected: asyncio.Future[list[float]]) -> None:
        self.folder, self.version, self.expected = folder, version, expected
        self._readers, self._is_old = 0, False

    @contextmanager
    def reading(self) -> Iterator[Path]:
        """Around everything that reads the folder."""
        self._readers += 1
        try:
            yield self.folder
        finally:
            self._readers -= 1
            self._remove_if_unused()

    def retire(self) -> None:
        """There is a newer one."""
        self._is_old = True
        self._remove_if_unused()

    def _remove_if_unused(self) -> None:
        if self._is_old and not self._readers:
            shutil.rmtree(self.folder, ignore_errors=True)


class WeightFolders:
    """Publishes versions, one after the other; the newest is kept."""

    def __init__(self, source: WeightSource, canary: Canary, parent: Path | None = None) -> None:
        """`parent` is where folders are made: shared memory when left out, if there is room."""
        self._source, self._canary = source, canary
        self._scratch = ScratchFolder(PREFIX, parent or _roomy_place(source.size))
        self.newest: Published | None = None

    async def publish(self, version: int) -> Published:
        """Write the trainer's weights, which are the newest from now on."""
        folder = self._scratch.path / str(version)
        await asyncio.to_thread(self._write, folder)
        scored = asyncio.to_thread(self._source.score, self._canary.tokens, self._canary.media)
        old, self.newest = self.newest, Published(folder, version, asyncio.ensure_future(scored))
        if old is not None:
            old.retire()
        return self.newest

    def _write(self, folder: Path) -> None:
        self._scratch.remove_others()
        shutil.rmtree(folder, ignore_errors=True)  # an attempt that failed
        folder.mkdir()
        self._source.write(folder)

    def close(self) -> None:
        self._scratch.remove()


def remove_left_weights() -> None:
    """Remove what killed trainers have left in shared memory, where a model's weights are gigabytes."""
    if _SHARED_MEMORY.is_dir():
        remove_left_folders(_SHARED_MEMORY, PREFIX)


def _roomy_place(size: int) -> Path:
    """Shared memory, or the folder for temporary files where that is too small (as in many containers)."""
    temporary = Path(tempfile.gettempdir())
    if not _SHARED_MEMORY.is_dir():
        return temporary
    free = shutil.disk_usage(_SHARED_MEMORY).free
    if free >= _VERSIONS * size:
        return _SHARED_MEMORY
    log.warning(
        "%s has %.1f GiB left, and weights of %.1f GiB are needed there twice: they go through %s, which is "
        "slower (docker run --shm-size=... makes it larger)",
        *(_SHARED_MEMORY, free / 2**30, size / 2**30, temporary),
    )
    return temporary
