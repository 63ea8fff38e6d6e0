"""Programs as agents: real processes and functions that play episodes through the model server."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ludus.chat import Renderer, load_format
from ludus.core.failures import Boundary, ConfigError, EngineError
from ludus.core.messages import ToolCall
from ludus.core.task import Task
from ludus.core.tokenizer import ByteTokenizer
from ludus.core.trajectory import StopReason, Trajectory
from ludus.engine import FakeEngine
from ludus.observe import read_groups, rollout_metrics, write_groups
from ludus.rewards import Scorer
from ludus.rollouts import Budgets, Demonstrator, Rollout
from ludus.rollouts.agent import ProgramConfig
from ludus.sandbox import SandboxConfig, close_shared_sandboxes
from ludus.serve.model import ProgramAgent
from ludus.tools import as_toolset
from ludus.training import Recipe, load_parts

ASK = """
import json, os, sys, urllib.request
def ask(messages, path="chat/completions", **more):
    body = {"model": "policy", "messages": messages, **more} if path == "chat/completions" else messages
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/" + path
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
task = json.load(sys.stdin)
assert task == json.loads(os.environ["LUDUS_TASK"])
question = task["messages"][-1]["content"]
"""


def program(tmp_path: Path, code: str) -> str:
    file = tmp_path / "agent.py"
    file.write_text(ASK + code)
    return f"python {file}"


async def play(
    agent: ProgramAgent,
    replies: Any,
    *,
    tasks: int = 1,
    rewards: Any = (),
    failures: Any = None,
    **budgets: Any,
) -> list[Trajectory]:
    tokenizer = ByteTokenizer()
    engine = FakeEngine(replies, tokenizer, failures=failures)
    playing = Rollout(
        engine=engine,
        renderer=Renderer(tokenizer, load_format("hermes")),
        scorer=Scorer(list(rewards)),
        tools=as_toolset([]),
        agent=agent,
        budgets=Budgets(**budgets),
    )
    try:
        given = [
            Task.of(f"question {number}", id=str(number), answer=f"{number}") for number in range(tasks)
        ]
        found = [group.trajectories[0] async for group in playing.groups(given, seed=0)]
    finally:
        await agent.close()
    assert not engine.sessions
    return sorted(found, key=lambda one: int(one.task.id))


SAYS = "print(ask([{'role': 'user', 'content': question}])['choices'][0]['message']['content'])"


async def test_a_command_plays_episodes_many_at_once(tmp_path: Path) -> None:
    agent = ProgramAgent(program(tmp_path, SAYS), ProgramConfig(answer="stdout"))
    played = await play(agent, lambda tokens, sampling, session: "fine", tasks=6)
    assert [one.answer for one in played] == ["fine"] * 6
    assert all(one.stop is StopReason.ANSWERED and one.failure is None for one in played)
    assert [one.messages[0].content for one in played] == [f"question {n}" for n in range(6)]
    assert [one.reward for one in played] == [None] * 6  # nobody rewarded anything
    metrics = rollout_metrics([])
    assert "model_server/restarts" not in metrics
    assert played[0].counts["model_server/requests"] == 1


async def test_rewards_are_reported_or_scored(tmp_path: Path) -> None:
    code = SAYS + "\nask({'reward': 0.5}, 'reward')"
    (one,) = await play(ProgramAgent(program(tmp_path, code)), ["fine"])
    assert one.reward == 0.5
    (one,) = await play(ProgramAgent(program(tmp_path, SAYS)), ["fine"], rewards=[right])
    assert (one.reward, one.rewards) == (1.0, {"right": 1.0})


def right(trajectory: Trajectory) -> float:
    return float(trajectory.answer == "fine")


REPORTS = (
    SAYS
    + """
import urllib.error
try:
    ask({'answer': 'fine'}, 'reward')
    ask({'reward': 0.5}, 'reward')
except urllib.error.HTTPError as error:
    sys.stderr.write(error.read().decode()); sys.exit(3 if error.code == 403 else 4)
