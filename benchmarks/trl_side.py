"""TRL's half of `versus_trl.py`, and what both halves share: the task and the job.

    python benchmarks/trl_side.py JOB.json RESULT.json

This file runs in TRL's own virtual environment, so at the top it imports the standard library alone. Ludus's half
imports the task and the job from here: one safe, one set of latencies, one description of the work.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Dial = Literal["red", "green", "blue"]
DIALS: tuple[Dial, ...] = ("red", "green", "blue")
NUMBERS = 10


@dataclass(frozen=True, slots=True)
class Job:
    """The work that both sides do. A step plays `prompts` tasks `generations` times each, then updates once."""

    checkpoint: str
    prompt: str
    combinations: list[list[int]]
    """One task each, in the order in which they are played."""
    tools: list[dict[str, Any]]
    """The tools as the model was told of them during the warm start."""
    prompt_tokens: list[int]
    prompts: int
    generations: int
    steps: int
    """The first of them is not measured."""
    max_turns: int
    max_turn_tokens: int
    max_tokens: int
    """Tokens of an episode, the prompt not included."""
    learning_rate: float
    temperature: float
    threads: int
    latency: float
    """Mean seconds that a tool call takes besides its own work; 0 is none."""
    sigma: float
    seed: int


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


class SafeBox:
    """The quickstart's safe in plain, synchronous Python. Opening it does not end the episode.

    In TRL an environment cannot end an episode: the model always speaks after a tool's result. So here it has a last
    word to say on both sides, and episodes end in the same way.
    """

    latency = 0.0
    """Mean seconds that a call takes besides its own work."""
    sigma = 1.0
    calls: list[float] = []  # noqa: RUF012  (shared on purpose: how long each call of the process slept)
    started = 0

    def _start(self, combination: list[int]) -> None:
        self._secret = dict(zip(DIALS, combination, strict=True))
        self._left = dict.fromkeys(DIALS, (0, NUMBERS - 1))
        self._found: set[str] = set()
        self._opened = False
        SafeBox.started += 1
        self._draws = random.Random(SafeBox.started)

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


def main(job_path: str, result_path: str) -> None:
    job = Job(**json.loads(Path(job_path).read_text(encoding="utf-8")))
    SafeBox.latency, SafeBox.sigma = job.latency, job.sigma
    records = train(job)
    Path(result_path).write_text(json.dumps([asdict(record) for record in records]), encoding="utf-8")


def train(job: Job) -> list[StepRecord]:
    """Train with TRL's GRPO, and measure every step."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOTrainer

    torch.set_num_threads(job.threads)
    tokenizer = load_tokenizer(job)

    class TrlSafe(SafeBox):
        def reset(self, combination: list[int], **_: object) -> None:
            self._start(combination)

    class Measured(GRPOTrainer):
        playing = 0.0

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            started = time.perf_counter()
            result = super()._generate_and_score_completions(inputs)
            Measured.playing = time.perf_counter() - started
            return result

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.records: list[StepRecord] = []
            self.last = 0.0
            self.calls = 0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.last = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            now = time.perf_counter()
            metrics = trainer._metrics["train"]
            self.records.append(
                StepRecord(
                    seconds=now - self.last,
                    playing=Measured.playing,
                    tool_calls=len(SafeBox.calls) - self.calls,
                    action_tokens=metrics["completions/mean_length"][-1],
                    reward=metrics["reward"][-1],
                )
            )
            self.last, self.calls = now, len(SafeBox.calls)

    clock = Clock()
    question = [{"role": "user", "content": job.prompt}]
    rows = [{"prompt": question, "combination": combination} for combination in job.combinations]
    trainer = Measured(
        model=AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=torch.float32),
        args=settings(job),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        environment_factory=TrlSafe,
        callbacks=[clock],
    )
    prompts, _, _ = tokenized_prompt(trainer, question)
    if prompts[0] != job.prompt_tokens:
        raise RuntimeError(
            "TRL gives the model another prompt than Ludus: the comparison would not be fair"
        )
    trainer.train()
    return clock.records


def load_tokenizer(job: Job) -> Any:
    """The checkpoint's tokenizer, told how to read tool calls and how the tools were described.

    TRL derives a tool's schema from its signature in slightly other words and in another order than Ludus; a small
    model that has learned one prompt is not asked to read another, so the template writes the tools that it knows.
    """
    from transformers import AutoTokenizer
    from trl.chat_template_utils import qwen3_template

    tokenizer = AutoTokenizer.from_pretrained(job.checkpoint)
    tokenizer.response_template = qwen3_template  # the same <tool_call> JSON in the same ChatML turns
    known = json.dumps(job.tools)
    tokenizer.chat_template = (
        f"{{%- if tools %}}{{%- set tools = {known} %}}{{%- endif %}}" + tokenizer.chat_template
    )
    return tokenizer


def tokenized_prompt(trainer: Any, question: list[dict[str, str]]) -> Any:
    """What TRL would give the model to read."""
    trainer._batch_environments = [None]
    return trainer._tokenize_prompts([question])


def settings(job: Job) -> Any:
    """TRL's fastest settings for this work that compute the same: see docs/benchmarks.md."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(Path(job.checkpoint).parent / "trl"),
        max_steps=job.steps,
        per_device_train_batch_size=job.prompts * job.generations,
        gradient_accumulation_steps=1,
        num_generations=job.generations,
        max_completion_length=job.max_tokens,
        generation_kwargs={"max_new_tokens": job.max_turn_tokens},
        # TRL counts the rounds of calls after the first turn
        max_tool_calling_iterations=job.max_turns - 1,
        temperature=job.temperature,
        learning_rate=job.learning_rate,
        lr_scheduler_type="constant",
        adam_beta2=0.99,
        beta=0.0,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        shuffle_dataset=False,
        seed=job.seed,
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
