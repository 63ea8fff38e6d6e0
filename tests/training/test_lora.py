"""Adapters through the public interface: they learn, the base does not, and everything goes on as before."""

from __future__ import annotations

import builtins
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stage_runs import assert_same_tensors, episodes, numbers
from training_helpers import TINY, Chatty, add, even, expert, tasks
from transformers import PhimoeConfig, PhimoeForCausalLM

import ludus
from ludus.core import ConfigError, MissingExtraError
from ludus.model import PackedContext, head_logits, hidden_states, use_ludus_attention
from ludus.training import (
    Batch,
    Learner,
    ModelConfig,
    OptimizerConfig,
    Recipe,
    ScratchConfig,
    action_logprobs,
    adapter_reference,
    fit_tokenizer,
    load_model,
    logprobs_of,
    micro_batches,
    save_adapter,
    scratch_model,
)
from ludus.training.optim.logprobs import compute

LORA = {"rank": 4, "alpha": 8}


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in a folder, as somebody might have pretrained it."""
    folder = tmp_path_factory.mktemp("pretrained") / "tiny"
    tokenizer = fit_tokenizer(["a plus b? add"] * 20, 400)
    shape = ScratchConfig(layers=2, width=32, heads=2, kv_heads=1, vocabulary=400)
    model: Any = scratch_model(shape, tokenizer, seed=3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def adapted(base: Path, **lora: Any) -> Any:
    """The tiny model with an adapter that does something."""
    config = ModelConfig.parse({"name": str(base), "lora": {**LORA, **lora}, "device": "cpu"})
    model, _ = load_model(config, seed=1)
    use_ludus_attention(model)
    return shaken(model, 0.5)


def shaken(model: Any, size: float, seed: int = 7) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter += size * torch.randn(parameter.shape, generator=generator)
    return model


def run(base: Path, folder: Path, **settings: Any) -> ludus.training.Result:
    common: dict[str, Any] = {**TINY, "model": {"name": str(base), "lora": LORA}}
    common["run"] = {**TINY["run"], "folder": str(folder)}
    return ludus.train(
        **{**common, **settings}, tasks=tasks(6), tools=[add], rewards=[even], agent=Chatty()
    )


def hidden(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return compute(model, _hidden)


def _hidden(model: Any) -> torch.Tensor:
    context = PackedContext([5, 3])
    states = hidden_states(model, torch.arange(8), context.position_ids, context)
    return head_logits(model, states)


# Training


def test_imitation_learns_through_the_adapter_alone(base: Path, tmp_path: Path) -> None:
    before = load_file(base / "model.safetensors")
    learning = {"steps": 12, "batch": 4, "optimizer": {"learning_rate": 1e-2}}
    result = run(base, tmp_path / "run", rl={"steps": 0}, warm_start=learning, demonstrations=expert)
    losses = [row["sft/loss"] for row in result.metrics if "sft/loss" in row]
    assert losses[-1] < 0.8 * losses[0]
    assert not (result.model / "model.safetensors").exists()
    weights = load_file(result.model / "adapter_model.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())
    config = ModelConfig(name=str(result.model), device="cpu")
    model, tokenizer = load_model(config, 0)
    inner: Any = model
    for name, tensor in inner.unload().state_dict().items():
        if name in before:  # tied weights are in the file once
            assert torch.equal(tensor, before[name]), name
    assert tokenizer.stop_tokens


def test_engine_and_trainer_agree_on_an_adapted_model(base: Path, tmp_path: Path) -> None:
    result = run(base, tmp_path / "run")
    differences = [row["logprob_difference_max"] for row in result.metrics if "policy_version" in row]
    assert len(differences) == 3
    assert max(differences) < 1e-4


def test_a_reference_made_of_the_adapter_follows_the_policy(base: Path, tmp_path: Path) -> None:
    """After every step it is the policy, so an update sees no divergence; a resumed run goes on so."""
    rl = {**TINY["rl"], "attempts": 2, "kl": 0.1, "reference_sync": {"every": 1, "mixup_alpha": 1.0}}
    whole = run(base, tmp_path / "whole", max_in_flight=1, rl=rl)
    steps = [row for row in numbers(whole.run) if "kl" in row]
    assert [row["kl"] < 1e-6 for row in steps] == [True] * 3
    apart = run(base, tmp_path / "apart", max_in_flight=1, rl={**rl, "reference_sync": None})
    assert [row["kl"] < 1e-6 for row in numbers(apart.run) if "kl" in row] == [True, False, False]
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-000003")
    parts: dict[str, Any] = {"tasks": tasks(6), "tools": [add], "rewards": [even], "agent": Chatty()}
    resumed = ludus.train(resume=tmp_path / "cut", **parts)
    assert numbers(whole.run) == numbers(resumed.run)
    references = [load_file(r.model / "reference.safetensors") for r in (whole, resumed)]
    assert_same_tensors(*references)


def test_a_reference_that_an_adapter_cannot_be_is_refused(base: Path, tmp_path: Path) -> None:
    mixed = {**TINY["rl"], "kl": 0.1, "reference_sync": {"every": 1, "mixup_alpha": 0.5}}
    with pytest.raises(ConfigError, match=r"mixup_alpha = 0.5: .*set mixup_alpha = 1"):
        run(base, tmp_path / "mixed", rl=mixed)
    copied = mixed | {"reference_sync": {"every": 1, "mixup_alpha": 1.0}}
    with pytest.raises(ConfigError, match=r'model.lora.reference = "base" keeps it'):
        run(
            base,
            tmp_path / "bare",
            rl=copied,
            model={"name": str(base), "lora": {**LORA, "reference": "base"}},
        )


def test_a_resumed_run_equals_an_uninterrupted_one(base: Path, tmp_path: Path) -> None:
    settings = {
        "max_in_flight": 1,  # what is computed together is a matter of timing, and last bits with it
        "rl": {**TINY["rl"], "attempts": 2, "kl": 0.1},
        "warm_start": {"steps": 2, "batch": 4, "optimizer": {"learning_rate": 1e-2}},
    }

    class Stopped(Exception):
        pass

    def stop(phase: str, step: int, total: int, metrics: dict[str, float]) -> None:
        if phase == "RL" and step == 2:
            raise Stopped

    whole = run(base, tmp_path / "whole", **settings, demonstrations=expert)
    with pytest.raises(Stopped):
        run(base, tmp_path / "cut", **settings, demonstrations=expert, on_step=stop)
    resumed = ludus.train(
        resume=tmp_path / "cut",
        tasks=tasks(6),
        tools=[add],
        rewards=[even],
        agent=Chatty(),
        demonstrations=expert,
    )
    assert numbers(whole.run) == numbers(resumed.run)
    assert episodes(whole.run) == episodes(resumed.run)
    weights = [load_file(r.model / "adapter_model.safetensors") for r in (whole, resumed)]
    assert_same_tensors(*weights)
    states = [load_file(r.model / "optimizer.safetensors") for r in (whole, resumed)]
    assert_same_tensors(*states)
    assert all(row["kl"] > 0 for row in numbers(whole.run)[-2:])


@pytest.mark.parametrize(
    "stage",
    [
        {"kind": "rl", "algorithm": "ppo", "steps": 2, "tasks": 2, "attempts": 2},
        {"kind": "rl", "steps": 2, "tasks": 2, "attempts": 2, "kl": {"weight": 0.1, "place": "reward"}},
        {"kind": "dpo", "steps": 2, "tasks": 3, "attempts": 3},
        {
            "kind": "rejection",
            "rounds": 2,
            "steps": 2,
            "tasks": 3,
            "attempts": 2,
            "threshold": 0.01,
            "restart": True,
        },
    ],
    ids=["ppo", "kl in the reward", "dpo", "rejection"],
)
def test_other_ways_of_learning_leave_the_base_alone(
    base: Path, tmp_path: Path, stage: dict[str, Any]
) -> None:
    stage = {**stage, "optimizer": {"learning_rate": 1e-3}}
    result = run(base, tmp_path / "run", rl={}, stage=[stage])
    before = load_file(base / "model.safetensors")
    model, _ = load_model(ModelConfig(name=str(result.model), device="cpu"), 0)
    inner: Any = model
    state = inner.unload().state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
    moved = load_file(result.model / "adapter_model.safetensors")
    assert any(bool(tensor.any()) for name, tensor in moved.items() if "lora_B" in name)


def test_an_adapter_s_folder_is_a_model_like_any_other(base: Path, tmp_path: Path) -> None:
    first = run(base, tmp_path / "first", rl={**TINY["rl"], "steps": 1})
    found = ludus.evaluate(
        **{**TINY, "model": str(first.model)},
        held_out=tasks(2),
        tools=[add],
        rewards=[even],
        agent=Chatty(),
    )
    assert len(found.trajectories) == 2
    further = run(first.model, tmp_path / "further", model={"name": str(first.model)})
    old, new = (load_file(r.model / "adapter_model.safetensors") for r in (first, further))
    assert old.keys() == new.keys()
    assert any(not torch.equal(old[name], new[name]) for name in old)


def test_the_adapter_is_peft_s_own_and_loads_without_us(base: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = adapted(base)
    save_adapter(tmp_path, model)
    plain: Any = AutoModelForCausalLM.from_pretrained(base)
    loaded = PeftModel.from_pretrained(plain, tmp_path)
    tokens = torch.arange(6)[None]
    with torch.no_grad():
        given = loaded(input_ids=tokens).logits
        expected = model(input_ids=tokens).logits
    torch.testing.assert_close(given, expected)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        base.resolve()
    )


# The reference


def trained_rows(advantage: float) -> Batch:
    batch = Batch.of_tokens([list(range(8))], [[False] * 4 + [True] * 4])
    return replace(batch, advantages_T=torch.full((8,), advantage), weights_T=batch.action_T.float())


def test_a_new_adapter_and_its_reference_are_the_base(base: Path, tmp_path: Path) -> None:
    config = ModelConfig.parse({"name": str(base), "lora": LORA, "device": "cpu"})
    model, _ = load_model(config, seed=1)
    plain, _ = load_model(ModelConfig(name=str(base), device="cpu"), seed=1)
    for one in (model, plain):
        use_ludus_attention(one)
    save_adapter(tmp_path, model)
    assert torch.equal(hidden(model), hidden(plain))
    shaken(model, 0.5)
    assert not torch.allclose(hidden(model), hidden(plain))
    reference = adapter_reference(model, tmp_path, bare=False)
    assert torch.equal(hidden(reference), hidden(plain))


@pytest.mark.parametrize("bare", [False, True])
def test_a_trained_adapter_s_reference_is_the_start_or_the_base(
    base: Path, tmp_path: Path, bare: bool
) -> None:
    model = adapted(base)
    plain, _ = load_model(ModelConfig(name=str(base), device="cpu"), seed=1)
    use_ludus_attention(plain)
    save_adapter(tmp_path, model)
    start = hidden(model)
    reference = adapter_reference(model, tmp_path, bare=bare)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    shaken(model, 0.5, seed=8)
    now = hidden(model)
    assert torch.equal(hidden(reference), hidden(plain) if bare else start)
    assert torch.equal(hidden(model), now), "reading the reference has changed the policy"
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert all(p.requires_grad == ("lora_" in name) for name, p in model.named_parameters())


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("bare", [False, True])
def test_gradients_with_a_shared_reference_are_those_with_a_copy(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare: bool, is_fused: bool
) -> None:
    """The reference is read between the policy's forward and backward pass, of the same module."""
    from ludus.training import frozen

    if is_fused:
        monkeypatch.setattr("ludus.model.forward.unavailable", lambda device: None)
    model, copy = adapted(base), adapted(base)
    save_adapter(tmp_path, model)
    shared = adapter_reference(model, tmp_path, bare=bare)
    apart: Any = frozen(copy)
    if bare:
        apart = frozen(apart.unload())
    shaken(model, 0.2, seed=9)
    gradients = []
    for reference in (shared, apart):
        model.zero_grad()
        batch = trained_rows(0.0)
        (pack,) = micro_batches(batch, 100)
        source_index_A, _ = action_logprobs(model, pack, 1.0)
        with torch.no_grad():
            other_A, _ = action_logprobs(reference, pack, 1.0)
        (source_index_A - other_A).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        torch.testing.assert_close(
            logprobs_of(reference, batch, 1.0, 100)[batch.action_T], other_A, rtol=0, atol=1e-5
        )
    assert gradients[0]
    assert_same_tensors(*gradients)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_the_fused_forward_runs_adapters_too(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: Any
) -> None:
    model = adapted(base, targets=targets)
    save_adapter(tmp_path, model)
    references = [adapter_reference(model, tmp_path, bare=bare) for bare in (False, True)]
    shaken(model, 0.2, seed=8)
    expected = [hidden(one) for one in (model, *references)]
    monkeypatch.setattr("ludus.model.forward.unavailable", lambda device: None)
    for one, logits in zip((model, *references), expected, strict=True):
        torch.testing.assert_close(hidden(one), logits, rtol=1e-4, atol=1e-4)


