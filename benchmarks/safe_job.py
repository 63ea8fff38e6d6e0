"""What both sides of `versus_trl.py` share: the task, and the description of the work.

TRL's side runs in a virtual environment without Ludus, so nothing but the standard library is imported here.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Dial = Literal["red", "green", "blue"]
DIALS: tuple[Dial, ...] = ("red", "green", "blue")
NUMBERS = 10


@dataclass(frozen=True, slots=True)
class Job:
    """The work. A step plays `prompts` tasks `generations` times each, then updates the weights once."""

    checkpoint: str
    prompt: str
    combinations: list[list[int]]
    """One task each, in the order in which they are played."""
    tools: list[dict[str, Any]]
    """The tools as the model was told of them during the warm start."""
    prompt_tokens: list[int]
    """What the model reads first."""
    result_tokens: list[int]
    """What it reads when a tool has answered with `SAMPLE_RESULT`, up to where it speaks again."""
    prompts: int
    generations: int
    steps: int
    """The first of them is not measured."""
    max_turns: int
    max_turn_tokens: int
    max_tokens: int
    """Tokens of an episode, the prompt not included."""
    learning_rate: float
    threads: int
    latency: float
    """Mean seconds that a tool call takes besides its own work; 0 is none."""
    sigma: float
    """Spread of the logarithm of the latency."""
    seed: int

    @property
    def episodes(self) -> int:
        """Those that are measured."""
        return (self.steps - 1) * self.prompts * self.generations

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: str | Path) -> Job:
        return Job(**json.loads(Path(path).read_text(encoding="utf-8")))


SAMPLE_RESULT = "too low: 4 to 9 left"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One training step as it was measured, over all its episodes."""

    seconds: float
    playing: float
    """The part of it in which episodes are played and scored; the rest is training."""
    tool_calls: int
    action_tokens: float
    """Tokens that the model said, per episode."""
    reward: float

    @staticmethod
    def write_all(records: Sequence[StepRecord], path: str | Path) -> None:
        rows = [asdict(record) for record in records]
        Path(path).write_text(json.dumps(rows), encoding="utf-8")

    @staticmethod
    def read_all(path: Path) -> list[StepRecord]:
        return [StepRecord(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


class SafeBox:
    """The quickstart's safe in plain, synchronous Python. Opening it does not end the episode.

    In TRL an environment cannot end an episode: the model always speaks after a tool's result. So here it has a
    last word to say on both sides, and episodes end in the same way.
    """

    latency = 0.0
    sigma = 1.0
    calls: list[float] = []  # noqa: RUF012  (one for the process: how long each call slept)
    _episodes = 0

    def _start(self, combination: Sequence[int]) -> None:
        self._secret = dict(zip(DIALS, combination, strict=True))
        self._left = dict.fromkeys(DIALS, (0, NUMBERS - 1))
        self._found: set[str] = set()
        self._opened = False
        SafeBox._episodes += 1
        self._draws = random.Random(SafeBox._episodes)  # the same for the n-th episode of either side

    def turn(self, dial: Dial, to: int) -> str:
        """Turn a dial to a number.

        Args:
            dial: Which dial.
            to: The number, from 0 to 9.
        """
        self._wait()
        if not 0 <= to < NUMBERS:
            raise ValueError(f"the dials go from 0 to {NUMBERS - 1}")
        secret = self._secret[dial]
        if to == secret:
            self._found.add(dial)
            return "click"
        low, high = self._left[dial]
        low, high = (max(low, to + 1), high) if to < secret else (low, min(high, to - 1))
        self._left[dial] = low, high
        return f"too {'low' if to < secret else 'high'}: {low} to {high} left"

    def open(self) -> str:
        """Open the door. It can be tried once."""
        self._wait()
        self._opened = len(self._found) == len(DIALS)
        return "the door opens" if self._opened else "it stays shut"

    def get_reward(self) -> float:
        """1 for the open door, and half of it for finding all numbers, in parts."""
        return float(self._opened) + 0.5 * len(self._found) / len(DIALS)

    def _wait(self) -> None:
        seconds = 0.0
        if self.latency:
            location = math.log(self.latency) - self.sigma**2 / 2
            seconds = self._draws.lognormvariate(location, self.sigma)
            time.sleep(seconds)
        SafeBox.calls.append(seconds)
