"""TRL's side of `versus_trl.py`; it runs in TRL's own virtual environment.

python benchmarks/trl_side.py JOB.json RESULT.json
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safe_job import SAMPLE_RESULT, Job, SafeBox, StepRecord
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template


class TrlSafe(SafeBox):
    """The safe as TRL wants an environment; its public methods are the tools."""

    def reset(self, combination: list[int], **_: object) -> None:
        self._start(combination)


class TimedTrainer(GRPOTrainer):
    """Knows how long the last step's playing took."""

    playing = 0.0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        started = time.perf_counter()
        result = super()._generate_and_score_completions(inputs)
        self.playing = time.perf_counter() - started
        return result


class Clock(TrainerCallback):
    """Measures from the end of one step to the end of the next."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.records: list[StepRecord] = []
        self.last = 0.0
        self.calls = 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.last = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        metrics = self.trainer._metrics["train"]
        self.records.append(
            StepRecord(
                seconds=now - self.last,
                playing=self.trainer.playing,
                tool_calls=len(SafeBox.calls) - self.calls,
                action_tokens=metrics["completions/mean_length"][-1],
                reward=metrics["reward"][-1],
            )
        )
        self.last, self.calls = now, len(SafeBox.calls)


def train(job: Job) -> list[StepRecord]:
    """Train with TRL's GRPO, and measure every step."""
    torch.set_num_threads(job.threads)
    SafeBox.latency, SafeBox.sigma = job.latency, job.sigma
    clock = Clock()
    question = [{"role": "user", "content": job.prompt}]
    rows = [{"prompt": question, "combination": combination} for combination in job.combinations]
    trainer = clock.trainer = TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=torch.float32),
        args=settings(job),
        train_dataset=Dataset.from_list(rows),
        processing_class=load_tokenizer(job),
        environment_factory=TrlSafe,
        callbacks=[clock],
    )
    check_tokens(trainer, job, question)
    trainer.train()
    return clock.records


def load_tokenizer(job: Job) -> Any:
    """The checkpoint's tokenizer, told how to read tool calls and how the tools were described.

    TRL derives a tool's schema from its signature in slightly other words and in another order than Ludus. A
    small model that has learned one prompt is not asked to read another, so the template
    writes the tools it knows.
    """
    tokenizer = AutoTokenizer.from_pretrained(job.checkpoint)
    tokenizer.response_template = qwen3_template  # the same <tool_call> JSON in the same ChatML turns
    known = json.dumps(job.tools)
    swap = f"{{%- if tools %}}{{%- set tools = {known} %}}{{%- endif %}}"
    tokenizer.chat_template = swap + tokenizer.chat_template
    return tokenizer


def check_tokens(trainer: Any, job: Job, question: list[dict[str, str]]) -> None:
    """The model must read the same tokens on both sides, or the comparison means nothing."""
    trainer._batch_environments = [None]
    prompts, _, _ = trainer._tokenize_prompts([question])
    result = [{"role": "tool", "name": "turn", "content": SAMPLE_RESULT}]
    read = {"prompt": prompts[0], "tool result": trainer._get_tool_suffix_ids(result)}
    expected = {"prompt": job.prompt_tokens, "tool result": job.result_tokens}
    for what, tokens in read.items():
        if tokens != expected[what]:
            raise RuntimeError(f"TRL's {what} is {tokens}, and Ludus's is {expected[what]}")


def settings(job: Job) -> GRPOConfig:
    """As much work as Ludus does, with the fastest settings that were found for it on a CPU."""
    return GRPOConfig(
        output_dir=str(Path(job.checkpoint).parent / "trl"),
        max_steps=job.steps,
        per_device_train_batch_size=job.prompts * job.generations,
        gradient_accumulation_steps=1,
        num_generations=job.generations,
        max_completion_length=job.max_tokens,
        generation_kwargs={"max_new_tokens": job.max_turn_tokens},
        max_tool_calling_iterations=job.max_turns - 1,  # the first turn is not counted
        temperature=1.0,
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
    StepRecord.write_all(train(Job.read(sys.argv[1])), sys.argv[2])
