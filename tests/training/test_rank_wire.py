"""What rank 0 sends to other ranks: all of it arrives, as it was, and nothing that arrives is executed."""

from __future__ import annotations

import dataclasses
import math
import pickle
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from ragged_episodes import branched, tiny_model
from torch import Tensor

from ludus.algos import TreeNodes
from ludus.core.messages import MediaSpan
from ludus.remote.channel import pack_frame
from ludus.training import (
    Batch,
    Learner,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    PreferenceConfig,
    RLConfig,
    policy_rows,
    policy_update,
)
from ludus.training.models.sharded import ModelSource
from ludus.training.optim.policy_update import PolicyRows
from ludus.training.ranks import wire
from ludus.training.ranks.steps import StagePlan
from ludus.training.ranks.wire import LOCAL, pack_step, unpack_step
from ludus.training.stages.preference import PreferenceRows

SENT = [PolicyRows, PreferenceRows, Batch]
"""The rows of the steps."""


def sent(value: Any) -> Any:
    step, (arrived,) = unpack_step(pack_step("train_step", (value,)))
    assert step == "train_step"
    return arrived


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
        made, hints = kind.__new__(kind), typing.get_type_hints(kind, localns={"TreeNodes": TreeNodes})
        for one in dataclasses.fields(kind):
            object.__setattr__(made, one.name, self.of(hints[one.name]))
        return made


def default_of(one: dataclasses.Field[Any]) -> Any:
    make: Any = one.default_factory
    return make() if one.default is dataclasses.MISSING else one.default


def assert_arrived(value: Any, arrived: Any, left: list[str]) -> None:
    """Field by field, whatever a class's own comparison looks at; sequences arrive as tuples."""
    if isinstance(value, list | tuple):
        assert isinstance(arrived, tuple) and len(arrived) == len(value)
        for mine, theirs in zip(value, arrived, strict=True):
            assert_arrived(mine, theirs, left)
        return
    assert type(arrived) is type(value)
    if dataclasses.is_dataclass(value):
        for one in dataclasses.fields(value):
            name = f"{type(value).__name__}.{one.name}"
            if one.name in LOCAL.get(type(value), ()):
                left.append(name)
                assert getattr(arrived, one.name) == one.default, name
            else:
                assert_arrived(getattr(value, one.name), getattr(arrived, one.name), left)
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
    assert {Batch, MediaSpan} <= samples.seen
    assert set(left) == {"Batch.turns"}


@dataclasses.dataclass(slots=True)
class Grown:
    """A class that has got a field since."""

    old: int
    new: str = "unknown"


class Derived(Grown):
    more = 0


def test_a_field_that_is_added_travels(monkeypatch: Any) -> None:
    for kind in (Grown, Derived):  # only classes of Ludus travel
        with pytest.raises(TypeError, match="sent to other trainer ranks"):
            sent(kind(1))
    monkeypatch.setattr(wire, "ROOM", __name__)
    assert sent(Grown(1, "known")) == Grown(1, "known")
    with pytest.raises(TypeError, match=r"Derived cannot be sent"):
        sent(Derived(1))


def test_episodes_stay_where_they_were_played() -> None:
    played = branched(tiny_model(), seed=2)
    for episodes in (played, played.groups[0].trajectories[0]):
        with pytest.raises(TypeError, match="cannot be sent to other trainer ranks"):
            sent(episodes)


@pytest.mark.parametrize("algorithm", ["grpo", "tree_grpo"])
def test_rows_that_were_sent_make_the_same_update(algorithm: str) -> None:
    """Of trees, whose shared turns are trained once; bit for bit."""
    config = RLConfig.parse({"algorithm": algorithm, "updates": 2})
    rows = policy_rows(branched(tiny_model(), seed=2), config)
    metrics, weights = [], []
    for given in (rows, sent(rows)):
        model = tiny_model()
        learner = Learner(model, OptimizerConfig(learning_rate=1e-2), 10)
        metrics.append(policy_update(learner, given, config, reference=None, critic=None))
        weights.append(list(model.parameters()))
    assert metrics[0] == metrics[1] and metrics[0]["gradient_norm"] > 0
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_settings_arrive_as_they_were(tmp_path: Path) -> None:
    given = (
        RLConfig.parse({"algorithm": "ppo", "kl": 0.1, "broken": {"no_answer": "mask", "tool_error": -0.5}}),
        PreferenceConfig(loss="kto"),
        ModelConfig(name="tiny", lora=LoraConfig(rank=4)),
    )  # fmt: skip
    arrived = sent(given)
    assert arrived == given and list(map(type, arrived)) == list(map(type, given))
    for mine, theirs in zip(given, arrived, strict=True):
        assert theirs.model_fields_set == mine.model_fields_set
    plan = StagePlan(given[0], 3, 2**70, 0.1)
    assert sent(plan) == plan
    source = ModelSource(given[2], 5, str(tmp_path))
    assert sent((source, None, tmp_path, True)) == (source, None, tmp_path, True)


def test_plain_values_and_tensors_arrive_as_they_were() -> None:
    values = (
        None, True, -(2**70), 0.1, math.inf, "a\udc00 \u2603\x00", b"", b"\x00\xff", (), (1, (2, "x")),
    )  # fmt: skip
    arrived = sent(values)
    assert arrived == values and list(map(type, arrived)) == list(map(type, values))
    assert math.isnan(sent(math.nan)) and sent([1, [2]]) == (1, (2,))
    tensors = [
        torch.randn(3, 2, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)
    ]
    tensors += [torch.tensor(3), torch.empty(0, 4), torch.tensor([True, False]), torch.randn(4, 6).T[1:]]
    for mine, theirs in zip(tensors, sent(tensors), strict=True):
        assert theirs.dtype == mine.dtype and torch.equal(theirs, mine)
    theirs += 1  # its memory is its own, and can be written
    image = b"an image " * 1000
    spans = [MediaSpan("hash", at, at + 1, image) for at in range(20)]
    assert len(pack_step("train_step", (spans,))) < 2 * len(image) + 20 * 400, "its bytes are sent once"
    assert all(one.data == image for one in sent(spans))


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
            sent(unknown)


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
    values: list[Any] = [
        {"rows": ["pathlib:Path", {"_raw_paths": [str(mark)]}]},
        {"rows": ["subprocess:Popen", {"args": ["touch", str(mark)]}]},
        {"rows": ["ludus.core.registry:import_object", {"reference": f"{tmp_path}/x.py:y"}]},
        {"settings": ["os:system", f"touch {mark}"]},
        {"settings": ["subprocess:Popen", ["touch", str(mark)]]},
        {"unheard": "of"},
    ]
    for value in values:
        with pytest.raises((TypeError, ValueError)):
            unpack_step(pack_frame({"step": "train_step", "arguments": [value]}))
    assert not mark.exists()
