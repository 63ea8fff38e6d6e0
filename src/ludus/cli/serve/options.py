"""Shared by the commands of `ludus serve`: options, the token, what is served, the readiness message."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ludus.core.failures import ConfigError

if TYPE_CHECKING:
    from ludus.serve import ServerConfig
    from ludus.tools.hosting import ToolReference, ToolsFile

Settings = dict[str, Any]

Host = Annotated[str, typer.Option(help="Address to listen on; one beyond loopback needs a token.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Calls that run at once.")]
Queue = Annotated[int, typer.Option(min=0, help="Calls that wait; more are refused.")]
MaxSessions = Annotated[int, typer.Option(min=1, help="Sessions open at once.")]
IdleSeconds = Annotated[float, typer.Option(help="Seconds until an unused session is closed.")]
DrainSeconds = Annotated[float, typer.Option(help="Seconds for running calls to finish at the end.")]
OrphanSeconds = Annotated[
    float, typer.Option(help="Seconds that a call outlives its caller's connection.")
]
ClientSeconds = Annotated[float, typer.Option(help="Seconds to wait for a slow client.")]
KeepaliveSeconds = Annotated[float, typer.Option(help="Seconds until an idle connection is closed.")]
MaxBodyBytes = Annotated[int, typer.Option(min=1024, help="Bytes of the largest request.")]
HeldBytes = Annotated[
    int, typer.Option(min=1024, help="Large requests held at once, in bytes; more are read later.")
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="A file with the token; LUDUS_TOKEN when left out, on loopback a token of your own."
    ),
]
NoToken = Annotated[
    bool, typer.Option("--no-token", help="Let every user of this machine call the server.")
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", help="A TOML file with tools = [...] and tables sandbox and envs, as in a recipe."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Log warnings only.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Log every request and every call.")]


def server_config(**settings: object) -> ServerConfig:
    from ludus.serve import ServerConfig

    return ServerConfig.parse(settings, "the command line")


def log_level(quiet: bool, verbose: bool) -> int:
    if quiet and verbose:
        raise ConfigError("--quiet and --verbose: give one of them")
    return logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO


def env_reference(text: str, pool: Settings) -> ToolReference:
    name, equals, reference = text.partition("=")
    if not equals or not name.isidentifier():  # an address may have a = of its own
        return {"env": text, "pool": pool}
    return {"env": reference, "name": name, "pool": pool}


def tools_file(settings: Path | None) -> ToolsFile:
    from ludus.tools.hosting import ToolsFile

    return ToolsFile.load(settings) if settings is not None else ToolsFile()


def announcing(stream: int, token_file: Path | None) -> Callable[[str], None]:
    """A callback that writes the server's address to `stream` when it is ready."""

    def ready(address: str) -> None:
        with suppress(BrokenPipeError):  # the parent may have closed its end
            told: dict[str, str | int] = {"address": address, "pid": os.getpid()}
            if token_file is not None:
                told["token_file"] = str(token_file)
            os.write(stream, json.dumps(told).encode() + b"\n")

    return ready


def private_stdout() -> int:
    """Keep standard output for the one line that programs read; what tools print goes to standard error."""
    sys.stdout.flush()
    private = os.dup(1)
    os.dup2(2, 1)
    return private


def chosen_token(file: Path | None, no_token: bool, host: str) -> tuple[str | None, Path | None]:
    """The token, and the file where clients find it if it was generated here."""
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
            "no other user has access to this machine"
        ) from error
