"""Environments that take plain text: `step` is the tool behind what the model says."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from ludus.chat import Renderer, load_format
from ludus.core import ByteTokenizer, ConfigError, StopReason, Task, ToolCall
from ludus.engine import FakeEngine
from ludus.envs import Env, EnvPool, Step
from ludus.rewards import Scorer, reward
from ludus.rollouts import Budgets, Demonstrator, Rollout
from ludus.tools import as_toolset


class Corridor(Env):
    """Go east three times."""

    def reset(self, task: Task) -> str:
        self.place = 0
        return "You stand in a corridor."

    def step(self, action: str) -> Step:
        self.place += action == "go east"
        won = self.place == 3
        return Step(
            f"You are at {self.place}.", reward=0.1 if action == "go east" else None, terminated=won
        )


@reward(name="success")
async def arrived(env: Corridor) -> float:
    return float(env.place == 3)


class Laboratory(Env):
    """Reports its score so far after every step, as ScienceWorld does; "?" scores nothing."""

    def reset(self, task: Task) -> None:
        pass

    def step(self, action: str) -> Step:
        return Step("hm", reward=None if action == "?" else float(action), terminated=action == "1.0")


class Highest(Laboratory):
    step_rewards = "max"


def laboratory(kind: type[Env], scores: list[str], **settings: object) -> tuple[Rollout, EnvPool]:
    tokenizer = ByteTokenizer()
    said = iter(scores)
    engine = FakeEngine(lambda tokens, sampling, session: next(said) + "<|im_end|>", tokenizer)
    pool = EnvPool(kind, name="laboratory", size=1)
    playing = Rollout(
        engine=engine,
        renderer=Renderer(tokenizer, load_format("plain")),
        scorer=Scorer([]),
        tools=as_toolset([]),
        pools={"laboratory": pool},
        budgets=Budgets(max_turns=len(scores)),
        **settings,  # type: ignore[arg-type]
    )
    return playing, pool


SCORES = ["0.2", "?", "0.7", "0.4", "0.5"]


@pytest.mark.parametrize(
    ("rule", "total", "gains"),
    [
        ("sum", 0.2 + 0.7 + 0.4 + 0.5, [0.2, None, 0.7, 0.4, 0.5]),
        ("max", 0.7, [0.2, None, 0.5, 0.0, 0.0]),
        ("last", 0.5, [0.2, None, 0.5, -0.3, 0.1]),
    ],
)
@pytest.mark.parametrize("says", ["recipe", "task", "env"])
async def test_scores_of_an_environment_are_summed_or_the_highest_or_the_last(
    rule: str, total: float, gains: list[float | None], says: str
) -> None:
    """AgentFly pays ScienceWorld's highest score, AgentGym the last one; each action what it moved."""
    kind = type("Own", (Laboratory,), {"step_rewards": rule}) if says == "env" else Highest
    settings = {"step_rewards": rule} if says == "recipe" else {}
    own = {"step_rewards": rule} if says == "task" else {}
    playing, pool = laboratory(kind, SCORES, **settings)
    trajectory = await playing.play(Task.of("Melt it.", id="t", **own), attempt=0, seed=1)
    await pool.close()
    assert trajectory.failure is None
    assert trajectory.reward == pytest.approx(total)
    assert trajectory.rewards == {"tools": pytest.approx(total)}
    assert [action.reward for action in trajectory.actions] == [
        None if gain is None else pytest.approx(gain) for gain in gains
    ]


async def test_a_highest_score_may_be_below_zero_and_rules_must_be_known() -> None:
    playing, pool = laboratory(Highest, ["-100.0", "-3.0", "-50.0"])
    trajectory = await playing.play(Task.of("?", id="t"), attempt=0, seed=1)
    assert trajectory.reward == pytest.approx(-3.0)
    with pytest.raises(ConfigError, match="sum, max, last, not 'mean'"):
        await playing.play(Task.of("?", id="t", step_rewards="mean"), attempt=0, seed=1)
    await pool.close()


async def test_environments_that_disagree_are_not_guessed_at() -> None:
    playing, pool = laboratory(Highest, ["1.0"])
    other = EnvPool(Env, name="corridor", size=1)
    playing.pools = {"laboratory": pool, "corridor": other}
    with pytest.raises(ConfigError, match=r"different step_rewards \(max, sum\)"):
        await playing.play(Task.of("?", id="t"), attempt=0, seed=1)
    await pool.close()
    await other.close()


