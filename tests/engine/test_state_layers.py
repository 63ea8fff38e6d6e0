"""Layers that keep a state: sampled and trained as the model's own forward computes whole sequences."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import torch
from engine_models import make, plain_logprobs, prompts, until
from state_models import EVERY, make_stateful
from torch import Tensor, nn
from transformers import PreTrainedModel

from ludus.core import Completion, ConfigError, Sampling
from ludus.engine import EmbeddedEngine, EngineConfig
from ludus.engine.embedded.core import EngineCore, cache_blocks, state_slots
from ludus.engine.embedded.cuda.runner import usable_kv_shape
from ludus.engine.embedded.runner import TorchModelRunner
from ludus.engine.embedded.state_cache import StateBlockManager
from ludus.model import (
    ForestContext,
    PackedContext,
    can_share_prefixes,
    hidden_states,
    set_activation_checkpointing,
    use_ludus_attention,
)
from ludus.model.kv_layers import kv_layers, state_shapes
from ludus.model.state_layers import state_bytes, state_layers

SMALL = EngineConfig(block_size=8, cache_tokens=2048, max_running=6, tokens_per_step=24)


def sampling(seed: int, tokens: int = 7) -> Sampling:
    return Sampling(max_tokens=tokens, seed=seed)


def assert_own(model: PreTrainedModel, context: list[int], given: Completion) -> None:
    """Its log-probabilities are those of the model's own forward over the whole sequence."""
    expected = plain_logprobs(model, context + given.tokens)[len(context) :]
    assert given.logprobs == pytest.approx(expected, abs=1e-4)


def manager(engine: EmbeddedEngine) -> StateBlockManager:
    found = engine._core.scheduler.block_manager
    assert isinstance(found, StateBlockManager)
    return found


@pytest.mark.parametrize("family", EVERY)
async def test_turns_forks_and_groups_are_sampled_as_the_model_itself_computes(family: str) -> None:
    model = make_stateful(family)
    engine = EmbeddedEngine(model, config=SMALL)
    first = prompts([37, 21, 50, 7, 1])  # 50 tokens are chunks of three steps
    answers = await asyncio.gather(
        *(engine.generate(p, sampling(i), session=f"{i}") for i, p in enumerate(first))
    )
    for prompt, answer in zip(first, answers, strict=True):
        assert_own(model, prompt, answer)
    await engine.fork("0", "branch")
    results = prompts([5, 13, 1, 30, 2], seed=3)
    second = [p + a.tokens + r for p, a, r in zip(first, answers, results, strict=True)]
    branch = second[0][:-5] + prompts([9], seed=4)[0]
    answers = await asyncio.gather(
        *(engine.generate(p, sampling(i + 9), session=f"{i}") for i, p in enumerate(second)),
        engine.generate(branch, sampling(77), session="branch"),
    )
    for prompt, known, answer in zip([*second, branch], [*first, first[0]], answers, strict=True):
        assert answer.cached_tokens == len(known) + 6
        assert_own(model, prompt, answer)
    (shared,) = prompts([45], seed=9)
    group = await asyncio.gather(*(engine.generate(shared, sampling(i)) for i in range(8)))
    assert sorted(answer.cached_tokens for answer in group) == [0] + [40] * 7
    for answer in group:
        assert_own(model, shared, answer)
    assert await engine.score(shared) == pytest.approx(plain_logprobs(model, shared), abs=1e-4)
    manager(engine).pool.check()
    idle = engine._core.scheduler.sessions.values()
    manager(engine).check_slots([session.block_table for session in idle])
    await engine.close()


