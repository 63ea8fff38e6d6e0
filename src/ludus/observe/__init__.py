"""What a run leaves behind, and what a person sees of it: metrics, episodes, checkpoints, reports."""

from ludus.observe.atomic import atomic_directory, atomic_file, atomic_write
from ludus.observe.catalogue import (
    CATALOGUE,
    Metric,
    catalogue_markdown,
    combine,
    definition_of,
    prefixed,
    undefined,
)
from ludus.observe.checkpoints import Checkpoint, damage
from ludus.observe.encoding import Opaque
from ludus.observe.logs import printable, setup_logging
from ludus.observe.metrics import has_signal, rollout_metrics
from ludus.observe.progress import Progress
from ludus.observe.report import plot_curve, table_markdown, table_rich
from ludus.observe.run import RunFolder, TrajectoryFile, find_runs
from ludus.observe.sinks import JsonLinesSink, Sink, TensorBoardSink, WandbSink, read_metrics
from ludus.observe.store import (
    StoreError,
    holds_trajectories,
    read_groups,
    read_trajectories,
    write_groups,
    write_trajectories,
)
from ludus.observe.transcript import episode_text
from ludus.observe.writer import RunWriter

__all__ = [
    "CATALOGUE",
    "Checkpoint",
    "JsonLinesSink",
    "Metric",
    "Opaque",
    "Progress",
    "RunFolder",
    "RunWriter",
    "Sink",
    "StoreError",
    "TensorBoardSink",
    "TrajectoryFile",
    "WandbSink",
    "atomic_directory",
    "atomic_file",
    "atomic_write",
    "catalogue_markdown",
    "combine",
    "damage",
    "definition_of",
    "episode_text",
    "find_runs",
    "has_signal",
    "holds_trajectories",
    "plot_curve",
    "prefixed",
    "printable",
    "read_groups",
    "read_metrics",
    "read_trajectories",
    "rollout_metrics",
    "setup_logging",
    "table_markdown",
    "table_rich",
    "undefined",
    "write_groups",
    "write_trajectories",
]
