"""Shared by commands: groups, help that lists names, arguments, interruption; options of `ludus serve`."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from ludus.core.failures import ConfigError, LudusError, MissingExtraError

if TYPE_CHECKING:
    from ludus.serve import ServerConfig
    from ludus.tools.hosting import ToolReference, ToolsFile


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
    from ludus.rewards import GROUP_REWARDS, REWARDS
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


Settings = dict[str, Any]
F = TypeVar("F", bound=Callable[..., Any])

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", help="A TOML file with tools = [...] and tables sandbox and envs, as in a recipe."
    ),
]


@dataclass(frozen=True, slots=True)
class Serving:
    """What the options that servers share say."""

    settings: Settings
    """Those of `ServerConfig`."""
    token_file: Path | None
    no_token: bool
    quiet: bool
    verbose: bool

    def config(self, **more: object) -> ServerConfig:
        from ludus.serve import ServerConfig

        return ServerConfig.parse({**self.settings, **more}, "the command line")

    def token(self) -> tuple[str | None, Path | None]:
        """The token, and the file where clients find it if it was generated here."""
        from ludus.tools.remote_http import is_loopback, own_token

        file, given = self.token_file, os.environ.get("LUDUS_TOKEN")
        if self.no_token and (file or given):
            raise ConfigError(
                "--no-token stands beside a token (--token-file or LUDUS_TOKEN); give one of them"
            )
        if file is not None:
            try:
                return file.read_text(encoding="ascii").strip(), file
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"--token-file {file}: {error}") from error
        if self.no_token or given is not None or not is_loopback(self.settings["host"]):
            return given or None, None
        try:
            return own_token()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"no token can be kept for your clients: {error}. Set LUDUS_TOKEN, or --no-token where "
                "no other user has access to this machine"
            ) from error

    def log(self, *, quiet: bool = False) -> None:
        """Make JSON lines on standard error the log of this process."""
        from ludus.serve.telemetry import log_as_json

        if self.quiet and self.verbose:
            raise ConfigError("--quiet and --verbose: give one of them")
        is_quiet = self.quiet or quiet
        log_as_json(
            level=logging.WARNING if is_quiet else logging.DEBUG if self.verbose else logging.INFO
        )


_O = typer.Option
_SHARED: dict[str, tuple[Any, Any, Any]] = {
    "host": (str, "127.0.0.1", _O(help="Address to listen on; one beyond loopback needs a token.")),
    "port": (int, 0, _O(min=0, max=65535, help="0 takes a free one.")),
    "concurrency": (int, 256, _O(min=1, help="Calls or requests that run at once.")),
    "queue": (int, 4096, _O(min=0, help="Calls or requests that wait; more are refused.")),
    "max_sessions": (int, 16_384, _O(min=1, help="Sessions open at once.")),
    "idle_seconds": (float, 1800.0, _O(help="Seconds until an unused session is closed.")),
    "drain_seconds": (float, 30.0, _O(help="Seconds for running calls to finish at the end.")),
    "orphan_seconds": (float, 5.0, _O(help="Seconds that a call outlives its caller's connection.")),
    "client_seconds": (float, 30.0, _O(help="Seconds to wait for a slow client.")),
    "keepalive_seconds": (float, 75.0, _O(help="Seconds until an idle connection is closed.")),
    "max_body_bytes": (int, 8_000_000, _O(min=1024, help="Bytes of the largest request.")),
    "held_bytes": (int, 32_000_000, _O(min=1024, help="Bytes of large requests held at once.")),
    "token_file": (Path | None, None, _O(
        help="A file with the token; LUDUS_TOKEN when left out, on loopback a token of your own.")),
    "no_token": (bool, False, _O("--no-token", help="Let every user of this machine call the server.")),
    "quiet": (bool, False, _O("--quiet", help="Log warnings only.")),
    "verbose": (bool, False, _O("--verbose", help="Log every request and every call.")),
}  # fmt: skip
"""The options that servers share, and their defaults."""


SERVE_PACKAGES = ("aiohttp", "prometheus-client")
VIEW_PACKAGES = (*SERVE_PACKAGES, "duckdb")


def missing_packages(names: Iterable[str]) -> list[str]:
    return [name for name in names if find_spec(name.replace("-", "_")) is None]


def require(packages: Iterable[str], extra: str, purpose: str) -> None:
    """Refuse a command whose packages are not installed, before it reads anything."""
    for package in missing_packages(packages):
        raise MissingExtraError(package, extra, purpose)


def with_server_options(what: str, without: Collection[str] = (), **defaults: Any) -> Callable[[F], F]:
    """Give a command the options of a server, behind its own; its parameter `serving` gets what they say.

    Typer reads options from a signature, so that of the command is changed. `what` it serves is named where
    a package for it is missing.
    """

    def decorate(command: F) -> F:
        shared = [name for name in _SHARED if name not in without]
        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [one for one in own if one.name != "serving"]
        for name in shared:
            kind, default, option = _SHARED[name]
            annotation, default = Annotated[kind, option], defaults.get(name, default)
            keyword = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(name, keyword, default=default, annotation=annotation))

        @functools.wraps(command)
        def called(**given: Any) -> Any:
            require(SERVE_PACKAGES, "serve", what)
            of_server = {name: given.pop(name) for name in shared}
            others = {
                name: of_server.pop(name) for name in ("token_file", "no_token", "quiet", "verbose")
            }
            return command(**given, serving=Serving(of_server, **others))

        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in parameters}
        return cast(F, called)

    return decorate


def env_reference(text: str, pool: Settings) -> ToolReference:
    name, equals, reference = text.partition("=")
    if not equals or not name.isidentifier():  # an address may have a = of its own
        return {"env": text, "pool": pool}
    return {"env": reference, "name": name, "pool": pool}


def tools_file(settings: Path | None) -> ToolsFile:
    from ludus.tools.hosting import ToolsFile

    return ToolsFile.load(settings) if settings is not None else ToolsFile()


def announcing(
    stream: int, token_file: Path | None, greeting: Callable[[str], str] | None = None
) -> Callable[[str], None]:
    """A callback that writes the server's address to `stream` when it is ready: for people, as a greeting."""

    def ready(address: str) -> None:
        with suppress(BrokenPipeError):  # the parent may have closed its end
            if greeting is not None and os.isatty(stream):
                os.write(stream, greeting(address).encode())
                return
            told: dict[str, str | int] = {"address": address, "pid": os.getpid()}
            if token_file is not None:
                told["token_file"] = str(token_file)
            os.write(stream, json.dumps(told).encode() + b"\n")

    return ready


def model_greeting(address: str, name: str, token_file: Path | None, *, has_token: bool) -> str:
    """What a person exports to use a served model, and a first request."""
    key = "$LUDUS_TOKEN" if has_token else "none"
    if token_file is not None:
        key = f"$(cat {shlex.quote(str(token_file.absolute()))})"
    body = {"model": name, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}
    return f"""
{name} is served. In another terminal:

  export OPENAI_BASE_URL={address}/v1
  export OPENAI_API_KEY={key}

  curl "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \\
    -H 'Content-Type: application/json' \\
    -d {shlex.quote(json.dumps(body))}

Anthropic's clients read ANTHROPIC_BASE_URL={address} and ANTHROPIC_API_KEY. Ctrl-C stops the server.
"""


def private_stdout() -> int:
    """Keep standard output for the one line that programs read; what tools print goes to standard error."""
    sys.stdout.flush()
    private = os.dup(1)
    os.dup2(2, 1)
    return private
