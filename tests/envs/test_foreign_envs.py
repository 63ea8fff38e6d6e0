"""Environments on servers of others: AgentGym's HTTP protocol and OpenEnv's WebSocket, scripted and real."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from foreign_servers import AgentGym, OpenEnvServer, running

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
from ludus.core.messages import ToolResult
from ludus.engine import FakeEngine
from ludus.envs import EnvPool, EnvTools, Lease, call_env, load_env, tools_of
from ludus.rewards import Scorer
from ludus.rollouts import Budgets, Rollout
from ludus.rollouts.agent import Demonstrator
from ludus.tools import as_toolset


class Session:
    """An instance of a pool, used as an episode does."""

    def __init__(self, pool: EnvPool, lease: Lease, tools: EnvTools, task: Task) -> None:
        self.pool, self.env, self.tools = pool, lease.env, tools
        self.first = lease.observation.text
        self.context = ToolContext("e", task, {"far": lease.env})

    async def call(self, name: str, **arguments: Any) -> ToolResult:
        return await self.tools.call(ToolCall(name, arguments), self.context)

    async def step(self, action: str) -> ToolResult:
        return await self.call("step", action=action)


@asynccontextmanager
async def session(reference: str, task: Task, **settings: Any) -> AsyncIterator[Session]:
    pool = EnvPool(load_env(reference), name="far", size=2, reset_retries=0, **settings)
    lease = await pool.acquire("e", task)
    try:
        yield Session(pool, lease, EnvTools(lease.env, await tools_of(lease.env, "far")), task)
    finally:
        await pool.release("e")
        await pool.close()


async def test_agentgym_in_the_dialect_of_textcraft() -> None:
    server = AgentGym("textcraft")
    async with running(server) as address:
        async with session(f"agentgym:{address}", Task.of("Count.", id="textcraft_2")) as game:
            assert game.first == "Goal: 2." and game.env.step_rewards == "last"
            assert [one.name for one in game.tools.tools] == ["step"]
            assert await call_env(game.env.available_actions) is None
            one, bad, two = [await game.step(action) for action in ("on", "raise", "on")]
            assert (one.content, one.reward, one.terminated) == ("1", 0.0, False)
            assert bad.fault is Fault.TOOL_RAISED and "list index out of range" in bad.content
            assert (two.content, two.reward, two.terminated) == ("2", 1.0, True)
            after = await game.step("on")
            assert after.terminated and after.reward is None
        assert server.closed == [0]


async def test_agentgym_in_the_dialect_of_webshop() -> None:
    async with running(AgentGym("webshop")) as address:
        task = Task.of("Count.", envs={"far": {"data_idx": 4}})  # another server's name for the number
        async with session(f"agentgym:{address}", task) as game:
            assert game.first == "Goal: 4."
            assert await call_env(game.env.available_actions) == ["search[<keywords>]", "click[back]"]
            assert (await game.step("on")).reward == 0.25
        with pytest.raises(ConfigError, match=r"says no number .* 'session_id'"):
            async with session(f"agentgym:{address}", Task.of("Count.", id="any")):
                pass


@pytest.mark.parametrize(
    "odd, said",
    [
        (500, "status 500: oops"),
        ("<html>", "no JSON"),
        ({"reward": 1}, "without an observation"),
        ({"observation": "x", "reward": "many", "done": False}, "no number"),
        ({"error": "The id 0 is not valid."}, "is not valid"),
        ("hang", r"no answer within 0\.2 seconds"),
    ],
)
async def test_what_an_agentgym_server_gets_wrong_is_a_failure_and_no_reward(
    odd: Any, said: str
) -> None:
    server = AgentGym("textcraft")
    async with running(server) as address:
        options = {"timeout": 0.2} if odd == "hang" else {}
        task = Task.of("x", id="t_2")
        async with session(f"agentgym:{address}", task, options=options) as game:
            server.odd = odd
            with pytest.raises(InfraError, match=said) as failure:
                await game.step("on")
            assert failure.value.boundary is Boundary.SERVER and failure.value.replay


def on(task: Task) -> Generator[ToolCall, str, None]:
    while True:
        yield ToolCall("step", {"action": "on"})


async def test_an_agentgym_server_that_fails_or_restarts_costs_a_replay() -> None:
    server = AgentGym("textcraft")
    async with running(server) as address:
        pool = EnvPool(load_env(f"agentgym:{address}"), name="far", size=4)
        playing = Rollout(
            engine=FakeEngine([]),
            renderer=Renderer(ByteTokenizer(), load_format("hermes")),
            scorer=Scorer([], default_total=0.0),
            tools=as_toolset([]),
            pools={"far": pool},
            agent=Demonstrator(on),
            budgets=Budgets(max_turns=8),
            retries=2,
        )

        async def fail() -> None:
            for odd in (500, {"error": "The id 0 is not valid."}, "<html>"):
                await asyncio.sleep(0.02)
                server.odd = odd
            server.counts.clear()  # as a restart does

        failing = asyncio.create_task(fail())
        tasks = [Task.of("Count.", id=f"count_{1 + n % 5}x{n}", envs={"far": {"data_idx": 1 + n % 5}})
                 for n in range(20)]  # fmt: skip
        groups = [group async for group in playing.groups(tasks, seed=0)]
        await failing
        await pool.close()
    trajectories = [t for group in groups for t in group.trajectories]
    assert [t.failure for t in trajectories] == [None] * 20
    assert {t.reward for t in trajectories} == {1.0}


async def test_what_is_no_agentgym_server() -> None:
    async with running(OpenEnvServer()) as address:
        with pytest.raises(InfraError, match=r"/openapi\.json: status 404") as failure:
            async with session(f"agentgym:{address}", Task.of("x", id="1")):
                pass
        cause = failure.value.__cause__
        assert isinstance(cause, InfraError) and not cause.replay


async def test_openenv_over_its_websocket() -> None:
    server = OpenEnvServer()
    async with running(server) as address:
        task = Task.of("Guess.", id="t9", envs={"far": {"seed": 5}})
        async with session(f"openenv:{address}", task, options={"text": "message"}) as game:
            assert game.first == "Guess (t9)." and server.open == 1
            [tool] = game.tools.tools
            assert tool.spec.description == "Guess."
            assert tool.spec.parameters == {
                "type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"],
                "additionalProperties": False,
            }  # fmt: skip
            assert (await game.call("step", number=3)).content == "no"
            wrong = await game.call("step", number="x")
            assert (wrong.fault, wrong.content) == (
                Fault.BAD_ARGUMENTS,
                "Invalid message: number: Field required",
            )
            raised = await game.call("step", number=13)
            assert (raised.fault, raised.content) == (Fault.TOOL_RAISED, "Error: unlucky")
            assert await game.env.state() == {"step_count": 1}
            hit = await game.call("step", number=5)
            assert (hit.content, hit.reward, hit.terminated) == ("yes", 1.0, True)
            assert (await game.call("step", number=5)).content == "The episode is over."
        async with session(f"openenv:{address}", task) as game:  # all of what it shows
            seen = await game.call("step", number=1)
            assert json.loads(seen.content) == {"message": "no", "near": 1}
            for odd, said in (
                ("close", "closed"),
                ("nonsense", "no JSON|has ended"),
                ("[1]", "has ended"),
            ):
                server.odd = odd
                with pytest.raises(InfraError, match=said):
                    await game.call("step", number=1)
    assert server.open == 0


async def test_the_mcp_tools_of_an_openenv_server() -> None:
    async with (
        running(OpenEnvServer(mcp=True)) as address,
        session(f"openenv:{address}", Task.of("x")) as game,
    ):
        [tool] = game.tools.tools
        assert (tool.name, tool.spec.description) == ("note", "Write.")
        assert (await game.call("note", text="é")).content == "noted é"
        wrong = await game.call("note")
        assert (wrong.fault, wrong.content) == (Fault.BAD_ARGUMENTS, "note: text: required")


# Real servers, in virtual environments of their own ------------------------------------------------------

OPENENV_PROGRAM = '''
import sys
from typing import Any, Optional
from openenv.core.env_server import Action, Environment, Observation, State, create_app

class Guess(Action):
    """Guess a number."""
    number: int

class Seen(Observation):
    message: str = ""

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def __init__(self):
        super().__init__()
        self.secret = 0
    def reset(self, seed: Optional[int] = None, episode_id: Optional[str] = None, **more: Any) -> Seen:
        self.secret = 1 + (seed or 0) % 4
        return Seen(message="A number from 1 to 4.")
    def step(self, action: Guess, timeout_s: Optional[float] = None, **more: Any) -> Seen:
        hit = action.number == self.secret
        return Seen(message="yes" if hit else "no", reward=float(hit), done=hit)
    @property
    def state(self) -> State:
        return State()

app = create_app(Game, Guess, Seen, env_name="game", max_concurrent_envs=64)
if __name__ == "__main__":
    import uvicorn
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
'''


@contextmanager
def process(command: list[str], port: int, path: str, folder: Path) -> Iterator[str]:
    server = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{address}{path}", timeout=5).read()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < end, "the server did not start"
                time.sleep(0.2)
        yield address
    finally:
        server.kill()
        server.wait()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


EXPERT = """
from ludus import ToolCall

