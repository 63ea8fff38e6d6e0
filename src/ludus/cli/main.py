"""The command line: `ludus train | eval | rollout | synth | init | settings | show | view | envs | check`, ...

Only the commands and their options are here. What a command does is imported when it runs, so that
`ludus --help` and the lighter commands do not wait for torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ludus.cli.check_commands import check_app
from ludus.cli.options import ClickError, CommandGroup, Overrides
from ludus.cli.serve import serve_app
from ludus.core.failures import LudusError

app = typer.Typer(
    name="ludus",
    cls=CommandGroup,
    help="Train language-model agents with reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(check_app, name="check")
app.add_typer(serve_app, name="serve", cls=CommandGroup)

RecipeArgument = Annotated[
    Path | None,
    typer.Argument(help="A recipe: a TOML file, or a name such as safe.", show_default=False),
]
Model = Annotated[
    str | None, typer.Option("--model", "-m", help="A model's folder or hub name, or a run's folder.")
]
CheckpointOption = Annotated[
    str | None, typer.Option("--checkpoint", help="Of a run: best, last, or the number of a step.")
]
Attempts = Annotated[int | None, typer.Option(min=1, help="Episodes for each task.")]
Tasks = Annotated[
    int | None, typer.Option(min=1, help="Play only the first so many tasks (of each set).")
]
Temperature = Annotated[float | None, typer.Option(min=0.0, help="0 is greedy.")]
TopP = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Draw from the most likely tokens of this mass.")
]
TopK = Annotated[int, typer.Option(min=0, help="Draw from so many of the most likely tokens; 0 is all.")]
MinP = Annotated[
    float,
    typer.Option(min=0.0, max=1.0, help="Least share of the best token's likelihood."),
]
Penalty = Annotated[
    float, typer.Option(min=0.01, help="Above 1, tokens that have occurred are less likely.")
]
Show = Annotated[int, typer.Option(min=0, help="Print so many episodes.")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="Write the episodes to this Parquet file.")
]


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from ludus import __version__

        typer.echo(f"ludus {__version__}")
        raise typer.Exit


@app.command()
def train(
    recipe: RecipeArgument = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this folder, from its last checkpoint.")
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            help="Train again from the groups that the run in this folder recorded; plays nothing."
        ),
    ] = None,
) -> None:
    """Train by a recipe: `ludus train recipe.toml rl.steps=50`. Ctrl-C saves, and says how to go on."""
    from ludus.cli.train import run_training

    run_training(recipe, overrides or [], resume, replay)


@app.command("eval")
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
        typer.Option(help="Go on in this folder, or make it; evaluations/NAME-COUNTER when left out."),
    ] = None,
    temperature: Temperature = None,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    seed: Annotated[int, typer.Option(help="Decides the draws.")] = 0,
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


@app.command()
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
    seed: Annotated[int, typer.Option(help="Decides the draws.")] = 0,
    show: Show = 2,
    out: Out = None,
) -> None:
    """Play episodes on training tasks and look at them: `ludus rollout runs/safe-001 --tasks 3`."""
    from ludus.cli.eval import PlayOptions, run_rollout

    options = PlayOptions(
        tasks, attempts, temperature, top_p, top_k, min_p, repetition_penalty, seed, show, out
    )
    run_rollout(recipe, overrides or [], model, checkpoint, task_sets or [], options)


@app.command()
def synth(
    method: Annotated[
        str, typer.Argument(help="How: rejection, ... (docs/synthesis.md), or file.py:MyMethod.")
    ],
    recipe: Annotated[
        Path,
        typer.Argument(help="A recipe (TOML), or a run's folder, which knows its recipe and model."),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Settings that replace the recipe's: key=value; of the method, synth.key=value.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Who plays: a model's folder or hub name, a run's folder, or an OpenAI-compatible address.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="For an address: the model's tokenizer (folder or hub name)."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Go on in this folder, or make it; synth/NAME-METHOD-COUNTER when left out.",
        ),
    ] = None,
) -> None:
    """Make examples to learn from: `ludus synth rejection recipe.toml synth.attempts=16`."""
    from ludus.cli.synth import run_synthesis

    run_synthesis(method, recipe, overrides or [], model, tokenizer, out)


@app.command("mcp-rl")
def mcp_rl(
    server: Annotated[
        str,
        typer.Argument(help="The MCP server: a command such as 'uvx mcp-server-time', or an address."),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Settings of the training, key=value, such as rl.steps=50.", show_default=False
        ),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="What is trained: a folder, a hub name, or scratch.")
    ] = "scratch",
    writer: Annotated[
        str | None,
        typer.Option(
            help="Who writes scenarios: an OpenAI-compatible address, http://host:port/v1#NAME; policy, the "
            "model itself; or a table, '{ address = \"...\", seconds = 1800 }'."
        ),
    ] = None,
    judge: Annotated[
        str | None, typer.Option(help="Who ranks attempts, likewise; the writer when left out.")
    ] = None,
    scenarios: Annotated[int, typer.Option(min=2, help="To train on.")] = 32,
    held_out: Annotated[int, typer.Option(min=1, help="To measure on.")] = 8,
    about: Annotated[str, typer.Option(help="What the writer should know of the server.")] = "",
    files: Annotated[
        Path | None,
        typer.Option(help="A folder of which every episode gets a fresh copy: {files} in the command."),
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(help="A tool that may be used, by name or pattern; all if none.")
    ] = None,
    deny: Annotated[list[str] | None, typer.Option(help="A tool that may not be used.")] = None,
    per_episode: Annotated[
        bool | None,
        typer.Option(
            "--per-episode/--shared", help="A process or session for each episode, or one for all."
        ),
    ] = None,
    imitate: Annotated[
        int | None,
        typer.Option(min=0, help="Steps of imitation first; 300 for scratch, otherwise none."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Go on in this folder, or make it; runs/mcp-rl-COUNTER if none."
        ),
    ] = None,
) -> None:
    """From an MCP server to a trained agent: write scenarios, play, rank by a judge (RULER), GRPO, report."""
    from ludus.cli.mcp_rl import McpRlSettings, new_folder, run_mcp_rl
    from ludus.core.failures import ConfigError

    if writer is None:
        raise ConfigError(
            "who writes the scenarios and judges? Give --writer http://host:port/v1#NAME (ludus serve model "
            "MODEL makes one of a local model), or --writer policy: the model itself"
        )
    table: dict[str, Any] = {"mcp": server}
    given = {"allow": allow, "deny": deny, "files": str(files.resolve()) if files else None}
    table |= {name: value for name, value in given.items() if value}
    if per_episode is not None:
        table["per_episode"] = per_episode
    settings = McpRlSettings(
        table, model, writer, judge or writer, scenarios, held_out, about, imitate, seed
    )
    run_mcp_rl(settings, out or new_folder(), overrides or [])


@app.command()
def prefer(
    source: Annotated[Path, typer.Argument(help="A run's folder, or a Parquet file of episodes.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file of pairs; it is added to.")] = Path(
        "pairs.jsonl"
    ),
    judge: Annotated[
        str | None,
        typer.Option(help="Ask this model (http://HOST/v1#NAME) instead of you, in both orders."),
    ] = None,
    dimension: Annotated[
        list[str] | None, typer.Option(help="Ask for this respect too; several are possible.")
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="At most so many pairs.")] = 50,
    seed: Annotated[int, typer.Option(help="Which pairs.")] = 0,
    labels: Annotated[
        Path | None, typer.Option(help="Print the agreement with this file of pairs.")
    ] = None,
    split: Annotated[
        str, typer.Option(help="Which episodes of a run: train, or eval, those of held-out tasks.")
    ] = "train",
) -> None:
    """Say which of two attempts is better: pairs that DPO and reward models learn from."""
    from ludus.cli.prefer import collect_preferences

    collect_preferences(
        source,
        out,
        judge=judge,
        dimensions=dimension or [],
        pairs=pairs,
        seed=seed,
        labels=labels,
        split=split,
    )


@app.command("reward-model")
def reward_model(
    data: Annotated[
        Path,
        typer.Argument(help="Pairs (ludus prefer), scored steps, or a Parquet file of scored turns."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder that it is written to.")],
    model: Model = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            help="steps=200, batch=16, optimizer.learning_rate=1e-5, model.scratch.layers=2, ...",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train a reward model on preferences or on scored steps, and measure it on held-out ones."""
    from ludus.cli.prefer import train_reward_model

    train_reward_model(data, out, model, settings or [])


