"""`whimbrel demo`: shows three moves of a running stream, then a table, a picture and the report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from whimbrel.deploy.deployment import TRIGGER
from whimbrel.deploy.embedded import App
from whimbrel.lab.bench import demo as scene
from whimbrel.lab.bench import report
from whimbrel.log.durability import PROCESS


def demo(
    seconds: Annotated[float, typer.Option(min=10, help="How long to measure, after a warm-up.")] = 60.0,
    rate: Annotated[int, typer.Option(min=1, help="Records per second.")] = 2000,
    keys: Annotated[int, typer.Option(min=2, help="Vehicles.")] = 1000,
    headless: Annotated[bool, typer.Option("--headless", help="Plain lines instead of a live display.")] = False,
    json: Annotated[Path | None, typer.Option(help="Also write the report here.")] = None,
    seed: Annotated[int, typer.Option(help="The seed of the records.")] = 1,
    data: Annotated[
        Path | None, typer.Option(help="Keep logs and checkpoints here (default: a temporary folder).")
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder for the picture and the report.")] = Path("whimbrel-demo"),
    trigger: Annotated[str, typer.Option(help="The minimum interval between micro-batches of a site.")] = TRIGGER,
    durability: Annotated[
        str, typer.Option(help='"process", or "power": acknowledged data survives a power failure.')
    ] = PROCESS,
) -> None:
    """A cloud and two edges on this machine; half of a fleet moves live, half pauses, and half restarts.

    Example: whimbrel demo --seconds 60 --rate 2000 --keys 1000
    """
    console = Console()
    options = scene.Options(seconds, rate, keys, seed, data, out, trigger, durability)
    display = _Plain(console) if headless or not sys.stdout.isatty() else _Screen(console, options)
    console.print(f"[bold]whimbrel demo[/]: {keys:,} vehicles, {rate:,} records/s; sites: {', '.join(scene.SITES)}")
    console.print(f"starting Spark, then {scene.WARM_UP:.0f} s of warm-up and {seconds:.0f} s of measuring ...")
    with display:
        figures = scene.run(options, display.show)
    report.write(figures, out / "report.json")
    if json is not None:
        report.write(figures, json)
    console.print(_table(figures))
    counts = figures["records"]
    console.print(
        f"sent {counts['sent']:,}, delivered {counts['delivered']:,}; "
        + ", ".join(f"{name} {counts[name]}" for name in ("lost", "duplicated", "out_of_order", "wrong"))
        + f"; median micro-batch {figures['batch_ms']['p50']:.0f} ms"
    )
    console.print(f"picture: {figures['picture']}\nreport:  {out / 'report.json'}")
    if not figures["held"]:
        console.print("[bold red]a guarantee was broken[/]")
        raise typer.Exit(1)


def _table(figures: dict[str, Any]) -> Table:
    table = Table(title="What each move cost its keys")
    for column in ("move", "from → to", "keys", "took ms", "stopped ms", "p99 before", "p99 during", "p99 after"):
        table.add_column(column, justify="left" if column in ("move", "from → to") else "right")
    for move in figures["migrations"]:
        p99 = [f"{move['latency_ms'][when].get('p99', float('nan')):.0f}" for when in ("before", "during", "after")]
        table.add_row(
            move["protocol"],
            f"{move['from']} → {move['to']}",
            f"{move['keys']:,}",
            f"{move['duration_ms']:.0f}",
            f"{move['stoppage_ms']:.0f}",
            *p99,
        )
    return table


class _Plain:
    """Prints a line every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console, self._last, self._next = console, "", 0.0

    def __enter__(self) -> _Plain:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def show(self, seconds: float, app: App, what: str) -> None:
        if what == self._last and seconds < self._next:
            return
        self._last, self._next = what, seconds + 5
        counts = app.status()["records"]
        self._console.print(f"{seconds:6.1f} s  {what}: sent {counts['sent']:,}, delivered {counts['delivered']:,}")


class _Screen:
    """A small live table of the sites."""

    def __init__(self, console: Console, options: scene.Options) -> None:
        self._live = Live(console=console, refresh_per_second=5, transient=True)
        self._total = scene.WARM_UP + options.seconds
        self._next = 0.0

    def __enter__(self) -> _Screen:
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)

    def show(self, seconds: float, app: App, what: str) -> None:
        if seconds < self._next:
            return
        self._next = seconds + 0.5
        status = app.status()
        counts = status["records"]
        table = Table(title=f"{seconds:.0f} of {self._total:.0f} s: {what}")
        for column in ("instance", "site", "vehicles", "micro-batch ms"):
            table.add_column(column, justify="right" if column in ("vehicles", "micro-batch ms") else "left")
        for name, instance in status["stages"][scene.STAGE]["instances"].items():
            table.add_row(name, instance["site"], f"{instance['keys']:,}", str(instance["batch_ms"] or "-"))
        table.caption = f"sent {counts['sent']:,}, delivered {counts['delivered']:,}"
        self._live.update(table)
