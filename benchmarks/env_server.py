"""Environments over HTTP: steps a second and latency of `ludus serve env`, beside one in this process.

    python benchmarks/env_server.py                      # two minutes
    python benchmarks/env_server.py --seconds 1          # half a minute

A step is TextCraft's `inventory`, which takes microseconds, so that what is measured is the way to it. Compared
in the same run: the environment in this process through the tools that the agent has; a server of one and of
two replicas through the client of a run (`RemoteEnv`); plain HTTP to the same endpoint; many steps in one
request; and a bare echo of JSON in the same framework (aiohttp), by the same plain client. The last column is
the processor time of the server for a step at the most sessions, which depends less on what else the
machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from ludus.core import Task, ToolCall, ToolContext
from ludus.envs import EnvPool, EnvTools, load_env, tools_of

SESSIONS = (1, 16, 64)
GAME = {"goal": "stick", "commands": ["craft 4 stick using 2 oak planks"]}
TASK = Task.of("Craft.", id="bench", envs={"textcraft": GAME})
ECHO = """
from aiohttp import web
async def echo(request):
    return web.json_response(await request.json())
async def main():
    app = web.Application()
    app.router.add_post("/echo", echo)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print('{"address": "http://127.0.0.1:%d"}' % runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()
import asyncio
asyncio.run(main())
"""
Step = Callable[[], Awaitable[Any]]


class Server(str):
    """An address, and the processes behind it."""

    pid: int

    def cpu_seconds(self) -> float:
        """Of the process and its children."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        ticks = 0
        for pid in (str(self.pid), *children):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def process(*command: str) -> Iterator[Server]:
    started = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert started.stdout is not None
    try:
        server = Server(json.loads(started.stdout.readline())["address"])
        server.pid = started.pid
        yield server
    finally:
        started.terminate()
        started.wait(30)


async def timed(steps: list[Step], seconds: float, per_call: int = 1) -> tuple[float, float]:
    """Each of them again and again, side by side: steps a second, and the median of one in milliseconds."""
    taken: list[float] = []
    end = time.perf_counter() + seconds

    async def one(step: Step) -> None:
        while time.perf_counter() < end:
            started = time.perf_counter()
            await step()
            taken.append(time.perf_counter() - started)

    began = time.perf_counter()
    await asyncio.gather(*map(one, steps))
    return per_call * len(taken) / (time.perf_counter() - began), 1000 * statistics.median(taken)


async def by_tools(reference: str, sessions: int, seconds: float) -> tuple[float, float]:
    """As a run does it."""
    pool = EnvPool(load_env(reference), name="textcraft", size=sessions)
    steps: list[Step] = []
    for number in range(sessions):
        lease = await pool.acquire(str(number), TASK)
        tools = EnvTools(lease.env, await tools_of(lease.env, "textcraft"))
        context = ToolContext(str(number), TASK, {"textcraft": lease.env})
        call = ToolCall("step", {"action": "inventory"})
        steps.append(lambda tools=tools, call=call, context=context: tools.call(call, context))  # type: ignore[misc]
    found = await timed(steps, seconds)
    await pool.close()
    return found


async def by_http(address: str, sessions: int, seconds: float, batch: int = 0) -> tuple[float, float]:
    """By plain requests."""
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as http:
        names = [secrets.token_hex(16) for _ in range(sessions)]
        for name in names:
            body = {"session": name, "episode": name, "task": {"id": "b", "envs": {"textcraft": GAME}}}
            async with http.post(f"{address}/v1/sessions", json=body) as answer:
                assert answer.status == 201, await answer.text()
        count = 0

        def one(name: str) -> Step:
            async def step() -> None:
                nonlocal count
                path, body = f"/v1/sessions/{name}/step", {"action": "inventory"}
                if batch:
                    call = {"name": "step", "arguments": {"action": "inventory"}, "session": name}
                    calls = [{**call, "key": f"{name}.{count + n}"} for n in range(batch)]
                    count += batch
                    path, body = "/v1/batch", {"calls": calls}  # type: ignore[dict-item]
                async with http.post(f"{address}{path}", data=json.dumps(body)) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.json()

            return step

        found = await timed([one(name) for name in names], seconds, per_call=batch or 1)
        for name in names:
            await http.delete(f"{address}/v1/sessions/{name}")
        return found


async def by_echo(address: str, sessions: int, seconds: float) -> tuple[float, float]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def step() -> None:
            async with http.post(f"{address}/echo", json={"action": "inventory"}) as answer:
                await answer.json()

        return await timed([step] * sessions, seconds)


async def measure(seconds: float) -> dict[str, list[tuple[float, float]]]:
    """Steps a second and milliseconds, by what and by how many sessions."""
    serve = ("-m", "ludus", "serve", "env", "textcraft", "--quiet", "--no-token", "--size", "128")
    rows: dict[str, list[tuple[float, float]]] = {}

    async def row(
        what: str, run: Callable[[int], Awaitable[tuple[float, float]]], server: Server | None = None
    ) -> None:
        cells = [await run(sessions) for sessions in SESSIONS[:-1]]
        before, began = 0.0 if server is None else server.cpu_seconds(), time.perf_counter()
        cells.append(await run(SESSIONS[-1]))
        if server is not None:
            steps = cells[-1][0] * (time.perf_counter() - began)
            cells.append((server.cpu_seconds() - before, steps))
        rows[what] = cells

    await row("in this process", lambda n: by_tools("textcraft", n, seconds))
    with process("-c", ECHO) as server:
        await row("bare echo", lambda n: by_echo(server, n, seconds), server)
    with process(*serve) as server:
        await row("served, plain HTTP", lambda n: by_http(server, n, seconds), server)
        await row("served, batches of 32", lambda n: by_http(server, n, seconds, 32), server)
        await row("served, as a run does it", lambda n: by_tools(server, n, seconds), server)
    with process(*serve, "--replicas", "2") as server:
        await row("two replicas, as a run does it", lambda n: by_tools(server, n, seconds), server)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each number")
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    options = parser.parse_args()
    rows = asyncio.run(measure(options.seconds))
    heads = [f"{n} session{'s' if n > 1 else ''}: steps/s | p50 ms" for n in SESSIONS]
    print(f"| what | {' | '.join(heads)} | server CPU ms |\n|---|{'---|' * (2 * len(SESSIONS) + 1)}")
    for what, cells in rows.items():
        shown = " | ".join(f"{rate:,.0f} | {ms:.2f}" for rate, ms in cells[: len(SESSIONS)])
        cpu = [f"{1000 * used / steps:.2f}" for used, steps in cells[len(SESSIONS) :]]
        print(f"| {what} | {shown} | {''.join(cpu)} |")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
