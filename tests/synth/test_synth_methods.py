"""Director and actors, ECHO, STeCa, TSR: on real tools and environments, with scripted language models."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
from synth_parts import (
    HERMES,
    ScriptedChat,
    Source,
    attempts,
    context,
    open_door,
    rollout,
    safe_task,
    scripted,
    turn,
    written,
)

import ludus
from ludus.chat import Renderer
from ludus.core import ByteTokenizer, ConfigError, Message, SegmentKind, Task, ToolCall, Trajectory
from ludus.core.trajectory import Branch
from ludus.engine import FakeEngine
from ludus.envs import Env, EnvPool
from ludus.observe import read_trajectories, write_trajectories
from ludus.rewards import Scorer
from ludus.rollouts import Budgets, Rollout
from ludus.rollouts.recorder import EngineChatModel
from ludus.rollouts.tree import leaf_weights
from ludus.synth import provenance_of
from ludus.synth.director import DirectorActor, DirectorConfig
from ludus.synth.echo import EchoConfig, HindsightRelabelling
from ludus.synth.method import transcript
from ludus.synth.search import SearchConfig, TrajectorySearch, best_of_weight
from ludus.synth.steca import StecaConfig, StepCalibration, before_step
from ludus.tools import as_toolset

OUTLINE = ["turn the red dial", "turn the green dial", "turn the blue dial", "open the door"]
NUMBERS = {"red": 1, "green": 2, "blue": 3}


def director(text: str) -> str:
    assert "You are the director" in text and "turn" in text, "it is told of the tools"
    return json.dumps({"steps": OUTLINE})


def actor(chat: ScriptedChat) -> Any:
    """Plays the step that is marked; when it is hot, it looks for red's number first."""

    def answer(text: str) -> str:
        number = int(re.findall(r"The current step: (\d)", text)[-1])
        if number == 4:
            return written(open_door())
        dial = list(NUMBERS)[number - 1]
        if chat.options[-1].temperature > 0.9 and dial == "red" and "too high" not in text:
            return written(turn("red", 7)) + "\n(step continues)"
        return written(turn(dial, NUMBERS[dial]))

    return answer


def actors(**models: ScriptedChat) -> dict[str, ScriptedChat]:
    player = ScriptedChat(lambda text: "")
    player.answer = actor(player)
    return {"policy": player, "director": ScriptedChat(director), **models}


async def test_two_temperatures_give_two_episodes_of_one_outline(tmp_path: Path) -> None:
    models = actors()
    made = context(tmp_path / "s", Source([safe_task("a")], rollout(lambda t, a: [])), models=models)
    settings = DirectorConfig.parse({"director": "director"})
    result = await DirectorActor(settings).run(made)
    assert [len(one.actions) for one in result.kept] == [4, 5] and not result.rejected
    assert all(one.rewards["success"] == 1 for one in result.kept)
    for one in result.kept:
        assert provenance_of(one)["outline"] == OUTLINE and provenance_of(one)["actor"] == "scripted"
        assert not any("outline" in message.content for message in one.messages), (
            "not in what is trained"
        )
        assert "turn the red dial" not in one.messages[0].content
    assert made.cost.model_calls == 1 + 4 + 5 and made.cost.episodes == 2


async def test_the_outline_can_be_in_the_prompt(tmp_path: Path) -> None:
    made = context(tmp_path / "s", Source([safe_task("a")], rollout(lambda t, a: [])), models=actors())
    settings = {"director": "director", "temperatures": [0.5], "outline_in_prompt": True}
    result = await DirectorActor(DirectorConfig.parse(settings)).run(made)
    assert "1. turn the red dial" in result.kept[0].messages[0].content


async def test_a_step_that_cannot_be_done_is_a_typed_rejection(tmp_path: Path) -> None:
    models = actors(
        lost=ScriptedChat(lambda text: "CANNOT: the dial is stuck"),
        clumsy=ScriptedChat(lambda text: written(turn("red", 77))),
        endless=ScriptedChat(lambda text: written(turn("red", 5)) + "\n(step continues)"),
    )
    made = context(tmp_path / "s", Source([safe_task("a")], rollout(lambda t, a: [])), models=models)
    given = {"director": "director", "actors": ["lost", "clumsy", "endless"], "temperatures": [0.0]}
    result = await DirectorActor(DirectorConfig.parse(given)).run(made)
    assert not result.kept and {one.reason for one in result.rejected} == {"step_failed"}
    assert [one.detail for one in result.rejected] == [
        "step 1: the dial is stuck",
        "step 1: its calls failed 3 times",
        "step 1: not done in 8 actions",
    ]


