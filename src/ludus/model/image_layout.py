"""Where the tokens of images stand in a context, which positions they have, and what they see.

Most models count an image's tokens as text, one by one, with causal attention. Others differ in two ways, which
travel as an `ImageLayout` for each image:

- Positions in three dimensions (M-RoPE): time, row and column, by the model's own `get_rope_index`. The text
  behind an image goes on from its largest position. Everything else (slots of the KV cache, causal order,
  windows) stays with a token's place.
- Tokens of an image that see each other in both directions. An image's tokens are neighbours, so a token sees
  all up to the last one of its image: `LookAhead`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ludus.core.failures import ConfigError
from ludus.model.attention import LookAhead

Ints = npt.NDArray[np.int64]

ATTRIBUTE = "ludus_images"
"""Where a model that is shown images has its processor."""


class Encoded(Protocol):
    """An image as a model's processor gives it."""

    @property
    def tokens(self) -> list[int]: ...
    @property
    def places(self) -> Ints: ...
    @property
    def inputs(self) -> dict[str, Tensor]: ...


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """An image among flat tokens."""

    start: int
    stop: int
    """Its tokens, delimiters included."""
    positions_3S: Ints | None = None
    """Their positions, counted from that of the first; None where they are counted as text is."""
    advance: int = 0
    """The position of the token behind the image, counted from the same place."""
    runs: tuple[tuple[int, int], ...] = ()
    """Neighbours that see each other in both directions, as ranges of places."""


@dataclass(frozen=True, slots=True)
class ContextLayout:
    """The images of one context, for the engine: what is generated behind it goes on as text."""

    positions_3T: Ints | None = None
    """Positions of the context's tokens, where they have three dimensions."""
    runs: tuple[tuple[int, int], ...] = ()
    windows_only: bool = False
    shift: int = field(init=False, default=0)
    """What is added to the place of a token behind the context to make its position."""

    def __post_init__(self) -> None:
        if self.positions_3T is not None and self.positions_3T.size:
            count = self.positions_3T.shape[1]
            object.__setattr__(self, "shift", int(self.positions_3T[:, -1].max()) + 1 - count)

    def positions(self, start: int, stop: int) -> Ints:
        """[3, stop - start]: the positions of these tokens, of the context or behind it."""
        known = 0 if self.positions_3T is None else self.positions_3T.shape[1]
        behind = np.arange(max(start, known), max(stop, known)) + self.shift
        parts = [np.broadcast_to(behind, (3, len(behind)))]
        if self.positions_3T is not None and start < known:
            parts.insert(0, self.positions_3T[:, start:stop])
        return np.concatenate(parts, axis=1)

    def whole(self, start: int, count: int) -> int:
        """About `count` tokens from `start`, such that no image is cut whose tokens see each other."""
        for first, stop in self.runs:
            if first < start + count < stop:
                return first - start if first > start else stop - start
        return count

    def last(self, start: int, stop: int) -> Ints:
        """[stop - start]: the place of the last token that each of these sees."""
        return _last(stop, self.runs)[start:]


def _last(tokens: int, runs: Sequence[tuple[int, int]]) -> Ints:
    last_T = np.arange(tokens)
    for first, stop in runs:
        last_T[first:stop] = stop - 1
    return last_T


def look_ahead_of(tokens: int, layouts: Sequence[ImageLayout], windows_only: bool) -> LookAhead | None:
    """What so many flat tokens with these images see; None where it is themselves and what is before them."""
    runs = [run for layout in layouts for run in layout.runs]
    return LookAhead(_last(tokens, runs), windows_only) if runs else None


def positions_of(lengths: Sequence[int], layouts: Sequence[ImageLayout]) -> Ints | None:
    """[3, T]: the positions of rows of these lengths, end to end; None where they are counted one by one."""
    if all(layout.positions_3S is None for layout in layouts):
        return None
    positions_3T = np.tile(np.concatenate([np.arange(length) for length in lengths]), (3, 1))
    ends = np.cumsum(lengths)
    for layout in layouts:
        if layout.positions_3S is not None:
            end = int(ends[np.searchsorted(ends, layout.start, side="right")])
            first = positions_3T[0, layout.start]
            positions_3T[:, layout.start : layout.stop] = first + layout.positions_3S
            positions_3T[:, layout.stop : end] += layout.advance - (layout.stop - layout.start)
    return positions_3T


# How a model reads images, by its code and its configuration; `probes.check_images` tries whether it is so.


def _seeing(model: nn.Module) -> Any:
    """The part of a model that has a vision part; None where there is none. Wrappers pretend to be it."""
    return next((one for one in model.modules() if hasattr(type(one), "get_image_features")), None)


def _positioned(model: nn.Module) -> Any:
    """The part of a model that gives the tokens of images their positions; None where they are counted."""
    inner = _seeing(model)
    base = getattr(inner, getattr(inner, "base_model_prefix", "") or "model", None)
    return next((one for one in (inner, base) if hasattr(one, "get_rope_index")), None)


def has_rope_index(model: nn.Module) -> bool:
    """Whether the tokens of an image have positions in three dimensions."""
    return _positioned(model) is not None


def both_ways(model: nn.Module) -> str | None:
    """Which layers let an image's tokens see each other in both directions: "all", "windowed" ones, or None.

    None as well of a model that is shown no images.
    """
    inner = _seeing(model)
    if inner is None or getattr(inner, ATTRIBUTE, None) is None:
        return None
    if inner.config.model_type == "gemma3":
        return "all"
    text = inner.config.get_text_config()
    return "windowed" if getattr(text, "use_bidirectional_attention", None) == "vision" else None


def layout_of(model: nn.Module, image: Encoded, start: int) -> ImageLayout:
    """The layout of an image whose tokens begin at `start`."""
    stop = start + len(image.tokens)
    runs: tuple[tuple[int, int], ...] = ()
    if both_ways(model) is not None:
        places = image.places + start
        cuts = np.flatnonzero(np.diff(places) != 1) + 1
        runs = tuple((int(one[0]), int(one[-1]) + 1) for one in np.split(places, cuts) if len(one))
    positions_3S = _rope_index(model, image)
    if positions_3S is None:
        return ImageLayout(start, stop, None, stop - start, runs)
    return ImageLayout(start, stop, positions_3S[:, :-1], int(positions_3S[0, -1]), runs)


def _rope_index(model: nn.Module, image: Encoded) -> Ints | None:
    """[3, S + 1]: the positions of an image's tokens and of one behind it."""
    base = _positioned(model)
    if base is None:
        return None
    kinds = torch.zeros(1, len(image.tokens) + 1, dtype=torch.long)
    kinds[0, torch.from_numpy(image.places)] = 1
    given = {
        "input_ids": torch.tensor([[*image.tokens, 0]]),
        "mm_token_type_ids": kinds,
        **{name: value.cpu() for name, value in image.inputs.items()},
    }
    wanted = inspect.signature(base.get_rope_index).parameters
    found = base.get_rope_index(**{name: value for name, value in given.items() if name in wanted})[0]
    if tuple(found.shape) != (3, 1, kinds.shape[1]):
        raise ConfigError(
            f"{type(base).__name__} gives the tokens of an image positions of the shape {tuple(found.shape)}, "
            "which Ludus does not run"
        )
    positions_3S: Ints = found[:, 0].numpy()
    return positions_3S
