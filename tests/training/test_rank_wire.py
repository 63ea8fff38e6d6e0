"""What rank 0 sends to other ranks: all of it arrives, as it was, and nothing that arrives is executed."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ragged_episodes import branched, tiny_model
from torch import Tensor

from ludus.core import Trajectory
from ludus.core.trajectory import Segment, SegmentKind
from ludus.remote.channel import pack_frame
from ludus.training import (
    Batch,
    Learner,
    OptimizerConfig,
    PreferenceConfig,
    RLConfig,
    RolloutBatch,
)
from ludus.training.ranks import wire
from ludus.training.ranks.wire import LEFT_BEHIND, pack_step, unpack_step
from ludus.training.stages.preference import Labelled, Pair

SENT = [RolloutBatch, Batch, Pair, Labelled, Trajectory]
"""The rows of the program's steps."""


def sent(value: Any) -> Any:
    return unpack_step(pack_step(value))


class Samples:
    """A value of any type, in which no two numbers and no two texts are the same, and nothing is a default."""

    def __init__(self) -> None:
        self.count = 0
        self.seen: set[type] = set()

    def of(self, hint: Any) -> Any:
        origin, inner = typing.get_origin(hint), typing.get_args(hint)
        self.count += 1
        if origin in (typing.Union, types.UnionType):
            return self.of(next(one for one in inner if one is not type(None)))
        if origin is typing.Literal:
            return inner[-1]
        if origin in (list, Sequence):
            return [self.of(inner[0]), self.of(inner[0])]
        if origin is tuple:
            return tuple(self.of(one) for one in ([inner[0]] * 2 if inner[-1] is ... else inner))
        if origin is frozenset:
            return frozenset({self.of(inner[0])})
        if origin in (dict, Mapping):
            return {self.of(inner[0]): self.of(inner[1])}
        if hint is Tensor:
            return torch.full((2,), self.count)
        if hint is Any:
            return [f"any {self.count}", {"of": self.count}]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            return self.instance(hint)
        if isinstance(hint, type) and issubclass(hint, Enum):
            return list(hint)[-1]
        made = {str: f"text {self.count}", int: self.count, float: self.count / 7, bool: True}
        return made[hint] if hint in made else hint(b"%d" % self.count)  # bytes

    def instance(self, kind: Any) -> Any:
        """Without its constructor, which may refuse such values."""
        self.seen.add(kind)
        made, hints = kind.__new__(kind), typing.get_type_hints(kind)
        for one in dataclasses.fields(kind):
            object.__setattr__(made, one.name, self.of(hints[one.name]))
        return made


def default_of(one: dataclasses.Field[Any]) -> Any:
    make: Any = one.default_factory
    return make() if one.default is dataclasses.MISSING else one.default


def assert_arrived(value: Any, arrived: Any, left: list[str]) -> None:
    """Field by field, whatever a class's own comparison looks at."""
    assert type(arrived) is type(value)
    if dataclasses.is_dataclass(value):
        for one in dataclasses.fields(value):
            name = f"{type(value).__name__}.{one.name}"
            if one.name in LEFT_BEHIND.get(type(value), ()):
                left.append(name)
                assert getattr(arrived, one.name) == default_of(one), name
            else:
                assert_arrived(getattr(value, one.name), getattr(arrived, one.name), left)
    elif isinstance(value, list | tuple):
        assert len(arrived) == len(value)
        for mine, theirs in zip(value, arrived, strict=True):
            assert_arrived(mine, theirs, left)
    elif isinstance(value, dict):
        assert list(arrived) == list(value)
        assert_arrived(list(value.values()), list(arrived.values()), left)
    elif isinstance(value, Tensor):
        assert arrived.dtype == value.dtype and torch.equal(arrived, value)
    else:
        assert arrived == value


@pytest.mark.parametrize("kind", SENT)
def test_every_field_of_what_is_sent_arrives(kind: type) -> None:
    """Also of the classes in its fields. A new field is sent without anybody's doing, or fails here."""
    samples = Samples()
    value = samples.instance(kind)
    left: list[str] = []
    assert_arrived(value, sent(value), left)
    assert Segment in samples.seen
    assert set(left) <= {
        "Task.messages", "Task.target", "Task.envs", "Task.metadata", "Trajectory.messages",
        "Trajectory.seconds", "Trajectory.counts", "Trajectory.spans", "Trajectory.renders", "Segment.calls",
    }  # fmt: skip


