"""Search: the invented encyclopedia, its questions, the demonstrator, files of questions, naive RAG."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from world_play import play_expert

pytest.importorskip("bm25s", reason="needs ludus-rl[search]")

from ludus.chat import Renderer, load_format
from ludus.core import ByteTokenizer, ConfigError, StopReason, ToolCall
from ludus.engine import FakeEngine
from ludus.envs import EnvPool
from ludus.rewards import Scorer
from ludus.rewards.text_rewards import f1
from ludus.rollouts import Demonstrator, RetrieveThenAnswer, Rollout, check_env
from ludus.tools import as_toolset, tool
from ludus.worlds.search import (
    Search,
    evaluation_questions,
    evaluation_tasks,
    expert,
    fiction,
    held_out_tasks,
    question_tasks,
    signed_match,
    success,
    training_tasks,
)

DATA = os.environ.get("LUDUS_QA_DATA")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for all tests of this file: the index is built once."""
    monkeypatch.setenv("LUDUS_CACHE", str(tmp_path_factory.getbasetemp() / "search-cache"))


def test_articles_state_the_facts_of_their_entity_and_of_no_other() -> None:
    articles = dict(fiction.articles())
    assert len(articles) == 610
    for name, text in list(articles.items())[::9]:
        kind = next(kind for kind, names in fiction.entities().items() if name in names)
        for relation in fiction.RELATIONS[kind]:
            value = fiction.facts()[name][relation.name]
            assert relation.read(text, name) == value and value in text
            if relation.kind:
                assert all(one.read(text, value) is None for one in fiction.RELATIONS[relation.kind])


def test_questions_are_stable_and_held_out_entities_are_new() -> None:
    train, held_out = training_tasks(), held_out_tasks()
    assert (len(train), len(held_out)) == (2042, 200) and train[17].id == "search-train-17"
    named = [
        {name for task in tasks for name in task.metadata["subjects"]} for tasks in (train, held_out)
    ]
    assert not named[0] & named[1]
    assert Counter(task.metadata["subtask"] for task in held_out) == {
        "1-hop": 93,
        "bridge": 88,
        "comparison": 19,
    }
    assert len({task.metadata["question"] for task in train + held_out}) == 2242


async def test_the_expert_answers_held_out_questions() -> None:
    played = await play_expert("search", held_out_tasks()[::12])
    assert all(t.failure is None and t.reward == 1.0 and not t.faults for t in played)
    assert {t.stop for t in played} == {StopReason.ANSWERED}


@pytest.mark.slow
async def test_the_expert_answers_every_question() -> None:
    played = await play_expert("search", [*held_out_tasks(), *training_tasks()])
    assert all(t.failure is None and t.reward == 1.0 for t in played)


async def test_the_contract_holds() -> None:
    calls = [ToolCall("search", {"query": query}) for query in ("Torwick", "Torwick 木 \ud800", "?")]
    assert not await check_env(Search, held_out_tasks()[0], calls, name="search")


def playing(says: list[str] | Any, **settings: Any) -> tuple[Rollout, EnvPool]:
    tokenizer, pool = ByteTokenizer(), EnvPool(Search, name="search", size=4)
    tags = load_format("tags", tags={"search": "search.query"}, result="information")
    rollout = Rollout(
        engine=FakeEngine(says, tokenizer),
        renderer=Renderer(tokenizer, tags, turns=settings.pop("turns", "chat")),
        scorer=Scorer([success, f1]),
        tools=as_toolset([]),
        pools={"search": pool},
        **settings,
    )
    return rollout, pool


async def test_search_r1s_form_inline() -> None:
    """Thought, search, information, answer in one turn, where nothing is generated before the information."""
    task = next(task for task in held_out_tasks() if task.metadata["subtask"] == "1-hop")
    entity = task.metadata["subjects"][0]
    says = [f"<think>I look it up.</think><search>{entity}</search>", f"<answer>{task.target}</answer>"]
    rollout, pool = playing(says, turns="inline")
    trajectory = await rollout.play(task, 0, 0)
    await pool.close()
    text = rollout.renderer.tokenizer.decode(trajectory.tokens)
    assert f"</search>\n<information>\nDoc 1(Title: {entity}) " in text and "</information>" in text
    assert trajectory.rewards == {"success": 1.0, "f1": 1.0}
    rollout, pool = playing([], agent=Demonstrator(expert), turns="inline")
    demonstration = await rollout.play(task, 0, 0)
    await pool.close()
    assert demonstration.rewards["success"] == 1.0
    assert f"</search>\n<information>\nDoc 1(Title: {entity}) " in rollout.renderer.tokenizer.decode(
        demonstration.tokens
    )


async def test_naive_rag_searches_once_with_the_question() -> None:
    task = held_out_tasks()[0]
    rollout, pool = playing([f"<answer>{task.target}</answer>"], agent=RetrieveThenAnswer())
    trajectory = await rollout.play(task, 0, 0)
    await pool.close()
    read = trajectory.messages[-2].content
    assert trajectory.reward == 2.0 and trajectory.turns == 1
    assert "Doc 1(Title: " in read and "Doc 3(Title: " in read


@pytest.mark.parametrize(
    ("answer", "scores"),
    [("Paris", (1.0, 1.0)), ("the  PARIS.", (1.0, 1.0)), ("in Paris", (0.0, -1.0)), ("", (0.0, -1.0))],
)
def test_rewards(answer: str, scores: tuple[float, float]) -> None:
    assert (success(answer, ["Paris", "Lutetia"]), signed_match(answer, "Paris")) == scores


