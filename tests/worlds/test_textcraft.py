"""TextCraft: the recipes, the game's rules in AgentGym's words, the planner, the tasks."""

from __future__ import annotations

import pytest
from world_play import play_expert

from ludus.core import Task, ToolContext
from ludus.envs import WORLDS
from ludus.rollouts import check_env
from ludus.tools import LocalTools

pytest.importorskip("minecraft_data", reason="needs ludus-rl[textcraft]")

from ludus.rollouts.rollout import tools_of
from ludus.worlds.textcraft import TextCraft, expert, held_out_tasks, success, training_tasks
from ludus.worlds.textcraft.game import (
    CraftingGame,
    CraftingRecipe,
    load_book,
    make_book,
    parse_command,
    plan,
)

COMMANDS = (
    "craft 4 oak planks using 1 oak logs",
    "craft 4 dark oak planks using 1 dark oak logs",
    "craft 4 stick using 2 planks",
    "craft 1 wooden pickaxe using 3 planks, 2 stick",
)


def game(goal: str = "wooden pickaxe", commands: tuple[str, ...] = COMMANDS) -> CraftingGame:
    return CraftingGame(load_book(), goal, map(parse_command, commands))


def test_variants_are_folded_into_generic_ingredients() -> None:
    book = load_book()
    assert [str(r) for r in book.recipes["chest"]] == ["craft 1 chest using 8 planks"]
    assert "craft 1 campfire using 1 coals, 3 logs, 3 stick" in map(str, book.recipes["campfire"])
    assert "craft 4 stick using 2 planks" in map(str, book.recipes["stick"])
    assert not any("oak planks" in str(r) for r in book.recipes["barrel"])


def test_depth_is_that_of_the_crafting_tree() -> None:
    book = load_book()
    # bamboo makes sticks at once; planks come from logs, a chest from planks, a hopper from a chest
    expected = {"oak log": 0, "oak planks": 1, "stick": 1, "chest": 2, "hopper": 3, "hopper minecart": 4}
    assert {item: book.depth[item] for item in expected} == expected
    counts = [sum(book.depth[item] == depth for item in book.recipes) for depth in (1, 2, 3, 4, 5)]
    assert counts == [160, 317, 141, 14, 0]


def test_items_that_only_come_from_each_other_are_found() -> None:
    ingot, block = (
        CraftingRecipe("ingot", 9, (("block", 1),)),
        CraftingRecipe("block", 1, (("ingot", 9),)),
    )
    sword = CraftingRecipe("sword", 1, (("ingot", 2), ("stick", 1)))
    book = make_book({"ingot": [ingot], "block": [block], "sword": [sword]}, ["stick", "ingot", "block"])
    assert book.found == {"stick", "ingot", "block"} and book.depth["sword"] == 1
    assert "iron ingot" in load_book().found and "iron pickaxe" in load_book().recipes


def test_many_ways_cost_no_exponential_time() -> None:
    """Forty levels, each made from the level below in two ways: 2^40 trees, solved at once."""
    levels = [
        CraftingRecipe(f"item {n}", 1, ((f"item {n - 1}", 1), (extra, 1)))
        for n in range(1, 41)
        for extra in "ab"
    ]
    by_item: dict[str, list[CraftingRecipe]] = {}
    for recipe in levels:
        by_item.setdefault(recipe.item, []).append(recipe)
    book = make_book(by_item, ["item 0", "a", "b"])
    assert book.depth["item 40"] == 40
    found = plan(book, "item 40", levels)
    assert found is not None and len(found) == 42


def test_a_game_in_agentgyms_words() -> None:
    play = game()
    said = [
        ("inventory", "Inventory: You are not carrying anything."),
        ("get 2 oak planks", "Could not find oak planks"),
        ("get 1 planks", "Could not find planks"),
        ("get 2 dark oak log", "Got 2 dark oak log"),
        ("craft 4 dark oak planks using 1 dark oak log", "Crafted 4 minecraft:dark_oak_planks"),
        ("craft 4 stick using 2 dark oak planks", "Crafted 4 minecraft:stick"),
        ("inventory", "Inventory: [dark oak log] (1) [dark oak planks] (2) [stick] (4)"),
        (
            "craft 1 wooden pickaxe using 3 dark oak planks, 2 stick",
            "Could not find enough items to craft minecraft:wooden_pickaxe",
        ),
        ("Craft 4 Dark Oak Planks using 1 dark oak log.", "Crafted 4 minecraft:dark_oak_planks"),
        (
            "craft 1 wooden pickaxe using 4 dark oak planks, 2 stick",
            "Could not find a valid recipe for minecraft:wooden_pickaxe",
        ),
        ("craft 1 ladder using 2 stick", "Could not find a valid recipe for minecraft:ladder"),
        ("craft stick using planks", "Wrong item format: planks"),
        ("dance", "Could not execute dance"),
    ]
    for action, expected in said:
        assert play.act(action).text == expected
    outcome = play.act("craft 1 wooden pickaxe using 2 stick, 3 dark oak planks")
    assert outcome.won and outcome.text == "Crafted 1 minecraft:wooden_pickaxe"


