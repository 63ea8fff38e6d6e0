"""Environments on a server: its HTTP API, replicas, and the client, which is an environment like any other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from served_envs import IMAGE, Counter
from server_process import ServerProcess, serving, until

from ludus.chat import Renderer, load_format
from ludus.core import (
    Boundary,
    ByteTokenizer,
    ConfigError,
    Fault,
    InfraError,
    Task,
    ToolCall,
    ToolContext,
)
from ludus.core.trajectory import Trajectory
from ludus.engine import FakeEngine
from ludus.envs import Env, EnvPool, EnvTools, RemoteEnv, load_env, reset_env, step_env, tools_of
from ludus.envs.instances import probe_env
from ludus.envs.served import load_served
from ludus.rewards import Scorer
from ludus.rollouts import Agent, Budgets, Rollout
from ludus.rollouts.agent import Demonstrator
from ludus.tools import as_toolset
from ludus.tools.hosting import LocalHost
from ludus.tools.remote import EpisodeLost
from ludus.tools.toolset import shut
from ludus.worlds.safe import expert, found, held_out_tasks, opened

ENVS = Path(__file__).parent / "served_envs.py"
COUNTER = f"{ENVS}:Counter"
TASK = Task.of("Count.", id="t1", envs={"mine": {"to": 2}})


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    names = (f"counter={COUNTER}", "safe")
    options = ("--replicas", "2", "--size", "4", "--step-timeout", "5")
    with serving(*names, options=options, what="env") as process:
        yield process


@contextlib.asynccontextmanager
async def remote(address: str, **options: Any) -> AsyncIterator[Env]:
    factory: Any = load_env(address)
    env = await factory(**options)
    try:
        yield env
    finally:
        await env.close()


async def test_one_episode_by_plain_http(server: ServerProcess, http: aiohttp.ClientSession) -> None:
    base, session = f"{server.address}/v1", secrets.token_hex(16)
    async with http.get(f"{base}/envs") as answer:
        [counter, safe] = (await answer.json())["envs"]
    assert (counter["name"], counter["step_rewards"]) == ("counter", "last")
    assert counter["takes_text"] and not safe["takes_text"]
    assert [one["name"] for one in counter["tools"]] == ["say", "step"]
    task = {"id": "t7", "envs": {"counter": {"to": 2}}}
    body = {"session": session, "episode": "e", "task": task}
    async with http.post(f"{base}/sessions", json=body) as answer:
        assert answer.status == 201
        seen = (await answer.json())["envs"]["counter"]
    assert seen["text"] == "Count to 2 (t7)." and seen["media"][0]["kind"] == "image/png"
    url = f"{base}/sessions/{session}"
    async with http.post(f"{url}/step", json={"action": "on"}) as answer:
        result = await answer.json()
    assert (result["content"], result["reward"], result["terminated"]) == ("1", 0.5, False)
    async with http.get(f"{url}/observation") as answer:
        assert (await answer.json())["text"] == "1"
    async with http.get(f"{url}/actions") as answer:
        assert (await answer.json()) == {"actions": ["on", "look", "é"]}
    async with http.get(f"{url}/state") as answer:
        state = (await answer.json())["state"]
    assert state == {"count": 1, "words": [], "to": 2, "done": False}
    another = {"task": {"id": "t8", "envs": {"counter": {"to": 3}}}}
    async with http.post(f"{url}/reset", json=another) as answer:
        assert (await answer.json())["envs"]["counter"]["text"] == "Count to 3 (t8)."
    key = {"action": "on", "key": "k"}
    for _ in range(2):  # the same key is the same step
        async with http.post(f"{url}/step", json=key) as answer:
            assert (await answer.json())["content"] == "1"
    calls = [{"key": f"b{n}", "name": "step", "arguments": {"action": "on"}, "session": session}
             for n in range(2)]  # fmt: skip
    async with http.post(f"{base}/batch", json={"calls": calls}) as answer:
        outcomes = (await answer.json())["outcomes"]
    assert [one["result"]["content"] for one in outcomes] == ["2", "3"]
    async with http.delete(url) as answer:
        assert (await answer.json()) == {"ended": True}
    async with http.get(f"{url}/observation") as answer:
        assert answer.status == 404


async def test_what_is_refused(server: ServerProcess, http: aiohttp.ClientSession) -> None:
    base = f"{server.address}/v1"

    async def opened_for(task: dict[str, Any]) -> tuple[int, str]:
        body = {"session": secrets.token_hex(16), "episode": secrets.token_hex(4), "task": task}
        async with http.post(f"{base}/sessions", json=body) as answer:
            found = await answer.json()
            return answer.status, found["error"]["message"] if "error" in found else body["session"]

    status, message = await opened_for({"id": "x", "envs": {"chess": {}}})
    assert status == 422 and "'chess'" in message and "counter, safe" in message
    status, message = await opened_for({"id": "x", "envs": {"counter": {"wrong": 1}}})
    assert status == 422 and "does not take them" in message
    status, session = await opened_for(
        {"id": "x", "envs": {"counter": {"to": 1}, "safe": {"combination": [1, 2, 3]}}}
    )
    async with http.get(f"{base}/sessions/{session}/actions") as answer:
        assert answer.status == 422 and "?env=NAME" in await answer.text()
    async with http.get(f"{base}/sessions/{session}/actions?env=counter") as answer:
        assert (await answer.json())["actions"][0] == "on"


async def test_openapi_and_metrics_know_the_environments(
    server: ServerProcess, http: aiohttp.ClientSession
) -> None:
    async with http.get(f"{server.address}/openapi.json") as answer:
        paths = (await answer.json())["paths"]
    assert {"step", "reset", "observation", "actions", "state"} <= {
        path.rpartition("/")[2] for path in paths
    }
    async with http.get(f"{server.address}/metrics") as answer:
        text = await answer.text()
    assert 'ludus_envs_instances{env="counter",state="size"} 8.0' in text  # 4 in each replica


async def test_the_client_is_an_environment_like_any_other(server: ServerProcess) -> None:
    async with remote(f"{server.address}/counter") as env:
        assert env.step_rewards == "last"
        before = EnvTools(env, await tools_of(env, "mine"))
        seen = await reset_env(env, TASK, "mine")  # another name than the server's
        assert seen.text == "Count to 2 (t1)." and seen.media[0].data == IMAGE
        context = ToolContext("e", TASK, {"mine": env})
        tools = EnvTools(env, await tools_of(env, "mine"), "observation")
        local = Counter()
        local.reset(TASK, to=2)
        expected = EnvTools(local, await tools_of(local, "mine"), "observation")
        assert await before.list(context) == await expected.list(context) == await tools.list(context)
        calls = [
            ToolCall("say", {"word": "ü\n"}), ToolCall("say", {"word": "bad"}), ToolCall("say", {}),
            ToolCall("say", {"word": [3]}), ToolCall("step", {"action": "on"}), ToolCall("fly", {}),
            ToolCall("step", {"action": "on"}), ToolCall("step", {"action": "on"}),
        ]  # fmt: skip
        for call in calls:
            here, there = await expected.call(call, context), await tools.call(call, context)
            parts = ("content", "reward", "terminated", "fault", "media")
            assert [getattr(here, part) for part in parts] == [getattr(there, part) for part in parts]
        await env.fetch_state()
        assert (env.count, env.done, env.words) == (2, True, ["ü\n"])
        with pytest.raises(AttributeError, match="'thing' cannot be read from here, only count, done"):
            env.thing  # noqa: B018


async def test_an_address_without_a_name_or_with_a_wrong_one(server: ServerProcess) -> None:
    with pytest.raises(ConfigError, match=r"names no environment, and the server has counter, safe"):
        async with remote(server.address):
            pass
    with pytest.raises(ConfigError, match="names 'chess'"):
        async with remote(f"{server.address}/chess"):
            pass
    with pytest.raises(ConfigError, match=r"agent\.pools\.mine\.options: .*token_file"):
        EnvPool(load_env(f"{server.address}/counter"), name="mine", options={"colour": "red"})
    with pytest.raises(ConfigError, match=r"the tool server rejected the request: .*does not take them"):
        async with remote(f"{server.address}/counter") as env:
            await reset_env(env, Task.of("x", envs={"mine": {"no": 1}}), "mine")


def rollout(pools: dict[str, EnvPool], agent: Agent, rewards: Any, **settings: Any) -> Rollout:
    return Rollout(
        engine=FakeEngine([]),
        renderer=Renderer(ByteTokenizer(), load_format("hermes")),
        scorer=Scorer(rewards),
        tools=as_toolset([]),
        pools=pools,
        agent=agent,
        budgets=Budgets(max_turns=40, max_tokens=100_000),
        **settings,
    )


async def played(playing: Rollout, tasks: list[Task]) -> list[Trajectory]:
    groups = [group async for group in playing.groups(tasks, seed=0)]
    found = [t for group in groups for t in group.trajectories]
    return sorted(found, key=lambda t: t.task.id)


async def test_episodes_are_the_same_token_by_token_and_rewards_read_the_environment(
    server: ServerProcess,
) -> None:
    tasks, rewards = held_out_tasks()[:6], [opened, found]
    from ludus.worlds.safe import Safe

    here, there = [
        await played(rollout({"safe": EnvPool(factory, name="safe", size=3)}, Demonstrator(expert), rewards),
                     tasks)
        for factory in (Safe, load_env(f"{server.address}/safe"))
    ]  # fmt: skip
    for one, other in zip(here, there, strict=True):
        assert other.failure is None and other.rewards == one.rewards
        assert other.rewards["success"] == 1.0
        assert [s.tokens for s in one.sequences] == [s.tokens for s in other.sequences]


async def test_a_replica_that_dies_loses_its_own_sessions_only(server: ServerProcess) -> None:
    async with (
        remote(f"{server.address}/counter") as one,
        remote(f"{server.address}/counter") as other,
    ):
        await reset_env(one, TASK, "mine")
        await reset_env(other, TASK, "mine")
        pids = [(await step_env(env, "process")).observation.text for env in (one, other)]
        assert pids[0] != pids[1] != str(server.process.pid)
        os.kill(int(pids[0]), signal.SIGKILL)
        with pytest.raises(EpisodeLost) as lost:
            await step_env(one, "on")
        assert lost.value.replay
        assert (await step_env(other, "process")).observation.text == pids[1]
        await reset_env(one, TASK, "mine")  # the next episode has another replica
        assert (await step_env(one, "on")).observation.text == "1"


async def test_a_step_that_hangs_is_a_failure_of_the_environment(server: ServerProcess) -> None:
    async with remote(f"{server.address}/counter") as env:
        pool = EnvPool(lambda: env, name="mine", size=1, step_timeout=0.3)
        lease = await pool.acquire("e", TASK)
        from ludus.envs import EnvAccess

        access = EnvAccess()
        access.add("mine", lease.env, pool.step_timeout)
        tools = EnvTools(lease.env, await tools_of(lease.env, "mine"))
        context = ToolContext("e", TASK, {"mine": env}, exclusive=access)
        with pytest.raises(InfraError, match=r"did not answer within 0\.3 seconds") as failure:
            await tools.call(ToolCall("step", {"action": "hang"}), context)
        assert failure.value.boundary is Boundary.ENV and failure.value.replay
        await pool.release("e", is_broken=True)


async def test_sessions_wait_for_an_instance_and_idle_ones_are_reaped(
    http: aiohttp.ClientSession,
) -> None:
    options = ("--size", "1", "--idle-seconds", "0.4", "--max-idle", "0.2", "--no-token")
    with serving(f"counter={COUNTER}", options=options, what="env") as server:
        async with remote(f"{server.address}/counter") as env, remote(server.address) as late:
            await reset_env(env, TASK, "mine")
            await step_env(env, "on")
            seen = await reset_env(late, TASK, "mine")  # as soon as the first, unused, was closed
            assert seen.text == "Count to 2 (t1)."
            with pytest.raises(EpisodeLost):
                await step_env(env, "on")

        async def instances() -> dict[str, float]:
            async with http.get(f"{server.address}/metrics") as answer:
                lines = [
                    line for line in (await answer.text()).splitlines() if "ludus_envs_inst" in line
                ]
            return {line.split('state="')[1].split('"')[0]: float(line.split()[-1])
                    for line in lines if not line.startswith("#")}  # fmt: skip

        async with asyncio.timeout(10):
            while (await instances())["idle"]:  # noqa: ASYNC110 - another process makes it so
                await asyncio.sleep(0.05)
        numbers = await instances()
        assert numbers["in_use"] == 0 and numbers["created"] == numbers["closed"] >= 1


async def test_a_token_and_loopback() -> None:
    with pytest.raises(RuntimeError, match="set a token"):
        serving("safe", options=("--host", "0.0.0.0", "--no-token"), what="env").__enter__()
    token = "0123456789abcdef"
    with serving("safe", env={"LUDUS_TOKEN": token}, what="env") as server:
        with pytest.raises(ConfigError, match=r"127\.0\.0\.1:.* LUDUS_TOKEN .*token_file = ") as refused:
            async with remote(server.address, token="another-token-of-mine"):
                pass
        assert "Authorization" not in str(refused.value), "a header is for those who write HTTP by hand"
        async with remote(server.address, token=token) as env:
            assert isinstance(env, RemoteEnv)
        assert server.logs() == [], "calls are logged on demand (--verbose)"


async def test_a_restarted_server_costs_a_replay(tmp_path: Path) -> None:
    with serving("safe", what="env") as first:
        port = first.port
        pool = EnvPool(load_env(f"http://127.0.0.1:{port}/safe"), name="safe", size=2)
        [task] = held_out_tasks()[:1]
        lease = await pool.acquire("a", task)
        tools = EnvTools(lease.env, await tools_of(lease.env, "safe"))
        context = ToolContext("a", task, {"safe": lease.env})
        await tools.call(ToolCall("turn", {"dial": "red", "to": 1}), context)
        first.kill()
        with serving("safe", options=("--port", str(port)), what="env"):
            with pytest.raises(EpisodeLost):
                await tools.call(ToolCall("turn", {"dial": "red", "to": 1}), context)
            await pool.release("a", is_broken=True)
            [again] = await played(rollout({"safe": pool}, Demonstrator(expert), [opened]), [task])
            assert again.failure is None and again.rewards["success"] == 1.0
            await pool.close()


async def hostile(answer: bytes, port: int = 0) -> tuple[asyncio.Server, str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(answer)
                await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def http_json(body: Any) -> bytes:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


@pytest.mark.parametrize(
    "answer, said",
    [
        (http_json({"envs": "many"}), "unexpected reply from the tool server"),
        (http_json({"envs": [{"name": "x", "tools": 3}]}), "unexpected reply"),
        (http_json([1]), "no object|no answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n<a>", "not JSON|no answer"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 3\r\n\r\n<a>", r"http://.* answered 404.*address right"),
        (b"hello\r\n\r\n", "BadStatusLine|BadHttp|Expected HTTP|no answer"),
    ],
)  # fmt: skip
async def test_what_hostile_servers_say_is_named(answer: bytes, said: str) -> None:
    server, address = await hostile(answer)
    async with server:
        with pytest.raises(InfraError, match=said) as failure:
            async with remote(f"{address}/x", deadline=1.0):
                pass
        assert failure.value.boundary is Boundary.SERVER


async def test_tools_that_name_an_environment_are_served() -> None:
    from ludus.tools.remote import RemoteTools

    with serving(f"{ENVS}:buy") as server:
        async with RemoteTools(server.address) as tools:
            one, two = (ToolContext(name, Task.of("x")) for name in ("one", "two"))
            for context, title, held in ((one, "a", "a"), (one, "b", "a, b"), (two, "c", "c")):
                result = await tools.call(ToolCall("buy", {"title": title}), context)
                assert result.content == held
            for context in (one, two):
                await tools.close(context)
    with pytest.raises(
        RuntimeError, match=r"'wants_any' needs an environment .* list it under \[envs\]"
    ):
        serving(f"{ENVS}:wants_any").__enter__()


async def test_a_file_lists_environments_for_tools(tmp_path: Path) -> None:
    from ludus.tools.remote import RemoteTools

    file = tmp_path / "tools.toml"
    file.write_text(f'tools = ["{ENVS}:wants_any"]\n[envs]\nshop = "{ENVS}:Shop"\n')
    with serving(options=("--config", str(file), "--backend", "processes")) as server:
        async with RemoteTools(server.address) as tools:
            result = await tools.call(ToolCall("wants_any"), ToolContext("one", Task.of("x")))
            assert result.content == "Shop"


async def test_a_class_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(
        "import ludus\n\nclass Licensed(ludus.Env):\n    def __init__(self):\n        open('/no/licence')\n\n"
        "def several():\n    return [1, 2]\n"
    )
    with pytest.raises(RuntimeError) as ended:
        serving(f"{file}:Licensed", what="env").__enter__()
    *_, told = str(ended.value).splitlines()
    assert told.startswith("error: the environment 'licensed' (Licensed) cannot be served"), told
    assert "FileNotFoundError" in told and f"{file}:5 in __init__" in told
    assert "\nTraceback" not in str(ended.value)
    for name, pool, message in (
        ("Licensed", {"isolation": "process"}, r"FileNotFoundError.*broken\.py:5 in __init__\)$"),
        ("several", {}, r"returned \[1, 2\], which has no method reset"),
    ):
        with pytest.raises(ConfigError, match=message):
            await LocalHost(partial(load_served, [{"env": f"{file}:{name}", "pool": pool}])).start()


async def test_a_slow_tool_does_not_cost_the_environment_that_it_does_not_touch() -> None:
    names = [f"{ENVS}:doze", f"{ENVS}:doze_in_a_shop", {"env": COUNTER, "name": "counter"}]
    tools = load_served(names)
    envs = {"counter": {"to": 5}, "shop": {}}
    context, on = ToolContext("e", Task.of("Count.", envs=envs)), ToolCall("step", {"action": "on"})
    await tools.open(context)
    try:
        assert (await tools.call(on, context)).content == "1"
        assert (await tools.call(ToolCall("doze"), context)).fault is Fault.TOOL_TIMEOUT
        assert (await tools.call(on, context)).content == "2"
        cancelled = asyncio.create_task(tools.call(ToolCall("doze"), context))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        await asyncio.wait((cancelled,))
        assert (await tools.call(on, context)).content == "3"
        assert (await tools.call(ToolCall("doze_in_a_shop"), context)).fault is Fault.TOOL_TIMEOUT
        with pytest.raises(EpisodeLost, match="doze_in_a_shop"):
            await tools.call(on, context)
    finally:
        await tools.close(context)
        await shut(tools)


@pytest.mark.parametrize(
    "address", ["http://", "http:///x", "ftp://host:3/x", "http://host:0", "file:///x"]
)
def test_what_is_no_address_of_an_environment_is_refused_when_it_is_named(address: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a valid environment address.*http://host:port"):
        load_env(address)


@pytest.mark.parametrize("scheme", ["", "agentgym:", "openenv:"])
async def test_a_probe_waits_for_a_server_that_is_starting_but_not_for_a_wrong_address(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = {
        "name": "x",
        "tools": [],
        "takes_text": True,
        "step_rewards": "sum",
        "show_actions": "no",
    }
    first, address = await hostile(b"")
    first.close()
    await first.wait_closed()
    monkeypatch.setattr("ludus.envs.instances.PROBE_SECONDS", 0.3)
    with pytest.raises(ConfigError, match=rf"no environment server at {address}.*was it started"):
        await probe_env(load_env(scheme + address), "mine", {})
    monkeypatch.setattr("ludus.envs.instances.PROBE_SECONDS", 20.0)
    with pytest.raises(ConfigError, match=r"no environment server at http://nowhere\.invalid"):
        await probe_env(load_env(f"{scheme}http://nowhere.invalid:80"), "mine", {})
    with pytest.raises(ConfigError, match=r"agent\.pools\.mine\.options: .*timeout|token_file"):
        await probe_env(load_env(scheme + address), "mine", {"colour": "red"})
    probing = asyncio.create_task(probe_env(load_env(scheme + address), "mine", {}))
    await asyncio.sleep(0.3)
    assert not probing.done()
    second, _ = await hostile(http_json({"envs": [described]}), int(address.rpartition(":")[2]))
    async with second:
        await probing


async def test_a_server_that_never_answered_is_asked_once_and_not_for_each_retry() -> None:
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            asked += 1
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 3\r\n\r\n<a>")
            await writer.drain()
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        pool = EnvPool(load_env(address), name="safe", size=1)
        [episode] = await played(rollout({"safe": pool}, Demonstrator(expert), []), held_out_tasks()[:1])
        assert episode.failure is not None and episode.failure.boundary is Boundary.SERVER
        assert asked == 1
        await pool.close()


async def test_drain_closes_the_instances() -> None:
    with serving(f"counter={COUNTER}", what="env") as server:
        async with remote(server.address) as env:
            await reset_env(env, TASK, "mine")
            server.signal(signal.SIGTERM)
            await until(lambda: server.process.poll() is not None)
            assert server.process.returncode == 0


async def test_a_server_that_is_gone_is_named_as_the_cause_of_a_failed_reset() -> None:
    """The pool's own deadline for a reset must not hide what the client knows."""
    task = held_out_tasks()[0]
    with serving("safe", what="env") as server:
        options = {"unreachable_seconds": 0.3}
        pool = EnvPool(load_env(f"{server.address}/safe"), name="safe", size=1, options=options)
        async with pool.lease("one", task):
            pass
    try:
        with pytest.raises(InfraError, match=r"could not be reset: .*tool server") as failure:
            async with pool.lease("two", task):
                pass
        assert failure.value.boundary is Boundary.SERVER
    finally:
        await pool.close()


