"""An exception in a function of a user's own, told by its place in the user's code."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ludus.core.failures import ConfigError, LudusError

_NOT_THEIRS = (
    Path(__file__).parents[1],
    Path(torch.__file__).parent,
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")),
)
"""Where Ludus, torch and other libraries are: what was raised there was caused elsewhere."""


def called(who: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns; what it raises names it, the exception, and the user's lines.

    Running out of memory is no mistake of theirs, and the trainer has an answer to it.
    """
    try:
        return function(*arguments)
    except (LudusError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{who} raised {what}{_places(error)}") from error


def _places(error: Exception) -> str:
    """Where it happened, as `file.py:12 in name`, from the call to the cause."""
    frames = [
        f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(Path(frame.filename).is_relative_to(folder) for folder in _NOT_THEIRS)
    ]
    return f" ({', '.join(frames)})" if frames else ""
