"""Decode steps as captured graphs, one for each of a few batch sizes and context widths.

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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ludus.engine.stats import EngineStats

_log = logging.getLogger(__name__)

_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_FIRST_WIDTH = 1024
"""Context widths, in tokens, grow from here by factors of four."""
_PATIENCE = 32
"""For so many steps a size makes do with a graph that is larger than it needs."""
_TRIES = 3
"""For so many steps it is launched kernel by kernel, if there is no such graph: a batch may be growing."""


class Shape(NamedTuple):
    """What a graph was captured for."""

    rows: int
    width: int
    """Pages of the widest context."""
    keeps_logits: bool
    """Whether it ends with the logits, for rows that are sampled outside."""


Run = Callable[[Shape], Tensor | None]


class StepGraphs:
    """Chooses a shape for each step and runs it: replayed where graphs can be captured, else called.

    `run` computes the step of a shape over static buffers, and gives the logits where they are kept; `rest`
    makes all rows of these buffers idle, so that a trial run changes nothing.
    """

    def __init__(
        self,
        run: Run,
        rest: Callable[[], None],
        *,
        rows: int,
        page_size: int,
        device: torch.device,
        stats: EngineStats,
    ) -> None:
        self._run, self._rest = run, rest
        self._rows, self._page_size = rows, page_size
        self._stats = stats
        self._captures = device.type == "cuda"
        self._pool: Any = None
        self._stream: Any = None
        self._graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, Tensor | None]] = {}
        self._wanted: Counter[Shape] = Counter()

    def choose(self, rows: int, width: int, keeps_logits: bool) -> Shape:
        """The shape that a step of so many rows and pages should run with; captured if it can be.

        To be called before the step's inputs are sent: capturing uses the same buffers.
        """
        wanted = Shape(self._rows_for(rows), self._width_for(width), keeps_logits)
        if not self._captures or wanted in self._graphs:
            return wanted
        self._wanted[wanted] += 1
        larger = self._larger(wanted)
        if self._wanted[wanted] <= (_TRIES if larger is None else _PATIENCE):
            return larger or wanted
        self._capture(wanted)
        return wanted

    def run(self, shape: Shape) -> Tensor | None:
        """The step, over the inputs that have been sent; its logits where they are kept."""
        captured = self._graphs.get(shape)
        if captured is None:
            return self._run(shape)
        graph, logits = captured
        graph.replay()
        self._stats.graph_replays += 1
        return logits

    def clear(self) -> None:
        """Forget all graphs: an address they know has changed."""
        if self._graphs:
            torch.cuda.synchronize()  # one of them may be running
        self._graphs.clear()
        self._wanted.clear()
        self._pool = None

    def _rows_for(self, rows: int) -> int:
        fitting = [size for size in _SIZES if size >= rows]
        return min(fitting[0] if fitting else -(-rows // 256) * 256, self._rows)

    def _width_for(self, width: int) -> int:
        tokens = _FIRST_WIDTH
        while tokens < width * self._page_size:
            tokens *= 4
        return -(-tokens // self._page_size)

    def _larger(self, wanted: Shape) -> Shape | None:
        """The smallest captured shape that can do the work of `wanted`."""
        fitting = [
            shape
            for shape in self._graphs
            if shape.keeps_logits == wanted.keeps_logits
            and shape.rows >= wanted.rows
            and shape.width >= wanted.width
        ]
        return min(fitting) if fitting else None

    def _capture(self, shape: Shape) -> None:
        started = time.perf_counter()
        torch.cuda.synchronize()  # nothing is on its way through the buffers
        self._rest()
        self._run(shape)  # kernels are compiled and chosen here, outside of the capture
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
                "the model's decode step cannot be captured as a CUDA graph (%s: %s): steps are launched one "
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
                logits = self._run(shape)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph, logits
