"""Weights in folders: written by the trainer, published to engines, loaded into their models in place.

A version is a folder in Hugging Face format, in shared memory where there is room. It appears whole, is never
changed, and stays for as long as it is read or is the newest: an engine that comes back after a crash starts
from it. What a killed process has left is removed by the next one.

The canary: after new weights, a replica scores a fixed text (with an image, for a model that sees), and the
trainer's own numbers must come back: an update that reports success can be half an update (a tensor that was
not copied, a tied head that kept its old copy). The difference is the mean of |replica - trainer| over the
tokens, in nats. In float32 rounding leaves 1e-5 at most, so that a tensor one small optimizer step behind
is seen. In bfloat16 the two sides round differently by some hundredths: less is seen some updates later.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ludus.core.failures import EngineError
from ludus.core.messages import MediaSpan
from ludus.core.random import key, uniforms
from ludus.model.hf_model import auto_class
from ludus.model.image_files import noise_image
from ludus.model.images import ImageProcessor, attach_images
from ludus.remote.processes import ScratchFolder, remove_left_folders

log = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
PREFIX = "ludus-weights-"
_SHARED_MEMORY = Path("/dev/shm")
_VERSIONS = 2
"""How many folders there are at once while replicas go from one to the next."""


CANARY_TOKENS = 64
TOLERANCE = {"float32": 2e-4, "bfloat16": 0.15, "float16": 0.05}
"""The largest mean difference in nats that counts as rounding."""


class CanaryError(EngineError):
    """A replica does not have the weights that it says it has."""


@dataclass(frozen=True, slots=True)
class Canary:
    """A fixed text, and how far two computations of its log-probabilities may be apart."""

    tokens: tuple[int, ...]
    tolerance: float
    media: tuple[MediaSpan, ...] = ()

    @classmethod
    def of(
        cls, vocabulary: int, context: int | None, dtype: str, images: ImageProcessor | None = None
    ) -> Canary:
        """For a model with so many tokens, of so many in a row; `dtype` is that of its weights.

        `images` is how it is shown images. A context that no image fits into has none.
        """
        image = noise_image(0) if images is not None else None
        shown = images.tokens(image) if images is not None and image is not None else []
        if context is not None and len(shown) >= context:
            image, shown = None, []
        count = min(CANARY_TOKENS, context - len(shown)) if context else CANARY_TOKENS
        drawn = (uniforms(key("canary"), np.arange(count)) * vocabulary).astype(np.int64)
        tolerance = TOLERANCE.get(dtype, max(TOLERANCE.values()))
        media = () if image is None else (MediaSpan(image.sha256, 0, len(shown), image.data),)
        return cls((*shown, *drawn.tolist()), tolerance, media)

    def check(self, expected: Sequence[float], found: Sequence[float], name: str, version: int) -> float:
        """The mean difference; raises `CanaryError` where it is not what rounding leaves."""
        if len(found) != len(expected):
            raise CanaryError(
                f"{name} scored {len(found)} of the canary's {len(expected)} tokens after the update to "
                f"version {version}"
            )
        apart = [abs(a - b) for a, b in zip(expected, found, strict=True)]
        mean = sum(apart) / len(apart)
        if math.isfinite(mean) and mean <= self.tolerance:
            return mean
        raise CanaryError(
            f"{name} does not have the weights of version {version}: the log-probabilities of a fixed text are "
            f"{mean:.3g} nats from the trainer's on average (up to {max(apart):.3g}), where rounding leaves "
            f"{self.tolerance:g}. The update was applied in part or not at all (a tied head that was not "
            "updated looks like this), or the engine computes another model than the trainer"
        )


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

    The trainer scores it while engines load. Publishing ends when both are done: weights change then.
    """

    def __init__(self, folder: Path, version: int, expected: asyncio.Future[list[float]]) -> None:
        self.folder, self.version, self.expected = folder, version, expected
        self._readers, self._is_old = 0, False

    @contextmanager
    def reading(self) -> Iterator[Path]:
        """Enter this to read the folder: it stays until the block ends."""
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


def load_model(folder: Path, dtype: str, device: str) -> nn.Module:
    """The folder's causal LM, to be sampled and not to be trained. It sees where the folder has a processor."""
    model = _loaded(folder, getattr(torch, dtype))
    if hasattr(model, "get_image_features") and any(folder.glob("*processor_config.json")):
        attach_images(model, ImageProcessor.load(str(folder)))
    for parameter in model.parameters():
        # aligned, as in the trainer's own model: products round differently on memory that is not
        parameter.data = parameter.data.clone()
    return model.to(device).requires_grad_(False)


@torch.no_grad()
def load_into(model: nn.Module, folder: Path) -> None:
    """Copy a folder's weights into a model, whose parameters stay where they are.

    Everything is checked before the first tensor is copied. Where the file's names are not the module's own (an
    architecture whose checkpoints look different), transformers translates them.
    """
    own = model.state_dict()
    try:
        found = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise EngineError(f"{folder / WEIGHTS} cannot be read: {error}") from error
    if not _copied(found, own):
        other = _loaded(folder, next(model.parameters()).dtype).state_dict()
        if other.keys() != own.keys():
            raise EngineError(f"{folder} has the weights of another model", retriable=False)
        _copied(other, own)


@torch.no_grad()
def copy_into(model: nn.Module, data: Any) -> bool:
    """Copy weights into a model from the bytes of a safetensors file (anything with a buffer), without a copy.

    False, and nothing is changed, where their names are not the module's own.
    """
    return _copied(tensors_in(data), model.state_dict())


def _copied(found: dict[str, Tensor], own: dict[str, Any]) -> bool:
    """Copy tensors in place; False where they are not all of the module's (of those that share memory, one)."""
    if not found.keys() <= own.keys():
        return False
    covered = {own[name].data_ptr() for name in found}
    if not all(tensor.data_ptr() in covered for tensor in own.values()):
        return False
    for name, tensor in found.items():
        if tensor.shape != own[name].shape:
            raise EngineError(
                f"the new weights have {name} of shape {list(tensor.shape)}, and the model one of "
                f"{list(own[name].shape)}: nothing was changed",
                retriable=False,
            )
    for name, tensor in found.items():
        own[name].copy_(tensor)
    return True


def tensors_in(data: Any) -> dict[str, Tensor]:
    """The tensors of a safetensors file, without a copy: they last as long as `data`, and are read only."""
    view = memoryview(data).cast("B")
    begin = 8 + int.from_bytes(view[:8], "little")
    # the format of safetensors: the length of a header in 8 bytes, the header in JSON, then the tensors' bytes
    places: dict[str, Any] = json.loads(bytes(view[8:begin]))
    places.pop("__metadata__", None)
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they cannot be written to
        for name, place in places.items():
            (start, stop), dtype = place["data_offsets"], _DTYPES[place["dtype"]]
            count = (stop - start) // dtype.itemsize
            flat = torch.frombuffer(view, dtype=dtype, count=count, offset=begin + start)
            found[name] = flat.reshape(place["shape"])
    return found


def _loaded(folder: Path, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(str(folder))
        model, found = auto_class(config).from_pretrained(
            str(folder), config=config, dtype=dtype, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise EngineError(f"the model in {folder} cannot be loaded: {error}", retriable=False) from error
    if missing := sorted(found["missing_keys"]):
        raise EngineError(
            f"the files in {folder} lack {len(missing)} weights, such as {missing[0]}", retriable=False
        )
    loaded: nn.Module = model
    return loaded
