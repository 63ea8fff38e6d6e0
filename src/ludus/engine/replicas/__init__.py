"""Rollout engines with weights of their own: in other processes, on other devices, behind servers.

`ReplicatedEngine` makes one engine of several (`core.generation.Engine`, with weights of their own),
and `ProcessReplica` is an embedded engine in a child process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ludus.core.registry import lazy_exports

if TYPE_CHECKING:
    from ludus.engine.replicas.process import ProcessReplica, ReplicaSettings
    from ludus.engine.replicas.replicated import ReplicaLimits, ReplicatedEngine
    from ludus.engine.replicas.weights import WeightSource

__all__ = [
    "ProcessReplica",
    "ReplicaLimits",
    "ReplicaSettings",
    "ReplicatedEngine",
    "WeightSource",
]

__getattr__, __dir__ = lazy_exports(__name__)
