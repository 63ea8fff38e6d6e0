"""What the model server costs a turn: turns per second over HTTP, next to the same turns without it.

    python benchmarks/proxy.py [--seconds 5] [--connections 32] [--turns 4] [--token-seconds 0.005]

The engine replies at once, so what is left is HTTP, JSON, the message tree and rendering. A client process with
so many keep-alive connections plays episodes of some turns: it sends the whole conversation each time, with a
tool and the model's calls as it received them.

    http, episodes     keys, the message tree, exact tokens: what training goes through
    http, a model      `ludus serve model`: stateless, the whole conversation rendered each time
    tree alone         the same turns of episodes without HTTP
    engine alone       `generate` and nothing else

Then an engine that takes some time for each token: how long a client waits for the first text of a stream, for
all of it, and for the same reply without a stream.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ludus.chat import Renderer, load_format
from ludus.core import ByteTokenizer, Completion, FinishReason, Message, Sampling, Task, Trajectory
from ludus.core.generation import Engine, OnTokens
from ludus.core.messages import ToolSpec
from ludus.remote.threads import frozen_gc
from ludus.rollouts.message_tree import MessageTree
from ludus.rollouts.recorder import Budgets, Recorder
from ludus.serve.model import CheckpointService, EpisodeService, EpisodeSession, ModelServer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOL = {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}
MOST_PER_SECOND = 5_000
"""Turns for which episodes are opened in advance."""
SENTENCE = "Two and three are five, and with four more of them it is nine."
SYSTEM, QUESTION = "You add numbers, one call at a time.", "What is 2 + 3, and then what is that plus 4?"


@dataclass(frozen=True)
class Rate:
    turns: int
    seconds: float
    cpu_seconds: float
    """Of this process; the client has its own."""

    def __str__(self) -> str:
        per_turn = self.cpu_seconds / self.turns
        return (
            f"{self.turns / self.seconds:9,.0f} turns/s   {1000 * per_turn:7.3f} ms of CPU a turn "
            f"({1 / per_turn:,.0f} turns/s on a core of its own)"
        )


class InstantEngine(Engine):
    """Answers every request with one call, at once."""

    def __init__(self) -> None:
        self._tokens = ByteTokenizer().encode(CALL)
        self._logprobs = [-0.1] * len(self._tokens)

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        media: Any = (),
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        return Completion(list(self._tokens), list(self._logprobs), FinishReason.STOP_TOKEN)


class PacedEngine(InstantEngine):
    """Says a sentence, a token at a time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._tokens = ByteTokenizer().encode(SENTENCE + "<|im_end|>")
        self._logprobs = [-0.1] * len(self._tokens)

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        media: Any = (),
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        for token in self._tokens[:-1]:
            await asyncio.sleep(self._seconds)
            if on_tokens is not None:
                on_tokens([token])
        return await super().generate(tokens, sampling)


def new_tree(engine: Any, renderer: Renderer) -> MessageTree:
    budgets = Budgets(max_turns=1_000, max_turn_tokens=1_000, max_tokens=1_000_000)
    trajectory = Trajectory(Task("t"))
    recorder = Recorder(trajectory, engine=engine, budgets=budgets, sampling=Sampling(), session="e")
    return MessageTree(recorder, renderer)


# The client: its own process, as little work as can be.


async def client(host: str, port: int, keys: list[str], arguments: argparse.Namespace) -> None:
    """Play an episode for each key until the time is up; print how many turns."""
    done, until = 0, time.monotonic() + arguments.seconds

    tools = [{"type": "function", "function": TOOL}]

    async def connection() -> None:
        nonlocal done
        reader, writer = await asyncio.open_connection(host, port)

        async def post(path: str, key: str, body: bytes) -> bytes:
            head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            found = await reader.readuntil(b"\r\n\r\n")
            assert found.startswith(b"HTTP/1.1 200"), found
            length = int(found.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            return await reader.readexactly(length)

        while keys and time.monotonic() < until:
            key = keys.pop()
            messages: list[Any] = [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": QUESTION},
            ]
            for _ in range(arguments.turns):
                body = {"model": "policy", "messages": messages, "tools": tools}
                data = await post("/v1/chat/completions", key, json.dumps(body).encode())
                done += 1
                message = json.loads(data)["choices"][0]["message"]
                result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "5"}
                messages += [message, result]
        writer.close()

    started = time.monotonic()
    await asyncio.gather(*(connection() for _ in range(arguments.connections)))
    print(json.dumps({"turns": done, "seconds": time.monotonic() - started}))


