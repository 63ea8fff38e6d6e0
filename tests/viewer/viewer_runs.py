"""Runs to look at, and a viewer that runs in a thread."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from ludus.core import (
    Boundary,
    Failure,
    Fault,
    FinishReason,
    Group,
    Message,
    Segment,
    SegmentKind,
    StopReason,
    Task,
    TimeSpan,
    TokenSequence,
    ToolCall,
    Trajectory,
    VersionSpan,
)
from ludus.observe import RunWriter, rollout_metrics
from ludus.viewer import ViewerConfig, ViewerServer


def episode(
    task: str = "sum-1",
    attempt: int = 0,
    *,
    answer: str = "five",
    success: float = 1.0,
    style: float = 0.0,
    tool: str = "add",
    result: str = "5",
    fault: Fault | None = None,
    failure: Failure | None = None,
    prompt: str = "what is 2+3?",
    advantage: float | None = 0.5,
) -> Trajectory:
    """A question, a call, its result, an answer."""
    call = ToolCall(tool, {"a": 2, "b": "<b>3</b>"}, id="call_1_0")
    said = Segment(
        SegmentKind.ACTION,
        [5, 6],
        [-0.5, -0.25],
        versions=(VersionSpan(0, 3),),
        calls=(call,),
        faults=(fault,) if fault else (),
        faulted=(tool,) if fault else (),
        seconds=0.25,
        advantages=None if advantage is None else [advantage] * 2,
        entropies=None if advantage is None else [0.25, 0.75],
    )
    return Trajectory(
        Task.of(prompt, 5, id=task, system="You add."),
        [
            TokenSequence(
                [
                    Segment(SegmentKind.PROMPT, [1, 2, 3]),
                    said,
                    Segment(SegmentKind.OBSERVATION, [7, 8]),
                    Segment(SegmentKind.ACTION, [9], [-0.125], finish=FinishReason.STOP_TOKEN),
                ]
            )
        ],
        [
            Message("system", "You add."),
            Message("user", prompt),
            Message("assistant", "<think>sum</think>I add.", (call,)),
            Message("tool", result, name=tool, tool_call_id="call_1_0"),
            Message("assistant", answer),
        ],
        answer=answer,
        stop=StopReason.FAILED if failure else StopReason.ANSWERED,
        failure=failure,
        rewards={} if failure else {"success": success, "style": style},
        reward=None if failure else success + style,
        attempt=attempt,
        seconds={"generate": 0.3, "tools": 0.1, "total": 0.5},
        spans=[TimeSpan("generate", 0.0, 0.25, "", 0), TimeSpan("tool", 0.25, 0.1, tool, 0)],
    )


LOST = Failure(Boundary.SERVER, "TimeoutError", "the tool server does not answer", 2)


def write_run(
    folder: Path, groups_of_steps: dict[int, list[Group]], recipe: dict[str, Any] | None = None
) -> None:
    with RunWriter.create(
        folder, recipe or {"name": folder.name, "rl": {"steps": 4, "algorithm": "grpo"}}
    ) as run:
        for step, groups in groups_of_steps.items():
            run.write_groups(groups, step)
            run.log(step, rollout_metrics(groups) | {"entropy": 1.0 / (step + 1), "no_signal": 0.0})


def ordinary_groups(step: int) -> list[Group]:
    """Two groups; the second has a lost attempt, and a tool that fails at step 2."""
    first = [episode("sum-1", n, success=float(n % 2), answer=f"answer {n}") for n in range(4)]
    fault = Fault.TOOL_TIMEOUT if step == 2 else None
    second = [
        episode(
            "product-2", 0, tool="multiply", fault=fault, success=0.0, result=f"seen at step {step}"
        ),
        episode("product-2", 1, tool="multiply", success=1.0, style=0.5),
        episode("product-2", 2, tool="multiply", failure=LOST),
    ]
    return [Group(first[0].task, first), Group(second[0].task, second)]


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class RunningViewer:
    """A viewer, and requests to it."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self.address, self.token = address, token
        self.netloc = urlsplit(address).netloc
        self.headers: dict[str, str] = {}
        """Sent with every request."""

    def get(self, path: str, headers: dict[str, str] | None = None, **query: Any) -> Reply:
        return self.ask(
            "GET", path + (f"?{urlencode(query, doseq=True)}" if query else ""), None, headers
        )

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Reply:
        given = {"Content-Type": "application/json", "X-Ludus": "1"} if headers is None else headers
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.ask("POST", path, data, given)

    def ask(self, method: str, path: str, body: bytes | None, headers: dict[str, str] | None) -> Reply:
        connection = http.client.HTTPConnection(self.netloc, timeout=30)
        try:
            connection.request(method, path, body, self.headers | (headers or {}))
            answer = connection.getresponse()
            return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def settled(self, **query: Any) -> Any:
        """The episodes, once all files have been read."""
        while True:
            found = self.get("/api/episodes", **query).json
            if not found["index"]["waiting"] and found["index"]["files"]:
                return found


@contextmanager
def running_viewer(root: Path, **settings: Any) -> Iterator[RunningViewer]:
    loop = asyncio.new_event_loop()
    server = ViewerServer(ViewerConfig(root, sync_seconds=0.05, **settings))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(60)
        yield RunningViewer(server.address, server.token)
    finally:
        asyncio.run_coroutine_threadsafe(server.drain_and_stop(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