def test_joined_factors_are_saved_and_loaded_as_their_own(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ludus.model.forward.unavailable", lambda device: None)
    model = adapted(base)
    expected = hidden(model)  # joins them
    save_adapter(tmp_path, model)
    for name, tensor in load_file(tmp_path / "adapter_model.safetensors").items():
        assert torch.equal(tensor, model.state_dict()[name.replace(".weight", ".default.weight")]), name
    again, _ = load_model(ModelConfig(name=str(base), device="cpu"), seed=1)
    use_ludus_attention(again)
    import peft

    loaded: Any = peft.PeftModel.from_pretrained(again, str(tmp_path))
    torch.testing.assert_close(hidden(loaded), expected, rtol=1e-5, atol=1e-5)
    copied = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    shaken(model, 0.2, seed=3)
    model.load_state_dict(copied)
    torch.testing.assert_close(hidden(model), expected, rtol=0, atol=0)


# Numbers


def test_adapters_of_a_bfloat16_base_are_float32_and_take_small_steps(base: Path) -> None:
    config = ModelConfig.parse({"name": str(base), "lora": LORA, "device": "cpu", "dtype": "bfloat16"})
    model, _ = load_model(config, seed=1)
    use_ludus_attention(model)
    kinds = {("lora_" in name, p.dtype) for name, p in model.named_parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    learner = Learner(model, OptimizerConfig(learning_rate=1e-6), 10)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def push(logprobs_A: Any, entropy_A: Any, pack: Any) -> Any:
        return -logprobs_A, {}

    for _ in range(3):
        learner.step(micro_batches(trained_rows(1.0), 100), push)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert {name for name in before if "lora_B" in name} <= moved
    assert all("lora_" in name for name in moved)


def test_the_same_seed_makes_the_same_adapter(base: Path) -> None:
    config = ModelConfig.parse({"name": str(base), "lora": LORA, "device": "cpu"})
    one, same, other = (load_model(config, seed)[0].state_dict() for seed in (1, 1, 2))
    assert_same_tensors(dict(one), dict(same))
    assert any(not torch.equal(one[name], other[name]) for name in one)


# Mistakes


def test_a_model_from_scratch_has_nothing_to_adapt() -> None:
    with pytest.raises(ConfigError, match="made from scratch"):
        Recipe.parse({"model": {"scratch": {}, "lora": {}}})


@pytest.mark.parametrize("targets", [["q_proj", "query"], ["lm_head"], ["embed_tokens"]])
def test_unknown_targets_are_named(base: Path, targets: list[str]) -> None:
    config = ModelConfig.parse({"name": str(base), "lora": {"targets": targets}})
    with pytest.raises(ConfigError, match=rf"{targets[-1]}.*it has down_proj, gate_proj, k_proj"):
        load_model(config, 0)


def test_targets_limit_what_is_adapted(base: Path) -> None:
    model = adapted(base, targets=["q_proj", "v_proj"])
    names = {
        name.split(".lora_")[0].rpartition(".")[2] for name in model.state_dict() if "lora_" in name
    }
    assert names == {"q_proj", "v_proj"}


def test_a_damaged_reference_is_told(base: Path, tmp_path: Path) -> None:
    model = load_model(ModelConfig.parse({"name": str(base), "device": "cpu", "lora": {"rank": 4}}), 0)[
        0
    ]
    save_adapter(tmp_path, model)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ConfigError, match="cannot be read"):
        adapter_reference(model, tmp_path, bare=False)


def test_a_router_of_experts_is_no_linear_layer(tmp_path: Path) -> None:
    """PhiMoE's is one by its class, and gives three things."""
    tokenizer = fit_tokenizer(["a plus b? add"] * 20, 400)
    shape = PhimoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=2,
    )  # fmt: skip
    PhimoeForCausalLM(shape).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model: Any = load_model(ModelConfig.parse({"name": str(tmp_path), "device": "cpu", "lora": {}}), 0)[
        0
    ]
    adapted = {name for name, _ in model.named_parameters() if "lora_" in name}
    assert any("q_proj" in name for name in adapted) and not any("router" in name for name in adapted)
    assert model(torch.arange(5)[None]).logits.isfinite().all()


