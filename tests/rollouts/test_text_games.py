"""Environments that take plain text: `step` is the tool behind what the model says."""

from __future__ import annotations

from ludus.core.task import Task
from ludus.core.tokenizer import ByteTokenizer
from ludus.core.trajectory import StopReason
from ludus.engine import FakeEngine
from ludus.envs import Env, EnvPool, Step
from ludus.rewards import Scorer, reward
from ludus.rollouts.budgets import Budgets
from ludus.rollouts.formats import load_format
from ludus.rollouts.renderers import Renderer
from ludus.rollouts.runner import Rollout
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
