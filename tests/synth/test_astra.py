"""ASTRA: from a page of text to an environment; what is wrong with generated rules is caught."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from depot import BROKEN, KINDS, PAGE, RULES, SPEC, fenced
from synth_parts import ScriptedChat, context
from typer.testing import CliRunner

import ludus
from ludus.cli.main import app
from ludus.core.failures import LudusError
from ludus.core.generation import ChatOptions
from ludus.core.messages import ToolCall
from ludus.core.task import Task
from ludus.envs import sandboxed
from ludus.envs.sandboxed import WorldSpec
from ludus.rollouts.tasksets import load_tasks
from ludus.sandbox import Limits, close_shared_sandboxes
from ludus.synth.astra import PROGRAMMER, Astra, AstraConfig, code_in, design_spec, write_world
from ludus.synth.examination import examine, make_tasks, play_solutions
from ludus.training import load_recipe


@pytest.fixture(autouse=True)
async def _sandboxes() -> AsyncIterator[None]:
    yield
    await close_shared_sandboxes()


async def examined(rules: str, folder: Path) -> list[str]:
    spec = WorldSpec.model_validate_json(SPEC)
    write_world(folder, PAGE, spec, rules)
    found = await examine(folder, spec, rules, 6)
    return [str(one) for one in found.findings]


@pytest.mark.parametrize("fault", BROKEN)
async def test_broken_rules_are_caught_with_the_reason(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = Limits(wall_seconds=0.5, memory_mb=128, processes=8)
    monkeypatch.setattr(sandboxed, "_LIMITS", quick)
    [found] = await examined(BROKEN[fault], tmp_path)
    assert found.partition(":")[0] == KINDS[fault], found


async def test_generated_code_does_not_see_our_files(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("something")
    nosy = RULES.replace(
        "draw = random.Random(seed)", f"open({str(secret)!r}); draw = random.Random(seed)"
    )
    [found] = await examined(nosy, tmp_path / "world")
    assert "FileNotFoundError" in found


def test_code_is_found_in_an_answer() -> None:
    assert code_in(fenced("x = 1\n")).strip() == "x = 1"
    assert code_in("```\na\n```\n```python\nlonger = 1\n```") == "longer = 1\n"
    assert code_in("y = 2") == "y = 2"
    assert code_in("Here:\n```python\nz = 3\ndef cut_off(") == "z = 3\ndef cut_off("


async def test_the_example_in_the_question_is_a_good_environment(tmp_path: Path) -> None:
    tools = [
        {"name": "look", "description": "See the lamps."},
        {
            "name": "switch",
            "description": "Switch.",
            "parameters": [{"name": "lamp", "description": "x"}],
        },
    ]
    spec = WorldSpec.model_validate({"name": "lamps", "description": "Lamps.", "tools": tools})
    rules = code_in(PROGRAMMER)
    write_world(tmp_path, PAGE, spec, rules)
    assert [str(one) for one in (await examine(tmp_path, spec, rules, 8)).findings] == []


async def test_a_design_whose_tools_take_nothing_is_asked_for_again() -> None:
    """As a model of 1.5B parameters designed it, shortened: what a tool takes is in its description alone."""
    tools = [
        {"name": "list_books", "description": "lists all the books on the shelf or lent to a member"},
        {
            "name": "lend_book",
            "description": "lends a book to a member, specifying the title and recipient",
        },
    ]
    first = json.dumps({"name": "library_desk", "description": "a desk", "tools": tools})
    replies = iter([first, SPEC])
    model = ScriptedChat(lambda text: next(replies))
    spec = await design_spec("A library lends books.", model, ChatOptions())
    assert spec == WorldSpec.model_validate_json(SPEC)
    assert "no tool has parameters" in model.asked[1]


async def test_all_that_a_module_lacks_is_told_at_once(tmp_path: Path) -> None:
    """A small model leaves out several functions; an attempt for each would be too many."""
    rules = RULES.replace("def solve(", "def solution(").replace(
        "def send(state, parcel, by)", "def send(state)"
    )
    [found] = await examined(rules.replace("def task(", "def new_task("), tmp_path)
    assert found == (
        "missing: world.py has no function solve, task; the function send does not take parcel, by"
    )


@pytest.mark.parametrize("name", ["a='world.py:F',b", "depot\n", "a b", 'x"]', "Depot", "", "a" * 60])
@pytest.mark.parametrize("place", ["world", "tool", "parameter"])
async def test_a_name_that_is_more_than_a_name_is_asked_for_again(name: str, place: str) -> None:
    """What a language model calls a world is a key of the recipe, and what it calls a tool is a function."""
    spec = json.loads(SPEC)
    tool = spec["tools"][0]
    {"world": spec, "tool": tool, "parameter": tool["parameters"][0]}[place]["name"] = name
    replies = iter([json.dumps(spec), SPEC])
    found = await design_spec(PAGE, ScriptedChat(lambda text: next(replies)), ChatOptions())
    assert found == WorldSpec.model_validate_json(SPEC)


@pytest.mark.parametrize("name", ["class", "none", "lambda"])
def test_a_parameter_is_no_word_of_pythons(name: str) -> None:
    spec = json.loads(SPEC)
    spec["tools"][0]["parameters"][0]["name"] = name
    if name == "none":
        WorldSpec.model_validate(spec)
        return
    with pytest.raises(ValueError, match="word of Python"):
        WorldSpec.model_validate(spec)


def test_names_are_checked_again_when_a_world_is_written(tmp_path: Path) -> None:
    spec = WorldSpec.model_validate_json(SPEC).model_copy(update={"name": "a='world.py:F',b"})
    with pytest.raises(ValueError, match="name"):
        write_world(tmp_path, PAGE, spec, RULES)
    assert not list(tmp_path.iterdir())


def test_no_text_of_the_language_model_is_in_the_code_of_a_package(tmp_path: Path) -> None:
    """environment.py is imported by `ludus train`: it has the same bytes for every world."""
    texts = []
    for name, description in (("depot", "A depot."), ("none", 'X\\"""\nimport os\n{}')):
        spec = WorldSpec.model_validate({**json.loads(SPEC), "name": name, "description": description})
        write_world(tmp_path / name, PAGE, spec, RULES)
        texts.append((tmp_path / name / "environment.py").read_text())
    assert texts[0] == texts[1] and "depot" not in texts[0].lower()