"""
)


@pytest.mark.parametrize(
    ("setting", "rewards", "total"),
    [(None, [], 0.5), (None, [right], None), (True, [right], 1.5), (False, [], None)],
)
async def test_who_may_set_rewards(
    tmp_path: Path, setting: bool | None, rewards: list[Any], total: float | None
) -> None:
    """Programs may where the recipe has no rewards of its own, or says so; the answer is theirs always."""
    agent = ProgramAgent(program(tmp_path, REPORTS), ProgramConfig(rewards=setting))
    (one,) = await play(agent, ["fine"], rewards=rewards)
    assert one.reward == total
    if total is None:
        assert one.failure is not None and "exit code 3" in one.failure.message
        assert "agent.program.rewards = true" in one.failure.message


async def test_a_number_of_a_function_is_a_reward_where_it_may_set_one() -> None:
    async def agent(task: Task, base_url: str, key: str) -> float:
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        async with aiohttp.ClientSession(headers={"x-api-key": key}) as http:
            await http.post(f"{base_url}/chat/completions", json=body)
        return 1e300 if task.id == "1" else 0.5

    first, second = await play(ProgramAgent(agent), lambda *_: "fine", tasks=2)
    assert first.reward == 0.5
    assert second.failure is not None and "between -1,000,000 and 1,000,000" in second.failure.message
    with pytest.raises(ConfigError, match=r"agent\.program\.rewards = true"):
        await play(ProgramAgent(agent), ["fine"], rewards=[right])


async def test_a_program_is_told_of_the_answers_on_request_alone(tmp_path: Path) -> None:
    code = SAYS + "\nprint(json.dumps(task))"
    for fields in ((), ("target",), ("metadata", "envs")):
        config = ProgramConfig(answer="stdout", task_fields=fields)
        (one,) = await play(ProgramAgent(program(tmp_path, code), config), ["fine"])
        told = json.loads((one.answer or "").splitlines()[-1])
        assert told.keys() == {"id", "messages", *fields}
        assert told.get("metadata", {"answer": "0"}) == {"answer": "0"}


THIEF = """
import glob, subprocess, time, urllib.error
mine, folder = os.environ["LUDUS_KEY"], {folder!r}
open(folder + "/" + task["id"], "w").close()
print(ask([{{'role': 'user', 'content': question}}])['choices'][0]['message']['content'])
deadline, stolen = time.monotonic() + 50, set()
while not stolen and time.monotonic() < deadline and task["id"] == "1":
    for place in glob.glob("/proc/[0-9]*/environ"):
        try:
            found = dict(one.split("=", 1) for one in open(place).read().split(chr(0)) if "=" in one)
        except OSError:
            continue
        if found.get("LUDUS_KEY", mine) != mine and found["LUDUS_BASE_URL"] == os.environ["LUDUS_BASE_URL"]:
            stolen.add(found["LUDUS_KEY"])
for key in stolen:
    os.environ["OPENAI_API_KEY"] = os.environ["LUDUS_KEY"] = key
    try:
        ask([{{'role': 'user', 'content': 'stolen'}}])
        print("taken")
    except urllib.error.HTTPError as error:
        print(error.code, json.load(error)["error"]["message"])
    open(folder + "/over", "w").close()
while task["id"] == "0" and not os.path.exists(folder + "/over") and time.monotonic() < deadline:
    time.sleep(0.02)
