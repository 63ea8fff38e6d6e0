"""The command line: `ludus train | eval | rollout | export | synth | init | show | view | envs | check`, ...

The options of the commands are in the modules that end in `_commands`, and in `check`. What a command does is
imported when it runs, so that `ludus --help` and the lighter commands do not wait for torch.
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

from ludus.cli.check.commands import check_app
from ludus.cli.data_commands import mcp_rl, prefer, reward_model, synth
from ludus.cli.export.commands import export
from ludus.cli.look_commands import cluster, compare, envs, init, settings, show, simulate, view
from ludus.cli.options import ClickError, CommandGroup, RecipeCommand, SynthCommand, stopped_code
from ludus.cli.run_commands import evaluate, rollout, train
from ludus.cli.serve_commands import serve_app
from ludus.core.failures import LudusError


class FirstPage(CommandGroup):
    """Commands in the order of `FIRST` and `FURTHER`; typer by itself puts groups last."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*FIRST, *FURTHER]


app = typer.Typer(
    name="ludus",
    cls=FirstPage,
    help="Train language-model agents with reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# The first page of `ludus --help`, in the order of a first hour; then the rest, under a heading of its own.
FIRST: dict[str, Callable[..., None] | typer.Typer] = {
    "train": train,
    "eval": evaluate,
    "rollout": rollout,
    "show": show,
    "view": view,
    "init": init,
    "check": check_app,
    "serve": serve_app,
    "synth": synth,
    "compare": compare,
    "export": export,
}
FURTHER: dict[str, Callable[..., None] | typer.Typer] = {
    "settings": settings,
    "envs": envs,
    "mcp-rl": mcp_rl,
    "prefer": prefer,
    "reward-model": reward_model,
    "simulate": simulate,
    "cluster": cluster,
}
for panel, commands in (("Commands", FIRST), ("Further commands", FURTHER)):
    for name, command in commands.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, cls=CommandGroup, rich_help_panel=panel)
        else:
            takes_recipe = command in (train, evaluate, rollout, settings)
            own = SynthCommand if command is synth else RecipeCommand if takes_recipe else None
            app.command(name, cls=own, no_args_is_help=own is SynthCommand, rich_help_panel=panel)(
                command
            )


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from ludus import __version__

        typer.echo(f"ludus {__version__}")
        raise typer.Exit


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
        return stopped_code()
    if result == 130:  # what typer makes of an interrupt, whichever signal it was
        return stopped_code()
    return result if isinstance(result, int) else 0


def _print_error(text: str) -> None:
    Console(stderr=True).print(Text(text, style="bold red"), soft_wrap=True)


def run() -> None:
    """The entry point: errors on purpose are one message and exit code 2; Ctrl-C is 130, SIGTERM 143."""
    # Before torch loads its thread pool: threads that spin while they wait bring a small model to a crawl
    # as soon as anything else wants the same cores, and gain nothing measurable when nothing does.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # references such as file.py:function are looked for where the user stands
    sys.path.insert(0, str(Path.cwd()))
    sys.exit(run_command(app))


if __name__ == "__main__":
    run()
