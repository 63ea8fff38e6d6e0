"""The engines that a run can sample from, by name, and what one is made from.

An engine of another package registers itself as those of Ludus do, by an entry point:

    [project.entry-points."ludus.engines"]
    sglang = "our_package.sglang:SglangEngine"

The object is called with an `EngineSetup` and gives a `core.generation.Engine`; `cluster.engine` names it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ludus.core.registry import Registry
from ludus.core.tokenizer import Tokenizer
from ludus.engine.config import EngineConfig

ENGINES = Registry("engine", group="ludus.engines")


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """Settings that a run gives to the engine that it makes."""

    model: nn.Module
    """The trainer's module; engines with weights of their own read folders instead."""
    tokenizer: Tokenizer
    config: EngineConfig
    version: int
    """The policy version before the first update."""
    number: int = 0
    """Which of the run's engines this is."""
    address: str | None = None
    """Its server, of those in `cluster.servers`."""
    device: str = "cpu"
    dtype: str = "float32"
    """In what the trainer computes, by torch's name."""
    threads: int | None = None
    """Of a process on the host; as many as torch likes when left out."""
    seconds: float = 600.0
    """`cluster.timeout`: how long it may take to start, to load weights, or to give a sign of life."""
