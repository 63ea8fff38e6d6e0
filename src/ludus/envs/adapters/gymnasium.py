"""Any Gymnasium environment with discrete or textual actions, in words: `gymnasium:FrozenLake-v1`.

The agent has the tool `step`, which takes an action as text: a name or a number (Discrete), numbers
(MultiDiscrete, MultiBinary), a text (Text). It sees the environment's own text (`render_mode="ansi"`) where it
has one, and else the observation in words.
"""

from __future__ import annotations

import json
import re
from typing import Any

from ludus.core.failures import ConfigError
from ludus.core.random import key
from ludus.core.task import Task
from ludus.envs.env import OVER, Env, Observation, Step
from ludus.envs.world import SIZES, EnvAdapter, imported, parse_reference

ACTIONS = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
    "MountainCar": ("left", "nothing", "right"),
    "Acrobot": ("left", "nothing", "right"),
    "LunarLander": ("nothing", "left engine", "main engine", "right engine"),
}
"""Names of the actions of Gymnasium's own environments; their numbers are accepted too."""
_MOST_NUMBERS = 256
_COLOUR = re.compile(r"\x1b\[\d+(;\d+)*m(.*?)\x1b\[0m", re.DOTALL)


class GymnasiumEnv(Env):
    """One instance. A task gives a seed as `envs = {"lake": {"seed": 3}}`, or in its metadata; else its id."""

    isolation = "thread"  # few environments are made for several threads

    def __init__(self, id: str, actions: list[str] | None = None, **options: Any) -> None:
        """`actions` are names for the numbers of a Discrete space; other options are the environment's."""
        gymnasium = imported("gymnasium", "gymnasium", f"the environment gymnasium:{id}")
        if "render_mode" not in options and _has_text(gymnasium, id):
            options["render_mode"] = "ansi"
        self._shows_text = options.get("render_mode") == "ansi"
        try:
            self._env = gymnasium.make(id, **options)
        except (gymnasium.error.Error, TypeError, ModuleNotFoundError) as error:
            raise ConfigError(f"gymnasium:{id}: {error}") from error
        self._actions = _Actions(self._env.action_space, id, actions)
        self._mask: Any = None
        self._over = True

    def reset(self, task: Task, seed: int | None = None) -> Observation:
        seed = task.metadata.get("seed", _seed(task.id)) if seed is None else seed
        seen, info = self._env.reset(seed=seed)
        self._over, self._mask = False, info.get("action_mask")
        return Observation(f"{self._shown(seen)}\n{self._actions.described}")

    def step(self, action: str) -> Step:
        """Act in the environment.

        Args:
            action: One action, as the first observation says.
        """
        if self._over:
            return Step(OVER, terminated=True)
        try:
            given = self._actions.parsed(action)
        except ValueError:
            return Step(f"{action[:100]!r} is no action here. {self._actions.described}")
        seen, reward, terminated, truncated, info = self._env.step(given)
        self._over, self._mask = bool(terminated or truncated), info.get("action_mask")
        return Step(self._shown(seen), float(reward), bool(terminated), bool(truncated))

    def available_actions(self) -> list[str] | None:
        return [] if self._over else self._actions.listed(self._mask)

    def render(self) -> str:
        return str(self._env.render()) if self._shows_text else repr(self._env)

    def close(self) -> None:
        self._env.close()

    def _shown(self, seen: Any) -> str:
        if not self._shows_text:
            return in_words(seen)
        text = str(self._env.render() or "").strip("\n")
        return _COLOUR.sub(lambda mark: f"[{mark[2]}]", text)  # the place that a terminal would colour


