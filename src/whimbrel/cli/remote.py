"""`whimbrel status`, `sites`, `stages`, `routes`, `migrate`, `story`, `drain`: clients of a running application.

They call the API (`app.serve()`): found by its data directory, or by address and token.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from whimbrel.api.client import Client, RemoteHandle, connect
from whimbrel.cli.screen import Sheet, echo, shown, write
from whimbrel.core.errors import Refused
from whimbrel.core.keys import BINS
from whimbrel.core.protocols import PROTOCOLS, SIZES
from whimbrel.core.protocols.auto import Limits
from whimbrel.orchestrator.orchestrator import DEADLINE
from whimbrel.orchestrator.orders import MigrationStatus

Url = Annotated[str | None, typer.Option(envvar="WHIMBREL_URL", help="The address of the API.")]
Data = Annotated[
    Path | None, typer.Option(envvar="WHIMBREL_DATA", help="The data directory, with the token and the address.")
]
Token = Annotated[
    str | None,
    typer.Option(envvar="WHIMBREL_TOKEN", help="Instead of the data directory's. Safer in the environment."),
]
Certificate = Annotated[
    Path | None, typer.Option(envvar="WHIMBREL_CERTIFICATE", help="A PEM file to trust, if the API uses TLS.")
]
Json = Annotated[Path | None, typer.Option(help="Also write it here.")]
Protocol = Annotated[
    str | None,
    typer.Option(help=f"{', '.join(PROTOCOLS)}, or auto. If not given: live, or restore for keys at a dead site."),
]
Deadline = Annotated[float, typer.Option(help="Seconds after which a migration that can still be undone is aborted.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the end, and report; or only order it.")]


# ── Status ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def status(
    url: Url = None, data: Data = None, token: Token = None, certificate: Certificate = None, json: Json = None
) -> None:
    """The status of a running application: records, instances, migrations under way.

    Example: whimbrel status --data whimbrel-data
    """
    with _connected(url, token, data, certificate) as client:
        found = client.status()
    console, records = Console(), found["records"]
    ended = "failed" if found["source"]["error"] else "ended" if found["source"]["ended"] else "open"
    counts = ", ".join(f"{name.replace('_', '-')} {count:,}" for name, count in records.items())
    console.print(f"[bold]{shown(found['pipeline'])}[/]: {shown(counts)}; source {ended}")
    table = Sheet("stage", "instance", "site", "keys>", "state>", "batch ms>", "")
    for name, stage in found["stages"].items():
        for instance, one in stage["instances"].items():
            health = one["error"] or ("running" if one["running"] else "not running")
            size = _bytes(one["state_bytes"])
            table.add(name, instance, one["site"], f"{one['keys']:,}", size, _text(one["batch_ms"]), health)
    console.print(table)
    for name, stage in found["stages"].items():
        if stage["store"] is not None:
            console.print(_stored(name, stage["store"]), highlight=False)
    moving = {id: p for s in found["stages"].values() for id, p in s["migrations"].items() if p not in _OVER}
    if moving:
        by = {id: name for s in found["stages"].values() for id, name in s.get("ordered_by", {}).items()}
        echo("under way: " + ", ".join(f"{id} {phase}{_ordered(by.get(id))}" for id, phase in moving.items()))
    for full in found.get("disks", {}).values():
        console.print(f"[bold yellow]{shown(full)}[/]")
    for name, one in found.get("held_up", {}).items():
        text = f"{name}: held up for {one['for_s']:.0f} s, next try in {one['retry_s']:.0f} s: {one['why']}"
        console.print(f"[bold yellow]{shown(text)}[/]")
    for error in filter(None, (found["source"]["error"], found["error"])):
        console.print(f"[bold red]{shown(error)}[/]")
    _write(found, json)


def _ordered(by: str | None) -> str:
    return f" (ordered by {by})" if by else ""


def _stored(stage: str, store: dict[str, Any]) -> str:
    made = "no checkpoint yet" if store["checkpoint"] is None else f"checkpoint {store['checkpoint']}"
    error = f"; [bold red]{shown(store['error'])}[/]" if store["error"] else ""
    return f"store of {shown(stage)}: {made}, {_bytes(store['under_way_bytes'])} under way{error}"


def sites(
    url: Url = None, data: Data = None, token: Token = None, certificate: Certificate = None, json: Json = None
) -> None:
    """The sites, with their instances, keys and state.

    Example: whimbrel sites --data whimbrel-data
    """
    with _connected(url, token, data, certificate) as client:
        found = client.sites()
    table = Sheet("site", "instances", "keys>", "state>", "")
    for site in found:
        health = site.disk or ("running" if site.running else "not all run")
        table.add(site.name, ", ".join(site.instances), f"{site.keys:,}", _bytes(site.state_bytes), health)
    Console().print(table)
    _write(found, json)


def stages(
    url: Url = None, data: Data = None, token: Token = None, certificate: Certificate = None, json: Json = None
) -> None:
    """The stages, with their instances and the migrations under way.

    Example: whimbrel stages --data whimbrel-data
    """
    with _connected(url, token, data, certificate) as client:
        found = client.stages()
    table = Sheet("stage", "instances", "keys>", "groups>", "partitions>", "under way")
    for stage in found:
        places = ", ".join(f"{name} at {site}" for name, site in stage.instances.items())
        figures = (f"{stage.keys:,}", str(stage.groups), str(stage.partitions))
        table.add(stage.name, places, *figures, ", ".join(stage.migrations))
    Console().print(table)
    _write(found, json)


def routes(
    stage: Annotated[str, typer.Argument(help="The stage.")],
    url: Url = None,
    data: Data = None,
    token: Token = None,
    certificate: Certificate = None,
    json: Json = None,
) -> None:
    """The bins and keys that each instance of a stage owns.

    Example: whimbrel routes average --data whimbrel-data
    """
    with _connected(url, token, data, certificate) as client:
        found = client.routes(stage)
    table = Sheet("instance", "site", "keys>", "bins", "single keys")
    for route in found:
        bins = ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in route.bins)
        more = f", ... {route.apart_count:,} in all" if route.apart_count > len(route.apart) else ""
        table.add(route.instance, route.site, f"{route.keys:,}", bins, ", ".join(route.apart) + more)
    Console().print(table)
    _write(found, json)


def story(
    id: Annotated[str, typer.Argument(help="The migration: m1.")],
    url: Url = None,
    data: Data = None,
    token: Token = None,
    certificate: Certificate = None,
    json: Json = None,
) -> None:
    """The events of a migration, line by line: with their times, and the duration at the end of a phase.

    Example: whimbrel story m1 --data whimbrel-data
    """
    with _connected(url, token, data, certificate) as client:
        found = client.story(id)
    echo(*found)
    _write(found, json)


# ── Orders ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def migrate(
    stage: Annotated[str, typer.Argument(help="The stage whose keys move.")],
    to: Annotated[str, typer.Option(help="The destination site.")],
    keys: Annotated[str | None, typer.Option(help="These keys: s1,s2.")] = None,
    bins: Annotated[str | None, typer.Option(help="These bins: 0-511,600.")] = None,
    share: Annotated[float | None, typer.Option(help="A share of the keys at other sites: 0.5.")] = None,
    at: Annotated[str | None, typer.Option(help="Only keys that are at this site.")] = None,
    protocol: Protocol = None,
    from_checkpoint: Annotated[
        int | None, typer.Option(help="Restore from this checkpoint, not the newest versions.")
    ] = None,
    deadline: Deadline = DEADLINE,
    option: Annotated[
        list[str] | None,
        typer.Option(help="An option of the protocol: order=key, step=16, plan=plan.json, max_stoppage_ms=500."),
    ] = None,
    wait: Wait = True,
    url: Url = None,
    data: Data = None,
    token: Token = None,
    certificate: Certificate = None,
    json: Json = None,
) -> None:
    """Move keys of a stage to a site while it runs: the given keys, or all.

    Examples: whimbrel migrate average --keys s1,s2 --to edge-1 --data whimbrel-data

              whimbrel migrate average --share 0.5 --at cloud --to edge-1 --protocol push --data whimbrel-data
    """
    with _connected(url, token, data, certificate) as client:
        handle = client.migrate(
            stage,
            to=to,
            keys=None if keys is None else keys.split(","),
            bins=None if bins is None else _bins(bins),
            share=share,
            at=at,
            protocol=protocol,
            from_checkpoint=from_checkpoint,
            deadline=deadline,
            **dict(map(_option, option or [])),
        )
        _follow(handle, wait, json)


def drain(
    site: Annotated[str, typer.Argument(help="The site to empty.")],
    to: Annotated[
        str | None, typer.Option(help="The sites that take its keys: edge-1,edge-2. If not given, all others.")
    ] = None,
    protocol: Protocol = None,
    deadline: Deadline = DEADLINE,
    wait: Wait = True,
    url: Url = None,
    data: Data = None,
    token: Token = None,
    certificate: Certificate = None,
    json: Json = None,
) -> None:
    """Move everything away from a site, to all others or to the given ones, and report what moved where.

    Example: whimbrel drain edge-1 --to cloud --data whimbrel-data
    """
    others = None if to is None else to.split(",")
    with _connected(url, token, data, certificate) as client:
        _follow(client.drain(site, to=others, protocol=protocol, deadline=deadline), wait, json)


def _follow(handle: RemoteHandle, wait: bool, json: Path | None) -> None:
    console = Console()
    echo(*handle.why)
    if handle.is_noop:
        console.print("already there: nothing to move")
    elif wait:
        handle.wait_warm()
    found = handle.migrations
    if found:
        console.print(_migrations(found))
    _write({"outcome": handle.outcome, "migrations": msgspec.to_builtins(found), "why": handle.why}, json)
    if wait and handle.outcome == "aborted":
        raise typer.Exit(1)


def _migrations(found: Iterable[MigrationStatus]) -> Sheet:
    table = Sheet("migration", "stage", "protocol", "from", "to", "keys>", "state>", "sent>", "")
    for one in found:
        ends = (f"{one.source} at {one.from_site}", f"{one.destination} at {one.to_site}")
        figures = (f"{one.keys:,}", _bytes(one.state_bytes), _bytes(one.sent_bytes))
        outcome = one.phase if one.reason is None else f"{one.phase}: {one.reason}"
        table.add(one.id, one.stage, one.protocol, *ends, *figures, outcome)
    return table


# ── Shared ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_OVER = ("done", "aborted")
_LIMITS = [f"max_{name}" for name in Limits.__struct_fields__]
OPTIONS = sorted({*SIZES, *_LIMITS, *(name for rules in PROTOCOLS.values() for name in rules.choices)})
"""The options of all protocols."""


def _connected(url: str | None, token: str | None, data: Path | None, certificate: Path | None) -> Client:
    if data is None and (url is None or token is None):
        raise Refused(
            "no application given: give --data, its data directory, "
            "or --url (or WHIMBREL_URL) with the token in WHIMBREL_TOKEN"
        )
    return connect(url, token=token, data=data, certificate=certificate)


def _bins(text: str) -> list[int]:
    """The bins of a text like `0-511,600`."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        ends = [end for end in (first, last or first) if end.isdecimal() and int(end) < BINS]
        if len(ends) < 2:
            raise Refused(f"bins must be numbers and ranges up to {BINS - 1}, like 0-511,600; got {text!r}")
        found += range(int(ends[0]), int(ends[1]) + 1)
    return found


def _option(text: str) -> tuple[str, Any]:
    """An option like `step=16`: a number, a boolean or a list is parsed as JSON."""
    name, _, value = text.partition("=")
    if not value or name not in OPTIONS:
        raise Refused(f"an option must be name=value, like step=16; got {text!r}; there is: {', '.join(OPTIONS)}")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value


def _bytes(count: int) -> str:
    size, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size:,.0f} {units[0]}" if units[0] == "B" else f"{size:,.1f} {units[0]}"


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _write(found: Any, path: Path | None) -> None:
    if path is not None:
        write(msgspec.to_builtins(found), path)
