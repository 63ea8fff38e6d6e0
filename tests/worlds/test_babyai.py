"""BabyAI in words: what is seen, what can be done, the planner, the tasks; and parity with minigrid itself."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from world_play import play_expert

import ludus
from ludus.core import ConfigError, Task, ToolCall
from ludus.envs import WORLDS
from ludus.rollouts import check_env
from ludus.training import load_recipe

pytest.importorskip("minigrid", reason="needs ludus-rl[babyai]")

from ludus.worlds.babyai import (
    LEVELS,
    UNSOLVABLE,
    BabyAI,
    expert,
    explorer,
    held_out_tasks,
    hesitant_expert,
    room_training_tasks,
    success,
    training_tasks,
)
from ludus.worlds.babyai.game import FORWARD, LEFT, RIGHT, TOGGLE, MazeGame

ROOT = Path(__file__).parent.parent.parent
LOCAL = "BabyAI-GoToLocalS8N7-v0"


def names(game: MazeGame, start: str) -> list[str]:
    return [action for action in game.view.actions if action.startswith(start)]


def test_what_is_seen_in_agentgyms_words() -> None:
    """A room of 8 × 8: the agent in the corner (1, 1) looks right, at a green box two steps away."""
    game = MazeGame(LOCAL, 3)
    assert game.goal == "go to the purple ball"
    assert game.description() == (
        "In front of you in this room, you can see several objects: "
        "There is a green box 1 right in front of you 2 steps away. "
        "There is a red box 1 1 steps in front of you and 1 steps to your right. "
        "There is a grey ball 1 right in front of you 3 steps away. "
        "There is a red key 1 3 steps in front of you and 2 steps to your right. "
        "There is a red box 2 2 steps in front of you and 3 steps to your right. "
        "The room has walls around you. You are facing a box 2 steps away. You are not carrying anything."
    )
    offered = game.observation().partition("\nAvailable actions: ")[2]
    assert offered.startswith('["turn left", "turn right", "move forward", "pickup green box 1", ')
    assert offered.endswith('"go to red box 2", "check available actions"]')


def test_actions_in_words_are_paths() -> None:
    game = MazeGame(LOCAL, 3)
    # around the red box at (2, 2) to the cell above the second one at (3, 4)
    assert game.view.actions["go to grey ball 1"].count(FORWARD) > 1
    game.act("go to red box 1")
    assert game.place == (2, 1) and game.env.agent_dir == 1
    assert "No change in state." in game.act("go to red box 1"), "it is there already"
    seen = game.act("pick up red box 1")
    assert "You are carrying a red box." in seen and "pickup" not in seen.partition("Available")[2]
    assert "you are carrying something" in game.act("pickup grey key 1")
    assert "drop" in game.view.actions
    assert "not carrying anything" in game.act("drop")
    assert "you are not carrying anything" in game.act("drop")
    assert "You can take the following actions: turn left, turn right" in game.act(
        "check available actions"
    )


async def test_the_mission_is_paid_once_and_then_is_over() -> None:
    env = BabyAI()
    task = Task.of("", envs={"babyai": {"level": LOCAL, "seed": 3}})
    assert env.reset(task, LOCAL, 3).startswith("Your goal: go to the purple ball\nIn front of you")
    steps = [await env.step(call.arguments["action"]) for call in expert(task)]
    assert [step.reward for step in steps] == [*([0.0] * (len(steps) - 1)), 1.0]
    assert steps[-1].terminated and str(steps[-1].observation).endswith("\nThe task is completed.")
    assert 0.1 < steps[-1].info["minigrid_reward"] < 1.0, "minigrid's own is discounted"
    over = await env.step("turn left")
    assert over.terminated and over.reward is None and over.observation == "The mission is over."


@pytest.mark.parametrize(
    "action",
    ["", "fly", "go to", "go to red ball 99", "回れ", "\x00\ud800", "x" * 1_000_000, "[]", "pickup"],
)
def test_nonsense_is_an_observation_and_changes_nothing(action: str) -> None:
    game = MazeGame(LOCAL, 3)
    before = game.description()
    said = game.act(action)
    assert said.startswith(
        "The action is not recognized. Please check valid actions.\nAvailable actions: ["
    )
    assert game.description() == before and not game.taken


def test_doors_want_their_key() -> None:
    game = MazeGame("BabyAI-UnlockLocal-v0", 1)
    refusal = "You cannot toggle and go through"
    (locked,) = {str(one) for one in _look_around(game) if "locked" in str(one)}
    assert refusal in game.act(f"toggle and go through {locked}")
    (key,) = {str(one) for one in _look_around(game) if "key" in str(one)}
    assert "carrying a" in game.act(f"pickup {key}")
    _look_around(game, until=locked)
    game.act(f"go to {locked}")
    assert game.view.actions["toggle"] == [TOGGLE]
    assert "The task is completed." in game.act("toggle")


def _look_around(game: MazeGame, until: str = "locked") -> list[object]:
    """What can be seen from here; stops when it sees `until`."""
    seen: list[object] = []
    for _ in range(4):
        seen += game.view.objects
        if any(until in str(one) for one in game.view.objects):
            break
        game.act("turn left")
    return seen


def test_a_level_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="no level 'BabyAI-GoToo-v0'; did you mean 'BabyAI-GoTo-v0'"):
        MazeGame("BabyAI-GoToo-v0", 0)


def test_a_picture_is_a_png() -> None:
    env = BabyAI()
    env.reset(Task.of(""), LOCAL, 3)
    assert env.render().startswith(b"\x89PNG\r\n")


def test_nothing_is_printed_and_threads_do_not_meet(capsys: pytest.CaptureFixture[str]) -> None:
    """Rejected samples are printed by minigrid; here not, while another thread's prints arrive."""
    stop = threading.Event()

    def talk() -> None:
        while not stop.wait(0.001):
            print("other")

    talker = threading.Thread(target=talk)
    talker.start()
    with ThreadPoolExecutor(4) as threads:
        alone = [MazeGame("BabyAI-SynthLoc-v0", seed).observation() for seed in range(8)]
        together = list(
            threads.map(lambda seed: MazeGame("BabyAI-SynthLoc-v0", seed).observation(), range(8))
        )
    stop.set()
    talker.join()
    assert alone == together
    assert set(capsys.readouterr().out.split()) == {"other"}


