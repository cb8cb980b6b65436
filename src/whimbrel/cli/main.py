"""The command line: one file a command, all of them registered here."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from whimbrel.bench.report import installed
from whimbrel.cli.bench import bench
from whimbrel.cli.chaos import EPILOG, chaos
from whimbrel.cli.checkpoints import checkpoints
from whimbrel.cli.demo import demo
from whimbrel.cli.processes import gateway, orchestrator, site, up
from whimbrel.cli.remote import drain, migrate, routes, sites, stages, status, story
from whimbrel.cli.sim import sim
from whimbrel.cli.token import token
from whimbrel.core.errors import WhimbrelError
from whimbrel.core.text import visible

app = typer.Typer(
    name="whimbrel",
    help="Move the state of a running PySpark stream between sites, key by key, without stopping it.",
    epilog="Begin with: whimbrel demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(sim)
app.command(epilog=EPILOG)(chaos)
app.command()(checkpoints)
for process in (up, orchestrator, gateway, site):
    app.command()(process)
app.add_typer(bench)
app.add_typer(token, rich_help_panel="A running application")
for command in (status, sites, stages, routes, migrate, story, drain):
    app.command(rich_help_panel="A running application")(command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"whimbrel {installed('whimbrel')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Whimbrel."""


def main() -> None:
    """The entry point: an error on purpose is one line, an interrupt is quiet."""
    try:
        app()
    except WhimbrelError as error:
        sys.exit(f"whimbrel: {visible(error, lines=True)}")
    except KeyboardInterrupt:
        sys.exit(130)