def test_only_the_given_commands_count() -> None:
    play = game("stick", COMMANDS[2:3])
    play.act("get 2 bamboo")
    assert "valid recipe" in play.act("craft 1 stick using 2 bamboo").text
    assert not play.won


@pytest.mark.parametrize(
    "action",
    ["", " ", "get", "get 1", "get 0 oak log", "get " + "9" * 5000 + " oak log", "craft",
     "craft 1 stick using", "craft using using", "get １ oak log", "木を切る", "\x00\ud800", "x" * 1_000_000,
     "craft " * 100, "craft 1 stick using " + "1 planks, " * 50],
)  # fmt: skip
def test_nonsense_is_an_observation_and_changes_nothing(action: str) -> None:
    play = game()
    outcome = play.act(action)
    assert outcome.text and len(outcome.text) < 1200 and not outcome.won and not +play.inventory


async def test_the_environment_pays_once_and_then_is_over() -> None:
    env = TextCraft()
    await env.reset(Task.of("x"), "stick", list(COMMANDS))
    first = [await env.step(a) for a in ("get 1 oak log", "craft 4 oak planks using 1 oak log")]
    assert [step.reward for step in first] == [0.0, 0.0]
    assert "craft 4 stick using 2 oak planks" in await env.available_actions()
    won = await env.step("craft 4 stick using 2 oak planks")
    assert won.reward == 1.0 and won.terminated
    after = await env.step("inventory")
    assert after.reward is None and after.terminated and "over" in str(after.observation)
    await env.reset(Task.of("x"), "stick", list(COMMANDS))
    assert await env.render() == "Goal: craft stick. Inventory: You are not carrying anything."


async def test_the_tool_says_what_can_be_done() -> None:
    (spec,) = await LocalTools(await tools_of(TextCraft(), "textcraft")).list(
        ToolContext("e", Task.of("x"))
    )
    assert spec.name == "step" and "crafting command" in spec.description
    assert "craft 4 oak planks" in spec.parameters["properties"]["action"]["description"]


def test_tasks_are_stable_and_held_out_goals_are_new() -> None:
    train, held_out = training_tasks(), held_out_tasks()
    goals = [{task.envs["textcraft"]["goal"] for task in tasks} for tasks in (train, held_out)]
    assert not goals[0] & goals[1] and len(goals[1]) == len(held_out) == 100
    assert len(train) == 2072 and train[17].id == "textcraft-train-17"
    assert {task.metadata["subtask"] for task in held_out} == {f"depth {n}" for n in (1, 2, 3, 4)}
    same_goal = [task for task in train if task.envs["textcraft"]["goal"] == "chest"]
    assert len({task.messages for task in same_goal}) == 4, "each variant has commands of its own"


async def test_the_planner_solves_held_out_tasks_as_an_agent() -> None:
    played = await play_expert("textcraft", held_out_tasks()[::12])
    assert [(t.failure, t.reward, t.rewards["success"]) for t in played] == [(None, 1.0, 1.0)] * len(
        played
    )


@pytest.mark.slow
async def test_the_planner_solves_every_task() -> None:
    played = await play_expert("textcraft", [*held_out_tasks(), *training_tasks()])
    assert all(t.failure is None and t.reward == 1.0 and t.turns <= 20 for t in played)


async def test_the_contract_holds() -> None:
    task = held_out_tasks()[50]
    moves = [call.arguments["action"] for call in expert(task)]
    assert not await check_env(TextCraft, task, [*moves, "again"], name="textcraft")
    assert WORLDS["textcraft"].rewards == (success,)
