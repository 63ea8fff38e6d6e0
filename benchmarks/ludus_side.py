"""Ludus's side of `versus_trl.py`: the warm start that both sides begin with, and the same training.

python benchmarks/ludus_side.py warm-start FOLDER THREADS VOCABULARY
python benchmarks/ludus_side.py train JOB.json RESULT.json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path

from safe_job import Job, SafeBox, StepRecord

import ludus
from ludus.core import Task, ToolCall
from ludus.training import load_recipe
from ludus.worlds.safe import expert, training_tasks

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "safe.toml"


class LudusSafe(SafeBox, ludus.Env):
    """The safe as Ludus wants an environment; its methods become tools as they are, and run in threads."""

    turn = ludus.tool(SafeBox.turn)
    open = ludus.tool(SafeBox.open)

    async def reset(self, task: Task, combination: Sequence[int]) -> None:
        self._start(combination)


class LoopLikeTRL(ludus.Agent):
    """The loop as TRL has it, so that both sides play the same episodes.

    It differs from Ludus's own in two ways: a malformed call ends the episode, where Ludus would tell the model
    what was wrong; and the calls of the last turn are not run, as the model would not read the results.
    """

    async def run(self, episode: ludus.Episode) -> None:
        while not episode.over:
            turn = await episode.generate()
            if not turn.calls or any(call.fault for call in turn.calls):
                episode.answer(turn.text)
            elif episode.turns_left > 0:
                episode.observe(await episode.call(turn.calls))
            else:
                return


@ludus.reward
async def paid(env: LudusSafe) -> float:
    return env.get_reward()


def talking_expert(task: Task) -> Generator[ToolCall | str, str, None]:
    """The quickstart's expert, with a last word."""
    yield from expert(task)
    yield "Done."


def warm_start(folder: str, threads: int, vocabulary: int) -> None:
    """The quickstart's warm start, on the safe that both sides play."""
    scratch = load_recipe(RECIPE).model.scratch
    assert scratch is not None
    ludus.train(
        RECIPE,
        threads=threads,
        model={"scratch": {**scratch.model_dump(), "vocabulary": vocabulary}},
        envs={"safe": LudusSafe},
        rewards=[paid],
        evaluation={"tasks": 1},
        demonstrations=talking_expert,
        rl={"steps": 0},
        run={"folder": folder},
    )


def train(job: Job, folder: Path) -> list[StepRecord]:
    """Train with Ludus, and measure every step."""
    SafeBox.latency, SafeBox.sigma = job.latency, job.sigma
    records: list[StepRecord] = []
    before, last = 0, time.perf_counter()

    def on_step(phase: str, step: int, total: int, metrics: dict[str, float]) -> None:
        nonlocal before, last
        now = time.perf_counter()
        training = metrics["time_share/training"] * metrics["step_seconds"]
        records.append(
            StepRecord(
                seconds=now - last,
                playing=now - last - training,
                tool_calls=len(SafeBox.calls) - before,
                action_tokens=metrics["tokens/action"],
                reward=metrics["reward"],
            )
        )
        before, last = len(SafeBox.calls), now

    ludus.train(
        name="versus",
        seed=job.seed,
        threads=job.threads,
        model=job.checkpoint,
        tasks=training_tasks(),
        envs={"safe": LudusSafe},
        rewards=[paid],
        agent=LoopLikeTRL(),
        budgets={
            "max_turns": job.max_turns,
            "max_turn_tokens": job.max_turn_tokens,
            "max_tokens": job.max_tokens + len(job.prompt_tokens),
        },
        rl={
            "steps": job.steps,
            "tasks": job.prompts,
            "attempts": job.generations,
            "optimizer": {"learning_rate": job.learning_rate, "micro_batch_tokens": 4096},
        },
        run={"folder": str(folder), "checkpoint_every": job.steps, "trajectories_every": 0},
        on_step=on_step,
    )
    return records


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["warm-start", folder, threads, vocabulary]:
            warm_start(folder, int(threads), int(vocabulary))
        case ["train", job, result]:
            StepRecord.write_all(train(Job.read(job), Path(result).with_name("run")), result)
        case _:
            sys.exit(__doc__)
