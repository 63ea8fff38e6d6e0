"""Decontamination: examples of tasks that are held out, or of their near copies, are left out.

A task is what it asks, with what its environments are given. Two tasks are the same when their texts overlap
(Jaccard of runs of three words above a threshold), their numbers are the same, and so are the arguments of
their environments: templates differ by a number, and a game's tasks by its arguments alone.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from ludus.core.messages import Message
from ludus.core.task import Task
from ludus.observe import dump_value
from ludus.synth.quality.similarity import DuplicateIndex, shingles, sketch

_NUMBER = re.compile(r"\d+(?:\.\d+)?")


class HeldOut:
    """The tasks that nothing may be learned from."""

    def __init__(self, tasks: Sequence[Task], threshold: float = 0.8) -> None:
        self._indexes: dict[tuple[str, tuple[str, ...]], DuplicateIndex] = {}
        self._names: defaultdict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
        for task in tasks:
            text = asked(task.messages)
            place = _place(task, text)
            index = self._indexes.setdefault(place, DuplicateIndex(threshold))
            index.add(sketch(shingles(_plain(text))))
            self._names[place].append(task.id)

    def find(self, task: Task, messages: Sequence[Message]) -> tuple[str, float] | None:
        """The held-out task that an example is of, and how alike their texts are."""
        for text in {asked(task.messages), asked(messages)} - {""}:
            place = _place(task, text)
            index = self._indexes.get(place)
            found = None if index is None else index.find(sketch(shingles(_plain(text))))
            if found is not None:
                return self._names[place][found[0]], found[1]
        return None


def asked(messages: Sequence[Message]) -> str:
    """What the user says before the assistant does."""
    texts: list[str] = []
    for message in messages:
        if message.role == "assistant":
            break
        if message.role == "user":
            texts.append(message.content)
    return "\n".join(texts)


def _place(task: Task, text: str) -> tuple[str, tuple[str, ...]]:
    return dump_value(dict(task.envs))[0], tuple(sorted(_NUMBER.findall(text)))


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))
