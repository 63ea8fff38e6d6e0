"""The engine on a real GPU: captured graphs, steps under way, memory that comes and goes."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import torch
from engine_models import VOCABULARY, make, prompts
from transformers import PreTrainedModel

from ludus.core import Completion, Sampling
from ludus.engine import EmbeddedEngine, EngineConfig
from ludus.engine.embedded.cuda.kv_cache import ReservedMemory
from ludus.engine.embedded.cuda.runner import CudaModelRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(300),
]

CUDA = torch.device("cuda")
SMALL = {"hidden_size": 64, "head_dim": 16, "max_position_embeddings": 2048}
CONFIG = EngineConfig(cache_tokens=1 << 15, max_running=64)


def _on_gpu(
    family: str = "qwen2", dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    return make(family, **{**SMALL, **changes}).to(CUDA, dtype)


def _stock(model: PreTrainedModel, context: list[int], new: int) -> list[int]:
    """Greedy tokens of transformers itself, on the same device."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([context], device=CUDA)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new,
            eos_token_id=None,
            pad_token_id=0,
        )
    finally:
        model.set_attn_implementation(before)
    return output[0, len(context) :].tolist()


async def _greedy(engine: EmbeddedEngine, contexts: list[list[int]], new: int) -> list[list[int]]:
    sampling = Sampling(max_tokens=new, temperature=0)
    answers = await asyncio.gather(*(engine.generate(context, sampling) for context in contexts))
    return [answer.tokens for answer in answers]


def _is_static(engine: EmbeddedEngine) -> bool:
    return isinstance(engine._core._runner, CudaModelRunner)


@pytest.mark.parametrize(
    "family", ["llama", "smollm2", "qwen2", "qwen2-window", "qwen3", "mistral", "gemma2"]
)
async def test_greedy_tokens_are_those_of_stock_generate_on_a_gpu(family: str) -> None:
    model = _on_gpu(family)
    contexts = prompts([1, 5, 16, 17, 23, 40, 300])
    expected = [_stock(model, context, 40) for context in contexts]
    engine = EmbeddedEngine(model, config=CONFIG.model_copy(update={"tokens_per_step": 64}))
    assert _is_static(engine)
    assert await _greedy(engine, contexts, 40) == expected
    assert await _greedy(engine, contexts, 40) == expected  # from the cache, by graphs that are there
    assert engine.stats.graph_replays > 20
    await engine.close()


async def test_neighbours_do_not_matter_on_a_gpu() -> None:
    model = _on_gpu(dtype=torch.bfloat16)
    engine = EmbeddedEngine(model, config=CONFIG)
    contexts = prompts([30 + i for i in range(48)])

    def ask(i: int) -> Any:
        return engine.generate(contexts[i], Sampling(max_tokens=24, seed=i))

    crowd: list[Completion] = await asyncio.gather(*(ask(i) for i in range(48)))
    await engine.forget()
    for i in range(4):
        alone = await ask(i)
        same = [a == b for a, b in zip(alone.tokens, crowd[i].tokens, strict=True)]
        count = same.index(False) if False in same else len(same)
        assert count >= 4
        assert alone.logprobs[:count] == pytest.approx(crowd[i].logprobs[:count], abs=0.1)
    await engine.close()


@pytest.mark.parametrize("release", ["always", "never"])
async def test_graphs_survive_updates_loading_and_handed_back_memory(release: str) -> None:
    model = _on_gpu()
    engine = EmbeddedEngine(model, config=CONFIG.model_copy(update={"release_memory": release}))
    contexts = prompts([9, 21, 33])
    expected = [_stock(model, context, 24) for context in contexts]
    for _ in range(6):  # until every size has been needed often enough
        assert await _greedy(engine, contexts, 24) == expected
        await engine.forget()
    captures = engine.stats.graph_captures
    assert captures > 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    for change in ("step", "load"):
        await engine.pause()
        if change == "step":
            model(torch.tensor(contexts[:1], device=CUDA)).logits.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            model.load_state_dict(saved)
        await engine.update_weights()
        await engine.resume()
        assert await _greedy(engine, contexts, 24) == [_stock(model, c, 24) for c in contexts]
    assert engine.stats.graph_captures == captures
    assert engine.stats.memory_handed_back == (2 if release == "always" else 0)
    await engine.close()


