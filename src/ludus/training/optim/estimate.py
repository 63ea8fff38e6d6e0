"""How much memory a model takes in training and sampling, from its configuration alone.

The module is built from fake tensors, which have shapes and no memory: parameters are counted exactly, and
`measure` (memory.py) and `kv_layers` (model/kv_layers.py) see what a pass keeps and what the cache holds of a
token, as they do for a real model. The fused forward cannot run on them, and has a formula.

    weights        in the model's number format; with an adapter frozen
    gradients      as the backward pass leaves them; the sum of several passes is float32
    optimizer      float32 masters of weights in half precision, and moments
    reference      a copy of the weights, where a loss measures from one and there is no adapter
    head           logits of a chunk, what is kept of them, and the head's own gradient in float32
    activations    what a pass keeps in every layer, and what the backward pass makes in one

The most is taken at the begin of a backward pass, or while the optimizer steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ludus.model import decoder_of, switch_attention, unwrapped
from ludus.model.fused_model import unsupported
from ludus.model.hf_model import auto_class, head_shape, text_config
from ludus.model.images import vision_parameters
from ludus.model.kv_layers import kv_layers
from ludus.training.config.run import LoraConfig
from ludus.training.models.lora import RANK, lora_targets
from ludus.training.optim.logprobs import chunk_rows_of, kept_bytes_of
from ludus.training.optim.memory import ActivationCosts, measure

GIB = 1 << 30
_MOMENTS = {"adamw": 8, "muon": 4, "adamw_8bit": 2, "paged_adamw_8bit": 0}
"""Bytes of a weight's moments on the device; paged ones are on the host."""
_HOST_LOGITS = 7
"""Float32 copies of a chunk's logits that the plain kernels of a host make at once."""
USABLE = 0.92
"""Of a device's memory: the rest is lost between blocks, or the driver's."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What memory follows from."""

    parameters: int
    trained: int
    weight_bytes: int
    """Of all parameters, an adapter's included."""
    trained_bytes: int
    largest: int
    """Numbers in the largest trained parameter."""
    adapter: int
    """Of the trained ones; 0 without an adapter."""
    vocabulary: int
    width: int
    element: int
    """Bytes of a weight."""
    token_bytes: int
    """Of the KV cache."""
    costs: ActivationCosts
    unfused: str
    """Why the fused forward is not for it; empty where it is."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a run asks of a model's memory."""

    tokens: int = 16384
    """In one pass."""
    trained: float = 1.0
    """The share of them that is trained."""
    passes: int = 2
    """In a step; from two on gradients are summed in float32."""
    optimizer: str = "adamw"
    reference: bool = False
    checkpointed: int = 0
    """Layers whose activations are computed again."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes at the most memory-hungry moment of a training step."""

    weights: int
    optimizer: int
    reference: int
    gradients: int
    """When all of them are there."""
    activations: int
    head: int
    peak: int

    @property
    def resident(self) -> int:
        """What stays between steps, beside a cache."""
        return self.weights + self.optimizer + self.reference


_sizes: dict[tuple[Any, ...], ModelSize] = {}


@contextmanager
def _fake() -> Iterator[None]:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers.initialization import no_init_weights

    # initial weights are made of numbers in some vision towers, which nothing fake has
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        no_init_weights(),
        torch.random.fork_rng(devices=[]),
    ):
        yield


def model_size(
    config: Any, dtype: torch.dtype, lora: LoraConfig | None = None, *, on_gpu: bool = True
) -> ModelSize:
    """The size of the model of this configuration. Nothing is read, and nothing allocated."""
    known = (type(config), config.to_json_string(use_diff=False), dtype, lora, on_gpu)
    if known not in _sizes:
        _sizes[known] = _measured_size(copy.deepcopy(config), dtype, lora, on_gpu=on_gpu)
    return _sizes[known]