def designer(*replies: str) -> ScriptedChat:
    script = iter(replies)
    return ScriptedChat(lambda text: next(script))


def settings(tmp_path: Path, **given: Any) -> AstraConfig:
    page = tmp_path / "page.txt"
    page.write_text(PAGE)
    small = {"train": 20, "held_out": 5, "sample": 4, "page": str(page), "designer": "d"}
    return AstraConfig.parse(small | given)


async def test_broken_drafts_are_asked_again_with_what_was_wrong(tmp_path: Path) -> None:
    drafts = [
        "Certainly! {",
        SPEC,
        fenced(BROKEN["syntax"]),
        fenced(BROKEN["passes any sending"]),
        fenced(RULES),
    ]
    model = designer(*drafts)
    made = context(tmp_path / "made", models={"d": model})
    with made.folder:
        result = await Astra(settings(tmp_path)).run(made)
    assert "does not parse" in model.asked[3] and "altered solutions" in model.asked[4]
    [table] = [one for one in result.tables if one.title.startswith("Drafts")]
    assert [row[1].partition(":")[0] for row in table.rows] == ["syntax", "verifier", "good"]
    assert len(result.kept) == 20 and result.numbers["altered_solutions_refused"] == 1
    folder = tmp_path / "made" / "environment"
    held_out = {task.messages[-1].content for task in load_tasks(str(folder / "held_out.jsonl"))}
    assert len(held_out) == 5 and load_recipe(folder / "recipe.toml").name == "depot"
    envs = load_recipe(folder / "recipe.toml").agent.envs
    assert list(envs) == ["depot"] and envs["depot"].endswith("environment.py:World")
    # a second run finds everything there
    again = context(tmp_path / "made", models={"d": designer()})
    assert len((await Astra(settings(tmp_path)).run(again)).kept) == 20


async def test_a_page_that_no_environment_can_be_made_of_is_rejected_with_the_reasons(
    tmp_path: Path,
) -> None:
    model = designer(SPEC, fenced(BROKEN["unsolvable"]), fenced(BROKEN["one task"]))
    made = context(tmp_path / "made", models={"d": model})
    with pytest.raises(LudusError) as error:
        await Astra(settings(tmp_path, attempts=2)).run(made)
    assert "draft 1: unsolvable" in str(error.value) and "draft 2: alike" in str(error.value)


async def test_a_wrong_solution_scores_nothing(tmp_path: Path) -> None:
    spec = WorldSpec.model_validate_json(SPEC)
    write_world(tmp_path, PAGE, spec, RULES)
    tasks = await make_tasks(spec, RULES, range(6))

    def swapped(task: Task) -> Any:
        for step in task.metadata["solution"]:
            other = {"truck": "bike", "bike": "truck"}
            given = {**step["arguments"]}
            if "by" in given:
                given["by"] = other[given["by"]]
            yield ToolCall(step["tool"], given)
        yield "Done."

    right = await play_solutions(tmp_path, spec, tasks)
    wrong = await play_solutions(tmp_path, spec, tasks, swapped)
    assert [one.reward for one in right] == [1.0] * 6 and [one.reward for one in wrong] == [0.0] * 6


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_from_a_page_to_a_grpo_run_whose_reward_rises(tmp_path: Path) -> None:
    made = context(tmp_path / "made", models={"d": designer(SPEC, fenced(RULES))})
    await Astra(settings(tmp_path, train=200, held_out=32)).run(made)
    folder = tmp_path / "made" / "environment"
    # the folder is all that is needed
    file = folder / "environment.py"
    command = ["check", "env", f"{file}:World", "--tasks", str(folder / "tasks.jsonl"), "--expert",
               f"{file}:expert", "--reward", f"{file}:success"]  # fmt: skip
    said = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert said.exit_code == 0, said.output
    assert "the expert succeeds on 5 of 5 tasks" in said.output
    recipe = load_recipe(
        folder / "recipe.toml",
        ["warm_start.steps=20", "rl.steps=25", f"run.folder={tmp_path / 'run'}"],
    )
    result = await asyncio.to_thread(ludus.train, recipe, progress=False)
    rewards = [row["reward"] for row in result.metrics if "reward" in row and "step_seconds" in row]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    print(f"reward of the first and the last five steps: {first:.2f}, {last:.2f}; {result.success}")
    assert last > first + 0.1
