"""Client libraries that nobody here wrote, unchanged, through the model server: their tokens are exact.

They need not be installed where the tests are: LUDUS_CLIENTS_PYTHON names an interpreter that has them, and
LUDUS_CODEX the command of Codex.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from model_parts import CALL, Served, serving, serving_checkpoint

from ludus import Task, ToolCall, train
from ludus.training.data.batch import Batch

PYTHON = os.environ.get("LUDUS_CLIENTS_PYTHON", sys.executable)
PROGRAMS = Path(__file__).parent / "client_programs.py"
FINAL = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "It is 5."}}\n</tool_call>'
PACKAGES = {
    "openai": "openai",
    "openai-stream": "openai",
    "responses": "openai",
    "responses-stream": "openai",
    "anthropic": "anthropic",
    "anthropic-stream": "anthropic",
    "openai-agents": "agents",
    "openai-agents-chat": "agents",
    "openai-agents-stream": "agents",
    "openai-agents-chat-stream": "agents",
    "langgraph": "langgraph.prebuilt",
    "langgraph-stream": "langgraph.prebuilt",
    "pydantic-ai": "pydantic_ai",
    "pydantic-ai-stream": "pydantic_ai",
    "smolagents": "smolagents",
    "litellm": "litellm",
    "litellm-stream": "litellm",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@cache
def has(package: str) -> bool:
    """Whether the clients' interpreter has a package."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([PYTHON, "-c", code], stderr=subprocess.DEVNULL, check=False).returncode == 0


async def run(name: str, address: str, key: str) -> str:
    package = PACKAGES.get(name, "openai")
    if not has(package.partition(".")[0]):
        pytest.skip(f"{PYTHON} has no {package}")
    variables = {
        "OPENAI_BASE_URL": f"{address}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": address,
        "ANTHROPIC_API_KEY": key,
        "NO_PROXY": "*",
    }
    process = await asyncio.create_subprocess_exec(
        PYTHON, str(PROGRAMS), name, env={**os.environ, **variables},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-3000:]
    return out.decode().strip()


def assert_every_token_is_recorded(served: Served) -> None:
    batch = Batch.of([served.trajectory])
    rows = [row.tolist() for row in batch.split(batch.tokens_T)]
    for call in served.engine.calls:
        seen = [*call.consumed, *call.completion.tokens]
        assert any(row[: len(seen)] == seen for row in rows)
    sampled = sorted(list(call.completion.tokens) for call in served.engine.calls)
    assert sorted(action.tokens for action in served.trajectory.actions) == sampled


@pytest.mark.parametrize("name", PACKAGES)
async def test_a_tool_loop_is_token_exact(name: str) -> None:
    rewrites = name == "smolagents"  # it echoes calls as prose, and results as a user's words
    async with serving([CALL, FINAL if rewrites else "It is 5."]) as served:
        assert await run(name, served.address, served.session.key) == "It is 5."
        assert_every_token_is_recorded(served)
        streamed = [one.feed is not None for one in served.session._sampling.values()]
        assert streamed == [name.endswith("-stream")] * 2
        counts = {"requests": 2, "conversations": 1, "branches": 0, "restarts": int(rewrites)}
        assert served.session.tree.counts == counts
        assert len(served.trajectory.sequences) == 1 + rewrites


async def test_conversations_of_one_client_at_once() -> None:
    async with serving(lambda *_: "fine", seconds=0.01) as served:
        assert await run("parallel", served.address, served.session.key) == ",".join(["fine"] * 8)
        assert_every_token_is_recorded(served)
        assert len(served.trajectory.sequences) == 8


async def test_a_429_is_the_clients_own_error() -> None:
    async with serving_checkpoint(["one"], seconds=30, concurrency=1, queue=0) as (address, _):
        body: Any = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        import aiohttp

        async with aiohttp.ClientSession() as http:
            first = asyncio.create_task(http.post(f"{address}/v1/chat/completions", json=body))
            await asyncio.sleep(0.2)
            assert await run("rate-limited", address, "any") == "429 overloaded"
            first.cancel()


