"""`whimbrel certificates`: a certificate authority for the places of a deployment, and what it signs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from whimbrel.cli.screen import echo
from whimbrel.core.errors import Refused
from whimbrel.core.names import SUPERVISOR
from whimbrel.rpc.access import share_credentials
from whimbrel.transport.certificates import DAYS, Authority


def certificates(
    folder: Annotated[Path, typer.Argument(help="The folder: one below it for the authority, and one for each place.")],
    place: Annotated[
        list[str] | None,
        typer.Option(help="A place, with its addresses if others call it by them: NAME or NAME=ADDRESS[,ADDRESS]."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="For how long the certificates are valid.")] = DAYS,
    renew: Annotated[bool, typer.Option("--renew", help="Renew them even if they are valid for long.")] = False,
    revoke: Annotated[list[str] | None, typer.Option(help="Revoke the certificates of this place.")] = None,
) -> None:
    """Create and renew the certificates of places, and of the orchestrator; revoke them.

    The first call creates the authority. Copy the folder of a place, and no other, to its machine. Call it again with
    the same places, from time to time, to renew what has less than a third of its time left. After a revocation copy
    revoked.pem to all places: they read it without a restart.

    Examples: whimbrel certificates keys --place cloud=10.0.0.1 --place edge-1=10.0.0.2

              whimbrel certificates keys --revoke edge-1
    """
    if not place and not revoke:
        raise Refused("nothing to do: give --place NAME for each place, or --revoke NAME")
    authority = Authority(folder)
    for name in revoke or []:
        number = authority.revoke(name)
        echo(f"revoked {number} of {name}; copy revoked.pem to all places: each has it in its folder below {folder}")
    wanted = dict(given.partition("=")[::2] for given in place or [])
    if wanted and not (folder / SUPERVISOR / "certificate.pem").exists():
        wanted.setdefault(SUPERVISOR, "")  # later only by name: else its addresses would be lost
    for name, addresses in wanted.items():
        made = authority.issue(name, [one for one in addresses.split(",") if one], days, renew=renew)
        if name != SUPERVISOR:
            share_credentials(folder, [name])
        echo(f"{folder / name}: {'made' if made else 'still good'}")