async def test_the_policy_can_be_asked_for_text() -> None:
    renderer = Renderer(ByteTokenizer(), HERMES)
    model = EngineChatModel(FakeEngine(["a plan"], renderer.tokenizer), renderer)
    reply = await model.chat([Message("user", "Plan!")])
    assert reply.text == "a plan" and reply.prompt_tokens > 0 and not reply.is_cut


# ECHO


@ludus.tool
async def assign(to: str) -> ludus.ToolResult:
    """Assign the ticket to a team."""
    return ludus.ToolResult(f"assigned to {to}", terminated=True)


@ludus.reward(name="success")
async def right(trajectory: Trajectory, target: str) -> float:
    return float(any(call.arguments.get("to") == target for call in trajectory.calls))


def ticket_rollout(plan: Any) -> Rollout:
    renderer = Renderer(ByteTokenizer(), HERMES)
    return Rollout(
        engine=FakeEngine(scripted(plan), renderer.tokenizer),
        renderer=renderer,
        scorer=Scorer([right]),
        tools=as_toolset([assign]),
        budgets=Budgets.parse({"max_turns": 3, "max_turn_tokens": 200}),
    )


async def test_failures_become_successes_at_what_they_achieved(tmp_path: Path) -> None:
    """Verified where there is a target, left out where it is a lie, marked where nothing can tell."""
    tasks = [
        Task.of(f"Ticket {name}. Assign it.", "access", id=name)
        for name in ("true", "lie", "vague", "won")
    ]
    told = {
        "true": {"achieved": True, "instruction": "Ticket true. Assign it to mail.", "target": "mail"},
        "lie": {
            "achieved": True,
            "instruction": "Ticket lie. Assign it to network.",
            "target": "network",
        },
        "vague": {"achieved": True, "instruction": "Do something with ticket vague.", "target": None},
    }

    def account(text: str) -> str:
        [name] = re.findall(r"<task>\n\[user\]\nTicket (\w+)", text)
        return json.dumps(told[name])

    def plan(task: str, attempt: int) -> list[Any]:
        return [("It is for them.", ToolCall("assign", {"to": "access" if task == "won" else "mail"}))]

    made = context(
        tmp_path / "s", Source(tasks, ticket_rollout(plan)), models={"policy": ScriptedChat(account)}
    )
    result = await HindsightRelabelling(EchoConfig.parse({"attempts": 1})).run(made)
    assert {one.task.id: one.reward for one in result.kept} == {"true-echo-0": 1.0, "vague-echo-0": None}
    assert [provenance_of(one)["verified"] for one in result.kept] == [True, False]
    assert [(one.trajectory.task.id, one.reason) for one in result.rejected] == [("lie", "not_achieved")]
    assert result.numbers["failed"] == 3 and result.numbers["verified"] == 1
    [original] = [one for one in await _attempts(made) if one.task.id == "true"]
    relabelled = result.kept[0]
    assert [a.tokens for a in relabelled.actions] == [a.tokens for a in original.actions]
    assert [a.logprobs for a in relabelled.actions] == [a.logprobs for a in original.actions]
    assert relabelled.messages[0].content.startswith("Ticket true. Assign it to mail.")
    decode = ByteTokenizer().decode
    prompt = relabelled.sequences[0].segments[0]
    assert prompt.kind is SegmentKind.PROMPT and "Assign it to mail." in decode(prompt.tokens)
    assert relabelled.task.target == "mail" and original.task.target == "access"


async def _attempts(made: Any) -> list[Trajectory]:
    files = sorted((made.folder.path / "parts" / "attempts").glob("*.parquet"))
    return [one for file in files for one in read_trajectories(file)]


