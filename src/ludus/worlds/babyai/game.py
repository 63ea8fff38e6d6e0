"""BabyAI of `minigrid` in words: AgentGym's observations, and its actions as paths of low-level ones.

It tells what the agent sees: the 7 × 7 cells before it, without those behind walls and closed doors.
"""

from __future__ import annotations

import difflib
import io
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ludus.core.failures import ConfigError

LEFT, RIGHT, FORWARD, PICKUP, DROP, TOGGLE = range(6)
"""minigrid's actions."""
VECTORS = ((1, 0), (0, 1), (-1, 0), (0, -1))
"""Change of position in one step, by direction: right, down, left, up."""
SOLID = ("wall", "box", "ball", "key")
_MOST_CHARS = 200
_UNKNOWN = "The action is not recognized. Please check valid actions."

Cell = tuple[int, int]


@cache
def _make() -> Callable[[str], Any]:
    """minigrid's levels by name. Imported when the first is made; it takes a second."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    import gymnasium
    import minigrid.envs.babyai.core.roomgrid_level as levels

    # It prints each sample that it rejects; only its own name for `print` is replaced.
    levels.print = lambda *args: None
    known = [name for name in gymnasium.registry if name.startswith("BabyAI-")]

    def make(level: str) -> Any:
        if level not in known:
            near = difflib.get_close_matches(level, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; they are such as {known[0]!r}"
            raise ConfigError(f"minigrid has no level {level!r}{hint}")
        return gymnasium.make(level, disable_env_checker=True).unwrapped

    return make


@dataclass(frozen=True, slots=True)
class Seen:
    """An object in view: its name ("red ball", "blue closed door"), and its number among those of that name."""

    name: str
    number: int
    kind: str
    color: str
    cell: Cell
    ahead: int
    right: int

    def __str__(self) -> str:
        return f"{self.name} {self.number}"

    @property
    def sentence(self) -> str:
        if self.right == 0:
            return f"There is a {self} right in front of you {self.ahead} steps away."
        aside = f"{abs(self.right)} steps to your {'right' if self.right > 0 else 'left'}"
        return f"There is a {self} {self.ahead} steps in front of you and {aside}."


@dataclass(slots=True)
class View:
    """The agent's view, and its available actions."""

    objects: list[Seen] = field(default_factory=list)
    walls: set[Cell] = field(default_factory=set)
    facing: tuple[str, int] | None = None
    """The nearest wall or box straight ahead, and how far it is."""
    actions: dict[str, list[int]] = field(default_factory=dict)
    """Actions in words, and the low-level actions behind each."""
    refused: dict[str, str] = field(default_factory=dict)
    """Actions that cannot be done now, and why."""