"""


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux")
@pytest.mark.parametrize("clients", ["own", "any"])
async def test_the_key_of_another_program_is_refused(tmp_path: Path, clients: Any) -> None:
    """Programs of one user can read each other's environment, with the keys in it."""
    config = ProgramConfig(answer="stdout", clients=clients, timeout=60)
    agent = ProgramAgent(program(tmp_path, THIEF.format(folder=str(tmp_path))), config)
    first, second = await play(agent, lambda *_: "fine", tasks=2)
    said = (second.answer or "").splitlines()[1]
    if clients == "any":
        assert said == "taken" and first.counts["model_server/requests"] == 2
    else:
        assert said.startswith("403 ") and 'agent.program.clients = "any"' in said
        assert first.counts["model_server/requests"] == 1 and first.failure is None


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux")
async def test_the_children_of_a_program_may_use_its_key(tmp_path: Path) -> None:
    """A child, one in a session of its own, and one whose parent has ended."""
    code = """
import subprocess, time
if "child" in sys.argv:
    print(ask([{'role': 'user', 'content': question}])['choices'][0]['message']['content'])
    open(sys.argv[0] + ".done", "w").close()
    sys.exit()
told = {"input": json.dumps(task), "text": True, "check": True}
own = [sys.executable, sys.argv[0], "child"]
subprocess.run(own, **told)
subprocess.run(own, **told, start_new_session=True)
os.remove(sys.argv[0] + ".done")
file = sys.argv[0] + ".task"
open(file, "w").write(json.dumps(task))
subprocess.run(["sh", "-c", '"$@" < "$0" & sleep 0.05', file, *own])
deadline = time.monotonic() + 20
while not os.path.exists(sys.argv[0] + ".done") and time.monotonic() < deadline:
    time.sleep(0.02)
"""
    config = ProgramConfig(answer="stdout", timeout=60)
    (one,) = await play(ProgramAgent(program(tmp_path, code), config), lambda *_: "fine")
    assert one.failure is None and (one.answer or "").split() == ["fine"] * 3


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("sys.exit(3)", "exit code 3"),
        (SAYS + "\nsys.stderr.write('x' * 10**6 + 'no such thing'); sys.exit(1)", "no such thing"),
        (SAYS + "\nos.kill(os.getpid(), 9)", "signal 9"),
        ("pass", "without a reply"),
    ],
)
async def test_a_program_that_fails_is_a_failure_of_the_agent(
    tmp_path: Path, code: str, said: str
) -> None:
    (one,) = await play(ProgramAgent(program(tmp_path, code)), ["fine"])
    assert one.failure is not None and one.failure.boundary is Boundary.AGENT
    assert said in one.failure.message and len(one.failure.message) < 2_000
    assert one.reward is None and not one.is_trainable


async def test_a_program_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    code = f"""
import subprocess, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
time.sleep(60)
"""
    started = time.monotonic()
    agent = ProgramAgent(program(tmp_path, code), ProgramConfig(timeout=3.0))
    (one,) = await play(agent, ["fine"])
    assert one.failure is not None and one.failure.boundary is Boundary.AGENT
    assert "agent.program.timeout" in one.failure.message and time.monotonic() - started < 30
    child = int((tmp_path / "child").read_text())
    assert ends(child)


@pytest.mark.parametrize("own_session", [False, True])
async def test_a_program_that_leaves_a_child_behind_has_ended(tmp_path: Path, own_session: bool) -> None:
    code = f"""
import subprocess
child = subprocess.Popen(["sleep", "600"], start_new_session={own_session})  # it holds stdout and stderr open
open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
{SAYS}
"""
    agent = ProgramAgent(program(tmp_path, code), ProgramConfig(answer="stdout", timeout=30))
    (played,) = await play(agent, lambda tokens, sampling, session: "fine")
    assert (played.failure, played.answer) == (None, "fine")
    assert ends(int((tmp_path / "child").read_text()))


def ends(process: int, seconds: float = 20.0) -> bool:
    """Whether it is gone, or will be in a moment: a killed process is not gone at once."""
    deadline = time.monotonic() + seconds
    while not has_ended(process) and time.monotonic() < deadline:
        time.sleep(0.01)
    return has_ended(process)


def has_ended(process: int) -> bool:
    try:
        return "zombie" in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


async def test_a_crash_may_have_a_reward(tmp_path: Path) -> None:
    """A program that cannot read what the model wrote crashes; the model is to learn from that."""
    code = SAYS + "\njson.loads('not JSON')"
    (one,) = await play(
        ProgramAgent(program(tmp_path, code), ProgramConfig(crash_reward=-1.0)), ["fine"]
    )
    assert (one.reward, one.failure, one.stop) == (-1.0, None, StopReason.TERMINATED)
    (one,) = await play(
        ProgramAgent(program(tmp_path, "sys.exit(1)"), ProgramConfig(crash_reward=-1.0)), []
    )
    assert one.failure is not None  # it never asked: not the model's doing


