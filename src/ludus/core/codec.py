"""From plain JSON values to our dataclasses, for servers, worker processes, recordings and run folders."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")

_MOST_PROBLEMS = 20
_MOST_CHARS = 2_000


def decode(adapter: TypeAdapter[T], raw: Any) -> T:
    """`raw` as what the adapter makes; a `ValueError` names the fields that do not fit."""
    try:
        return adapter.validate_python(raw)
    except ValidationError as error:
        raise ValueError(explained(error)) from None


def explained(error: ValidationError) -> str:
    """The problems in one line, each with the place it is at."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    lines = [
        f"{'.'.join(str(part) for part in one['loc'])[:200] or 'body'}: {one['msg']}"
        for one in problems[:_MOST_PROBLEMS]
    ]
    return "; ".join(lines)[:_MOST_CHARS]