def _measured_size(
    config: Any, dtype: torch.dtype, lora: LoraConfig | None, *, on_gpu: bool
) -> ModelSize:
    with _fake():
        model: Any = auto_class(config).from_config(config, dtype=dtype)
        model.tie_weights()
        for parameter in vision_parameters(model) if hasattr(model, "get_image_features") else ():
            parameter.requires_grad_(False)
        switch_attention(model)
        token_bytes = sum(one.token_bytes for one in kv_layers(model)[0].values())
        unfused = unsupported(decoder_of(model)) or ""
        base = sum(p.numel() for p in model.parameters())
        if lora is not None:
            _adapt(model, lora)
        trained = [p for p in model.parameters() if p.requires_grad]
        costs = measure(model)
        if costs.layers == 0:  # of which none can be computed again: all of them are one
            costs = replace(costs, layers=1, kept=costs.full)
        if on_gpu and not unfused:
            costs = replace(costs, full=_fused_bytes(model, dtype.itemsize, lora is not None))
        text, count = text_config(model), sum(p.numel() for p in trained)
        return ModelSize(
            parameters=base,
            trained=count,
            weight_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
            trained_bytes=sum(p.numel() * p.element_size() for p in trained),
            largest=max((p.numel() for p in trained), default=0),
            adapter=count if lora is not None else 0,
            vocabulary=int(unwrapped(model).get_input_embeddings().weight.shape[0]),
            width=int(text.hidden_size),
            element=dtype.itemsize,
            token_bytes=token_bytes,
            costs=costs,
            unfused=unfused,
        )


def _adapt(model: nn.Module, lora: LoraConfig) -> None:
    """Compute beside each target what peft's adapter does, in its number format; the base is frozen."""
    model.requires_grad_(False)
    names, matrices = lora_targets(model, lora)
    rank = lora.rank or RANK
    products = [
        module
        for name, module in decoder_of(model).named_modules()
        if isinstance(getattr(module, "weight", None), nn.Parameter)
        and any(
            name == one or f".{name}".endswith(f".{one}") or one.endswith(f".{name}") for one in names
        )
    ]
    for module in products:
        rows, columns = module.weight.shape
        if not isinstance(module, nn.Linear):  # Conv1D has its matrix the other way round
            rows, columns = columns, rows
        module.lora_A = nn.Parameter(torch.zeros(rank, columns))
        module.lora_B = nn.Parameter(torch.zeros(rows, rank))
        module.forward = partial(_beside, module, module.forward)
    for name, parameter in [*model.named_parameters()]:  # of experts, as one parameter
        if any(name == one or name.endswith(f".{one}") for one in matrices):
            experts, rows, columns = parameter.shape
            own = nn.Parameter(torch.zeros(rank * experts * (rows + columns)))
            model.register_parameter(f"lora_{name.replace('.', '_')}", own)