async def test_what_is_printed_is_bounded(tmp_path: Path) -> None:
    code = SAYS + "\nprint('y' * 10**7)"
    config = ProgramConfig(answer="stdout", output_bytes=1_000)
    (one,) = await play(ProgramAgent(program(tmp_path, code), config), ["fine"])
    assert one.answer is not None and one.answer.startswith("fine") and len(one.answer) <= 1_000


async def test_a_used_up_budget_ends_the_episode_and_not_by_a_failure(tmp_path: Path) -> None:
    code = "while True: ask([{'role': 'user', 'content': question}])"
    (one,) = await play(ProgramAgent(program(tmp_path, code)), ["fine"] * 9, max_turns=2)
    assert (one.stop, one.failure, one.turns) == (StopReason.MAX_TURNS, None, 2)


async def test_a_failure_of_the_engine_is_not_the_programs(tmp_path: Path) -> None:
    gone = {number: EngineError("the engine is gone", retriable=False) for number in range(9)}
    (one,) = await play(ProgramAgent(program(tmp_path, SAYS)), [], failures=gone)
    assert one.failure is not None and one.failure.boundary is Boundary.ENGINE


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may enter: pytest's own are for their owner alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.slow
async def test_a_command_plays_in_the_sandbox(open_folder: Path) -> None:
    """With a network of its own it reaches the model by the machine's address, and nothing by loopback."""
    if shutil.which("slirp4netns") is None:
        pytest.skip("needs slirp4netns")
    command = program(open_folder, SAYS).replace("python ", "python3 ", 1)
    box = SandboxConfig(network=True, accept_risk=True, readable=(str(open_folder),))
    try:
        for host, answer in (("0.0.0.0", "fine"), ("127.0.0.1", None)):
            config = ProgramConfig(sandbox=True, host=host, answer="stdout")
            (one,) = await play(ProgramAgent(command, config, box), ["fine"])
            assert one.answer == answer, one.failure
        assert one.failure is not None and one.failure.boundary is Boundary.AGENT
    finally:
        await close_shared_sandboxes()


async def test_a_function_plays_in_a_thread() -> None:
    def agent(task: Task, base_url: str, key: str) -> float:
        body = {"model": "m", "messages": [{"role": "user", "content": task.messages[-1].content}]}
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        url = f"{base_url}/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        found = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
        return float(found == task.metadata["answer"])

    replies = {f"question {n}": str(n % 2) for n in range(4)}

    def script(tokens: list[int], sampling: Any, session: Any) -> str:
        text = ByteTokenizer().decode(tokens)
        return next(reply for question, reply in replies.items() if question in text)

    played = await play(ProgramAgent(agent), script, tasks=4)
    assert [one.reward for one in played] == [1.0, 1.0, 0.0, 0.0]


async def test_a_coroutine_plays_and_its_errors_are_the_agents() -> None:
    keys: list[str] = []

    async def agent(task: Task, base_url: str, key: str) -> str:
        keys.append(key)
        headers = {"x-api-key": key}
        message = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
        async with aiohttp.ClientSession(headers=headers) as http:
            for _ in range(2):
                answer = await http.post(f"{base_url}/messages", json=message)
                found = (await answer.json())["content"][0]["text"]
        if task.id == "1":
            raise KeyError("lost")
        return f"it said {found}"

    config = ProgramConfig(answer="stdout")
    first, second = await play(ProgramAgent(agent, config), lambda *_: "fine", tasks=2)
    assert first.answer == "it said fine" and first.counts["model_server/branches"] == 1
    assert second.failure is not None and second.failure.boundary is Boundary.AGENT
    assert "lost" in second.failure.message and len(set(keys)) == 2