@app.command()
def init(
    name: Annotated[
        str | None, typer.Argument(help="What to call it; agent when left out.", show_default=False)
    ] = None,
    source: Annotated[
        str | None, typer.Option("--from", help="Begin with this recipe, such as safe or hunt.")
    ] = None,
) -> None:
    """Write a commented recipe, its code and a schema for editors into this folder: `ludus init my-agent`."""
    from ludus.cli.settings import write_recipe

    *others, recipe = map(str, write_recipe(name, source))
    typer.echo(f"wrote {recipe}, {', '.join(others)}")
    typer.echo(f"next: ludus check recipe {recipe}, then: ludus train {recipe}")


@app.command()
def settings(
    key: Annotated[
        str | None,
        typer.Argument(
            help="A key or a table (rl.kl, rl, stage.0); or TRL's or verl's.", show_default=False
        ),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="The page docs/settings.md.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="A JSON Schema, for editors.")] = False,
) -> None:
    """Show what a recipe can say: every key with its type, default and meaning."""
    from ludus.cli import settings

    if markdown or schema:
        typer.echo(settings.markdown() if markdown else settings.schema(), nl=schema)
        return
    found, meant = settings.find_settings(key or "")
    if meant:
        typer.echo(f"{key} is called here: {', '.join(meant)}\n")
    for name, one in found:
        default = settings.default_text(one)
        typer.echo(f"{name}{f' = {default}' if default else ''}    ({one.takes})\n    {one.meaning}")


@app.command()
def show(
    run: Annotated[
        Path, typer.Argument(help="A run's folder, or a Parquet file of episodes.", show_default=False)
    ],
    step: Annotated[int | None, typer.Option(min=0, help="Only episodes of this step.")] = None,
    split: Annotated[str | None, typer.Option(help="Only train, or only eval.")] = None,
    task: Annotated[str | None, typer.Option(help="Only of this task: an id, or a pattern (*).")] = None,
    attempt: Annotated[int | None, typer.Option(min=0, help="Only this attempt.")] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Only those that failed through no fault of the model's.")
    ] = False,
    wrong: Annotated[
        bool, typer.Option("--wrong", help="Only those that were scored and did not succeed.")
    ] = False,
    prompt: Annotated[
        bool, typer.Option("--prompt", help="Also print the tokens that the model read, decoded.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Leave nothing out of long texts.")] = False,
    tree: Annotated[
        bool, typer.Option("--tree", help="Print groups as trees of attempts, and no conversations.")
    ] = False,
    limit: Annotated[int, typer.Option(min=0, help="Print so many episodes; 0 is all.")] = 5,
) -> None:
    """Print recorded episodes, the newest first: `ludus show runs/safe-001 --failed --step 12`."""
    from ludus.cli.show import EpisodeFilter, show_episodes, show_trees

    wanted = EpisodeFilter(step, split, task, attempt, failed, wrong)
    if tree:
        show_trees(run, wanted, limit=limit)
        return
    show_episodes(run, wanted, limit=limit, prompt=prompt, full=full)


