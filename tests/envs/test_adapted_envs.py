"""Environments and task sets of others by one line: Gymnasium, reasoning-gym, verifiers."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ludus.chat import Renderer, load_format
from ludus.core import ByteTokenizer, ConfigError, MissingExtraError, Task
from ludus.core.messages import Message
from ludus.core.trajectory import Trajectory
from ludus.engine import FakeEngine
from ludus.envs import EnvPool, load_env
from ludus.rewards import Scorer, build_reward
from ludus.rollouts import Budgets, Rollout
from ludus.rollouts.env_contract import EnvContract
from ludus.rollouts.tasksets import load_tasks
from ludus.tools import as_toolset

gymnasium = pytest.importorskip("gymnasium", reason="the extra gymnasium")


class Letters(gymnasium.Env):  # type: ignore[misc,name-defined]
    """Every kind of observation, and the kind of action that it is told."""

    observation_space = gymnasium.spaces.Dict({
        "number": gymnasium.spaces.Discrete(9), "text": gymnasium.spaces.Text(20, charset="é"),
        "place": gymnasium.spaces.Box(-1, 1, (2,)), "large": gymnasium.spaces.Box(0, 255, (20, 20, 3)),
    })  # fmt: skip

    def __init__(self, action: str = "text", prize: float = 1.0) -> None:
        spaces = gymnasium.spaces
        kinds = {"text": spaces.Text(5, charset="abc"), "many": spaces.MultiDiscrete([2, 3]),
                 "bits": spaces.MultiBinary(2), "late": spaces.Discrete(3, start=5)}  # fmt: skip
        self.action_space, self.prize = kinds[action], prize

    def _seen(self) -> dict[str, Any]:
        import numpy

        large = numpy.zeros((20, 20, 3), dtype="float32")
        return {
            "number": 3,
            "text": "é",
            "place": numpy.array([0.123456, -1.0], dtype="float32"),
            "large": large,
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._seen(), {"action_mask": [1, 0, 1]}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.last = action
        return self._seen(), self.prize, False, True, {}


gymnasium.register("Letters-v0", entry_point=Letters)


def test_what_the_agent_sees_and_says_in_words() -> None:
    env: Any = load_env("gymnasium:Letters-v0")()
    seen = env.reset(Task.of("x")).text
    assert seen.splitlines() == [
        "number: 3", "text: é", "place: [0.1235, -1.0]", "large: 1200 numbers of shape (20, 20, 3)",
        "Actions: a text of 1 to 5 characters.",
    ]  # fmt: skip
    wrong = env.step("xyz")
    assert wrong.reward is None and wrong.observation.startswith(
        "'xyz' is no action here. Actions: a text"
    )
    step = env.step("abc")
    assert (step.reward, step.terminated, step.truncated) == (1.0, False, True)
    assert env.step("abc").terminated and env.step("abc").reward is None
    assert env.available_actions() == []


@pytest.mark.parametrize(
    "action, said, meant, bad, listed",
    [
        ("many", "1, 2", [1, 2], "1 3", None),
        ("bits", "[0 1]", [0, 1], "1", None),
        ("late", "7", 7, "4", ["5", "7"]),
    ],
)
async def test_actions_of_each_space(action: str, said: str, meant: Any, bad: str, listed: Any) -> None:
    pool = EnvPool(load_env("gymnasium:Letters-v0"), name="e", options={"action": action, "prize": 0.5})
    async with pool.lease("e", Task.of("x")) as env:
        assert env.available_actions() == listed
        assert env.step(bad).reward is None and env.step("").reward is None
        assert env.step(said).reward == 0.5
        last = env._env.unwrapped.last
        assert (last.tolist() if hasattr(last, "tolist") else last) == meant
    await pool.close()


def test_a_lake_is_shown_as_text_and_its_actions_have_names() -> None:
    env: Any = load_env("gymnasium:FrozenLake-v1")(is_slippery=False)
    assert (
        env.reset(Task.of("x", id="1")).text
        == "[S]FFF\nFHFH\nFFFH\nHFFG\nActions: left, down, right, up."
    )
    assert env.available_actions() == ["left", "down", "right", "up"]
    steps = [env.step(action) for action in ("Down", "1", "right", "down", "right", "right")]
    assert [step.terminated for step in steps] == [False] * 5 + [True]
    assert steps[-1].reward == 1.0


def test_what_cannot_be_said_in_words_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Box\(.*which no text says well"):
        load_env("gymnasium:Pendulum-v1")()
    with pytest.raises(ConfigError, match="gymnasium:Nowhere-v1: "):
        load_env("gymnasium:Nowhere-v1")()
    with pytest.raises(ConfigError, match="4 actions, and 1 names"):
        load_env("gymnasium:FrozenLake-v1")(actions=["up"])


async def test_a_gymnasium_environment_keeps_the_contract() -> None:
    contract = EnvContract(
        load_env("gymnasium:FrozenLake-v1"), load_tasks("gymnasium:FrozenLake-v1?size=4"), name="lake"
    )
    broken = [clause async for clause in contract.clauses() if clause.ok is False]
    assert not broken


def test_tasks_for_gymnasium_have_seeds_by_their_ids() -> None:
    train = load_tasks("gymnasium:FrozenLake-v1?size=3&prompt=Cross the lake.")
    held_out = load_tasks("gymnasium:FrozenLake-v1@held_out?size=3")
    assert train[0].id == "FrozenLake-v1-train-0"
    assert train[0].messages[0].content == "Cross the lake."
    assert not {task.id for task in train} & {task.id for task in held_out}
    with pytest.raises(ConfigError, match="NAME@SPLIT"):
        load_tasks("gymnasium:FrozenLake-v1@tests")


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@pytest.mark.skipif(has("reasoning_gym"), reason="it is installed")
def test_without_reasoning_gym_the_error_names_the_extra() -> None:
    with pytest.raises(MissingExtraError, match=r"pip install 'ludus-rl\[reasoning-gym\]'"):
        load_tasks("reasoning_gym:leg_counting")


@pytest.mark.skipif(has("verifiers"), reason="it is installed")
def test_without_verifiers_the_error_names_the_extra() -> None:
    with pytest.raises(MissingExtraError, match=r"pip install 'ludus-rl\[verifiers\]'"):
        load_tasks("verifiers:gsm8k")


async def scored(name: str, task: Task, *answers: str) -> list[float]:
    found = []
    for answer in answers:
        messages = [*task.messages, Message("assistant", answer)]
        trajectory = Trajectory(task, answer=answer, messages=messages)
        reward: Any = build_reward(name)
        parts = await reward.score(trajectory, task, {})
        found.append(parts if isinstance(parts, float) else next(iter(parts.values())))
    return found


@pytest.mark.worlds
@pytest.mark.skipif(not has("reasoning_gym"), reason="the extra reasoning-gym")
async def test_reasoning_gym_gives_tasks_and_scores() -> None:
    train = load_tasks("reasoning_gym:leg_counting?size=50")
    held_out = load_tasks("reasoning_gym:leg_counting@held_out?size=50")
    assert len(train) == len(held_out) == 50
    questions = [{task.messages[0].content for task in tasks} for tasks in (train, held_out)]
    assert not questions[0] & questions[1]
    assert load_tasks("reasoning_gym:leg_counting?size=50") == train
    task = train[0]
    right, wrong = str(task.target), str(int(task.target) + 1)
    told = f"I count.\n<answer>{wrong}</answer> no, <answer> {right} </answer>"
    assert await scored("reasoning_gym", task, right, wrong, told, "") == [1.0, 0.0, 1.0, 0.0]
    both = load_tasks("reasoning_gym:leg_counting+chain_sum?size=3")
    assert [task.metadata["subtask"] for task in both] == ["leg_counting"] * 3 + ["chain_sum"] * 3
    easy = load_tasks("reasoning_gym:chain_sum?size=5&min_terms=2&max_terms=2&seed=7")
    assert await scored("reasoning_gym", easy[2], str(easy[2].target)) == [1.0]
    with pytest.raises(ConfigError, match="reasoning_gym:no_such_set"):
        load_tasks("reasoning_gym:no_such_set")


TASKSET = """
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: int