class MazeGame:
    """One mission in one maze, played in words."""

    def __init__(self, level: str, seed: int) -> None:
        self.env: Any = _make()(level)
        self.env.reset(seed=seed)
        self.longest = int(self.env.max_steps)
        self.env.max_steps = 10**9  # turns are counted by the episode; AgentGym ignores this limit, too
        self.done = False
        self.won = False
        self.taken: list[int] = []
        """The low-level actions so far."""
        self.view = self._look()

    @property
    def goal(self) -> str:
        return str(self.env.mission)

    @property
    def discounted(self) -> float:
        """minigrid's own reward, which falls with the low-level steps that were taken."""
        return 1 - 0.9 * self.env.step_count / self.longest if self.won else 0.0

    @property
    def place(self) -> Cell:
        x, y = self.env.agent_pos
        return int(x), int(y)

    def act(self, action: str) -> str:
        """Do what the words say, and tell what is seen then."""
        words = " ".join(action[:_MOST_CHARS].lower().split()).strip(" .\"'[]")
        words = words.replace("pick up", "pickup")
        if words.startswith("check"):
            return f"You can take the following actions: {', '.join(self.view.actions)}"
        if words not in self.view.actions:
            return self._with_actions(self.view.refused.get(words, _UNKNOWN))
        if not self._run(self.view.actions[words]):
            return self._with_actions("No change in state.")
        self.view = self._look()
        if self.won:
            return f"{self.description()}\nThe task is completed."
        if self.done:
            return f"{self.description()}\nThe task has failed."
        return self._with_actions(self.description())

    def observation(self) -> str:
        """The current view as text, with the available actions."""
        return self._with_actions(self.description())

    def description(self) -> str:
        """The current view as text."""
        view, carried = self.view, self.env.carrying
        parts = ["You cannot see any objects within sight."]
        if view.objects or view.walls:
            parts = ["In front of you in this room, you can see several objects:"]
            parts += [one.sentence for one in view.objects]
        parts.append("The room has walls around you.")
        if view.facing is not None:
            parts.append(f"You are facing a {view.facing[0]} {view.facing[1]} steps away.")
        held = (
            "not carrying anything" if carried is None else f"carrying a {carried.color} {carried.type}"
        )
        return " ".join([*parts, f"You are {held}."])

    def picture(self) -> bytes:
        """The maze from above as a PNG; what the agent sees is lit."""
        from matplotlib.image import imsave

        file = io.BytesIO()
        imsave(file, self.env.get_frame(highlight=True, tile_size=32), format="png")
        return file.getvalue()

    def _with_actions(self, text: str) -> str:
        listed = ", ".join(f'"{action}"' for action in self.view.actions)
        return f"{text}\nAvailable actions: [{listed}]"

    def _run(self, actions: Sequence[int]) -> bool:
        """Do low-level actions until one has no effect or ends the mission; whether anything changed."""
        changed = False
        for action in actions:
            before = self._state()
            self.taken.append(action)
            _, reward, self.done, _, _ = self.env.step(action)
            self.won = self.done and reward > 0
            if self.done:
                return True
            if self._state() == before:
                break
            changed = True
        return changed

    def take(self, actions: Sequence[int]) -> None:
        """Take these low-level actions, those of another game in the same maze."""
        for action in actions:
            self.taken.append(action)
            _, reward, self.done, _, _ = self.env.step(action)
            self.won = self.done and reward > 0
        self.view = self._look()

    def _state(self) -> tuple[object, ...]:
        front = self.env.grid.get(*self.env.front_pos)
        door = (front.is_open, front.is_locked) if front is not None and front.type == "door" else None
        return self.place, int(self.env.agent_dir), id(self.env.carrying), id(front), door

    # What is seen

    def _look(self) -> View:
        view = View()
        counts: Counter[str] = Counter()
        cells = sorted(self._visible(), key=lambda one: abs(one[2]) + abs(one[3]))
        for thing, cell, ahead, right in cells:
            if right == 0 and thing.type in ("wall", "box") and view.facing is None:
                view.facing = (thing.type, ahead)
            if thing.type == "wall":
                view.walls.add(cell)
                continue
            name = f"{thing.color} {thing.type}"
            if thing.type == "door":
                state = "locked" if thing.is_locked else "open" if thing.is_open else "closed"
                name = f"{thing.color} {state} door"
            counts[name] += 1
            view.objects.append(Seen(name, counts[name], thing.type, thing.color, cell, ahead, right))
        self._offer(view)
        return view

    def visible_cells(self) -> set[Cell]:
        """The cells in view, empty ones too, and the agent's own."""
        _, mask = self.env.gen_obs_grid()
        size = self.env.agent_view_size
        return {
            self._cell_in_view(size - 1 - j, i - size // 2)
            for j in range(size)
            for i in range(size)
            if mask[i, j]
        }

    def _cell_in_view(self, ahead: int, right: int) -> Cell:
        (x, y), (fx, fy) = self.place, VECTORS[self.env.agent_dir]
        rx, ry = VECTORS[(self.env.agent_dir + 1) % 4]
        return x + fx * ahead + rx * right, y + fy * ahead + ry * right

    def _visible(self) -> Iterator[tuple[Any, Cell, int, int]]:
        """Things in view with their cell, and how far ahead and to the right they are; the far row first."""
        grid, mask = self.env.gen_obs_grid()
        size = self.env.agent_view_size
        for j in range(size):
            for i in range(size):
                ahead, right = size - 1 - j, i - size // 2
                thing = grid.get(i, j)
                cell = self._cell_in_view(ahead, right)
                inside = 0 <= cell[0] < self.env.width and 0 <= cell[1] < self.env.height
                if thing is not None and mask[i, j] and inside and (ahead or right):
                    yield thing, cell, ahead, right

    # What can be done

    def _offer(self, view: View) -> None:
        """The actions in AgentGym's order: moves, pick up, drop, doors, go to, check."""
        carried = self.env.carrying
        actions, refused = view.actions, view.refused
        actions |= {"turn left": [LEFT], "turn right": [RIGHT]}
        if view.facing is None or view.facing[1] > 1:
            actions["move forward"] = [FORWARD]
        else:
            refused["move forward"] = "There is a barrier in front of you, you can't move forward."
        reach = self._paths(view)
        paths = {one: _to_face(reach, one.cell) for one in view.objects}
        for one in view.objects:
            path, verb = paths[one], f"pickup {one}"
            if one.kind == "door":
                continue
            if carried is not None:
                refused[verb] = f"You cannot pickup {one}, as you are carrying something. Drop it first."
            elif path is None:
                refused[verb] = f"You cannot pickup {one}, as there is no path leading to it."
            else:
                actions[verb] = [*path, PICKUP]
        if carried is None:
            refused["drop"] = "You cannot drop the object, as you are not carrying anything."
        elif any(one.ahead == 1 and one.right == 0 for one in view.objects) or view.facing == (
            "wall",
            1,
        ):
            refused["drop"] = (
                "You cannot drop the object, as there is already an object in front of you."
            )
        else:
            actions["drop"] = [DROP]
        for one in view.objects:
            if one.kind == "door":
                self._offer_door(view, one, paths[one], reach)
        for one in view.objects:
            path = paths[one]
            if path is None:
                refused[f"go to {one}"] = f"You cannot go to {one}, as there is no path leading to it."
            else:
                actions[f"go to {one}"] = path
        actions["check available actions"] = []

    def _offer_door(
        self, view: View, door: Seen, path: list[int] | None, reach: dict[Cell, dict[int, list[int]]]
    ) -> None:
        through, toggle = f"go through {door}", f"toggle and go through {door}"
        if " open " in f" {door} ":
            ways = reach.get(door.cell)
            if ways:
                view.actions[through] = min(ways.values(), key=len)
            else:
                view.refused[through] = f"You cannot {through}, as there is no path leading to it."
            return
        view.refused[through] = f"You cannot {through}, as it is closed. You should toggle it first."
        if " locked " in f" {door} ":
            carried = self.env.carrying
            if carried is None or carried.type != "key":
                view.refused[toggle] = f"You cannot {toggle}, as you are not carrying a key."
                return
            if carried.color != door.color:
                view.refused[toggle] = (
                    f"You cannot {toggle}, as the color of the key you are carrying does not match "
                    "the color of door."
                )
                return
        if path is None:
            view.refused[toggle] = f"You cannot {toggle}, as there is no path leading to it."
            return
        view.actions[toggle] = [*path, TOGGLE, FORWARD]
        if not path:
            view.actions["toggle"] = [TOGGLE]

    def _paths(self, view: View) -> dict[Cell, dict[int, list[int]]]:
        """The shortest paths to every cell and direction in the field of view; unseen cells count as free."""
        taken = view.walls | {
            one.cell for one in view.objects if one.kind in SOLID or " open " not in f" {one} "
        }
        size = int(self.env.agent_view_size)
        (x, y), (fx, fy) = self.place, VECTORS[self.env.agent_dir]

        def in_view(cell: Cell) -> bool:
            ahead = (cell[0] - x) * fx + (cell[1] - y) * fy
            across = abs((cell[0] - x) * fy) + abs((cell[1] - y) * fx)
            return 0 <= ahead < size and across <= size // 2

        start = (self.place, int(self.env.agent_dir))
        return shortest_paths(start, lambda cell: cell not in taken and in_view(cell))


def shortest_paths(
    start: tuple[Cell, int], is_free: Callable[[Cell], bool]
) -> dict[Cell, dict[int, list[int]]]:
    """Turns and steps from (cell, direction) to all others that can be reached over free cells."""
    found: dict[Cell, dict[int, list[int]]] = {start[0]: {start[1]: []}}
    queue = deque([start])
    while queue:
        cell, facing = queue.popleft()
        path = found[cell][facing]
        (x, y), (dx, dy) = cell, VECTORS[facing]
        ahead = (x + dx, y + dy)
        moves = [(FORWARD, ahead, facing)] if is_free(ahead) else []
        moves += [(LEFT, cell, (facing - 1) % 4), (RIGHT, cell, (facing + 1) % 4)]
        for action, to, way in moves:
            if way not in found.setdefault(to, {}):
                found[to][way] = [*path, action]
                queue.append((to, way))
    return found


def _to_face(reach: dict[Cell, dict[int, list[int]]], target: Cell) -> list[int] | None:
    """The shortest path to a cell next to the target, looking at it."""
    ways = [
        reach[beside][facing]
        for facing, (dx, dy) in enumerate(VECTORS)
        if (beside := (target[0] - dx, target[1] - dy)) in reach and facing in reach[beside]
    ]
    return min(ways, key=len, default=None)