def _beside(module: Any, base: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    given = base(x)
    added = functional.linear(functional.linear(x.float(), module.lora_A), module.lora_B)
    return given + added.to(given.dtype)


def _fused_bytes(model: nn.Module, element: int, has_adapter: bool) -> int:
    """Bytes that a layer of the fused forward keeps of a token, as `fused_model.py` saves its tensors.

    The residual stream twice, queries, keys and values rotated, the attention's output, gate and up. Adapters,
    and norms of heads, keep the input of each product besides.
    """
    config = text_config(model)
    heads, kv_heads, size = head_shape(config)
    width, inner = int(config.hidden_size), int(config.intermediate_size)
    states = (heads + 2 * kv_heads) * size
    kept = 2 * width + states + heads * size + 2 * inner
    if getattr(decoder_of(model).layers[0].self_attn, "q_norm", None) is not None:
        kept += width + states
    if has_adapter:
        kept += inner
    return kept * element + 4 * (heads + 2)  # and the numbers by which softmax and norms are undone


def training_memory(size: ModelSize, load: Load, device_bytes: int | None = None) -> Memory:
    """What a training step takes.

    Args:
        size: Of the model.
        load: What the step does.
        device_bytes: A GPU's memory, by which its head's chunks are chosen; a host's when left out.
    """
    masters = 4 if size.element < 4 and not size.adapter else 0  # an adapter is float32 itself
    optimizer = size.trained * (masters + _MOMENTS[load.optimizer])
    if load.optimizer == "muon":
        optimizer += 4 * size.vocabulary * size.width  # AdamW's second moments of embeddings
    reference = size.weight_bytes if load.reference and not size.adapter else 0
    resident = size.weight_bytes + optimizer + reference
    gradients = 4 * size.trained if load.passes > 1 else size.trained_bytes
    costs = size.costs
    plain = max(0, costs.layers - load.checkpointed)
    kept = load.tokens * (plain * costs.full + min(load.checkpointed, costs.layers) * costs.kept)
    again = load.tokens * costs.full if load.checkpointed else 0
    head = _head_bytes(size, load, device_bytes, resident + kept)
    before = 0 if load.passes < 2 else (size.trained_bytes if load.passes == 2 else gradients)
    begin = resident + before + kept + head
    middle = resident + before + kept + again
    end = resident + before + gradients + load.tokens * costs.full
    stepping = resident + gradients
    if device_bytes is None:
        stepping += 8 * size.largest  # torch's step makes two copies of a parameter
    return Memory(
        weights=size.weight_bytes,
        optimizer=optimizer,
        reference=reference,
        gradients=gradients,
        activations=max(kept, middle - resident - before),
        head=head,
        peak=max(begin, middle, end, stepping),
    )


def _head_bytes(size: ModelSize, load: Load, device_bytes: int | None, taken: int) -> int:
    """The head's part: chunks of logits, what is kept of them, and its gradient in float32."""
    places = int(load.tokens * load.trained)
    rows = min(places, chunk_rows_of(size.vocabulary, device_bytes))
    own = 0 if size.adapter else 4 * size.vocabulary * size.width
    if device_bytes is None:
        return rows * size.vocabulary * 4 * _HOST_LOGITS + own
    room = kept_bytes_of(max(0, device_bytes - taken), device_bytes)
    kept = min(places * size.vocabulary * 2, room) if size.element < 4 else 0
    return rows * size.vocabulary * 6 + kept + own


def checkpointed_for(
    size: ModelSize, load: Load, device_bytes: int, *, on_gpu: bool = True
) -> Load | None:
    """The load with as few layers computed again as fit into a device; None where nothing fits."""
    for count in range(size.costs.layers + 1):
        tried = replace(load, checkpointed=count)
        if training_memory(size, tried, device_bytes if on_gpu else None).peak <= USABLE * device_bytes:
            return tried
    return None


# How fast, roughly.


@dataclass(frozen=True, slots=True)
class Device:
    """A class of GPUs."""

    name: str
    gib: int
    teraflops: float
    """Of bfloat16, dense, by its maker."""
    bandwidth: float
    """Terabytes a second."""


DEVICES = (
    Device("RTX 4090", 24, 165, 1.0),
    Device("L40S", 48, 362, 0.86),
    Device("A100 80 GB", 80, 312, 2.0),
    Device("H100", 80, 989, 3.35),
    Device("H200", 141, 989, 4.8),
    Device("B200", 180, 2250, 8.0),
)
_SHARE = {True: 0.42, False: 0.20}
"""Of the peak that training reaches, with the fused forward and without (docs/performance.md)."""
_STEP, _SLOWER = 1.0e-3, 1.5
"""Seconds of a decoding step beside its reading, and how much slower than the bandwidth that is."""


def training_speed(size: ModelSize, device: Device, *, recomputed: float = 0.0) -> float:
    """Tokens a second in training, to expect from what was measured on an H200."""
    passes = (5 if size.adapter else 6) + 2 * recomputed
    return _SHARE[not size.unfused] * device.teraflops * 1e12 / (passes * size.parameters)


def sampling_speed(size: ModelSize, device: Device, rows: int, context: int) -> float:
    """Tokens a second that so many rows of this context decode together."""
    read = size.parameters * size.element + rows * context * size.token_bytes
    return rows / (_STEP + _SLOWER * read / (device.bandwidth * 1e12))
