"""Python files as syntax trees, each parsed once for all tests that look at the source."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file; it is shared, and not to be changed."""
    return ast.parse(path.read_text())