async def test_more_episodes_than_the_server_has_instances_all_get_their_turn() -> None:
    """A finished episode gives its session up at once: it must not wait for the next one to end it."""
    tasks = held_out_tasks()[:8]
    with serving("safe", options=("--size", "2"), what="env") as server:
        pool = EnvPool(load_env(f"{server.address}/safe"), name="safe", size=8)
        async with asyncio.timeout(30):
            episodes = await played(rollout({"safe": pool}, Demonstrator(expert), [opened]), tasks)
        assert [one.failure for one in episodes] == [None] * 8
        await pool.close()


async def session_count(http: aiohttp.ClientSession, server: ServerProcess) -> int:
    async with http.get(f"{server.address}/readyz") as answer:
        return int((await answer.json())["sessions"])


async def test_waiting_for_an_instance_of_the_server_is_not_the_time_of_a_reset() -> None:
    with serving(f"counter={COUNTER}", options=("--size", "1"), what="env") as server:
        pool = EnvPool(load_env(server.address), name="mine", size=2, reset_timeout=0.3)
        async with asyncio.timeout(30):
            await pool.acquire("one", TASK)
            second = asyncio.create_task(pool.acquire("two", TASK))
            await asyncio.sleep(1.0)
            assert not second.done()
            await pool.release("one")
            assert (await second).observation.text == "Count to 2 (t1)."
        assert pool.stats.failures == 0
        await pool.close()


