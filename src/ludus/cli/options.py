"""Shared by commands: groups, help that lists registered names, arguments, interruption."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

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


class RecipeCommand(TyperCommand):
    """A command that takes a recipe; its help ends with every name that a recipe can say."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        kinds = [f"{kind}: {', '.join(names)}" for kind, names in known_names().items()]
        self.epilog = "Names that a recipe knows (ludus settings KEY says what each key takes):\n\n" + (
            "\n\n".join(kinds)
        )
        super().format_help(ctx, formatter)


def known_names() -> dict[str, list[str]]:
    """Names that a recipe can use, by kind: built in, or registered by an installed package."""
    from ludus.algos.registry import ESTIMATORS, LOSSES
    from ludus.algos.specs import ALGORITHMS
    from ludus.chat.formats import FORMATS
    from ludus.envs.world import ADAPTERS, WORLDS
    from ludus.rewards.registry import GROUP_REWARDS, REWARDS
    from ludus.synth.method import METHODS
    from ludus.tools.library import TOOLS

    return {
        "algorithms": list(ALGORITHMS),
        "estimators": sorted(ESTIMATORS),
        "losses": sorted(LOSSES),
        "environments": [*sorted(WORLDS), *(f"{adapter}:NAME" for adapter in sorted(ADAPTERS))],
        "tools": sorted(TOOLS),
        "rewards": sorted(REWARDS),
        "group rewards": sorted(GROUP_REWARDS),
        "action formats": sorted(FORMATS),
        "methods of synthesis": sorted(METHODS),
    }


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Settings that replace the recipe's: key=value, table.key=value, stage.0.key=value (stages "
        "count from 0). key=none leaves an optional table, number or text out: warm_start=none.",
        show_default=False,
    ),
]

Model = Annotated[
    str | None, typer.Option("--model", "-m", help="A model's folder or hub name, or a run's folder.")
]

T = TypeVar("T")


async def until_told(work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; SIGTERM and SIGHUP stop it as Ctrl-C does: `kill`, schedulers and a closed terminal lose
    nothing. Under nohup, which ignores SIGHUP, it goes on."""
    task = asyncio.ensure_future(work)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await task


@contextmanager
def stopped_says(console: Console, kept: str) -> Iterator[None]:
    """Around work that can be resumed: if it is stopped, print `kept`, which says how."""
    try:
        yield
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print(Text(f"stopped; {kept}"), soft_wrap=True)  # commands are there to be copied
        raise KeyboardInterrupt from None
