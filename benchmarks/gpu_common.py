"""What the GPU benchmarks share: model shapes, the machine's bandwidth, tables."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 151_936
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024},
    "qwen2.5-0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
                     "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": VOCABULARY},
    "qwen2.5-1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                     "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": VOCABULARY},
}  # fmt: skip


def random_model(name: str, device: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """A model of this shape with random weights; the same weights for every dtype."""
    config = Qwen2Config(
        **SHAPES[name],
        tie_word_embeddings=True,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = Qwen2ForCausalLM(config)
    return model.to(torch.bfloat16).to(dtype).eval()


def weight_bytes(model: PreTrainedModel) -> int:
    """What a decode step reads of the weights: all of them, a tied head once."""
    return sum(weight.nbytes for weight in model.parameters())


def kv_bytes(model: PreTrainedModel) -> int:
    """What a token's keys and values take in all layers."""
    config = model.config
    size = config.hidden_size // config.num_attention_heads
    element = next(model.parameters()).element_size()
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * size * element)


def copy_bandwidth(device: str, size: int = 4 << 30) -> float:
    """Bytes a second, read and written, of a large copy."""
    source = torch.zeros(size if device == "cuda" else size >> 6, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(6):
        synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * len(source) / best


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def machine(device: str) -> str:
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__}"


def say(line: str = "") -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A markdown table; numbers are shortened to what can be read."""
    if not rows:
        return "(nothing was measured)"
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, ["---"] * len(names), *([_shown(row.get(name)) for name in names] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _shown(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def write(out: Path | None, content: object) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(content, indent=2) + "\n")
