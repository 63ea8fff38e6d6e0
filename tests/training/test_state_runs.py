"""Runs of models whose layers keep a state: sampled and trained alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from stage_runs import Talker
from training_helpers import TINY, add, even, tasks

import ludus
from ludus.observe import RunFolder
from ludus.training.models.scratch import fit_tokenizer


def tiny_qwen(folder: Path) -> Path:
    """A small Qwen3.5 with random weights, and a tokenizer, in a folder."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    tokenizer = fit_tokenizer(["a plus b? add"] * 20, 400)
    torch.manual_seed(3)
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        max_position_embeddings=4096,
    )
    Qwen3_5ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_the_engine_and_the_trainer_agree_through_a_run(
    tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    if lora:
        pytest.importorskip("peft")
    model = {"name": str(tiny_qwen(tmp_path / "model")), **({"lora": lora} if lora else {})}
    rl = {**TINY["rl"], "steps": 3, "optimizer": {"learning_rate": 1e-2}}
    tables = {**TINY, "model": model, "rl": rl, "run": {"folder": str(tmp_path / "run")}}
    ludus.train(**tables, tasks=tasks(6), tools=[add], rewards=[even], agent=Talker(), progress=False)
    rows = [row for row in RunFolder(tmp_path / "run").metrics() if "logprob_difference_max" in row]
    assert len(rows) == 3
    assert all(row["logprob_difference_max"] < 1e-4 for row in rows)
    assert all(row["gradient_norm"] > 0 for row in rows)
