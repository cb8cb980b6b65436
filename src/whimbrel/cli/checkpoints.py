"""`whimbrel checkpoints`: the checkpoints that a central store can restore."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

from whimbrel.cli.screen import Sheet, echo, version, write
from whimbrel.core.errors import UnknownName

if TYPE_CHECKING:
    from whimbrel.checkpoints.version import Checkpoint


def checkpoints(
    url: Annotated[str, typer.Argument(help="The store: a directory, or s3://bucket/prefix.")],
    stage: Annotated[str | None, typer.Option(help="This stage only.")] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the list here.")] = None,
) -> None:
    """List the checkpoints of a central store, by stage, oldest first.

    Examples: whimbrel checkpoints /var/lib/whimbrel/store
              whimbrel checkpoints s3://bucket/whimbrel --stage average --json checkpoints.json
    """
    from whimbrel.checkpoints.central import CentralStore

    store = CentralStore(url)
    stages = store.stages()
    if stage is not None and stage not in stages:
        raise UnknownName("stage", stage, stages)
    found = {name: store.checkpoints(name) for name in stages if stage in (None, name)}

    if any(found.values()):
        Console().print(_table(found))
    else:
        echo(f"no checkpoints at {url}")
    if json is not None:
        write({"whimbrel": version("whimbrel"), "url": url, "stages": msgspec.to_builtins(found)}, json)


def _table(found: dict[str, list[Checkpoint]]) -> Sheet:
    table = Sheet("stage", "checkpoint>", "made>", "keys>", "bytes>", "horizon>", "damage")
    for stage, checkpoints in found.items():
        for one in checkpoints:
            made, horizon = _moment(one.at_us), _place(one.horizon)
            figures = [f"{number:,}" if made else "" for number in (one.keys, one.bytes)]
            table.add(stage, one.number, made, *figures, horizon, one.damage)
    return table


def _moment(at_us: int) -> str:
    """A time in UTC; empty for a checkpoint without one."""
    with suppress(ValueError, OverflowError):  # a time outside the calendar
        return datetime.fromtimestamp(at_us / 1_000_000, UTC).strftime("%Y-%m-%d %H:%M:%SZ") if at_us else ""
    return ""


def _place(seq: int) -> str:
    """A seq as position.row of the ingress log."""
    return f"{seq >> 20}.{seq & 0xFFFFF}" if seq >= 0 else ""
