"""A text game of ALFWorld, from its file `game.tw-pddl`, without TextWorld and its planner.

Every game of ALFWorld has the same rules and texts; a file adds rooms, objects and a goal. TextWorld translates
these with Fast Downward four times at each reset (seconds) and derives every possible command from a grammar
at each step (a tenth of a second). Here the rules are Python over a set of facts, a thousand times faster.
Observations, admissible commands, reward and end are the same, text for text (tests/worlds/test_alfworld.py
plays both).
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RULES = "626ad2d8a50fee23"
"""Hash of the rules and texts of a game file, without its task's text."""
Fact = tuple[str, ...]
Formula = str | list["Formula"]


class UnknownRules(ValueError):
    """The game's rules are not those that are written here."""


@dataclass(frozen=True)
class GameFile:
    """A parsed game file. Names are lower case, as Fast Downward makes them."""

    facts: frozenset[Fact]
    """Facts at the start: (predicate, argument, ...)."""
    goal: Formula
    objective: str
    """For example "put a clean mug in coffeemachine."."""
    walkthrough: tuple[str, ...]
    """Commands that reach the goal, from a planner that sees everything."""
    names: Mapping[str, str]
    """The player's name of each thing: "mug 2"."""


def read_game(data: Mapping[str, Any]) -> GameFile:
    """A game from the JSON of its file; `UnknownRules` when it is of another version."""
    grammar, problem = str(data["grammar"]), str(data["pddl_problem"]).lower()
    task = re.search(r"Your task is to: ([^\"]*)", grammar)
    if task is None or _rules_of(str(data["pddl_domain"]), grammar.replace(task[0], "")) != RULES:
        raise UnknownRules("its rules are not those of ALFWorld 0.4")
    tree = _parse(re.sub(r";.*", "", problem))
    sections = {part[0]: part[1:] for part in tree[1:] if isinstance(part, list) and part}
    facts = frozenset(
        tuple(map(str, fact)) for fact in sections[":init"] if isinstance(fact, list) and fact[0] != "="
    )
    return GameFile(
        facts, sections[":goal"][0], task[1], tuple(data.get("walkthrough") or ()), _names(facts)
    )


def _rules_of(domain: str, grammar: str) -> str:
    words = " ".join(re.sub(r";.*", "", domain).split()) + " ".join(grammar.split())
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def _parse(text: str) -> list[Any]:
    """An s-expression as nested lists."""
    stack: list[list[Any]] = [[]]
    for token in re.findall(r"[()]|[^\s()]+", text):
        if token == "(":
            stack.append([])
        elif token == ")":
            done = stack.pop()
            stack[-1].append(done)
        else:
            stack[-1].append(token)
    whole: list[Any] = stack[0][0]
    return whole


def _names(facts: Iterable[Fact]) -> dict[str, str]:
    """ "Mug_bar_x" is a mug; of several in the order of their ids, the first has the highest number."""
    kinds = {}
    for entity in sorted({argument for fact in facts for argument in fact[1:]}):
        kind, bar, _ = entity.partition("_bar_")
        if bar:
            kinds[entity] = kind + ("basin" if "basin" in entity else "")
    left = Counter(kinds.values())
    names = {}
    for entity, kind in kinds.items():
        names[entity] = f"{kind} {left[kind]}"
        left[kind] -= 1
    return names