async def latency_client(host: str, port: int, keys: list[str], arguments: argparse.Namespace) -> None:
    """Ask with and without a stream in turn; print the seconds to the first text, and to the ends."""
    waits: dict[str, list[float]] = {"first": [], "streamed": [], "whole": []}
    until = time.monotonic() + arguments.seconds

    async def connection(key: str) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        while time.monotonic() < until:
            for stream in (True, False):
                asked = {
                    "model": "m",
                    "messages": [{"role": "user", "content": QUESTION}],
                    "stream": stream,
                }
                body = json.dumps(asked).encode()
                head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
                head += f"Authorization: Bearer {key}\r\n"
                head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                started = time.perf_counter()
                writer.write(head.encode() + body)
                found = await reader.readuntil(b"\r\n\r\n")
                assert found.startswith(b"HTTP/1.1 200"), found
                if not stream:
                    length = found.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                    await reader.readexactly(int(length))
                    waits["whole"].append(time.perf_counter() - started)
                    continue
                await reader.readuntil(b'{"content":"')
                waits["first"].append(time.perf_counter() - started)
                await reader.readuntil(b"data: [DONE]")
                waits["streamed"].append(time.perf_counter() - started)
                await reader.readuntil(b"0\r\n\r\n")
        writer.close()

    await asyncio.gather(*(connection(key) for key in keys[: arguments.connections]))
    print(json.dumps(waits))


async def ask_by_process(
    service: Any, arguments: argparse.Namespace, keys: Sequence[str], mode: str
) -> tuple[Any, float]:
    """What a client process has measured, and the CPU seconds of this one meanwhile."""
    async with ModelServer(service) as server:
        options = [
            f"--{name}={getattr(arguments, name)}" for name in ("seconds", "connections", "turns")
        ]
        process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, mode, server.address.removeprefix("http://"), *options,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        with frozen_gc():
            used = time.process_time()
            out, _ = await process.communicate("\n".join(keys).encode())
            used = time.process_time() - used
        return json.loads(out), used


async def over_http(service: Any, arguments: argparse.Namespace, keys: Sequence[str]) -> Rate:
    """Turns per second by a client process."""
    told, used = await ask_by_process(service, arguments, keys, "--client")
    return Rate(told["turns"], told["seconds"], used)


async def latencies(arguments: argparse.Namespace) -> str:
    """How long clients wait for a reply that takes its time."""
    engine: Any = PacedEngine(arguments.token_seconds)
    renderer = Renderer(ByteTokenizer(), load_format("hermes"))
    episodes = EpisodeService()
    keys = []
    for _ in range(arguments.connections):
        session = EpisodeSession(new_tree(engine, renderer), metrics=episodes.metrics)
        episodes.open(session)
        keys.append(session.key)
    waits, _ = await ask_by_process(episodes, arguments, keys, "--latency-client")
    first, streamed, whole = (1000 * median(waits[name]) for name in ("first", "streamed", "whole"))
    return (
        f"first text after {first:,.0f} ms, the end after {streamed:,.0f} ms; without a stream {whole:,.0f} ms "
        f"({len(SENTENCE)} tokens of {1000 * arguments.token_seconds:g} ms, {arguments.connections} clients)"
    )


async def without_http(arguments: argparse.Namespace, engine: Any, renderer: Renderer) -> Rate:
    tool = ToolSpec(TOOL["name"], TOOL["description"], PARAMETERS)  # type: ignore[arg-type]
    done, started, used = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - started < arguments.seconds:
        tree = new_tree(engine, renderer)
        messages = [Message("system", SYSTEM), Message("user", QUESTION)]
        for _ in range(arguments.turns):
            turn = await tree.sample(messages, [tool])
            tree.commit(turn)
            done += 1
            reply = Message("assistant", turn.reply.text, turn.reply.calls)
            messages += [reply, Message("tool", "5", tool_call_id=turn.reply.calls[0].id)]
    return Rate(done, time.perf_counter() - started, time.process_time() - used)


async def engine_alone(arguments: argparse.Namespace, engine: Any) -> Rate:
    done, context, sampling = 0, list(range(200)), Sampling()
    started, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - started < min(1.0, arguments.seconds):
        await engine.generate(context, sampling, session="e")
        done += 1
    return Rate(done, time.perf_counter() - started, time.process_time() - used)


async def measure(arguments: argparse.Namespace) -> dict[str, Rate]:
    engine: Any = InstantEngine()
    renderer = Renderer(ByteTokenizer(), load_format("hermes"))
    episodes = EpisodeService()
    keys = []
    for _ in range(int(MOST_PER_SECOND * arguments.seconds / arguments.turns)):
        session = EpisodeSession(new_tree(engine, renderer), metrics=episodes.metrics)
        episodes.open(session)
        keys.append(session.key)
    model = CheckpointService(engine, renderer, "model")
    return {
        "http, episodes": await over_http(episodes, arguments, keys),
        "http, a model": await over_http(model, arguments, ["any"] * len(keys)),
        "tree alone": await without_http(arguments, engine, renderer),
        "engine alone": await engine_alone(arguments, engine),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--token-seconds", type=float, default=0.005)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--latency-client", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for address, play in ((arguments.client, client), (arguments.latency_client, latency_client)):
        if address:
            host, _, port = address.partition(":")
            asyncio.run(play(host, int(port), sys.stdin.read().split(), arguments))
            return
    for name, rate in asyncio.run(measure(arguments)).items():
        print(f"{name:16} {rate}")
    print(f"{'a stream':16} {asyncio.run(latencies(arguments))}")


if __name__ == "__main__":
    main()
