"""A step of the program as it travels from rank 0 to the others: its name, settings, and tensors by a schema.

A step is a frame of `remote/channel.py`: a head in JSON, and behind it tensors and images as they are. Rows are
dataclasses of tensors, whose fields are the schema; those in `LOCAL` stay on rank 0. Settings are written as in
a recipe. Nothing is unpickled, and nothing is called: reading fills the fields of dataclasses and settings of
Ludus' own modules. That a step is rank 0's is known before it is read (`store.py`).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ludus.core.config import Config
from ludus.remote.channel import pack_frame, unpack_frame
from ludus.training.data.batch import Batch

ROOM = "ludus"
"""The package whose classes travel."""
LOCAL: Mapping[type, frozenset[str]] = {Batch: frozenset({"turns"})}
"""Fields with episodes, which rank 0 alone has; on other ranks they have their defaults."""
_PLAIN = frozenset({type(None), bool, int, float, str})


def pack_step(step: str, arguments: tuple[Any, ...]) -> bytes:
    """A step as bytes."""
    writer = _Writer()
    head = {"step": step, "arguments": [writer.value(one) for one in arguments]}
    return pack_frame(head, b"".join(writer.body))


def unpack_step(message: bytes) -> tuple[str, tuple[Any, ...]]:
    """The step that `pack_step` has packed. Sequences are tuples here."""
    head, body = unpack_frame(message)
    return head["step"], _value(head["arguments"], body)


class _Writer:
    def __init__(self) -> None:
        self.body: list[bytes] = []
        self._length = 0
        self._places: dict[int, list[int]] = {}
        """The place of each object of bytes: an image that several spans show is sent once."""

    def value(self, given: Any) -> Any:
        """JSON: plain values and sequences as they are, all else as an object with the name of its kind."""
        kind = type(given)
        if kind in _PLAIN:
            return given
        if isinstance(given, list | tuple):
            return [self.value(one) for one in given]
        if kind is bytes:
            if id(given) not in self._places:
                self._places[id(given)] = self._append(given)
            return {"bytes": self._places[id(given)]}
        if isinstance(given, Tensor):
            flat = given.detach().cpu().reshape(-1)
            # an empty tensor may have a stride of 0, and then has no view as bytes
            data = flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""
            return {"tensor": [str(given.dtype), list(given.shape), self._append(data)]}
        if isinstance(given, Path):
            return {"path": str(given)}
        if kind.__module__.split(".")[0] == ROOM and "<" not in kind.__qualname__:
            reference = f"{kind.__module__}:{kind.__qualname__}"
            if isinstance(given, Config):
                return {"settings": [reference, given.model_dump(mode="json", exclude_unset=True)]}
            if _travels(kind):
                local = LOCAL.get(kind, ())
                names = [one.name for one in fields(given) if one.name not in local]
                return {"rows": [reference, {name: self.value(getattr(given, name)) for name in names}]}
        raise TypeError(
            f"a {kind.__module__}.{kind.__qualname__} cannot be sent to other trainer ranks: dataclasses, "
            "settings, tensors and plain values can"
        )

    def _append(self, data: bytes) -> list[int]:
        self.body.append(data)
        start, self._length = self._length, self._length + len(data)
        return [start, self._length]


def _travels(kind: type) -> bool:
    """Whether it is a dataclass; one derived from a dataclass may hold more than its fields."""
    return is_dataclass(kind) and "__dataclass_fields__" in vars(kind)


def _value(given: Any, body: memoryview) -> Any:
    if isinstance(given, list):
        return tuple(_value(one, body) for one in given)
    if not isinstance(given, dict):
        return given
    ((kind, what),) = given.items()
    if kind == "bytes":
        return bytes(body[what[0] : what[1]])
    if kind == "tensor":
        name, shape, (start, stop) = what
        flat = torch.empty(stop - start, dtype=torch.uint8)
        flat.numpy()[:] = np.frombuffer(body[start:stop], np.uint8)
        return flat.view(getattr(torch, name.removeprefix("torch."))).reshape(shape)
    if kind == "path":
        return Path(what)
    if kind == "settings":
        settings: Any = _class(what[0])
        if issubclass(settings, Config):
            return settings.model_validate(what[1])
    if kind == "rows":
        found = _class(what[0])
        if _travels(found):
            return _filled(found, {name: _value(one, body) for name, one in what[1].items()})
    raise TypeError(f"a step has a {kind} that is not what it is said to be")


def _class(reference: str) -> type:
    module, _, name = reference.partition(":")
    if module.split(".")[0] != ROOM:
        raise TypeError(f"a step names {reference}, which is no class of Ludus")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not isinstance(found, type):
        raise TypeError(f"a step names {reference}, which is no class")
    return found


def _filled(kind: Any, values: Mapping[str, Any]) -> Any:
    made = kind.__new__(kind)
    for one in fields(kind):
        value = values.get(one.name, one.default)
        assert value is not MISSING, f"{kind.__qualname__}.{one.name} has no default"
        object.__setattr__(made, one.name, value)
    return made
