"""Static steps in parts: graphs and their sizes, staged arrays, memory that runs short or is handed back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import FAMILIES, make, prompts, stock_greedy
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ludus.core import EngineError, Sampling
from ludus.engine import EngineCore, EngineStats, Request
from ludus.engine.embedded import runner as runner_module
from ludus.engine.embedded.cuda import prefill
from ludus.engine.embedded.cuda import runner as cuda_runner_module
from ludus.engine.embedded.cuda.decode import rows_for
from ludus.engine.embedded.cuda.graphs import GraphShape, StepGraphs, wide_enough
from ludus.engine.embedded.cuda.kv_cache import FixedMemory, KVShape, StaticKVCache
from ludus.engine.embedded.cuda.runner import CudaModelRunner, fingerprint, kv_shape
from ludus.engine.embedded.request import Chunk
from ludus.engine.embedded.runner import TorchModelRunner
from ludus.kernels import arrays_to_device
from ludus.kernels.device import StagingBuffers
from ludus.model import use_ludus_attention

CPU = torch.device("cpu")


def _worker(model: Any, blocks: int = 64, **settings: Any) -> EngineCore:
    use_ludus_attention(model)
    defaults = {
        "block_size": 4,
        "max_running": 3,
        "tokens_per_step": 16,
        "is_static": True,
        "lookahead": 1,
    }
    return EngineCore(model, blocks=blocks, **{**defaults, **settings})


def _greedy(worker: EngineCore, contexts: list[list[int]], new: int) -> list[Any]:
    outcomes: list[list[Any]] = [[] for _ in contexts]
    for context, outcome in zip(contexts, outcomes, strict=True):
        worker.submit(
            Request(
                tokens=list(context),
                prompt=len(context),
                limit=len(context) + new,
                sampling=Sampling(max_tokens=new, temperature=0),
                reply=outcome.append,
            )
        )
    while worker.has_work:
        worker.step()
    return [outcome[0] for outcome in outcomes]


@pytest.mark.parametrize("family", ["qwen2-window", "gemma2", "smollm2"])
def test_static_steps_serve_every_kind_of_attention(family: str) -> None:
    model = make(family)
    worker = _worker(model)
    assert isinstance(worker._runner, CudaModelRunner)
    contexts = prompts([1, 9, 17])
    answers = _greedy(worker, contexts, 8)
    assert [a.tokens for a in answers] == [stock_greedy(model, c, 8) for c in contexts]


def _graphs() -> tuple[StepGraphs, list[GraphShape]]:
    """Graphs of a device that captures, and what they were asked to capture."""
    graphs = StepGraphs(CPU, EngineStats())
    captured: list[GraphShape] = []

    def capture(shape: GraphShape) -> bool:
        captured.append(shape)
        graphs._graphs[shape] = (None, None)  # type: ignore[assignment]
        return True

    graphs._captures = True
    graphs._capture = capture  # type: ignore[method-assign]
    return graphs, captured


def test_a_size_is_captured_once_it_has_been_needed_for_a_while() -> None:
    graphs, captured = _graphs()
    wanted, smaller = GraphShape("decode", 192, 192, 64), GraphShape("decode", 8, 8, 64)
    assert [graphs.choose(wanted) for _ in range(3)] == [wanted] * 3
    assert captured == []
    assert graphs.choose(wanted) == wanted
    assert captured == [wanted]
    # Smaller batches make do with what there is, until they have come often enough.
    small = [graphs.choose(smaller) for _ in range(40)]
    assert small[0] == wanted
    assert small[-1] == smaller
    assert captured == [wanted, smaller]
    # Another kind of step is another graph.
    other = smaller._replace(kind="prefill")
    assert graphs.choose(other) == other


class Replayed:
    """Stands in for a captured graph."""

    def __init__(self) -> None:
        self.count = 0

    def replay(self) -> None:
        self.count += 1


def test_what_cannot_be_captured_is_called_and_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[GraphShape] = []
    stats, graph = EngineStats(), Replayed()
    graphs = StepGraphs(CPU, stats)
    graphs.register("decode", ran.append, lambda: None)
    some, fewer = GraphShape("decode", 4, 4, 64), GraphShape("decode", 1, 1, 64)
    graphs._captures = True
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(graphs, "_captured", lambda shape: (graph, None))
    for _ in range(6):
        graphs.run(graphs.choose(some))
    assert (len(ran), graph.count) == (4, 3)  # three tries, a trial, three replays
    assert (stats.graph_captures, stats.graph_replays) == (1, 3)
    monkeypatch.setattr(graphs, "_captured", _raise(RuntimeError("a synchronisation")))
    for _ in range(40):
        graphs.run(graphs.choose(fewer))
    assert caplog.text.count("a synchronisation") == 1
    assert graphs.choose(some) == some
    graphs.run(some)
    assert ran[-1] == some


def test_one_kind_of_step_that_cannot_be_captured_leaves_the_others_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = StepGraphs(CPU, EngineStats())
    graphs._captures = True
    decode, turns = GraphShape("decode", 4, 4, 64), GraphShape("turns", 64, 4, 64)
    for kind in ("decode", "turns"):
        graphs.register(kind, lambda shape: None, lambda: None)

    def captured(shape: GraphShape) -> Any:
        if shape.kind == "turns":
            raise RuntimeError("it looks at what it has computed")
        return Replayed(), None

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(graphs, "_captured", captured)
    for _ in range(5):
        graphs.run(graphs.choose(decode))
        graphs.run(graphs.choose(turns))
    assert graphs.has_refused("turns")
    assert not graphs.has_refused("decode")
    assert graphs._stats.graph_replays == 2
    assert caplog.text.count("it looks at what it has computed") == 1


def test_what_there_was_no_memory_to_capture_is_not_tried_again_at_every_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = StepGraphs(CPU, EngineStats())
    graphs._captures = True
    graphs.register("decode", lambda shape: None, lambda: None)
    tried: list[GraphShape] = []

    def captured(shape: GraphShape) -> Any:
        tried.append(shape)
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(graphs, "_captured", captured)
    shape = GraphShape("decode", 4, 4, 64)
    for _ in range(50):
        assert graphs.choose(shape) == shape
    assert tried == [shape]
    assert "engine.memory" in caplog.text
    graphs.clear()  # memory may have come free since
    for _ in range(5):
        graphs.choose(shape)
    assert len(tried) == 2


@given(st.integers(1, 300), st.integers(300, 600), st.integers(1, 5000), st.integers(1, 64))
def test_a_shape_has_room_for_its_step(rows: int, most: int, width: int, block_size: int) -> None:
    assert rows <= rows_for(rows, most) <= most
    assert width <= wide_enough(width, block_size) <= max(4 * width, 1024)


def test_arrays_arrive_as_they_were_sent() -> None:
    arrays = [
        np.arange(5, dtype=np.int64), np.array([0.1, 0.2]), np.arange(6, dtype=np.int32).reshape(2, 3),
        np.array([1.5], dtype=np.float32), np.zeros(0, dtype=np.int64),
    ]  # fmt: skip
    for array, tensor in zip(arrays, arrays_to_device(arrays, CPU), strict=True):
        assert tensor.shape == array.shape
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
    mirror = StagingBuffers({"a": np.int64, "b": np.float32, "c": np.bool_}, 3, CPU, copies=2)
    mirror.hosts[1]["a"][:] = [7, 8, 9]
    mirror.hosts[1]["b"][:] = [0.5, 1.5, 2.5]
    mirror.send(1)
    assert mirror.device["a"].tolist() == [7, 8, 9]
    mirror.device["c"].copy_(torch.tensor([True, False, True]))
    mirror.fetch(0)
    assert mirror.hosts[0]["b"].tolist() == [0.5, 1.5, 2.5]
    assert mirror.hosts[0]["c"].tolist() == [True, False, True]


class Scarce(FixedMemory):
    """DeviceMemory of which there is only so much."""

    def __init__(self, most: int) -> None:
        super().__init__(CPU)
        self.most = most
        self.given_back = 0

    def take(self, size: int) -> Tensor:
        if size > self.most:
            raise torch.OutOfMemoryError("none left")
        return super().take(size).fill_(255)  # NaN, whatever the dtype

    def give_back(self) -> None:
        self.given_back += 1


def test_a_cache_that_finds_no_memory_is_smaller_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    shape = KVShape(2, 2, 8, torch.float32)
    block = 2 * 2 * 2 * 8 * 4 * 4
    kv_cache = StaticKVCache(shape, 100, 4, CPU, Scarce(60 * block))
    with caplog.at_level(logging.WARNING):
        assert kv_cache.acquire() == 50
    assert "engine.memory" in caplog.text
    keys, values = kv_cache.blocks(1)
    assert keys.shape == values.shape == (51, 2, 4, 8)
    assert not keys.isnan().any()
    keys[7] = 1.0
    kv_cache.copy_block(7, 9)
    assert kv_cache.blocks(1)[0][9].eq(1).all()
    assert not kv_cache.blocks(0)[0][9].any()
    with pytest.raises(torch.OutOfMemoryError):
        StaticKVCache(shape, 100, 4, CPU, Scarce(block)).acquire()


def test_memory_that_was_handed_back_comes_back_and_nothing_is_remembered() -> None:
    model = make()
    worker = _worker(model)
    memory = Scarce(1 << 30)
    worker._kv_cache._memory = memory  # type: ignore[attr-defined]
    contexts = prompts([13, 7])
    expected = [stock_greedy(model, context, 6) for context in contexts]
    assert [a.tokens for a in _greedy(worker, contexts, 6)] == expected
    worker.release_memory()
    assert (memory.given_back, worker._kv_cache.is_allocated) == (1, False)
    answers = _greedy(worker, contexts, 6)
    assert [a.tokens for a in answers] == expected
    assert [a.cached_tokens for a in answers] == [0, 0]
    assert worker.stats.memory_handed_back == 1
    assert worker.stats.memory_seconds > 0


def test_whoever_does_not_fit_into_less_memory_is_told() -> None:
    model = make()
    worker = _worker(model)
    block = 2 * 2 * 2 * 8 * 4 * 4
    worker._kv_cache._memory = Scarce(33 * block)  # type: ignore[attr-defined]
    large, small = _greedy(worker, prompts([200, 9]), 6)
    assert isinstance(large, EngineError)
    assert "do not fit" in str(large)
    assert small.tokens == stock_greedy(model, prompts([200, 9])[1], 6)
    assert worker.room == 32 * 4
    worker.release_memory()
    worker._kv_cache._memory = Scarce(0)  # type: ignore[attr-defined]
    (failed,) = _greedy(worker, [[1, 2, 3]], 6)
    assert isinstance(failed, EngineError)
    assert failed.retriable
    worker._kv_cache._memory = Scarce(1 << 30)  # type: ignore[attr-defined]
    assert _greedy(worker, [[1, 2, 3]], 6)[0].tokens == stock_greedy(model, [1, 2, 3], 6)


@pytest.mark.parametrize("sizes", [((4, 1),), prefill.SIZES])
def test_a_prompt_that_is_too_much_at_once_is_computed_in_parts(
    sizes: tuple[tuple[int, int], ...],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make()
    states = prefill.StepParts.hidden_states
    counts: list[int] = []

    def scarce(parts: prefill.StepParts, inputs: dict[str, Tensor], *rest: Any) -> Any:
        tokens = len(inputs["ids_T"])
        if tokens > 20:
            raise torch.OutOfMemoryError("too much")
        counts.append(tokens)
        return states(parts, inputs, *rest)

    monkeypatch.setattr(prefill.StepParts, "hidden_states", scarce)
    monkeypatch.setattr(prefill, "SIZES", sizes)
    monkeypatch.setattr(prefill, "_FEWEST_TOKENS", 4)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    worker = _worker(model, tokens_per_step=100)
    shared = prompts([30])[0]
    contexts = [[*shared, 5], [*shared, 6], prompts([21], seed=4)[0]]
    answers = _greedy(worker, contexts, 5)
    assert [a.tokens for a in answers] == [stock_greedy(model, c, 5) for c in contexts]
    assert max(counts) <= 20
    assert "engine.tokens_per_step" in caplog.text
    assert worker.room == 64 * 4  # no block was given up for it
    assert caplog.text.count("a padded prefill") == (len(sizes) > 1)
    scores: list[Any] = []
    tokens = prompts([50])[0]
    worker.submit(Request(tokens, 50, 50, Sampling(), scores.append, is_score=True))
    while worker.has_work:
        worker.step()
    assert len(scores[0]) == 50
    monkeypatch.setattr(prefill, "_FEWEST_TOKENS", 40)
    (failed,) = _greedy(_worker(model, tokens_per_step=100), [prompts([30])[0]], 2)
    assert isinstance(failed, EngineError)


@pytest.mark.parametrize("sizes", [((4, 1),), ((8, 2), (32, 3)), prefill.SIZES])
def test_short_passes_over_static_buffers_give_what_long_ones_give(
    sizes: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns of several sessions come and go while others decode, some of them with the same beginning."""
    monkeypatch.setattr(prefill, "SIZES", sizes)
    ran: list[GraphShape] = []
    run = StepGraphs.run
    monkeypatch.setattr(StepGraphs, "run", lambda self, shape: (ran.append(shape), run(self, shape))[1])
    model = make()
    worker = _worker(model, tokens_per_step=24, max_running=5)
    shared = prompts([9])[0]
    contexts = [[*shared, 5], [*shared, 6, 7], *prompts([30, 3, 1, 14], seed=5)]
    for _ in range(2):
        answers = [answer.tokens for answer in _greedy(worker, contexts, 7)]
        assert answers == [stock_greedy(model, context, 7) for context in contexts]
        turns = zip(contexts, answers, prompts([4, 11, 2, 19, 1, 1], seed=6), strict=True)
        contexts = [context + answer + heard for context, answer, heard in turns]
    used = {(shape.tokens, shape.rows) for shape in ran if shape.kind == prefill.KIND}
    assert used <= {(tokens, min(rows, 5)) for tokens, rows in sizes}
    assert used


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6).filter(lambda sizes: sum(sizes) > 1))
def test_halves_cover_everything_in_order(sizes: list[int]) -> None:
    request = Request([1], 1, 2, Sampling(), lambda outcome: None)
    chunks = [Chunk(request, 10 * i, 10 * i + size, False, True) for i, size in enumerate(sizes)]
    left, right = prefill.halves(chunks)
    assert left
    assert right
    parts = [range(c.start, c.stop) for c in left + right]
    assert [p for part in parts for p in part] == [p for c in chunks for p in range(c.start, c.stop)]
    assert sum(chunk.samples for chunk in left + right) == len(chunks)
    counts = [sum(c.stop - c.start for c in half) for half in (left, right)]
    assert abs(counts[0] - counts[1]) <= 1


