"""`ludus train | eval | rollout`: the commands and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ludus.cli.options import Model, Overrides
from ludus.core.failures import ConfigError

RecipeArgument = Annotated[
    Path | None,
    typer.Argument(help="A recipe: a TOML file, or a name such as safe.", show_default=False),
]
CheckpointOption = Annotated[
    str | None,
    typer.Option("--checkpoint", help="The checkpoint of a run: best, last, or the number of a step."),
]
Attempts = Annotated[int | None, typer.Option(min=1, help="Episodes for each task.")]
Tasks = Annotated[
    int | None, typer.Option(min=1, help="Play only the first so many tasks (of each set).")
]
Temperature = Annotated[float | None, typer.Option(min=0.0, help="0 is greedy.")]
TopP = Annotated[
    float | None, typer.Option(min=0.0, max=1.0, help="Draw from the most likely tokens of this mass.")
]
TopK = Annotated[
    int | None, typer.Option(min=0, help="Draw from so many of the most likely tokens; 0 is all.")
]
MinP = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, help="Least share of the best token's likelihood."),
]
Penalty = Annotated[
    float | None, typer.Option(min=0.01, help="Above 1, tokens that have occurred are less likely.")
]
Show = Annotated[int, typer.Option(min=0, help="Number of episodes to print.")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="Write the episodes to this Parquet file.")
]


def train(
    recipe: RecipeArgument = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None, typer.Option(help="Resume the run in this folder from its last checkpoint.")
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            help="Train again from the groups that the run in this folder recorded; plays nothing."
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Train once with each of these seeds, as a study: 0,1,2.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="Train once with each value: rl.optimizer.learning_rate=1e-6,3e-6. Several --sweep make a "
            "grid; 'a=1,2 b=3,4' go side by side."
        ),
    ] = None,
    parallel: Annotated[
        int,
        typer.Option(min=1, help="How many runs of a study go side by side; they share cores and GPUs."),
    ] = 1,
) -> None:
    """Train by a recipe: `ludus train recipe.toml rl.steps=50`. Ctrl-C saves, and says how to go on."""
    from ludus.cli.study import StudyOptions, resume_study, run_study, study_settings
    from ludus.cli.train import run_training

    options = StudyOptions(seeds, sweep or [], parallel)
    settings = study_settings(resume) if resume is not None else None
    if resume is not None and settings is not None:
        resume_study(
            resume, settings, options, [str(one) for one in (recipe, *(overrides or [])) if one]
        )
    elif not options.is_study:
        run_training(recipe, overrides or [], resume, replay)
    elif recipe is None or resume is not None or replay is not None:
        raise ConfigError("--seeds and --sweep are for a recipe: name one, without --resume or --replay")
    else:
        run_study(recipe, overrides or [], options)


def evaluate(
    recipe: Annotated[
        Path,
        typer.Argument(help="A recipe (TOML), or a run's folder, which knows its recipe and model."),
    ],
    overrides: Overrides = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            help="A model's folder or hub name, a run's folder, or an OpenAI-compatible address such as "
            "http://127.0.0.1:8000/v1#NAME (key: LUDUS_API_KEY). May be given several times.",
        ),
    ] = None,
    checkpoint: CheckpointOption = None,
    against: Annotated[
        str | None, typer.Option(help="Another model, which the others are compared with by task.")
    ] = None,
    tasks: Tasks = None,
    attempts: Attempts = None,
    turns: Annotated[str | None, typer.Option(help="Play under each of these budgets: 2,4,8.")] = None,
    pass_at: Annotated[str | None, typer.Option(help="The k of pass@k: 1,4,16.")] = None,
    by: Annotated[str | None, typer.Option(help="The metadata key that names sub-tasks.")] = None,
    results: Annotated[
        Path | None,
        typer.Option(help="Folder to write, or to resume in; evaluations/NAME-COUNTER when left out."),
    ] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = None,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="For an address: the model's tokenizer (folder or hub name); chat without it."
        ),
    ] = None,
    prompt: Annotated[
        str, typer.Option(help="For an address with a tokenizer: send prompts as tokens or as text.")
    ] = "tokens",
    tools: Annotated[
        str, typer.Option(help="For an address without one: tools as text, or native in each request.")
    ] = "text",
    request: Annotated[
        str | None, typer.Option(help="For an address: further fields of each request, as JSON.")
    ] = None,
    show: Show = 0,
    out: Out = None,
) -> None:
    """Measure models on held-out tasks: `ludus eval runs/safe-001`, or `ludus eval recipe.toml -m MODEL`."""
    from ludus.cli.eval import EvalOptions, PlayOptions, run_evaluation

    options = PlayOptions(
        tasks, attempts, temperature, top_p, top_k, min_p, repetition_penalty, seed, show, out
    )
    study = EvalOptions(
        model or [], against, turns, pass_at, by, results, tokenizer, prompt, tools, request, checkpoint
    )
    run_evaluation(recipe, overrides or [], study, options)


def rollout(
    recipe: Annotated[
        Path,
        typer.Argument(help="A recipe (TOML), or a run's folder, which knows its recipe and model."),
    ],
    overrides: Overrides = None,
    model: Model = None,
    checkpoint: CheckpointOption = None,
    task_sets: Annotated[
        list[str] | None,
        typer.Option("--set", help="Play this task set, where there are several; repeatable."),
    ] = None,
    tasks: Tasks = 2,
    attempts: Attempts = 1,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    show: Show = 2,
    out: Out = None,
) -> None:
    """Play episodes on training tasks and look at them: `ludus rollout runs/safe-001 --tasks 3`."""
    from ludus.cli.eval import PlayOptions, run_rollout

    options = PlayOptions(
        tasks, attempts, temperature, top_p, top_k, min_p, repetition_penalty, seed, show, out
    )
    run_rollout(recipe, overrides or [], model, checkpoint, task_sets or [], options)
