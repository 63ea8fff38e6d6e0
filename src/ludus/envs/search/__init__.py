"""Search: answer questions by looking things up, one hop after the other.

Out of the box it asks about an invented encyclopedia (`fiction`): single facts, chains of two facts,
comparisons. A task may name another corpus, another way to search it and how many passages come back:
`envs = {"search": {"corpus": "wiki.jsonl", "method": "hybrid", "model": "minilm", "k": 5}}`. Files of questions
are loaded by `question_tasks`, and the known sets of the folder LUDUS_QA_DATA by their names.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError
from ludus.core.messages import ToolCall
from ludus.core.random import key, shuffled
from ludus.core.task import Task
from ludus.envs.data import ENDINGS, data_path, read_rows
from ludus.envs.env import Env
from ludus.envs.search import fiction
from ludus.rewards import reward
from ludus.rewards.text_rewards import exact_match
from ludus.tools import tool
from ludus.tools.library.retrieval import Method, Retriever, checked_query, open_retriever, shown

CORPUS = "ludus.envs.search.fiction:articles"
"""The built-in corpus, as the tool `search` takes it too."""
PROMPT = (
    "Answer the question with a name, a number or a few words. Look the facts up: search as often as you "
    "need, for one thing at a time.\nQuestion: {question}"
)
QA_DATA = "LUDUS_QA_DATA"
HELD_OUT = 200
"""Questions kept for evaluation. They are about entities that no training question names."""
_SEED = 20261116
_HELD_OUT_SHARE = 0.2


class Search(Env):
    """A corpus that all episodes share; what an instance holds is how its task wants it searched."""

    deterministic = True

    def __init__(self) -> None:
        self.k = 3
        self._retriever: Retriever | None = None

    def reset(
        self,
        task: Task,
        corpus: str = CORPUS,
        method: Method = "bm25",
        k: int = 3,
        model: str | None = None,
        index: str = "Flat",
    ) -> None:
        self._retriever, self.k = open_retriever(corpus, method, model, index=index), k

    @tool
    def search(self, query: str) -> str:
        """Search the encyclopedia for passages.

        Args:
            query: What to search for, in a few words.
        """
        assert self._retriever is not None
        return shown(self._retriever.search(checked_query(query), self.k))


# Tasks


def training_tasks() -> list[Task]:
    """Questions about four fifths of the entities."""
    return _tasks("train", _entities(held_out=False), None)


def held_out_tasks() -> list[Task]:
    """Questions about the others."""
    return _tasks("test", _entities(held_out=True), HELD_OUT)


def _entities(*, held_out: bool) -> frozenset[str]:
    chosen: set[str] = set()
    for kind, names in fiction.entities().items():
        order = shuffled(len(names), key(_SEED, "split", kind))
        bound = round(len(names) * _HELD_OUT_SHARE)
        chosen.update(names[i] for i in (order[:bound] if held_out else order[bound:]))
    return frozenset(chosen)


def _tasks(split: str, chosen: frozenset[str], count: int | None) -> list[Task]:
    questions = list(fiction.questions(chosen))
    order = shuffled(len(questions), key(_SEED, "order", split))[:count]
    return [
        Task.of(
            PROMPT.format(question=questions[i].text),
            questions[i].answer,
            id=f"search-{split}-{number}",
            envs={"search": {}},
            subtask=questions[i].subtask,
            question=questions[i].text,
            subjects=list(questions[i].subjects),
            relations=list(questions[i].relations),
        )
        for number, i in enumerate(order)
    ]


@reward(name="success")
def success(answer: str, target: Any) -> float:
    """1 if the answer is the target, as SQuAD compares them (exact match)."""
    return float(exact_match(answer, target))


@reward
def signed_match(answer: str, target: Any) -> float:
    """1 for an exact match and -1 otherwise: VerlTool's reward for search."""
    return 2.0 * float(exact_match(answer, target)) - 1.0


# Files of questions