def _raise(error: Exception) -> Callable[..., Any]:
    def broken(*_: Any, **__: Any) -> Any:
        raise error

    return broken


def test_kernels_that_do_not_run_are_done_without_and_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    runner_module._warn_slow.cache_clear()
    monkeypatch.setattr(
        cuda_runner_module, "sample_at_temperature", _raise(ValueError("odd vocabulary"))
    )
    worker = _worker(model, lookahead=None)
    assert isinstance(worker._runner, TorchModelRunner)
    assert "odd vocabulary" in caplog.text
    _worker(model, lookahead=None)
    assert caplog.text.count("odd vocabulary") == 1
    assert _greedy(worker, [[1, 2, 3]], 4)[0].tokens == stock_greedy(model, [1, 2, 3], 4)


def test_kernels_that_compute_something_else_are_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner_module._warn_slow.cache_clear()

    def zeros(*arguments: Any, **_: Any) -> Tensor:
        return torch.zeros_like(arguments[0])

    monkeypatch.setattr("ludus.engine.embedded.paged_attention.paged_decode", zeros)
    worker = _worker(make(), lookahead=None)
    assert isinstance(worker._runner, TorchModelRunner)
    assert "other hidden states" in caplog.text


@pytest.mark.parametrize("family", FAMILIES)
def test_what_layers_keep_is_found_by_looking(family: str) -> None:
    model = make(family)
    use_ludus_attention(model)
    layers = model.config.num_hidden_layers
    assert kv_shape(model) == KVShape(layers, 2, 8, torch.float32)


