"""A text that keeps a judge from answering scores the minimum; a judge that is broken scores nothing.

The judge is a server over real sockets that has its weak spots: at a text with "POISON" it answers nonsense,
refuses or breaks the connection.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from judge_script import attempts_in, code_in, ranking, verdict

from ludus.core import Group, InfraError, Message, Segment, SegmentKind, StopReason, Task, Trajectory
from ludus.observe import rollout_metrics
from ludus.rewards import Scorer, build_group_reward, build_reward
from ludus.rewards.judges.asking import BLANK_IMAGE
from openai_server import OpenAIServer, Raw, chat, cut_off, error, serving

Json = dict[str, Any]
Reply = Callable[[Json], Json | Raw]
TASK = Task.of("Capital of France?", "Paris, of course", id="france")
POISON = "POISON"
WEAK_SPOTS: dict[str, Callable[[], Json | Raw]] = {
    "nonsense": lambda: chat("I had rather talk about POISON."),
    "refusal": lambda: error(400, "the content filter has found something"),
    "broken": lambda: error(500, "out of memory"),
    "cut off": cut_off,
}


def attempt(said: str, number: int = 0, turns: int = 1, task: Task = TASK) -> Trajectory:
    one = Trajectory(task, answer=said, stop=StopReason.ANSWERED, attempt=number, seed=number)
    action = Segment(SegmentKind.ACTION, [1], [0.0])
    one.sequences[0].segments = [Segment(SegmentKind.PROMPT, [0]), *[action] * turns]
    one.messages = [*task.messages, *[Message("assistant", said)] * turns]
    return one


def group_of(*said: str) -> Group:
    return Group(TASK, [attempt(text, number) for number, text in enumerate(said)])


def shown(body: Json) -> str:
    return json.dumps(body["messages"][1]["content"])


def weak(reply: Reply, spot: str) -> Reply:
    return lambda body: WEAK_SPOTS[spot]() if POISON in shown(body) else reply(body)


def at(server: OpenAIServer, name: str, **options: Any) -> Any:
    model = {"address": f"{server.url}#judge", "retries": 0}
    build = build_group_reward if name == "ruler" else build_reward
    return build({"reward": name, "model": model, **options})


def argued(body: Json) -> Json:
    trace = {"inputs": "1", "steps": "a", "outcome": "b"}
    found = {"code": code_in(body), "assumptions": ["x"], "traces": [trace], "conclusion": "correct"}
    return chat(json.dumps(found))


def stepped(body: Json) -> Json:
    steps = [[1], *[[]] * (shown(body).count("<action-") - 1)]
    return chat(json.dumps({"code": code_in(body), "steps": steps}))


JUDGES: dict[str, tuple[dict[str, Any], Reply, float]] = {
    "judge": ({"dimensions": {"a": 1, "b": 1}}, lambda b: chat(verdict(b, {"a": 10, "b": 10})), 1.0),
    "code_quality": (
        {"dimensions": {"a": 1}},
        lambda b: chat(verdict(b, {"a": 10})),
        1.0,
    ),
    "model_match": (
        {"right": 1.0, "wrong": -1.0},
        lambda b: chat(json.dumps({"code": code_in(b), "match": True})),
        1.0,
    ),
    "semi_formal": ({"graded": True}, argued, 1.0),
    "process_judge": ({}, stepped, 1.0),
}
LEAST = {"model_match": -1.0}


@pytest.mark.parametrize("spot", WEAK_SPOTS)
@pytest.mark.parametrize("name", JUDGES)
async def test_a_text_that_stops_the_judge_scores_the_minimum(name: str, spot: str) -> None:
    options, reply, best = JUDGES[name]
    task = Task.of("Capital of France?", "Paris, of course", id="france", checklist=["named"])
    with serving(weak(reply, spot)) as server:
        scorer = Scorer([at(server, name, **options)])
        good, bad = (attempt(said, turns=2, task=task) for said in ("It is Paris.", f"{POISON}!"))
        await scorer.score(good)
        await scorer.score(bad)
        asked = len(server.asked)
    assert good.reward == best and bad.reward == LEAST.get(name, 0.0)
    assert bad.counts["judge/unanswered"] == 1 and "judge/unanswered" not in good.counts
    assert rollout_metrics([Group(task, [good, bad])])["judge/unanswered"] == 0.5
    assert asked <= 1 + 3 + 1 + 1, "the text, at most three times, a control, and the text again"


@pytest.mark.parametrize("spot", WEAK_SPOTS)
@pytest.mark.parametrize("name", JUDGES)
async def test_a_judge_that_is_broken_scores_nothing(name: str, spot: str) -> None:
    task = Task.of("Capital of France?", "Paris, of course", id="france", checklist=["named"])
    with serving(lambda body: WEAK_SPOTS[spot]()) as server:
        one = attempt("It is Paris.", task=task)
        with pytest.raises(InfraError):
            await Scorer([at(server, name, **JUDGES[name][0])]).score(one)
        assert len(server.asked) <= 6
    assert one.reward is None and "judge/unanswered" not in one.counts


async def test_a_task_that_stops_the_judge_is_no_fault_of_an_attempt() -> None:
    options, reply, _ = JUDGES["judge"]
    task = Task.of(f"What is {POISON}?", id="poison")
    with serving(weak(reply, "nonsense")) as server:
        one = attempt("Fish.", task=task)
        with pytest.raises(InfraError):
            await Scorer([at(server, "judge", **options)]).score(one)
    assert one.reward is None


async def test_an_error_that_passes_is_asked_again() -> None:
    options, reply, best = JUDGES["judge"]
    with serving(reply) as server:
        server.faults = [error(500, "hiccup")]
        one = attempt("It is Paris.")
        await Scorer([at(server, "judge", **options)]).score(one)
    assert one.reward == best and "judge/unanswered" not in one.counts


async def test_an_answered_control_is_remembered_while_the_judge_answers() -> None:
    """Eight attempts at a task answer with nonsense's cause: one control question for all of them."""
    options, reply, _ = JUDGES["judge"]
    with serving(weak(reply, "nonsense")) as server:
        scorer = Scorer([at(server, "judge", attempts=2, **options)])
        played = [attempt(f"{POISON} {n}") for n in range(8)]
        for one in played:
            await scorer.score(one)
        assert len(server.asked) == 8 * 2 + 1
    assert [one.reward for one in played] == [0.0] * 8


