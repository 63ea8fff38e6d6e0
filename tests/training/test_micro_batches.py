"""Too little memory: smaller passes and recomputed layers, and the same step as with enough of it."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_steps import (
    gradients_of,
    imitation,
    learner_of,
    packs,
    rows_of_lengths,
    small_model,
    weights_of,
)
from torch import Tensor, nn

from ludus.core import LudusError
from ludus.kernels import is_out_of_memory
from ludus.model import (
    PackedContext,
    checkpointable_layers,
    checkpointed_layers,
    hidden_states,
    set_activation_checkpointing,
)
from ludus.training import (
    Critic,
    CriticConfig,
    Learner,
    MicroBatch,
    OptimizerConfig,
    action_logprobs,
    logprobs_of,
)
from ludus.training.data.micro_batches import micro_batches
from ludus.training.optim import learner as learner_module
from ludus.training.optim import logprobs as forward_module
from ludus.training.optim.accumulation import MicroBatchSplitter, rounds_of
from ludus.training.optim.memory import BUSY_TOKENS, ActivationCosts, measure, plan_micro_batches

LENGTHS = [9, 14, 6, 12, 5, 7]
ROWS = rows_of_lengths(LENGTHS)
TOTAL = sum(LENGTHS)


class Full(torch.autograd.Function):
    """Runs out of memory in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore words.")