def expert(task):
    for arguments in {moves!r}:
        yield ToolCall("step", arguments)
"""


def train(
    tmp_path: Path, reference: str, tasks: list[dict[str, Any]], moves: list[dict[str, Any]]
) -> dict[str, Any]:
    """Imitation of `moves`, then RL, of a tiny model by the command line; the last line of its metrics."""
    (tmp_path / "expert.py").write_text(EXPERT.format(moves=moves))
    rows = "\n".join(json.dumps(task) for task in tasks)
    (tmp_path / "tasks.jsonl").write_text(rows)
    (tmp_path / "recipe.toml").write_text(f'''
model = {{ scratch = {{ layers = 1, width = 32, heads = 2, kv_heads = 1, vocabulary = 400 }} }}
tasks = {{ train = "tasks.jsonl" }}
agent = {{ envs = {{ far = "{reference}" }} }}
budgets = {{ max_turns = 3, max_turn_tokens = 64, max_tokens = 4096 }}
rl = {{ steps = 2, tasks = 2, attempts = 4 }}
run = {{ folder = "run" }}
warm_start.demonstrations = "expert.py:expert"
warm_start.steps = 60
warm_start.batch = 4
warm_start.optimizer.learning_rate = 3e-3
''')
    command = [sys.executable, "-m", "ludus", "train", "recipe.toml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr + done.stdout
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    found: dict[str, Any] = json.loads(lines[-1])
    return found


@pytest.fixture(scope="session")
def openenv_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with `openenv`: LUDUS_OPENENV_PYTHON, or a new virtual environment (its pins are others)."""
    if given := os.environ.get("LUDUS_OPENENV_PYTHON"):
        return given
    folder = tmp_path_factory.mktemp("openenv")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    installing = [python, "-m", "pip", "install", "--quiet", "openenv>=0.10"]
    if subprocess.run(installing, check=False).returncode:
        pytest.skip("openenv cannot be installed")
    return python


