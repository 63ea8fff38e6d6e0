"""Mixtures of experts in training: their load, the routers' auxiliary loss, adapters; runs of new families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_steps import learner_of, packs, rows_of_lengths, small_model
from torch import Tensor
from training_helpers import TINY, Chatty, add, even, tasks
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import ludus
from ludus.core import ConfigError, Sampling
from ludus.engine import EmbeddedEngine
from ludus.model import checkpointable_layers, set_activation_checkpointing, use_ludus_attention
from ludus.training import Batch, MicroBatch, ModelConfig, fit_tokenizer, load_model, save_adapter
from ludus.training.optim.routing import load_metrics

_SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
}


def make_experts(kind: str, vocabulary: int = 50, **changes: Any) -> PreTrainedModel:
    settings = {**_SHAPE, **EXPERTS.get(kind, {}), "vocab_size": vocabulary, **changes}
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn_like(weight) * weight.shape[-1] ** -0.5)
            elif not bool(weight.any()) or not bool(weight.isfinite().all()):
                weight.copy_(torch.randn_like(weight) * 0.1)
    return model.eval()


def _plain(logprobs_A: Tensor, entropy_A: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprobs_A, {}


def _routed(model: PreTrainedModel, batch: Batch) -> list[Tensor]:
    """[T, E] of each layer: transformers' own router logits, of one row at a time."""
    rows = batch.tokens_T.split(list(batch.lengths))
    found = [model(row[None], output_router_logits=True, use_cache=False).router_logits for row in rows]
    return [torch.cat(layer) for layer in zip(*found, strict=True)]


def _balance(logits: list[Tensor], chosen: int) -> Tensor:
    """The Switch Transformer's loss in plain words, all layers' tokens together."""
    weights = torch.cat(logits).softmax(-1)
    sent = torch.zeros_like(weights).scatter(1, weights.topk(chosen).indices, 1.0)
    return weights.shape[1] * (sent.mean(0) * weights.mean(0)).sum()


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", EXPERTS)
def test_the_auxiliary_loss_and_the_load_are_those_of_transformers(
    kind: str, checkpointed: bool
) -> None:
    batch = rows_of_lengths([17, 9, 23])
    stock, model = make_experts(kind), make_experts(kind)
    use_ludus_attention(model)
    if checkpointed:
        set_activation_checkpointing(model, checkpointable_layers(model))
    logits = _routed(stock, batch)
    wanted = _balance(logits, 2)
    learner = learner_of(model, router_aux_loss=0.5)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = learner.step(packs(batch), lambda *_: (torch.zeros_like(_[0]), {}))
    assert found["router_aux_loss"] == pytest.approx(wanted.item(), rel=1e-5)
    assert found["loss"] == pytest.approx(0.5 * wanted.item(), rel=1e-5)
    (0.5 * wanted).backward()
    exact = {n: p.grad for n, p in stock.named_parameters() if p.grad is not None}
    norm = torch.stack([g.norm() for g in exact.values()]).norm()
    assert found["gradient_norm"] == pytest.approx(float(norm), rel=1e-4)
    moved = {n for n, p in model.named_parameters() if not torch.equal(p.detach(), before[n])}
    assert any("gate.weight" in n or "router.weight" in n for n in moved)
    wanted = wanted.detach()
    load_LE = torch.stack([one.topk(2).indices.flatten().bincount(minlength=4) for one in logits])
    share = load_LE / load_LE.sum(1, keepdim=True)
    entropy = -(share * share.clamp_min(1e-9).log()).sum(1) / torch.tensor(4.0).log()
    assert found["experts/entropy"] == pytest.approx(float(entropy.mean()), rel=1e-5)
    assert found["experts/load_max"] == pytest.approx(4 * float(share.max()), rel=1e-5)
    assert found["experts/dead"] == pytest.approx(float((load_LE == 0).float().mean()))


def test_what_is_split_into_passes_has_the_load_of_all_of_it() -> None:
    batch = rows_of_lengths([17, 9, 23, 5])
    found = []
    for budget in (1 << 14, 24):
        model = make_experts("mixtral")
        use_ludus_attention(model)
        metrics = learner_of(model).step(packs(batch, budget), _plain)
        assert "router_aux_loss" not in metrics
        found.append({name: v for name, v in metrics.items() if name.startswith("experts/")})
    assert found[0] == pytest.approx(found[1])
    assert len(found[0]) == 3