async def test_a_verifier_of_ones_own_and_a_file_of_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "check.py").write_text(
        "def met(trajectory, task):\n    return 'mail' in task.messages[0].content\n"
    )
    task = Task.of("Ticket. Assign it.", "access", id="x")
    plays = ticket_rollout(lambda t, a: [ToolCall("assign", {"to": "mail"})])
    write_trajectories("failed.parquet", [await plays.play(task, n, 0) for n in range(2)])
    answers = iter(["Assign it to mail.", "Assign it to nobody."])
    account = ScriptedChat(lambda text: json.dumps({"achieved": True, "instruction": next(answers)}))
    made = context(tmp_path / "s", Source([], plays), models={"policy": account})
    made.at_once = 1
    given = {"source": "failed.parquet", "verifier": "check.py:met"}
    result = await HindsightRelabelling(EchoConfig.parse(given)).run(made)
    assert [provenance_of(one)["verified"] for one in result.kept] == [True]
    assert [one.reason for one in result.rejected] == ["not_achieved"]


# STeCa


class Walk(Env):
    """Seven steps, each with its number; the environment pays for each one."""

    deterministic = True

    async def reset(self, task: Task) -> None:
        self.taken: list[int] = []

    @ludus.tool
    async def step(self, to: int) -> ludus.ToolResult:
        """Go to a number."""
        self.taken.append(to)
        good = to == len(self.taken)
        return ludus.ToolResult(
            "good ground" if good else "mud",
            reward=1.0 if good else -1.0,
            terminated=len(self.taken) == 7,
        )


@ludus.reward(name="success", weight=0.0)
async def clean(env: Walk) -> float:
    """1 when no step was in the mud."""
    return float(env.taken == [1, 2, 3, 4, 5, 6, 7])


def walk_script(wrong: Sequence[int]) -> Any:
    """Goes on from wherever it is, right but at attempt 0's wrong steps."""

    def script(tokens: list[int], sampling: Any, session: str | None) -> str:
        assert session is not None
        text = ByteTokenizer().decode(tokens)
        number = text.count("good ground") + text.count("mud") + 1
        attempt = int(session.split("/")[-2])
        to = 99 if attempt == 0 and number in wrong else number
        return HERMES.render_action(f"On to {to}.", [ToolCall("step", {"to": to})])

    return script


def walk_rollout(wrong: Sequence[int] = (4,)) -> Rollout:
    renderer = Renderer(ByteTokenizer(), HERMES)
    return Rollout(
        engine=FakeEngine(walk_script(wrong), renderer.tokenizer),
        renderer=renderer,
        scorer=Scorer([clean]),
        tools=as_toolset(()),
        pools={"walk": EnvPool(Walk, name="walk")},
        budgets=Budgets.parse({"max_turns": 9, "max_turn_tokens": 200}),
    )


RULE = """
from ludus import ToolCall

def better(task, messages):
    done = sum(message.role == "assistant" for message in messages)
    return ToolCall("step", {"to": done + 1})
"""


