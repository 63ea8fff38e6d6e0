"""ALFWorld: its rules on a small house, the tools, and, where the game files are, parity with TextWorld."""

from __future__ import annotations

import json
import random
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner
from world_play import play_expert

from ludus.cli.main import app
from ludus.core import ConfigError, ToolCall
from ludus.envs import WORLDS
from ludus.rollouts import check_env
from ludus.worlds.alfworld import (
    AlfWorld,
    data_folder,
    expert,
    game,
    held_out_tasks,
    load_game,
    success,
    training_tasks,
)
from ludus.worlds.alfworld.game import Game, GameFile, UnknownRules, read_game

has_games = pytest.mark.skipif(
    bool(WORLDS["alfworld"].missing()), reason="needs LUDUS_ALFWORLD_DATA (docs/envs/alfworld.md)"
)

HOUSE = """
receptacletype desk_bar_1 desktype|receptacletype fridge_bar_1 fridgetype|receptacletype shelf_bar_1 shelftype
receptacletype microwave_bar_1 microwavetype|receptacletype sink_bar_1_bar_sinkbasin sinkbasintype
receptacleatlocation desk_bar_1 loc_bar_1|receptacleatlocation shelf_bar_1 loc_bar_1
receptacleatlocation fridge_bar_1 loc_bar_2|receptacleatlocation microwave_bar_1 loc_bar_3
receptacleatlocation sink_bar_1_bar_sinkbasin loc_bar_4|openable fridge_bar_1|openable microwave_bar_1
objecttype apple_bar_1 appletype|objecttype apple_bar_2 appletype|objecttype knife_bar_1 knifetype
objecttype desklamp_bar_1 desklamptype|objecttype bowl_bar_1 bowltype|objecttype mug_bar_1 mugtype
inreceptacle apple_bar_1 desk_bar_1|inreceptacle apple_bar_2 fridge_bar_1|inreceptacle knife_bar_1 desk_bar_1
inreceptacle desklamp_bar_1 desk_bar_1|inreceptacle bowl_bar_1 shelf_bar_1
objectatlocation apple_bar_1 loc_bar_1|objectatlocation apple_bar_2 loc_bar_2
objectatlocation knife_bar_1 loc_bar_1|objectatlocation bowl_bar_1 loc_bar_1
inreceptacleobject mug_bar_1 bowl_bar_1|isreceptacleobject bowl_bar_1|toggleable desklamp_bar_1
pickupable apple_bar_1|pickupable apple_bar_2|pickupable knife_bar_1|pickupable bowl_bar_1
cleanable apple_bar_1|cleanable apple_bar_2|heatable apple_bar_1|coolable apple_bar_1|sliceable apple_bar_1
cancontain desktype appletype|cancontain fridgetype appletype|cancontain shelftype appletype
cancontain desktype knifetype|atlocation agent1 loc_bar_0
"""
CLEAN_IN_FRIDGE = (
    "(and (exists (?r - receptacle) (exists (?o - object) (and (cleanable ?o) (objecttype ?o appletype) "
    "(receptacletype ?r fridgetype) (isclean ?o) (inreceptacle ?o ?r)))))"
)
TWO_IN_FRIDGE = (
    "(and (exists (?r - receptacle) (exists (?o1 - object) (and (objecttype ?o1 appletype) (receptacletype "
    "?r fridgetype) (inreceptacle ?o1 ?r) (exists (?o2 - object) (and (not (= ?o1 ?o2)) (objecttype ?o2 "
    "appletype) (receptacletype ?r fridgetype) (inreceptacle ?o2 ?r)))))))"
)
LIGHT = (
    "(and (exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and (objecttype ?ot desklamptype) "
    "(toggleable ?ot) (istoggled ?ot) (receptacleatlocation ?r ?l) (atlocation ?a ?l) (inreceptacle ?ot ?r))) "
    "(exists (?o - object ?a - agent) (and (objecttype ?o appletype) (holds ?a ?o))))"
)


def house(goal: str = CLEAN_IN_FRIDGE) -> Game:
    from ludus.worlds.alfworld import game

    facts = frozenset(
        tuple(fact.split()) for line in HOUSE.split("\n") for fact in line.split("|") if fact
    )
    return Game(GameFile(facts, game._parse(goal), "put it.", (), game._names(facts)))


def play(game: Game, *commands: str) -> list[str]:
    return [game.step(command) for command in commands]