@pytest.mark.worlds
@pytest.mark.timeout(1200)
async def test_a_real_openenv_server(openenv_python: str, tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(OPENENV_PROGRAM)
    port = free_port()
    with process([openenv_python, "game.py", str(port)], port, "/health", tmp_path) as address:
        task = Task.of("Guess.", id="t", envs={"far": {"seed": 2}})
        async with session(f"openenv:{address}", task) as game:
            assert game.first == "A number from 1 to 4."
            assert (await game.call("step", number=1)).content == "no"
            assert (await game.call("step", number="x")).fault is Fault.BAD_ARGUMENTS
            hit = await game.call("step", number=3)
            assert (hit.content, hit.reward, hit.terminated) == ("yes", 1.0, True)
        rows = [{"prompt": "Guess.", "id": str(n), "envs": {"far": {"seed": n}}} for n in range(4)]
        moves = [{"number": n} for n in (1, 2)]
        metrics = await asyncio.to_thread(train, tmp_path, f"openenv:{address}", rows, moves)
        assert metrics["step"] == 62 and metrics.get("failure/server", 0) == 0
        assert metrics["tool/step/calls"] > 0


@pytest.mark.worlds
@pytest.mark.timeout(1200)
async def test_a_real_openenv_server_with_room_for_two(openenv_python: str, tmp_path: Path) -> None:
    program = OPENENV_PROGRAM.replace("max_concurrent_envs=64", "max_concurrent_envs=2")
    (tmp_path / "game.py").write_text(program)
    port = free_port()
    with process([openenv_python, "game.py", str(port)], port, "/health", tmp_path) as address:
        pool = EnvPool(load_env(f"openenv:{address}"), name="far", size=8, max_wait=60.0)

        async def play(number: int) -> str:
            async with pool.lease(str(number), Task.of("Guess.", id=str(number))) as env:
                return str((await env.act("step", {"number": 1})).content)

        assert await asyncio.gather(*map(play, range(8))) == ["yes"] * 8
        assert pool.stats.created > 2
        await pool.close()


@pytest.mark.worlds
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    "LUDUS_AGENTGYM" not in os.environ,
    reason="set LUDUS_AGENTGYM to a clone of AgentGym, and LUDUS_AGENTGYM_PYTHON to a Python with its packages",
)
async def test_a_real_agentgym_server(tmp_path: Path) -> None:
    folder = Path(os.environ["LUDUS_AGENTGYM"], "agentenv-textcraft")
    python = os.environ.get("LUDUS_AGENTGYM_PYTHON", shutil.which("python3") or "python3")
    port = free_port()
    command = [python, "-m", "uvicorn", "agentenv_textcraft:app", "--port", str(port)]
    with process([*command, "--log-level", "warning"], port, "/", folder) as address:
        async with session(f"agentgym:{address}", Task.of("x", id="textcraft_3")) as game:
            assert game.first.startswith("Crafting commands:") and "Goal: craft" in game.first
            assert (await game.step("get 1 oak log")).content == "Got 1 oak log"
            assert (await game.step("fly")).content == "Could not execute fly"
        rows = [{"prompt": "Craft the goal.", "id": f"textcraft_{n}"} for n in range(4)]
        moves = [{"action": "inventory"}, {"action": "get 1 oak log"}]
        metrics = await asyncio.to_thread(train, tmp_path, f"agentgym:{address}", rows, moves)
        assert metrics["step"] == 62 and metrics.get("failure/server", 0) == 0
        assert metrics["tool/step/calls"] > 0


