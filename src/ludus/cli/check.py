"""`ludus check`: find out what is wrong before a run does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

check_app = typer.Typer(
    help="Check a recipe, an environment, a tool or the sandbox.", no_args_is_help=True
)
Overrides = Annotated[list[str] | None, typer.Argument(help="Settings that replace the recipe's.")]


@check_app.command("recipe")
def check_recipe(
    recipe: Annotated[Path, typer.Argument(help="A TOML file, or a name such as safe.")],
    overrides: Overrides = None,
    call_tools: Annotated[
        bool, typer.Option(help="Call each tool a few times, with arguments that its schema allows.")
    ] = True,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="How long each of the things that it tries may take.")
    ] = 60.0,
) -> None:
    """Load everything that a recipe names, check its rewards on its tasks, play one episode, try its tools."""
    from ludus.cli.checking import recipe_findings

    _finish(recipe_findings(recipe, overrides or [], call_tools, seconds), str(recipe))


@check_app.command("env")
def check_environment(
    env: Annotated[str, typer.Argument(help="A prebuilt environment's name, or module:Class.")],
    tasks: Annotated[
        str | None, typer.Option(help="Tasks to reset it with: a file, or module:function.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What the tasks call it, where they name several.")
    ] = None,
) -> None:
    """Reset, act, close: does an environment keep its contract?"""
    from ludus.cli.checking import env_findings

    _finish(env_findings(env, tasks, name), env)


@check_app.command("tool")
def check_tool(
    tool: Annotated[
        str, typer.Argument(help="module:function, file.py:function, or a name such as python.")
    ],
    arguments: Annotated[str | None, typer.Option(help="JSON arguments to call it with.")] = None,
) -> None:
    """Show a tool as the model sees it, and call it."""
    from ludus.cli.checking import tool_findings

    _finish(tool_findings(tool, arguments), tool)


@check_app.command("sandbox")
def check_sandbox(
    preload: Annotated[list[str] | None, typer.Option(help="A module to preload; repeatable.")] = None,
    network: Annotated[bool, typer.Option(help="Let code inside use the network.")] = False,
) -> None:
    """Show which layers of isolation hold on this machine, found out by trying every door from inside."""
    from ludus.cli.sandboxing import sandbox_findings

    _finish(sandbox_findings(tuple(preload or ()), network), "sandbox")


def _finish(findings: list[tuple[str, str]], what: str) -> None:
    """Print findings as (severity, text); an error among them makes the command fail."""
    console = Console()
    styles = {"error": "bold red", "warning": "yellow", "info": ""}
    for severity, text in findings:
        console.print(Text(f"{severity}: {text}", style=styles[severity]), soft_wrap=True)
    broken = sum(severity == "error" for severity, _ in findings)
    console.print(Text(f"{what}: " + (f"{broken} error(s)" if broken else "ok")))
    if broken:
        raise typer.Exit(1)
