"""Servers that others wrote: PyPI's and npm's. LUDUS_MCP_SERVERS names the folders of their commands."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ludus.core.failures import Fault
from ludus.core.messages import ToolCall, ToolContext
from ludus.core.task import Task
from ludus.tools.mcp import mcp_tools

pytestmark = pytest.mark.slow

CALLS: dict[str, list[tuple[str, dict[str, Any], str]]] = {
    "mcp-server-time": [
        (
            "convert_time",
            {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"},
            "T21:00",
        ),
        ("get_current_time", {"timezone": "Nowhere/Land"}, "Invalid timezone"),
    ],
    "mcp-server-git --repository {files}": [
        ("git_log", {"repo_path": "."}, "the first"),
        ("git_create_branch", {"repo_path": ".", "branch_name": "side"}, "side"),
        ("git_branch", {"repo_path": ".", "branch_type": "local"}, "side"),
    ],
    "mcp-server-everything": [
        ("get-sum", {"a": 2, "b": 3}, "5"),
        ("get-tiny-image", {}, "[image/png]"),
        ("get-structured-content", {"location": "New York"}, "temperature"),
    ],
    "mcp-server-filesystem {files}": [
        ("write_file", {"path": "new.txt", "content": "hello"}, "Successfully"),
        ("read_text_file", {"path": "new.txt"}, "hello"),
        ("read_text_file", {"path": "/etc/passwd"}, "Access denied"),
    ],
    "mcp-server-memory": [("search_nodes", {"query": "nobody"}, "entities")],
}


@pytest.mark.parametrize("command", CALLS, ids=lambda command: command.split()[0])
async def test_public_servers(command: str, tmp_path: Path) -> None:
    path = os.pathsep.join([os.environ.get("LUDUS_MCP_SERVERS", ""), os.environ["PATH"]])
    program, *rest = command.split()
    found = shutil.which(program, path=path)
    if found is None:
        pytest.skip(f"no {program} here (LUDUS_MCP_SERVERS)")
    table: dict[str, Any] = {"mcp": " ".join([found, *rest])}
    if rest:
        table["files"] = str(tmp_path)
        _make_repository(tmp_path)
    tools, context = mcp_tools(table), ToolContext("one", Task("t"))
    try:
        for name, arguments, expected in CALLS[command]:
            result = await tools.call(ToolCall(name, arguments), context)
            assert expected in result.content
            refused = expected in ("Invalid timezone", "Access denied")
            assert result.fault is (Fault.TOOL_RAISED if refused else None)
    finally:
        await tools.aclose()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ([".git"] if rest else [])  # noqa: ASYNC240


def _make_repository(folder: Path) -> None:
    git = ["git", "-C", str(folder), "-c", "user.email=a@b.c", "-c", "user.name=a"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "the first"], check=True)
