"""A planner that plays BabyAI by the same words as an agent. It knows the whole maze.

At each turn it looks at what the mission still wants, which comes down to facing one of some cells. It computes
the distance of every place and direction to that, and takes the action in words that ends nearest. All that it
remembers between turns is an object that it is moving out of its way, so it goes on from any state.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from ludus.worlds.babyai.game import DROP, FORWARD, LEFT, PICKUP, RIGHT, TOGGLE, VECTORS, Cell, MazeGame

State = tuple[Cell, int]
_BLOCKED = 12
"""Cost in steps of an object in the way: it has to be carried away."""


class Planner:
    """Names the next action in words."""

    def __init__(self, game: MazeGame) -> None:
        self.game = game
        self.env = game.env
        self._moving: Any = None
        """What is in the way of something that is carried: that is put down until this is out of the way."""
        self._kept_free: set[Cell] = set()
        """The way, on which nothing is put down."""

    def next_action(self) -> str | None:
        """The action to take now; None when it knows of none."""
        if self._moving is not None and (action := self._move_aside()) is not None:
            return action
        self._moving, self._kept_free = None, set()
        instruction = _pending(self.env.instrs)
        carried = self.env.carrying
        match type(instruction).__name__:
            case "GoToInstr":
                return self._face(self._known(instruction.desc.obj_poss), "go to")
            case "OpenInstr":
                doors = [door for door in instruction.desc.obj_set if not door.is_open]
                return self._open([door for door in doors if self._is_known(_cell(door.cur_pos))])
            case "PickupInstr":
                return self._fetch(instruction.desc.obj_set)
            case "PutNextInstr":
                if carried is None or not any(carried is one for one in instruction.desc_move.obj_set):
                    return self._fetch(instruction.desc_move.obj_set)
                return self._put_beside(self._known(instruction.desc_fixed.obj_poss))
        return None

    # What it knows: everything. `Explorer` knows less.

    def _known(self, places: Iterable[Any]) -> list[Cell]:
        return [cell for cell in map(_cell, places) if self._is_known(cell)]

    def _is_known(self, cell: Cell) -> bool:
        return True

    def _search(self) -> str | None:
        """Next action to explore, when no wanted object is known."""
        return None

    # Parts of missions

    def _fetch(self, things: Iterable[Any]) -> str | None:
        """Pick up one of these."""
        # "a grey object" may also be a wall
        loose = [one for one in things if one.type in ("ball", "box", "key")]
        cells = self._known(one.cur_pos for one in loose if one is not self.env.carrying)
        if self.env.carrying is not None:
            return self._put_away()
        return self._face(cells, "pickup")

    def _open(self, doors: list[Any], keys: tuple[str, ...] = ()) -> str | None:
        """Toggle one of these doors; with its key, where it is locked. `keys` are those it is done for."""
        if not doors:
            return self._search()
        free = [door for door in doors if not door.is_locked or self._has_key(door.color)]
        if free:
            return self._face([_cell(door.cur_pos) for door in free], "toggle and go through", keys)
        colors = [door.color for door in doors if door.color not in keys]
        return self._fetch_key(colors[0], keys) if colors else None

    def _put_beside(self, fixed: Iterable[Any]) -> str | None:
        beside = {(x + dx, y + dy) for x, y in map(_cell, fixed) for dx, dy in VECTORS}
        return self._drop_on(lambda cell: cell in beside)

    def _put_away(self) -> str | None:
        """Drop the carried object out of the way: in no door, and not beside one."""

        def is_out_of_the_way(cell: Cell) -> bool:
            if cell in self._kept_free:
                return False
            around = [self._thing((cell[0] + dx, cell[1] + dy)) for dx, dy in VECTORS]
            return not any(one is not None and one.type == "door" for one in around)

        return self._drop_on(is_out_of_the_way)

    def _move_aside(self) -> str | None:
        """Take what is in the way off it; None when that is done."""
        if self.env.carrying is not None:
            return self._put_away()
        cell = _cell(self._moving.cur_pos)
        return self._face([cell], "pickup") if cell in self._kept_free else None

    def _drop_on(self, fits: Callable[[Cell], bool]) -> str | None:
        cells = [
            cell
            for cell in self._cells()
            if self._is_known(cell) and self._thing(cell) is None and fits(cell)
        ]
        ahead = _ahead((self.game.place, self._direction))
        if ahead in cells and "drop" in self.game.view.actions:
            return "drop"
        return self._face([cell for cell in cells if cell != self.game.place], "")

    def _fetch_key(self, color: str, keys: tuple[str, ...]) -> str | None:
        cells = [
            cell
            for cell in self._cells()
            if (one := self._thing(cell)) is not None and one.type == "key" and one.color == color
        ]
        if self.env.carrying is not None:
            return self._put_away()
        return self._face(cells, "pickup", (*keys, color))

    # Ways

    def _face(self, targets: Iterable[Any], verb: str, keys: tuple[str, ...] = ()) -> str | None:
        """One action towards facing a target; `verb` does the last part at once where it is offered."""
        cells = {_cell(target) for target in targets}
        if not cells:
            return self._search()
        offered = [
            (len(path), f"{verb} {one}")
            for one in self.game.view.objects
            if one.cell in cells and (path := self.game.view.actions.get(f"{verb} {one}")) is not None
        ]
        if offered and verb:
            return min(offered)[1]
        goals = [((x - dx, y - dy), way) for x, y in cells for way, (dx, dy) in enumerate(VECTORS)]
        here = (self.game.place, self._direction)
        distance = self._distances(goals)
        if here not in distance:
            return self._unlock(goals, keys)
        ends = {action: self._end(path) for action, path in self.game.view.actions.items()}
        ways = [
            (distance[end], action)
            for action, end in ends.items()
            if end is not None and end in distance
        ]
        best, action = min(ways, default=(distance[here], ""))
        if best < distance[here]:
            return action
        return self._clear(_ahead(here), distance)

    def _clear(self, cell: Cell, distance: dict[State, int]) -> str | None:
        """Take away what lies on the way."""
        if self.env.carrying is not None:
            thing = self._thing(cell)
            if self._moving is None and thing is not None and thing.type in ("ball", "box", "key"):
                self._moving, self._kept_free = thing, self._way(distance)
            return self._put_away()
        blocking = next((one for one in self.game.view.objects if one.cell == cell), None)
        action = f"pickup {blocking}"
        return action if action in self.game.view.actions else None

    def _way(self, distance: dict[State, int]) -> set[Cell]:
        """The cells of a shortest way from here."""
        state = (self.game.place, self._direction)
        cells = {state[0]}
        while distance[state] > 0:
            cell, way = state
            nexts = [(cell, (way - 1) % 4), (cell, (way + 1) % 4), (_ahead(state), way)]
            state = min((one for one in nexts if one in distance), key=distance.__getitem__)
            cells.add(state[0])
        return cells

    def _unlock(self, goals: list[State], keys: tuple[str, ...]) -> str | None:
        """The way leads through a locked door: open it, for which its key may have to be fetched."""
        locked = [one for cell in self._cells() if _is_locked(one := self._thing(cell))]
        here = (self.game.place, self._direction)
        for door in locked:
            through = self._distances(goals, opened=door)
            if here in through:
                return self._open([door], keys)
        return self._open(locked, keys)

    def _end(self, path: list[int]) -> State | None:
        """Where low-level moves end; None for actions that are more than a move."""
        if any(action in (PICKUP, DROP) for action in path):
            return None
        cell, way = self.game.place, self._direction
        opened: Cell | None = None
        for action in path:
            ahead = _ahead((cell, way))
            if action == LEFT:
                way = (way - 1) % 4
            elif action == RIGHT:
                way = (way + 1) % 4
            elif action == TOGGLE:
                opened = ahead
            elif action == FORWARD:
                if ahead != opened and not self._is_free(ahead):
                    break
                cell = ahead
        return cell, way

    def _distances(self, goals: Iterable[State], opened: Any = None) -> dict[State, int]:
        """Steps from every place and direction to the nearest goal, counted backwards from there."""
        enter = {cell: self._price(cell, opened) for cell in self._cells()}
        distance: dict[State, int] = {}
        heap = [(0, goal) for goal in goals if enter.get(goal[0]) is not None]
        while heap:
            so_far, state = heapq.heappop(heap)
            if state in distance:
                continue
            distance[state] = so_far
            cell, way = state
            for turned in ((cell, (way - 1) % 4), (cell, (way + 1) % 4)):
                if turned not in distance:
                    heapq.heappush(heap, (so_far + 1, turned))
            back = (cell[0] - VECTORS[way][0], cell[1] - VECTORS[way][1])
            price = enter[cell]
            if price is not None and enter.get(back) is not None:
                heapq.heappush(heap, (so_far + price, (back, way)))
        return distance

    def _price(self, cell: Cell, opened: Any) -> int | None:
        """Steps to enter a cell; None where it cannot be entered."""
        thing = self._thing(cell)
        if cell == self.game.place or thing is None:
            return 1
        if thing.type == "wall":
            return None
        if thing.type == "door":
            if thing.is_locked and thing is not opened and not self._has_key(thing.color):
                return None
            return 1 if thing.is_open else 2
        return 1 + _BLOCKED

    # The maze

    @property
    def _direction(self) -> int:
        return int(self.env.agent_dir)

    def _cells(self) -> list[Cell]:
        return [(x, y) for x in range(self.env.width) for y in range(self.env.height)]

    def _thing(self, cell: Cell) -> Any:
        inside = 0 <= cell[0] < self.env.width and 0 <= cell[1] < self.env.height
        return self.env.grid.get(*cell) if inside else None

    def _is_free(self, cell: Cell) -> bool:
        thing = self._thing(cell)
        return thing is None or (thing.type == "door" and bool(thing.is_open))

    def _has_key(self, color: str) -> bool:
        carried = self.env.carrying
        return carried is not None and carried.type == "key" and carried.color == color


def _pending(instruction: Any) -> Any:
    """The part of a mission that comes next."""
    match type(instruction).__name__:
        case "BeforeInstr" | "AndInstr":
            first, then, done = instruction.instr_a, instruction.instr_b, instruction.a_done
        case "AfterInstr":
            first, then, done = instruction.instr_b, instruction.instr_a, instruction.b_done
        case _:
            return instruction
    return _pending(then if done == "success" else first)


def _is_locked(thing: Any) -> bool:
    return thing is not None and thing.type == "door" and bool(thing.is_locked)


def _cell(place: Any) -> Cell:
    return int(place[0]), int(place[1])


def _ahead(state: State) -> Cell:
    (x, y), way = state
    return x + VECTORS[way][0], y + VECTORS[way][1]


_WORTH = 2
"""A view with fewer unseen cells is not worth a turn by itself; the nearest edge of the known is."""
_LATER = 0.8
"""Weight of a cell that the turn after the next one would show."""


class Explorer(Planner):
    """A planner that knows no more than an agent does: it plans on the cells that it has seen.

    Imitating one that goes straight to what is behind three doors teaches guessing. Where the goal is not among
    the seen cells, it takes the action that shows the most.
    """

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
