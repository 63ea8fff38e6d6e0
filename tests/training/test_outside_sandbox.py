"""Sandbox backends that are not part of Ludus: found by name or by file, and used in a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stage_runs import episodes
from training_helpers import TINY, even, tasks

import ludus
from ludus.core import ConfigError, ToolCall
from ludus.observe import RunFolder
from ludus.sandbox import (
    CannotFork,
    Limits,
    Outcome,
    Sandbox,
    SandboxConfig,
    SandboxUnavailable,
    SessionEnded,
)

OUTSIDE = Path(__file__).parent.parent / "outside_package"
FILE = f"{OUTSIDE / 'outside_ludus' / 'folder_sandbox.py'}:FolderBackend"


class Coder(ludus.Agent):
    """Says a few tokens, and runs two programs, of which the second needs what the first has left."""

    async def run(self, episode: ludus.Episode) -> None:
        await episode.generate(max_tokens=3)
        for code in ("x = 6", "import os; print(x * 7, os.listdir())"):
            episode.observe(await episode.call([ToolCall("python", {"code": code})]))
            await episode.generate(max_tokens=3)


@pytest.mark.parametrize("tier", ["folder", FILE], ids=["by its entry point", "by its file"])
def test_a_sandbox_of_another_package_runs_the_code_of_a_training_run(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(OUTSIDE))
    (tmp_path / "sessions").mkdir()
    sandbox = {"tier": tier, "max_sessions": 1, "options": {"parent": str(tmp_path / "sessions")}}
    settings: dict[str, Any] = {
        **TINY,
        "rl": {**TINY["rl"], "steps": 1, "tasks": 2, "attempts": 2},
        "run": {"folder": str(tmp_path / "run")},
        "agent": {"tools": ["python"], "sandbox": sandbox, "loop": f"{__file__}:Coder"},
    }
    ludus.train(**settings, tasks=tasks(4), rewards=[even], progress=False)
    played = [one for step in episodes(RunFolder(tmp_path / "run")).values() for one in step]
    results = [[m.content for m in one.messages if m.role == "tool"] for one in played]
    assert played and all(own == ["(no output)", "42 []"] for own in results), results
    assert list((tmp_path / "sessions").iterdir()) == []  # each session was ended


async def test_a_backend_has_only_to_give_sessions() -> None:
    async with Sandbox(SandboxConfig(tier=FILE, max_sessions=2)) as box:
        assert (await box.python("print(1)")).stdout == "1\n" and box.alive == 0
        assert (await box.shell("cat a/b", files={"a/b": "x"})).stdout == "x"
        async with await box.session(limits=Limits(wall_seconds=0.5)) as session:
            assert box.alive == 1
            with pytest.raises(CannotFork, match="FolderSession cannot be duplicated"):
                await session.fork()
            said = await session.python("while True: pass")
            assert said.lost and said.outcome is Outcome.TIMEOUT and session.was_ended_inside
            with pytest.raises(SessionEnded):
                await session.read("x")
        assert box.alive == 0
        left = await box.session()
    assert left.closed  # with the sandbox


async def test_what_a_config_names_wrongly_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"tier.*is none of the backends docker, kubernetes, podman, process"
    ):
        SandboxConfig.parse({"tier": "proces"}, "sandbox")
    with pytest.raises(ConfigError, match="not a SandboxBackend"):
        Sandbox(SandboxConfig(tier="ludus.core:Task"))
    with pytest.raises(ConfigError, match=r"sandbox\.options is for backends of other packages"):
        Sandbox(SandboxConfig(options={"key": 1}))
    with pytest.raises(SandboxUnavailable, match="has no 'region'"):
        await Sandbox(SandboxConfig(tier=FILE, options={"region": "x"})).start()
