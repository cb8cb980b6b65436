"""`whimbrel warm`: makes Spark start in two thirds of the time on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from whimbrel.cli.screen import echo


def warm(
    again: Annotated[bool, typer.Option("--again", help="Make it again, even if there is one.")] = False,
) -> None:
    """Make an archive of Spark's classes, so that every later start of a site on this machine is faster. Run it once.

    Example: whimbrel warm
    """
    from whimbrel.deploy.warm import make_archive
    from whimbrel.spark.archive import is_wanted

    if not again and not is_wanted():
        echo("there is an archive for this Java and this Spark, or this Java cannot make one; --again tries again")
        return
    echo("running a small pipeline to collect its classes; takes about a minute, once")
    echo(f"made {make_archive()}")
