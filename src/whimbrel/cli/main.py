"""The command line: one file per command, loaded when the command is used, so that `whimbrel status` loads no Spark."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated

import typer

from whimbrel.cli.screen import version
from whimbrel.core.errors import WhimbrelError
from whimbrel.core.text import visible

COMMANDS = {
    "demo": "demo",
    "sim": "sim",
    "chaos": "chaos",
    "checkpoints": "checkpoints",
    "up": "processes",
    "orchestrator": "processes",
    "gateway": "processes",
    "site": "processes",
    "place": "places",
    "warm": "warm",
    "bench": "bench",
    "token": "token",
    "certificates": "certificates",
    "status": "remote",
    "sites": "remote",
    "stages": "remote",
    "routes": "remote",
    "migrate": "remote",
    "story": "remote",
    "drain": "remote",
}
"""By command, in the order of the help text: the module of `whimbrel.cli` that has it."""
RUNNING = ("token", "remote")
"""The modules whose commands are for a running application."""


def make_app(*wanted: str) -> typer.Typer:
    """The command line with these commands; with all commands if none of the names is one."""
    app = typer.Typer(
        name="whimbrel",
        help="Move the state of a running PySpark stream between sites, key by key, without stopping it.",
        epilog="Start with: whimbrel demo",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(options)
    for name in [name for name in wanted if name in COMMANDS] or COMMANDS:
        module = import_module(f"whimbrel.cli.{COMMANDS[name]}")
        command, panel = getattr(module, name), "A running application" if COMMANDS[name] in RUNNING else None
        if isinstance(command, typer.Typer):
            app.add_typer(command, rich_help_panel=panel)
        else:
            app.command(epilog=getattr(module, "EPILOG", None), rich_help_panel=panel)(command)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"whimbrel {version('whimbrel')}")
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Whimbrel."""


def main() -> None:
    """The entry point: a Whimbrel error prints one line, an interrupt prints nothing."""
    try:
        make_app(*sys.argv[1:2])()
    except WhimbrelError as error:
        sys.exit(f"whimbrel: {visible(error, lines=True)}")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("matplotlib"):
            raise
        sys.exit("whimbrel: pictures need matplotlib, which comes with: pip install 'whimbrel[lab]'")
    except KeyboardInterrupt:
        sys.exit(130)