def losses(model: PreTrainedModel, states: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities of the tokens, each given those before it."""
    logits = model.get_output_embeddings()(states[:-1]).log_softmax(-1)
    return logits.gather(1, tokens[1:, None])[:, 0].square().sum()


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_alike(given: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Each to 1e-5; sums that nearly cancel, within the rounding of what is float32 in the layers."""
    assert given.keys() == wanted.keys()
    whole = torch.stack([expected.norm() for expected in wanted.values()]).norm()
    for name, expected in wanted.items():
        distance = (given[name] - expected).norm() / torch.maximum(expected.norm(), 1e-2 * whole)
        assert distance < 1e-5, f"{name}: {distance:.1e}"


@pytest.mark.parametrize("family", EVERY)
def test_packed_rows_have_the_gradient_of_each_row_alone(family: str) -> None:
    model = make_stateful(family).double()
    model.set_experts_implementation("eager")  # the others are for float32
    rows = [torch.tensor(row) for row in prompts([23, 9, 24, 2, 23, 17])]
    own = sum(
        (losses(model, model.base_model(row[None]).last_hidden_state[0], row) for row in rows),
        start=torch.zeros(()),
    )
    wanted = gradients(model, own)
    use_ludus_attention(model)
    context = PackedContext([len(row) for row in rows])
    for checkpointed in (0, 4):
        model.train()
        set_activation_checkpointing(model, checkpointed)
        states = hidden_states(model, torch.cat(rows), context.position_ids, context)
        parts = zip(torch.split(states, context.lengths), rows, strict=True)
        loss = sum((losses(model, *part) for part in parts), start=torch.zeros(()))
        assert loss.item() == pytest.approx(own.item(), rel=1e-6)
        assert_alike(gradients(model, loss), wanted)


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "mamba2"])
def test_a_forest_is_computed_as_its_rows(family: str) -> None:
    model = make_stateful(family).double()
    use_ludus_attention(model)
    assert can_share_prefixes(model)
    lengths, parents = [9, 4, 3, 6, 5, 2], [-1, 0, 1, 1, 0, -1]
    forest = ForestContext(lengths, parents)
    tokens = torch.tensor(prompts([sum(lengths)])[0])
    given = hidden_states(model, tokens, forest.position_ids, forest)
    ends = torch.tensor(lengths).cumsum(0)
    places = [torch.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    slopes = torch.linspace(-1, 1, given.numel(), dtype=given.dtype).sin().view_as(given)
    found = gradients(model, (given * slopes).sum())
    total = torch.zeros((), dtype=torch.float64)
    for node, parent in enumerate(parents):
        path = [places[node]]
        while parent >= 0:
            path.insert(0, places[parent])
            parent = parents[parent]
        alone = model.base_model(tokens[torch.cat(path)][None]).last_hidden_state[0]
        torch.testing.assert_close(given[places[node]], alone[-lengths[node] :], atol=1e-6, rtol=1e-6)
        total = total + (alone[-lengths[node] :] * slopes[places[node]]).sum()
    assert_alike(found, gradients(model, total))


async def test_preempted_requests_are_computed_again() -> None:
    model = make_stateful()
    tight = EngineConfig(block_size=4, cache_tokens=96, max_running=5, tokens_per_step=24)
    engine = EmbeddedEngine(model, config=tight)
    contexts = prompts([20, 17, 14, 9, 11])
    answers = await asyncio.gather(
        *(engine.generate(p, sampling(i, 24)) for i, p in enumerate(contexts))
    )
    assert engine.stats.preemptions > 0
    for context, answer in zip(contexts, answers, strict=True):
        assert_own(model, context, answer)
    manager(engine).check_slots([])
    await engine.close()


async def test_new_weights_in_the_middle_of_a_request() -> None:
    """What follows is sampled from states of the new weights alone."""
    model = make_stateful()
    engine = EmbeddedEngine(model, config=SMALL)
    (context,) = prompts([29])
    done = await engine.generate(context, sampling(3), session="idle")
    running = asyncio.create_task(engine.generate(context, sampling(1, 60), session="busy"))
    await until(lambda: engine.stats.generated_tokens >= 12)
    await engine.pause()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    await engine.update_weights()
    await engine.resume()
    answer = await running
    start = answer.versions[-1].start
    expected = plain_logprobs(model, context + answer.tokens)[len(context) + start :]
    assert answer.logprobs[start:] == pytest.approx(expected, abs=1e-4)
    following = context + done.tokens + [5]
    again = await engine.generate(following, sampling(4), session="idle")
    assert again.cached_tokens == 24  # the snapshot that the running request left as it began again
    assert_own(model, following, again)
    await engine.close()


async def test_a_group_computes_its_prompt_once_and_waits_one_step_for_it() -> None:
    model = make_stateful()
    engine = EmbeddedEngine(model, config=EngineConfig(block_size=4, cache_tokens=4096))
    (prompt,) = prompts([23])
    await asyncio.gather(*(engine.generate(prompt, sampling(i), session=f"{i}") for i in range(8)))
    assert engine.stats.computed_tokens == 20 + 8 * (3 + 6)
    assert engine.stats.steps == 1 + 7
    await engine.close()


async def test_prompts_that_begin_alike_share_that_from_the_third_on() -> None:
    """The second one finds the blocks without a state, and leaves one where they end."""
    model = make_stateful()
    engine = EmbeddedEngine(model, config=EngineConfig(block_size=4, cache_tokens=4096))
    system, *tasks = prompts([33, 6, 6, 6, 6])
    cached = []
    for number, task in enumerate(tasks):
        answer = await engine.generate(system + task, sampling(number))
        assert_own(model, system + task, answer)
        cached.append(answer.cached_tokens)
    assert cached == [0, 0, 32, 32]
    await engine.close()


async def test_what_is_cut_from_a_context_is_computed_again() -> None:
    """A template that drops earlier thoughts: the state cannot be cut, a snapshot before it is found."""
    model = make_stateful()
    engine = EmbeddedEngine(model, config=SMALL)
    (context,) = prompts([30])
    await engine.generate(context, sampling(1, 20), session="s")
    other = context + prompts([9], seed=5)[0]
    answer = await engine.generate(other, sampling(2), session="s")
    assert answer.cached_tokens == 24
    assert_own(model, other, answer)
    shorter = context[:19]
    answer = await engine.generate(shorter, sampling(2), session="s")
    assert answer.cached_tokens == 0
    assert_own(model, shorter, answer)
    await engine.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
async def test_half_precision_is_about_as_exact_as_the_module_itself(dtype: torch.dtype) -> None:
    model = make_stateful().to(dtype)
    engine = EmbeddedEngine(model, config=SMALL)
    contexts = prompts([40, 31, 22])
    answers = await asyncio.gather(
        *(engine.generate(p, sampling(i, 20)) for i, p in enumerate(contexts))
    )
    own, given = [], []
    exact = make_stateful().to(dtype).float()
    for context, answer in zip(contexts, answers, strict=True):
        tokens = context + answer.tokens
        right = torch.tensor(plain_logprobs(exact, tokens)[len(context) :])
        own.append(torch.tensor(plain_logprobs(model, tokens)[len(context) :]) - right)
        given.append(torch.tensor(answer.logprobs) - right)
    assert torch.cat(given).abs().mean() < 2 * torch.cat(own).abs().mean() + 1e-3
    await engine.close()


def test_a_model_with_states_has_the_plain_runner_and_its_slots_in_the_cache_memory() -> None:
    model = make_stateful()
    use_ludus_attention(model)
    assert "recurrent states" in str(usable_kv_shape(model, 8))
    core = EngineCore(
        model, blocks=9, block_size=8, max_running=2, tokens_per_step=8, is_static=True, slots=3
    )
    assert isinstance(core._runner, TorchModelRunner)
    # three layers: a window of 4 over queries, keys (2 x 8 each) and values (4 x 8); a matrix for each head
    assert state_bytes(state_shapes(model)) == 3 * 4 * (4 * (16 + 16 + 32) + 4 * 8 * 8)
    assert [kept.token_bytes for kept in kv_layers(model)[0].values()] == [2 * 2 * 8 * 4]
    assert state_slots(model, EngineConfig(max_running=7)) == 28
    assert state_slots(make(), EngineConfig()) == 0
    with pytest.raises(ConfigError, match=r"the recurrent states of one request take .* engine.memory"):
        state_slots(model, EngineConfig(memory=1e-9))
    assert cache_blocks(model, EngineConfig(cache_tokens=80)) == 5


def test_without_a_context_the_module_is_as_it_was() -> None:
    model = make_stateful()
    ids = torch.tensor(prompts([19]))
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None}
    with torch.no_grad():
        before = model(ids).logits, model.generate(ids, **settings)
        use_ludus_attention(model)
        after = model(ids).logits, model.generate(ids, **settings)
    torch.testing.assert_close(after[0], before[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(after[1], before[1])


class _Echo(nn.Module):
    """A layer whose state says nothing of what came before."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.layer_idx = inner, 0

    def forward(self, hidden_states: Tensor, cache_params: Any = None, **kwargs: Any) -> Tensor:
        result: Tensor = self.inner.in_proj_z(hidden_states)[..., :32].cumsum(1)
        if cache_params is not None:
            cache_params.update_conv_state(hidden_states.transpose(1, 2), 0, conv_kernel_size=4)
        return result


def test_a_layer_that_cannot_go_on_from_its_state_is_refused() -> None:
    model = make_stateful()
    layer = model.model.layers[0]
    layer.linear_attn = _Echo(layer.linear_attn)
    words = r"layer 0 \(_Echo\) computes a sequence in pieces, .* otherwise than at once"
    with pytest.raises(ConfigError, match=words):
        use_ludus_attention(model, or_alone=False)
    assert model.config._attn_implementation != "ludus"


def test_layers_that_go_on_token_by_token_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        use_ludus_attention(make_stateful("jamba"))
    told = [record.message for record in caplog.records if "token by token" in record.message]
    assert len(told) <= 1  # once for a class, in a process
    assert not state_layers(make())


@pytest.mark.parametrize("family", ["qwen3_5", "bamba", "mamba2"])
def test_an_adapter_on_every_product_that_a_state_layer_calls_is_trained(family: str) -> None:
    pytest.importorskip("peft")
    from ludus.training.config.run import LoraConfig
    from ludus.training.models.lora import add_adapter

    model = make_stateful(family)
    use_ludus_attention(model)
    adapted = add_adapter(model, LoraConfig(rank=2), "tiny", seed=0)
    context = PackedContext([9, 4])
    tokens = torch.tensor(prompts([13])[0])
    for _ in range(2):  # the first step moves what is zero in the beginning
        states = hidden_states(adapted, tokens, context.position_ids, context)
        found = gradients(adapted, (states * states.detach().sin()).sum())
        assert found and all("lora_" in name for name in found)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if name in found:
                    parameter -= 0.1 * found[name]
    assert all(bool(gradient.abs().max() > 0) for gradient in found.values())
    inside = {name.split(".")[-4] for name in found if "mamba" in name or "mixer" in name}
    assert inside == (set() if family == "qwen3_5" else {"in_proj"})
    if family == "bamba":
        with pytest.raises(ConfigError, match="'out_proj', whose weight a layer with a state reads"):
            add_adapter(make_stateful(family), LoraConfig(rank=2, targets=("out_proj",)), "tiny", seed=0)
