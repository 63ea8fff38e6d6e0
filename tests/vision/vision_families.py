"""Tiny models of today's vision-language families, with processors made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vision_models import PATCH, SIDE, _clip, _save, _text, _tokenizer, save_gemma3, save_idefics3

from ludus.model.video_parts import NoVideos, videos_optional

QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML with images as Qwen's templates write them."""
_QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def _processor(kind: Any, *parts: Any, **more: Any) -> Any:
    """A processor without its part for videos, as it is loaded where torchvision is not installed."""
    with videos_optional():
        return kind(*parts, NoVideos(), **more)


def _ids(tokenizer: Any, **names: str) -> dict[str, int]:
    return {key: tokenizer.convert_tokens_to_ids(name) for key, name in names.items()}


def _qwen_images(patch: int = 4, most: int = 32 * 32) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": 8 * 8, "longest_edge": most}
    return Qwen2VLImageProcessorPil(patch_size=patch, temporal_patch_size=2, merge_size=2, size=size)


def _qwen_tokens(tokenizer: Any) -> dict[str, int]:
    start, end, image, video = _QWEN
    return _ids(
        tokenizer,
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
    )


def _rotation(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections), **more}


def save_qwen2_vl(folder: Path) -> Path:
    """Positions in three dimensions, images of any size."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
    from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

    tokenizer = _tokenizer(_QWEN, QWEN_TEMPLATE)
    config = Qwen2VLConfig(
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "num_heads": 2,
            "hidden_size": 64,
            "patch_size": 4,
            "initializer_range": 0.3,
        },
        text_config=_text(len(tokenizer), rope_parameters=_rotation(2, 3, 3)),
        **_qwen_tokens(tokenizer),
    )
    processor = _processor(Qwen2VLProcessor, _qwen_images(), tokenizer, chat_template=QWEN_TEMPLATE)
    return _save(folder, Qwen2VLForConditionalGeneration, config, processor, 0)


def save_qwen2_5_vl(folder: Path) -> Path:
    """As Qwen2-VL, with windows in the vision tower."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor

    tokenizer = _tokenizer(_QWEN, QWEN_TEMPLATE)
    config = Qwen2_5_VLConfig(
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.3,
        },
        text_config=_text(len(tokenizer), rope_parameters=_rotation(2, 3, 3)),
        **_qwen_tokens(tokenizer),
    )
    processor = _processor(Qwen2_5_VLProcessor, _qwen_images(), tokenizer, chat_template=QWEN_TEMPLATE)
    return _save(folder, Qwen2_5_VLForConditionalGeneration, config, processor, 0)


def _qwen3_vision(**more: Any) -> dict[str, Any]:
    return {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 4,
        "num_position_embeddings": 64,
        "initializer_range": 0.3,
        **more,
    }


def save_qwen3_vl(folder: Path) -> Path:
    """Interleaved positions in three dimensions, and features in the first layers (deepstack)."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    tokenizer = _tokenizer(_QWEN, QWEN_TEMPLATE)
    rotation = _rotation(4, 2, 2, mrope_interleaved=True)
    text = _text(len(tokenizer), head_dim=16, rope_parameters=rotation, num_hidden_layers=3)
    config = Qwen3VLConfig(
        vision_config=_qwen3_vision(deepstack_visual_indexes=[0, 1]),
        text_config=text,
        **_qwen_tokens(tokenizer),
    )
    processor = _processor(Qwen3VLProcessor, _qwen_images(), tokenizer, chat_template=QWEN_TEMPLATE)
    return _save(folder, Qwen3VLForConditionalGeneration, config, processor, 0)


def save_qwen3_5(folder: Path) -> Path:
    """Qwen3.5's own vision, with layers that have a state."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    tokenizer = _tokenizer(_QWEN, QWEN_TEMPLATE)
    rotation = _rotation(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.5)
    text = _text(
        len(tokenizer),
        head_dim=16,
        rope_parameters=rotation,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    config = Qwen3_5Config(vision_config=_qwen3_vision(), text_config=text, **_qwen_tokens(tokenizer))
    processor = _processor(Qwen3VLProcessor, _qwen_images(), tokenizer, chat_template=QWEN_TEMPLATE)
    return _save(folder, Qwen3_5ForConditionalGeneration, config, processor, 0)


def save_glm4v(folder: Path) -> Path:
    """GLM-4V: positions in three dimensions."""
    from transformers import Glm4vConfig, Glm4vForConditionalGeneration
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
    from transformers.models.glm4v.processing_glm4v import Glm4vProcessor

    names = ("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>")
    tokenizer = _tokenizer((*names, "<|begin_of_video|>", "<|end_of_video|>"))
    images = Glm4vImageProcessorPil(
        patch_size=4,
        temporal_patch_size=2,
        merge_size=2,
        size={"shortest_edge": 8 * 8 * 2, "longest_edge": 32 * 32 * 2},
    )
    config = Glm4vConfig(
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 4,
            "image_size": 32,
            "initializer_range": 0.3,
        },
        text_config=_text(
            len(tokenizer), rope_parameters=_rotation(1, 1, 2, partial_rotary_factor=0.5), pad_token_id=0
        ),
        **_ids(
            tokenizer,
            image_token_id="<|image|>",
            video_token_id="<|video|>",
            image_start_token_id="<|begin_of_image|>",
            image_end_token_id="<|end_of_image|>",
            video_start_token_id="<|begin_of_video|>",
            video_end_token_id="<|end_of_video|>",
        ),
    )
    processor = _processor(Glm4vProcessor, images, tokenizer, chat_template=tokenizer.chat_template)
    return _save(folder, Glm4vForConditionalGeneration, config, processor, 0)


