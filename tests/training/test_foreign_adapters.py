"""Adapters that others made with peft: taken as peft takes them, or refused with the reason."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from training_helpers import TINY, Chatty, add, even, tasks
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import ludus
from ludus.core import ConfigError
from ludus.model import PackedContext, head_logits, hidden_states, use_ludus_attention
from ludus.training import (
    ModelConfig,
    Recipe,
    ScratchConfig,
    adapter_reference,
    check_source,
    fit_tokenizer,
    load_model,
    scratch_model,
)
from ludus.training.models.lora import fingerprint
from ludus.training.optim.logprobs import compute


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained") / "tiny"
    tokenizer = fit_tokenizer(["a plus b? add"] * 20, 400)
    model: Any = scratch_model(ScratchConfig(layers=1, width=32, heads=2, kv_heads=1), tokenizer, seed=3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def made(base: Path, folder: Path, saving: dict[str, Any] | None = None, **settings: Any) -> Path:
    """A folder as peft writes it."""
    plain, _ = load_model(ModelConfig(name=str(base), device="cpu"), 0)
    common = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "target_modules": ["q_proj"]}
    torch.manual_seed(5)
    model: Any = peft.get_peft_model(plain, peft.LoraConfig(**{**common, **settings}))
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(str(folder), **(saving or {"save_embedding_layers": False}))
    return folder


def loaded(folder: Path, **lora: Any) -> Any:
    raw = {"name": str(folder), "device": "cpu", **({"lora": lora} if lora else {})}
    model, _ = load_model(ModelConfig.parse(raw), 0)
    use_ludus_attention(model)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return compute(model, _logits)


def _logits(model: Any) -> torch.Tensor:
    context = PackedContext([6])
    states = hidden_states(model, torch.arange(6), context.position_ids, context)
    return head_logits(model, states)


def shaken(model: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def run(folder: Path, adapter: Path, **settings: Any) -> ludus.training.Result:
    common = {**TINY, "model": str(adapter), **settings}
    common["run"] = {**TINY["run"], "folder": str(folder)}
    return ludus.train(**common, tasks=tasks(6), tools=[add], rewards=[even], agent=Chatty())


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("targets", [["lm_head"], ["q_proj", "lm_head"]])
def test_the_reference_of_an_adapted_head_is_adapted_as_it_was(
    base: Path, tmp_path: Path, targets: list[str]
) -> None:
    model = loaded(made(base, tmp_path, target_modules=targets))
    start = logits(model)
    references = [adapter_reference(model, tmp_path, bare=bare) for bare in (False, True)]
    shaken(model)
    moved = logits(model)
    assert not torch.allclose(moved, start, atol=1e-2)
    torch.testing.assert_close(logits(references[0]), start, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits(references[1]), logits(loaded(base)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits(model), moved, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_a_penalty_sees_an_adapted_head_move(base: Path, tmp_path: Path) -> None:
    adapter = made(base, tmp_path / "adapter", target_modules=["lm_head"])
    rl = {"steps": 2, "tasks": 2, "attempts": 3, "kl": 0.1, "optimizer": {"learning_rate": 3e-2}}
    rows = [row for row in run(tmp_path / "run", adapter, rl=rl).metrics if "kl" in row]
    assert rows[0]["kl"] < 1e-6 < rows[-1]["kl"]


def test_weights_of_the_base_are_refused_unless_they_are_its_own(base: Path, tmp_path: Path) -> None:
    own = made(base, tmp_path / "own", saving={"save_embedding_layers": True})
    assert any("embed_tokens" in name for name in load_file(own / "adapter_model.safetensors"))
    loaded(own)
    for name in (
        "base_model.model.model.norm.weight",
        "base_model.model.model.embed_tokens.weight",
        "any",
    ):
        other = made(base, tmp_path / name)
        weights = load_file(other / "adapter_model.safetensors")
        weights[name] = torch.full((32,), 7.0)
        save_file(weights, other / "adapter_model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=f"have {name}, which is no part of an adapter"):
            loaded(other)


def test_dropout_from_elsewhere_is_off_unless_a_recipe_asks_for_it(base: Path, tmp_path: Path) -> None:
    made(base, tmp_path, lora_dropout=0.4)
    for lora, expected in (({}, 0.0), ({"rank": 4, "alpha": 8, "dropout": 0.2}, 0.2)):
        model = loaded(tmp_path, **lora)
        rates = {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} or {0.0}
        assert rates == {expected}


@pytest.mark.parametrize("targets", ["all-linear", r".*\.(q|k)_proj", ["q_proj", "v_proj"]])
def test_a_recipe_can_say_more_about_an_adapter(base: Path, tmp_path: Path, targets: Any) -> None:
    made(base, tmp_path, target_modules=targets)
    loaded(tmp_path, rank=4, alpha=8, reference="base")
    loaded(tmp_path, reference="base")
    for other in ({"rank": 16}, {"alpha": 32}):
        with pytest.raises(ConfigError, match=r"has rank 4, alpha 8"):
            loaded(tmp_path, **other)
    with pytest.raises(ConfigError, match=r"has rank 4, alpha 8 and the targets .*q_proj"):
        loaded(tmp_path, rank=4, alpha=8, targets=["o_proj"])


@pytest.mark.filterwarnings("ignore:aLoRA is currently only supported")
def test_what_ludus_would_compute_otherwise_is_refused(base: Path, tmp_path: Path) -> None:
    made(base, tmp_path)
    file = tmp_path / "adapter_config.json"
    settings = json.loads(file.read_text())
    for change, reason in (
        ({"alora_invocation_tokens": [3, 4]}, "wakes up at certain tokens"),
        ({"init_lora_weights": "pissa_niter_4"}, "draws anew whenever it is loaded"),
        ({"init_lora_weights": "PiSSA_niter_4"}, "draws anew whenever it is loaded"),
        ({"layer_replication": [[0, 1], [0, 1]]}, "repeats layers"),
        ({"lora_alpha": "8"}, "does not fit its base"),
        ({"target_modules": "*q_proj"}, "does not fit its base .* nothing to repeat"),
        ({"rank_pattern": [1]}, "does not fit its base"),
    ):
        file.write_text(json.dumps({**settings, **change}))
        with pytest.raises(ConfigError, match=reason):
            loaded(tmp_path)
    file.write_text(json.dumps({**settings, "peft_type": "IA3"}))
    with pytest.raises(ConfigError, match="IA3"):
        check_source(ModelConfig(name=str(tmp_path)))


@pytest.mark.parametrize("beginning", ["pissa", "olora", "OLoRA"])
def test_an_adapter_that_split_its_base_has_no_bare_reference(
    base: Path, tmp_path: Path, beginning: str
) -> None:
    model = loaded(made(base, tmp_path, init_lora_weights=beginning))
    with pytest.raises(ConfigError, match=rf"began with {beginning}.*use \"start\""):
        adapter_reference(model, tmp_path, bare=True)
    start = logits(model)
    reference = adapter_reference(model, tmp_path, bare=False)
    shaken(model)
    torch.testing.assert_close(logits(reference), start, rtol=1e-4, atol=1e-4)


def test_a_damaged_old_file_is_refused(base: Path, tmp_path: Path) -> None:
    made(base, tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_model.bin").write_bytes(b"PK\x03\x04 and nothing else")
    with pytest.raises(ConfigError, match="cannot be read"):
        loaded(tmp_path)


def test_a_base_is_found_again_from_anywhere(base: Path, tmp_path: Path) -> None:
    adapter = made(base, tmp_path / "adapter")
    file = adapter / "adapter_config.json"
    settings = json.loads(file.read_text())
    before = Path.cwd()
    os.chdir(base.parent)
    try:
        file.write_text(json.dumps({**settings, "base_model_name_or_path": base.name}))
        result = run(tmp_path / "run", adapter, rl={**TINY["rl"], "steps": 1})
    finally:
        os.chdir(before)
    kept = json.loads((result.model / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert Path(kept) == base


def test_an_adapter_knows_the_weights_it_was_trained_beside(base: Path, tmp_path: Path) -> None:
    own = shutil.copytree(base, tmp_path / "base")
    adapter = run(tmp_path / "run", made(own, tmp_path / "adapter"), rl={**TINY["rl"], "steps": 1}).model
    for dtype in ("float32", "bfloat16"):
        load_model(ModelConfig(name=str(adapter), device="cpu", dtype=dtype), 0)
    weights = load_file(own / "model.safetensors")
    save_file(
        {n: t * 1.5 for n, t in weights.items()}, own / "model.safetensors", metadata={"format": "pt"}
    )
    with pytest.raises(ConfigError, match=r"was trained beside other weights than .*remove base\.json"):
        loaded(adapter)
    (adapter / "base.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"base\.json cannot be read"):
        loaded(adapter)
    (adapter / "base.json").unlink()
    loaded(adapter)


def test_what_errors_advise_can_be_done_to_a_checkpoint(base: Path, tmp_path: Path) -> None:
    """A base that moved, and one that changed: neither costs the run a checkpoint."""
    own = shutil.copytree(base, tmp_path / "base")
    adapter = made(own, tmp_path / "adapter")
    rl = {**TINY["rl"], "steps": 2}
    folder = run(tmp_path / "run", adapter, rl=rl).run.path
    shutil.rmtree(folder / "checkpoints" / "step-000002")
    kept = folder / "checkpoints" / "step-000001"

    def again() -> Any:
        return ludus.train(resume=folder, tasks=tasks(6), tools=[add], rewards=[even], agent=Chatty())

    own.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match="set base_model_name_or_path in"):
        again()
    settings = json.loads((kept / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(tmp_path / "moved")
    (kept / "adapter_config.json").write_text(json.dumps(settings))
    weights = load_file(tmp_path / "moved" / "model.safetensors")
    changed = {name: tensor * 1.5 for name, tensor in weights.items()}
    save_file(changed, tmp_path / "moved" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"remove base\.json"):
        again()
    assert kept.is_dir()
    (kept / "base.json").unlink()
    assert again().model.name == "step-000002"


def test_a_fingerprint_sees_every_column_and_no_format() -> None:
    layer = torch.nn.Linear(64, 512)
    seen = fingerprint(layer)
    assert fingerprint(copy.deepcopy(layer).bfloat16()) == seen
    with torch.no_grad():
        layer.weight[:, 1:] += 1
    assert fingerprint(layer) != seen


def test_a_pinned_base_is_the_one_that_is_loaded(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cached = tmp_path / "hub" / "models--somebody--model"
    (cached / "refs").mkdir(parents=True)
    for revision, scale in (("main", 1.0), ("v1", 1.5)):
        (cached / "refs" / revision).write_text(f"of-{revision}")
        copy = shutil.copytree(base, cached / "snapshots" / f"of-{revision}")
        weights = load_file(copy / "model.safetensors")
        scaled = {name: tensor * scale for name, tensor in weights.items()}
        save_file(scaled, copy / "model.safetensors", metadata={"format": "pt"})
    made(base, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    settings = json.loads(file.read_text()) | {"base_model_name_or_path": "somebody/model"}
    embeddings = []
    for revision in (None, "v1"):
        file.write_text(json.dumps({**settings, "revision": revision}))
        embeddings.append(loaded(tmp_path / "adapter").get_input_embeddings().weight)
    torch.testing.assert_close(embeddings[0] * 1.5, embeddings[1])


def test_a_home_is_a_place(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(base.parent))
    assert ModelConfig(name=f"~/{base.name}").name == str(base)
    recipe = Recipe.parse(
        {"model": {"name": "~/m"}, "run": {"folder": "~/r"}, "tasks": {"train": "~/t.jsonl"}}
    )
    places = (recipe.model.name, recipe.run.folder, recipe.tasks.train)
    assert places == tuple(str(base.parent / name) for name in ("m", "r", "t.jsonl"))
    with pytest.raises(ConfigError, match=r"run\.folder: there is no user ~no-such-user"):
        Recipe.parse({"model": {"name": "m"}, "run": {"folder": "~no-such-user/r"}})


def test_saved_embeddings_may_be_coarser_than_the_base_s(base: Path, tmp_path: Path) -> None:
    folder = made(base, tmp_path, saving={"save_embedding_layers": True})
    file = folder / "adapter_model.safetensors"
    exact = loaded(folder)
    weights = load_file(file)
    coarser = {
        name: tensor if "lora_" in name else tensor.bfloat16() for name, tensor in weights.items()
    }
    name = "base_model.model.model.embed_tokens.weight"
    assert not torch.equal(coarser[name].float(), weights[name])
    save_file(coarser, file, metadata={"format": "pt"})
    torch.testing.assert_close(logits(loaded(folder)), logits(exact), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match")
def test_adapters_of_experts_are_taken_by_their_old_names(tmp_path: Path) -> None:
    """As they were written while each expert was a module of its own; peft puts them together."""
    tokenizer = fit_tokenizer(["a plus b? add"] * 20, 400)
    shape = Qwen3MoeConfig(
        vocab_size=512, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_experts=2, num_experts_per_tok=1, head_dim=16,
    )  # fmt: skip
    torch.manual_seed(3)
    experts, adapter = tmp_path / "experts", tmp_path / "adapter"
    Qwen3MoeForCausalLM(shape).save_pretrained(experts)
    tokenizer.save_pretrained(experts)
    weights = {}
    sizes = {"gate_proj": (16, 32), "up_proj": (16, 32), "down_proj": (32, 16)}
    for number in range(2):
        for layer, (outputs, inputs) in sizes.items():
            name = f"base_model.model.model.layers.0.mlp.experts.{number}.{layer}"
            weights[f"{name}.lora_A.weight"] = torch.randn(4, inputs)
            weights[f"{name}.lora_B.weight"] = torch.randn(outputs, 4)
    settings = peft.LoraConfig(r=4, target_modules=[*sizes], base_model_name_or_path=str(experts))
    settings.save_pretrained(str(adapter))
    save_file(weights, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    model = loaded(adapter)
    theirs: Any = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(experts), str(adapter)
    )
    with torch.no_grad():
        expected = theirs(torch.arange(6)[None]).logits[0]
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    del weights[min(weights)]
    save_file(weights, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="adapter"):
        loaded(adapter)
