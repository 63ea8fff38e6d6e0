"""Calls of rank 0 on the other ranks, as bytes: what travels, and what goes by its number instead."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ludus.core.task import Task
from ludus.core.trajectory import Trajectory

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OnLeader(Generic[T]):
    """An argument that exists on rank 0 alone; the other ranks get None."""

    value: T | None

    def __reduce__(self) -> Any:
        return OnLeader, (None,)


class _CallDumper(pickle.Pickler):
    """Objects that all ranks have go by number. Of an episode goes what training looks at."""

    def __init__(self, file: io.BytesIO, numbers: dict[int, int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._numbers = numbers

    def persistent_id(self, obj: Any) -> int | None:
        return self._numbers.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Task:  # prompts and metadata, which may be any object of the user's
            return Task, (obj.id, ())
        if type(obj) is Trajectory:
            fields: tuple[Any, ...] = (
                obj.task,
                obj.sequences,
                [],
                obj.answer,
                obj.stop,
                obj.failure,
                obj.rewards,
            )
            return Trajectory, (*fields, obj.reward, obj.attempt, obj.seed)
        return NotImplemented


class _CallLoader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, objects: dict[int, Any]) -> None:
        super().__init__(file)
        self._objects = objects

    def persistent_load(self, number: Any) -> Any:
        return self._objects[number]


def pack_call(message: Any, numbers: dict[int, int]) -> bytes:
    """`numbers` are those of the objects that all ranks have, by identity."""
    file = io.BytesIO()
    _CallDumper(file, numbers).dump(message)
    return file.getvalue()


def unpack_call(message: bytes, objects: dict[int, Any]) -> Any:
    """`objects` are this rank's own, by their numbers."""
    return _CallLoader(io.BytesIO(message), objects).load()