async def test_a_pause_hands_memory_to_the_trainer_and_a_close_all_of_it() -> None:
    model = _on_gpu(num_hidden_layers=8, num_key_value_heads=4)
    torch.cuda.empty_cache()
    start = torch.cuda.mem_get_info()[0]
    config = EngineConfig(cache_tokens=1 << 18, max_running=8, release_memory="always")
    engine = EmbeddedEngine(model, config=config)
    size = 2 * 8 * 4 * 16 * 4 * (1 << 18)
    await _greedy(engine, [[1, 2, 3]], 4)
    memory = engine._core._kv_cache._memory  # type: ignore[attr-defined]
    assert isinstance(memory, ReservedMemory)
    assert start - torch.cuda.mem_get_info()[0] > 0.9 * size
    await engine.pause()
    torch.cuda.empty_cache()
    assert start - torch.cuda.mem_get_info()[0] < 0.5 * size
    await engine.resume()
    expected = _stock(model, [1, 2, 3], 12)
    assert (await _greedy(engine, [[1, 2, 3]], 12))[0] == expected
    assert start - torch.cuda.mem_get_info()[0] > 0.9 * size
    await engine.close()
    torch.cuda.empty_cache()
    assert start - torch.cuda.mem_get_info()[0] < 0.5 * size


async def test_a_crowded_cache_changes_nothing_on_a_gpu() -> None:
    model = _on_gpu()
    roomy = EmbeddedEngine(model, config=CONFIG)
    tight = EmbeddedEngine(model, config=EngineConfig(cache_tokens=640, block_size=16, max_running=16))
    contexts = prompts([5 + 7 * i % 40 for i in range(40)], seed=3)
    stop = tuple(range(0, VOCABULARY, 12))

    async def play(engine: EmbeddedEngine, i: int) -> list[int]:
        tokens = list(contexts[i])
        for turn in range(3):
            sampling = Sampling(max_tokens=20, temperature=0, stop_tokens=stop)
            answer = await engine.generate(tokens, sampling, session=f"{i}")
            tokens += answer.tokens + [turn + 1] * 5
        return tokens

    expected = await asyncio.gather(*(play(roomy, i) for i in range(40)))
    assert await asyncio.gather(*(play(tight, i) for i in range(40))) == expected
    assert tight.stats.preemptions > 0
    assert tight.stats.wasted_tokens > 0
    tight._core.scheduler.block_manager.pool.check()
    await roomy.close()
    await tight.close()


async def test_truncated_draws_scores_and_plain_ones_share_steps_on_a_gpu() -> None:
    model = _on_gpu()
    engine = EmbeddedEngine(model, config=CONFIG)
    context = prompts([20])[0]
    top = Sampling(max_tokens=12, top_k=1, seed=1)
    greedy = Sampling(max_tokens=12, temperature=0)
    one, two, plain, scores = await asyncio.gather(
        engine.generate(context, top),
        engine.generate(context, greedy),
        engine.generate(context, Sampling(max_tokens=30, seed=3)),
        engine.score(context),
    )
    assert one.tokens == two.tokens == _stock(model, context, 12)
    assert len(plain.tokens) == 30
    with torch.no_grad():
        logits = model(torch.tensor([context], device=CUDA)).logits[0].log_softmax(-1)
    expected = [0.0, *(float(logits[i, token]) for i, token in enumerate(context[1:]))]
    assert scores == pytest.approx(expected, abs=1e-3)
    await engine.close()


async def test_a_model_that_cannot_be_captured_is_run_step_by_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = _on_gpu("gemma2")
    context = prompts([20])[0]
    expected = _stock(model, context, 24)
    engine = EmbeddedEngine(model, config=CONFIG)
    hook = model.model.layers[0].register_forward_pre_hook(
        lambda module, given: (float(given[0].abs().sum()), None)[1]  # waits for the device
    )
    with caplog.at_level(logging.WARNING):
        assert (await _greedy(engine, [context], 24))[0] == expected
    hook.remove()
    assert "cannot be captured" in caplog.text
    assert engine.stats.graph_replays == 0
    assert torch.randn(3, device=CUDA).isfinite().all()  # torch does not believe in a capture under way
    assert len((await _greedy(engine, [context], 12))[0]) == 12
    await engine.close()


async def test_an_adapter_is_sampled_with_and_without_a_new_capture_being_forgotten() -> None:
    peft = pytest.importorskip("peft")
    model = _on_gpu("qwen2")
    context = prompts([20])[0]
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    wrapped = peft.get_peft_model(model, settings)
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.5)
    engine = EmbeddedEngine(wrapped, config=CONFIG)
    inner = wrapped.get_base_model()
    adapted = _stock(inner, context, 24)
    assert (await _greedy(engine, [context], 24))[0] == adapted
    await engine.pause()
    with wrapped.disable_adapter():
        plain = _stock(inner, context, 24)
    await engine.update_weights()
    await engine.resume()
    assert (await _greedy(engine, [context], 24))[0] == adapted != plain
    await engine.close()


def test_the_share_of_memory_is_a_setting() -> None:
    model = _on_gpu(max_position_embeddings=1 << 20)
    free = torch.cuda.mem_get_info()[0]
    engine = EmbeddedEngine(
        model, config=EngineConfig(memory=0.05, max_running=1024, tokens_per_step=1024)
    )
    token = 2 * 2 * 2 * 16 * 4
    assert engine._core.room * token == pytest.approx(0.05 * free, rel=0.05)
    asyncio.run(engine.close())
