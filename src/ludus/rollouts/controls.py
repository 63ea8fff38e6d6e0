"""Where text would turn into special tokens, and how to keep it text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise


class ControlTexts:
    """A set of control texts that can be looked up in any text in linear time."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(text for text in texts if len(text) > 1)
        self._lengths = sorted({len(text) for text in self._texts}, reverse=True)
        starts = "".join(sorted({re.escape(text[0]) for text in self._texts}))
        self._start = re.compile(f"[{starts}]" if starts else r"(?!)")

    def find(self, text: str) -> list[tuple[int, int]]:
        """Where control texts stand in `text`, overlapping ones included; the longest at each start."""
        found: list[tuple[int, int]] = []
        for match in self._start.finditer(text):
            start = match.start()
            for length in self._lengths:
                here = text[start : start + length]
                if here in self._texts:
                    found.append((start, start + len(here)))
                    break
        return found

    def cut(self, text: str) -> list[str]:
        """`text` in pieces, cut after the first character of each control text: none stays whole."""
        edges = [0, *(start + 1 for start, _ in self.find(text)), len(text)]
        return [text[start:stop] for start, stop in pairwise(edges) if start < stop]

    def broken(self, text: str) -> str:
        """`text` with a space inside each control text: changed, but for certain only text."""
        return " ".join(self.cut(text))

    def opened(self, text: str, separator: str) -> str:
        """`text` with `separator` after every character that a control text could begin with."""
        return self._start.sub(lambda match: match[0] + separator, text)