def test_a_load_in_plain_numbers() -> None:
    even = load_metrics(torch.tensor([[3, 3], [3, 3]]).double())
    assert even == pytest.approx({"experts/entropy": 1, "experts/load_max": 1, "experts/dead": 0})
    uneven = load_metrics(torch.tensor([[4, 0], [2, 2]]).double())
    assert uneven == pytest.approx({"experts/entropy": 0.5, "experts/load_max": 2, "experts/dead": 0.25})


def test_models_without_an_auxiliary_loss_refuse_it() -> None:
    with pytest.raises(ConfigError, match=r"router_aux_loss = 0\.1"):
        learner_of(small_model(), router_aux_loss=0.1)
    assert not any(
        name.startswith("experts/")
        for name in learner_of(small_model()).step(packs(rows_of_lengths([9, 5])), _plain)
    )


# Adapters of experts


def _folder(kind: str, folder: Path, **changes: Any) -> Path:
    tokenizer = fit_tokenizer(["a plus b? add"] * 20, 400)
    model = make_experts(kind, 400, eos_token_id=tokenizer.eos_token_id, **changes)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


_TARGETS = ["q_proj", "experts.gate_up_proj", "down_proj"]


@pytest.mark.parametrize("kind", EXPERTS)
async def test_adapters_of_experts_train_and_are_sampled(kind: str, tmp_path: Path) -> None:
    base = _folder(kind, tmp_path / "base")
    lora = {"rank": 4, "targets": _TARGETS}
    config = ModelConfig.parse({"name": str(base), "lora": lora, "device": "cpu"})
    model, _ = load_model(config, seed=1)
    use_ludus_attention(model)
    learner = learner_of(model, learning_rate=0.05)
    batch = rows_of_lengths([17, 9, 23])
    losses = [learner.step(packs(batch), _plain)["loss"] for _ in range(4)]
    assert losses[-1] < losses[0]
    changed = [n for n, p in model.named_parameters() if "experts" in n and "lora_B" in n and p.any()]
    assert len(changed) == 3 * 2  # both matrices of each layer
    tokens = [int(t) for t in batch.tokens_T[:17]]
    engine = EmbeddedEngine(model)
    drawn = await engine.generate(tokens, Sampling(max_tokens=12))
    await engine.close()
    (tmp_path / "adapter").mkdir()
    save_adapter(tmp_path / "adapter", model)
    again, _ = load_model(ModelConfig.parse({"name": str(tmp_path / "adapter"), "lora": lora}), seed=2)
    merged: Any = again
    merged = merged.merge_and_unload()
    with torch.no_grad():
        logprobs = merged(torch.tensor([tokens + drawn.tokens])).logits[0].log_softmax(-1)
    expected = logprobs[len(tokens) - 1 : -1].gather(1, torch.tensor(drawn.tokens)[:, None])[:, 0]
    assert drawn.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_experts_have_no_dropout_and_names_that_are_not_there_are_told(tmp_path: Path) -> None:
    base = str(_folder("mixtral", tmp_path / "base"))
    for lora, reason in (
        ({"targets": _TARGETS, "dropout": 0.1}, "belongs to experts"),
        ({"targets": ["experts.w1"]}, r"experts\.gate_up_proj"),
    ):
        with pytest.raises(ConfigError, match=reason):
            load_model(ModelConfig.parse({"name": base, "lora": lora, "device": "cpu"}), seed=1)


# Runs

_GEMMA4 = {
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 8,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 400,
}


@pytest.mark.parametrize(
    ("kind", "changes"), [("gpt_oss", {}), ("gemma4_text", _GEMMA4)], ids=["gpt_oss", "gemma4"]
)
def test_a_run_trains_what_its_engine_sampled(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    base = _folder(kind, tmp_path / "base", **changes)
    settings = {**TINY, "model": {"name": str(base)}, "run": {"folder": str(tmp_path / "run")}}
    result = ludus.train(**settings, tasks=tasks(6), tools=[add], rewards=[even], agent=Chatty())
    rows = [row for row in result.metrics if "logprob_difference_max" in row]
    assert len(rows) == 3
    assert max(row["logprob_difference_max"] for row in rows) < 1e-4
    assert all(("experts/entropy" in row) == (kind == "gpt_oss") for row in rows)
