"""`ludus check recipe | model | env | tool | data | reward | sandbox`: the commands and their options."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ludus.cli.options import CommandGroup, Overrides

check_app = typer.Typer(
    cls=CommandGroup,
    help="Check a recipe, a model, an environment, a tool, examples or the sandbox.",
    no_args_is_help=True,
)


@check_app.command("recipe")
def check_recipe(
    recipe: Annotated[Path, typer.Argument(help="A TOML file, or a name such as safe.")],
    overrides: Overrides = None,
    call_tools: Annotated[
        bool | None,
        typer.Option(
            "--call-tools/--no-call-tools",
            help="Call each tool a few times, with arguments that its schema allows; when left out, all but "
            "the tools of MCP servers that do not declare that they change nothing (readOnlyHint).",
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds that each check may take.")] = 60.0,
) -> None:
    """Load everything that a recipe names, check its rewards on its tasks, play one episode, try its tools."""
    from ludus.cli.check.recipe import recipe_findings

    _finish(recipe_findings(recipe, overrides or [], call_tools, seconds), str(recipe))


@check_app.command("model")
def check_model(
    name: Annotated[str, typer.Argument(help="A folder, a short name, or a name on the hub.")],
    recipe: Annotated[Path | None, typer.Option(help="A recipe that it would be trained by.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16 (as on a GPU).")] = None,
    lora: Annotated[int | None, typer.Option(min=1, help="Rank of an adapter.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens in one training pass.")] = None,
    memory: Annotated[
        list[float] | None,
        typer.Option(min=0.1, help="GiB of a device; repeatable. Usual GPUs when left out."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Is a model taken, by which paths, and does it fit? From its config.json and tokenizer alone."""
    from ludus.cli.check.model import model_report

    if dtype not in (None, "float32", "bfloat16"):
        raise typer.BadParameter("float32 or bfloat16", param_hint="--dtype")
    report = model_report(name, recipe, dtype=dtype, lora=lora, tokens=tokens, memory=memory or ())
    if not as_json:
        _finish(report.findings, name)
        return
    told = [{"severity": severity, "text": text} for severity, text in report.findings]
    typer.echo(json.dumps({"model": name, "findings": told, **report.numbers}, indent=2))
    if any(severity in ("error", "failed") for severity, _ in report.findings):
        raise typer.Exit(1)


@check_app.command("env")
def check_environment(
    env: Annotated[
        str, typer.Argument(help="A prebuilt environment's name, module:Class, or an address.")
    ],
    tasks: Annotated[
        str | None, typer.Option(help="Tasks to reset it with: a file, or module:function.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The environment's name in the tasks, where they name several.")
    ] = None,
    expert: Annotated[
        str | None, typer.Option(help="A demonstrator that solves the tasks: module:function.")
    ] = None,
    rewards: Annotated[
        list[str] | None,
        typer.Option(
            "--reward",
            help="A reward, as in a recipe; repeatable. Without any, the rewards of steps count.",
        ),
    ] = None,
    thorough: Annotated[
        bool,
        typer.Option(help="Try everything: 20 tasks, 16 instances, 200 episodes, all gold solutions."),
    ] = False,
    episodes: Annotated[
        int | None, typer.Option(min=2, help="Episodes of the search for leaks; 20, or 200 if thorough.")
    ] = None,
) -> None:
    """Does an environment keep its contract? A line for each clause, on real instances."""
    from ludus.cli.check.recipe import env_findings

    found = env_findings(
        env, tasks, name, expert=expert, rewards=rewards or (), thorough=thorough, episodes=episodes
    )
    _finish(found, env)


@check_app.command("tool")
def check_tool(
    tool: Annotated[
        str,
        typer.Argument(help="module:function, file.py:function, a name such as python, or mcp:SERVER."),
    ],
    arguments: Annotated[str | None, typer.Option(help="JSON arguments to call it with.")] = None,
    name: Annotated[
        str | None, typer.Option(help="One tool of several; all are shown when left out.")
    ] = None,
) -> None:
    """Show a tool as the model sees it, and call it."""
    from ludus.cli.check.recipe import tool_findings

    _finish(tool_findings(tool, arguments, name), tool)


@check_app.command("data")
def check_data(
    files: Annotated[
        list[str],
        typer.Argument(
            help="Files of episodes (Parquet) or conversations, folders of logs; settings: min_turns=1."
        ),
    ],
    recipe: Annotated[
        Path | None,
        typer.Option(
            help="A recipe or a run: its tools check and replay the calls, its held-out tasks are kept out."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Folder to write, or to resume in; synth/FILE-checked-COUNTER when left out.",
        ),
    ] = None,
) -> None:
    """Quality control of examples: `ludus check data runs/x/trajectories/step-000012.parquet`."""
    from ludus.cli.check.data import check_data

    settings = [one for one in files if "=" in one and not Path(one).exists()]  # some hold addresses
    check_data([Path(one) for one in files if one not in settings], recipe, settings, out)


@check_app.command("reward")
def check_reward(
    reward: Annotated[
        str,
        typer.Argument(
            help="A recipe, or a TOML file with a table rewards; a name; or file.py:function."
        ),
    ],
    labels: Annotated[
        Path | None,
        typer.Option(help="Labelled answers, as JSON lines: task, answer, label, target."),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Tasks whose unit tests are tried: a file, or module:function; a recipe has its own."
        ),
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="The score from which on an answer counts as good.")
    ] = None,
) -> None:
    """Compare rewards with people's labels: accuracy, kappa, correlation, and whether length pays.

    Without labels: which unit tests of the tasks pass with solutions that solve nothing.
    """
    from ludus.cli.check.data import reward_findings

    _finish(reward_findings(reward, labels, threshold, tasks), reward)


@check_app.command("sandbox")
def check_sandbox(
    preload: Annotated[list[str] | None, typer.Option(help="A module to preload; repeatable.")] = None,
    network: Annotated[bool, typer.Option(help="Let code inside use the network.")] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A TOML file with a table sandbox, or a recipe, whose settings to try instead."
        ),
    ] = None,
) -> None:
    """Show which layers of isolation hold, by trying every door from inside, and which tiers work here."""
    from ludus.cli.check.sandbox import sandbox_findings

    _finish(sandbox_findings(tuple(preload or ()), network, config), "sandbox")


def _finish(findings: Iterable[tuple[str, str]], what: str) -> None:
    """Print findings as (severity, text); an error among them makes the command fail."""
    console, broken = Console(), 0
    styles = {
        "error": "bold red",
        "failed": "bold red",
        "warning": "yellow",
        "info": "",
        "ok": "green",
        "skipped": "cyan",
    }
    for severity, text in findings:
        console.print(Text(f"{severity}: {text}", style=styles[severity]), soft_wrap=True)
        broken += severity in ("error", "failed")
    console.print(Text(f"{what}: " + (f"{broken} error(s)" if broken else "ok")))
    if broken:
        raise typer.Exit(1)