@pytest.mark.parametrize("score", ["turns", "rollouts", "model"])
async def test_only_the_planted_bad_fourth_step_differs(
    score: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rule.py").write_text(RULE)
    judge = ScriptedChat(lambda text: json.dumps({"scores": [9, 8, 9, 1, 9, 8, 9]}))
    source = Source([Task.of("Walk.", id="w", envs={"walk": {}})], walk_rollout())
    made = context(tmp_path / "s", source, models={"policy": judge})
    given = {"attempts": 1, "score": score, "rule": "rule.py:better", "rollouts": 2}
    result = await StepCalibration(StecaConfig.parse(given)).run(made)
    [original] = await _attempts(made)
    [repaired] = result.kept
    assert original.rewards["success"] == 0 and repaired.rewards["success"] == 1
    assert provenance_of(repaired)["repaired"] == [4]
    pairs = list(zip(original.actions, repaired.actions, strict=True))
    same = [old.tokens == new.tokens for old, new in pairs]
    assert same == [True] * 3 + [False] + [True] * 3
    assert repaired.calls[3].arguments == {"to": 4} and [a.reward for a in repaired.actions] == [1.0] * 7
    assert repaired.messages[-1].content == "good ground", "the tail was played again"


async def test_a_stronger_model_repairs_and_what_it_cannot_mend_is_left_out(tmp_path: Path) -> None:
    def plays(wrong: Sequence[int]) -> Source:
        return Source([Task.of("Walk.", id="w", envs={"walk": {}})], walk_rollout(wrong))

    strong = ScriptedChat(lambda text: HERMES.render_action("Better.", [ToolCall("step", {"to": 4})]))
    given = {"attempts": 1, "repair": "strong"}
    made = context(tmp_path / "a", plays([4]), models={"strong": strong})
    result = await StepCalibration(StecaConfig.parse(given)).run(made)
    assert [provenance_of(one)["repaired"] for one in result.kept] == [[4]]
    assert "<bad_step>" in strong.asked[0] and '"to": 99' in strong.asked[0]
    weak = ScriptedChat(lambda text: HERMES.render_action("Hm.", [ToolCall("step", {"to": 50})]))
    made = context(tmp_path / "b", plays([4]), models={"strong": weak})
    result = await StepCalibration(StecaConfig.parse(given)).run(made)
    assert [(one.reason, one.detail) for one in result.rejected] == [("not_repaired", "bad steps [4]")]
    made = context(tmp_path / "c", plays([2, 4, 6]), models={"strong": strong})
    result = await StepCalibration(StecaConfig.parse(given)).run(made)
    assert [one.reason for one in result.rejected] == ["mostly_bad"]
    made = context(tmp_path / "d", plays([]), models={"strong": strong})
    result = await StepCalibration(StecaConfig.parse(given)).run(made)
    assert [provenance_of(one)["repaired"] for one in result.kept] == [[]], "nothing was bad"


def test_what_the_assistant_says_in_a_task_is_no_step() -> None:
    given = (Message("user", "Hi."), Message("assistant", "Hello."), Message("user", "Add 2 and 3."))
    said = [Message("assistant", "I call."), Message("tool", "5"), Message("assistant", "It is 5.")]
    played = Trajectory(Task("sum", given), messages=[*given, *said])
    assert before_step(played, 1) == [*given, *said[:2]] and before_step(played, 0) == list(given)
    shown = transcript(played.messages, len(played.asked))
    assert "[assistant]\nHello." in shown and "[step 1, the agent]\nI call." in shown


def test_steca_without_anything_that_repairs_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nothing writes better steps: set rule .*, or repair"):
        StecaConfig.parse({"attempts": 1})


# TSR


async def test_the_best_of_several_carries_its_weight_and_its_siblings(tmp_path: Path) -> None:
    plans = {
        0: [turn("red", 1), open_door()],
        1: [turn("red", 1), turn("green", 2), turn("blue", 3), open_door()],
        2: [turn("red", 1), turn("green", 2), open_door()],
        3: [open_door()],
    }
    made = context(tmp_path / "s", Source([safe_task("a")], rollout(lambda t, a: plans[a])))
    settings = SearchConfig.parse({"search": "best_of", "attempts": 4})
    result = await TrajectorySearch(settings).run(made)
    assert attempts(result.kept) == [("a", 1)]
    facts = provenance_of(result.kept[0])
    assert facts["selection_weight"] == pytest.approx(0.25 / (1 - 0.75**4), abs=1e-5)
    assert facts["selected_from"] == 4 and facts["policy_mean"] == facts["siblings_mean"]
    assert sorted(one.trajectory.attempt for one in result.rejected) == [0, 2, 3]
    assert {one.reason for one in result.rejected} == {"sibling"}
    assert all(a.logprobs and any(a.logprobs) for one in result.rejected for a in one.trajectory.actions)
    [(best, worst)] = result.pairs
    assert (best.attempt, worst.attempt) == (1, 3) and result.numbers["selection_bias"] > 0


async def test_trees_branch_off_the_best_prefixes(tmp_path: Path) -> None:
    """Random dials on a fake engine; forked safes. Every leaf is kept for the baseline, with its weight."""
    draw = Random(0)

    def script(tokens: list[int], sampling: Any, session: str | None) -> str:
        dial = draw.choice(list(NUMBERS))
        done = draw.random() < 0.2
        return written(open_door() if done else turn(dial, NUMBERS[dial]))

    plays = rollout(lambda t, a: [])
    plays = replace(plays, engine=FakeEngine(script, plays.renderer.tokenizer))
    made = context(tmp_path / "s", Source([safe_task(f"s{n}") for n in range(4)], plays))
    settings = SearchConfig.parse({"attempts": 8, "roots": 2, "rounds": 2, "needs_success": False})
    result = await TrajectorySearch(settings).run(made)
    every = [*result.kept, *(one.trajectory for one in result.rejected)]
    assert len(every) == 32 and len(result.kept) == 4
    assert sum(one.branch is not None for one in every) >= 8
    for name in {one.task.id for one in every}:
        weights = leaf_weights([one for one in every if one.task.id == name])
        assert sum(weights.values()) == pytest.approx(1) and len(weights) == 8
    assert result.numbers["reward_of_kept"] >= result.numbers["reward_of_all"]


def test_weights_of_leaves_undo_the_search() -> None:
    """Coin flips: a tree that branches off good prefixes has good leaves, and the weights see through it."""
    draw, task = Random(1), Task("t")
    plain, weighted = [], []
    for _ in range(4000):
        flips = [[draw.random() < 0.5 for _ in range(4)] for _ in range(2)]
        leaves = [Trajectory(task, attempt=n) for n in range(2)]
        for number in range(2, 6):  # always off the prefix of two flips with the most heads
            parent = max(range(2), key=lambda n: sum(flips[n][:2]))
            flips.append(flips[parent][:2] + [draw.random() < 0.5 for _ in range(2)])
            leaves.append(Trajectory(task, attempt=number, branch=Branch(parent, 4)))
        weights = leaf_weights(leaves)
        plain.append(sum(map(sum, flips)) / len(flips))
        weighted.append(sum(weights[n] * sum(one) for n, one in enumerate(flips)))
    assert sum(plain) / len(plain) > 2.2, "the mean of the leaves is not the policy's"
    assert sum(weighted) / len(weighted) == pytest.approx(2.0, abs=0.05)


def test_weights_of_the_best_of_several_undo_the_choice() -> None:
    """Over all draws of four from four rewards: the weighted best is the policy's mean again, the best is
    not."""
    rewards = [0.0, 1.0, 2.0, 5.0]
    best = [max(drawn) for drawn in product(rewards, repeat=4)]
    weights = {reward: best_of_weight(reward, rewards) for reward in rewards}
    assert sum(best) / len(best) > 3.8
    assert sum(weights[one] * one for one in best) / len(best) == pytest.approx(sum(rewards) / 4)
    assert sum(weights[one] for one in best) / len(best) == pytest.approx(1)
    assert best_of_weight(1.0, [1.0, 1.0, 1.0]) == 1, "where all are the best, nothing was chosen"


async def test_turn_search_keeps_the_best_and_writes_its_candidates(tmp_path: Path) -> None:
    """Forked safes: right numbers are gone on from, everything else is written beside, with its score."""
    draw = Random(0)

    def script(tokens: list[int], sampling: Any, session: str | None) -> str:
        told = ByteTokenizer().decode(tokens)
        if told.count("click") >= 3 and draw.random() < 0.5:
            return written(open_door())
        return written(turn(draw.choice(list(NUMBERS)), draw.choice([1, 2, 3])))

    plays = rollout(lambda t, a: [])
    plays = replace(plays, engine=FakeEngine(script, plays.renderer.tokenizer))
    made = context(tmp_path / "s", Source([safe_task(f"s{n}") for n in range(3)], plays))
    settings = SearchConfig.parse({"search": "turns", "candidates": 6, "beam": 2})
    result = await TrajectorySearch(settings).run(made)
    assert len(result.kept) == 3 and all(one.reward == 1.5 for one in result.kept)
    for one in result.kept:
        assert 0 < provenance_of(one)["selection_weight"] < 1
        assert all(action.logprobs for action in one.actions)
    candidates = [one for one in result.rejected if one.reason == "candidate"]
    assert len(candidates) > 10 and all("score" in one.detail for one in candidates)
    assert all(any(a.logprobs or ()) for one in candidates for a in one.trajectory.actions)
