"""A model server with episodes in this event loop, over an engine that replies from a script."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from ludus.chat import Renderer, load_format
from ludus.core.generation import Sampling
from ludus.core.task import Task
from ludus.core.tokenizer import ByteTokenizer, Tokenizer
from ludus.core.trajectory import Trajectory
from ludus.engine import FakeEngine
from ludus.remote.client import HttpClient
from ludus.rollouts.message_tree import MessageTree
from ludus.rollouts.recorder import Budgets, Recorder
from ludus.serve.model import CheckpointService, EpisodeService, EpisodeSession, ModelServer
from ludus.serve.service import ServerConfig

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


@dataclass
class Served:
    """An open episode, and how to talk to it."""

    address: str
    session: EpisodeSession
    service: EpisodeService
    engine: FakeEngine
    http: aiohttp.ClientSession

    @property
    def trajectory(self) -> Trajectory:
        return self.session.tree.trajectory

    async def post(
        self, body: Any, path: str = "chat/completions", key: str | None = None, **headers: str
    ) -> tuple[int, Any]:
        sent = {"Authorization": f"Bearer {key or self.session.key}"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.http.post(f"{self.address}/v1/{path}", json=body, headers=sent) as answer:
            return answer.status, await answer.json()


@asynccontextmanager
async def serving(
    replies: Any,
    *,
    models: Mapping[str, str] | None = None,
    turns: int = 64,
    seconds: float = 0.0,
    config: ServerConfig | None = None,
    tokenizer: Tokenizer | None = None,
    tokens: int = 1_000_000,
) -> AsyncIterator[Served]:
    tokenizer = tokenizer or ByteTokenizer()
    engine = FakeEngine(replies, tokenizer, seconds=seconds)
    recorder = Recorder(
        Trajectory(Task("t"), seed=1),
        engine=engine,
        budgets=Budgets(max_turns=turns, max_turn_tokens=2_000, max_tokens=tokens),
        sampling=Sampling(),
        session="e",
    )
    tree = MessageTree(recorder, Renderer(tokenizer, load_format("hermes")))
    service = EpisodeService()
    async with ModelServer(service, config) as server, aiohttp.ClientSession() as http:
        others = HttpClient(purpose="another model")
        session = EpisodeSession(tree, models, metrics=service.metrics, http=others)
        service.open(session)
        yield Served(server.address, session, service, engine, http)
        await others.close()


@asynccontextmanager
async def serving_checkpoint(
    replies: Any,
    *,
    token: str | None = None,
    seconds: float = 0.0,
    tokenizer: Tokenizer | None = None,
    max_context: int | None = None,
    **limits: Any,
) -> AsyncIterator[tuple[str, FakeEngine]]:
    tokenizer = tokenizer or ByteTokenizer()
    engine = FakeEngine(replies, tokenizer, seconds=seconds)
    config = ServerConfig(**limits)
    renderer = Renderer(tokenizer, load_format("hermes"))
    service = CheckpointService(engine, renderer, "tiny", config, token=token, max_context=max_context)
    async with ModelServer(service, config) as server:
        yield server.address, engine


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def chat(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": list(messages), **more}
