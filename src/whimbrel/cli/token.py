"""`whimbrel token`: the users that may read the status of a running application, or give it orders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from whimbrel.api.tokens import FILES, Tokens
from whimbrel.cli.screen import Sheet, echo
from whimbrel.core.errors import Refused
from whimbrel.rpc.access import rotate_credentials

token = typer.Typer(
    name="token", help="Manage the users that may read a running application's status, or give it orders."
)
Data = Annotated[Path, typer.Option(envvar="WHIMBREL_DATA", help="The data directory.")]
Name = Annotated[str, typer.Argument(help="The user's name.")]


@token.command()
def add(
    name: Name, data: Data, role: Annotated[str, typer.Option(help="read: status only. operate: orders, too.")] = "read"
) -> None:
    """Create a token for a user, and print it. It is shown once: only its digest is stored.

    Example: whimbrel token add grafana --role read --data whimbrel-data
    """
    typer.echo(_tokens(data).add(name, role))


@token.command("list")
def list_all(data: Data) -> None:
    """List the users with a token: name, role, creation time.

    Example: whimbrel token list --data whimbrel-data
    """
    table = Sheet("name", "role", "made")
    for name, (file, role) in FILES.items():
        table.add(name, role, f"in the file {file}")
    for one in _tokens(data).named():
        table.add(one.name, one.role, one.made)
    Console().print(table)


@token.command()
def revoke(name: Name, data: Data) -> None:
    """Make a token invalid, from the next call on.

    Example: whimbrel token revoke grafana --data whimbrel-data
    """
    _tokens(data).revoke(name)
    echo(f"the token of {name} is revoked")


@token.command()
def rotate(
    data: Data,
    name: Annotated[
        str, typer.Argument(help="The user's name; the tokens of operator and reader are in files.")
    ] = "operator",
    roles: Annotated[bool, typer.Option("--roles", help="Replace the credentials of the processes instead.")] = False,
) -> None:
    """Replace a token: the old one becomes invalid, and nothing has to be restarted.

    Examples: whimbrel token rotate --data whimbrel-data

              whimbrel token rotate --roles --data whimbrel-data
    """
    tokens = _tokens(data)
    if roles:
        echo(f"rotated: {', '.join(rotate_credentials(data)) or 'no process has a credential here yet'}")
        return
    made = tokens.rotate(name)
    if name in FILES:
        echo(f"the new token of {name} is in {data / FILES[name][0]}")
    else:
        typer.echo(made)


def _tokens(data: Path) -> Tokens:
    if not data.is_dir():
        raise Refused(f"{data} is not a data directory; give the one that the application was started with")
    return Tokens(data)
