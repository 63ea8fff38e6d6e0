"""A demonstrator for BabyAI that knows no more than an agent does: it remembers what it has seen, and searches.

The planner goes straight to what is behind three doors; imitating that teaches guessing. This one plans
in the same way on the cells that it has seen. Where the goal is not among them, it takes the action that shows
the most.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from ludus.worlds.babyai.game import VECTORS, Cell, MazeGame
from ludus.worlds.babyai.planner import Planner, State

_WORTH = 2
"""A view with fewer unseen cells is not worth a turn by itself; the nearest edge of the known is."""
_LATER = 0.8
"""Weight of a cell that the turn after the next one would show."""


class Explorer(Planner):
    """Names the next action in words, by what has been seen so far."""

    def __init__(self, game: MazeGame) -> None:
        super().__init__(game)
        self.seen: set[Cell] = set()
        self._searching = False

    def next_action(self) -> str | None:
        self.seen |= self.game.visible_cells()
        return super().next_action()

    def _is_known(self, cell: Cell) -> bool:
        return cell in self.seen

    def _search(self) -> str | None:
        """The action that brings the most unseen cells into view, or else the way to the nearest one."""
        gains = [
            (self._outlook(end), -len(path), action)
            for action, path in self.game.view.actions.items()
            if (end := self._end(path)) is not None and path
        ]
        gain, _, action = max(gains, default=(0, 0, ""))
        if gain >= _WORTH:
            return action
        edge = [cell for cell in self._cells() if cell not in self.seen and self._borders(cell)]
        if self._searching or not edge:  # what it would search for, to get there, cannot be had
            return None
        self._searching = True
        try:
            return self._face(edge, "")
        finally:
            self._searching = False

    def _borders(self, cell: Cell) -> bool:
        """Whether a seen cell that can be entered is next to it."""
        around = [(cell[0] + dx, cell[1] + dy) for dx, dy in VECTORS]
        return any(one in self.seen and self._price(one, None) is not None for one in around)

    def _outlook(self, state: State) -> float:
        """Unseen cells in view from there, and at less worth those that the turn after it could show."""
        cell, way = state
        now = self._unseen(state)
        then = max(len(self._unseen((cell, (way + turn) % 4)) - now) for turn in (1, 3))
        return len(now) + _LATER * then

    def _unseen(self, state: State) -> set[Cell]:
        """The unseen cells that would be in view from there, as far as walls and doors are known."""
        (x, y), way = state
        (fx, fy), (rx, ry) = VECTORS[way], VECTORS[(way + 1) % 4]
        size = int(self.env.agent_view_size)
        ahead_of = {
            (x + fx * ahead + rx * right, y + fy * ahead + ry * right)
            for ahead in range(size)
            for right in range(-(size // 2), size // 2 + 1)
        }
        found = {(x, y)}
        queue = deque(found)
        while queue:
            cx, cy = queue.popleft()
            if (cx, cy) != (x, y) and self._is_opaque(self._thing((cx, cy))):
                continue
            for dx, dy in VECTORS:
                near = (cx + dx, cy + dy)
                if near in ahead_of and near not in found and self._inside(near):
                    found.add(near)
                    queue.append(near)
        return found - self.seen

    def _thing(self, cell: Cell) -> Any:
        return super()._thing(cell) if cell in self.seen else None

    def _inside(self, cell: Cell) -> bool:
        width, height = int(self.env.width), int(self.env.height)
        return 0 < cell[0] < width - 1 and 0 < cell[1] < height - 1

    @staticmethod
    def _is_opaque(thing: Any) -> bool:
        return thing is not None and not thing.see_behind()