@contextmanager
def limited_server(kind: str, most: int) -> Iterator[str]:
    """A server in a process of its own that has room for `most` sessions."""
    command = [sys.executable, str(Path(__file__).with_name("foreign_servers.py")), kind, str(most)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()
            process.wait(10)


@pytest.mark.parametrize("kind", ["openenv", "textcraft"])
async def test_episodes_wait_for_a_session_of_a_server_that_is_full(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    scheme = "openenv" if kind == "openenv" else "agentgym"
    with limited_server(kind, 2) as address:
        pool = EnvPool(load_env(f"{scheme}:{address}"), name="far", size=8, max_wait=40.0)

        async def play(number: int) -> str:
            task = Task.of("go", id=f"task_{number}")
            async with pool.lease(str(number), task):
                await asyncio.sleep(0.05)
                return str(number)

        played = await asyncio.gather(*map(play, range(8)))
        assert played == [str(n) for n in range(8)]
        await pool.close()
    assert "agent.pools.far.size" in caplog.text
    assert caplog.text.count("its server is full") == 1


@pytest.mark.parametrize("kind", ["openenv", "textcraft"])
async def test_a_server_that_stays_full_is_named_with_what_to_set(kind: str) -> None:
    scheme = "openenv" if kind == "openenv" else "agentgym"
    with limited_server(kind, 1) as address:
        pool = EnvPool(load_env(f"{scheme}:{address}"), name="far", size=4, max_wait=0.3)
        await pool.acquire("first", Task.of("go", id="t_1"))
        with pytest.raises(InfraError) as told:
            await pool.acquire("second", Task.of("go", id="t_2"))
        assert "its server is full" in str(told.value) and "agent.pools.far.size" in str(told.value)
        assert ("max_sessions: 1" if kind == "openenv" else "Too many environments: 1") in str(
            told.value
        )
        assert told.value.retriable
        # the session goes to the next one as soon as it is given back, and the queue is as it was
        waiting = asyncio.create_task(pool.acquire("third", Task.of("go", id="t_3")))
        await asyncio.sleep(0.1)
        await pool.release("first")
        await waiting
        assert pool.stats.in_use == 1 and pool.stats.waiting == 0
        await pool.close()


async def test_a_server_that_has_room_again_is_used_wholly() -> None:
    server = OpenEnvServer(most=1)
    async with running(server) as address:
        pool = EnvPool(load_env(f"openenv:{address}"), name="far", size=3, max_wait=30.0)
        await pool.acquire("first", Task.of("go"))
        others = [asyncio.create_task(pool.acquire(str(n), Task.of("go"))) for n in range(2)]
        while not server.refused:  # noqa: ASYNC110 - the server knows of no event
            await asyncio.sleep(0.01)
        server.most = 3
        await asyncio.gather(*others)
        assert pool.stats.in_use == 3
        await pool.close()
