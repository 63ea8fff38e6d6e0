"""`ludus init | settings | show | view | envs | simulate | cluster`: the commands and their options."""

from __future__ import annotations

import asyncio
import json
import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ludus.cli.options import VIEW_PACKAGES, Model, require
from ludus.core.failures import ConfigError

_WIDTH = 110


def init(
    name: Annotated[
        str | None, typer.Argument(help="Name of the recipe; agent when left out.", show_default=False)
    ] = None,
    source: Annotated[
        str | None, typer.Option("--from", help="Begin with this recipe, such as safe or hunt.")
    ] = None,
) -> None:
    """Write a commented recipe, its code and a schema for editors into this folder: `ludus init my-agent`."""
    from ludus.cli.settings import write_recipe

    *others, recipe = map(str, write_recipe(name, source))
    typer.echo(f"wrote {recipe}, {', '.join(others)}")
    typer.echo(f"next: ludus check recipe {recipe}, then: ludus train {recipe}")


def settings(
    key: Annotated[
        str | None,
        typer.Argument(
            help="A key or a table (rl.kl, rl, stage.0); or TRL's or verl's.", show_default=False
        ),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="The page docs/settings.md.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="A JSON Schema, for editors.")] = False,
) -> None:
    """Show what a recipe can say: every key with its type, default and meaning."""
    from ludus.cli import settings
    from ludus.cli.options import NAMED_BY, known_names

    if markdown or schema:
        typer.echo(settings.markdown() if markdown else settings.schema(), nl=schema)
        return
    found, meant = settings.find_settings(key or "")
    if meant:
        typer.echo(f"{key} is called here: {', '.join(meant)}\n")
    for name, one in found:
        default = settings.default_text(one)
        typer.echo(f"{name}{f' = {default}' if default else ''}    ({one.takes})\n    {one.meaning}")
        if (kind := NAMED_BY.get(name.rpartition(".")[2])) is not None and not one.tables:
            typer.echo(f"    {kind}: {', '.join(known_names()[kind])}")


def show(
    run: Annotated[
        Path,
        typer.Argument(
            help="A folder of a run, `ludus eval` or `ludus synth`, or a Parquet file of episodes.",
            show_default=False,
        ),
    ],
    step: Annotated[int | None, typer.Option(min=0, help="Only episodes of this step.")] = None,
    split: Annotated[
        str | None, typer.Option(help="Only train, or only eval; of a synthesis, kept or rejected.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="Only episodes of this task: an id, or a pattern (*).")
    ] = None,
    attempt: Annotated[int | None, typer.Option(min=0, help="Only this attempt.")] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Only episodes that an infrastructure failure ended.")
    ] = False,
    wrong: Annotated[
        bool, typer.Option("--wrong", help="Only episodes that were scored and did not succeed.")
    ] = False,
    prompt: Annotated[
        bool, typer.Option("--prompt", help="Also print the tokens that the model read, decoded.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Print long texts in full.")] = False,
    tree: Annotated[
        bool, typer.Option("--tree", help="Print groups as trees of attempts, and no conversations.")
    ] = False,
    limit: Annotated[int, typer.Option(min=0, help="Most episodes to print; 0 is all.")] = 5,
) -> None:
    """Print recorded episodes, the newest first: `ludus show runs/safe-001 --failed --step 12`."""
    from ludus.cli.show import EpisodeFilter, show_episodes, show_trees

    wanted = EpisodeFilter(step, split, task, attempt, failed, wrong)
    if tree:
        show_trees(run, wanted, limit=limit)
        return
    show_episodes(run, wanted, limit=limit, prompt=prompt, full=full)


def view(
    folder: Annotated[
        Path,
        typer.Argument(
            help="A folder of runs, or one run's, evaluation's or synthesis's folder.", show_default=True
        ),
    ] = Path("runs"),
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="With --play: settings that replace the recipe's.", show_default=False),
    ] = None,
    play: Annotated[
        Path | None,
        typer.Option(
            help="Also play by hand, by this recipe or run: its tools, environments and model."
        ),
    ] = None,
    model: Model = None,
    host: Annotated[
        str, typer.Option(help="Where to listen; others than 127.0.0.1, and --play, ask for a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free one.")] = 6060,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="LUDUS_TOKEN",
            help="Require this token of every client; generated where one is needed.",
        ),
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = False,
) -> None:
    """Look inside runs in a browser: curves, episodes, tokens, comparisons: `ludus view runs/`."""
    require(VIEW_PACKAGES, "view", "the viewer")
    if overrides and play is None:
        raise ConfigError(f"{overrides[0]} is for --play, which names a recipe or a run")
    from ludus.viewer import ViewerConfig, serve_viewer

    console, loaded = Console(), None
    if play is not None:
        from ludus.cli.eval import load

        console.print(Text(f"loading {play}"), soft_wrap=True)
        loaded = load(play, overrides or [], model)

    def ready(address: str) -> None:
        console.print(Text(f"{folder}: {address}"), soft_wrap=True)
        console.print(Text("Ctrl-C ends it; reading never changes a run", style="dim"), soft_wrap=True)
        if browser:
            webbrowser.open(address)

    asyncio.run(serve_viewer(ViewerConfig(folder, host, port, token or None, loaded), ready))


