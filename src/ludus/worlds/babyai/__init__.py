"""BabyAI: missions in a grid world, in words (extra: babyai).

Chevalier-Boisvert et al., "BabyAI" (2019), by the package `minigrid`; actions and observations in words are
those of AgentGym (Xi et al., 2024).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator

from ludus.core.messages import Message, ToolCall
from ludus.core.random import key, uniform
from ludus.core.task import Task
from ludus.envs.env import Env, Step
from ludus.envs.world import World
from ludus.rewards import reward
from ludus.worlds.babyai.game import MazeGame
from ludus.worlds.babyai.planner import Explorer, Planner

LEVELS = {
    "GoTo": (
        "GoToRedBallGrey-v0", "GoToRedBall-v0", "GoToRedBallNoDists-v0", "GoToObjS6-v1", "GoToLocalS8N7-v0",
        "GoToObjMazeS7-v0", "GoToImpUnlock-v0", "GoToSeqS5R2-v0", "GoToRedBlueBall-v0", "GoToDoor-v0",
        "GoToObjDoor-v0",
    ),
    "Pickup": (
        "Pickup-v0", "UnblockPickup-v0", "PickupLoc-v0", "PickupDistDebug-v0", "PickupAbove-v0",
    ),
    "ActionObjDoor": ("ActionObjDoor-v0",),
    "FindObjS7": ("FindObjS7-v0",),
    "OneRoomS20": ("OneRoomS20-v0",),
    "SynthLoc": ("SynthLoc-v0",),
}  # fmt: skip
"""The levels of AgentGym in each sub-task."""
HELD_OUT = 20
"""Held-out tasks of each sub-task: seeds from 0, the levels in turn."""
TRAINING = 200
"""Training tasks of each sub-task."""
FIRST_SEED = 1_000
"""Of the training tasks."""
UNSOLVABLE = {("GoToImpUnlock-v0", 6): 206, ("GoToImpUnlock-v0", 1039): 1239}
"""Mazes in which the goal and the only key lie behind the locked door, and the seeds that take their place."""

SYSTEM = """You are in a room of a maze and have to reach a goal. Each action is one of these:
- turn left, turn right, move forward
- go to <obj> <id>, for example: go to red ball 1
- pickup <obj> <id>: go there and pick it up
- drop: put down what you carry
- go through <door> <id>: an open door
- toggle and go through <door> <id>: a closed door, or a locked one if you carry a key of its color
- toggle: open the door right in front of you
- check available actions
You see only what is in front of you, and nothing behind walls and closed doors. Use the names and ids of the \
last observation."""


class BabyAI(Env):
    """One mission. A task gives it as `envs = {"babyai": {"level": "BabyAI-GoTo-v0", "seed": 3}}`."""

    deterministic = True

    def __init__(self) -> None:
        self.game: MazeGame | None = None

    @property
    def won(self) -> bool:
        """Whether the mission is done."""
        return self.game is not None and self.game.won

    def reset(self, task: Task, level: str, seed: int) -> str:
        self._maze = (level, seed)
        self.game = MazeGame(level, seed)
        return f"Your goal: {self.game.goal}\n{self.game.observation()}"

    async def step(self, action: str) -> Step:  # half a millisecond: not worth a thread
        """Act in the maze.

        Args:
            action: One of the available actions, such as "turn left" or "go to red ball 1".
        """
        game = self._game()
        if game.done:
            return Step("The mission is over.", terminated=True)
        text = game.act(action)
        info = {"minigrid_reward": game.discounted}
        return Step(text, reward=float(game.won), terminated=game.done, info=info)

    async def available_actions(self) -> list[str]:
        return list(self._game().view.actions)

    def render(self) -> bytes:
        """The maze as a PNG picture, with what the agent sees highlighted."""
        return self._game().picture()

    async def snapshot(self) -> tuple[int, ...]:
        """The low-level actions so far: ten times as fast as a copy of the maze."""
        return tuple(self._game().taken)

    async def restore(self, state: tuple[int, ...]) -> None:
        if self._game().taken:  # of an instance that has just been reset, the maze can be used
            self.game = MazeGame(*self._maze)
        self._game().take(state)

    def _game(self) -> MazeGame:
        assert self.game is not None, "reset comes first"
        return self.game


@reward(name="success", weight=0.0)
async def success(env: BabyAI) -> float:
    """1 when the mission is done. Only logged: the environment pays the same."""
    return float(env.won)


def training_tasks() -> list[Task]:
    """Tasks of all sub-tasks in turn."""
    return [
        _task("train", sub_task, number, FIRST_SEED) for number in range(TRAINING) for sub_task in LEVELS
    ]


def held_out_tasks() -> list[Task]:
    """Tasks with seeds that no training task has."""
    return [_task("held-out", sub_task, number, 0) for number in range(HELD_OUT) for sub_task in LEVELS]


ONE_ROOM = (
    "GoToRedBallGrey-v0",
    "GoToRedBall-v0",
    "GoToObjS6-v1",
    "GoToLocalS8N7-v0",
    "GoToRedBlueBall-v0",
)
"""Levels of GoTo with a single room and no doors: small enough for a model made from scratch."""


def room_training_tasks() -> list[Task]:
    """1,000 tasks of GoTo in a single room."""
    return [_room_task("train", number, FIRST_SEED) for number in range(1000)]


def room_held_out_tasks() -> list[Task]:
    """200 others, with other seeds."""
    return [_room_task("held-out", number, 0) for number in range(200)]


def _room_task(split: str, number: int, first: int) -> Task:
    level = f"BabyAI-{ONE_ROOM[number % len(ONE_ROOM)]}"
    return Task(
        f"babyai-room-{split}-{number}",
        envs={"babyai": {"level": level, "seed": first + number}},
        metadata={"subtask": "GoTo", "level": level},
    )


def _task(split: str, sub_task: str, number: int, first: int) -> Task:
    level, seed = LEVELS[sub_task][number % len(LEVELS[sub_task])], first + number
    place = {"level": f"BabyAI-{level}", "seed": UNSOLVABLE.get((level, seed), seed)}
    return Task(
        f"babyai-{split}-{sub_task}-{number}",
        (Message("system", SYSTEM),),  # what is to be done is in what the reset shows
        envs={"babyai": place},
        metadata={"subtask": sub_task, "level": place["level"]},
    )


def expert(task: Task) -> Generator[ToolCall, str, None]:
    """A demonstrator that plans in a maze of its own, made from the same seed."""
    yield from _played(Planner(MazeGame(**task.envs["babyai"])))


def explorer(task: Task) -> Generator[ToolCall, str, None]:
    """An expert that knows only what it has seen so far, as an agent does, and searches for the rest."""
    yield from _played(Explorer(MazeGame(**task.envs["babyai"])))


def _played(planner: Planner) -> Generator[ToolCall, str, None]:
    game = planner.game
    tried: Counter[object] = Counter()
    while not game.done and (action := planner.next_action()) is not None:
        state = game.place, int(game.env.agent_dir), game.env.carrying is None, action
        tried[state] += 1
        if tried[state] > _CIRCLES:
            return  # what it wants cannot be had in this maze
        yield ToolCall("step", {"action": action})
        game.act(action)


_CIRCLES = 8
"""How often the planner does the same in the same place before it gives up."""
DOUBT = 0.5
"""How often `hesitant_expert` does something else first."""


def hesitant_expert(task: Task) -> Generator[ToolCall, str, None]:
    """An expert that at half of its turns turns aside or walks on instead: right in the end, and late.

    Imitating it teaches the words and what they do; saving turns is left to RL.
    """
    game = MazeGame(**task.envs["babyai"])
    planner = Planner(game)
    turns = 0
    while not game.done and (action := planner.next_action()) is not None:
        draw = key(task.id, turns)
        if uniform(draw, 0) < DOUBT:
            idle = [
                one for one in ("turn left", "turn right", "move forward") if one in game.view.actions
            ]
            action = idle[int(uniform(draw, 1) * len(idle))]
        yield ToolCall("step", {"action": action})
        game.act(action)
        turns += 1


WORLD = World(
    "babyai",
    "Missions in a maze of rooms, in words: go to, pick up, open, put next to.",
    env=BabyAI,
    rewards=(success,),
    training_tasks=training_tasks,
    held_out_tasks=held_out_tasks,
    expert=expert,
    extra="babyai",
    packages=("minigrid",),
)
