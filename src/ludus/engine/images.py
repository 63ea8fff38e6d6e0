"""Pictures in a model whose pictures are embeddings in the place of placeholder tokens.

A model's own processor says which tokens stand for a picture and turns it into pixels (`ImageProcessor`); the
model's vision tower and projector turn pixels into features; and a forward pass over flat tokens reads a
feature wherever a placeholder stands inside a picture's span (`embedded`). A placeholder anywhere else, such as
one that the model sampled, is a token like any other.

In the engine a picture's placeholders have virtual token ids, made from the picture's hash (`virtual_ids`). So
all that compares tokens (prefix caching, sessions, forks, recomputation) tells pictures apart, and finds the
same picture again.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ludus.core.failures import ConfigError, LudusError
from ludus.core.lru import LruCache
from ludus.core.messages import Media, MediaSpan
from ludus.core.pictures import PictureError
from ludus.engine.hf_model import decoder_of, device_of, unwrapped
from ludus.engine.pictures import decode_picture

VIRTUAL = 1 << 62
"""Token ids from here on are virtual."""
_ATTRIBUTE = "ludus_images"
_PIXEL_BYTES = 1 << 29
_FEATURE_BYTES = 1 << 28
_WHERE = (
    "files of episodes refer to pictures by their hash, and the bytes are in the run's folder media/"
)
_NO_PIXELS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """A picture as a model gets it."""

    tokens: list[int]
    """What stands for it in a prompt."""
    places: npt.NDArray[np.int64]
    """Where the placeholders are among them: one for each feature."""
    inputs: dict[str, Tensor]
    """Pixels, and what comes with them."""

    @property
    def size(self) -> int:
        return 8 * len(self.tokens) + sum(t.numel() * t.element_size() for t in self.inputs.values())


class ImageProcessor:
    """A Hugging Face processor behind `ImageTokens`; what it makes of a picture is kept for a while."""

    def __init__(self, processor: Any) -> None:
        self.inner = processor
        self.text = str(processor.image_token)
        self.token = int(processor.tokenizer.convert_tokens_to_ids(self.text))
        self._encoded: LruCache[EncodedImage] = LruCache(_PIXEL_BYTES, lambda one: one.size)

    def __deepcopy__(self, memo: object) -> ImageProcessor:
        """A copy of a model sees by the same processor."""
        return self

    def __reduce__(self) -> tuple[type[ImageProcessor], tuple[Any]]:
        return ImageProcessor, (self.inner,)

    def tokens(self, media: Media) -> list[int]:
        return list(self.encode(media.sha256, media.data).tokens)

    def encode(self, sha256: str, data: bytes | None) -> EncodedImage:
        """Raises `PictureError` if the picture cannot be read, or is not at hand."""
        return self._encoded.get(sha256, lambda: self._encode(sha256, data))

    def _encode(self, sha256: str, data: bytes | None) -> EncodedImage:
        if data is None:
            raise PictureError(f"the bytes of the picture {sha256[:12]} are not at hand")
        if hashlib.sha256(data).hexdigest() != sha256:
            raise PictureError(
                f"the picture {sha256[:12]} does not have the hash that it is said to have"
            )
        picture = decode_picture(data)
        try:
            made = dict(
                self.inner(
                    text=self.text, images=[picture], add_special_tokens=False, return_tensors="pt"
                )
            )
        except Exception as error:
            raise PictureError(
                f"the model's processor refuses a picture of {picture.width} x {picture.height} pixels: "
                f"{type(error).__name__}: {error!s:.200}"
            ) from error
        tokens: list[int] = made["input_ids"][0].tolist()
        places = np.flatnonzero(np.array(tokens) == self.token)
        inputs = {name: torch.as_tensor(value) for name, value in made.items() if name not in _NO_PIXELS}
        return EncodedImage(tokens, places, inputs)

    def of_span(self, span: MediaSpan) -> EncodedImage:
        """The picture of a span; raises `LudusError` where another processor wrote the span's tokens."""
        encoded = self.encode(span.sha256, span.data)
        if len(encoded.tokens) != span.stop - span.start:
            raise LudusError(
                f"the picture {span.sha256[:12]} takes {len(encoded.tokens)} tokens of this model and has "
                f"{span.stop - span.start} in the episode: another model, or other settings of its processor, "
                "wrote it"
            )
        return encoded

    def save(self, folder: Path) -> None:
        """Write the processor beside a model, as Hugging Face's libraries read it."""
        self.inner.save_pretrained(folder)


def attach_images(model: nn.Module, processor: ImageProcessor) -> None:
    """Let a model see: whoever samples or trains it finds its processor by `images_of`."""
    setattr(unwrapped(model), _ATTRIBUTE, processor)


def images_of(model: nn.Module) -> ImageProcessor | None:
    """The processor of a model that is shown pictures; None for one that reads text only."""
    found: ImageProcessor | None = getattr(_seeing(model), _ATTRIBUTE, None)
    return found


def _seeing(model: nn.Module) -> Any:
    """The Hugging Face model with the vision part; a reference has another model's."""
    inner = unwrapped(model)
    return getattr(inner, "sees_by", inner)


def vision_parameters(model: nn.Module) -> list[nn.Parameter]:
    """What only pictures pass through: all parameters outside of the decoder and the LM head."""
    inner = _seeing(model)
    parts = (decoder_of(inner), inner.get_output_embeddings(), inner.get_input_embeddings())
    text = {id(p) for part in parts for p in part.parameters()}
    return [p for p in inner.parameters() if id(p) not in text]