def test_a_house_is_explored() -> None:
    game = house()
    assert game.intro() == (
        "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, "
        "you see a desk 1, a fridge 1, a microwave 1, a shelf 1, and a sinkbasin 1.\n\nYour task is to: put it."
    )
    assert game.admissible_commands() == [
        *("go to desk 1", "go to fridge 1", "go to microwave 1", "go to shelf 1", "go to sinkbasin 1"),
        *("help", "inventory", "look"),
    ]
    assert play(game, "go to fridge 1", "take apple 1 from fridge 1", "open fridge 1", "inventory") == [
        "You arrive at fridge 1. The fridge 1 is closed.",
        "Nothing happens.",
        "You open the fridge 1. The fridge 1 is open. In it, you see a apple 1.",
        "You are not carrying anything.",
    ]
    assert play(game, "go to desk 1", "look", "go to desk 1", "go to shelf 1") == [
        "You arrive at desk 1. On the desk 1, you see a apple 2, a desklamp 1, and a knife 1.",
        "You are facing the desk 1, and shelf 1. Next to it, you see nothing.",
        *("Nothing happens.", "Nothing happens."),
    ]


def test_things_are_changed_and_examined() -> None:
    game = house()
    play(game, "go to desk 1", "take apple 2 from desk 1")
    assert "take knife 1 from desk 1" not in game.admissible_commands()
    assert play(
        game, "inventory", "examine apple 2", "move apple 2 to shelf 1", "look", "examine shelf 1"
    ) == [
        "You are carrying: a apple 2.",
        "There's nothing special about apple 2.",
        "You move the apple 2 to the shelf 1.",
        "You are facing the desk 1, and shelf 1. Next to it, you see a apple 2.",
        "On the shelf 1, you see a apple 2, and a bowl 1.",
    ]
    assert play(
        game, "take knife 1 from desk 1", "slice apple 2 with knife 1", "move knife 1 to desk 1"
    ) == [
        "You pick up the knife 1 from the desk 1.",
        "You sliced the apple 2 with the knife 1.",
        "You move the knife 1 to the desk 1.",
    ]
    play(game, "take apple 2 from shelf 1")
    texts = [game.step("examine apple 2")]
    for place, verb in (("fridge", "cool"), ("sinkbasin", "clean"), ("microwave", "heat")):
        play(game, f"go to {place} 1")
        assert (
            game.step(f"{verb} apple 2 with {place} 1") == f"You {verb} the apple 2 using the {place} 1."
        )
        texts.append(game.step("examine apple 2"))
    assert texts == [
        *("This is a sliced apple 2.", "This is a cool sliced apple 2."),
        *("This is a cool and clean sliced apple 2.", "This is a hot and clean sliced apple 2."),
    ]
    assert not game.won
    play(game, "go to fridge 1", "open fridge 1", "move apple 2 to fridge 1")
    assert game.won


def test_goals_of_two_objects_and_of_light() -> None:
    game = house(TWO_IN_FRIDGE)
    play(game, "go to desk 1", "take apple 2 from desk 1", "go to fridge 1", "open fridge 1")
    assert not game.won
    play(game, "move apple 2 to fridge 1")
    assert game.won

    game = house(LIGHT)
    assert (
        play(game, "go to shelf 1", "use desklamp 1", "use desklamp 1")[1:]
        == ["You turn on the desklamp 1."] * 2
    )
    assert not game.won
    play(game, "take bowl 1 from shelf 1")
    assert (
        not game.won
        and game.step("examine bowl 1") == "This is a normal bowl 1. In it, you see a mug 1."
    )


@pytest.mark.parametrize(
    "text", ["", "  ", "put apple 2 in desk 1", "öffne 门", "\x00", "\ud800", "x" * 1_000_000]
)
def test_nonsense_does_nothing(text: str) -> None:
    game = house()
    before = game.admissible_commands()
    assert game.step(text) == "Nothing happens." and game.admissible_commands() == before