def test_no_targets_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one layer"):
        ModelConfig.parse({"name": "x", "lora": {"targets": []}})


def test_without_peft_the_extra_is_named(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **options: Any) -> Any:
        if name == "peft":
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtraError, match=r"ludus-rl\[lora\]"):
        load_model(ModelConfig.parse({"name": str(base), "lora": {}}), 0)


def test_an_adapter_that_says_otherwise_is_refused(base: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path, adapted(base))
    other = ModelConfig.parse({"name": str(tmp_path), "lora": {**LORA, "rank": 8}, "device": "cpu"})
    with pytest.raises(ConfigError, match="rank 4"):
        load_model(other, 0)


def test_an_adapter_whose_base_is_gone_says_which(base: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path, adapted(base))
    file = tmp_path / "adapter_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "base_model_name_or_path": "/no/such/base"}))
    with pytest.raises(ConfigError, match=r"/no/such/base.*base_model_name_or_path"):
        load_model(ModelConfig(name=str(tmp_path), device="cpu"), 0)
    file.write_text("{}")
    with pytest.raises(ConfigError, match="not an adapter's"):
        load_model(ModelConfig(name=str(tmp_path), device="cpu"), 0)
    file.write_text(json.dumps({**settings, "peft_type": "IA3"}))
    with pytest.raises(ConfigError, match="IA3"):
        load_model(ModelConfig(name=str(tmp_path), device="cpu"), 0)