def save_gemma4(folder: Path, **text: Any) -> Path:
    """Gemma 4: an image's tokens see each other in the layers with a window."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

    names = {
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
    }
    tokenizer = _tokenizer((*names.values(), "<|video|>"))
    tokenizer._set_model_specific_special_tokens(special_tokens=names)
    images = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    processor = _processor(
        Gemma4Processor,
        Gemma4AudioFeatureExtractor(),
        images,
        tokenizer,
        chat_template=tokenizer.chat_template,
        image_seq_length=70,
    )
    settings = {
        "head_dim": 16,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 0,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 24,
        "use_bidirectional_attention": "vision",
        "vocab_size_per_layer_input": len(tokenizer),
        "pad_token_id": 0,
        **text,
    }
    config = Gemma4Config(
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 512,
            "initializer_range": 0.3,
        },
        audio_config=None,
        text_config=_text(len(tokenizer), **settings),
        **_ids(
            tokenizer,
            image_token_id="<|image|>",
            boi_token_id="<|image>",
            eoi_token_id="<image|>",
            audio_token_id="<|audio|>",
            boa_token_id="<|audio>",
            eoa_token_index="<audio|>",
            video_token_id="<|video|>",
        ),
    )
    return _save(folder, Gemma4ForConditionalGeneration, config, processor, 0)


def save_gemma4_small(folder: Path) -> Path:
    """The smaller Gemma 4: causal attention, and an embedding for each layer."""
    return save_gemma4(folder, use_bidirectional_attention=None, hidden_size_per_layer_input=8)


def save_internvl(folder: Path) -> Path:
    """InternVL: images in tiles."""
    from transformers import InternVLConfig, InternVLForConditionalGeneration
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.internvl.processing_internvl import InternVLProcessor

    names = {
        "context_image_token": "<IMG_CONTEXT>",
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "video_token": "<video>",
    }
    tokenizer = _tokenizer(tuple(names.values()))
    tokenizer._set_model_specific_special_tokens(special_tokens=names)
    images = GotOcr2ImageProcessorPil(size={"height": SIDE, "width": SIDE}, min_patches=1, max_patches=2)
    template = tokenizer.chat_template
    processor = _processor(
        InternVLProcessor, images, tokenizer, image_seq_length=4, chat_template=template
    )
    config = InternVLConfig(
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": (SIDE, SIDE),
            "patch_size": (4, 4),
            "initializer_range": 0.3,
        },
        text_config={"model_type": "qwen2", **_text(len(tokenizer))},
        image_seq_length=4,
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        tie_word_embeddings=False,
    )
    return _save(folder, InternVLForConditionalGeneration, config, processor, 0)


def save_smolvlm(folder: Path) -> Path:
    """SmolVLM: Idefics3's construction."""
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration
    from transformers.models.smolvlm import processing_smolvlm
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
    from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

    processing_smolvlm.num2words = str  # for videos only, and not installed here

    names = tuple(f"<row_{row}_col_{col}>" for row in range(1, 4) for col in range(1, 4))
    specials = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *names)
    tokenizer = _tokenizer(specials)
    images = SmolVLMImageProcessorPil(
        size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE}
    )
    template = tokenizer.chat_template
    processor = _processor(SmolVLMProcessor, images, tokenizer, image_seq_len=1, chat_template=template)
    config = SmolVLMConfig(
        vision_config=_clip(),
        text_config={"model_type": "llama", **_text(len(tokenizer))},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=False,
    )
    return _save(folder, SmolVLMForConditionalGeneration, config, processor, 0)


