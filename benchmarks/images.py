"""What it saves to compute the features of a frozen vision tower once an update, and not in every micro-batch.

    python benchmarks/images.py [--rounds 3]

Two small models with the proportions of well-known ones: LLaVA's, whose tower is small beside its decoder, and
SmolVLM's, whose tower reads sixteen patches for each token of its decoder. An update of GRPO with a KL penalty
on 2 groups of 4 attempts: an image in the prompt, another one in the observation of each attempt. CPU seconds,
in turns in one run.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import tempfile
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ludus.chat import CHATML, Renderer, load_format
from ludus.core import Group, Media, Message, Segment, SegmentKind, StopReason, Task
from ludus.core.trajectory import TokenSequence, Trajectory
from ludus.model import images as image_features
from ludus.model import use_ludus_attention
from ludus.training import (
    Learner,
    OptimizerConfig,
    RLConfig,
    RolloutBatch,
    fit_tokenizer,
    load_model,
    policy_rows,
    policy_update,
)
from ludus.training.config.run import ModelConfig
from ludus.training.optim.learner import frozen

GROUPS, ATTEMPTS, MICRO_BATCH = 2, 4, 512
ROOM = image_features.FEATURE_BYTES


def tokenizer_with(*specials: str) -> Any:
    fitted = fit_tokenizer(["what is on this image"] * 20, 400)
    fitted.add_special_tokens({"additional_special_tokens": list(specials)})
    fitted.chat_template = CHATML
    return fitted


def text(vocabulary: int, width: int, layers: int) -> dict[str, Any]:
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 64}
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    return {"vocab_size": vocabulary, "max_position_embeddings": 4096, **sizes, **heads}


def like_llava(folder: Path) -> None:
    """A tower of a 20th of the decoder's size, 64 patches, a token each."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaProcessor
    from transformers import LlavaForConditionalGeneration as Model
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = tokenizer_with("<image>")
    images = CLIPImageProcessorPil(size={"shortest_edge": 112}, crop_size={"height": 112, "width": 112})
    options = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    LlavaProcessor(images, tokenizer, patch_size=14, image_token="<image>", **options).save_pretrained(
        folder
    )
    tower = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 5}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**tower, num_attention_heads=1, image_size=112, patch_size=14),
        text_config=LlamaConfig(**text(len(tokenizer), 256, 6)),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    Model(config).save_pretrained(folder)


def like_smolvlm(folder: Path) -> None:
    """A tower of the decoder's size; an image is 5 tiles of 256 patches, and 16 tokens each."""
    from transformers import Idefics3Config, Idefics3Processor
    from transformers import Idefics3ForConditionalGeneration as Model
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    names = tuple(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7))
    specials = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *names)
    tokenizer = tokenizer_with(*specials)
    images = Idefics3ImageProcessorPil(size={"longest_edge": 512}, max_image_size={"longest_edge": 256})
    Idefics3Processor(images, tokenizer, image_seq_len=16).save_pretrained(folder)
    tower = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3}
    config = Idefics3Config(
        vision_config={**tower, "num_attention_heads": 2, "image_size": 256, "patch_size": 16},
        text_config={"model_type": "llama", **text(len(tokenizer), 128, 4)},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=4,
        tie_word_embeddings=False,
    )
    Model(config).save_pretrained(folder)


def screen(seed: int) -> Media:
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (300, 400, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return Media.image(file.getvalue())


def played(renderer: Renderer) -> RolloutBatch:
    source, groups = random.Random(0), []
    for number in range(GROUPS):
        task, attempts = Task.of("x", id=str(number)), []
        opening = renderer.opening([Message("user", "what is this?", media=(screen(number),))])
        for attempt in range(ATTEMPTS):
            seen = screen(100 + number * ATTEMPTS + attempt)
            later = renderer.opening([Message("tool", "look", media=(seen,))])
            segments = [
                Segment(SegmentKind.PROMPT, opening.tokens, media=opening.media),
                said(source),
                Segment(SegmentKind.OBSERVATION, later.tokens, media=later.media),
                said(source),
            ]
            reward = float(attempt % 2)
            whole = [TokenSequence(segments)]
            attempts.append(
                Trajectory(task, whole, stop=StopReason.ANSWERED, reward=reward, attempt=attempt)
            )
        groups.append(Group(task, attempts))
    return RolloutBatch(groups, frozenset(), [0] * GROUPS, {})


def said(source: random.Random) -> Segment:
    tokens = [source.randrange(5, 200) for _ in range(40)]
    return Segment(SegmentKind.ACTION, tokens, [-5.0] * 40)


WAYS = ("in every micro-batch", "once an update", "by the engine beside")
"""None are kept; those of this update; and those of the policy are there from playing."""


def measured(folder: Path, rounds: int) -> list[list[float]]:
    """CPU seconds of an update, in each of the ways."""
    model, tokenizer = load_model(ModelConfig(name=str(folder), device="cpu", vision="frozen"), 0)
    use_ludus_attention(model)
    batch = played(Renderer(tokenizer, load_format("hermes")))
    reference = frozen(copy.deepcopy(model))
    config = RLConfig.parse({"kl": 0.01, "updates": 2})
    learner = Learner(model, OptimizerConfig(learning_rate=1e-6, micro_batch_tokens=MICRO_BATCH), 100)
    found: list[list[float]] = [[] for _ in WAYS]
    for number in range(rounds + 1):
        for way in range(len(WAYS)):
            image_features.FEATURE_BYTES = ROOM if way else 0
            for one in (reference, model)[: 1 if way == 2 else 2]:
                image_features.forget_features(one)
            started = time.process_time()
            policy_update(learner, policy_rows(batch, config), config, reference=reference, critic=None)
            if number:  # the first one of each warms up
                found[way].append(time.process_time() - started)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"| features are computed | {' | '.join(WAYS)} |")
    print("|---|---|---|---|")
    for name, make in (("LLaVA", like_llava), ("SmolVLM", like_smolvlm)):
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder))
            found = measured(Path(folder), rounds)
        cells = [f"{statistics.median(found[0]):.2f} s"]
        for seconds in found[1:]:
            ratios = sorted(one / every for one, every in zip(seconds, found[0], strict=True))
            shown = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            cells.append(f"{statistics.median(seconds):.2f} s: {shown} times")
        print(f"| {name}'s proportions | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