def test_a_damaged_adapter_is_refused(base: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path, adapted(base))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_model(ModelConfig(name=str(tmp_path), device="cpu"), 0)


def test_an_adapter_without_weights_is_refused_without_asking_a_hub(base: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path, adapted(base))
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"no adapter_model\.safetensors: the adapter's weights are missing"
    ):
        load_model(ModelConfig(name=str(tmp_path), device="cpu"), seed=0)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def rewritten(folder: Path, weights: dict[str, torch.Tensor]) -> ModelConfig:
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return ModelConfig(name=str(folder), device="cpu")


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
def test_an_adapter_that_lacks_weights_is_refused(base: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path, adapted(base))
    weights = weights_of(tmp_path)
    name = next(name for name in weights if "q_proj.lora_B" in name)
    del weights[name]
    with pytest.raises(ConfigError, match=r"lack 1 of those .*q_proj\.lora_B"):
        load_model(rewritten(tmp_path, weights), 0)


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
def test_an_adapter_with_weights_that_nobody_asks_for_is_refused(base: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path, adapted(base))
    file = tmp_path / "adapter_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "target_modules": ["q_proj"]}))
    with pytest.raises(ConfigError, match=r"does not ask for, such as .*lora_A"):
        load_model(ModelConfig(name=str(tmp_path), device="cpu"), 0)
    file.write_text(json.dumps({**settings, "use_dora": True}))
    with pytest.raises(ConfigError, match="adapter"):
        load_model(ModelConfig(name=str(tmp_path), device="cpu"), 0)


