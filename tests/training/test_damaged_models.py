"""Folders that hold most of a model: refused, and never filled up with random numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ludus.core import ConfigError
from ludus.model import use_ludus_attention
from ludus.training import ModelConfig, ScratchConfig, fit_tokenizer, load_model, scratch_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = fit_tokenizer([], 0)
    shape = ScratchConfig(layers=2, width=32, heads=2, kv_heads=1)
    model: Any = scratch_model(shape, tokenizer, seed=3)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path) -> Any:
    return load_model(ModelConfig(name=str(folder), device="cpu"), seed=0)[0]


def change(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))


def test_a_whole_one_is_loaded(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert sum(p.numel() for p in load(folder).parameters()) > 1000
    assert not caplog.records


def test_weights_that_are_not_there_are_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack 1 of the weights.*model\.layers\.1\.mlp\.up_proj"):
        load(folder)


def test_layers_that_are_not_there_are_named(folder: Path) -> None:
    change(folder, num_hidden_layers=4)
    with pytest.raises(ConfigError, match=r"its files lack .* such as model\.layers\.2"):
        load(folder)


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    change(folder, intermediate_size=200)
    with pytest.raises(ConfigError, match="neither a folder with a whole model"):
        load(folder)


def test_weights_that_are_no_numbers_are_told_apart_from_odd_models(folder: Path) -> None:
    model = load(folder)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 3] = float("nan")
    with pytest.raises(ConfigError, match="its weights are damaged"):
        use_ludus_attention(model)


def test_a_tokenizer_with_more_tokens_than_the_model_is_warned_of(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit_tokenizer(["one two three four five six seven"] * 50, 400).save_pretrained(folder)
    load(folder)
    assert "were the embeddings not resized" in caplog.text
