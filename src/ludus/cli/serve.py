"""`ludus serve`: tools behind HTTP, until told to stop."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ludus.core.failures import ConfigError

if TYPE_CHECKING:
    from ludus.serve import ServerConfig
    from ludus.tools.hosting import ToolReference


serve_app = typer.Typer(
    help="Serve tools over HTTP.", no_args_is_help=True, pretty_exceptions_enable=False
)

Backend = Literal["local", "processes", "ray"]


@serve_app.callback()
def _serve() -> None:
    """Serve tools over HTTP."""


@serve_app.command("tools")
def serve_tools(
    references: Annotated[
        list[str] | None,
        typer.Argument(
            help="module:function, file.py:function, or a name such as python, bash, sql.",
            metavar="TOOL...",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        Path | None,
        typer.Option(
            "--config", help="A TOML file with tools = [...] and a table sandbox, as in a recipe."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Others can reach it only with a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    backend: Annotated[
        Backend, typer.Option(help="Where tools run: this process, worker processes, Ray actors.")
    ] = "local",
    workers: Annotated[int, typer.Option(min=1, help="Processes or actors.")] = 2,
    concurrency: Annotated[int, typer.Option(min=1, help="Calls that run at once.")] = 256,
    queue: Annotated[int, typer.Option(min=0, help="Calls that wait; more are refused.")] = 4096,
    limit: Annotated[
        list[str] | None, typer.Option(help="Calls of one tool that run at once: NAME=NUMBER.")
    ] = None,
    max_sessions: Annotated[int, typer.Option(min=1, help="Sessions open at once.")] = 16_384,
    idle_seconds: Annotated[float, typer.Option(help="When an unused session is closed.")] = 1800.0,
    drain_seconds: Annotated[float, typer.Option(help="Grace for running calls at the end.")] = 30.0,
    orphan_seconds: Annotated[
        float, typer.Option(help="How long a call outlives its caller's connection.")
    ] = 5.0,
    client_seconds: Annotated[float, typer.Option(help="Patience with slow clients.")] = 30.0,
    keepalive_seconds: Annotated[float, typer.Option(help="Patience with silent ones.")] = 75.0,
    max_body_bytes: Annotated[int, typer.Option(min=1024, help="The largest request.")] = 8_000_000,
    held_bytes: Annotated[
        int, typer.Option(min=1024, help="Large requests held at once, in bytes; more are read later.")
    ] = 32_000_000,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="A file with the token; LUDUS_TOKEN when left out, on loopback a token of your own."
        ),
    ] = None,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Let every user of this machine call the tools.")
    ] = False,
    quiet: Annotated[bool, typer.Option(help="Log warnings only.")] = False,
) -> None:
    """Serve tools to runs elsewhere. Prints {"address": ...} when it is ready; SIGTERM drains it."""
    from ludus.serve import ServerConfig

    config = ServerConfig.parse(
        {
            "host": host,
            "port": port,
            "concurrency": concurrency,
            "queue": queue,
            "tool_concurrency": _limits(limit or []),
            "max_sessions": max_sessions,
            "idle_seconds": idle_seconds,
            "drain_seconds": drain_seconds,
            "orphan_seconds": orphan_seconds,
            "client_seconds": client_seconds,
            "keepalive_seconds": keepalive_seconds,
            "max_body_bytes": max_body_bytes,
            "held_bytes": held_bytes,
        },
        "the command line",
    )
    token, kept = _token(token_file, no_token, host)
    _run(_tools(references or [], settings), backend, workers, config, token, kept, quiet)


def _tools(references: list[str], settings: Path | None) -> list[ToolReference]:
    """The tools of the command line and of the file, and where they run."""
    from ludus.tools.hosting import ToolsFile

    file = ToolsFile.load(settings) if settings is not None else ToolsFile()
    if not references and not file.tools:
        raise ConfigError("name at least one tool, or give --config with a list tools = [...]")
    return [*references, *file.references]


def _run(
    references: list[ToolReference],
    backend: Backend,
    workers: int,
    config: ServerConfig,
    token: str | None,
    token_file: Path | None,
    quiet: bool,
) -> None:
    from ludus.serve import ToolServer, serve_until_told
    from ludus.serve.telemetry import log_as_json
    from ludus.tools.hosting import LocalHost, ProcessHost, ToolHost, load_tools

    log_as_json(level=logging.WARNING if quiet else logging.INFO)
    announce = _private_stdout()

    def make_host() -> ToolHost:
        if backend == "processes":
            return ProcessHost(references, workers)
        if backend == "ray":
            from ludus.dist import RayHost

            return RayHost(references, workers)
        return LocalHost(lambda: load_tools(references))

    def ready(address: str) -> None:
        with suppress(BrokenPipeError):  # the parent may have closed its end
            told: dict[str, str | int] = {"address": address, "pid": os.getpid()}
            if token_file is not None:
                told["token_file"] = str(token_file)
            os.write(announce, json.dumps(told).encode() + b"\n")

    async def serve() -> None:
        await serve_until_told(ToolServer(make_host(), config, token=token), ready)

    asyncio.run(serve())


def _private_stdout() -> int:
    """Keep standard output for the one line that programs read; what tools print goes to standard error."""
    sys.stdout.flush()
    private = os.dup(1)
    os.dup2(2, 1)
    return private


def _token(file: Path | None, no_token: bool, host: str) -> tuple[str | None, Path | None]:
    """The token, and the file where clients find it if it is one of our own."""
    from ludus.tools.remote_http import is_loopback, own_token

    given = os.environ.get("LUDUS_TOKEN")
    if no_token and (file or given):
        raise ConfigError(
            "--no-token stands beside a token (--token-file or LUDUS_TOKEN); give one of them"
        )
    if file is not None:
        try:
            return file.read_text(encoding="ascii").strip(), file
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--token-file {file}: {error}") from error
    if no_token or given is not None or not is_loopback(host):
        return given or None, None
    try:
        return own_token()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"no token can be kept for your clients: {error}. Set LUDUS_TOKEN, or --no-token where "
            "nobody else uses this machine"
        ) from error


def _limits(texts: list[str]) -> dict[str, int]:
    limits: dict[str, int] = {}
    for text in texts:
        name, equals, number = text.partition("=")
        if not equals or not number.isdecimal():
            raise ConfigError(f"--limit is written NAME=NUMBER, not {text!r}")
        limits[name] = int(number)
    return limits
