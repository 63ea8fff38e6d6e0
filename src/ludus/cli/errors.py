"""How a command ends when something goes wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from ludus.core.failures import LudusError


def explained(command: Callable[..., Any]) -> int:
    """Run a command; what Ludus raises on purpose is explained in a message instead of a traceback."""
    try:
        result = command(standalone_mode=False)
    except LudusError as error:
        if "LUDUS_TRACEBACK" in os.environ:
            raise
        _say(f"error: {error}")
        return 2
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _say("stopped")
        return 130
    return result if isinstance(result, int) else 0


def _say(text: str) -> None:
    Console(stderr=True).print(Text(text, style="bold red"), soft_wrap=True)