@dataclass
class Shortage:
    """Stands in for the trainer's forward pass: above so many tokens it fails, here or there."""

    limit: int
    where: str = "forward"
    attempts: int = 0

    def __call__(self, model: nn.Module, pack: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        is_too_much = sum(pack.lengths) > self.limit
        self.attempts += 1
        if is_too_much and self.where == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if is_too_much and self.where == "within":
            with _failing_halfway(model):
                return action_logprobs(model, pack, temperature)
        return action_logprobs(model, pack, temperature)


class _failing_halfway:  # noqa: N801 - used like a function
    """The backward pass dies under the middle layer, when the layers above have had their gradient."""

    def __init__(self, model: Any) -> None:
        self.hook = model.model.layers[1].register_forward_hook(
            lambda _m, _i, output: Full.apply(output)
        )

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.hook.remove()


def stepped(
    monkeypatch: pytest.MonkeyPatch, shortage: Shortage | None, dtype: torch.dtype = torch.float32
) -> tuple[Learner, dict[str, float]]:
    learner = learner_of(small_model(dtype))
    if shortage is not None:
        monkeypatch.setattr(learner_module, "action_logprobs", shortage)
    metrics = learner.step(packs(ROWS), imitation)
    monkeypatch.setattr(learner_module, "action_logprobs", action_logprobs)
    return learner, metrics


@pytest.mark.parametrize("where", ["forward", "within"])
@pytest.mark.parametrize("limit", [52, 30, 14])
def test_a_step_in_pieces_is_the_same_step(
    monkeypatch: pytest.MonkeyPatch, where: str, limit: int, caplog: pytest.LogCaptureFixture
) -> None:
    whole, expected = stepped(monkeypatch, None)
    shortage = Shortage(limit, where)
    with caplog.at_level(logging.WARNING):
        pieces, metrics = stepped(monkeypatch, shortage)
    assert shortage.attempts > 1
    assert metrics == pytest.approx(expected, rel=1e-4)
    for one, other in zip(gradients_of(whole.model), gradients_of(pieces.model), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)
    assert "optimizer.micro_batch_tokens" in caplog.records[0].getMessage()


@pytest.mark.parametrize("where", ["forward", "within"])
def test_nothing_counts_twice_in_bf16(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    whole, _ = stepped(monkeypatch, None, torch.bfloat16)
    pieces, _ = stepped(monkeypatch, Shortage(20, where), torch.bfloat16)
    for (_, wanted), (_, found) in zip(
        whole._gradients.in_order(), pieces._gradients.in_order(), strict=True
    ):
        assert float((wanted - found).abs().max()) < 0.03 * float(wanted.abs().max())


@settings(max_examples=15)
@given(fates=st.lists(st.sampled_from(["well", "forward", "within"]), max_size=10))
def test_failures_at_any_time_leave_the_step_as_it_is(fates: list[str]) -> None:
    """Whatever fails, and whenever, each parameter gets each row's gradient once."""
    with pytest.MonkeyPatch.context() as patch:
        whole, expected = stepped(patch, None)
        waiting = iter(fates)

        def fateful(model: nn.Module, pack: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
            fate = next(waiting, "well") if len(pack.lengths) > 1 else "well"
            return Shortage(0 if fate != "well" else TOTAL, fate)(model, pack, temperature)

        learner = learner_of(small_model())
        patch.setattr(learner_module, "action_logprobs", fateful)
        metrics = learner.step(packs(ROWS), imitation)
    assert metrics == pytest.approx(expected, rel=1e-4)
    for one, other in zip(gradients_of(whole.model), gradients_of(learner.model), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_the_limit_is_remembered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    learner = learner_of(small_model())
    shortage = Shortage(30)
    monkeypatch.setattr(learner_module, "action_logprobs", shortage)
    with caplog.at_level(logging.WARNING):
        learner.step(packs(ROWS), imitation)
        warnings, first = len(caplog.records), shortage.attempts
        budget = learner.micro_batch_tokens(LENGTHS)
        assert budget <= 30
        learner.step(packs(ROWS), imitation)  # made for a larger limit: split without being tried
    assert len(caplog.records) == warnings == 1
    assert shortage.attempts - first < first


def in_pieces(work: Callable[[MicroBatch], None], rows: Sequence[int], tokens: int) -> None:
    splitter = MicroBatchSplitter(tokens)
    for piece in splitter.over(rounds_of(micro_batches(ROWS, tokens, rows))):
        try:
            work(piece.of_rank(0)[0])
        except RuntimeError as error:
            splitter.retry(piece, error)


def test_a_failed_pass_leaves_no_tensor_behind() -> None:
    """The error's frames hold the pass's activations, so nothing may hold the error."""
    seen: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def work(piece: MicroBatch) -> None:
        alive.append(sum(reference() is not None for reference in seen))
        activations = torch.zeros(len(piece.tokens_T))
        seen.append(weakref.ref(activations))
        if len(piece.lengths) > 1:
            raise torch.OutOfMemoryError("full")

    gc.disable()
    try:
        in_pieces(work, range(len(ROWS)), 1000)
    finally:
        gc.enable()
    assert len(alive) > len(ROWS)
    assert not any(alive)


def test_a_single_row_gets_recomputation(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole, expected = stepped(monkeypatch, None)
    learner = learner_of(small_model())

    def tight(model: nn.Module, pack: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        if sum(pack.lengths) > (14 if checkpointed_layers(model) else 10):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return action_logprobs(model, pack, temperature)

    monkeypatch.setattr(learner_module, "action_logprobs", tight)
    with caplog.at_level(logging.WARNING):
        metrics = learner.step(packs(ROWS), imitation)
    assert checkpointed_layers(learner.model) == 3
    assert any("computed again" in record.getMessage() for record in caplog.records)
    assert metrics == pytest.approx(expected, rel=1e-4)
    for one, other in zip(gradients_of(whole.model), gradients_of(learner.model), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_a_row_that_never_fits_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = learner_of(small_model())
    start = weights_of(learner.model)
    monkeypatch.setattr(learner_module, "action_logprobs", Shortage(8))
    with pytest.raises(LudusError, match=r"a single row of 14 tokens .*Tried to allocate"):
        learner.step(packs(ROWS), imitation)
    assert learner.steps_done == 0
    for one, other in zip(start, weights_of(learner.model), strict=True):
        assert torch.equal(one, other)
    monkeypatch.setattr(learner_module, "action_logprobs", action_logprobs)
    _, expected = stepped(monkeypatch, None)
    assert learner.step(packs(ROWS), imitation) == pytest.approx(expected, rel=1e-4)


def test_hooks_do_not_outlive_a_step() -> None:
    """Two learners on one model: neither takes the other's gradient."""
    model = small_model()
    first, second = learner_of(model), learner_of(model)
    first.step(packs(ROWS), imitation)
    second.step(packs(ROWS), imitation)
    (loss_A, _), pack = action_logprobs(model, next(packs(ROWS)), 1.0), next(packs(ROWS))
    second.clear_gradients()
    (loss_A * pack.weights_A).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_passes_without_gradient_are_halved_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    expected = logprobs_of(model, ROWS, 1.0, 1000)

    def tight(model: nn.Module, tokens: Tensor, *rest: Any) -> Tensor:
        if len(tokens) > 20:
            raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return hidden_states(model, tokens, *rest)

    monkeypatch.setattr(forward_module, "hidden_states", tight)
    torch.testing.assert_close(logprobs_of(model, ROWS, 1.0, 1000), expected)


@pytest.mark.parametrize("kind", ["head", "model"])
def test_a_critic_learns_in_pieces(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    targets = torch.zeros(TOTAL), torch.linspace(-1, 1, TOTAL)

    def learnt(limit: int) -> tuple[dict[str, float], Tensor]:
        torch.manual_seed(0)
        critic = Critic(small_model(), CriticConfig(kind=kind), total_steps=1)

        def tight(model: nn.Module, tokens: Tensor, *rest: Any) -> Tensor:
            if len(tokens) > limit:
                raise torch.OutOfMemoryError("full")
            return hidden_states(model, tokens, *rest)

        monkeypatch.setattr(forward_module, "hidden_states", tight)
        metrics = critic.learn(ROWS, *targets, [range(len(ROWS))])
        return metrics, critic.values(ROWS)

    (metrics, values), (expected, wanted) = learnt(20), learnt(1000)
    assert metrics == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(values, wanted, atol=1e-5, rtol=1e-3)


def test_a_critics_own_trunk_is_planned_and_recomputed() -> None:
    targets = torch.zeros(TOTAL), torch.linspace(-1, 1, TOTAL)

    def learnt(memory: Any, kind: Any = "model") -> tuple[Critic, dict[str, float]]:
        torch.manual_seed(0)
        optimizer = OptimizerConfig(activation_memory=memory, learning_rate=1e-2)
        critic = Critic(small_model(), CriticConfig(kind=kind, optimizer=optimizer), total_steps=2)
        return critic, critic.learn(ROWS, *targets, [range(len(ROWS))] * 2)

    critic, metrics = learnt(1e-6)
    assert checkpointed_layers(critic.model) == 3
    assert checkpointed_layers(critic.policy) == 0
    assert metrics == pytest.approx(learnt("auto")[1], rel=1e-4)
    assert learnt(1e-6, "head")[1] == pytest.approx(learnt("auto", "head")[1])


def test_other_errors_are_not_swallowed() -> None:
    def work(piece: MicroBatch) -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        in_pieces(work, [0], 100)
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))


@given(st.lists(st.integers(1, 30), min_size=2, max_size=12))
def test_halves_are_whole_rows_and_lose_nothing(lengths: list[int]) -> None:
    rows = rows_of_lengths([length + 1 for length in lengths])
    (pack,) = packs(rows)
    first, second = pack.split()
    assert first.lengths + second.lengths == pack.lengths
    assert torch.equal(torch.cat([first.tokens_T, second.tokens_T]), pack.tokens_T)
    assert torch.equal(torch.cat([first.actions, second.actions]), pack.actions)
    for name in ("weights_A", "advantages_A", "old_logprobs_A", "rollout_logprobs_A"):
        assert torch.equal(torch.cat([getattr(first, name), getattr(second, name)]), getattr(pack, name))
    assert torch.equal(torch.cat([first.row_A, second.row_A + len(first.lengths)]), pack.row_A)


# --- planning


@given(
    limit=st.integers(1, 1 << 16),
    longest=st.integers(1, 1 << 15),
    room=st.integers(0, 1 << 36),
    layers=st.integers(1, 80),
    full=st.integers(100, 100_000),
    kept=st.integers(1, 100),
)
def test_a_plan_fits_its_room(
    limit: int, longest: int, room: int, layers: int, full: int, kept: int
) -> None:
    plan = plan_micro_batches(limit, longest, room, ActivationCosts(layers, full, kept))
    assert 1 <= plan.tokens <= limit
    assert 0 <= plan.checkpointed <= layers

    def needed(tokens: int, recomputed: int) -> int:
        return tokens * ((layers - recomputed) * full + recomputed * kept + full)

    wanted = max(longest, min(limit, BUSY_TOKENS))
    if plan.checkpointed < layers:
        assert needed(max(longest, plan.tokens), plan.checkpointed) <= room
    if plan.checkpointed:
        assert needed(wanted, plan.checkpointed - 1) > room, "one layer less would have done"
    if plan.tokens < min(limit, BUSY_TOKENS):
        assert plan.checkpointed == layers, "layers are recomputed before passes get slow"


def test_with_enough_memory_nothing_is_recomputed() -> None:
    assert plan_micro_batches(16384, 2048, 1 << 40, ActivationCosts(24, 40_000, 3_600)).checkpointed == 0


def counted(model: nn.Module, function: Callable[[], Tensor]) -> int:
    """Bytes that the backward pass would find, as autograd itself counts them."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        output = function()
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    assert output is not None
    return sum(size for place, size in kept.items() if place not in own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_token_takes_is_measured(dtype: torch.dtype) -> None:
    model = small_model(dtype).train()
    costs = measure(model)
    lengths = [40, 60]
    context = PackedContext(lengths)
    tokens = torch.zeros(100, dtype=torch.long)
    found = counted(model, lambda: hidden_states(model, tokens, context.position_ids, context))
    assert costs.layers == 3
    assert costs.full * costs.layers * 100 == pytest.approx(found, rel=0.15)


def test_frozen_weights_take_less() -> None:
    model: Any = small_model()
    whole = measure(model).full
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.model.layers[2].self_attn.q_proj.weight.requires_grad_(True)
    assert measure(model).full < whole / 2


def test_the_setting_decides_on_passes_and_layers() -> None:
    model = small_model()
    costs = measure(model)
    gib = 1 << 30
    ample = learner_of(model, activation_memory=1.0)
    assert ample.micro_batch_tokens([10]) == 16384
    assert checkpointed_layers(model) == 0
    half = costs.full * (costs.layers + 1) * BUSY_TOKENS / 2 / gib
    tight = learner_of(model, activation_memory=half)
    assert tight.micro_batch_tokens([10]) == BUSY_TOKENS
    assert 0 < checkpointed_layers(model) <= 3
    tiny = learner_of(model, activation_memory=half / 100)
    assert tiny.micro_batch_tokens([10]) < BUSY_TOKENS
    assert checkpointed_layers(model) == 3
    assert learner_of(model, activation_memory=1.0).micro_batch_tokens([10]) == 16384
    assert checkpointed_layers(model) == 0


def test_a_cpu_has_nothing_to_plan() -> None:
    learner = learner_of(small_model(), micro_batch_tokens=123)
    assert learner.micro_batch_tokens([10]) == 123
    assert learner.micro_batch_tokens([]) == 123


# --- recomputation


@pytest.mark.parametrize("layers", [1, 2, 99])
def test_recomputed_layers_give_the_same_gradient(layers: int) -> None:
    plain, recomputing = small_model(), small_model()
    set_activation_checkpointing(recomputing, layers)
    assert checkpointed_layers(recomputing) == min(layers, 3)
    assert checkpointed_layers(plain) == 0
    for model in (plain, recomputing):
        learner_of(model).step(packs(ROWS), imitation)
    for one, other in zip(gradients_of(plain), gradients_of(recomputing), strict=True):
        torch.testing.assert_close(one, other, atol=1e-7, rtol=1e-5)


def test_recomputed_layers_keep_less() -> None:
    model = small_model().train()
    tokens, context = torch.zeros(100, dtype=torch.long), PackedContext([40, 60])

    def kept(layers: int) -> int:
        set_activation_checkpointing(model, layers)
        return counted(model, lambda: hidden_states(model, tokens, context.position_ids, context))

    sizes = [kept(layers) for layers in range(4)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[3] < sizes[0] / 3
    costs = measure(model)
    assert sizes[3] <= 100 * (3 * costs.kept + costs.full)


def test_an_adapter_is_recomputed_and_served_like_a_model() -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> nn.Module:
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_alpha=8)
        model: nn.Module = peft.get_peft_model(small_model(torch.bfloat16), config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
        return model

    plain, recomputing = adapted(), adapted()
    set_activation_checkpointing(recomputing, 99)
    assert checkpointed_layers(recomputing) == 3
    frozen = {name: p.clone() for name, p in plain.named_parameters() if not p.requires_grad}
    metrics = [learner_of(model).step(packs(ROWS), imitation) for model in (plain, recomputing)]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-3)
    for one, other in zip(gradients_of(plain), gradients_of(recomputing), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-2)
    for name, parameter in plain.named_parameters():
        assert parameter.requires_grad or torch.equal(parameter, frozen[name])


def test_a_model_can_be_forgotten() -> None:
    model = small_model()
    set_activation_checkpointing(model, 1)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_an_architecture_without_recomputation_says_so() -> None:
    model: Any = small_model()
    model.model.layers = nn.ModuleList([nn.Identity()])
    assert checkpointable_layers(model) == 0
    set_activation_checkpointing(model, 5)
    assert checkpointed_layers(model) == 0
