"""A model that sees: it takes a screenshot with a tool, and says which colour is on it.

    python examples/colours.py            # about a minute on a CPU; needs pip install 'ludus-rl[vision]'
    python examples/colours.py --blank    # the control: every screenshot is grey, and nothing can be learned
    python examples/colours.py --model qwen2_5_vl

The model is made on the spot: a LLaVA or a Qwen2.5-VL (whose positions have three dimensions) of the smallest
size, with random weights and a frozen vision tower. An expert shows how to call the tools and names the right
colour on every second screen; the rest is for RL.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import ludus
from ludus.chat import HFTokenizer, Renderer, load_format
from ludus.core import Media, Message, ToolCall, ToolContext
from ludus.training import fit_tokenizer

COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (40, 60, 220), "yellow": (220, 210, 50)}
SIDE, PATCH = 16, 8


def screen(task: str, colour: str) -> bytes:
    """An image of one colour, in a shade of its own and with noise: no two are the same."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(list(f"{task} {colour}".encode()))
    base = np.array(COLOURS.get(colour, (128, 128, 128))) * random.uniform(0.8, 1.0)
    pixels = np.clip(base + random.normal(0, 20, (24, 32, 3)), 0, 255).astype(np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


@ludus.tool
async def screenshot(context: ToolContext) -> Media:
    """Take an image of the screen."""
    return Media.image(screen(context.task.id, context.task.metadata["shown"]))


@ludus.tool
async def answer(colour: str) -> ludus.ToolResult:
    """Say which colour the screen has."""
    return ludus.ToolResult("noted", terminated=True)


@ludus.reward(name="success")
async def right(trajectory: ludus.Trajectory, target: str) -> float:
    return float(any(call.arguments.get("colour") == target for call in trajectory.calls))


def expert(task: ludus.Task) -> Iterator[ToolCall]:
    yield ToolCall("screenshot", {})
    yield ToolCall("answer", {"colour": Random(task.id).choice([task.target, *COLOURS, task.target])})


def tasks(first: int, count: int, *, blank: bool = False) -> list[dict[str, Any]]:
    """Screens by number; with `blank`, all of them are grey."""
    names = list(COLOURS)
    return [
        {
            "id": f"screen-{number}",
            "prompt": "Which colour is the screen?",
            "target": names[number % 4],
            "shown": "grey" if blank else names[number % 4],
        }
        for number in range(first, first + count)
    ]


def make_model(folder: Path, seed: int = 0, family: str = "llava") -> Path:
    """A model with two small layers and a random vision tower, as a folder in Hugging Face format."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, processor = FAMILIES[family]()
        model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _text(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.125,
        "eos_token_id": tokenizer.eos_token_id,
    }


def _llava() -> tuple[Any, Any]:
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = fit_tokenizer(_corpus(), 400)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
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
        chat_template=tokenizer.chat_template,
    )
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=SIDE,
            patch_size=PATCH,
            initializer_range=0.3,
        ),
        text_config=LlamaConfig(**_text(tokenizer)),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
    )
    return LlavaForConditionalGeneration(config), processor


def _qwen2_5_vl() -> tuple[Any, Any]:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from ludus.model.video_parts import NoVideos, videos_optional

    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = fit_tokenizer(_corpus(), 400)
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    start, end, image, video = tokenizer.convert_tokens_to_ids(names)
    images = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, size={"shortest_edge": SIDE * SIDE, "longest_edge": SIDE * SIDE}
    )
    with videos_optional():  # torchvision is not needed for images
        processor = Qwen2_5_VLProcessor(
            images, tokenizer, NoVideos(), chat_template=tokenizer.chat_template
        )
    rotation = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = Qwen2_5_VLConfig(
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [0],
            "initializer_range": 0.3,
        },
        text_config={**_text(tokenizer), "rope_parameters": rotation},
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
    )
    return Qwen2_5_VLForConditionalGeneration(config), processor


FAMILIES = {"llava": _llava, "qwen2_5_vl": _qwen2_5_vl}


def _corpus() -> list[str]:
    """What the model will read and write, for a tokenizer that has long pieces of it as tokens."""
    renderer = Renderer(HFTokenizer(fit_tokenizer([], 0)), load_format("hermes"))
    asked = [Message("user", "Which colour is the screen?")]
    prompt = renderer.tokenizer.decode(renderer.prompt(asked, [screenshot.spec, answer.spec]))
    calls = [ToolCall("screenshot", {}), *(ToolCall("answer", {"colour": name}) for name in COLOURS)]
    written = [renderer.format.render_action("", [call]) for call in calls]
    return [prompt, "\n[image]", *written] * 20


def run(
    folder: Path, *, blank: bool = False, seed: int = 0, family: str = "llava", **settings: Any
) -> ludus.Result:
    """Imitate, then RL; what stands in `settings` takes the place of what stands here."""
    chosen: dict[str, Any] = {
        "seed": seed,
        "budgets": {"max_turns": 2, "max_turn_tokens": 24},
        "warm_start": {"steps": 120, "batch": 16, "optimizer": {"learning_rate": 3e-3}},
        "rl": {
            "steps": 20 if family == "llava" else 40,
            "tasks": 16,
            "attempts": 8,
            "updates": 2,
            "optimizer": {"learning_rate": 1e-3},
        },
        **settings,
    }
    return ludus.train(
        model=str(make_model(folder / "model", seed, family)),
        tools=[screenshot, answer],
        rewards=[right],
        demonstrations=expert,
        tasks=tasks(0, 256, blank=blank),
        held_out=tasks(1000, 64, blank=blank),
        **chosen,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blank", action="store_true", help="show grey screens: the control")
    parser.add_argument("--model", choices=FAMILIES, default="llava")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        print(run(Path(made), blank=given.blank, seed=given.seed, family=given.model))