@dataclasses.dataclass(slots=True)
class Grown:
    """A class that has got a field since."""

    old: int
    new: str = "unknown"
    itself: Grown | None = None


class Derived(Grown):
    more = 0


def test_a_field_that_is_added_travels_and_cycles_do(monkeypatch: Any) -> None:
    for kind in (Grown, Derived):  # only classes of Ludus travel
        with pytest.raises(TypeError, match="sent to other trainer ranks"):
            pack_step(kind(1))
    monkeypatch.setattr(wire, "ROOM", __name__)
    value = Grown(1, "known")
    value.itself = value
    arrived = sent(value)
    assert (arrived.old, arrived.new) == (1, "known") and arrived.itself is arrived
    with pytest.raises(TypeError, match=r"Derived cannot be sent"):
        pack_step(Derived(1))


def test_turns_that_branches_share_are_shared_there() -> None:
    batch = branched(tiny_model(), seed=2)
    arrived = sent(batch)

    def shape(given: RolloutBatch) -> list[list[int]]:
        known: dict[int, int] = {}
        return [
            [known.setdefault(id(s), len(known)) for s in t.sequences[0].segments]
            for group in given.groups
            for t in group.trajectories
        ]

    assert shape(arrived) == shape(batch)
    rows = shape(batch)
    assert len({one for row in rows for one in row}) < sum(map(len, rows))
    assert [t.branch for g in arrived.groups for t in g.trajectories] == [
        t.branch for g in batch.groups for t in g.trajectories
    ]


def test_plain_values_and_tensors_arrive_as_they_were(tmp_path: Path) -> None:
    values = [
        None, True, -(2**70), 0.1, math.inf, "a\udc00 \u2603\x00", b"", b"\x00\xff", [], [1, [2, "x"]],
        (), (1, (2,)), {1: "a", (2, 3): None, "x": {}}, {1, 2}, frozenset({(0, 1)}), tmp_path,
        SegmentKind.ACTION, [1] * 40, [0.5, -math.inf] * 20, [True, False] * 20, [1, 0.5] * 20,
        [2**70, 1] * 20,
        RLConfig.parse({"algorithm": "ppo", "kl": 0.1, "broken": {"no_answer": "mask", "tool_error": -0.5}}),
        PreferenceConfig(loss="kto"),
    ]  # fmt: skip
    arrived = sent(values)
    assert arrived == values and list(map(type, arrived)) == list(map(type, values))
    assert arrived[-2].model_fields_set == values[-2].model_fields_set  # type: ignore[union-attr]
    assert math.isnan(sent(math.nan)) and sent(np.float64(0.1)) == 0.1
    tensors = [
        torch.randn(3, 2, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)
    ]
    tensors += [torch.tensor(3), torch.empty(0, 4), torch.tensor([True, False]), torch.randn(4, 6).T[1:]]
    for mine, theirs in zip(tensors, sent(tensors), strict=True):
        assert theirs.dtype == mine.dtype and torch.equal(theirs, mine)
    theirs += 1  # its memory is its own, and can be written


def test_what_is_no_data_does_not_travel() -> None:
    model = tiny_model()
    for unknown in (
        model,
        lambda: None,
        model.eval,
        object(),
        Learner,
        Learner(model, OptimizerConfig(), 1),
    ):
        with pytest.raises(TypeError, match="sent to other trainer ranks"):
            pack_step(unknown)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_nothing_that_is_read_is_executed(tmp_path: Path) -> None:
    """Not even of a sender that has the key: classes are filled, and not called."""
    mark = tmp_path / "mark"
    for raw in (pickle.dumps(Bomb(mark)), b"", b"\x00" * 64):
        with pytest.raises(Exception):  # noqa: B017 - whatever it is
            unpack_step(raw)
    heads: list[Any] = [
        {"object": "pathlib:Path", "fields": {"_raw_paths": [str(mark)]}},
        {"object": "subprocess:Popen", "fields": {"args": ["touch", str(mark)]}},
        {"enum": ["os:system", f"touch {mark}"]},
        {"enum": ["subprocess:Popen", ["touch", str(mark)]]},
        {"unheard": "of"},
    ]
    for head in heads:
        with pytest.raises((TypeError, ValueError)):
            unpack_step(pack_frame({"step": head}))
    assert not mark.exists()
    assert json.loads(json.dumps(heads))
