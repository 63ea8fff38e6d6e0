"""CUDA graphs for a few sizes of each kind of step.

A captured graph replays hundreds of kernels in one launch, over addresses that never change. Capturing takes as
long as dozens of steps, so a size is captured when it has been needed for a while; until then a larger graph
runs with idle rows, or, where there is none, a few steps are launched kernel by kernel. All graphs share one
memory pool, since they run one after the other. A kind of step whose kernels cannot be captured is launched
kernel by kernel for good; a size that there is no memory for, until the graphs are cleared.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ludus.engine.config import EngineStats

_log = logging.getLogger(__name__)

_FIRST_WIDTH = 1024
"""Context widths, in tokens, grow from here by factors of four."""
_PATIENCE = 32
"""For so many steps a size makes do with a graph that is larger than it needs."""
_TRIES = 3
"""For so many steps it is launched kernel by kernel, if there is no such graph: a batch may be growing."""


class GraphShape(NamedTuple):
    """The shape that a graph is captured for."""

    kind: str
    """Kind of step: a graph can only stand in for one of its own kind."""
    tokens: int
    rows: int
    width: int
    """Blocks of the widest context."""


Run = Callable[[GraphShape], Tensor | None]
Captured = tuple[torch.cuda.CUDAGraph, Tensor | None]


def wide_enough(width: int, block_size: int) -> int:
    """The smallest captured width, in blocks, that has room for so many."""
    tokens = _FIRST_WIDTH
    while tokens < width * block_size:
        tokens *= 4
    return -(-tokens // block_size)


class StepGraphs:
    """Chooses a shape for each step and runs it: as a graph where it can be captured, else by a call."""

    def __init__(self, device: torch.device, stats: EngineStats) -> None:
        self._device, self._stats = device, stats
        self._captures = device.type == "cuda"
        self._steps: dict[str, tuple[Run, Callable[[], None]]] = {}
        self._pool: Any = None
        self._stream: Any = None
        self._graphs: dict[GraphShape, Captured] = {}
        self._wanted: Counter[GraphShape] = Counter()
        self._refused: set[str] = set()
        self._too_large: set[GraphShape] = set()

    def register(self, kind: str, run: Run, make_idle: Callable[[], None]) -> None:
        """Register a kind of step.

        `run` computes the step of a shape over static buffers, and returns what is read outside of the graph;
        `make_idle` makes all rows of these buffers idle, so that a trial run changes nothing.
        """
        self._steps[kind] = (run, make_idle)

    def has_refused(self, kind: str) -> bool:
        """Whether steps of a kind cannot be captured."""
        return kind in self._refused

    def choose(self, wanted: GraphShape) -> GraphShape:
        """The shape that a step should run with; captured if it can be.

        To be called before the step's inputs are sent: capturing uses the same buffers.
        """
        if not self._captures or wanted.kind in self._refused or wanted in self._graphs:
            return wanted
        self._wanted[wanted] += 1
        larger = self._larger(wanted)
        has_waited = self._wanted[wanted] > (_TRIES if larger is None else _PATIENCE)
        if has_waited and wanted not in self._too_large and self._capture(wanted):
            return wanted
        return larger or wanted

    def run(self, shape: GraphShape) -> Tensor | None:
        """The step, over the inputs that have been sent."""
        captured = self._graphs.get(shape)
        if captured is None:
            return self._steps[shape.kind][0](shape)
        graph, result = captured
        graph.replay()
        self._stats.graph_replays += 1
        return result

    def clear(self) -> None:
        """Drop all graphs: an address that they use has changed."""
        self._forget(lambda shape: True)
        self._wanted.clear()
        self._too_large.clear()
        self._pool = None

    def _forget(self, matches: Callable[[GraphShape], bool]) -> None:
        if self._graphs:
            torch.cuda.synchronize(self._device)  # one of them may be running
        self._graphs = {shape: kept for shape, kept in self._graphs.items() if not matches(shape)}

    def _larger(self, wanted: GraphShape) -> GraphShape | None:
        """The smallest captured shape that can do the work of `wanted`."""
        fitting = [
            shape
            for shape in self._graphs
            if shape.kind == wanted.kind
            and shape.tokens >= wanted.tokens
            and shape.rows >= wanted.rows
            and shape.width >= wanted.width
        ]
        return min(fitting) if fitting else None

    def _capture(self, shape: GraphShape) -> bool:
        """Capture a shape if possible; whether there is a graph now."""
        # The order matters. (1) Wait: steps in flight still read the static buffers. (2) Make them idle, so
        # that the trial run and the capture write to the spare row and block alone. (3) Run once uncaptured:
        # kernels are compiled and chosen in their first call, which a capture does not allow. (4) Wait, and
        # capture. The caller then fills the buffers with the step's inputs and replays.
        started = time.perf_counter()
        run, make_idle = self._steps[shape.kind]
        torch.cuda.synchronize(self._device)  # nothing is on its way through the buffers
        make_idle()
        trouble = ""
        try:
            run(shape)
            torch.cuda.synchronize(self._device)
            self._graphs[shape] = self._captured(shape)
        except torch.OutOfMemoryError:
            self._too_large.add(shape)
        except Exception as error:  # noqa: BLE001 - whatever the model does, it can still be called
            trouble = f"{type(error).__name__}: {error}"
        # Only here has the failed pass let go of its memory: the error's frames held it.
        if shape in self._too_large:
            torch.cuda.empty_cache()
            _log.warning(
                "there is no memory to capture a step of %d tokens (%s), which is launched one kernel at a "
                "time: a lower engine.memory would leave some",
                shape.tokens,
                shape.kind,
            )
        elif trouble:
            self._refuse(shape.kind, trouble)
        else:
            self._stats.graph_captures += 1
            self._stats.capture_seconds += time.perf_counter() - started
        return shape in self._graphs

    def _refuse(self, kind: str, trouble: str) -> None:
        torch.cuda.synchronize(self._device)
        self._refused.add(kind)
        self._forget(lambda shape: shape.kind == kind)
        _log.warning(
            "the model's steps cannot be captured as CUDA graphs (%s; %s): they are launched one kernel at a "
            "time, which is slow for small models",
            kind,
            trouble,
        )

    def _captured(self, shape: GraphShape) -> Captured:
        """Not by `torch.cuda.graph`, which empties torch's memory cache before every capture."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self._stream = stream = self._stream or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        # A capture needs a stream of its own, ordered behind the current one; replays go to the current one.
        # One pool for all: graphs run one after the other, and each may overwrite what others computed with.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            try:
                # Only this thread's calls must be fit for a capture: others may use the GPU meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                result = self._steps[shape.kind][0](shape)
            except BaseException:
                with suppress(RuntimeError):  # it says that the capture has failed, as we know
                    graph.capture_end()
                self._abandon()
                raise
            try:
                graph.capture_end()
            except RuntimeError:
                self._abandon()
                raise
        torch.cuda.current_stream().wait_stream(stream)
        return graph, result

    def _abandon(self) -> None:
        """Clean up after a failed capture, which torch does not.

        It would believe that a capture is still going on: every use of the device's random numbers would fail
        for good, and memory that was shared between streams would never be used again. The pool may still be
        marked as one that is being captured into, so that the next capture begins another.
        """
        index, pool = torch.cuda.current_device(), self._pool
        self._pool = None
        generator: Any = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())
        with suppress(AttributeError, RuntimeError):  # it has been ended, or has another name
            torch._C._cuda_endAllocateToPool(index, pool)
