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

from ludus.core.failures import LudusError

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


class SynthCommand(TyperCommand):
    """`ludus synth`; its help ends with every method, those of installed packages among them."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from ludus.synth.method import METHODS, load_method

        width, lines = max(map(len, METHODS), default=0), []
        for name in sorted(METHODS):
            try:
                about = (load_method(name).__doc__ or "").strip().partition("\n")[0]
            except LudusError as error:
                about = f"cannot be loaded: {error}".partition("\n")[0]
            lines.append(f"{name:<{width}}  {about}")
        self.help = "\n".join([f"{str(self.help).partition(chr(8))[0].rstrip()}\n\n\b", *lines])
        super().format_help(ctx, formatter)


NAMED_BY = {
    "algorithm": "algorithms",
    "loss": "losses",
    "aggregation": "averages over tokens",
    "correction": "importance corrections",
    "envs": "environments",
    "tools": "tools",
    "rewards": "rewards",
    "group_rewards": "group rewards",
    "format": "action formats",
    "engine": "engines",
    "tier": "sandbox backends",
    "sampler": "task samplers",
}
"""Keys of recipes by their last part, and the kind of names (`known_names`) that they take."""


def known_names() -> dict[str, list[str]]:
    """Names that a recipe can use, by kind: built in, or registered by an installed package."""
    from ludus.algos.specs import AGGREGATIONS, ALGORITHMS, CORRECTIONS, ESTIMATORS, LOSSES
    from ludus.chat.formats import FORMATS
    from ludus.engine.config import ENGINES
    from ludus.envs.world import ADAPTERS, WORLDS
    from ludus.rewards.registry import GROUP_REWARDS, REWARDS
    from ludus.sandbox.config import BACKENDS
    from ludus.synth.method import METHODS
    from ludus.tools.library import TOOLS
    from ludus.training.data.tasks import SAMPLERS

    return {
        "algorithms": list(ALGORITHMS),
        "estimators": sorted(ESTIMATORS),
        "losses": sorted(LOSSES),
        "averages over tokens": sorted(AGGREGATIONS),
        "importance corrections": sorted(CORRECTIONS),
        "task samplers": sorted(SAMPLERS),
        "environments": [*sorted(WORLDS), *(f"{adapter}:NAME" for adapter in sorted(ADAPTERS))],
        "tools": sorted(TOOLS),
        "rewards": sorted(REWARDS),
        "group rewards": sorted(GROUP_REWARDS),
        "action formats": ["auto", *sorted(FORMATS)],
        "engines": sorted(ENGINES),
        "sandbox backends": sorted(BACKENDS),
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


_told: list[int] = []
"""The signals that have stopped work in this process."""


async def until_told(work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; SIGTERM and SIGHUP stop it as Ctrl-C does: `kill`, schedulers and a closed terminal lose
    nothing. Under nohup, which ignores SIGHUP, it goes on."""
    task = asyncio.ensure_future(work)

    def stop(number: int) -> None:
        _told.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
    return await task


def stopped_code() -> int:
    """The exit code of a command that was stopped: 128 and the first signal, which is SIGINT for Ctrl-C."""
    return 128 + next(iter(_told), signal.SIGINT)


@contextmanager
def stopped_says(console: Console, kept: str) -> Iterator[None]:
    """Around work that can be resumed: if it is stopped, print `kept`, which says how."""
    try:
        yield
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print(Text(f"stopped; {kept}"), soft_wrap=True)  # commands are there to be copied
        raise KeyboardInterrupt from None
