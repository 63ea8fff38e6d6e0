"""Random ragged batches for the tests of this folder.

Hypothesis draws how many attempts there are and a seed; the rest follows from the seed, because drawing some
hundred numbers one by one takes longer than what is tested.
"""

from __future__ import annotations

import random

from hypothesis import strategies as st

from ludus.algos import Attempt, TurnTokens


def attempt_from(random: random.Random) -> Attempt:
    def number() -> float:
        return random.choice([0.0, 1.0, 0.1, -1.0, round(random.uniform(-3, 3), 3)])

    turns = [
        TurnTokens(
            action=random.randint(0, 3),
            observation=random.randint(0, 2),
            reward=random.choice([0.0, 0.0, 0.25, -0.5]),
            anchor=random.randint(-1, 2),
        )
        for _ in range(random.randint(0, 4))
    ]
    prompt, group = random.randint(1, 3), random.randint(0, 2)
    length = prompt + sum(turn.action + turn.observation for turn in turns)
    return Attempt(
        reward=number(),
        turns=turns,
        group=group,
        prompt=prompt,
        truncated=random.random() < 0.5,
        set=group % 2,  # a group lies within one set
        values=[number() for _ in range(length)],
        penalties=[random.choice([0.0, -0.1, 0.02]) for _ in range(length)],
    )


def batch_from(count: int, seed: int) -> list[Attempt]:
    source = random.Random(seed)
    return [attempt_from(source) for _ in range(count)]


batches = st.builds(batch_from, st.integers(0, 7), st.integers(0, 2**32))