class _Actions:
    """A space of actions, in words."""

    def __init__(self, space: Any, id: str, names: list[str] | None) -> None:
        self._space, self._kind = space, type(space).__name__
        known = ACTIONS.get(id.rpartition("/")[2].rpartition("-v")[0] or id, ())
        self._names: list[str] = []
        if self._kind == "Discrete":
            fitting = list(names or known)
            count = int(space.n)
            if names is not None and len(names) != count:
                raise ConfigError(f"gymnasium:{id} has {count} actions, and {len(names)} names for them")
            self._names = fitting if len(fitting) == count else []
        elif self._kind not in ("MultiDiscrete", "MultiBinary", "Text"):
            raise ConfigError(
                f"gymnasium:{id} has actions in {space}, which no text says well: Discrete, MultiDiscrete, "
                "MultiBinary and Text are covered"
            )

    @property
    def described(self) -> str:
        space = self._space
        if self._kind == "Discrete":
            first = int(space.start)
            if self._names:
                return f"Actions: {', '.join(self._names)}."
            return f"Actions: a number from {first} to {first + int(space.n) - 1}."
        if self._kind == "Text":
            return f"Actions: a text of {space.min_length} to {space.max_length} characters."
        sizes = space.nvec.flatten().tolist() if self._kind == "MultiDiscrete" else [2] * int(space.n)
        ranges = ", ".join(f"0 to {size - 1}" for size in sizes)
        return f"Actions: {len(sizes)} numbers ({ranges}), such as {' '.join('0' for _ in sizes)}."

    def parsed(self, text: str) -> Any:
        """The action; `ValueError` for a text that is none."""
        import numpy

        space, said = self._space, text.strip()
        if self._kind == "Text":
            action: Any = text
        elif self._kind == "Discrete":
            lower = said.lower()
            named = lower in self._names
            action = int(space.start) + self._names.index(lower) if named else int(said)
            action = numpy.int64(action)
        else:
            numbers = [int(one) for one in re.split(r"[\s,]+", said.strip("[]() "))]
            action = numpy.array(numbers, dtype=space.dtype).reshape(space.shape)
        if not space.contains(action):
            raise ValueError(text)
        return action

    def listed(self, mask: Any) -> list[str] | None:
        if self._kind != "Discrete" or int(self._space.n) > 1000:
            return None
        first = int(self._space.start)
        names = self._names or [str(first + number) for number in range(int(self._space.n))]
        return [name for number, name in enumerate(names) if mask is None or mask[number]]


def in_words(seen: Any) -> str:
    """An observation as text: of a Dict a line for each part, of arrays their numbers."""
    if isinstance(seen, str):
        return seen
    if isinstance(seen, dict):
        return "\n".join(f"{name}: {in_words(one)}" for name, one in seen.items())
    if isinstance(seen, tuple):
        return ", ".join(map(in_words, seen))
    if hasattr(seen, "tolist"):
        if getattr(seen, "size", 1) > _MOST_NUMBERS:
            return f"{seen.size} numbers of shape {tuple(seen.shape)}"
        return json.dumps(_rounded(seen.tolist()))
    return str(seen)


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return round(value, 4) if isinstance(value, float) else value


def _has_text(gymnasium: Any, id: str) -> bool:
    """Whether the environment shows itself in text."""
    try:
        spec = gymnasium.spec(id)
        make = gymnasium.envs.registration.load_env_creator(spec.entry_point)
    except Exception:  # noqa: BLE001 - `make` says what is wrong, in its own words
        return False
    return "ansi" in (getattr(make, "metadata", None) or {}).get("render_modes", ())


def gymnasium_tasks(reference: str) -> list[Task]:
    """Tasks for `gymnasium:ID`, each with a seed of its own; options are `size` and `prompt`."""
    id, split, options = parse_reference(reference)
    size = options.pop("size", SIZES[split])
    prompt = str(options.pop("prompt", "Act in the environment. Get as much reward as you can."))
    if options:
        raise ConfigError(
            f"gymnasium:{reference} has unknown options {', '.join(options)}: size, prompt"
        )
    ids = [f"{id}-{split}-{number}" for number in range(size)]
    return [Task.of(prompt, id=one, metadata={"seed": _seed(one)}) for one in ids]


def _seed(id: str) -> int:
    return key(id) % 2**31


ADAPTER = EnvAdapter(
    "gymnasium:ID",
    "Any with discrete or textual actions.",
    env=GymnasiumEnv,
    tasks=gymnasium_tasks,
    extra="gymnasium",
    packages=("gymnasium",),
)
