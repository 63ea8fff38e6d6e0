"""Images in a model whose images are embeddings in the place of placeholder tokens.

A model's own processor says which tokens stand for an image and turns it into pixels (`ImageProcessor`); the
model's vision tower and projector turn pixels into features; and a forward pass over flat tokens reads a
feature wherever a placeholder stands inside an image's span. A placeholder anywhere else, such as one that the
model sampled, is a token like any other.

In the engine an image's placeholders have virtual token ids, made from the image's hash (`virtual_ids`), so
that all that compares tokens (prefix caching, sessions, forks) tells images apart and finds the same one again.
Features without gradient are kept until the weights change (`forget_features`), and the engine and the trainer
of one module share them: an image goes through a frozen tower once an update.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ludus.core.failures import ConfigError, LudusError, MissingExtraError
from ludus.core.images import MOST_PIXELS, ImageError
from ludus.core.lru import LruCache
from ludus.core.messages import Media, MediaSpan
from ludus.model.hf_model import decoder_of, device_of, unwrapped
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
    found: ImageProcessor | None = getattr(unwrapped(model), _ATTRIBUTE, None)
    return found


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


FEATURE_BYTES = 1 << 28
"""Most bytes of the image features that are kept for a model."""
_WHERE = "files of episodes refer to images by their hash, and the bytes are in the run's folder media/"
_kept: WeakKeyDictionary[nn.Module, LruCache[Tensor]] = WeakKeyDictionary()
"""By the model whose vision part made them."""


def vision_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that only images pass through: all parameters outside of the decoder and the LM head."""
    inner = unwrapped(model)
    parts = (decoder_of(inner), inner.get_output_embeddings(), inner.get_input_embeddings())
    text = {id(p) for part in parts for p in part.parameters()}
    return [p for p in inner.parameters() if id(p) not in text]


def forget_features(model: nn.Module) -> None:
    """The weights of a model have changed, or may have."""
    for module in model.modules():
        _kept.pop(module, None)


@dataclass(frozen=True, slots=True)
class PlacedFeatures:
    """The features of images, and their places among flat tokens."""

    places_P: npt.NDArray[np.int64]
    features_PH: Tensor


