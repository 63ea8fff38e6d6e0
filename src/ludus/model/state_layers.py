"""Layers that keep a state: convolutions over the last tokens, and recurrences (gated delta rule, Mamba, KDA).

What attention keeps of a sequence grows with it; such a layer keeps tensors of a fixed size. transformers shows
them to the layer through its cache (`update_conv_state`, `update_recurrent_state`), and a module whose forward
calls these is a state layer here, whatever family it is of. `adopt_state_layers` wraps the `forward` of its
class. Under an attention context (`forward.py`) the context decides which tokens go through it together: the
module's own forward is called with [rows, width] tokens, and with `LayerStates` in the place of the cache where
states are kept. So nothing of a family is written again, its kernels are the ones that it finds installed, and
packed sequences cannot leak into each other. Without a context it is the module as it was.

A row that begins has a state of zeros. `check_states` compares a sequence computed in pieces, from zeros on,
with the same sequence computed at once without states.
"""

from __future__ import annotations

import dis
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from types import CodeType
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional

from ludus.core.failures import ConfigError
from ludus.model.attention import current_context
from ludus.model.hf_model import decoder_of

log = logging.getLogger(__name__)

StateKey = tuple[str, int]
"""A state of a layer: "conv" or "recurrent", and its number."""

StateShapes = dict[nn.Module, dict[StateKey, tuple[torch.Size, torch.dtype]]]
"""The states of each state layer, for one sequence."""

_WRITES = frozenset({"update_conv_state", "update_recurrent_state"})
_CACHES = ("cache_params", "past_key_values")
_CONTEXT = "ludus_attention"


_stepwise: WeakSet[type[nn.Module]] = WeakSet()
"""Classes that cannot go on from a state with several tokens at once."""


