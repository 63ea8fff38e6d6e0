"""Tiny models that see, made on the spot and saved to a folder with tokenizer and processor."""

from __future__ import annotations

from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from ludus.chat.tokenizers import CHATML
from ludus.core.messages import Media
from ludus.training.models.scratch import fit_tokenizer

SIDE, PATCH = 16, 8
LLAVA_TEMPLATE = (
    "{% for message in messages %}{{ message.role | upper }}: "
    "{% for part in message.content | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
"""Content in parts alone, images before text, as LLaVA's has it."""


@cache
def image(colour: str, size: tuple[int, int] = (20, 20)) -> Media:
    """An image of one colour."""
    from PIL import Image

    file = BytesIO()
    Image.new("RGB", size, colour).save(file, format="PNG")
    return Media.image(file.getvalue())


def noise(seed: int, size: tuple[int, int] = (20, 20)) -> Media:
    """An image in which no two patches are alike."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return Media.image(file.getvalue())


def _tokenizer(specials: tuple[str, ...], template: str = CHATML) -> Any:
    fitted = fit_tokenizer(["red green blue what colour is this image of"] * 20, 400)
    fitted.add_special_tokens({"additional_special_tokens": list(specials)})
    fitted.chat_template = template
    return fitted


def _text(vocabulary: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.1,
        **more,
    }


def _clip(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
        "initializer_range": 0.5,
        **more,
    }


def save_llava(folder: Path, *, template: str = CHATML, seed: int = 0) -> Path:
    """LLaVA's shape: a CLIP tower, four placeholders an image."""
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = _tokenizer(("<image>",), template)
    images = CLIPImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
    )
    processor = LlavaProcessor(
        images,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=template,
    )
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**_clip()),
        text_config=LlamaConfig(**_text(len(tokenizer), eos_token_id=tokenizer.eos_token_id)),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
    )
    return _save(folder, LlavaForConditionalGeneration, config, processor, seed)


def save_idefics3(folder: Path, *, template: str = CHATML, seed: int = 0) -> Path:
    """Idefics3's shape, as SmolVLM has it: images in tiles, with tokens of their own around placeholders."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    names = tuple(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7))
    specials = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *names)
    tokenizer = _tokenizer(specials, template)
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE}
    )
    processor = Idefics3Processor(images, tokenizer, image_seq_len=1, chat_template=template)
    config = Idefics3Config(
        vision_config=_clip(),
        text_config={
            "model_type": "llama",
            **_text(len(tokenizer), eos_token_id=tokenizer.eos_token_id),
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=False,
    )
    return _save(folder, Idefics3ForConditionalGeneration, config, processor, seed)


def _save(folder: Path, kind: Any, config: Any, processor: Any, seed: int) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def save_llava_next(folder: Path) -> Path:
    """LLaVA-NeXT's shape: tiles by the image's aspect, and a feature at the end of each line."""
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaNextConfig,
        LlavaNextForConditionalGeneration,
        LlavaNextProcessor,
    )
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    tokenizer = _tokenizer(("<image>",))
    points = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": SIDE},
        crop_size={"height": SIDE, "width": SIDE},
        image_grid_pinpoints=points,
    )
    processor = LlavaNextProcessor(
        images,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )
    config = LlavaNextConfig(
        vision_config=CLIPVisionConfig(**_clip()),
        text_config=LlamaConfig(**_text(len(tokenizer), eos_token_id=tokenizer.eos_token_id)),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
        image_grid_pinpoints=points,
    )
    return _save(folder, LlavaNextForConditionalGeneration, config, processor, 0)


def save_paligemma(folder: Path) -> Path:
    """PaliGemma's shape: all tokens of a prompt see each other in both directions, text included."""
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration, PaliGemmaProcessor
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    tokenizer = _tokenizer(("<image>", "<bos>"))
    tokenizer.bos_token = "<bos>"
    images = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    images.image_seq_length = 4
    processor = PaliGemmaProcessor(images, tokenizer, chat_template=tokenizer.chat_template)
    config = PaliGemmaConfig(
        vision_config=_clip(vision_use_head=False, projection_dim=64),
        text_config={"model_type": "gemma", **_text(len(tokenizer), head_dim=16)},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=64,
        hidden_size=64,
    )
    return _save(folder, PaliGemmaForConditionalGeneration, config, processor, 0)


def save_gemma3(folder: Path) -> Path:
    """Gemma 3's shape: the tokens of an image see each other in both directions."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    tokenizer = _tokenizer(("<image_soft_token>", "<start_of_image>", "<end_of_image>"))
    names = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    tokenizer._set_model_specific_special_tokens(special_tokens=names)
    images = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    processor = Gemma3Processor(images, tokenizer, image_seq_length=4)
    config = Gemma3Config(
        vision_config=_clip(vision_use_head=False),
        text_config=_text(len(tokenizer), head_dim=16, sliding_window=64),
        mm_tokens_per_image=4,
        image_token_index=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
        boi_token_index=tokenizer.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<end_of_image>"),
    )
    return _save(folder, Gemma3ForConditionalGeneration, config, processor, 0)
