"""A step of the program as it travels from rank 0 to the others: its name, settings, and tensors by a schema.

A step is a frame of `remote/channel.py`: a head in JSON, and behind it tensors, numbers and files as
they are. An object is written down by the schema of its class, field by field, so that a field that is added to
a class travels from then on; `LEFT_BEHIND` names the fields that do not. What is one object here (a turn that
branches of a tree share) is one object there.

Nothing is unpickled, and nothing is called: reading fills the fields of dataclasses and settings of Ludus' own
modules. That a step is rank 0's is known before it is read (`store.py`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, fields
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ludus.core.config import Config
from ludus.core.messages import Json
from ludus.core.task import Task
from ludus.core.trajectory import Segment, Trajectory
from ludus.remote.channel import pack_frame, unpack_frame

ROOM = "ludus"
"""The package whose classes travel."""
LEFT_BEHIND: Mapping[type, frozenset[str]] = {
    # what may be any object of the user's
    Task: frozenset({"messages", "target", "envs", "metadata"}),
    # what is read by people, by rewards and by metrics
    Trajectory: frozenset({"messages", "seconds", "counts", "spans", "renders"}),
    Segment: frozenset({"calls"}),
}
"""Fields that training does not look at; on other ranks they have their defaults."""

_MANY = 16
"""A list of so many numbers is sent as a tensor."""
_NUMBERS: Mapping[type, str] = {bool: "?", int: "<i8", float: "<f8"}
_PLAIN = frozenset({type(None), bool, int, float, str})
_GROUPS: Mapping[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_MAKERS: Mapping[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def pack_step(step: Any) -> bytes:
    """A step as bytes."""
    writer = _Writer()
    head = {"step": writer.value(step)}
    return pack_frame(head, b"".join(writer.body))


def unpack_step(message: bytes) -> Any:
    """The step that `pack_step` has packed."""
    head, body = unpack_frame(message)
    return _Reader(body).value(head["step"])


class _Writer:
    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}
        """Objects written already, by identity: objects by their number, bytes by their place in the body."""
        self._objects = self._length = 0
        self.body: list[bytes] = []

    def value(self, given: Any) -> Any:
        """JSON: plain values as they are, lists as lists, all else as an object with the name of its kind."""
        kind = type(given)
        if kind in _PLAIN:
            return given
        if kind is list:
            return self._list(given)
        if kind in _GROUPS:
            return {_GROUPS[kind]: [self.value(one) for one in given]}
        if isinstance(given, dict):
            return {"dict": [[self.value(name), self.value(one)] for name, one in given.items()]}
        if kind is bytes:
            return {"bytes": self._place(given)}
        if isinstance(given, Tensor):
            flat = given.detach().cpu().reshape(-1)
            # an empty tensor may have a stride of 0, and then has no view as bytes
            body = flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""
            return {"tensor": [str(given.dtype), list(given.shape), self._append(body)]}
        if isinstance(given, np.generic):
            return self.value(given.item())
        if isinstance(given, PurePath):
            return {"path": str(given)}
        if isinstance(given, Enum):
            return {"enum": [_reference(kind), self.value(given.value)]}
        return self._object(given)

    def _list(self, given: list[Any]) -> Any:
        """Many numbers of one kind go as a tensor."""
        kinds = set(map(type, given)) if len(given) >= _MANY else set()
        if len(kinds) == 1 and (dtype := _NUMBERS.get(kinds.pop())) is not None:
            with suppress(OverflowError):
                return {"numbers": [dtype, self._append(np.array(given, dtype).tobytes())]}
        return given if _PLAIN.issuperset(map(type, given)) else [self.value(one) for one in given]

    def _object(self, given: Any) -> Json:
        kind = type(given)
        if id(given) in self._seen:
            return {"same": self._seen[id(given)]}
        names = _names(kind)
        if names is None:
            raise TypeError(
                f"a {kind.__module__}.{kind.__qualname__} cannot be sent to other trainer ranks: dataclasses, "
                "settings, tensors and plain values can"
            )
        self._seen[id(given)], self._objects = self._objects, self._objects + 1
        filled = {name: self.value(getattr(given, name)) for name in names}
        more = {"set": sorted(given.model_fields_set)} if isinstance(given, Config) else {}
        return {"object": _reference(kind), "fields": filled, **more}

    def _place(self, data: bytes) -> list[int]:
        if id(data) not in self._seen:  # an image that several spans show is sent once
            self._seen[id(data)] = self._append(data)
        found: list[int] = self._seen[id(data)]
        return found

    def _append(self, data: bytes) -> list[int]:
        self.body.append(data)
        start, self._length = self._length, self._length + len(data)
        return [start, self._length]


class _Reader:
    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._made: list[Any] = []
        self._bytes: dict[int, bytes] = {}

    def value(self, given: Any) -> Any:
        if isinstance(given, list):
            return given if _PLAIN.issuperset(map(type, given)) else [self.value(one) for one in given]
        if not isinstance(given, dict):
            return given
        if "object" in given:
            return self._object(given)
        ((kind, what),) = given.items()
        if kind in _MAKERS:
            return _MAKERS[kind](self.value(one) for one in what)
        if kind == "dict":
            return {self.value(name): self.value(one) for name, one in what}
        if kind == "same":
            return self._made[what]
        if kind == "enum":
            return _found(what[0], _is_enum)(self.value(what[1]))
        return self._data(kind, what)

    def _data(self, kind: str, what: Any) -> Any:
        if kind == "path":
            return Path(what)
        if kind == "numbers":
            dtype, (start, stop) = what
            return np.frombuffer(self._body[start:stop], dtype).tolist()
        if kind == "bytes":
            start, stop = what
            return self._bytes.setdefault(start, bytes(self._body[start:stop])) if stop > start else b""
        name, shape, (start, stop) = what
        flat = torch.empty(stop - start, dtype=torch.uint8)
        flat.numpy()[:] = np.frombuffer(self._body[start:stop], np.uint8)
        return flat.view(_dtype(name)).reshape(shape)

    def _object(self, given: Json) -> Any:
        kind = _found(given["object"], lambda one: isinstance(one, type) and _names(one) is not None)
        place, made = len(self._made), kind.__new__(kind)
        self._made.append(made)
        filled = {name: self.value(one) for name, one in given["fields"].items()}
        if issubclass(kind, Config):
            self._made[place] = kind.model_construct(set(given["set"]), **filled)
            return self._made[place]
        for one in fields(kind):
            value = filled[one.name] if one.name in filled else _default(one)
            object.__setattr__(made, one.name, value)
        return made


def _names(kind: type) -> list[str] | None:
    """The fields of a class that travel; None for one that is neither a dataclass nor settings."""
    if issubclass(kind, Config):
        return list(kind.model_fields)
    if "__dataclass_fields__" not in vars(
        kind
    ):  # one derived from a dataclass may hold more than its fields
        return None
    left = LEFT_BEHIND.get(kind, frozenset())
    known: Any = kind
    return [one.name for one in fields(known) if one.name not in left]


def _default(one: Field[Any]) -> Any:
    make: Any = one.default_factory
    return one.default if one.default is not MISSING else make()


def _is_enum(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, Enum)


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return found


def _reference(kind: type) -> str:
    """Reference by which another process finds a class."""
    if kind.__module__.split(".")[0] != ROOM or "<" in kind.__qualname__:
        raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not sent to other trainer ranks")
    return f"{kind.__module__}:{kind.__qualname__}"


def _found(reference: str, fits: Callable[[Any], bool]) -> Any:
    module, _, name = reference.partition(":")
    if module.split(".")[0] != ROOM:
        raise TypeError(f"a step names {reference}, which is no class of Ludus")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not fits(found):
        raise TypeError(f"a step names {reference}, which is not what it is said to be")
    return found