def placed_features(model: nn.Module, images: Sequence[MediaSpan]) -> PlacedFeatures | None:
    """The features of the images in these spans, each image computed once; None where there are none.

    A vision part that is trained has a gradient from every pass, which is 0 where no image was in it. So a
    step changes the same parameters wherever images are: ranks add up their gradients tensor by tensor, and
    would wait for each other for ever where one of them has none of the tower.
    """
    processor, trained = images_of(model), _trained(model)
    wants_gradients = bool(trained) and torch.is_grad_enabled()
    if not images and not (wants_gradients and processor is not None):
        return None
    if processor is None:
        raise LudusError(
            f"{type(unwrapped(model)).__name__} reads text only, and the episodes hold images that were "
            "shown to another model"
        )
    weight = unwrapped(model).get_input_embeddings().weight
    known: dict[str, Tensor] = {}
    places: list[npt.NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
    for span in images:
        try:
            image = processor.of_span(span)
        except ImageError as error:
            raise LudusError(f"{error}: {_WHERE}") from error
        if span.sha256 not in known:
            known[span.sha256] = _features(model, span.sha256, image, is_kept=not trained)
        places.append(span.start + image.places)
    found = [known[span.sha256].to(weight.dtype) for span in images]
    features_PH = torch.cat(found) if found else weight.new_empty(0, weight.shape[1])
    if wants_gradients:
        with_gradients: Any = _WithGradients.apply  # torch has no types for it
        features_PH = with_gradients(features_PH, *trained)
    return PlacedFeatures(np.concatenate(places), features_PH)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the vision part that are trained; a critic has none."""
    sees = hasattr(unwrapped(model), "get_image_features")
    return [p for p in vision_parameters(model) if p.requires_grad] if sees else []


class _WithGradients(torch.autograd.Function):
    """Features as they are; in the backward pass the weights get zeros beside what else they get."""

    @staticmethod
    def forward(ctx: Any, features_PH: Tensor, *weights: Tensor) -> Tensor:
        ctx.weights = [(weight.shape, weight.dtype) for weight in weights]
        return features_PH.view_as(features_PH)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        zeros = {dtype: gradients[0].new_zeros((), dtype=dtype) for _, dtype in ctx.weights}
        return gradients[0], *(zeros[dtype].expand(shape) for shape, dtype in ctx.weights)


def embedded(model: nn.Module, input_ids: Tensor, images: Sequence[MediaSpan]) -> Tensor | None:
    """[T, H]: what the decoder reads for flat tokens with images in these spans; None without any."""
    return with_features(model, input_ids, placed_features(model, images))


def with_features(model: nn.Module, input_ids: Tensor, placed: PlacedFeatures | None) -> Tensor | None:
    """[T, H]: token embeddings, and features in their places; None without any."""
    if placed is None:
        return None
    embedded_TH: Tensor = decoder_of(model).get_input_embeddings()(input_ids)
    index_P = torch.from_numpy(placed.places_P).to(input_ids.device)
    return embedded_TH.index_copy(0, index_P, placed.features_PH.to(embedded_TH.dtype))


def embedded_parts(
    model: nn.Module,
    processor: ImageProcessor,
    parts: Iterable[tuple[Sequence[MediaSpan], int, int]],
    input_ids: Tensor,
) -> Tensor | None:
    """[T, H]: what the decoder reads for parts of contexts, end to end; None where no image is in them.

    A part is the spans of a context, and the range of its tokens; it may begin and end inside an image.
    """
    places: list[npt.NDArray[np.int64]] = []
    features: list[Tensor] = []
    offset = 0
    for spans, start, stop in parts:
        for span in spans:
            if span.start < stop and span.stop > start:
                image = processor.of_span(span)
                features_PH = _features(model, span.sha256, image, is_kept=True)
                at = span.start + image.places
                inside = (at >= start) & (at < stop)
                places.append(at[inside] - start + offset)
                first = int((at < start).sum())
                features.append(features_PH[first : first + int(inside.sum())])
        offset += stop - start
    placed = PlacedFeatures(np.concatenate(places), torch.cat(features)) if places else None
    return with_features(model, input_ids, placed)


def _features(model: nn.Module, sha256: str, image: EncodedImage, *, is_kept: bool) -> Tensor:
    """[P, H]: the features of an image, one for each of its placeholders, under the weights of now."""
    if not is_kept:
        return _computed(model, image)
    with torch.no_grad():
        cache = _kept.setdefault(unwrapped(model), LruCache(FEATURE_BYTES, _size))
        weight = unwrapped(model).get_input_embeddings().weight  # a model may be moved
        key = sha256, weight.device, weight.dtype
        return cache.get(key, lambda: _computed(model, image))


def _size(features_PH: Tensor) -> int:
    return features_PH.numel() * features_PH.element_size()


def _computed(model: nn.Module, image: EncodedImage) -> Tensor:
    inner = unwrapped(model)
    wanted = inspect.signature(inner.get_image_features).parameters
    dtype, device = inner.get_input_embeddings().weight.dtype, device_of(model)
    inputs = {
        name: value.to(device, dtype) if value.is_floating_point() else value.to(device)
        for name, value in image.inputs.items()
        if name in wanted
    }
    output = inner.get_image_features(**inputs)
    found = getattr(output, "pooler_output", output)
    pieces = [found] if isinstance(found, Tensor) else list(found)
    features_PH = torch.cat([piece.reshape(-1, piece.shape[-1]) for piece in pieces])
    if len(features_PH) != len(image.places):
        raise ConfigError(
            f"{type(inner).__name__} has {len(features_PH)} features for an image that its processor gives "
            f"{len(image.places)} placeholders"
        )
    return features_PH
