"""What RL makes of a judge that is noisy, and of one that can be gamed, on a task whose truth is known.

A model from scratch of a few thousand weights answers in eight tokens; an answer is right if it has a digit. A
scripted judge knows that and is wrong at a given rate, so its agreement with the truth is known and measured.
The policy is trained on the judge alone; the truth is logged beside it. The gameable judge pays for a
vowel more than for being right.

    python benchmarks/judge_noise.py            # about 4 minutes on one core
    python benchmarks/judge_noise.py --rates 0 0.3 --seeds 1 --steps 20
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ludus
from ludus.core import Message, Task
from ludus.core.generation import ChatOptions, ChatReply
from ludus.observe import RunFolder
from ludus.rewards import reward
from ludus.rewards.judges import Judge, LabelledAnswer, Ruler, measure_agreement

LAST = 5
"""Steps at the end whose mean is reported."""
RECIPE: dict[str, Any] = {
    "name": "judge-noise",
    "threads": 1,
    "model": {"scratch": {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "vocabulary": 300}},
    "budgets": {"max_turns": 1, "max_turn_tokens": 16, "max_tokens": 256},
    "engine": {"cache_tokens": 16384, "max_running": 64, "tokens_per_step": 2048},
}


def is_right(answer: str) -> bool:
    return bool(re.search(r"\d", answer))


@reward(name="success", weight=0.0)
def success(answer: str) -> float:
    """The truth: logged, and not trained on."""
    return float(is_right(answer))


class Speaker(ludus.Agent):
    """Says eight tokens, and that is the answer."""

    async def run(self, episode: ludus.Episode) -> None:
        episode.answer((await episode.generate(max_tokens=8)).text)


class ScriptedJudge:
    """A `ChatModel` that judges as it is told to: wrong at a rate, or in love with vowels."""

    name = "scripted judge"

    def __init__(self, rate: float, *, is_gameable: bool = False, seed: int = 0) -> None:
        self._rate, self._is_gameable = rate, is_gameable
        self._draw = random.Random(seed)

    async def chat(self, messages: Sequence[Message], options: ChatOptions = ChatOptions()) -> ChatReply:  # noqa: B008
        system, user = messages[0].content, messages[1].content
        code = re.findall(r'"code": "(\w+)"', user)[-1]
        if "attempts of AI agents" in system:
            shown = re.findall(rf"<attempt-\d+-{code}>\n(.*?)\n</attempt", user, re.DOTALL)
            scores: Any = [{"id": n, "score": self._score(text) / 10} for n, text in enumerate(shown, 1)]
        else:
            shown = re.findall(rf"<episode-{code}>\n(.*?)\n</episode", user, re.DOTALL)
            scores = {"right": self._score(shown[0])}
        said = json.dumps({"code": code, "scores": scores})
        asked = sum(len(message.content) for message in messages)
        return ChatReply(said, prompt_tokens=asked // 4, completion_tokens=len(said) // 4)

    def _score(self, answer: str) -> float:
        if self._is_gameable and re.search("[aeiou]", answer):
            return 10.0
        right = is_right(answer) != (self._draw.random() < self._rate)
        return (6.0 if self._is_gameable else 10.0) if right else 0.0

    async def close(self) -> None:
        """Nothing to close."""


def train(
    judge: ScriptedJudge, seed: int, steps: int, *, as_ruler: bool = False
) -> list[dict[str, Any]]:
    """The metrics of a run that is trained on the judge alone."""
    rewards: dict[str, Any] = {"rewards": [success]}
    if as_ruler:
        rewards["group_rewards"] = [Ruler(judge)]
    else:
        rewards["rewards"].append(Judge(judge, dimensions={"right": 1}, show="answer"))
    with tempfile.TemporaryDirectory() as folder:
        ludus.train(
            **RECIPE,
            seed=seed,
            rl={"steps": steps, "tasks": 8, "attempts": 8, "optimizer": {"learning_rate": 3e-3}},
            run={"folder": folder + "/run", "checkpoint_every": 1000, "trajectories_every": 1000},
            tasks=[Task.of(f"Say something, please, number {n}.", id=str(n)) for n in range(16)],
            agent=Speaker(),
            progress=False,
            **rewards,
        )
        return RunFolder(Path(folder) / "run").metrics()


def agreement(judge: ScriptedJudge) -> tuple[float, float]:
    """Accuracy and kappa against the truth on 1,000 answers, of which half are right."""
    draw = random.Random(7)
    answers = [
        "".join(draw.choices("bcd! ", k=8)) + "7" * (n % 2) + "e" * (n // 2 % 2) for n in range(1000)
    ]
    labels = [LabelledAnswer(Task.of("?"), text, float(is_right(text))) for text in answers]
    reward = Judge(judge, dimensions={"right": 1}, show="answer")
    found = asyncio.run(measure_agreement(reward, labels, threshold=0.5))
    return found.accuracy, found.kappa or 0.0


def tail(rows: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.fmean(row[name] for row in rows[-LAST:] if name in row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rates", type=float, nargs="*", default=[0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    print("| judge | accuracy | kappa | success, first step | success at the end | reward at the end | "
          "calls, tokens an episode |")  # fmt: skip
    print("|---|---|---|---|---|---|---|")
    cases = [(f"wrong at {rate:.0%}", rate, False, False) for rate in options.rates]
    cases += [("gameable by a vowel", 0.0, True, False), ("RULER, wrong at 20%", 0.2, False, True)]
    for name, rate, is_gameable, as_ruler in cases:
        accuracy, kappa = agreement(ScriptedJudge(rate, is_gameable=is_gameable))
        runs = [
            train(
                ScriptedJudge(rate, is_gameable=is_gameable, seed=seed),
                seed,
                options.steps,
                as_ruler=as_ruler,
            )
            for seed in range(options.seeds)
        ]
        ends = [tail(rows, "reward/success") for rows in runs]
        first = statistics.fmean(rows[0]["reward/success"] for rows in runs)
        cells = [
            name, f"{accuracy:.2f}", f"{kappa:+.2f}", f"{first:.2f}",
            f"{statistics.fmean(ends):.2f} ({min(ends):.2f} to {max(ends):.2f})",
            f"{statistics.fmean(tail(rows, 'reward') for rows in runs):.2f}",
            f"{tail(runs[0], 'judge/calls'):.2f}, {tail(runs[0], 'judge/tokens'):.0f}",
        ]  # fmt: skip
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