def save_llava_onevision(folder: Path) -> Path:
    """LLaVA-OneVision: an image alone in tiles, and one tile of each where there are several."""
    from transformers import (
        LlavaOnevisionConfig,
        LlavaOnevisionForConditionalGeneration,
        SiglipVisionConfig,
    )
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
        LlavaOnevisionImageProcessorPil,
    )
    from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

    tokenizer = _tokenizer(("<image>", "<video>"))
    points = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
    images = LlavaOnevisionImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, image_grid_pinpoints=points
    )
    processor = _processor(
        LlavaOnevisionProcessor,
        images,
        tokenizer,
        num_image_tokens=(SIDE // PATCH) ** 2,
        vision_feature_select_strategy="full",
        chat_template=tokenizer.chat_template,
    )
    config = LlavaOnevisionConfig(
        vision_config=SiglipVisionConfig(**_clip(vision_use_head=False)),
        text_config={"model_type": "qwen2", **_text(len(tokenizer))},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        image_grid_pinpoints=points,
    )
    return _save(folder, LlavaOnevisionForConditionalGeneration, config, processor, 0)


class PixtralStandIn:
    """Pixtral's processor, whose own module cannot be imported without torchvision."""

    image_token, image_break, image_end = "[IMG]", "[IMG_BREAK]", "[IMG_END]"

    def __init__(self, image_processor: Any, tokenizer: Any, side: int) -> None:
        self.image_processor, self.tokenizer, self.side = image_processor, tokenizer, side

    def __call__(self, text: str, images: list[Any], **_: Any) -> dict[str, Any]:
        import torch

        made = self.image_processor(images, patch_size=self.side, return_tensors="pt")
        first, *others = text.split(self.image_token)
        written = [first]
        for (height, width), other in zip(made["image_sizes"], others, strict=True):
            line = self.image_token * int(width // self.side)
            lines = self.image_break.join([line] * int(height // self.side))
            written += [lines, self.image_end, other]
        ids = self.tokenizer("".join(written), add_special_tokens=False)["input_ids"]
        sizes = torch.tensor([list(map(int, size)) for size in made["image_sizes"]])
        return {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
            "pixel_values": made["pixel_values"],
            "image_sizes": sizes,
        }

    def save_pretrained(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)

    @classmethod
    def load(cls, folder: Any) -> PixtralStandIn:
        from transformers import AutoTokenizer
        from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

        images = PixtralImageProcessorPil(size={"longest_edge": 48}, patch_size=8)
        return cls(images, AutoTokenizer.from_pretrained(folder), 8)


def save_mistral3(folder: Path) -> Path:
    """Mistral 3: Pixtral's tower, patches merged, images of any size."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, MistralConfig

    tokenizer = _tokenizer((PixtralStandIn.image_token, "[IMG_BREAK]", "[IMG_END]"))
    config = Mistral3Config(
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 48,
            "patch_size": 4,
            "initializer_range": 0.3,
        },
        text_config=MistralConfig(**_text(len(tokenizer), sliding_window=None)),
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    processor = PixtralStandIn(None, tokenizer, 8)
    return _save(folder, Mistral3ForConditionalGeneration, config, processor, 0)


SAVERS = {
    "qwen2_vl": save_qwen2_vl,
    "qwen2_5_vl": save_qwen2_5_vl,
    "qwen3_vl": save_qwen3_vl,
    "qwen3_5": save_qwen3_5,
    "glm4v": save_glm4v,
    "gemma3": save_gemma3,
    "gemma4": save_gemma4,
    "gemma4_small": save_gemma4_small,
    "internvl": save_internvl,
    "smolvlm": save_smolvlm,
    "idefics3": save_idefics3,
    "llava_onevision": save_llava_onevision,
    "mistral3": save_mistral3,
}