def envs() -> None:
    """List the prebuilt environments, and what has to be installed for each; then those of others."""
    from ludus.envs.world import World, listed_envs
    from ludus.observe import ReportTable

    rows = []
    for one in listed_envs():
        missing = one.missing()
        turns = str(one.max_turns) if isinstance(one, World) else ""
        rows.append((one.name, one.summary, turns, "needs " + "; ".join(missing) if missing else "yes"))
    columns = ("environment", "what it is", "turns", "ready")
    Console().print(ReportTable(columns, rows).rich({"yes": "green"}))


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Runs, folders of runs such as a study's, or results of `ludus eval`.",
            show_default=False,
        ),
    ],
    against: Annotated[
        str | None,
        typer.Option(
            help="The run or recipe that the others are tested against; the first when left out."
        ),
    ] = None,
) -> None:
    """Compare runs by their newest evaluations: means, intervals, paired tests; a line for a recipe's seeds."""
    from ludus.cli.study import show_comparison

    show_comparison(Console(), runs, against)


def simulate(
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="key=value: a load and a cluster, such as engines=64.", show_default=False),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="A row for each value: engines=8,64; 'engines=8,64 tasks=32,256' go side by side, several "
            "--sweep make a grid."
        ),
    ] = None,
) -> None:
    """Simulate training on more GPUs: asynchronous training with its real controller and simulated engines."""
    from ludus.training.simulation import CAPTION, simulation_table

    console = Console()
    if console.width < _WIDTH:  # a narrow terminal would cut its numbers
        console = Console(width=_WIDTH)
    console.print(simulation_table(settings or [], sweep or []).rich())
    console.print(CAPTION)


def cluster(
    address: Annotated[
        str | None,
        typer.Option(help="auto or host:port; RAY_ADDRESS, or this machine's, when left out."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look at a Ray cluster: its nodes, and the trainer ranks, engines and tools of all runs on them."""
    from ludus.dist.cluster import look
    from ludus.observe import ReportTable

    status = look(address)
    if as_json:
        print(json.dumps(status.to_json()))
        return
    nodes = [
        (
            node.id[:6],
            node.address,
            f"{max(0, node.free_cpus):g} of {node.cpus:g}",
            f"{node.free_gpus:g} of {node.gpus:g}" if node.gpus else None,
        )
        for node in status.nodes
    ]
    actors = [
        (
            one.run,
            f"{one.role} {one.number}",
            one.node and one.node[:6],
            one.pid,
            one.state,
            None if one.memory_bytes is None else f"{one.memory_bytes / 2**20:,.0f} MiB",
            None if one.seconds_since_heard is None else f"{one.seconds_since_heard:.0f} s ago",
            ", ".join(
                [f"GPU {', '.join(one.gpu_ids)}"] * bool(one.gpu_ids)
                + [f"{key} {value}" for key, value in (one.facts or {}).items()]
            ),
        )
        for one in status.actors
    ]
    console = Console(soft_wrap=True)
    console.print(ReportTable(("node", "address", "CPUs free", "GPUs free"), nodes).rich())
    if actors:
        columns = ("run", "what", "node", "pid", "state", "memory", "heard", "facts")
        console.print(ReportTable(columns, actors).rich())
    else:
        console.print(Text("no actors of Ludus here"))