class SumConfig(vf.TasksetConfig):
    first: int = 1

class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return float(len(trace.last_reply) < 5 and trace.num_turns == 1)

class Sums(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for n in range(20):
            prompt = f"What is {self.config.first} + {n}?"
            yield SumTask(SumData(prompt=prompt, system_prompt="Add.", answer=self.config.first + n))

__all__ = ["Sums"]
"""


TOOLS = """
import verifiers.v1 as vf

class ShopState(vf.State):
    bought: list[str] = []

class ShopConfig(vf.ToolsetConfig):
    currency: str = "EUR"

class Shop(vf.Toolset[ShopConfig, ShopState]):
    async def setup(self):
        self.prices = {"tea": 2, "cake": 5}

    async def setup_task(self, data):
        self.budget = data.budget

    @vf.tool
    async def price(self, item: str) -> dict:
        '''What something costs.'''
        return {"item": item, "price": self.prices[item], "currency": self.config.currency}

    @vf.tool(name="buy")
    def buy_it(self, item: str, count: int = 1) -> str:
        '''Buy something.'''
        self.state.bought.extend([item] * count)
        return f"{len(self.state.bought)} things of {self.budget}"

class Clock(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def now(self) -> str:
        '''The time.'''
        return "noon"

class ShopData(vf.TaskData):
    wanted: list[str]
    budget: int = 3

class ShopTask(vf.Task[ShopData, ShopState]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.state.bought == self.data.wanted)

    @vf.reward(weight=0.1)
    async def calls(self, trace) -> float:
        return float(sum(len(m.tool_calls or []) for m in trace.assistant_messages))

    @classmethod
    def toolsets(cls, config):
        return [Shop(ShopConfig())]

class Shops(vf.Taskset[ShopTask]):
    @classmethod
    def toolsets(cls, config):
        return [Clock(vf.SharedToolsetConfig())]

    def load(self):
        for wanted in (["tea"], ["cake", "cake"]):
            yield ShopTask(ShopData(prompt="Buy " + ", ".join(wanted), wanted=wanted))

__all__ = ["Shops"]
"""
GAME = """
import verifiers.v1 as vf

class NumberData(vf.TaskData):
    secret: int

class NumberTask(vf.Task[NumberData]):
    @vf.reward(weight=0.5)
    async def polite(self, trace) -> float:
        return float(all("please" in m.content for m in trace.assistant_messages))

class GameConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class Game(vf.Env[GameConfig]):
    async def run(self, task, agents):
        tries, won = 0, False
        async with agents.player.interaction(task) as talk:
            segment = await (talk.turn("Which number?") if task.data.prompt is None else talk.turn())
            while not segment.terminated:
                tries += 1
                if segment.last_reply == "crash":
                    raise RuntimeError("the game broke")
                guess = int(segment.last_reply.split()[0])
                if won := guess == task.data.secret:
                    break
                segment = await talk.turn("higher" if guess < task.data.secret else "lower")
        talk.trace.record_reward("won", float(won) / tries, 1.0)

class Numbers(vf.Taskset[NumberTask]):
    def load(self):
        for secret, prompt in ((7, "Which number?"), (3, None)):
            yield NumberTask(NumberData(prompt=prompt, secret=secret))

__all__ = ["Numbers", "Game"]
"""
verifiers = [
    pytest.mark.worlds,
    pytest.mark.skipif(not has("verifiers"), reason="the extra verifiers"),
]


def marked(test: Any) -> Any:
    for mark in verifiers:
        test = mark(test)
    return test


@pytest.fixture
def tasksets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with modules that are task sets."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, code in (("sums", TASKSET), ("shops", TOOLS), ("numbers", GAME)):
        (tmp_path / f"{name}_taskset.py").write_text(code)
    yield tmp_path
    for name in [name for name in sys.modules if name.endswith("_taskset")]:
        del sys.modules[name]


def playing(name: str, *replies: str, format: str = "hermes", turns: int = 8) -> Rollout:
    """A rollout of a task set's environment, in which the model says these things."""
    tokenizer = ByteTokenizer()
    return Rollout(
        engine=FakeEngine([f"{reply}<|im_end|>" for reply in replies], tokenizer),
        renderer=Renderer(tokenizer, load_format(format)),
        scorer=Scorer([build_reward("verifiers")]),
        tools=as_toolset([]),
        pools={"verifiers": EnvPool(load_env(f"verifiers:{name}"), name="verifiers", size=1)},
        budgets=Budgets(max_turns=turns, max_tokens=100_000),
    )


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@marked
async def test_tools_of_a_verifiers_task_set_have_its_state_and_its_rewards(tasksets: Path) -> None:
    tea, cake = load_tasks("verifiers:shops_taskset")
    assert tea.envs == {"verifiers": {}}
    said = [
        call("shop_price", item="cake"),
        call("shop_buy", item="cake", count=2),
        call("now"),
        "Done.",
    ]
    rollout = playing("shops_taskset", *said, *said)
    [bought, other] = [await rollout.play(task, attempt=0, seed=0) for task in (cake, tea)]
    assert bought.failure is None and other.failure is None
    results = [message.content for message in bought.messages if message.role == "tool"]
    assert json.loads(results[0]) == {"item": "cake", "price": 5, "currency": "EUR"}
    assert results[1:] == ["2 things of 3", "noon"]
    assert bought.reward == pytest.approx(1.3)  # right, and 0.1 for each of three calls
    assert other.reward == pytest.approx(0.3), "the state of the episode before is gone"
    await rollout.pools["verifiers"].close()
    names = [one.name for one in load_env("verifiers:shops_taskset")().tools()]
    assert names == ["now", "shop_buy", "shop_price"]
    with pytest.raises(
        ConfigError, match="asks for the environment 'verifiers', but this run has: none"
    ):
        await replace(rollout, pools={}).play(tea, attempt=0, seed=0)


@marked
async def test_an_env_of_verifiers_takes_turns_with_the_model(tasksets: Path) -> None:
    seven, three = load_tasks("verifiers:numbers_taskset")
    assert [m.role for m in seven.messages] == ["user"] and not three.messages
    rollout = playing(
        "numbers_taskset", "5 please", "9 please", "7 please", "3", format="plain"
    )  # the second task's user opens the conversation
    [first, second] = [await rollout.play(task, attempt=0, seed=0) for task in (seven, three)]
    assert first.failure is None and first.stop == "terminated", first.failure
    assert first.reward == pytest.approx(1 / 3 + 0.5)
    shown = [message.content for message in first.messages if message.role in ("tool", "user")]
    assert shown[:3] == ["Which number?", "higher", "lower"]
    assert second.reward == 1.0 and second.messages[0].content == "Which number?"
    await rollout.pools["verifiers"].close()
    cut = playing("numbers_taskset", "5 please", "6 please", format="plain", turns=2)
    ended = await cut.play(seven, attempt=0, seed=0)
    assert ended.stop == "max_turns" and ended.reward == 0.5, "the game was told that it is over"
    await cut.pools["verifiers"].close()
    broken = playing("numbers_taskset", "crash", "crash", format="plain")
    failed = await broken.play(seven, attempt=0, seed=0)
    assert failed.failure is not None and failed.failure.boundary == "env" and failed.reward is None
    assert "RuntimeError: the game broke" in failed.failure.message
    await broken.pools["verifiers"].close()


REWARD = "    @vf.reward\n"


@marked
@pytest.mark.parametrize(
    "name, old, new, missing",
    [
        ("boxed", REWARD, f"    NEEDS_CONTAINER = True\n\n{REWARD}", "a container"),
        ("far", 'currency: str = "EUR"', 'url: str | None = "http://host:1/mcp"', "a tool server elsewhere"),
        ("stopping", REWARD, f"    @vf.stop\n    async def over(self, trace: vf.Trace) -> bool: ...\n{REWARD}",
         "its own conditions to stop"),
        ("prepared", REWARD, f"    async def setup(self, trace, runtime): ...\n{REWARD}", "a runtime"),
    ],
)  # fmt: skip
def test_what_a_task_set_of_verifiers_needs_beyond_is_refused(
    tasksets: Path, name: str, old: str, new: str, missing: str
) -> None:
    assert old in TOOLS
    (tasksets / f"{name}_taskset.py").write_text(TOOLS.replace(old, new, 1))
    with pytest.raises(ConfigError, match=rf"verifiers:{name}_taskset needs {missing}.*not covered"):
        load_tasks(f"verifiers:{name}_taskset")


@marked
def test_an_env_with_several_agents_is_refused(tasksets: Path) -> None:
    code = GAME.replace("    player: vf", "    judge: vf.AgentConfig = vf.AgentConfig()\n    player: vf")
    (tasksets / "many_taskset.py").write_text(code)
    with pytest.raises(ConfigError, match=r"needs several agents \(judge, player\)"):
        load_tasks("verifiers:many_taskset")


@pytest.mark.worlds
@pytest.mark.skipif(not has("verifiers"), reason="the extra verifiers")
async def test_verifiers_gives_tasks_and_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sums_taskset.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))
    train = load_tasks("verifiers:sums_taskset?take=15&first=3")
    held_out = load_tasks("verifiers:sums_taskset?skip=15&first=3")
    assert (len(train), len(held_out)) == (15, 5)
    assert [message.role for message in train[4].messages] == ["system", "user"]
    assert train[4].messages[1].content == "What is 3 + 4?"
    assert await scored("verifiers", train[4], "7", "8", "It is 7.") == [1.5, 0.5, 0.0]
    with pytest.raises(ConfigError, match="verifiers:no_such_set"):
        load_tasks("verifiers:no_such_set")
    (tmp_path / "boxed_taskset.py").write_text(TASKSET.replace(
        "class SumTask(vf.Task[SumData]):", "class SumTask(vf.Task[SumData]):\n    NEEDS_CONTAINER = True\n"
    ))  # fmt: skip
    with pytest.raises(ConfigError, match="needs a container, which is not covered"):
        load_tasks("verifiers:boxed_taskset")
    sys.modules.pop("sums_taskset", None)
