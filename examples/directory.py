"""Follow directions through a directory of people, card by card, and bring back a phone number.

"Start at Emma, then go to the boss, then to the friend. What is the phone number there?" The tool `look_up`
gives a person's card, which names three others. The expert gets there in the end, but it is curious: now and
then it looks up somebody else on the card first. Imitating it teaches how to ask, which name to take from which
card, and when to answer. That turns are scarce, and curiosity costs them, is left for reinforcement learning to
find out. Every world of people is either for training or held out.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping

import ludus
from ludus.core import ToolFault, key, shuffled, uniform

# fmt: off
NAMES = (
    "Emma", "Jack", "Lucy", "Mark", "Anna", "Paul", "Rose", "Adam", "Kate", "John", "Mary", "Luke",
    "Sara", "Dave", "Jane", "Ryan", "Amy", "Ben", "Lisa", "Sam", "Ruth", "Alex", "Nina", "Max",
)
# fmt: on
RELATIONS = ("boss", "friend", "neighbour")
PEOPLE = 12
STEPS = (2, 3, 4)
"""How many times a task goes on from one person to another."""
TRAINING, HELD_OUT = 1536, 256
CURIOSITY = 0.5
"""How often the expert looks up somebody else before it goes on, and then again."""


class Directory(ludus.Env):
    """A world of people. A task gives the cards as `envs = {"directory": {"cards": {...}}}`."""

    def __init__(self) -> None:
        self.cards: Mapping[str, Mapping[str, str]] = {}
        self.seen: list[str] = []
        """The people whose cards have been read, in order."""

    async def reset(self, task: ludus.Task, cards: Mapping[str, Mapping[str, str]]) -> None:
        self.cards, self.seen = cards, []

    @ludus.tool
    async def look_up(self, name: str) -> str:
        """Read a person's card.

        Args:
            name: The person's name.
        """
        if name not in self.cards:
            raise ToolFault("there is nobody of that name")
        self.seen.append(name)
        return ", ".join(f"{what} {value}" for what, value in self.cards[name].items())


def training_tasks() -> list[ludus.Task]:
    """Worlds to learn in."""
    return [_task(HELD_OUT + number) for number in range(TRAINING)]


def held_out_tasks() -> list[ludus.Task]:
    """Worlds that no demonstration and no training episode plays in."""
    return [_task(number) for number in range(HELD_OUT)]


def _task(number: int) -> ludus.Task:
    cards = _world(number)
    directions, path = _directions(number, cards)
    way = "".join(f", then to the {relation}" for relation in directions)
    return ludus.Task.of(
        f"Start at {path[0]}{way.replace('then', 'then go', 1)}. What is the phone number there?",
        cards[path[-1]]["phone"],
        id=f"directory-{number}",
        envs={"directory": {"cards": cards}},
        path=path,
    )


def _world(number: int) -> dict[str, dict[str, str]]:
    people = [NAMES[place] for place in shuffled(len(NAMES), key("people", number))[:PEOPLE]]
    cards = {}
    for name in people:
        others = [other for other in people if other != name]
        chosen = shuffled(len(others), key("card", number, name))[: len(RELATIONS)]
        phone = 1000 + int(9000 * uniform(key("phone", number, name), 0))
        known = {relation: others[place] for relation, place in zip(RELATIONS, chosen, strict=True)}
        cards[name] = {**known, "phone": str(phone)}
    return cards


def _directions(number: int, cards: Mapping[str, Mapping[str, str]]) -> tuple[list[str], list[str]]:
    """The relations to follow, and the people on the way: no person twice, so that no way is a shorter one."""
    steps = STEPS[number % len(STEPS)]
    for attempt in range(1000):
        draw = key("directions", number, attempt)
        path = [next(iter(cards))]
        directions = [RELATIONS[int(len(RELATIONS) * uniform(draw, step))] for step in range(steps)]
        for relation in directions:
            path.append(cards[path[-1]][relation])
        if len(set(path)) == len(path):
            return directions, path
    raise RuntimeError(f"world {number} has no way of {steps} steps")


def expert(task: ludus.Task) -> Generator[ludus.ToolCall | str, str, None]:
    """Gets there, by detours."""
    path: list[str] = task.metadata["path"]
    draws = (uniform(key("curiosity", task.id), turn) for turn in range(1_000_000))
    card = yield _look_up(path[0])
    for name in path[1:]:
        others = [
            word for word in card.replace(",", "").split()[1::2] if word.isalpha() and word != name
        ]
        while next(draws) < CURIOSITY:
            yield _look_up(others[int(len(others) * next(draws))])
        card = yield _look_up(name)
    yield card.split()[-1]


def _look_up(name: str) -> ludus.ToolCall:
    return ludus.ToolCall("look_up", {"name": name})


@ludus.reward(name="success")
async def right(answer: str, target: str) -> float:
    """1 for the right phone number."""
    return float(answer.strip() == target)


@ludus.reward(weight=0.5)
async def on_the_way(env: Directory, task: ludus.Task) -> float:
    """The share of the way that was gone, in order, detours allowed."""
    path, done = task.metadata["path"], 0
    for name in env.seen:
        done += done < len(path) and name == path[done]
    return done / len(path)
