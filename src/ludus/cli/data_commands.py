"""`ludus synth | mcp-rl | prefer | reward-model`: the commands and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ludus.cli.options import Model


def synth(
    method: Annotated[str, typer.Argument(help="One of the methods above, or file.py:MyMethod.")],
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
            help="Folder to write, or to resume in; synth/NAME-METHOD-COUNTER when left out.",
        ),
    ] = None,
) -> None:
    """Make examples to learn from: `ludus synth rejection recipe.toml synth.attempts=16`.

    The methods; docs/synthesis.md says which one when, `ludus settings synth` what each can be told:
    """
    from ludus.cli.synth import run_synthesis

    run_synthesis(method, recipe, overrides or [], model, tokenizer, out)


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
        str, typer.Option("--model", "-m", help="The model to train: a folder, a hub name, or scratch.")
    ] = "scratch",
    writer: Annotated[
        str | None,
        typer.Option(
            help="The model that writes scenarios: an OpenAI-compatible address, http://host:port/v1#NAME; "
            "policy, the model itself; or a table, '{ address = \"...\", seconds = 1800 }'."
        ),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(help="The model that ranks attempts, named as --writer; the writer when left out."),
    ] = None,
    scenarios: Annotated[int, typer.Option(min=2, help="Scenarios to train on.")] = 32,
    held_out: Annotated[int, typer.Option(min=1, help="Scenarios to measure on.")] = 8,
    about: Annotated[str, typer.Option(help="Background on the server for the writer.")] = "",
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
    seed: Annotated[int, typer.Option(help="Seed of all randomness.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Folder to write, or to resume in; runs/mcp-rl-COUNTER if none."
        ),
    ] = None,
) -> None:
    """From an MCP server to a trained agent: write scenarios, play, rank by a judge (RULER), GRPO, report."""
    from ludus.cli.mcp_rl import McpRlSettings, run_mcp_rl
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
    run_mcp_rl(settings, out, overrides or [])


def prefer(
    source: Annotated[Path, typer.Argument(help="A run's folder, or a Parquet file of episodes.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file of pairs; it is added to.")] = Path(
        "pairs.jsonl"
    ),
    judge: Annotated[
        str | None,
        typer.Option(help="A model (http://HOST/v1#NAME) that is asked instead of you, in both orders."),
    ] = None,
    dimension: Annotated[
        list[str] | None, typer.Option(help="A further dimension to ask about; repeatable.")
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Most pairs to ask about.")] = 50,
    seed: Annotated[int, typer.Option(help="Seed of the choice of pairs.")] = 0,
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


def reward_model(
    data: Annotated[
        Path,
        typer.Argument(help="Pairs (ludus prefer), scored steps, or a Parquet file of scored turns."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder of the model.")],
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
