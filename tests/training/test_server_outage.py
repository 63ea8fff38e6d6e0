"""A run whose tool server goes away for good: the error says what is gone and how to go on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from training_helpers import TINY, Chatty, even, tasks

import ludus
from ludus.core import LudusError
from ludus.observe import RunFolder

TOOL = """
import ludus

@ludus.tool
def echo(text: str) -> str:
    'Say it again.'
    return text
"""


class ServedTool:
    """`ludus serve tools` in a process of its own."""

    def __init__(self, file: Path, *options: str) -> None:
        command = [sys.executable, "-m", "ludus", "serve", "tools", f"{file}:echo", *options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self._process.stdout is not None
        self.address = str(json.loads(self._process.stdout.readline())["address"])

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def test_the_error_of_a_run_whose_server_is_gone_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "served.py").write_text(TOOL)
    server = ServedTool(tmp_path / "served.py")
    run = tmp_path / "run"
    code: dict[str, Any] = {
        "tasks": tasks(4),
        "tools": [{"tool": server.address, "unreachable_seconds": 0.3}],
        "rewards": [even],
        "agent": Chatty(),
        "progress": False,
    }
    told = r"lost to infrastructure failures.*tool server .*To go on from the last checkpoint: "
    with pytest.raises(LudusError, match=rf"{told}ludus\.train\(resume='{run}'"):
        ludus.train(
            **{**TINY, "run": {**TINY["run"], "folder": str(run)}},
            **code,
            on_step=lambda phase, step, total, metrics: server.kill(),
        )
    assert [row["step"] for row in RunFolder(run).metrics()] == [1]
    again = ServedTool(tmp_path / "served.py", "--port", server.address.rpartition(":")[2])
    try:
        ludus.train(resume=run, **code)
    finally:
        again.kill()
    assert [row["step"] for row in RunFolder(run).metrics()] == [1, 2, 3]
