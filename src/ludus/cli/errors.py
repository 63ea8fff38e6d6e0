"""How a command ends when something goes wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from ludus.core.failures import LudusError

# Which package the command line's errors come from differs between versions of typer (some bring their own
# copy of click), so the class is found as an ancestor of one that typer exports.
UsageProblem: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def explained(command: Callable[..., Any]) -> int:
    """Run a command; what Ludus raises on purpose is explained in a message instead of a traceback."""
    try:
        result = command(standalone_mode=False)
    except LudusError as error:
        if "LUDUS_TRACEBACK" in os.environ:
            raise
        _say(f"error: {error}")
        return 2
    except OSError as error:
        _say(f"error: {error}")
        return 2
    except UsageProblem as error:
        error.show()
        return int(error.exit_code)
    except typer.Exit as ending:
        return int(ending.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _say("stopped")
        return 130
    return result if isinstance(result, int) else 0


def _say(text: str) -> None:
    Console(stderr=True).print(Text(text, style="bold red"), soft_wrap=True)
