"""How a recipe names a task set of another library, and how its package is imported."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any
from urllib.parse import parse_qsl

from ludus.core.failures import ConfigError, MissingExtraError
from ludus.core.messages import Json

SIZES = {"train": 2000, "held_out": 200}
"""How many tasks a split has when the reference does not say it."""


def parse_reference(reference: str) -> tuple[str, str, Json]:
    """`name@split?size=100&word=text`: name, split and options; numbers and JSON are read as such."""
    named, _, query = reference.partition("?")
    name, _, split = named.partition("@")
    if not name or split not in ("", *SIZES):
        raise ConfigError(
            f"{reference!r} is written NAME@SPLIT?option=value, where SPLIT is {' or '.join(SIZES)}"
        )
    return name, split or "train", {key: parse_value(text) for key, text in parse_qsl(query)}


def parse_value(text: str) -> Any:
    """An option's value: JSON, or else text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def imported(package: str, extra: str, purpose: str) -> Any:
    """A package that an extra brings."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == package.split(".")[0]:
            raise MissingExtraError(package.split(".")[0], extra, purpose) from error
        raise