def test_graphs_are_forgotten_when_an_address_changes_and_only_then() -> None:
    model = make()
    worker = _worker(model)
    _greedy(worker, [[1, 2, 3]], 2)
    before = fingerprint(model)
    cleared: list[None] = []
    graphs = worker._runner._graphs  # type: ignore[attr-defined]
    graphs.clear = lambda: cleared.append(None)
    torch.optim.AdamW(model.parameters()).step()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    worker.release_memory()
    worker.update_weights()
    assert (fingerprint(model), cleared) == (before, [])
    model.model.layers[0].mlp.down_proj.weight.data = torch.randn(32, 48)
    worker.refresh()
    assert fingerprint(model) != before
    assert len(cleared) == 1


def test_a_graph_is_told_of_a_merge() -> None:
    """It changes the base in place, so that nothing moves; and the adapter must not be added any more."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(make(), config)
    before = fingerprint(model)
    model.merge_adapter()
    assert fingerprint(model) != before
    model.unmerge_adapter()
    assert fingerprint(model) == before


def test_a_step_without_memory_goes_on_with_half_the_cache(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    worker = _worker(model, blocks=128)
    contexts = prompts([20, 30, 11])
    launch, calls = CudaModelRunner.launch, 0

    def scarce(self: Any, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (3, 4, 9):
            raise torch.OutOfMemoryError("no room for logits")
        return launch(self, *arguments)

    monkeypatch.setattr(CudaModelRunner, "launch", scarce)
    answers = _greedy(worker, contexts, 9)
    assert [a.tokens for a in answers] == [stock_greedy(model, c, 9) for c in contexts]
    assert worker.room == 4 * 16
    assert caplog.text.count("engine.memory") == 3
    assert worker.stats.failed_steps == 0
    calls = 8
    (failed,) = _greedy(worker, [[1, 2, 3]], 9)
    assert isinstance(failed, EngineError)
    assert _greedy(worker, [[1, 2, 3]], 9)[0].tokens == stock_greedy(model, [1, 2, 3], 9)
