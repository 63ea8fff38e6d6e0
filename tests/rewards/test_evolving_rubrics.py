"""Rubrics that evolve: strictness follows performance, criteria come and go, versions resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judge_script import code_in, evidence, verdict

from ludus.core import ConfigError, Group, Task
from ludus.rewards import Scorer, exact_match, synthetic_episode
from ludus.rewards.judges import EvolutionConfig, Judge, Rubric, load_rubric
from ludus.rewards.judges.rubric import STRICTNESS_LEVELS, next_strictness, spreads
from openai_server import OpenAIServer, chat, serving

TASK = Task.of("Capital of France?", "Paris")
RUBRIC = {
    "name": "capital",
    "strictness": "loose",
    "criteria": [
        {"id": "direction", "text": "It goes in the right direction.", "weight": 2},
        {"id": "manners", "text": "It is polite."},
        {"id": "exact", "text": "It is exactly right."},
    ],
}
PENALTY = {"loose": 0, "middle": 2, "strict": 4}
LEVEL_WORDS = {"lenient": "loose", "Be fair": "middle", "Be strict": "strict"}


def scripted(body: dict[str, Any]) -> Any:
    """Scores exact answers higher, manners always alike, and proposes a criterion about sources."""
    system = body["messages"][0]["content"]
    if "You improve the rubric" in system:
        assert "Paris" in evidence(body, "good-1")
        assert "Rome" in evidence(body, "bad-1")
        new = [
            {"id": "exact", "text": "Exactly right, once more."},  # known
            {"id": "politeness", "text": "It is polite, really polite."},  # the same in other words
            {"id": "sources", "text": "Claims name where they were found."},
            {"id": "too_many", "text": "One more than was asked for."},
        ]
        return chat(json.dumps({"code": code_in(body), "criteria": new}))
    level = next(level for words, level in LEVEL_WORDS.items() if words in system)
    is_right = "Paris" in evidence(body, "episode")
    criteria = [
        name
        for name in ("direction", "manners", "exact", "sources", "too_many")
        if f"- {name}:" in system
    ]
    scores = dict.fromkeys(criteria, (10 if is_right else 4) - PENALTY[level])
    return chat(verdict(body, scores | ({"manners": 5} if "manners" in criteria else {})))


def judge_at(server: OpenAIServer, **evolve: Any) -> Judge:
    model = {"address": f"{server.url}#tiny", "retries": 0}
    return Judge(model, rubric=RUBRIC, evolve={"every": 2, "min_spread": 0.05} | evolve)


async def play(scorer: Scorer, answers: list[str]) -> list[Group]:
    group = Group(TASK, [synthetic_episode(TASK, answer) for answer in answers])
    for trajectory in group.trajectories:
        await scorer.score(trajectory)
    await scorer.end_step([group])
    return [group]


async def test_a_rubric_evolves_with_the_policy(tmp_path: Path) -> None:
    with serving(scripted) as server:
        judge = judge_at(server, library=str(tmp_path))
        scorer = Scorer([judge])
        right = ["Paris", "Paris!", "Paris.", "Rome"]
        (first,) = await play(scorer, right)
        assert judge.rubric.version == 1  # not yet
        await play(scorer, right)
        assert judge.rubric.version == 2
        assert judge.rubric.strictness == "middle"
        assert [c.id for c in judge.rubric.criteria] == ["direction", "exact", "sources"]
        assert [c.id for c in judge.rubric.retired] == ["manners"]
        assert judge.rubric.weights == {"direction": 0.4444444444444444, "exact": 0.2222222222222222,
                                        "sources": 0.3333333333333333}  # fmt: skip
        (later,) = await play(scorer, right)
    one, other = first.trajectories[0], later.trajectories[0]
    assert (one.rewards["judge_version"], other.rewards["judge_version"]) == (1, 2)
    assert one.reward != other.reward  # the same episode, by another version
    assert "judge_sources" in other.rewards
    assert judge.evolution is not None
    assert judge.evolution.history[0]["retired"] == ["manners"]
    kept = sorted(file.name for file in tmp_path.iterdir())  # noqa: ASYNC240 - two small files
    assert kept == ["capital-v0001.json", "capital-v0002.json"]
    assert load_rubric(tmp_path / kept[1]) == judge.rubric


async def test_a_resumed_run_has_the_version_that_it_would_have_had() -> None:
    steps = [
        ["Paris", "Rome"],
        ["Paris", "Paris"],
        ["Rome", "Rome!"],
        ["Paris", "Rome"],
        ["Paris", "Rome"],
    ] * 2
    with serving(scripted) as server:
        whole, rest = judge_at(server), judge_at(server)
        found = []
        for number, answers in enumerate(steps):
            await play(Scorer([whole, exact_match]), answers)
            found.append(whole.rubric)
            if number == 4:
                saved = json.loads(json.dumps(whole.state_dict()))
        rest.load_state_dict(saved)
        for answers in steps[5:]:
            await play(Scorer([rest, exact_match]), answers)
    assert rest.rubric == whole.rubric
    assert rest.state_dict()["evolution"] == whole.state_dict()["evolution"]
    assert len({rubric.version for rubric in found}) > 2


async def test_a_model_that_proposes_nonsense_changes_nothing() -> None:
    def reply(body: dict[str, Any]) -> Any:
        said = body["messages"][0]["content"]
        return chat("a good idea!") if "improve the rubric" in said else scripted(body)

    with serving(reply) as server:
        judge = judge_at(server, every=1, stricter_above=0.99, looser_below=0.01, min_spread=0)
        await play(Scorer([judge]), ["Paris", "Rome"])
    assert judge.rubric.version == 1


@given(st.sampled_from(STRICTNESS_LEVELS), st.floats(0, 1))
def test_strictness_moves_one_level_at_most(level: Any, performance: float) -> None:
    config = EvolutionConfig()
    place, new = STRICTNESS_LEVELS.index(level), next_strictness(level, performance, config)
    moved = STRICTNESS_LEVELS.index(new) - place
    assert moved in (-1, 0, 1)
    assert moved <= 0 or performance >= config.stricter_above
    assert moved >= 0 or performance < config.looser_below


def test_spreads_tell_what_discriminates() -> None:
    window = [
        {"reward": reward, "scores": {"good": reward, "idle": 0.5, "inverse": 1 - reward}}
        for reward in (0.0, 0.2, 0.8, 1.0)
    ]
    assert spreads(window) == pytest.approx({"good": 0.8, "idle": 0.0, "inverse": -0.8})
    assert spreads(window[:1] * 4) == {}
    assert spreads([]) == {}


def test_a_rubric_that_evolves_begins_loose_unless_it_says_otherwise() -> None:
    criteria = [{"id": "a", "text": "A."}]
    assert Judge("policy", evolve=True).rubric.strictness == "loose"
    assert Judge("policy", rubric={"criteria": criteria}, evolve=True).rubric.strictness == "loose"
    own = {"criteria": criteria, "strictness": "middle"}
    assert Judge("policy", rubric=own, evolve=True).rubric.strictness == "middle"
    assert Judge("policy", rubric={"criteria": criteria}).rubric.strictness == "middle"


def test_rubric_files_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "rubric.toml"
    file.write_text('name = "r"\n[[criteria]]\nid = "a"\ntext = "A."\nweight = 2\n')
    assert load_rubric(file).weights == {"a": 1.0}
    file.write_text('[[criteria]]\nid = "a"\n[[criteria]]\nid = "a"\n')
    with pytest.raises(ConfigError, match="same id"):
        load_rubric(file)
    for wrong in (
        {},
        {"criteria": []},
        {"criteria": [{"id": "A b"}]},
        {"criteria": [{"id": "a", "weight": 0}]},
    ):
        with pytest.raises(ConfigError):
            Rubric.parse(wrong)
    with pytest.raises(ConfigError, match="looser_below"):
        Judge("policy", evolve={"looser_below": 0.9})