def test_files_with_other_rules_and_folders_without_games_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {"pddl_domain": "(define)", "grammar": 'x "Your task is to: y."', "pddl_problem": "(define)"}
    with pytest.raises(UnknownRules, match=r"ALFWorld 0\.4"):
        read_game(other)
    monkeypatch.setenv("LUDUS_ALFWORLD_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match="LUDUS_ALFWORLD_DATA or ALFWORLD_DATA"):
        data_folder()
    folder = tmp_path / "train" / "pick_and_place_simple-a" / "trial_1"
    folder.mkdir(parents=True)
    (folder / "game.tw-pddl").write_text(json.dumps({**other, "solvable": True}))
    (task,) = training_tasks()
    assert task.metadata["subtask"] == "pick_and_place_simple" and held_out_tasks() == []
    with pytest.raises(ConfigError, match="alfworld-download"):
        AlfWorld().reset(task, **task.envs["alfworld"])
    (folder / "game.tw-pddl").write_text(json.dumps({**other, "solvable": False}))
    assert training_tasks() == []


@pytest.mark.parametrize("damage", ["problem", "facts", "json", "grammar"])
def test_a_damaged_game_is_named_with_how_to_get_it_again(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain, grammar = "(define)", 'x "Your task is to: y."'
    monkeypatch.setattr(game, "RULES", game._rules_of(domain, 'x ""'))
    problem = f"(define (:init {' '.join(f'({f})' for f in HOUSE.split('|'))}) (:goal {LIGHT}))"
    whole = {"pddl_domain": domain, "grammar": grammar, "pddl_problem": problem, "solvable": True}
    text = {
        "problem": json.dumps({**whole, "pddl_problem": problem[:300]}),
        "facts": json.dumps({**whole, "pddl_problem": "(define (:init) (:goal (and)))"}),
        "json": json.dumps(whole)[:-40] + '"solvable": true',
        "grammar": json.dumps({**whole, "grammar": grammar.replace("x", "z")}),
    }[damage]
    folder = tmp_path / "valid_seen" / "pick_and_place_simple-a" / "trial_1"
    folder.mkdir(parents=True)
    (folder / "game.tw-pddl").write_text(text)
    monkeypatch.setenv("LUDUS_ALFWORLD_DATA", str(tmp_path))
    shown = CliRunner().invoke(app, ["check", "env", "alfworld"], env={"COLUMNS": "1000"})
    told = shown.output.replace("\n", " ")
    assert shown.exit_code == 1 and f"the game {folder}/game.tw-pddl is damaged" in told
    assert "get it again with alfworld-download" in told
    assert "let reset accept" not in told and "make it work for every task" not in told


# With the game files --------------------------------------------------------------------------------


@has_games
@pytest.mark.worlds
async def test_the_tools_and_the_contract() -> None:
    task = held_out_tasks()[0]
    env = AlfWorld()
    seen = env.reset(task, **task.envs["alfworld"])
    assert seen.endswith(f"Your task is to: {env.alfworld_get_task_objective()}")
    assert env.alfworld_get_admissible_commands().split("\n") == env.available_actions()
    assert [tool.name for tool in env.tools()] == [
        *("alfworld_step", "alfworld_get_admissible_commands", "alfworld_get_task_objective"),
    ]
    calls = list(expert(task))
    paid = [env.alfworld_step(call.arguments["action"]) for call in calls]
    assert [result.reward for result in paid] == [0.0] * (len(paid) - 1) + [1.0]
    assert paid[-1].terminated and env.alfworld_step("look").content.startswith("The episode is over")
    assert not await check_env(
        AlfWorld, task, [*calls, ToolCall("alfworld_step", {"action": "look"})], name="alfworld"
    )
    assert WORLDS["alfworld"].rewards == (success,)


@has_games
@pytest.mark.worlds
@pytest.mark.timeout(600)
async def test_walkthroughs_solve_every_game() -> None:
    chosen = held_out_tasks() + training_tasks()
    played = await play_expert("alfworld", chosen)
    assert all(t.failure is None and t.reward == 1.0 and t.rewards["success"] == 1.0 for t in played)
    assert len(played) == len(chosen)


@has_games
@pytest.mark.worlds
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(find_spec("alfworld") is None, reason="needs ludus-rl[worlds-references]")
@pytest.mark.parametrize("policy", ["walkthrough", "random"])
def test_textworld_plays_the_same(policy: str) -> None:
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from textworld.envs.pddl import PddlEnv

    draw = random.Random(policy)
    for task in draw.sample(held_out_tasks() + training_tasks(), EPISODES):
        name = task.envs["alfworld"]["game"]
        reference = AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)))
        reference.load(str(data_folder() / name / "game.tw-pddl"))
        state, ours = reference.reset(), Game(load_game(name))
        assert ours.intro() == state.feedback
        commands = load_game(name).walkthrough if policy == "walkthrough" else [""] * 30
        for command in commands:
            possible = ours.admissible_commands()
            assert possible == state["admissible_commands"]
            move = command or draw.choice(
                [*_lively(possible), draw.choice(possible), "put mug 1 in desk 1"]
            )
            state, reward, is_over = reference.step(move)
            assert (ours.step(move), float(ours.won), ours.won) == (
                state.feedback,
                float(reward),
                is_over,
            )
            if is_over:
                break
        assert ours.won or policy == "random"


EPISODES = 50


def _lively(commands: list[str]) -> list[str]:
    """Commands that change or examine something: going places would be most of a random walk."""
    return [
        command for command in commands if command.split()[0] not in ("go", "help", "look", "inventory")
    ]
