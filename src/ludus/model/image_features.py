"""The features of images: what a model's vision tower and projector make of them, read at placeholders.

Features that have no gradient are kept until the weights change (`forget_features`), and the engine and the
trainer of one module share them: an image goes through a frozen tower once an update.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ludus.core.failures import ConfigError, LudusError
from ludus.core.images import ImageError
from ludus.core.lru import LruCache
from ludus.core.messages import MediaSpan
from ludus.model.hf_model import decoder_of, device_of, unwrapped
from ludus.model.images import EncodedImage, ImageProcessor, images_of, seeing

FEATURE_BYTES = 1 << 28
"""Most bytes of the image features that are kept for a model."""
_WHERE = "files of episodes refer to images by their hash, and the bytes are in the run's folder media/"
_kept: WeakKeyDictionary[nn.Module, LruCache[Tensor]] = WeakKeyDictionary()
"""By the model whose vision part made them."""


def vision_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that only images pass through: all parameters outside of the decoder and the LM head."""
    inner = seeing(model)
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
    weight = seeing(model).get_input_embeddings().weight
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
    sees = hasattr(seeing(model), "get_image_features")
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
        cache = _kept.setdefault(seeing(model), LruCache(FEATURE_BYTES, _size))
        weight = seeing(model).get_input_embeddings().weight  # a model may be moved
        key = sha256, weight.device, weight.dtype
        return cache.get(key, lambda: _computed(model, image))


def _size(features_PH: Tensor) -> int:
    return features_PH.numel() * features_PH.element_size()


def _computed(model: nn.Module, image: EncodedImage) -> Tensor:
    inner = seeing(model)
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