def image_features(model: nn.Module, picture: EncodedImage) -> Tensor:
    """[P, H]: the features of a picture, one for each of its placeholders.

    They have a gradient where the vision part is trained, and gradients are on.
    """
    inner = _seeing(model)
    wanted = inspect.signature(inner.get_image_features).parameters
    dtype, device = inner.get_input_embeddings().weight.dtype, device_of(model)
    inputs = {
        name: value.to(device, dtype) if value.is_floating_point() else value.to(device)
        for name, value in picture.inputs.items()
        if name in wanted
    }
    is_trained = torch.is_grad_enabled() and any(p.requires_grad for p in vision_parameters(model))
    with torch.set_grad_enabled(is_trained):
        output = inner.get_image_features(**inputs)
    found = getattr(output, "pooler_output", output)
    pieces = [found] if isinstance(found, Tensor) else list(found)
    features_PH = torch.cat([piece.reshape(-1, piece.shape[-1]) for piece in pieces])
    if len(features_PH) != len(picture.places):
        raise ConfigError(
            f"{type(inner).__name__} has {len(features_PH)} features for a picture that its processor gives "
            f"{len(picture.places)} placeholders"
        )
    return features_PH


@dataclass(frozen=True, slots=True)
class PlacedFeatures:
    """The features of pictures, and their places among flat tokens."""

    places_P: npt.NDArray[np.int64]
    features_PH: Tensor


def placed_features(model: nn.Module, images: Sequence[MediaSpan]) -> PlacedFeatures | None:
    """The features of the pictures in these spans, each picture computed once; None where there are none."""
    if not images:
        return None
    processor = images_of(model)
    if processor is None:
        raise LudusError(
            f"{type(unwrapped(model)).__name__} reads text only, and the episodes hold pictures that were "
            "shown to another model"
        )
    known: dict[str, Tensor] = {}
    places: list[npt.NDArray[np.int64]] = []
    for span in images:
        try:
            picture = processor.of_span(span)
        except PictureError as error:
            raise LudusError(f"{error}: {_WHERE}") from error
        if span.sha256 not in known:
            known[span.sha256] = image_features(model, picture)
        places.append(span.start + picture.places)
    return PlacedFeatures(np.concatenate(places), torch.cat([known[span.sha256] for span in images]))


def embedded(model: nn.Module, input_ids: Tensor, images: Sequence[MediaSpan]) -> Tensor | None:
    """[T, H]: what the decoder reads for flat tokens with pictures in these spans; None without any."""
    return with_features(model, input_ids, placed_features(model, images))


def with_features(model: nn.Module, input_ids: Tensor, placed: PlacedFeatures | None) -> Tensor | None:
    """[T, H]: token embeddings, and features in their places; None without any."""
    if placed is None:
        return None
    embedded_TH: Tensor = decoder_of(model).get_input_embeddings()(input_ids)
    index_P = torch.from_numpy(placed.places_P).to(input_ids.device)
    return embedded_TH.index_copy(0, index_P, placed.features_PH.to(embedded_TH.dtype))


def virtual_ids(sha256: str, count: int) -> npt.NDArray[np.int64]:
    """Ids for the placeholders of a picture, beyond any vocabulary: a hash of its own hash and the place."""
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
    """A context as the engine keys it; refuses spans whose tokens are not what stands for their picture."""
    ids = np.array(tokens, dtype=np.int64)
    end = 0
    for span in images:
        picture = processor.of_span(span)
        if (
            span.start < end
            or span.stop > len(ids)
            or ids[span.start : span.stop].tolist() != picture.tokens
        ):
            raise LudusError(
                f"tokens {span.start} to {span.stop} do not stand for the picture {span.sha256[:12]}"
            )
        end = span.stop
        ids[span.start + picture.places] = virtual_ids(span.sha256, len(picture.places))
    keyed: list[int] = ids.tolist()
    return keyed


class ImageFeatures:
    """The features of the pictures that an engine was shown, under the weights of now."""

    def __init__(self, model: nn.Module, processor: ImageProcessor) -> None:
        self._model, self._processor = model, processor
        self._known: LruCache[Tensor] = LruCache(
            _FEATURE_BYTES, lambda one: one.numel() * one.element_size()
        )

    def of(self, span: MediaSpan) -> tuple[EncodedImage, Tensor]:
        """A picture and its features."""
        picture = self._processor.of_span(span)
        return picture, self._known.get(span.sha256, lambda: image_features(self._model, picture))

    def clear(self) -> None:
        """The weights have changed."""
        self._known.clear()

    def embedded(
        self, parts: Iterable[tuple[Sequence[MediaSpan], int, int]], input_ids: Tensor
    ) -> Tensor | None:
        """[T, H]: what the decoder reads for parts of contexts, end to end; None where no picture is in them.

        A part is the spans of a context, and the range of its tokens; it may begin and end inside a picture.
        """
        places: list[npt.NDArray[np.int64]] = []
        features: list[Tensor] = []
        offset = 0
        for spans, start, stop in parts:
            for span in spans:
                if span.start < stop and span.stop > start:
                    picture, features_PH = self.of(span)
                    at = span.start + picture.places
                    inside = (at >= start) & (at < stop)
                    places.append(at[inside] - start + offset)
                    first = int((at < start).sum())
                    features.append(features_PH[first : first + int(inside.sum())])
            offset += stop - start
        placed = PlacedFeatures(np.concatenate(places), torch.cat(features)) if places else None
        return with_features(self._model, input_ids, placed)
