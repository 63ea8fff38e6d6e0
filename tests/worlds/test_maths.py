"""Maths with Python: how answers are compared, the papers' rewards, GSM8K's annotations as programs."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from world_play import play_expert

from ludus.core import ConfigError, Task, ToolCall
from ludus.envs import WORLDS, load_env
from ludus.rewards import Scorer, ToolBonus, build_reward, numeric, synthetic_episode
from ludus.worlds.maths import (
    agentfly,
    expert,
    gsm8k_held_out_tasks,
    gsm8k_training_tasks,
    held_out_tasks,
    is_right,
    math_held_out_tasks,
    math_training_tasks,
    success,
    training_tasks,
    vt_math,
)
from ludus.worlds.maths.files import final_answer, program_of, question_and_solution

CLIPS = {
    "question": "Natalia sold clips to 48 friends in April, and half as many in May. How many altogether?",
    "answer": "She sold 48/2 = <<48/2=24>>24 clips in May.\nThat is 48+24 = <<48+24=72>>72 in all.\n#### 72",
}
CIRCLE = {
    "problem": "What is the area of a circle of radius $2$?",
    "solution": "It is $\\pi r^2 = \\boxed{4\\pi}$.",
    "level": "Level 2",
    "type": "Geometry",
}


def test_tasks_are_stable_distinct_and_graded() -> None:
    train, held_out = training_tasks(), held_out_tasks()
    texts = [{task.messages[0].content for task in tasks} for tasks in (train, held_out)]
    assert len(texts[0]) == len(train) == 3200 and len(texts[1]) == len(held_out) == 200
    assert not texts[0] & texts[1]
    assert held_out[25 * 3].id == "maths-arithmetic-4-held-out-0"
    assert held_out[25 * 3].messages[0].content.startswith("Compute 221647611 * 850930413 + 486831184.")
    assert int(held_out[25 * 3].target) == 221647611 * 850930413 + 486831184
    kinds = [f"{kind}, level {level}" for kind in ("arithmetic", "words") for level in (1, 2, 3, 4)]
    assert sorted({task.metadata["subtask"] for task in held_out}) == kinds


@pytest.mark.parametrize(
    ("answer", "target", "right"),
    [
        ("The answer is \\boxed{72}.", "72", True),
        ("72", "#### 72", True),
        ("First 5, then 72 clips.", "72", True),
        ("\\boxed{72} and not 73", "72", True),
        ("It is \\boxed{7} or rather \\boxed{72}", "72", True),
        ("\\boxed{$1,234}", "1234", True),
        ("\\boxed{50\\%}", "50", True),
        ("\\boxed{18.00 \\text{ dollars}}", "18", True),
        ("17.999999999999996", "18", True),
        ("\\boxed{\\frac{1}{2}}", "0.5", True),
        ("\\boxed{-3}", "-3", True),
        ("188606693655524527", "188606693655524527", True),
        ("188606693655524500.0", "188606693655524527", False),
        ("\\boxed{73}", "72", False),
        ("no idea", "72", False),
        ("", "72", False),
        ("\\boxed{", "72", False),
        ("\\boxed{" * 3000, "72", False),
        ("{" * 100_000, "72", False),
        ("1" * 100_000, "72", False),
        ("\ud800\x00 \\boxed{７２}", "72", False),
    ],
)
async def test_a_number_is_compared_as_people_write_it(answer: str, target: str, right: bool) -> None:
    assert await is_right(answer, target) is right


async def test_what_is_no_number_is_compared_as_mathematics() -> None:
    pytest.importorskip("math_verify", reason="needs ludus-rl[maths]")
    assert await is_right("so \\boxed{\\pi \\cdot 4}", "4\\pi")
    assert await is_right("$x^2+1$", "\\boxed{1+x^2}")
    assert not await is_right("\\boxed{4}", "4\\pi")


def test_the_final_answer_of_a_text() -> None:
    assert final_answer("a \\boxed{1} b \\boxed{\\frac{1}{2}} c") == "\\frac{1}{2}"
    assert final_answer(CLIPS["answer"]) == "72"
    assert final_answer(" 5 ") == "5"


@pytest.mark.parametrize("answer", ["\\boxed{72}", "\\boxed{7}"])
@pytest.mark.parametrize("calls", [[], [ToolCall("python", {"code": "print(72)"})]])
async def test_rewards_are_the_papers(answer: str, calls: list[ToolCall]) -> None:
    task = Task.of("?", "72")
    right, called = answer == "\\boxed{72}", bool(calls)
    printed = vt_math.using(tool_term="printed", name="vt_math_printed")
    expected = {
        # AgentFly B.1: 0.1 if at least one call, 1.0 if right as well, otherwise 0.0
        agentfly: {(True, True): 1.0, (False, True): 0.1, (True, False): 0.0, (False, False): 0.0},
        # VerlTool F.1, the second term for tool use, and as it is printed
        vt_math: {(True, True): 1.0, (False, True): -1.0, (True, False): 0.75, (False, False): -1.25},
        printed: {(True, True): 1.0, (False, True): -1.25, (True, False): 1.0, (False, False): -1.25},
    }
    for one, table in expected.items():
        episode = synthetic_episode(task, answer)
        episode.actions[0].calls = tuple(calls)
        await Scorer([one]).score(episode)
        assert episode.reward == table[right, called]
        assert episode.rewards["success"] == float(right)
    episode = synthetic_episode(task, answer)
    episode.actions[0].calls = tuple(calls)
    await Scorer([ToolBonus(numeric)]).score(episode)
    assert episode.reward == expected[agentfly][right, called]  # the same as the library's
    assert build_reward("ludus.worlds.maths:success") is success


def test_annotations_become_a_program() -> None:
    assert program_of(CLIPS["question"], CLIPS["answer"], "72") == (
        "# She sold 48/2 clips in May.\nx1 = 48 / 2\n# That is 48+24 in all.\nx2 = 48 + x1\nprint(x2)"
    )
    # an equation in the text counts where it holds; 20 is in the question and stays a number
    text = "He has 20 - 16 = <<20-16=4>>4.\nThat is 4/20 x 100% = 20%, not 5 + 5 = 11.\n#### 20"
    program = program_of("Of 20 cars, 16 are red. What percentage is not?", text, "20")
    assert program is not None and program.endswith("x2 = x1 / 20 * 100\nprint(x2)")
    assert program_of("?", "No numbers, but 7 it is.\n#### 7", "7") is None
    assert program_of("?", "<<__import__('os')=1>>1 <<9**9**9=1>>1 <<1/0=7>>7\n#### 7", "7") is None


def test_the_expert_answers_what_was_printed() -> None:
    task = Task.of(CLIPS["question"], CLIPS["answer"])  # as a recipe's columns make it of the file
    script = expert(task)
    call = next(script)
    assert isinstance(call, ToolCall) and "print(x2)" in call.arguments["code"]
    assert script.send("72.0\n") == "The answer is \\boxed{72}."
    script = expert(task)
    next(script)
    assert "NameError" in str(script.send("Traceback ...\nNameError: x"))
    in_words = next(expert(Task.of("?", "7", solution="Seven, of course.\n#### 7")))
    assert in_words == "Seven, of course.\n\\boxed{7}"


def written(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(map(json.dumps, rows)) if ".jsonl" in name else json.dumps(rows)
    (folder / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())


def test_files_are_found_by_their_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LUDUS_GSM8K", raising=False)
    with pytest.raises(ConfigError, match="set LUDUS_GSM8K"):
        gsm8k_training_tasks()
    written(tmp_path, "train.jsonl.gz", [CLIPS, CLIPS])
    written(tmp_path, "test.jsonl", [CLIPS])
    monkeypatch.setenv("LUDUS_GSM8K", str(tmp_path))
    assert [task.id for task in gsm8k_training_tasks()] == ["gsm8k-train-0", "gsm8k-train-1"]
    (task,) = gsm8k_held_out_tasks()
    assert task.id == "gsm8k-test-0" and task.target == "72" and task.metadata["subtask"] == "gsm8k"
    assert task.messages[0].content == f"{CLIPS['question']}\n\nPut the final answer in \\boxed{{}}."
    monkeypatch.setenv("LUDUS_GSM8K", str(tmp_path / "test.jsonl"))
    with pytest.raises(ConfigError, match="no train split"):
        gsm8k_training_tasks()
    (tmp_path / "test.jsonl").write_text('{"question": "?"}')
    with pytest.raises(ConfigError, match="row 1 is no problem"):
        gsm8k_held_out_tasks()


@pytest.mark.parametrize(
    ("row", "target"),
    [
        ({"question": "1 - 1?", "answer": 0}, "0"),
        ({"question": "1 - 1?", "answer": 0.0}, "0.0"),
        ({"problem": "1 - 1?", "solution": "It is nothing.", "answer": 0}, "0"),
        ({"problem": "1 - 1?", "solution": "", "final_answer": 0}, "0"),
        ({"question": "1 - 1?", "answer": None, "target": 0}, "0"),
        ({"question": "", "problem": "1 - 1?", "answer": "#### 0"}, "0"),
        ({"problem": "1 - 1?", "solution": "It is \\boxed{0}.", "final_answer": ""}, "0"),
    ],
)
def test_an_answer_may_be_zero(row: dict[str, Any], target: str) -> None:
    question, _, final = question_and_solution(row, "here")
    assert (question, final) == ("1 - 1?", target)


def test_math_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):  # as MATH has them: a file for each problem
        (tmp_path / "train" / "geometry").mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / "geometry" / f"{number}.json").write_text(json.dumps(CIRCLE))
    own = {"answer": "4\\pi", "subject": "Geometry", "level": 2, "unique_id": "test/geometry/1.json"}
    written(tmp_path, "math500.jsonl", [{**CIRCLE, **own}])
    monkeypatch.setenv("LUDUS_MATH", str(tmp_path))
    assert len(math_training_tasks()) == 3
    (task,) = math_held_out_tasks()
    assert task.target == "4\\pi" and task.metadata["subtask"] == "Geometry, level 2"
    assert next(expert(task)) == CIRCLE["solution"]


def test_a_single_file_is_split_by_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{**CLIPS, "question": f"{n}?"} for n in range(100)]
    written(tmp_path, "problems.json", rows)
    monkeypatch.setenv("LUDUS_GSM8K", str(tmp_path / "problems.json"))
    train, held_out = gsm8k_training_tasks(), gsm8k_held_out_tasks()
    asked = [{task.metadata["question"] for task in tasks} for tasks in (train, held_out)]
    assert len(train) + len(held_out) == 100 and not asked[0] & asked[1] and 3 <= len(held_out) <= 20


def test_it_is_no_environment_but_tools() -> None:
    with pytest.raises(ConfigError, match=r"set agent\.tools"):
        load_env("maths")
    assert WORLDS["maths"].env is None


async def test_the_expert_solves_them_with_the_agents_tool() -> None:
    chosen = held_out_tasks()[::8]
    played = await play_expert("maths", chosen)
    assert [t.rewards["success"] for t in played] == [1.0] * len(chosen)
    assert all(len(t.calls) == 1 and not t.faults for t in played)


@pytest.mark.slow
async def test_the_expert_solves_all_of_them() -> None:
    chosen = [*held_out_tasks(), *training_tasks()[::4]]
    played = await play_expert("maths", chosen)
    assert [t.task.id for t in played if t.rewards["success"] != 1.0] == []


@pytest.mark.worlds
@pytest.mark.skipif("LUDUS_GSM8K" not in os.environ, reason="LUDUS_GSM8K is not set")
async def test_the_expert_solves_gsm8k() -> None:
    tasks = gsm8k_held_out_tasks()
    played = await play_expert("maths", tasks)
    assert len(tasks) == 1319 and len(gsm8k_training_tasks()) == 7473
    with_tool = [t for t in played if t.calls]
    assert len(with_tool) >= 0.95 * len(played)
    assert sum(t.rewards["success"] for t in with_tool) == len(with_tool)
    assert sum(t.rewards["success"] for t in played) == len(played)