async def test_an_expert_replies_to_the_program_in_the_models_place(tmp_path: Path) -> None:
    """Demonstrations have the program's own prompts and tools."""
    code = """
tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
message = ask(said, tools=[tool])["choices"][0]["message"]
(call,) = message["tool_calls"]
said += [message, {"role": "tool", "tool_call_id": call["id"], "content": "5"}]
print(ask(said, tools=[tool])["choices"][0]["message"]["content"])
"""

    def expert(task: Task) -> Generator[ToolCall | str, str, None]:
        found = yield ToolCall("add", {"a": 2})
        yield f"It is {found}."

    agent = ProgramAgent(program(tmp_path, code), ProgramConfig(answer="stdout"))
    try:
        (one,) = await play(Demonstrator(expert, agent), [])  # type: ignore[arg-type]
    finally:
        await agent.close()
    assert (one.answer, one.turns, len(one.sequences)) == ("It is 5.", 2, 1)
    assert one.messages[0].content == "Be brief."
    assert all(logprob == 0.0 for action in one.actions for logprob in action.logprobs or ())


async def test_counts_are_recorded_and_become_metrics(tmp_path: Path) -> None:
    code = (
        SAYS + "\nask([{'role': 'user', 'content': question}, {'role': 'assistant', 'content': 'hm'}])"
    )
    code += "\nask({'reward': 1}, 'reward')"
    (one,) = await play(ProgramAgent(program(tmp_path, code)), ["fine", "again"])
    from ludus.core.trajectory import Group

    group = Group(one.task, [one])
    metrics = rollout_metrics([group])
    assert (metrics["model_server/requests"], metrics["model_server/restarts"]) == (2.0, 1.0)
    path = tmp_path / "groups.parquet"
    write_groups(path, [group], step=0, split="train")
    (read,) = read_groups(path)
    assert read.trajectories[0].counts == one.counts
    assert [s.parent for s in read.trajectories[0].sequences] == [s.parent for s in one.sequences]


# Recipes


def recipe(tmp_path: Path, **agent: Any) -> Recipe:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "hello"}\n')
    return Recipe.parse(
        {
            "name": "x",
            "model": {"scratch": {}},
            "tasks": {"train": str(tmp_path / "tasks.jsonl")},
            "agent": agent,
            "rl": {"steps": 1},
        },
        "the test",
    )


def some_agent(task: Task, base_url: str, key: str) -> None:
    """For a recipe to name."""


def test_a_recipe_names_a_command_or_a_function(tmp_path: Path) -> None:
    agent = load_parts(recipe(tmp_path, loop="command: python my_agent.py --fast")).agent
    assert isinstance(agent, ProgramAgent) and agent._argv == [sys.executable, "my_agent.py", "--fast"]
    named = f"{Path(__file__)}:some_agent"
    assert isinstance(load_parts(recipe(tmp_path, loop=named)).agent, ProgramAgent)
    for wrong, said in [
        ({"loop": "command:"}, "empty"),
        ({"loop": "command: 'x"}, "cannot be read"),
        ({"loop": "command: x", "tools": ["python"]}, "tools of its own"),
        ({"loop": "command: x", "program": {"models": {"critic": "frozen"}}}, "trains none"),
        ({"loop": "command: x", "program": {"models": {"critic": "localhost"}}}, "models.critic"),
        ({"loop": named, "program": {"sandbox": True}}, "sandbox"),
    ]:
        with pytest.raises(ConfigError, match=said):
            load_parts(recipe(tmp_path, **wrong))


def test_files_of_a_command_are_found_beside_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ludus.training import load_recipe

    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "my agent.py").write_text("")
    (folder / "tasks.jsonl").write_text('{"prompt": "hello"}\n')
    (folder / "r.toml").write_text(
        'name = "x"\n[model.scratch]\n[tasks]\ntrain = "tasks.jsonl"\n[rl]\nsteps = 1\n'
        "[agent]\nloop = \"command: python 'my agent.py' -v\"\n"
    )
    monkeypatch.chdir(tmp_path)
    found = load_recipe(folder / "r.toml")
    assert found.agent.loop == f"command: python '{folder.resolve() / 'my agent.py'}' -v"