def question_tasks(
    path: str, *, count: int | None = None, name: str | None = None, **search: Any
) -> list[Task]:
    """Tasks from a file of questions (.json, .jsonl, .parquet), or `count` of them, drawn by a fixed key.

    Rows are those of HotpotQA, 2WikiMultihopQA, MuSiQue, NQ, TriviaQA, PopQA, Bamboogle and Search-R1: a
    `question` and an `answer`, `answers`, `golden_answers` or `target`, which may be a list. `search` is what
    the environment gets: `corpus`, `method`, `k`, `model`.
    """
    label = name or Path(path).name.split(".")[0]
    rows = read_rows(Path(path))
    chosen = (
        range(len(rows)) if count is None else sorted(shuffled(len(rows), key(_SEED, label))[:count])
    )
    tasks = []
    for number in chosen:
        question, target = _question(rows[number], f"{path}, row {number + 1}")
        own = str(rows[number].get("id") or rows[number].get("_id") or number)
        tasks.append(
            Task.of(
                PROMPT.format(question=question),
                target,
                id=f"{label}-{own}",
                envs={"search": search},
                subtask=str(rows[number].get("type", label)),
                question=question,
            )
        )
    return tasks


def _question(row: Any, where: str) -> tuple[str, str | list[str]]:
    if isinstance(row, dict):
        fields = {str(name).lower(): value for name, value in row.items()}
        question = fields.get("question")
        found = next(
            (
                fields[name]
                for name in ("golden_answers", "answers", "answer", "target")
                if name in fields
            ),
            None,
        )
        if isinstance(found, dict):  # TriviaQA's
            found = (
                [found["value"], *found.get("aliases", [])] if "value" in found else found.get("text")
            )
        several = [found] if isinstance(found, str | int | float) else found
        if isinstance(question, str) and several:
            texts = list(dict.fromkeys(str(one) for one in several))
            return question, texts[0] if len(texts) == 1 else texts
    raise ConfigError(
        f"{where} is no question with its answer: it needs question and answer (or golden_answers)"
    )


_SETS = ("nq", "triviaqa", "popqa", "hotpot", "2wiki", "musique", "bamboogle")
"""The sets of Search-R1 and AgentGym-RL, by what their files' names contain."""


def evaluation_tasks(count: int = 400) -> list[Task]:
    """At most `count` questions of each known set in the folder LUDUS_QA_DATA (AgentGym-RL evaluates on 400).

    A set whose corpus is beside it (`2wiki_corpus.json.gz`) is searched there; for the others, give the agent
    the tool `search` or `web_search`, and no environment.
    """
    folder = data_path(QA_DATA, "the folder with the files of questions (docs/envs/search.md)")
    files = sorted(file for file in folder.iterdir() if file.name.endswith(ENDINGS))
    tasks: list[Task] = []
    for name in _SETS:
        for file in files:
            if name in file.name.lower() and "corpus" not in file.name:
                corpora = sorted(one for one in folder.glob("*corpus*") if name in one.name.lower())
                search = {"corpus": str(corpora[0])} if corpora else {}
                tasks += question_tasks(str(file), count=count, name=name, **search)
    if not tasks:
        raise ConfigError(f"{folder} ({QA_DATA}) holds no file named after one of {', '.join(_SETS)}")
    return tasks


# The demonstrator

_DOC = re.compile(r"^Doc \d+\(Title: ([^)\n]*)\) (.*)$", re.MULTILINE)


def expert(task: Task) -> Generator[ToolCall | str, str, None]:
    """Searches for one entity after the other, reads each fact in its article, and answers with the last.

    It is told which relations to follow (the task's metadata), and nothing of what it will find.
    """
    found: list[str] = []
    for subject in task.metadata["subjects"]:
        entity = subject
        for relation in task.metadata["relations"]:
            result = yield ToolCall("search", {"query": entity})
            article = dict(_DOC.findall(result)).get(entity, "")
            value = fiction.BY_NAME[relation].read(article, entity)
            if value is None:  # among many of that name: say what is wanted
                result = yield ToolCall("search", {"query": f"{entity} {relation}"})
                value = fiction.BY_NAME[relation].read(
                    dict(_DOC.findall(result)).get(entity, ""), entity
                )
            if value is None:
                yield "unknown"
                return
            entity = value
        found.append(entity)
    if len(found) == 1:
        yield found[0]
    else:
        subjects: list[str] = task.metadata["subjects"]
        yield subjects[found.index(min(found, key=int))]