class LayerStates:
    """The states of one layer for a few rows, in the form of the cache that transformers gives to the layer."""

    record_past = False

    def __init__(self, tensors: Mapping[StateKey, Tensor] | None = None) -> None:
        self.tensors: dict[StateKey, Tensor] = dict(tensors or {})

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.tensors.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.tensors.get(("recurrent", state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Keep the last columns; all columns with those before them, as the convolution needs them."""
        before = self.tensors.get(("conv", state_idx))
        if before is None:
            size = conv_kernel_size or conv_states.shape[-1]
            every = functional.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        else:
            size = before.shape[-1]
            every = torch.cat([before, conv_states], dim=-1)
        self.tensors["conv", state_idx] = every[..., -size:]
        return every

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int | None = None, state_idx: int = 0, **_: Any
    ) -> Tensor:
        before = self.tensors.get(("recurrent", state_idx))
        kept = recurrent_states if before is None else recurrent_states.to(before.dtype)
        self.tensors["recurrent", state_idx] = kept
        return kept

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    # transformers before 5.21 has no `get_` methods: a layer looks into `cache.layers[its number]`.

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.tensors)

    @property
    def layers(self) -> Mapping[int, LayerStates]:
        return cast(Mapping[int, LayerStates], _Always(self))

    @property
    def conv_states(self) -> dict[int, Tensor]:
        return {number: tensor for (kind, number), tensor in self.tensors.items() if kind == "conv"}

    @property
    def recurrent_states(self) -> dict[int, Tensor]:
        return {number: tensor for (kind, number), tensor in self.tensors.items() if kind != "conv"}


@dataclass(frozen=True, slots=True)
class _Always:
    value: LayerStates

    def __getitem__(self, _: int) -> LayerStates:
        return self.value


@dataclass(frozen=True, slots=True)
class StateCall:
    """A call of a state layer with the tokens of many sequences end to end.

    A context takes it as `run_state_layer(call)` and gives the layer's results for all tokens, [1, T, ...].
    """

    module: nn.Module
    forward: Callable[..., Any]
    cache: str
    """The name of its argument that is the cache."""
    inputs: dict[str, Tensor]
    """[1, T, ...] What it is given of each token."""
    others: dict[str, Any]

    @property
    def layer(self) -> int:
        return int(getattr(self.module, "layer_idx", -1))

    def run(
        self, index: Tensor | None, rows: int, width: int, states: LayerStates | None = None
    ) -> Tensor:
        """[rows * width, ...] from `rows` sequences of `width` tokens, whose flat places are `index`.

        The tokens are all of them, in order, where there is no index. `states` are read and brought up to date.
        """
        inputs = {
            name: (value[0] if index is None else value[0].index_select(0, index)).view(
                rows, width, *value.shape[2:]
            )
            for name, value in self.inputs.items()
        }
        if states is None or type(self.module) not in _stepwise:
            return self._compute(inputs, rows, width, states).flatten(0, 1)
        steps = ({name: v[:, i : i + 1] for name, v in inputs.items()} for i in range(width))
        return torch.cat([self._compute(step, rows, 1, states) for step in steps], dim=1).flatten(0, 1)

    def _compute(
        self, inputs: dict[str, Tensor], rows: int, width: int, states: LayerStates | None
    ) -> Tensor:
        result = self.forward(self.module, **inputs, **{self.cache: states}, **self.others)
        if not isinstance(result, Tensor) or result.shape[:2] != (rows, width):
            raise ConfigError(
                f"layer {self.layer} ({type(self.module).__name__}) keeps a state and gives something else "
                "than one tensor for each token, which Ludus cannot run: use a model of another family"
            )
        return result


def adopt_state_layers(model: nn.Module) -> None:
    """Let attention contexts run the state layers of this model, and of all others of its classes."""
    for kind in {type(module) for module in state_layers(model)}:
        if not hasattr(kind.forward, "ludus_adopted"):
            kind.forward = _adopted(kind.forward)


def state_layers(model: nn.Module) -> list[nn.Module]:
    """The modules of a decoder that keep a state in transformers' cache, and nothing else."""
    return [module for module in decoder_of(model).modules() if _keeps_state(type(module))]


def read_past_forward(model: nn.Module) -> set[str]:
    """The parts of state layers, by their names in the decoder, whose weights the layer's own forward reads.

    Fused kernels are given `out_proj.weight`, say: an adapter around such a part would be passed over.
    """
    return {
        f"{name}.{part}"
        for name, module in decoder_of(model).named_modules()
        if _keeps_state(type(module))
        for part in _weights_read(type(module))
    }


def _weights_read(kind: type[nn.Module]) -> Iterator[str]:
    steps = [one.argval for one in dis.get_instructions(inspect.unwrap(kind.forward))]
    return (part for part, after in pairwise(steps) if after == "weight" and isinstance(part, str))


def _keeps_state(kind: type[nn.Module]) -> bool:
    forward = inspect.unwrap(kind.forward)
    code = getattr(forward, "__code__", None)
    return isinstance(code, CodeType) and not _WRITES.isdisjoint(_names(code))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _adopted(forward: Callable[..., Any]) -> Callable[..., Any]:
    names = list(inspect.signature(forward).parameters)[1:]
    cache = next((name for name in _CACHES if name in names), None)

    @wraps(forward)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.pop(_CONTEXT, None)
        context: Any = current_context() if given is None else given
        if context is None:
            return forward(self, *args, **kwargs)
        if cache is None or not hasattr(context, "run_state_layer"):
            raise ConfigError(
                f"layer {getattr(self, 'layer_idx', '?')} ({type(self).__name__}) keeps a state, which Ludus "
                "cannot hand to it here: use a model of another family"
            )
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        arguments.pop(cache, None)
        shape = arguments[names[0]].shape[:2]
        inputs = {
            name: value
            for name, value in arguments.items()
            if isinstance(value, Tensor) and value.shape[:2] == shape
        }
        others = {name: value for name, value in arguments.items() if name not in inputs}
        return context.run_state_layer(StateCall(self, forward, cache, inputs, others))

    run.ludus_adopted = True  # type: ignore[attr-defined]
    return run


def state_bytes(shapes: StateShapes) -> int:
    """Of the states of one sequence in all layers."""
    return sum(
        shape.numel() * dtype.itemsize for own in shapes.values() for shape, dtype in own.values()
    )


_PIECES = (3, 1, 1)
"""Tokens of the first pieces that `check_states` computes; the rest is the last one."""


def check_states(call: StateCall, index: Tensor, expected: Tensor, agree: Callable[..., bool]) -> None:
    """Refuse a layer that computes a sequence in pieces otherwise than at once.

    Mamba's first version goes on from a state with single tokens only, and then gets no more at a time.
    """
    kind, name = type(call.module), f"layer {call.layer} ({type(call.module).__name__})"
    shown = LayerStates()
    call.run(index[:1], 1, 1, shown)
    if not shown.tensors:
        raise ConfigError(
            f"{name} keeps no state in the cache that it is given: use a model of another family"
        )
    if not agree(_in_pieces(call, index, shown), expected):
        _stepwise.add(kind)
        if not agree(_in_pieces(call, index, shown), expected):
            raise ConfigError(
                f"{name} computes a sequence in pieces, with the states that it keeps in between, otherwise "
                "than at once: it cannot be sampled from. Use a model of another family, or another version of "
                "transformers"
            )
        log.warning("%s goes on from a state token by token only: prompts are read slowly", name)


def _in_pieces(call: StateCall, index: Tensor, shown: LayerStates) -> Tensor:
    states = LayerStates({key: torch.zeros_like(tensor) for key, tensor in shown.tensors.items()})
    pieces = torch.split(index, [*_PIECES, len(index) - sum(_PIECES)])
    return torch.cat([call.run(piece, 1, len(piece), states) for piece in pieces])
