"""benchmarks/families.py finds out what is exact: it is run here, and told wrong numbers."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoConfig

from ludus.model import use_ludus_attention
from ludus.model.tiny import tiny_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def families() -> ModuleType:
    spec = importlib.util.spec_from_file_location("families", ROOT / "benchmarks" / "families.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["families"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "olmoe"])
def test_a_family_is_sampled_and_trained_exactly(families: ModuleType, family: str) -> None:
    row = families.examined(family, print)
    assert row.is_exact, row
    assert row.packed == "yes"
    assert row.prefixes <= families.TRAINED
    if importlib.util.find_spec("peft") is not None:
        assert row.lora <= families.TRAINED


def test_other_weights_than_the_reference_has_are_found_out(families: ModuleType) -> None:
    stock, _ = families.tiny_model("llama")
    model = copy.deepcopy(stock)
    use_ludus_attention(model)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(1.01)
    assert asyncio.run(families.sampling_error(model, stock)) > families.SAMPLED
    error, _ = families.training_error(model, stock, families.packed_rows(), share=False)
    assert error > families.TRAINED


def test_what_does_not_read_from_left_to_right_is_left_out(families: ModuleType) -> None:
    assert families.examined("bert", print).excluded == "it reads in both directions"
    assert families.examined("bart", print).excluded == "an encoder and a decoder"
    assert "chooses by an indexer" in families.examined("deepseek_v32", print).refused


def test_a_crash_or_an_endless_loop_is_a_row(
    families: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "examined", lambda *_: families.os.abort())
    assert families.in_a_process("llama").sampled == "its process ended (-6)"
    monkeypatch.setattr(families, "SECONDS", 0.2)
    monkeypatch.setattr(families, "examined", lambda *_: families.time.sleep(60))
    assert families.in_a_process("llama").sampled == "took more than 0.2 s"


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("gemma3_text", {"sliding_attention", "full_attention"}),
        ("qwen3_5_text", {"linear_attention", "full_attention"}),
        ("lfm3", {"conv", "sliding_attention", "full_attention"}),
        ("gemma4_text", {"sliding_attention", "full_attention"}),
    ],
)
def test_a_tiny_configuration_has_every_kind_of_layer(family: str, kinds: set[str]) -> None:
    config = AutoConfig.for_model(family)
    small = tiny_config(config)
    assert set(small.layer_types) == kinds == set(config.layer_types)
    assert small.num_hidden_layers == len(small.layer_types) < 5
    assert small.hidden_size == 64
    assert getattr(small, "sliding_window", 6) == 6


def test_layers_that_differ_differ_in_small_too() -> None:
    small = tiny_config(AutoConfig.for_model("gemma4_text")).to_dict()
    assert small["head_dim"] == 16
    assert [one["head_dim"] for one in small["per_layer_config"].values()] == [32]


def test_rotary_sections_fit_small_heads() -> None:
    table = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    config = AutoConfig.for_model("qwen2_5_vl", text_config={"rope_parameters": table})
    small = tiny_config(config).get_text_config().rope_parameters
    assert small["mrope_section"] == [2, 3, 3]
    table |= {"mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
    config = AutoConfig.for_model("glm4v", text_config={"rope_parameters": table})
    small = tiny_config(config).get_text_config().rope_parameters
    assert small["mrope_section"] == [2, 1, 1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_family_is_sampled_or_trained_wrongly(families: ModuleType) -> None:
    with families.quiet():
        rows = [families.in_a_process(family) for family in families.families()]
    there = [row for row in rows if not row.excluded]
    assert len(there) > 140
    assert [row.family for row in there if not row.is_exact and not row.refused] == []
