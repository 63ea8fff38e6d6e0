"""The program in an answer: the last fenced block, or all of it."""

from __future__ import annotations

import re
from collections.abc import Collection

_FENCE = re.compile(r"[ \t]{0,3}+(`{3,}+|~{3,}+)[ \t]*+([A-Za-z0-9_+#.-]*+)[^\n`]*+")
"""Possessive: an answer cannot make it backtrack, which would hold up the event loop."""
_MOST_CHARS = 200_000


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """(language, code) of each fenced block, in order. One that is never closed lasts to the end."""
    blocks: list[tuple[str, str]] = []
    mark, language, lines = "", "", list[str]()
    for line in text.split("\n"):
        fence = _FENCE.fullmatch(line.rstrip("\r"))
        if not mark:
            if fence:
                mark, language, lines = fence[1], fence[2].lower(), []
        elif fence and fence[1].startswith(mark) and not fence[2]:
            blocks.append((language, "\n".join(lines)))
            mark = ""
        else:
            lines.append(line)
    if mark:
        blocks.append((language, "\n".join(lines)))
    return blocks


def code_of(answer: str, languages: Collection[str]) -> str:
    """The last block in one of the languages, or without one, or any; the whole answer if there is none."""
    blocks = fenced_blocks(answer[-_MOST_CHARS:])
    for wanted in (languages, ("",)):
        fitting = [code for language, code in blocks if language in wanted]
        if fitting:
            return fitting[-1]
    return blocks[-1][1] if blocks else answer[-_MOST_CHARS:]