def test_tasks_are_stable_and_seeds_disjoint() -> None:
    train, held_out = training_tasks(), held_out_tasks()
    assert len(train) == 1200 and len(held_out) == 120
    assert held_out[7].id == "babyai-held-out-Pickup-1"
    assert {task.metadata["subtask"] for task in held_out} == set(LEVELS)
    seeds = [{task.envs["babyai"]["seed"] for task in tasks} for tasks in (train, held_out)]
    assert not seeds[0] & seeds[1]


async def test_the_planner_solves_held_out_tasks_as_an_agent() -> None:
    played = await play_expert("babyai", held_out_tasks()[:6])
    assert [(t.failure, t.reward, t.rewards["success"]) for t in played] == [(None, 1.0, 1.0)] * 6


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_the_planner_solves_all() -> None:
    played = await play_expert("babyai", held_out_tasks())  # in the turns of the papers
    played += await play_expert("babyai", training_tasks(), max_turns=40)
    assert len(played) == 1320
    assert [t.task.id for t in played if t.failure is not None or t.rewards["success"] != 1.0] == []


async def test_the_contract_holds() -> None:
    task = held_out_tasks()[5]
    moves = [call.arguments["action"] for call in expert(task)]
    assert not await check_env(BabyAI, task, [*moves, "again"], name="babyai")
    assert WORLDS["babyai"].rewards == (success,)


def compare_with_minigrid(level: str, seed: int, game: MazeGame) -> None:
    """The low-level actions of a game, in a fresh environment of minigrid, lead to the same."""
    import gymnasium

    env = gymnasium.make(level, disable_env_checker=True)
    seen, _ = env.reset(seed=seed)
    assert env.unwrapped.mission == game.goal
    reward, terminated = 0.0, False
    for action in game.taken:
        assert not terminated
        seen, reward, terminated, _, _ = env.step(action)
    assert terminated == game.done
    assert reward == pytest.approx(game.discounted)
    assert (seen["image"] == game.env.gen_obs()["image"]).all()
    assert tuple(env.unwrapped.agent_pos) == game.place


def test_parity_with_minigrid() -> None:
    for level in (LOCAL, "BabyAI-SynthLoc-v0"):
        game, draw = MazeGame(level, 1), random.Random(1)
        while not game.done and len(game.taken) < 30:
            game.act(draw.choice(list(game.view.actions)[:-1]))
        compare_with_minigrid(level, 1, game)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("policy", ["gold", "random"])
def test_parity_with_minigrid_over_fifty_episodes(policy: str) -> None:
    for number, task in enumerate(training_tasks()[:50]):
        game, draw = MazeGame(**task.envs["babyai"]), random.Random(number)
        if policy == "gold":
            for call in expert(task):
                game.act(call.arguments["action"])
        else:
            for _ in range(20):
                if not game.done:
                    game.act(draw.choice(list(game.view.actions)))
        compare_with_minigrid(task.envs["babyai"]["level"], task.envs["babyai"]["seed"], game)
    assert {LEFT, RIGHT, FORWARD} <= set(game.taken) or policy == "gold"