def test_an_adapter_of_an_adapter_is_refused(base: Path, tmp_path: Path) -> None:
    for name in ("inner", "outer"):
        (tmp_path / name).mkdir()
        save_adapter(tmp_path / name, adapted(base))
    file = tmp_path / "outer" / "adapter_config.json"
    settings = json.loads(file.read_text())
    inner = {"base_model_name_or_path": str(tmp_path / "inner")}
    file.write_text(json.dumps({**settings, **inner}))
    with pytest.raises(ConfigError, match="an adapter itself: merge"):
        load_model(ModelConfig(name=str(tmp_path / "outer"), device="cpu"), 0)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    "settings",
    [
        {"use_dora": True, "target_modules": ["q_proj", "up_proj"]},
        {"target_modules": ["embed_tokens", "v_proj"]},
        {"target_modules": ["k_proj"], "use_rslora": True, "rank_pattern": {"k_proj": 2}},
    ],
    ids=["magnitudes", "embeddings", "ranks"],
)
def test_other_people_s_adapters_have_a_reference_too(
    base: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    import peft

    plain, _ = load_model(ModelConfig(name=str(base), device="cpu"), 0)
    config = peft.LoraConfig(r=4, init_lora_weights=False, **settings)
    own: Any = peft.get_peft_model(plain, config)
    own.peft_config["default"].base_model_name_or_path = str(base)
    own.save_pretrained(str(tmp_path), save_embedding_layers=False)
    (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)
    model, _ = load_model(ModelConfig(name=str(tmp_path), device="cpu"), 0)
    use_ludus_attention(model)
    start = hidden(model)
    reference = adapter_reference(model, tmp_path, bare=False)
    shaken(model, 0.3)
    assert not torch.allclose(hidden(model), start, atol=1e-2)
    torch.testing.assert_close(hidden(reference), start, rtol=1e-5, atol=1e-5)


def test_what_peft_cannot_adapt_is_told(base: Path) -> None:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    from ludus.training import LoraConfig, add_adapter

    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16}
    shape = Lfm2Config(hidden_size=16, num_hidden_layers=1, vocab_size=50, layer_types=["conv"], **heads)
    shape.model_type = "mamba2"  # whose `out_proj` peft refuses, and this one has an `out_proj`
    with pytest.raises(ConfigError, match="peft cannot adapt 'a state-space model'"):
        add_adapter(Lfm2ForCausalLM(shape), LoraConfig(), "a state-space model", 0)
