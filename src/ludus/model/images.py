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
from ludus.kernels.device import arrays_to_device
from ludus.model.attention import LookAhead
from ludus.model.forward import DecoderInputs, hidden_states
from ludus.model.hf_model import decoder_of, device_of, unwrapped
from ludus.model.image_files import PixelBudget, decode_image, pixel_count
from ludus.model.image_layout import (
    ATTRIBUTE,
    ContextLayout,
    ImageLayout,
    both_ways,
    has_rope_index,
    layout_of,
    look_ahead_of,
    positions_of,
)
from ludus.model.packed_attention import PackedContext

if TYPE_CHECKING:
    from PIL.Image import Image

VIRTUAL = 1 << 62
"""Token ids from here on are virtual."""
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
        """What a chat template writes for an image."""
        ids = getattr(processor, "image_token_ids", None) or [self.token]
        self.placeholder = self.token if ids[0] is None else int(ids[0])
        """What stands for each feature: the same token, but in models such as Gemma 3."""
        self._encoded: LruCache[EncodedImage] = LruCache(_PIXEL_BYTES, lambda one: one.size)

    @classmethod
    def load(cls, name: str, tokenizer: Any = None, revision: str | None = None) -> ImageProcessor:
        """The processor of a model's folder, or of a hub's model; `tokenizer` takes the place of its own."""
        try:
            import PIL  # noqa: F401
        except ImportError:
            raise MissingExtraError("pillow", "vision", "a model that is shown images") from None
        from transformers import AutoProcessor

        from ludus.model.video_parts import videos_optional

        try:
            with videos_optional():
                processor: Any = AutoProcessor.from_pretrained(name, revision=revision or "main")
        except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
            raise ConfigError(
                f"the processor of {name!r} cannot be loaded "
                f"({type(error).__name__}: {str(error).strip():.200}); some need the package torchvision"
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
        places = np.flatnonzero(np.array(tokens) == self.placeholder)
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
    setattr(unwrapped(model), ATTRIBUTE, processor)


def images_of(model: nn.Module) -> ImageProcessor | None:
    """The processor of a model that is shown images; None for one that reads text only."""
    found: ImageProcessor | None = getattr(unwrapped(model), ATTRIBUTE, None)
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


def context_layout(
    model: nn.Module, tokens: int, images: Sequence[MediaSpan], processor: ImageProcessor
) -> ContextLayout | None:
    """Positions and runs of a context with these images; None where they are those of text."""
    windowed = both_ways(model)
    if not images or (windowed is None and not has_rope_index(model)):
        return None
    layouts = [layout_of(model, processor.of_span(span), span.start) for span in images]
    runs = tuple(run for layout in layouts for run in layout.runs)
    return ContextLayout(positions_of([tokens], layouts), runs, windowed == "windowed")


FEATURE_BYTES = 1 << 28
"""Most bytes of the image features that are kept for a model."""
_DEEPER = "deepstack_features"
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
    """The features of images, their places among flat tokens, and how these are read."""

    places_P: npt.NDArray[np.int64]
    features_PC: Tensor
    """C is H, the width of the decoder, or a multiple of it where deeper layers have features as well."""
    layouts: tuple[ImageLayout, ...] = ()
    windows_only: bool = False

    def positions(self, lengths: Sequence[int]) -> npt.NDArray[np.int64] | None:
        """[3, T]: positions of rows of these lengths; None where they are counted as text."""
        return positions_of(lengths, self.layouts)

    def ahead(self, tokens: int) -> LookAhead | None:
        """What so many tokens see; None where it is themselves and what is before them."""
        return look_ahead_of(tokens, self.layouts, self.windows_only)

    def folded(self, index_T: npt.NDArray[np.int64]) -> PlacedFeatures:
        """Those of tokens that several rows share, which are computed once: `Fold.index_T`."""
        places_P, first = np.unique(index_T[self.places_P], return_index=True)
        chosen = torch.from_numpy(first).to(self.features_PC.device)
        return PlacedFeatures(places_P, self.features_PC.index_select(0, chosen))


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
    layouts: list[ImageLayout] = []
    for span in images:
        try:
            image = processor.of_span(span)
        except ImageError as error:
            raise LudusError(f"{error}: {_WHERE}") from error
        if span.sha256 not in known:
            known[span.sha256] = _features(model, span.sha256, image, is_kept=not trained)
        places.append(span.start + image.places)
        layouts.append(layout_of(model, image, span.start))
    found = [known[span.sha256].to(weight.dtype) for span in images]
    features_PC = torch.cat(found) if found else weight.new_empty(0, weight.shape[1])
    if wants_gradients:
        with_gradients: Any = _WithGradients.apply  # torch has no types for it
        features_PC = with_gradients(features_PC, *trained)
    windows_only = both_ways(model) == "windowed"
    return PlacedFeatures(np.concatenate(places), features_PC, tuple(layouts), windows_only)


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


def with_features(
    model: nn.Module, input_ids: Tensor, placed: PlacedFeatures | None
) -> DecoderInputs | None:
    """Token embeddings and features in their places, as the model's decoder reads them; None without any."""
    if placed is None:
        return None
    decoder = decoder_of(model)
    embedded_TH: Tensor = decoder.get_input_embeddings()(input_ids)
    width = embedded_TH.shape[1]
    index_P = torch.from_numpy(placed.places_P).to(input_ids.device)
    features_PH, *deeper = torch.split(placed.features_PC.to(embedded_TH.dtype), width, dim=1)
    others: dict[str, Any] = {}
    if deeper:  # Qwen3-VL: added to the outputs of the first layers
        is_feature_T = torch.zeros_like(input_ids, dtype=torch.bool).index_fill(0, index_P, True)
        others = {"visual_pos_masks": is_feature_T[None], "deepstack_visual_embeds": deeper}
    if getattr(decoder, "hidden_size_per_layer_input", 0):  # Gemma 4: an embedding for each layer
        padding = getattr(decoder.config, "pad_token_id", None) or 0
        ids_T = input_ids.index_fill(0, index_P, padding)
        others["per_layer_inputs"] = decoder.get_per_layer_inputs(ids_T[None])
    return DecoderInputs(embedded_TH.index_copy(0, index_P, features_PH), others)


def row_hidden_states(model: nn.Module, tokens_T: Tensor, images: Sequence[MediaSpan]) -> Tensor:
    """[T, H]: the last hidden states of one row with images in these spans."""
    placed, lengths = placed_features(model, images), [len(tokens_T)]
    ahead = None if placed is None else placed.ahead(len(tokens_T))
    row = PackedContext(lengths, tokens_T.device, ahead)
    spatial = None if placed is None else placed.positions(lengths)
    positions = row.position_ids if spatial is None else arrays_to_device([spatial], tokens_T.device)[0]
    return hidden_states(model, tokens_T, positions, row, with_features(model, tokens_T, placed))


def embedded_parts(
    model: nn.Module,
    processor: ImageProcessor,
    parts: Iterable[tuple[Sequence[MediaSpan], int, int]],
    input_ids: Tensor,
) -> DecoderInputs | None:
    """What the decoder reads for parts of contexts, end to end; None where no image is in them.

    A part is the spans of a context, and the range of its tokens; it may begin and end inside an image.
    """
    places: list[npt.NDArray[np.int64]] = []
    features: list[Tensor] = []
    offset = 0
    for spans, start, stop in parts:
        for span in spans:
            if span.start < stop and span.stop > start:
                image = processor.of_span(span)
                features_PC = _features(model, span.sha256, image, is_kept=True)
                at = span.start + image.places
                inside = (at >= start) & (at < stop)
                places.append(at[inside] - start + offset)
                first = int((at < start).sum())
                features.append(features_PC[first : first + int(inside.sum())])
        offset += stop - start
    placed = PlacedFeatures(np.concatenate(places), torch.cat(features)) if places else None
    return with_features(model, input_ids, placed)


def _features(model: nn.Module, sha256: str, image: EncodedImage, *, is_kept: bool) -> Tensor:
    """[P, C]: the features of an image, one for each of its placeholders, under the weights of now."""
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
    levels = [getattr(output, "pooler_output", output), *(getattr(output, _DEEPER, None) or ())]
    features_PC = torch.cat([_flat(level) for level in levels], dim=1)
    if len(features_PC) != len(image.places):
        raise ConfigError(
            f"{type(inner).__name__} has {len(features_PC)} features for an image that its processor gives "
            f"{len(image.places)} placeholders"
        )
    return features_PC


def _flat(level: Tensor | Sequence[Tensor]) -> Tensor:
    pieces = [level] if isinstance(level, Tensor) else list(level)
    return torch.cat([piece.reshape(-1, piece.shape[-1]) for piece in pieces])