@app.command()
def view(
    folder: Annotated[
        Path, typer.Argument(help="A folder of runs, or one run's folder.", show_default=True)
    ] = Path("runs"),
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="With --play: settings that replace the recipe's.", show_default=False),
    ] = None,
    play: Annotated[
        Path | None,
        typer.Option(
            help="Also play by hand, by this recipe or run: its tools, environments and model."
        ),
    ] = None,
    model: Model = None,
    host: Annotated[
        str, typer.Option(help="Where to listen; others than 127.0.0.1 ask for a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free one.")] = 6060,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="LUDUS_TOKEN", help="Ask everybody for this token; made up where one is needed."
        ),
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = False,
) -> None:
    """Look inside runs in a browser: curves, episodes, tokens, comparisons: `ludus view runs/`."""
    from ludus.cli.view import run_viewer

    run_viewer(folder, overrides or [], play, model, host, port, token, browser)


@app.command()
def envs() -> None:
    """List the prebuilt environments, and what has to be installed for each; then those of others."""
    from rich.table import Table

    from ludus.envs import WORLDS
    from ludus.envs.world import OTHERS

    table = Table("environment", "what it is", "turns", "ready", box=None, pad_edge=False)
    prebuilt = sorted(WORLDS.values(), key=lambda world: world.name)
    for world in (*prebuilt, *OTHERS):
        missing = world.missing()
        ready = Text("needs " + "; ".join(missing), "yellow") if missing else Text("yes", "green")
        turns = "" if world in OTHERS else str(world.max_turns)
        table.add_row(world.name, world.summary, turns, ready)
    Console().print(table)


@app.command()
def simulate(
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="key=value: a load and a cluster, such as engines=64.", show_default=False),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="A row for each value: engines=8,64. Several go side by side, value by value."
        ),
    ] = None,
) -> None:
    """What would more GPUs do? Asynchronous training with its real controller and simulated engines."""
    from ludus.cli.simulate import print_simulation

    print_simulation(settings or [], sweep or [])


@app.command()
def cluster(
    address: Annotated[
        str | None,
        typer.Option(help="auto or host:port; RAY_ADDRESS, or this machine's, when left out."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Look at a Ray cluster: its nodes, and the trainer ranks, engines and tools of all runs on them."""
    import json

    from ludus.cli.cluster import print_cluster
    from ludus.dist.status import look

    status = look(address)
    if as_json:
        print(json.dumps(status.to_json()))
    else:
        print_cluster(status)


def run_command(command: Callable[..., Any]) -> int:
    """Run a command; errors that Ludus raises on purpose become a message instead of a traceback."""
    try:
        result = command(standalone_mode=False)
    except LudusError as error:
        if "LUDUS_TRACEBACK" in os.environ:
            raise
        _print_error(f"error: {error}")
        return 2
    except OSError as error:
        _print_error(f"error: {error}")
        return 2
    except ClickError as error:
        error.show()
        return int(error.exit_code)
    except typer.Exit as ending:
        return int(ending.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _print_error("stopped")
        return 130
    return result if isinstance(result, int) else 0


def _print_error(text: str) -> None:
    Console(stderr=True).print(Text(text, style="bold red"), soft_wrap=True)


def run() -> None:
    """The entry point: errors on purpose are one message and exit code 2; Ctrl-C is 130."""
    # Before torch loads its thread pool: threads that spin while they wait bring a small model to a crawl
    # as soon as anything else wants the same cores, and gain nothing measurable when nothing does.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # references such as file.py:function are looked for where the user stands
    sys.path.insert(0, str(Path.cwd()))
    sys.exit(run_command(app))


if __name__ == "__main__":
    run()
