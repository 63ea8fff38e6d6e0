"""Steps as captured graphs, for a few sizes of each kind of step.

A captured graph replays hundreds of kernels in one launch, over addresses that never change. Capturing takes
as long as dozens of steps, so a size is captured when it has been needed for a while; until then a larger graph
runs with idle rows, or, where there is none, a few steps are launched kernel by kernel. All graphs share one
memory pool, since they run one after the other.
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

from ludus.engine.stats import EngineStats

_log = logging.getLogger(__name__)

_FIRST_WIDTH = 1024
"""Context widths, in tokens, grow from here by factors of four."""
_PATIENCE = 32
"""For so many steps a size makes do with a graph that is larger than it needs."""
_TRIES = 3
"""For so many steps it is launched kernel by kernel, if there is no such graph: a batch may be growing."""


class Shape(NamedTuple):
    """What a graph was captured for."""

    kind: str
    """Of step: only graphs of the same kind can stand in for each other."""
    tokens: int
    rows: int
    width: int
    """Pages of the widest context."""


Run = Callable[[Shape], Tensor | None]


def wide_enough(width: int, page_size: int) -> int:
    """One of a few widths, in pages, that has room for so many."""
    tokens = _FIRST_WIDTH
    while tokens < width * page_size:
        tokens *= 4
    return -(-tokens // page_size)


class StepGraphs:
    """Chooses a shape for each step and runs it: replayed where graphs can be captured, else called."""

    def __init__(self, device: torch.device, stats: EngineStats) -> None:
        self._device, self._stats = device, stats
        self._captures = device.type == "cuda"
        self._steps: dict[str, tuple[Run, Callable[[], None]]] = {}
        self._pool: Any = None
        self._stream: Any = None
        self._graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, Tensor | None]] = {}
        self._wanted: Counter[Shape] = Counter()

    def serve(self, kind: str, run: Run, rest: Callable[[], None]) -> None:
        """Take on a kind of step.

        `run` computes the step of a shape over static buffers, and gives what is to be read outside of the
        graph; `rest` makes all rows of these buffers idle, so that a trial run changes nothing.
        """
        self._steps[kind] = (run, rest)

    def choose(self, wanted: Shape) -> Shape:
        """The shape that a step should run with; captured if it can be.

        To be called before the step's inputs are sent: capturing uses the same buffers.
        """
        if not self._captures or wanted in self._graphs:
            return wanted
        self._wanted[wanted] += 1
        larger = self._larger(wanted)
        if self._wanted[wanted] <= (_TRIES if larger is None else _PATIENCE):
            return larger or wanted
        self._capture(wanted)
        return wanted

    def run(self, shape: Shape) -> Tensor | None:
        """The step, over the inputs that have been sent."""
        captured = self._graphs.get(shape)
        if captured is None:
            return self._steps[shape.kind][0](shape)
        graph, result = captured
        graph.replay()
        self._stats.graph_replays += 1
        return result

    def clear(self) -> None:
        """Forget all graphs: an address they know has changed."""
        if self._graphs:
            torch.cuda.synchronize()  # one of them may be running
        self._graphs.clear()
        self._wanted.clear()
        self._pool = None

    def _larger(self, wanted: Shape) -> Shape | None:
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

    def _capture(self, shape: Shape) -> None:
        started = time.perf_counter()
        run, rest = self._steps[shape.kind]
        torch.cuda.synchronize()  # nothing is on its way through the buffers
        rest()
        run(shape)  # kernels are compiled and chosen here, outside of the capture
        torch.cuda.synchronize()
        try:
            self._graphs[shape] = self._captured(shape)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the model does, it can still be called
            torch.cuda.synchronize()
            self._captures = False
            self.clear()
            _log.warning(
                "the model's steps cannot be captured as CUDA graphs (%s: %s): they are launched one "
                "kernel at a time, which is slow for small models",
                type(error).__name__,
                error,
            )
            return
        self._stats.graph_captures += 1
        self._stats.capture_seconds += time.perf_counter() - started

    def _captured(self, shape: Shape) -> tuple[torch.cuda.CUDAGraph, Tensor | None]:
        """Not by `torch.cuda.graph`, which empties torch's memory cache before every capture."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self._stream = stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Only this thread's calls must be fit for a capture: others may use the GPU meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
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
        """After a failed capture, which torch does not tidy up.

        It would go on to believe that one is under way: every use of the device's random numbers would fail
        for good, and memory that was shared between streams would never be used again.
        """
        generator: Any = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
        with suppress(AttributeError, RuntimeError):  # it has been ended, or has another name
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