def test_the_hesitant_expert_is_right_in_the_end_and_late() -> None:
    turns = []
    for task in room_training_tasks()[:25]:
        game = MazeGame(**task.envs["babyai"])
        moves = [call.arguments["action"] for call in hesitant_expert(task)]
        for move in moves:
            game.act(move)
        assert game.won
        turns.append(len(moves))
    assert 0.4 < sum(count <= 4 for count in turns) / len(turns) < 0.95


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_tiny_model_learns_in_one_room(tmp_path: Path) -> None:
    recipe = load_recipe(ROOT / "recipes" / "babyai_cpu.toml", [f"run.folder={tmp_path / 'run'}"])
    stages = {when: float(told.rstrip("%")) for when, told in ludus.train(recipe).success.items()}
    assert stages["after RL"] >= 70
    assert stages["after RL"] >= stages["after the warm start"] + 20


@pytest.mark.parametrize("name", ["SynthLoc-44", "SynthLoc-63"])
def test_the_planner_carries_something_past_what_is_in_its_way(name: str) -> None:
    """It put down what it carried, picked it up again and stood before the obstacle as before, for ever."""
    (task,) = [one for one in training_tasks() if one.id == f"babyai-train-{name}"]
    game = MazeGame(**task.envs["babyai"])
    for call in islice(expert(task), 40):
        game.act(call.arguments["action"])
    assert game.won


def test_what_has_no_solution_is_no_task() -> None:
    """Neither the goal nor a key of a locked door can be reached, with every other object out of the way."""
    played = {(task.metadata["level"], task.envs["babyai"]["seed"]) for task in training_tasks()}
    played |= {(task.metadata["level"], task.envs["babyai"]["seed"]) for task in held_out_tasks()}
    assert len(played) == 1320
    for (level, seed), other in UNSOLVABLE.items():
        game = MazeGame(f"BabyAI-{level}", seed)
        reached, new = {game.place}, [game.place]
        met: list[Any] = []
        while new:
            x, y = new.pop()
            for cell in ((x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)):
                thing = game.env.grid.get(*cell)
                met += [thing] if thing is not None and cell not in reached else []
                is_closed = thing is not None and (
                    thing.type == "wall" or (thing.type == "door" and thing.is_locked)
                )
                if cell not in reached and not is_closed:
                    reached.add(cell)
                    new.append(cell)
        locked = {one.color for one in met if one.type == "door" and one.is_locked}
        assert locked and not locked & {one.color for one in met if one.type == "key"}
        assert not any(one is thing for one in game.env.instrs.desc.obj_set for thing in met)
        task = Task.of("", envs={"babyai": {"level": f"BabyAI-{level}", "seed": seed}})
        assert len(list(islice(expert(task), 200))) < 40, "it gives up"
        assert (f"BabyAI-{level}", seed) not in played and (f"BabyAI-{level}", other) in played


def test_the_explorer_does_not_look_behind_doors() -> None:
    """Moving what it cannot see changes nothing about what it does next."""
    from ludus.worlds.babyai.game import MazeGame
    from ludus.worlds.babyai.planner import Explorer

    moved = 0
    for task in held_out_tasks()[3:60:6]:  # FindObjS7: the object is in one of nine rooms
        game = MazeGame(**task.envs["babyai"])
        seen = game.visible_cells()
        goal = game.env.instrs.desc.obj_set[0]
        before = Explorer(game).next_action()
        if tuple(goal.cur_pos) in seen:
            continue
        free = [
            (x, y)
            for x in range(game.env.width)
            for y in range(game.env.height)
            if game.env.grid.get(x, y) is None and (x, y) not in seen
        ]
        for cell in (free[0], free[-1]):
            game.env.grid.set(*goal.cur_pos, None)
            game.env.grid.set(*cell, goal)
            goal.cur_pos = cell
            game.env.instrs.desc.obj_poss = [cell]
            assert Explorer(game).next_action() == before
            moved += 1
    assert moved >= 6


def test_the_explorer_finds_most_goals_in_time() -> None:
    tasks = held_out_tasks()[:36]
    won = [_plays(task, list(islice(explorer(task), 20))) for task in tasks]
    assert sum(won) >= 28


def _plays(task: Task, calls: list[ToolCall]) -> bool:
    env = BabyAI()
    env.reset(task, **task.envs["babyai"])
    assert env.game is not None
    for call in calls:
        env.game.act(call.arguments["action"])
    return env.won
