"""What a run leaves behind, and what a person sees of it: metrics, episodes, checkpoints, reports."""

from ludus.observe.checkpoints import Checkpoint, damage
from ludus.observe.console import Progress, printable, setup_logging
from ludus.observe.encoding import Opaque
from ludus.observe.files import atomic_directory, atomic_file, atomic_write
from ludus.observe.metrics import (
    CATALOGUE,
    Metric,
    catalogue_markdown,
    combine,
    definition_of,
    has_signal,
    prefixed,
    rollout_metrics,
    undefined,
)
from ludus.observe.report import episode_text, plot_curve, table_markdown, table_rich
from ludus.observe.run_folder import RunFolder, RunWriter, TrajectoryFile, find_runs
from ludus.observe.sinks import JsonLinesSink, Sink, TensorBoardSink, WandbSink, read_metrics
from ludus.observe.trajectory_store import (
    StoreError,
    holds_trajectories,
    read_groups,
    read_trajectories,
    write_groups,
    write_trajectories,
)

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
