"""Captured steps without a GPU: graphs that replay on a CPU, over addresses and buffers that are watched."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from engine_models import make, prompts, stock_greedy

from ludus.core import Sampling
from ludus.engine import EngineCore, Request
from ludus.engine.embedded.cuda import graphs as graphs_module
from ludus.engine.embedded.cuda import prefill
from ludus.engine.embedded.cuda.decode import RowState
from ludus.engine.embedded.cuda.graphs import GraphShape, StepGraphs
from ludus.engine.embedded.cuda.runner import CudaModelRunner
from ludus.kernels.device import StagingBuffers
from ludus.model import use_ludus_attention

SIZES = [prefill.SIZES, ((8, 2), (32, 3)), ((4, 1), (16, 2), (64, 64)), ((16, 1),)]


class Graph:
    """Stands in for a captured graph: the same step, as long as the block_tables are where they were."""

    def __init__(self, graphs: StepGraphs, shape: GraphShape, state: RowState) -> None:
        self._graphs, self._shape, self._state = graphs, shape, state
        self._tables, self.result = state.block_tables, graphs._steps[shape.kind][0](shape)

    def replay(self) -> None:
        assert self._state.block_tables is self._tables, "a graph was kept whose block_tables have moved"
        result = self._graphs._steps[self._shape.kind][0](self._shape)
        if result is not None:  # where the first run has left it
            assert self.result is not None
            self.result.copy_(result)


class Flights:
    """Host buffers that are being copied to the device, and must not change before their step is received."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._in_flight: list[tuple[StagingBuffers, int, torch.Tensor]] = []
        send = StagingBuffers.send

        def sent(mirror: StagingBuffers, copy: int) -> None:
            self._in_flight.append((mirror, copy, mirror._host_bytes[copy].clone()))
            send(mirror, copy)

        monkeypatch.setattr(StagingBuffers, "send", sent)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self._in_flight.clear())

    def watch(self, runner: CudaModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        launch = runner.launch

        def launched(*given: Any) -> Any:
            before = {id(flight) for flight in self._in_flight}
            step = launch(*given)
            own = {id(flight) for flight in self._in_flight} - before
            result = step.result

            def received() -> Any:
                for mirror, copy, content in self._in_flight:
                    assert torch.equal(mirror._host_bytes[copy], content), "overwritten on its way"
                self._in_flight = [flight for flight in self._in_flight if id(flight) not in own]
                return result()

            monkeypatch.setattr(step, "result", received)
            return step

        monkeypatch.setattr(runner, "launch", launched)


def _captured_worker(source: random.Random, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, EngineCore]:
    """A worker that captures early, with odd sizes, narrow block_tables and little room."""
    monkeypatch.setattr(prefill, "SIZES", source.choice(SIZES))
    monkeypatch.setattr(graphs_module, "_TRIES", source.choice([0, 1]))
    monkeypatch.setattr(graphs_module, "_PATIENCE", source.choice([0, 2]))
    monkeypatch.setattr(graphs_module, "_FIRST_WIDTH", source.choice([8, 16, 1024]))
    flights = Flights(monkeypatch)
    model = make(source.choice(["llama", "qwen2-window", "gemma2"]))
    use_ludus_attention(model)
    rows = source.choice([1, 2, 5, 70])
    worker = EngineCore(
        model,
        blocks=source.choice([64, 400]),
        block_size=source.choice([1, 4, 16]),
        max_running=rows,
        tokens_per_step=source.choice([rows + 7, 100]),
        is_static=True,
        lookahead=source.choice([0, 1, 2]),
    )
    runner = worker._runner
    assert isinstance(runner, CudaModelRunner)
    state = runner._prefill._parts.state
    if source.random() < 0.5:
        state.block_tables = state.block_tables[:, :2].clone()  # too narrow for most
    graphs = runner._graphs
    graphs._captures = True

    def captured(shape: GraphShape) -> Any:
        graph = Graph(graphs, shape, state)
        return graph, graph.result

    monkeypatch.setattr(graphs, "_captured", captured)
    flights.watch(runner, monkeypatch)
    return model, worker


def _played(
    worker: EngineCore, contexts: list[list[int]], new: list[int], source: random.Random
) -> list[Any]:
    """Greedy answers of requests that come in a few at a time; one in ten draws in its own way."""
    replies: list[list[Any]] = [[] for _ in contexts]
    todo = list(range(len(contexts)))
    source.shuffle(todo)
    while todo or worker.has_work:
        for i in [todo.pop() for _ in range(min(len(todo), source.randint(0, 3)))]:
            own = {"top_k": 5} if source.random() < 0.1 else {}
            sampling = Sampling(max_tokens=new[i], temperature=0, **own)
            size = len(contexts[i])
            request = Request(
                list(contexts[i]), size, size + new[i], sampling, replies[i].append, session=f"{i}"
            )
            worker.submit(request)
        if worker.has_work:
            worker.step()
    return [reply[0] for reply in replies]


@pytest.mark.parametrize("seed", range(8))
def test_turns_that_come_and_go_give_what_stock_gives(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random.Random(seed)
    model, worker = _captured_worker(source, monkeypatch)
    room = min(worker.room, 200)
    contexts = prompts([source.randint(1, room // 3) for _ in range(source.choice([3, 8]))], seed=seed)
    shared = prompts([room // 4], seed=99)[0]
    contexts = [shared + context if i % 2 else context for i, context in enumerate(contexts)]
    for turn in range(3):
        new = [source.randint(1, 9) for _ in contexts]
        answers = _played(worker, contexts, new, source)
        expected = [stock_greedy(model, c, count) for c, count in zip(contexts, new, strict=True)]
        assert [getattr(answer, "tokens", answer) for answer in answers] == expected
        heard = prompts([source.randint(1, 12) for _ in contexts], seed=100 * turn)
        following = zip(contexts, answers, heard, strict=True)
        contexts = [context + answer.tokens + said for context, answer, said in following]
        contexts = [context if len(context) + 10 < room else context[:5] for context in contexts]
        if source.random() < 0.3:
            worker.update_weights()
    assert worker.stats.graph_replays > 0
