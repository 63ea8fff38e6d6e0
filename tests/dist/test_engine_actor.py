"""The actor of an engine, without a cluster: what it leaves behind however it ends."""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "engine"))

from engine_models import make
from local_replica import TrainedModel

from ludus.dist import placement
from ludus.dist.placement import EngineActor
from ludus.engine import EmbeddedEngine, EngineConfig
from ludus.engine.replicas import process as replica_process
from ludus.engine.replicas.process import pack_tokens, unpack_logprobs
from ludus.engine.replicas.weights import WEIGHTS

SHARED = Path("/dev/shm")
CONFIG = EngineConfig(cache_tokens=2048)
HEAD = {"version": 3, "device": "cpu", "dtype": "float32", "threads": 1, "engine": CONFIG.model_dump()}


def written(folder: Path) -> tuple[TrainedModel, dict[str, bytes], Any]:
    model = TrainedModel(make("smollm2", vocab_size=300))
    folder.mkdir()
    model.write(folder)
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != WEIGHTS}
    return model, files, np.fromfile(folder / WEIGHTS, np.uint8)


def in_shared_memory() -> set[Path]:
    return {*SHARED.glob("ludus-engine-*"), *SHARED.glob("ludus-replica-*")}


def left(folder: Path, before: set[Path]) -> list[Path]:
    """What is new in shared memory, and all files in the folder for temporary files that take room."""
    return sorted(in_shared_memory() - before) + [
        path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 50_000
    ]


async def test_an_engine_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor ends by a kill, so there is nothing to remove once it has loaded."""
    before, scratch = in_shared_memory(), tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    model, files, weights = written(tmp_path / "model")
    actor = EngineActor(list(sys.path), ".", "run", "engine", 0)
    assert "error" not in await actor.start(HEAD, files, weights)
    assert not list(scratch.iterdir()) and not left(scratch, before)

    model.learn(1)
    model.write(tmp_path / "model")
    # where names in files are not the module's own, new weights go through a folder, too
    monkeypatch.setattr(placement, "copy_into", lambda model, weights: False)
    weights = np.fromfile(tmp_path / "model" / WEIGHTS, np.uint8)
    assert "error" not in await actor.load_weights(weights, 4)
    assert not list(scratch.iterdir()) and not left(scratch, before)
    own = EmbeddedEngine(model.model, None, CONFIG, version=4)
    try:
        scored, body = await actor.perform({"operation": "score"}, pack_tokens([5, 6, 7]))
        assert "error" not in scored
        expected = await own.score([5, 6, 7])
        assert unpack_logprobs(body) == pytest.approx(expected, abs=1e-5)
    finally:
        await own.close()
        await actor._served.engine.close()


async def test_a_start_that_fails_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, scratch = in_shared_memory(), tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    _, files, weights = written(tmp_path / "model")
    for broken, data in (({**files, "config.json": b"{"}, weights), (files, weights[:1000])):
        actor = EngineActor(list(sys.path), ".", "run", "engine", 0)
        assert "error" in await actor.start(HEAD, broken, data)
        assert not list(scratch.iterdir()) and not left(scratch, before)


def start_and_load_for_ever(scratch: Path, loads: Connection, *model: Any) -> None:
    def load(folder: Path, *more: Any) -> None:
        loads.send((folder / WEIGHTS).stat().st_size)
        Event().wait()

    tempfile.tempdir = str(scratch)
    actor = EngineActor(list(sys.path), ".", "run", "engine", 0)
    with patch.object(replica_process, "load_model", load):
        asyncio.run(actor.start(HEAD, *model))


def test_an_engine_that_is_killed_while_it_loads_leaves_no_weights(tmp_path: Path) -> None:
    before, scratch = in_shared_memory(), tmp_path / "scratch"
    scratch.mkdir()
    _, files, weights = written(tmp_path / "model")
    context = multiprocessing.get_context("fork")  # another process would import for seconds
    told, loads = context.Pipe(duplex=False)
    process = context.Process(
        target=start_and_load_for_ever, args=(scratch, loads, files, weights), daemon=True
    )
    process.start()
    loads.close()
    assert told.recv() == len(weights) > 50_000
    process.kill()
    process.join()
    assert not left(scratch, before)
