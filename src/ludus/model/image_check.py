"""The probe that decides whether a model's images can be run: its own forward against ours, on two images.

Ours puts features in the place of placeholders and counts positions one by one, with causal attention. Models
that give an image's tokens positions in two dimensions (M-RoPE), let them look at each other in both
directions, or feed images into deeper layers come out differently, and are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ludus.core.failures import ConfigError
from ludus.core.messages import Media, MediaSpan
from ludus.model.forward import head_logits
from ludus.model.hf_model import decoder_of, device_of, sampling_mode, text_config, unwrapped
from ludus.model.image_features import embedded
from ludus.model.image_files import decode_image, noise_image
from ludus.model.images import ImageProcessor, images_of
from ludus.model.probes import agree

FAMILIES = "LLaVA, LLaVA-NeXT, LLaVA-OneVision, Idefics3, SmolVLM, InternVL"
_INSTEAD = f'use a model such as {FAMILIES}, or set model.vision = "off" to train it on text alone'


def check_positions(model: nn.Module) -> None:
    """Refuse a model that says itself that its images have positions of another kind."""
    rotation = getattr(text_config(model), "rope_parameters", None) or {}
    if "mrope_section" in rotation:
        raise ConfigError(
            f"{type(unwrapped(model)).__name__} gives the tokens of an image positions in two or three "
            f"dimensions (M-RoPE), which Ludus does not run: {_INSTEAD}"
        )


def check_images(model: nn.Module) -> None:
    """Refuse a model whose images `embedded` does not reproduce. Its attention must be its own."""
    inner, processor = unwrapped(model), images_of(model)
    assert processor is not None
    name = type(inner).__name__
    probes = [noise_image(seed) for seed in (0, 1)]
    text = f"{processor.text}\n{processor.text}\n"
    images = [decode_image(probe.data or b"") for probe in probes]
    made = dict(processor.inner(text=text, images=images, add_special_tokens=False, return_tensors="pt"))
    spans = _spans(processor, made["input_ids"][0].tolist(), probes)
    if spans is None:
        raise ConfigError(
            f"the processor of {name} writes an image in other tokens beside another one than alone: "
            f"{_INSTEAD}"
        )
    with torch.no_grad(), sampling_mode(model):
        expected = inner(**_placed(made, model), use_cache=False).logits[0]
        given = _ours(model, made["input_ids"][0].to(device_of(model)), spans)
    if not agree(given, expected):
        raise ConfigError(
            f"{name} does something else with images than to read their features in the place of placeholder "
            "tokens (positions in two dimensions, attention in both directions, or images in deeper layers): "
            f"{_INSTEAD}"
        )


def _ours(model: nn.Module, ids_T: Tensor, spans: list[MediaSpan]) -> Tensor:
    embedded_TH = embedded(model, ids_T, spans)
    assert embedded_TH is not None
    positions = torch.arange(len(ids_T), device=ids_T.device)[None]
    read = {"inputs_embeds": embedded_TH[None], "position_ids": positions}
    return head_logits(model, decoder_of(model)(**read, use_cache=False).last_hidden_state[0])


def _placed(made: dict[str, Any], model: nn.Module) -> dict[str, Tensor]:
    dtype, device = unwrapped(model).get_input_embeddings().weight.dtype, device_of(model)
    return {
        name: value.to(device, dtype) if value.is_floating_point() else value.to(device)
        for name, value in made.items()
    }


def _spans(processor: ImageProcessor, tokens: list[int], images: list[Media]) -> list[MediaSpan] | None:
    """Where each image's tokens stand; None if they are not there."""
    spans: list[MediaSpan] = []
    start = 0
    for image in images:
        own = processor.tokens(image)
        found = next((i for i in range(start, len(tokens)) if tokens[i : i + len(own)] == own), None)
        if found is None:
            return None
        start = found + len(own)
        spans.append(MediaSpan(image.sha256, found, start, image.data))
    return spans
