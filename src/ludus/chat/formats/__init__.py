"""Action formats: small classes that know how calls are written, read and answered."""

from __future__ import annotations

from typing import Any

from ludus.chat.formats.base import ActionFormat, ParsedAction
from ludus.core.failures import ConfigError
from ludus.core.registry import Registry

FORMATS = Registry(
    "action format",
    {
        "hermes": "ludus.chat.formats.json_calls:HermesFormat",
        "llama3": "ludus.chat.formats.json_calls:Llama3Format",
        "tags": "ludus.chat.formats.tags:TagsFormat",
        "fenced": "ludus.chat.formats.fenced:FencedFormat",
        "react": "ludus.chat.formats.react:ReActFormat",
        "plain": "ludus.chat.formats.plain:PlainFormat",
    },
)
"""Short names of the formats; `FORMATS.load(name)` gives the class."""


def load_format(name: str, **options: Any) -> ActionFormat:
    """The format of that name (or `module:Class`) with these options."""
    made = FORMATS.load(name)
    try:
        format_ = made(**options)
    except TypeError as error:
        raise ConfigError(f"the action format {name!r} does not take these options: {error}") from None
    if not isinstance(format_, ActionFormat):
        raise ConfigError(f"{name!r} is not an action format: it must be a subclass of ActionFormat")
    return format_


__all__ = ["FORMATS", "ActionFormat", "ParsedAction", "load_format"]