async def test_what_a_cache_remembers_does_not_speak_for_the_judge(tmp_path: Any) -> None:
    """The control was answered once and is in the cache; now the judge is gone, and nobody is to blame."""
    options, reply, _ = JUDGES["judge"]
    model: dict[str, Any] = {"retries": 0, "cache": str(tmp_path / "cache.sqlite")}
    with serving(weak(reply, "refusal")) as server:
        model["address"] = f"{server.url}#judge"
        judge = build_reward({"reward": "judge", "model": model, **options})
        one = attempt(f"{POISON} 1")
        await Scorer([judge]).score(one)
        assert one.reward == 0.0
        server.reply = lambda body: error(500, "gone")
        other = attempt("It is Paris.")
        with pytest.raises(InfraError):
            await Scorer([judge]).score(other)


async def test_a_judge_of_images_is_asked_about_a_image() -> None:
    """One that cannot read any is broken, even if it answers questions without."""

    def blind(body: Json) -> Json | Raw:
        if isinstance(body["messages"][1]["content"], list):
            return error(400, "this model reads text only")
        return chat(verdict(body, {"a": 10}))

    with serving(blind) as server:
        one = attempt("see")
        one.messages[-1] = Message("assistant", "see", media=(BLANK_IMAGE,))
        with pytest.raises(InfraError, match="text only"):
            await Scorer([at(server, "judge", dimensions={"a": 1}, images=True)]).score(one)


def test_the_blank_image_can_be_read() -> None:
    from io import BytesIO

    image_module = pytest.importorskip("PIL.Image")
    data = BLANK_IMAGE.data
    assert data is not None
    with image_module.open(BytesIO(data)) as image:
        assert image.size == (64, 64) and image.getpixel((5, 5)) == 255


# RULER: only the culprit loses


@pytest.mark.parametrize("spot", WEAK_SPOTS)
@pytest.mark.parametrize("culprits", [{0}, {5}, {2, 7}, {0, 1, 2, 3, 4, 5, 6}, set(range(8))])
async def test_only_the_attempt_that_stops_the_ruler_loses(spot: str, culprits: set[int]) -> None:
    said = [f"{POISON} {n}" if n in culprits else f"score {n / 10}" for n in range(8)]
    reply = ranking(lambda text: float(text.split("score ")[1].split()[0]) if "score" in text else 0.05)
    with serving(weak(reply, spot)) as server:
        group = group_of(*said)
        await Scorer([], [at(server, "ruler", attempts=1)]).score_group(group)
        asked = len(server.asked)
    rest = [n for n in range(8) if n not in culprits]
    expected = [0.0 if n in culprits else n / 10 if len(rest) > 1 else 0.5 for n in range(8)]
    assert [one.reward for one in group.trajectories] == pytest.approx(expected)
    assert [one.counts.get("judge/unanswered", 0) for one in group.trajectories] == [
        float(n in culprits) for n in range(8)
    ]
    halving = 2 * len(culprits) * math.log2(8)
    again = spot == "refusal"  # the first one is taken for a refusal of the JSON mode
    assert asked <= 1 + again + 1 + halving + 1, "the group, a control, halves, and what is left"


async def test_equal_attempts_lose_together() -> None:
    reply = ranking(lambda text: float("red" in text))
    with serving(weak(reply, "nonsense")) as server:
        group = group_of("red", POISON, "blue", POISON)
        await Scorer([], [at(server, "ruler")]).score_group(group)
    assert [one.reward for one in group.trajectories] == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("spot", WEAK_SPOTS)
async def test_a_ruler_that_is_broken_leaves_the_group_unscored(spot: str) -> None:
    with serving(lambda body: WEAK_SPOTS[spot]()) as server:
        group = group_of("red", "blue", "green")
        with pytest.raises(InfraError):
            await Scorer([], [at(server, "ruler", attempts=2)]).score_group(group)
        assert len(server.asked) <= 4
    assert [one.reward for one in group.trajectories] == [None] * 3


async def test_a_question_that_is_too_long_as_a_whole_is_ours() -> None:
    """The judge can compare two attempts, and not four: no text is at fault."""
    good = ranking(lambda text: 0.5)

    def weak_of_mind(body: Json) -> Json:
        return good(body) if len(attempts_in(body)) < 4 else chat("too much")

    with serving(weak_of_mind) as server:
        group = group_of("a", "b", "c", "d")
        with pytest.raises(InfraError):
            await Scorer([], [at(server, "ruler", attempts=1)]).score_group(group)
    assert [one.reward for one in group.trajectories] == [None] * 4


async def test_a_judge_that_goes_while_halves_are_asked_about_blames_nobody() -> None:
    good = weak(ranking(lambda text: 0.5), "broken")
    with serving(good) as server:

        def dies(body: Json) -> Json | Raw:
            return good(body) if len(server.asked) <= 2 else error(500, "gone")

        server.reply = dies
        group = group_of(POISON, "b", "c", "d")
        with pytest.raises(InfraError):
            await Scorer([], [at(server, "ruler", attempts=1)]).score_group(group)
    assert [one.reward for one in group.trajectories] == [None] * 4
