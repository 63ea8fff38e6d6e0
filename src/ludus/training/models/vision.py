"""Loading a model's vision part: its processor, the probe of its images, and what of it is trained."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from ludus.chat.tokenizers import HFTokenizer
from ludus.core.failures import ConfigError, MissingExtraError
from ludus.core.images import ImageError
from ludus.model.hf_model import unwrapped, vocabulary_size
from ludus.model.images import ImageProcessor, attach_images, forget_features, vision_parameters
from ludus.model.probes import check_images, check_positions
from ludus.training.models.weight_files import is_hollow

log = logging.getLogger(__name__)


def load_vision(
    model: nn.Module, tokenizer: HFTokenizer, name: str, vision: str, revision: str | None = None
) -> None:
    """Let a model see, as `model.vision` says; before an adapter is put around it.

    One without weights is not probed: rank 0 has done that with the weights.
    """
    inner: Any = unwrapped(model)
    if not hasattr(inner, "get_image_features"):
        if vision in ("frozen", "trained"):
            raise ConfigError(f"model.vision = {vision!r}: {type(inner).__name__} has no vision part")
        return
    if vision != "trained":
        for parameter in vision_parameters(model):
            parameter.requires_grad_(False)
    if vision == "off":
        return
    try:
        check_positions(model)
        images = _processor(name, tokenizer, revision)
        if images.token >= vocabulary_size(model):
            raise ConfigError(f"the image token {images.text!r} is not in the model's vocabulary")
        attach_images(model, images)
        if not is_hollow(model):
            check_images(model)
        forget_features(model)
    except (ConfigError, MissingExtraError, ImageError) as error:
        if hasattr(inner, "ludus_images"):
            del inner.ludus_images
        if vision != "auto":
            raise ConfigError(f"model.vision = {vision!r}: {error}") from error
        log.warning("%s reads text only: %s", name, error)
        return
    tokenizer.images = images


def _processor(name: str, tokenizer: HFTokenizer, revision: str | None) -> ImageProcessor:
    images = ImageProcessor.load(name, tokenizer.inner, revision)
    if images.token not in tokenizer.controls.values():
        # anybody's text could show an image
        raise ConfigError(f"the image token {images.text!r} is not a special token of the tokenizer")
    return images
