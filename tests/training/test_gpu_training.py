"""The training step on a real GPU: kernels against plain arithmetic, and memory that really runs out."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from small_steps import imitation, learner_of, packs, rows_of_lengths, small_model, weights_of
from torch import Tensor

from ludus.algos import LossInputs, load_algorithm
from ludus.model import checkpointed_layers, use_ludus_attention
from ludus.training import MicroBatch, action_logprobs
from ludus.training.optim.logprobs import linear_logprobs
from ludus.training.optim.memory import measure

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
LENGTHS = [70, 3, 33, 120, 64, 9]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("rows", [128, 4096])
def test_the_head_in_bf16_is_near_float64(rows: int, temperature: float) -> None:
    generator = torch.Generator(CUDA).manual_seed(0)
    hidden = torch.randn(1000, 256, generator=generator, device=CUDA).bfloat16().requires_grad_()
    weight = (torch.randn(5003, 256, generator=generator, device=CUDA) / 8).bfloat16().requires_grad_()
    tokens = torch.randint(5003, (1000,), generator=generator, device=CUDA)
    along = torch.linspace(-1, 1, 1000, device=CUDA)
    logprobs_A, entropies_A = linear_logprobs(hidden, weight, tokens, temperature, rows)
    found = torch.autograd.grad((along * logprobs_A + 0.1 * entropies_A).sum(), (hidden, weight))
    exact = [hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    logp = (exact[0] @ exact[1].t() / temperature).log_softmax(-1)
    wanted_A, entropy_A = logp.gather(1, tokens[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    torch.testing.assert_close(logprobs_A.double(), wanted_A, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(entropies_A.double(), entropy_A, atol=1e-3, rtol=1e-3)
    wanted = torch.autograd.grad((along * wanted_A + 0.1 * entropy_A).sum(), exact)
    for one, other in zip(found, wanted, strict=True):
        assert float((one.double() - other).abs().max()) < 0.02 * float(other.abs().max())


@pytest.mark.parametrize("budget", [1 << 14, 100])
def test_a_bf16_step_is_near_the_float32_step_of_a_cpu(
    monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    rows = rows_of_lengths(LENGTHS)
    exact = learner_of(small_model(**SHAPE))
    expected = exact.step(packs(rows), imitation)
    model = small_model(torch.bfloat16, **SHAPE).to(CUDA)
    learner = learner_of(model)
    monkeypatch.setattr(learner, "clear_gradients", lambda: None)
    metrics = learner.step(packs(rows, budget), imitation)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=0.01)
    assert metrics["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=0.05)
    pairs = zip(exact._gradients.in_order(), learner._gradients.in_order(), strict=True)
    for (_, wanted), (_, found) in pairs:
        there = found.cpu()
        likeness = torch.nn.functional.cosine_similarity(wanted.flatten(), there.flatten(), dim=0)
        assert float(likeness) > 0.98


def test_addresses_stay_and_small_updates_count() -> None:
    rows = rows_of_lengths(LENGTHS)
    exact = small_model(**SHAPE)
    start = weights_of(exact)
    model = small_model(torch.bfloat16, **SHAPE).to(CUDA)
    with torch.no_grad():  # the first pass on a device may lay weights side by side
        use_ludus_attention(model)
        action_logprobs(model, next(iter(packs(rows))).to(torch.device(CUDA)), 1.0)
    before = [p.data_ptr() for p in model.parameters()]
    for trained in (exact, model):
        learner = learner_of(trained, learning_rate=1e-6)
        for _ in range(200):
            learner.step(packs(rows), imitation)
    assert [p.data_ptr() for p in model.parameters()] == before
    along, length = 0.0, 0.0
    for then, one, other in zip(start, weights_of(exact), weights_of(model), strict=True):
        if then.ndim >= 2:
            along += float(((other.cpu() - then) * (one - then)).sum())
            length += float((one - then).square().sum())
    assert 0.85 < along / length < 1.15


def test_a_step_does_not_wait_for_the_device() -> None:
    rows = rows_of_lengths(LENGTHS)
    learner = learner_of(small_model(torch.bfloat16, **SHAPE).to(CUDA))
    learner.step(packs(rows), imitation)
    waits: list[str] = []

    algorithm = load_algorithm(name="grpo")

    def watched(
        logprobs_A: Tensor, entropy_A: Tensor, pack: MicroBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        given = (pack.old_logprobs_A, pack.advantages_A, pack.row_A, pack.rollout_logprobs_A)
        return algorithm.loss(LossInputs(logprobs_A, *given))

    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchroniz") as caught:
            learner.step(packs(rows, 100), watched)
        waits = [str(warning.message) for warning in caught if "synchroniz" in str(warning.message)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == 1, "the metrics are read once, at the end"


def test_real_want_of_memory_is_met_with_smaller_passes(caplog: pytest.LogCaptureFixture) -> None:
    """A limit that the whole batch exceeds: the step is made in pieces, and equals the whole one."""
    shape = {**SHAPE, "num_hidden_layers": 8, "intermediate_size": 4096, "max_position_embeddings": 4096}
    rows = rows_of_lengths([1500] * 16)
    whole = learner_of(small_model(torch.bfloat16, **shape).to(CUDA), micro_batch_tokens=1 << 15)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    expected = whole.step(packs(rows, 1 << 15), imitation)
    needed = torch.cuda.max_memory_allocated() - before
    del whole
    learner = learner_of(small_model(torch.bfloat16, **shape).to(CUDA), micro_batch_tokens=1 << 15)
    gc.collect()  # what the first learner has left would be room for this one
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_allocated() + needed * 6 // 10
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    try:
        with caplog.at_level(logging.WARNING):
            metrics = learner.step(packs(rows, 1 << 15), imitation)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert any("ran out of memory" in record.getMessage() for record in caplog.records)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=0.01)
    assert metrics["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=0.02)


def test_memory_decides_on_recomputation() -> None:
    model = small_model(torch.bfloat16, **SHAPE).to(CUDA)
    learner = learner_of(model)
    assert learner.micro_batch_tokens([2000]) > 0
    assert checkpointed_layers(model) == 0, "there is plenty of memory for so small a model"
    costs = measure(model)
    tight = learner_of(model, activation_memory=costs.full * 2 * 4096 / 2**30)
    assert tight.micro_batch_tokens([100]) == 4096
    assert checkpointed_layers(model) > 0
    metrics = tight.step(packs(rows_of_lengths(LENGTHS)), imitation)
    assert metrics["loss"] > 0


def test_the_estimate_of_activations_is_near_the_truth() -> None:
    shape = {**SHAPE, "num_hidden_layers": 8, "intermediate_size": 1024, "max_position_embeddings": 4096}
    model = small_model(torch.bfloat16, **shape).to(CUDA).train()
    costs = measure(model)
    rows = rows_of_lengths([2000] * 8)
    peak: list[int] = []

    def objective(
        logprobs_A: Tensor, entropy_A: Tensor, pack: object
    ) -> tuple[Tensor, dict[str, Tensor]]:
        peak.append(torch.cuda.memory_allocated())
        return -logprobs_A, {}

    learner = learner_of(model)
    learner.step(packs(rows, 1 << 14), objective)
    learner.clear_gradients()
    before = torch.cuda.memory_allocated()
    learner.step(packs(rows, 1 << 14), objective)
    measured = peak[-1] - before
    assert costs.full * costs.layers * 16000 == pytest.approx(measured, rel=0.3)
