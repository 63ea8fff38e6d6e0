"""Images in a model whose images are embeddings in the place of placeholder tokens.

A model's own processor says which tokens stand for an image and turns it into pixels (`ImageProcessor`); the
model's vision tower and projector turn pixels into features (`image_features.py`); and a forward pass over flat
tokens reads a feature wherever a placeholder stands inside an image's span. A placeholder anywhere else, such
as one that the model sampled, is a token like any other.

In the engine an image's placeholders have virtual token ids, made from the image's hash (`virtual_ids`). So
all that compares tokens (prefix caching, sessions, forks, recomputation) tells images apart, and finds the
same image again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ludus.core.failures import ConfigError, LudusError, MissingExtraError
from ludus.core.images import MOST_PIXELS, ImageError
from ludus.core.lru import LruCache
from ludus.core.messages import Media, MediaSpan
from ludus.model.hf_model import unwrapped
from ludus.model.image_files import PixelBudget, decode_image, pixel_count

if TYPE_CHECKING:
    from PIL.Image import Image

VIRTUAL = 1 << 62
"""Token ids from here on are virtual."""
_ATTRIBUTE = "ludus_images"
_PIXEL_BYTES = 1 << 29
_DECODING = PixelBudget(MOST_PIXELS)
"""What all models of this process decode at once: a pixel takes some 20 bytes until its image is encoded."""
_NO_PIXELS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image as a model gets it."""

    tokens: list[int]
    """Its tokens in a prompt."""
    places: npt.NDArray[np.int64]
    """Where the placeholders are among them: one for each feature."""
    inputs: dict[str, Tensor]
    """Pixels, and what comes with them."""

    @property
    def size(self) -> int:
        return 8 * len(self.tokens) + sum(t.numel() * t.element_size() for t in self.inputs.values())


class ImageProcessor:
    """A Hugging Face processor behind `ImageTokens`; what it makes of an image is kept for a while."""

    def __init__(self, processor: Any) -> None:
        self.inner = processor
        self.text = str(processor.image_token)
        self.token = int(processor.tokenizer.convert_tokens_to_ids(self.text))
        self._encoded: LruCache[EncodedImage] = LruCache(_PIXEL_BYTES, lambda one: one.size)

    @classmethod
    def load(cls, name: str, tokenizer: Any = None, revision: str | None = None) -> ImageProcessor:
        """The processor of a model's folder, or of a hub's model; `tokenizer` takes the place of its own."""
        try:
            import PIL  # noqa: F401
        except ImportError:
            raise MissingExtraError("pillow", "vision", "a model that is shown images") from None
        from transformers import AutoProcessor

        try:
            processor: Any = AutoProcessor.from_pretrained(name, revision=revision or "main")
        except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
            raise ConfigError(
                f"the processor of {name!r} cannot be loaded "
                f"({type(error).__name__}: {str(error).strip():.200}); those that take videos as well need the "
                "package torchvision"
            ) from error
        if (
            getattr(processor, "image_token", None) is None
            or getattr(processor, "image_processor", None) is None
        ):
            raise ConfigError(f"{type(processor).__name__} has no image token to put into a prompt")
        if tokenizer is not None:
            processor.tokenizer = tokenizer
        return cls(processor)

    def __deepcopy__(self, memo: object) -> ImageProcessor:
        """A copy of a model sees by the same processor."""
        return self

    def pixels(self, media: Media) -> int:
        if media.data is None or self._encoded.find(media.sha256) is not None:
            return 0
        return pixel_count(media.data)

    def tokens(self, media: Media) -> list[int]:
        return list(self.encode(media.sha256, media.data).tokens)

    def encode(self, sha256: str, data: bytes | None) -> EncodedImage:
        """Raises `ImageError` if the image cannot be read, or is not at hand."""
        return self._encoded.get(sha256, lambda: self._encode(sha256, data))

    def _encode(self, sha256: str, data: bytes | None) -> EncodedImage:
        if data is None:
            raise ImageError(f"the bytes of the image {sha256[:12]} are not at hand")
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ImageError(f"the image {sha256[:12]} does not have the hash that it is said to have")
        with _DECODING.held(pixel_count(data)):
            return self._encode_pixels(decode_image(data))

    def _encode_pixels(self, image: Image) -> EncodedImage:
        try:
            made = dict(
                self.inner(text=self.text, images=[image], add_special_tokens=False, return_tensors="pt")
            )
        except Exception as error:
            raise ImageError(
                f"the model's processor refuses an image of {image.width} x {image.height} pixels: "
                f"{type(error).__name__}: {error!s:.200}"
            ) from error
        tokens: list[int] = made["input_ids"][0].tolist()
        places = np.flatnonzero(np.array(tokens) == self.token)
        inputs = {name: torch.as_tensor(value) for name, value in made.items() if name not in _NO_PIXELS}
        return EncodedImage(tokens, places, inputs)

    def of_span(self, span: MediaSpan) -> EncodedImage:
        """The image of a span; raises `LudusError` where another processor wrote the span's tokens."""
        encoded = self.encode(span.sha256, span.data)
        if len(encoded.tokens) != span.stop - span.start:
            raise LudusError(
                f"the image {span.sha256[:12]} takes {len(encoded.tokens)} tokens of this model and has "
                f"{span.stop - span.start} in the episode: another model, or other settings of its processor, "
                "wrote it"
            )
        return encoded

    def save(self, folder: Path) -> None:
        """Write the processor beside a model, as Hugging Face's libraries read it."""
        self.inner.save_pretrained(folder)


def attach_images(model: nn.Module, processor: ImageProcessor) -> None:
    """Attach a processor to a model, where `images_of` finds it."""
    setattr(unwrapped(model), _ATTRIBUTE, processor)


def images_of(model: nn.Module) -> ImageProcessor | None:
    """The processor of a model that is shown images; None for one that reads text only."""
    found: ImageProcessor | None = getattr(seeing(model), _ATTRIBUTE, None)
    return found


def seeing(model: nn.Module) -> Any:
    """The Hugging Face model with the vision part; a reference has another model's."""
    inner = unwrapped(model)
    return getattr(inner, "sees_by", inner)


def virtual_ids(sha256: str, count: int) -> npt.NDArray[np.int64]:
    """Ids for the placeholders of an image, beyond any vocabulary: a hash of its own hash and the place."""
    with np.errstate(over="ignore"):  # splitmix64, whose arithmetic is modulo 2**64
        mixed = np.uint64(int(sha256[:16], 16)) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(
            0x9E3779B97F4A7C15
        )
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
    return ((mixed >> np.uint64(2)) | np.uint64(VIRTUAL)).astype(np.int64)


def with_virtual_ids(
    tokens: Sequence[int], images: Sequence[MediaSpan], processor: ImageProcessor
) -> list[int]:
    """A context as the engine keys it; refuses spans whose tokens are not what stands for their image."""
    ids = np.array(tokens, dtype=np.int64)
    end = 0
    for span in images:
        image = processor.of_span(span)
        if (
            span.start < end
            or span.stop > len(ids)
            or ids[span.start : span.stop].tolist() != image.tokens
        ):
            raise LudusError(
                f"tokens {span.start} to {span.stop} do not stand for the image {span.sha256[:12]}"
            )
        end = span.stop
        ids[span.start + image.places] = virtual_ids(span.sha256, len(image.places))
    keyed: list[int] = ids.tolist()
    return keyed
