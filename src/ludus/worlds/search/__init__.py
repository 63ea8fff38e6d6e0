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
from ludus.core.messages import Json, ToolCall
from ludus.core.random import key, shuffled
from ludus.core.task import Task
from ludus.envs.env import Env
from ludus.envs.world import World
from ludus.rewards import reward
from ludus.rewards.text_rewards import exact_match
from ludus.tools import tool
from ludus.tools.library.retrieval import Method, Retriever, checked_query, open_retriever, shown
from ludus.worlds import ENDINGS, data_path, read_rows
from ludus.worlds.search import fiction

CORPUS = "ludus.worlds.search.fiction:articles"
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
        corpus: str | None = None,
        method: Method = "bm25",
        k: int = 3,
        model: str | None = None,
        index: str = "Flat",
    ) -> None:
        if corpus is None and "dataset" in task.metadata:
            raise ConfigError(
                f"the task {task.id!r} of {task.metadata['dataset']} names no corpus, and its answer is not in "
                "the built-in encyclopedia: question_tasks(path, corpus='wiki.jsonl'), or leave the "
                "environment search out (agent.envs) and give the agent the tool search with a corpus, or "
                "web_search (docs/envs/search.md)"
            )
        self._retriever, self.k = open_retriever(corpus or CORPUS, method, model, index=index), k

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
    the environment gets: `corpus`, and `method`, `k`, `model`. Without it, the tasks name no environment: the
    agent has tools of its own. Each task's metadata has the set's `name` (the file's) as `dataset`.
    """
    if search and "corpus" not in search:
        raise ConfigError(
            f"question_tasks({path!r}): {', '.join(search)} say how the environment searches, and corpus is "
            "missing: name the corpus, or leave them out and give the agent a tool that searches"
        )
    label = name or Path(path).name.split(".")[0]
    return _drawn(label, [Path(path)], count, search)


def _drawn(label: str, files: list[Path], count: int | None, search: dict[str, Any]) -> list[Task]:
    rows = [
        (row, f"{file}, row {n}") for file in files for n, row in enumerate(read_rows(file), start=1)
    ]
    chosen = (
        range(len(rows)) if count is None else sorted(shuffled(len(rows), key(_SEED, label))[:count])
    )
    tasks = []
    for number in chosen:
        row, where = rows[number]
        question, target = _question(row, where)
        named = (row[field] for field in ("id", "_id") if row.get(field) not in (None, ""))
        tasks.append(
            Task.of(
                PROMPT.format(question=question),
                target,
                id=f"{label}-{next(named, number)}",
                envs={"search": search} if search else None,
                dataset=label,
                subtask=str(row.get("type", label)),
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
    """`count` questions of the known sets in the folder LUDUS_QA_DATA, for the environment `search`.

    As many of each set, as far as it has them: AgentGym-RL evaluates on 400 in all. Each set is searched in the
    corpus beside it: `2wiki_corpus.json.gz`, or `corpus.jsonl` for all that have none of their own.
    """
    found = _known_sets()
    folder = next(iter(found.values()))[0].parent
    corpora = sorted(folder.glob("*corpus*"))
    shared = [file for file in corpora if not any(name in file.name.lower() for name in _SETS)]
    searched: dict[str, Json] = {}
    for name in found:
        own = [file for file in corpora if name in file.name.lower()] or shared
        if not own:
            raise ConfigError(
                f"{folder} ({QA_DATA}) has no corpus for the questions of {name}: put one there as "
                f"{name}_corpus.jsonl, or as corpus.jsonl for all sets (.json, .gz too); or take "
                "evaluation_questions, which names no environment, and give the agent a tool that searches "
                "(docs/envs/search.md)"
            )
        searched[name] = {"corpus": str(own[0])}
    return _sampled(found, count, searched)


def evaluation_questions(count: int = 400) -> list[Task]:
    """The questions of `evaluation_tasks` without an environment: for an agent with tools of its own."""
    return _sampled(_known_sets(), count, {})


def _known_sets() -> dict[str, list[Path]]:
    """The files of each known set, without those of training questions and corpora."""
    folder = data_path(QA_DATA, "the folder with the files of questions (docs/envs/search.md)")
    files = sorted(file for file in folder.iterdir() if file.name.endswith(ENDINGS))
    held_out = [one for one in files if not re.search("corpus|train", one.name.lower())]
    found = {name: [one for one in held_out if name in one.name.lower()] for name in _SETS}
    if not any(found.values()):
        raise ConfigError(
            f"{folder} ({QA_DATA}) holds no file of questions for evaluation that is named after one of "
            f"{', '.join(_SETS)} (files with train or corpus in their name are none)"
        )
    return {name: those for name, those in found.items() if those}


def _sampled(sets: dict[str, list[Path]], count: int, searched: dict[str, Json]) -> list[Task]:
    """`count` questions in all: a small set gives what it has, and the others share the rest."""
    sizes = {name: sum(len(read_rows(file)) for file in files) for name, files in sets.items()}
    shares, left = {}, count
    for place, name in enumerate(sorted(sizes, key=lambda one: sizes[one])):
        shares[name] = min(sizes[name], -(-left // (len(sizes) - place)))
        left -= shares[name]
    return [
        task
        for name, files in sets.items()
        for task in _drawn(name, files, shares[name], searched.get(name, {}))
    ]


# The demonstrator

_DOC = re.compile(r"^Doc \d+\(Title: ([^)\n]*)\) (.*)$", re.MULTILINE)


def expert(task: Task) -> Generator[ToolCall | str, str, None]:
    """Searches for one entity after the other, reads each fact in its article, and answers with the last.

    It knows which relations to follow (the task's metadata), and nothing of what it will find.
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


WORLD = World(
    "search",
    "Answer questions of one or two hops by searching a corpus.",
    env=Search,
    rewards=(success,),
    training_tasks=training_tasks,
    held_out_tasks=held_out_tasks,
    expert=expert,
    extra="search",
    packages=("bm25s",),
    max_turns=8,
)
