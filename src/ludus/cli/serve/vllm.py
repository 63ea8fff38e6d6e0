"""`ludus serve vllm`: a vLLM server that can be trained on, for a recipe's `cluster.servers`."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from ludus.core.failures import ConfigError


def serve_vllm(
    recipe: Annotated[str, typer.Argument(help="A recipe's file, or the name of a prebuilt one.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change.", show_default=False),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(help="An interpreter that has vLLM: start the server. Without, show the command."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where the model is written; NAME-vllm when left out.")
    ] = None,
    host: Annotated[str, typer.Option(help="Give others an --extra='--api-key=...'.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    extra: Annotated[
        list[str] | None, typer.Option(help="A further flag for vLLM, such as --extra=--enforce-eager.")
    ] = None,
) -> None:
    """Start a vLLM server for a recipe, or show how. Train on it with cluster.servers."""
    from ludus.engine.servers.vllm_server import ServeOptions, serve_command, shell_line
    from ludus.training.config.parts import load_parts
    from ludus.training.config.recipe_files import load_recipe
    from ludus.training.rollout_engines import write_policy
    from ludus.training.run_context import load_policy

    settings = load_recipe(recipe, overrides or [])
    place = (folder or Path(f"{settings.name}-vllm")).absolute()
    if python is not None and shutil.which(python) is None:
        raise ConfigError(f"--python {python}: there is no such program")
    model, tokenizer = asyncio.run(load_policy(settings, load_parts(settings)))
    written = write_policy(model, tokenizer, place)
    options = ServeOptions(host, port, extra=tuple(extra or ()))
    variables, command = serve_command(
        python or "python", written.folder, written.dtype, written.context, written.on_cpu, options
    )
    typer.echo(shell_line(variables, command))
    typer.echo(f"# then: ludus train {recipe} 'cluster.servers=[\"http://{host}:{port}\"]'", err=True)
    if python is not None:
        os.execvpe(python, command, {**os.environ, **variables})