async def test_a_client_that_times_out_and_retries_gets_the_reply_that_was_sampled() -> None:
    """openai's client marks its retries; the first request is still being sampled."""
    async with serving(["one", "two"], seconds=4.0) as served:
        assert await run("impatient", served.address, served.session.key) == "one"
        assert len(served.engine.calls) == 1 and len(served.trajectory.actions) == 1
        assert served.session.counts["retries"] >= 1


# Training


def adder(task: Any) -> Any:
    """What the model is shown: one call, then an answer; smolagents ends by a call of its own."""
    yield ToolCall("add", {"a": 2, "b": 3})
    if task.metadata["client"] == "smolagents":
        yield ToolCall("final_answer", {"answer": "It is 5."})
    else:
        yield "It is 5."


def long_answers(trajectory: Any) -> float:
    """Something that attempts differ in."""
    return float(len(trajectory.actions[-1].tokens) % 7)


@pytest.mark.parametrize("name", [name for name in PACKAGES if not name.endswith(("-stream", "-chat"))])
def test_an_unchanged_client_is_trained(name: str, tmp_path: Path) -> None:
    """Imitation through the client, then RL: what the trainer computes is what the engine sampled."""
    if not has(PACKAGES[name].partition(".")[0]):
        pytest.skip(f"{PYTHON} has no {PACKAGES[name]}")
    result = train(
        model={"scratch": {"layers": 1, "width": 64}},
        tasks=[Task.of("add", id=str(number), client=name) for number in range(2)],
        rewards=[long_answers],
        demonstrations=adder,
        agent={"loop": f"command: {PYTHON} {PROGRAMS} {name}", "program": {"crash_reward": 0.0}},
        warm_start={"steps": 60, "batch": 2, "optimizer": {"learning_rate": 3e-3}},
        rl={"steps": 1, "tasks": 2, "attempts": 2},
        budgets={"max_turns": 4, "max_turn_tokens": 200, "max_tokens": 16_000},
        run={"folder": str(tmp_path / "run")},
        max_in_flight=2,
        progress=False,
    )
    last = [row for row in result.metrics if "logprob_difference_max" in row][-1]
    assert last["failures"] == 0 and last["model_server/requests"] >= 1
    assert last["logprob_difference_max"] < 1e-3
    if name != "smolagents":
        assert last["model_server/restarts"] == 0


def test_an_openai_program_learns(tmp_path: Path) -> None:
    """`recipes/ticket_agent.toml` as it is, but for the interpreter that has the client."""
    if not has("openai"):
        pytest.skip(f"{PYTHON} has no openai")
    root = Path(__file__).parents[2]
    result = train(
        root / "recipes" / "ticket_agent.toml",
        agent={"loop": f"command: {PYTHON} {root / 'examples' / 'ticket_agent.py'}"},
        run={"folder": str(tmp_path / "run")},
        progress=False,
    )
    assert float(result.success["after RL"].rstrip("%")) >= 85


CODEX = os.environ.get("LUDUS_CODEX", "")
"""The command of OpenAI's Codex (npm: @openai/codex), where it is installed."""
CODEX_CONFIG = """
model = "tiny"
model_provider = "ludus"
check_for_update_on_startup = false
[analytics]
enabled = false
[feedback]
enabled = false
[otel]
exporter = "none"
[model_providers.ludus]
name = "ludus"
base_url = "{address}/v1"
env_key = "LUDUS_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


@pytest.mark.skipif(not CODEX, reason="LUDUS_CODEX names no Codex")
async def test_codex_with_its_default_tools_is_token_exact(tmp_path: Path) -> None:
    """It offers tools of its provider (a namespace, a web search), which are left out."""
    call = {"name": "exec_command", "arguments": {"cmd": "echo $((2+3))"}}
    replies = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>", "It is 5."]
    async with serving(replies) as served:
        (tmp_path / "config.toml").write_text(CODEX_CONFIG.format(address=served.address))
        words = ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "What is 2+3?"]
        variables = {"CODEX_HOME": str(tmp_path), "LUDUS_KEY": served.session.key, "NO_PROXY": "*"}
        process = await asyncio.create_subprocess_exec(
            CODEX, *words, cwd=tmp_path, env={**os.environ, **variables},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()[-3000:]
        assert out.decode().strip() == "It is 5."
        assert_every_token_is_recorded(served)
        counts = {"requests": 2, "conversations": 1, "branches": 0, "restarts": 0}
        assert served.session.tree.counts == counts
