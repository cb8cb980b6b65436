"""`whimbrel warm`: what makes Spark start in two thirds of the time on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from whimbrel.cli.screen import say


def warm(
    again: Annotated[bool, typer.Option("--again", help="Make it anew, though there is one.")] = False,
) -> None:
    """Make an archive of Spark's classes, so that every later start of a site on this machine is quicker. Once.

    Example: whimbrel warm
    """
    from whimbrel.deploy.warm import make_archive
    from whimbrel.spark.archive import is_wanted

    if not again and not is_wanted():
        say("there is an archive for this Java and this Spark already, or this Java can make none; --again tries again")
        return
    say("running a small pipeline for its classes; about a minute, once")
    say(f"made {make_archive()}")
