"""Ranks that tests call functions on: the steps of trainer ranks with one more, `call`.

What their own steps do is shown by whole runs; here a test has a model and a learner in its hands on
every rank. What `make` and `shard` have made is named by number in later calls, so each rank uses its own.
"""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from ludus.model.images import ImageProcessor
from ludus.training.config.run import ClusterConfig
from ludus.training.models.sharded import layers_of
from ludus.training.optim.sharding import RankGroup, ShardedModel, current_group, shard
from ludus.training.ranks.processes import start_ranks
from ludus.training.ranks.steps import Ranks, RankSteps


class CallSteps(RankSteps):
    """Any function on all ranks."""

    allowed = RankSteps.allowed | {"call"}

    def __init__(self, group: RankGroup = RankGroup()) -> None:  # noqa: B008 - it holds nothing
        super().__init__(group)
        self.objects: dict[int, Any] = {}
        self.given: Any = None
        """The call itself, on rank 0."""

    def call(self, packed: bytes, number: int | None) -> Any:
        function, args, kwargs = self.given or _Unpickler(packed, self.objects).load()
        self.given = None
        result = function(*args, **kwargs)
        if number is not None:
            self.objects[number] = result
        return result


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any, objects: dict[int, Any]) -> None:
        super().__init__(file)
        self._numbers = {id(one): number for number, one in objects.items()}

    def persistent_id(self, given: Any) -> int | None:
        return self._numbers.get(id(given))

    def reducer_override(self, given: Any) -> Any:
        if not isinstance(given, ImageProcessor):
            return NotImplemented
        with tempfile.TemporaryDirectory() as folder:
            given.save(Path(folder))
            files = {one.name: one.read_bytes() for one in Path(folder).iterdir() if one.is_file()}
        return loaded_processor, (files,)


def loaded_processor(files: dict[str, bytes]) -> ImageProcessor:
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            Path(folder, name).write_bytes(data)
        return ImageProcessor.load(folder)


def packed(given: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, {}).dump(given)
    return file.getvalue()


class _Unpickler(pickle.Unpickler):
    def __init__(self, packed: bytes, objects: dict[int, Any]) -> None:
        super().__init__(io.BytesIO(packed))
        self._objects = objects

    def persistent_load(self, number: int) -> Any:
        return self._objects[number]


class CalledRanks:
    """Several ranks, of which this process is rank 0; or this process alone."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.size = ranks.size
        self._made = 0

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._call(None, function, args, kwargs)

    def make(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._made += 1
        return self._call(self._made, function, args, kwargs)

    def shard(self, model: nn.Module) -> nn.Module:
        """A copy of the model, of which every rank has its part."""
        return model if self.size == 1 else self.make(shard_whole, packed(bare(model)))

    def publish(self, policy: nn.Module, model: nn.Module) -> None:
        """Gather what was trained into a whole model here."""
        if self.size == 1:
            return
        with torch.no_grad():
            known = dict(model.named_parameters())
            for name, whole in self.run(gathered, policy).items():
                known[name].copy_(whole)

    def _call(self, number: int | None, function: Any, args: Any, kwargs: Any) -> Any:
        if self.size == 1:
            return function(*args, **kwargs)
        steps = self.ranks.rank0
        assert isinstance(steps, CallSteps)
        steps.given = (function, args, kwargs)
        file = io.BytesIO()
        _Pickler(file, steps.objects).dump(steps.given)
        return self.ranks.perform("call", file.getvalue(), number)

    def close(self) -> None:
        self.ranks.close()


def bare(model: nn.Module) -> nn.Module:
    """A copy without the hooks by which transformers notes outputs; it puts them in again."""
    made = copy.deepcopy(model)
    for module in made.modules():
        module.__dict__.pop("_output_capturing_hooks_installed", None)
        for number, hook in list(module._forward_hooks.items()):
            if "output_captur" in hook.__qualname__:
                del module._forward_hooks[number]
    return made


def shard_whole(given: bytes) -> ShardedModel:
    model = pickle.loads(given)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):  # as its constructor does
            _CAN_RECORD_REGISTRY[module] = module._can_record_outputs
    return shard(model, current_group(), layers_of(model))


def gathered(policy: ShardedModel) -> dict[str, torch.Tensor]:
    return dict(policy.wholes(trainable=True))


ALONE = CalledRanks(Ranks())


def called_ranks(**cluster: Any) -> CalledRanks:
    config = ClusterConfig.parse({"trainer_ranks": 2, "timeout": 60, **cluster})
    started = start_ranks(config, torch.device("cpu"), threads=1, steps=CallSteps)
    return CalledRanks(started)