@pytest.mark.parametrize(
    ("row", "target"),
    [
        ({"question": "q?", "answer": "yes", "type": "comparison"}, "yes"),  # HotpotQA
        ({"question": "q?", "answer": ["one", "one season"]}, ["one", "one season"]),  # NQ
        ({"id": "dev_1", "Question": "q?", "answer": ["a", "a"]}, "a"),  # Search-o1's 2Wiki
        ({"_id": "5a8", "question": "q?", "golden_answers": ["a", "b"]}, ["a", "b"]),  # Search-R1
        ({"question": "q?", "answer": {"value": "a", "aliases": ["b"]}}, ["a", "b"]),  # TriviaQA
        ({"question": "q?", "answer": 1999}, "1999"),
        ({"id": 0, "question": "q?", "answer": 0}, "0"),
    ],
)
def test_files_of_questions(tmp_path: Path, row: dict[str, Any], target: Any) -> None:
    (tmp_path / "dev.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "dev.json").write_text(json.dumps([row]))
    for name in ("dev.jsonl", "dev.json"):
        (task,) = question_tasks(str(tmp_path / name), corpus="wiki.jsonl", k=5)
        assert task.target == target and task.envs == {"search": {"corpus": "wiki.jsonl", "k": 5}}
        assert task.metadata["dataset"] == "dev"
        assert task.messages[0].content.endswith("Question: q?") and task.metadata["question"] == "q?"


def test_a_wrong_file_of_questions_is_named(tmp_path: Path) -> None:
    (tmp_path / "dev.json").write_text('[{"question": "q?"}]')
    with pytest.raises(ConfigError, match="row 1 is no question"):
        question_tasks(str(tmp_path / "dev.json"))
    with pytest.raises(ConfigError, match="cannot be read"):
        question_tasks(str(tmp_path / "absent.json"))


def test_known_sets_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LUDUS_QA_DATA", raising=False)
    with pytest.raises(ConfigError, match="set LUDUS_QA_DATA"):
        evaluation_tasks()
    monkeypatch.setenv("LUDUS_QA_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match="holds no file"):
        evaluation_tasks()
    rows = [{"question": f"q{n}?", "answer": str(n)} for n in range(1000)]
    (tmp_path / "hotpot_dev.json").write_text(json.dumps(rows[:700]))
    (tmp_path / "hotpot_train.json").write_text(
        json.dumps([{"question": "trained", "answer": "x"}] * 99)
    )
    (tmp_path / "2wiki.json").write_text(json.dumps(rows[:10]))
    (tmp_path / "2wiki_corpus.json").write_text(json.dumps([{"title": "A", "text": "b"}]))
    with pytest.raises(
        ConfigError, match=r"no corpus for the questions of hotpot: .*hotpot_corpus\.jsonl"
    ):
        evaluation_tasks()
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"title": "A", "text": "b"}))
    tasks = evaluation_tasks()
    assert Counter(task.metadata["dataset"] for task in tasks) == {"hotpot": 390, "2wiki": 10}
    assert len({task.metadata["question"] for task in tasks if task.id.startswith("hotpot")}) == 390
    assert not any(task.metadata["question"] == "trained" for task in tasks)
    assert tasks == evaluation_tasks(), "the same sample each time"
    assert tasks[-1].envs["search"] == {"corpus": str(tmp_path / "2wiki_corpus.json")}
    assert tasks[0].envs["search"] == {"corpus": str(tmp_path / "corpus.jsonl")}
    asked = evaluation_questions()
    assert [task.id for task in asked] == [task.id for task in tasks] and not any(t.envs for t in asked)


def test_the_questions_of_all_sets_are_as_many_as_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUDUS_QA_DATA", str(tmp_path))
    rows = [{"question": f"q{n}?", "answer": str(n)} for n in range(125)]
    sets = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
    for name in sets:
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = Counter(task.metadata["dataset"] for task in evaluation_questions())
    assert sum(found.values()) == 400 and set(found.values()) == {57, 58} and len(found) == 7
    assert len(evaluation_questions(10_000)) == 7 * 125


async def test_questions_of_a_file_are_asked_of_an_agent_with_tools_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "dev.json").write_text('[{"question": "Who wrote Emma?", "answer": "Jane Austen"}]')
    (task,) = question_tasks(str(tmp_path / "dev.json"))
    rollout, pool = playing(["<search>Emma</search>", "<answer>Jane Austen</answer>"])
    with pytest.raises(ConfigError, match=r"names no corpus.*corpus='wiki\.jsonl'.*web_search"):
        await rollout.play(task, 0, 0)  # the run has the environment, and its corpus is an invented one
    await pool.close()
    asked: list[str] = []

    @tool
    def search(query: str) -> str:
        """Search."""
        asked.append(query)
        return "Emma is a novel by Jane Austen."

    rollout.pools, rollout.tools = {}, as_toolset([search])
    trajectory = await rollout.play(task, 1, 0)
    assert trajectory.reward == 2.0 and asked == ["Emma"]
    with pytest.raises(ConfigError, match="k say how the environment searches, and corpus is missing"):
        question_tasks(str(tmp_path / "dev.json"), k=5)


@pytest.mark.worlds
@pytest.mark.skipif(DATA is None, reason="needs LUDUS_QA_DATA")
async def test_the_published_sets_load_and_can_be_searched() -> None:
    counts = Counter(task.metadata["dataset"] for task in evaluation_questions())
    assert sum(counts.values()) == 400 and counts.keys() >= {"nq", "hotpot", "2wiki", "bamboogle"}
    task = next(task for task in evaluation_questions() if task.metadata["dataset"] == "2wiki")
    env = Search()
    env.reset(task, corpus=f"{DATA}/2wiki_corpus.json.gz")
    assert env.search("queen of Lotharingia").startswith("Doc 1(Title: Teutberga) ")
