"""What tests of stages share: an agent of several turns, and what it means that two runs are the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import ludus
from ludus.core import Trajectory
from ludus.observe import RunFolder


class Talker(ludus.Agent):
    """Says a few tokens at a time, and goes on until a budget ends it: several turns for sure."""

    async def run(self, episode: ludus.Episode) -> None:
        while True:
            turn = await episode.generate(max_tokens=5)
            episode.observe(await episode.call(turn.calls))
            episode.observe("and then?")


_TIMED = ("time", "step_seconds", "tokens_per_second", "episodes_per_second")


def numbers(run: RunFolder) -> list[dict[str, Any]]:
    """The rows of metrics without those that a clock decides."""
    return [{name: value for name, value in row.items() if not _is_timed(name)} for row in run.metrics()]


def _is_timed(name: str) -> bool:
    parts = name.split("/")
    return parts[-1] in _TIMED or "seconds" in parts or "time_share" in parts


def episodes(run: RunFolder) -> dict[str, list[Trajectory]]:
    """The episodes of every file, without the seconds that they took."""
    return {
        file.path.name: [_untimed(t) for t in run.trajectories(file.step, file.split)]
        for file in run.trajectory_files()
    }


def _untimed(trajectory: Trajectory) -> Trajectory:
    for sequence in trajectory.sequences:
        sequence.segments = [replace(segment, seconds=0.0) for segment in sequence.segments]
    return replace(trajectory, seconds={})


def assert_same_tensors(old: Any, new: Any, where: str = "") -> None:
    """Bit by bit, in whatever they are nested."""
    if isinstance(old, torch.Tensor):
        assert torch.equal(old, new), where
    elif isinstance(old, dict):
        assert list(old) == list(new), where
        for name in old:
            assert_same_tensors(old[name], new[name], f"{where}/{name}")
    elif isinstance(old, list):
        assert len(old) == len(new), where
        for place, (one, other) in enumerate(zip(old, new, strict=True)):
            assert_same_tensors(one, other, f"{where}/{place}")
    else:
        assert old == new, where


def assert_same_states(old: Path, new: Path) -> None:
    """Two checkpoints hold the same weights, optimizers, critics, and small states."""
    assert {file.name for file in old.iterdir()} == {file.name for file in new.iterdir()}
    assert_same_tensors(load_file(old / "model.safetensors"), load_file(new / "model.safetensors"))
    for file in sorted(old.glob("*.pt")):
        states = [torch.load(folder / file.name, weights_only=True) for folder in (old, new)]
        assert_same_tensors(*states, where=file.name)
    for name in ("progress.json", "rewards.json", "reinforcement.json", "rejection.json"):
        if (old / name).exists():
            assert (old / name).read_text() == (new / name).read_text(), name


def assert_same_runs(old: Path, new: Path) -> None:
    """The last checkpoint, every logged number and every episode are the same; no row comes twice."""
    first, second = RunFolder(old), RunFolder(new)
    assert numbers(first) == numbers(second)
    kept, other = episodes(first), episodes(second)
    assert list(kept) == list(other)
    for name in kept:
        assert kept[name] == other[name], name
    last, newest = first.checkpoints()[-1], second.checkpoints()[-1]
    assert last.step == newest.step
    assert_same_states(last.path, newest.path)
