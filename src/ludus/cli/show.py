"""`ludus show`: print recorded episodes of a run, and what exactly the model read."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from ludus.core.failures import ConfigError, not_there
from ludus.core.trajectory import Trajectory, is_success
from ludus.observe import (
    RunFolder,
    TrajectoryFile,
    episode_text,
    find_runs,
    printable,
    read_groups,
    recorded_in,
    select_trajectories,
    tree_text,
)

if TYPE_CHECKING:
    from ludus.core.tokenizer import Tokenizer


_ALL = 100_000_000


@dataclass(frozen=True, slots=True)
class EpisodeFilter:
    """Which episodes to show; None and False leave a thing open."""

    step: int | None = None
    split: str | None = None
    task: str | None = None
    attempt: int | None = None
    failed: bool = False
    """Those lost to infrastructure failures."""
    wrong: bool = False
    """Those that were scored and did not succeed."""

    def shows(self, trajectory: Trajectory) -> bool:
        """Whether an episode matches; for conditions that need the episode itself."""
        return not self.wrong or (trajectory.is_trainable and not is_success(trajectory))

    def fits(self, task: str, attempt: int, has_failed: bool) -> bool:
        return (
            (self.task is None or task == self.task or fnmatchcase(task, self.task))
            and (self.attempt is None or attempt == self.attempt)
            and (has_failed or not self.failed)
        )


def show_trees(source: Path, wanted: EpisodeFilter, *, limit: int) -> None:
    """Print the groups in which an episode is wanted, as trees, those of the newest step first."""
    shown, files = 0, _files(source, wanted)
    for file in files:
        for group in read_groups(file.path):
            fits = (
                wanted.fits(t.task.id, t.attempt, t.failure is not None) and wanted.shows(t)
                for t in group.trajectories
            )
            if not any(fits):
                continue
            if limit and shown == limit:
                print(f"the first {shown}; for more, --limit N (0: all)", file=sys.stderr)
                return
            _print(f"step {file.step}, {file.split}: {file.path}")
            _print(tree_text(group))
            shown += 1
    if not shown:
        raise ConfigError(f"no group in {source} is what was asked for{_hint(source, files, wanted)}")


def show_episodes(source: Path, wanted: EpisodeFilter, *, limit: int, prompt: bool, full: bool) -> None:
    """Print the episodes that are wanted, those of the newest step first; 0 sets no limit."""
    files = _files(source, wanted)
    tokenizer = _tokenizer(source) if prompt else None
    shown, more = 0, False
    try:
        for file, trajectory in _found(files, wanted):
            if limit and shown == limit:
                more = True
                break
            _print(f"step {file.step}, {file.split}: {file.path}")
            size = _ALL if full else 6000
            _print(episode_text(trajectory, max_chars=size, max_message_chars=size if full else 1200))
            if tokenizer is not None:
                _print(tokens_text(trajectory, tokenizer))
            shown += 1
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader closed the pipe, as `head` does
        return
    if not shown and wanted.failed and any(_found(files, replace(wanted, failed=False))):
        print(
            f"no recorded episode in {source} that was asked for was lost to an infrastructure failure; "
            "--wrong shows those in which it was wrong"
        )
    elif not shown:
        raise ConfigError(f"no episode in {source} is what was asked for{_hint(source, files, wanted)}")
    if more:
        print(f"the first {shown}; for more, --limit N (0: all)", file=sys.stderr)


def tokens_text(trajectory: Trajectory, tokenizer: Tokenizer) -> str:
    """The text that the model read and wrote, decoded from the recorded tokens, special tokens included."""
    lines: list[str] = []
    for number, sequence in enumerate(trajectory.sequences):
        of = f" of sequence {number}" if len(trajectory.sequences) > 1 else ""
        for segment in sequence.segments:
            lines.append(f"--- {segment.kind.value}{of}, {len(segment.tokens)} tokens")
            lines.append(printable(tokenizer.decode(segment.tokens)))
    return "\n".join(lines or ["--- no tokens: it ended before the model was asked anything"])


def _print(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, errors="backslashreplace").decode(encoding))


def _files(source: Path, wanted: EpisodeFilter) -> list[TrajectoryFile]:
    if source.is_file():
        return [TrajectoryFile(0, "file", source)]
    if not source.exists():
        raise ConfigError(missing_run(source))
    recorded = [run for _, run in recorded_in(source, depth=0)]
    if not recorded:
        raise ConfigError(
            f"{source} is neither a folder of a run, `ludus eval` or `ludus synth` nor a Parquet file"
        )
    return [
        file
        for run in recorded
        for file in reversed(run.trajectory_files())
        if wanted.step in (None, file.step) and wanted.split in (None, file.split)
    ]


def missing_run(source: Path) -> str:
    """Error text for a missing run, with the runs beside it or in runs/; those of like names come first."""
    beside = source.parent if source.parent != Path() else Path("runs")
    runs = [str(run.path) for run in find_runs(beside) or find_runs()]
    near = get_close_matches(str(source), runs, n=3, cutoff=0.8)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    if runs and not near:
        hint = f"; there are: {', '.join(runs[-8:])}" + (", ..." if len(runs) > 8 else "")
    return (
        f"{not_there(source, 'run folder', beside_recipe=False)}{hint or '; there are no runs in runs/'}"
    )


def _found(
    files: list[TrajectoryFile], wanted: EpisodeFilter
) -> Iterator[tuple[TrajectoryFile, Trajectory]]:
    for file in files:
        for trajectory in select_trajectories(file.path, wanted.fits):
            if wanted.shows(trajectory):
                yield file, trajectory


def _hint(source: Path, files: list[TrajectoryFile], wanted: EpisodeFilter) -> str:
    if source.is_file():
        return ""
    recorded = sorted({file.step for file in _files(source, EpisodeFilter())})
    if not recorded:
        return ": it has recorded none (run.trajectories_every)"
    if files:
        return ""
    steps = f"{recorded[0]} to {recorded[-1]}" if len(recorded) > 8 else ", ".join(map(str, recorded))
    splits = sorted({file.split for file in _files(source, EpisodeFilter())})
    return f": there are episodes of the steps {steps}, of the splits {' and '.join(splits)}"


def _tokenizer(source: Path) -> Tokenizer:
    """The tokenizer that the run's checkpoints were saved with."""
    from ludus.chat.tokenizers import load_tokenizer

    run = RunFolder(source if source.is_dir() else source.resolve().parent.parent)
    checkpoint = run.latest_checkpoint()
    if checkpoint is None:
        raise ConfigError(
            f"--prompt needs the model's tokenizer, which is in a run's checkpoints, and {run.path} has none"
        )
    return load_tokenizer(checkpoint.path)