class Game:
    """A game under way. Commands and texts are those of TextWorld."""

    def __init__(self, file: GameFile) -> None:
        self.file = file
        self._facts: dict[str, set[Fact]] = defaultdict(set)
        for predicate, *arguments in file.facts:
            self._facts[predicate].add(tuple(arguments))
        ((self._agent, self._at),) = self._facts["atlocation"]
        self._receptacles = {fact[0]: fact[1] for fact in sorted(self._facts["receptacleatlocation"])}
        self._held: str | None = None
        self._taken: set[tuple[str, str]] = set()
        """(object, receptacle): taken out of it, and not put back."""
        self.won = self._is_reached()

    def intro(self) -> str:
        """The first text of the player."""
        room = self.look(self._receptacles)
        return f"-= Welcome to TextWorld, ALFRED! =-\n\n{room}\n\nYour task is to: {self.file.objective}"

    def look(self, around: Iterable[str] = ()) -> str:
        """In the middle of the room, only the first look shows what is around: ALFWorld's grammar has it so."""
        facing = [r for r, location in self._receptacles.items() if location == self._at]
        if not facing:
            seen = self._listed(around)
            return f"You are in the middle of a room. Looking quickly around you, you see {seen}."
        objects = sorted(o for o, location in self._facts["objectatlocation"] if location == self._at)
        beside = [o for o in objects for r in facing if (o, r) in self._taken]
        return (
            f"You are facing the {_joined([self.file.names[r] for r in facing])}. "
            f"Next to it, you see {self._listed(beside)}."
        )

    def step(self, command: str) -> str:
        """Do what a command says; a command that is not admissible does nothing."""
        move = self._moves().get(command.strip())
        if move is None:
            return "Nothing happens."
        text = self._do(*move)
        self.won = self._is_reached()
        return text

    def admissible_commands(self) -> list[str]:
        """The commands that do something now, in alphabetical order."""
        return sorted(self._moves())

    # Rules ----------------------------------------------------------------------------------------

    def _moves(self) -> dict[str, Fact]:
        """Each admissible command, and what it does: (verb, thing, ...)."""
        named = self.file.names
        moves: dict[str, Fact] = {verb: (verb,) for verb in ("look", "inventory", "help")}
        here = [r for r, location in self._receptacles.items() if location == self._at]
        for r, location in self._receptacles.items():
            if location != self._at:
                moves[f"go to {named[r]}"] = ("go", r)
        for r in here:
            moves[f"examine {named[r]}"] = ("examine", r)
            if self._is("openable", r):
                verb = "close" if self._is("opened", r) else "open"
                moves[f"{verb} {named[r]}"] = (verb, r)
        for o, r in self._facts["inreceptacle"]:
            if r not in here:
                continue
            if self._is("toggleable", o):
                moves[f"use {named[o]}"] = ("use", o)
            if self._held is None and self._is("pickupable", o) and self._is_accessible(r):
                moves[f"take {named[o]} from {named[r]}"] = ("take", o, r)
        if self._held is not None:
            moves |= self._moves_with(self._held, here)
        return moves

    def _moves_with(self, held: str, here: Sequence[str]) -> dict[str, Fact]:
        """Moves with the object in the player's hands, the only one that can be examined."""
        name, named = self.file.names[held], self.file.names
        kinds = self._types_of("objecttype", held)
        moves: dict[str, Fact] = {f"examine {name}": ("examine", held)}
        for r in here:
            places = self._types_of("receptacletype", r)
            if self._is_accessible(r) and any(
                self._is("cancontain", p, k) for p in places for k in kinds
            ):
                moves[f"move {name} to {named[r]}"] = ("move", held, r)
            for verb, able, tools in _TREATMENTS:
                if self._is(able, held) and places & tools:
                    moves[f"{verb} {name} with {named[r]}"] = (verb, held, r)
        if kinds & {"knifetype", "butterknifetype"}:
            for o, location in self._facts["objectatlocation"]:
                if location == self._at and self._is("sliceable", o):
                    moves[f"slice {named[o]} with {name}"] = ("slice", o, held)
        return moves

    def _do(self, verb: str, *things: str) -> str:
        """Change the facts; what the player reads."""
        facts, names = self._facts, [self.file.names[thing] for thing in things]
        match verb, *things:
            case "look", *_:
                return self.look()
            case "inventory", *_:
                held = self._listed([] if self._held is None else [self._held])
                return f"You are carrying: {held}." if self._held else "You are not carrying anything."
            case "go", r:
                self._at = self._receptacles[r]
                facts["atlocation"] = {(self._agent, self._at)}
                return f"You arrive at {names[0]}. {self._examine(r)}"
            case "examine", thing:
                return self._examine(thing)
            case "open", r:
                facts["opened"].add((r,))
                return f"You open the {names[0]}. {self._examine(r)}"
            case "close", r:
                facts["opened"].discard((r,))
                return f"You close the {names[0]}."
            case "take", o, r:
                facts["inreceptacle"].discard((o, r))
                facts["objectatlocation"].discard((o, self._at))
                facts["holds"] = {(self._agent, o)}
                self._held = o
                self._taken.add((o, r))
                return f"You pick up the {names[0]} from the {names[1]}."
            case "move", o, r:
                facts["inreceptacle"].add((o, r))
                facts["objectatlocation"].add((o, self._at))
                facts["holds"] = set()
                self._held = None
                self._taken.discard((o, r))
                return f"You move the {names[0]} to the {names[1]}."
            case "use", o:
                facts["istoggled"].add((o,))  # using it again leaves it so, in ALFWorld too
                return f"You turn on the {names[0]}."
            case "slice", o, _:
                facts["issliced"].add((o,))
                return f"You sliced the {names[0]} with the {names[1]}."
            case "clean" | "heat" | "cool", o, _:
                for predicate, is_so in _EFFECTS[verb].items():
                    (facts[predicate].add if is_so else facts[predicate].discard)((o,))
                return f"You {verb} the {names[0]} using the {names[1]}."
        return HELP

    # Texts ----------------------------------------------------------------------------------------

    def _examine(self, thing: str) -> str:
        name = self.file.names[thing]
        if thing in self._receptacles:
            seen = self._listed(sorted(o for o, r in self._facts["inreceptacle"] if r == thing))
            if not self._is("openable", thing):
                return f"On the {name}, you see {seen}."
            if self._is("opened", thing):
                return f"The {name} is open. In it, you see {seen}."
            return f"The {name} is closed."
        if self._is("isreceptacleobject", thing):
            inner = self._listed(
                sorted(o for o, outer in self._facts["inreceptacleobject"] if outer == thing != o)
            )
            return f"This is a normal {name}. In it, you see {inner}."
        is_clean, is_sliced = self._is("isclean", thing), self._is("issliced", thing)
        heat = "hot" if self._is("ishot", thing) else "cool" if self._is("iscool", thing) else ""
        if not is_clean and not is_sliced and heat == "cool":
            heat = "cold"
        state = " and ".join(word for word in (heat, "clean" if is_clean else "") if word)
        if state:
            return f"This is a {state} {'sliced ' if is_sliced else ''}{name}."
        if self._is("istoggled", thing):
            return f"This {name} is on."
        return f"This is a sliced {name}." if is_sliced else f"There's nothing special about {name}."

    def _listed(self, things: Iterable[str]) -> str:
        return _joined([f"a {self.file.names[thing]}" for thing in things])

    # Facts ----------------------------------------------------------------------------------------

    def _is(self, predicate: str, *arguments: str) -> bool:
        return arguments in self._facts[predicate]

    def _is_accessible(self, receptacle: str) -> bool:
        return not self._is("openable", receptacle) or self._is("opened", receptacle)

    def _types_of(self, predicate: str, thing: str) -> set[str]:
        return {kind for owner, kind in self._facts[predicate] if owner == thing}

    def _is_reached(self) -> bool:
        return any(True for _ in self._solutions([self.file.goal], {}))

    def _solutions(self, formulas: Sequence[Any], bound: dict[str, str]) -> Iterator[dict[str, str]]:
        """The variables with which all formulas hold: and, exists, not, =, and facts."""
        if not formulas:
            yield bound
            return
        (head, *body), rest = formulas[0], formulas[1:]
        if head == "and":
            last = [one for one in body if one[0] == "not"]  # when their variables are bound
            yield from self._solutions([*(one for one in body if one[0] != "not"), *last, *rest], bound)
        elif head == "exists":
            if any(True for _ in self._solutions([body[1]], dict(bound))):
                yield from self._solutions(rest, bound)
        elif head == "not":
            if not any(True for _ in self._solutions(body, bound)):
                yield from self._solutions(rest, bound)
        elif head == "=":
            if bound.get(body[0], body[0]) == bound.get(body[1], body[1]):
                yield from self._solutions(rest, bound)
        else:
            for fact in self._facts[head]:
                if (more := _unified(body, fact, bound)) is not None:
                    yield from self._solutions(rest, more)


def _unified(terms: Sequence[str], fact: Fact, bound: dict[str, str]) -> dict[str, str] | None:
    """`bound` with the variables of `terms` that make them this fact; None where they are another."""
    more = dict(bound)
    for term, value in zip(terms, fact, strict=True):
        if more.setdefault(term, value if term.startswith("?") else term) != value:
            return None
    return more


def _joined(names: Sequence[str]) -> str:
    if len(names) < 2:
        return names[0] if names else "nothing"
    return f"{', '.join(names[:-1])}, and {names[-1]}"


_TREATMENTS = (
    ("clean", "cleanable", {"sinktype", "sinkbasintype"}),
    ("heat", "heatable", {"microwavetype"}),
    ("cool", "coolable", {"fridgetype"}),
)
_EFFECTS = {
    "clean": {"isclean": True},
    "heat": {"ishot": True, "iscool": False},
    "cool": {"iscool": True, "ishot": False},
}
HELP = """Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""
