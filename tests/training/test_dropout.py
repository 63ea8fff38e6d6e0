"""What is trained is what was sampled: a model's own dropout is off, an adapter's is drawn from the seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training_helpers import TINY, Chatty, add, even, expert, tasks
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
)

import ludus
from ludus.training import ModelConfig, fit_tokenizer, load_model
from ludus.training.models.loading import without_dropout

MAKERS: dict[str, Any] = {
    "gpt2": lambda size: GPT2LMHeadModel(GPT2Config(vocab_size=size, n_embd=32, n_layer=1, n_head=2)),
    "opt": lambda size: OPTForCausalLM(
        OPTConfig(
            vocab_size=size, hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, num_hidden_layers=1,
            num_attention_heads=2, layerdrop=0.2,
        )
    ),
    "mixtral": lambda size: MixtralForCausalLM(
        MixtralConfig(
            vocab_size=size, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, num_local_experts=4, router_jitter_noise=0.5,
        )
    ),
    "phimoe": lambda size: PhimoeForCausalLM(
        PhimoeConfig(
            vocab_size=size, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, num_local_experts=4, router_jitter_noise=0.3, input_jitter_noise=0.3,
        )
    ),
    "llama": lambda size: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
            num_attention_heads=2, attention_dropout=0.3,
        )
    ),
}  # fmt: skip


def saved(name: str, folder: Path) -> Path:
    tokenizer = fit_tokenizer(["a plus b? add"] * 20, 400)
    torch.manual_seed(0)
    MAKERS[name](len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(folder: Path, **settings: Any) -> ludus.training.Result:
    common = {**TINY, **settings}
    common["run"] = {**TINY["run"], "folder": str(folder)}
    return ludus.train(**common, tasks=tasks(6), tools=[add], rewards=[even], agent=Chatty())


@pytest.mark.parametrize("name", MAKERS)
def test_a_model_s_own_dropout_is_off(name: str, tmp_path: Path) -> None:
    base = saved(name, tmp_path / "base")
    model, _ = load_model(ModelConfig(name=str(base), device="cpu"), seed=0)
    loaded: Any = model
    loaded.train()
    ids = torch.arange(9)[None]
    assert torch.equal(loaded(input_ids=ids).logits, loaded(input_ids=ids).logits)
    result = run(tmp_path / "run", model=base, rl={**TINY["rl"], "steps": 1, "kl": 0.1})
    (row,) = [row for row in result.metrics if "ratio_max" in row]
    assert row["logprob_difference_max"] < 1e-4
    assert abs(row["kl"]) < 1e-6


def test_rates_are_found_in_parts_too_and_nothing_else_is_touched() -> None:
    config = GPT2Config()
    config.part = LlamaConfig(attention_dropout=0.3)
    config.drops_nothing, config.backdrop = True, "blue"
    silenced = without_dropout(config)
    assert "attn_pdrop = 0.1" in silenced and "attention_dropout = 0.3" in silenced
    assert (config.attn_pdrop, config.resid_pdrop, config.part.attention_dropout) == (0, 0, 0)
    assert (config.drops_nothing, config.backdrop) == (True, "blue")
    assert without_dropout(config) == []


@pytest.mark.slow
def test_an_adapter_s_dropout_is_a_function_of_the_seed(tmp_path: Path) -> None:
    base = saved("llama", tmp_path / "base")
    settings: dict[str, Any] = {
        "model": {"name": str(base), "lora": {"rank": 4, "dropout": 0.4}},
        "max_in_flight": 1,
        "warm_start": {"steps": 2, "batch": 4, "optimizer": {"learning_rate": 1e-2}},
        "demonstrations": expert,
        "rl": {**TINY["rl"], "attempts": 2, "kl": 0.1},
    }
    whole = run(tmp_path / "whole", **settings)
    torch.manual_seed(99)  # what else draws must not matter
    again = run(tmp_path / "again", **settings)

    class Stopped(Exception):
        pass

    def stop(phase: str, step: int, total: int, metrics: dict[str, float]) -> None:
        if phase == "RL" and step == 2:
            raise Stopped

    with pytest.raises(Stopped):
        run(tmp_path / "cut", **settings, on_step=stop)
    resumed = ludus.train(
        resume=tmp_path / "cut",
        tasks=tasks(6), tools=[add], rewards=[even], agent=Chatty(), demonstrations=expert,
    )  # fmt: skip
    other = run(tmp_path / "other", **{**settings, "seed": 5})
    found = [load_file(r.model / "adapter_model.safetensors") for r in (whole, again, resumed, other)]
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name]) and torch.equal(tensor, found[2][name]), name
    assert any(not torch.equal(tensor, found[3][name]) for name, tensor in found[0].items())


def test_a_step_leaves_other_draws_alone(tmp_path: Path) -> None:
    from ludus.training.optim.learner import SeededDropout

    drops = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    seeded = SeededDropout(drops, torch.device("cpu"), seed=3)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    drawn = []
    for step in (0, 1, 0):
        with seeded.drawn_for(step):
            drawn.append(drops(torch.ones(1, 4)))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])
