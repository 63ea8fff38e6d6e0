"""What commands share: groups that name all their commands, and arguments."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

# Which package the command line's errors come from differs between versions of typer (some bring their own
# copy of click), so the class is found as an ancestor of one that typer exports.
ClickError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class CommandGroup(TyperGroup):
    """Commands; an unknown one that is like none of them is answered with all of them."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except ClickError as error:
            if "Did you mean" not in error.message:
                error.message += f" The commands are: {', '.join(self.list_commands(ctx))}."
            raise


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Settings that replace the recipe's: key=value, table.key=value, stage.0.key=value (stages "
        "count from 0). key=none leaves an optional table or number out: warm_start=none.",
        show_default=False,
    ),
]

Model = Annotated[
    str | None, typer.Option("--model", "-m", help="A model's folder or hub name, or a run's folder.")
]