async def test_a_wait_for_an_instance_that_is_over_names_the_size_of_the_server() -> None:
    with serving(f"counter={COUNTER}", options=("--size", "1"), what="env") as server:
        options = {"deadline": 1.0}
        pool = EnvPool(load_env(server.address), name="mine", size=2, reset_retries=0, options=options)
        async with pool.lease("one", TASK):
            with pytest.raises(InfraError, match=r"1 of 1 instances of 'counter' .*--size"):
                await pool.acquire("two", TASK)
        await pool.close()


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_a_reset_that_is_given_up_gives_its_session_up(
    is_cancelled: bool, http: aiohttp.ClientSession
) -> None:
    options = ("--size", "1", "--no-token")
    with serving(f"counter={COUNTER}", options=options, what="env") as server:
        async with remote(server.address) as env, remote(server.address, deadline=20.0) as late:
            await reset_env(env, TASK, "mine")
            waiting = asyncio.create_task(
                reset_env(late, TASK, "mine", timeout=None if is_cancelled else 0.5)
            )
            async with asyncio.timeout(20):
                while await session_count(http, server) < 2:  # noqa: ASYNC110 - another process makes it so
                    await asyncio.sleep(0.02)
                if is_cancelled:
                    waiting.cancel()
                await asyncio.wait((waiting,))
                assert waiting.cancelled() or isinstance(waiting.exception(), TimeoutError)
                while await session_count(http, server) > 1:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)


async def test_a_server_that_hangs_is_not_one_that_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludus.tools.remote._OPEN_SECONDS", 0.2)
    with serving(f"counter={COUNTER}", what="env") as server:
        async with remote(server.address, unreachable_seconds=0.3) as env:
            server.signal(signal.SIGSTOP)
            try:
                with pytest.raises(InfraError, match=r"no answer within 0\.2 seconds"):
                    await reset_env(env, TASK, "mine", timeout=20)
            finally:
                server.signal(signal.SIGCONT)
