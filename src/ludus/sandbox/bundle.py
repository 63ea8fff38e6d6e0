"""Source code of the guest: modules of Ludus that run where this package cannot be seen."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path

# A bundle defines each module under its full name before the next one runs, so modules that import each other
# work unchanged in a sandbox, which cannot see this package.
_DEFINE = """\
def _define(name, source):
    import sys, types
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
"""


@cache
def bundle(*modules: str, then: str = "") -> str:
    """Source code that defines the named modules in this order and runs `then`."""
    definitions = [f"_define({name!r}, {_source(name)!r})" for name in modules]
    return "\n".join([_DEFINE, *definitions, then, ""])


def _source(name: str) -> str:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"there is no module {name!r} to bundle", name=name)
    return Path(spec.origin).read_text(encoding="utf-8")


def call(module: str, function: str, arguments: Sequence[str] = ()) -> str:
    """Source that calls a function of a bundled module with text arguments."""
    given = ", ".join(repr(one) for one in arguments)
    return f"__import__('sys').modules[{module!r}].{function}({given})"