@pytest.mark.parametrize("format", ["plain", "hermes"])
async def test_an_expert_of_a_text_game_calls_step(format: str) -> None:
    """The action is `step`'s argument in any format; in `plain`, what it says is what it does, too."""

    def expert(task: Task) -> Generator[ToolCall | str, str, None]:
        seen = yield ToolCall("step", {"action": "go east"})
        while seen != "You are at 3.":
            seen = yield "go east" if format == "plain" else ToolCall("step", {"action": "go east"})

    tokenizer = ByteTokenizer()
    pool = EnvPool(Corridor, name="corridor", size=1)
    rollout = Rollout(
        engine=FakeEngine([]),
        renderer=Renderer(tokenizer, load_format(format)),
        scorer=Scorer([arrived]),
        tools=as_toolset([]),
        pools={"corridor": pool},
        agent=Demonstrator(expert),
    )
    trajectory = await rollout.play(Task.of("Reach the end.", id="t"), attempt=0, seed=1)
    await pool.close()
    assert trajectory.failure is None and trajectory.rewards["success"] == 1.0
    assert trajectory.turns == 3 and trajectory.stop is StopReason.TERMINATED


async def test_a_text_game_is_played_by_saying_what_to_do() -> None:
    tokenizer = ByteTokenizer()
    said = iter(["go east", "look", "go east", "go east"])
    engine = FakeEngine(lambda tokens, sampling, session: next(said) + "<|im_end|>", tokenizer)
    pool = EnvPool(Corridor, name="corridor", size=1)
    rollout = Rollout(
        engine=engine,
        renderer=Renderer(tokenizer, load_format("plain")),
        scorer=Scorer([arrived]),
        tools=as_toolset([]),
        pools={"corridor": pool},
        budgets=Budgets(max_turns=8),
    )
    trajectory = await rollout.play(Task.of("Reach the end.", id="t"), attempt=0, seed=1)
    await pool.close()
    assert trajectory.failure is None
    assert trajectory.stop is StopReason.TERMINATED
    assert "You stand in a corridor." in tokenizer.decode(trajectory.tokens)
    assert [action.reward for action in trajectory.actions] == [0.1, None, 0.1, 0.1]
    assert trajectory.rewards["success"] == 1.0 and trajectory.reward is not None
    assert abs(trajectory.reward - 1.3) < 1e-9


class Ladder(Env):
    show_actions = "tool"

    def reset(self, task: Task) -> str:
        self.height = 0
        return "You stand before a ladder."

    def available_actions(self) -> list[str]:
        return ["up"]

    def step(self, action: str) -> Step:
        self.height += action == "up"
        return Step(f"You are {self.height} high.", reward=1.0 * (action == "up"))


def both(task: Task) -> Generator[ToolCall, str, None]:
    first = yield ToolCall("corridor_step", {"action": "go east"})
    assert first == "You are at 1."
    second = yield ToolCall("ladder_step", {"action": "up"})
    assert second == "You are 1 high."
    third = yield ToolCall("available_actions")  # only one of them has it
    assert third == 'Available actions: ["up"]'
    fourth = yield ToolCall("step", {"action": "up"})
    assert "no tool called 'step'" in fourth and "ladder_step" in fourth


def climb(task: Task) -> Generator[ToolCall, str, None]:
    yield ToolCall("step", {"action": "up"})


async def test_two_text_games_in_one_episode_have_a_step_each() -> None:
    pools = {name: EnvPool(kind, name=name, size=1) for name, kind in
             (("corridor", Corridor), ("ladder", Ladder))}  # fmt: skip
    playing = Rollout(
        engine=FakeEngine([]),
        renderer=Renderer(ByteTokenizer(), load_format("hermes")),
        scorer=Scorer([], default_total=0.0),
        tools=as_toolset([]),
        pools=pools,
        agent=Demonstrator(both),
        budgets=Budgets(max_turns=9),
    )
    [group] = [group async for group in playing.groups([Task.of("Go.", id="t")], seed=0)]
    [trajectory] = group.trajectories
    assert trajectory.failure is None and trajectory.reward == pytest.approx(1.1)
    alone = Task.of("Go.", id="u", envs={"ladder": {}})
    playing.agent = Demonstrator(climb)
    [group] = [group async for group in playing.groups([alone], seed=0)]
    assert group.trajectories[0].reward == 1.0  # alone, it keeps its own name
