"""What a docstring (Google, NumPy or reST style) says about a function and its parameters."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field

import docstring_parser


@dataclass(frozen=True, slots=True)
class Documentation:
    """The prose of a docstring, and what it says of each parameter."""

    description: str = ""
    parameters: dict[str, str] = field(default_factory=dict)


def parse_docstring(text: str | None) -> Documentation:
    """The documentation in `text`; a docstring that no style explains is all description."""
    if not text or not text.strip():
        return Documentation()
    try:
        parsed = docstring_parser.parse(text)
    except docstring_parser.ParseError:
        return Documentation(inspect.cleandoc(text))
    parts = [part.strip() for part in (parsed.short_description, parsed.long_description) if part]
    parameters: dict[str, str] = {}
    for parameter in parsed.params:
        for name in parameter.arg_name.split(","):
            if parameter.description:
                parameters[name.strip().lstrip("*")] = " ".join(parameter.description.split())
    return Documentation("\n\n".join(parts), parameters)
