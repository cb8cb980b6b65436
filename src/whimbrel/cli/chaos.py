"""`whimbrel chaos`: faults under load, then a table of them, a picture, the report, and a verdict."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from whimbrel.core.errors import Refused
from whimbrel.lab.bench import report
from whimbrel.lab.bench.oracle import FAULTS
from whimbrel.lab.chaos import run as scene
from whimbrel.lab.chaos.phases import VICTIMS, cases
from whimbrel.lab.chaos.plan import KINDS

EPILOG = "Kinds of faults: " + "; ".join(f"{name} ({kind.meaning})" for name, kind in KINDS.items())


def chaos(
    minutes: Annotated[
        float, typer.Option(min=0.2, max=40, help="How long faults are injected, six per minute.")
    ] = 5.0,
    seed: Annotated[int, typer.Option(help="The seed of the faults and the records.")] = 1,
    faults: Annotated[str, typer.Option(help=f"Only these kinds: {', '.join(KINDS)}.")] = "",
    rate: Annotated[float, typer.Option(min=1, help="Records per second.")] = 500.0,
    json: Annotated[Path | None, typer.Option(help="Also write the report here.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Keep everything here (default: a temporary folder, which stays if a guarantee is violated)."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder for the picture and the report.")] = Path("whimbrel-chaos"),
    every_phase: Annotated[
        bool,
        typer.Option("--every-phase", help="Instead: kill every process in every phase of every protocol."),
    ] = False,
    protocols: Annotated[str, typer.Option(help="With --every-phase: only these protocols.")] = "",
    phases: Annotated[str, typer.Option(help="With --every-phase: only these phases.")] = "",
    victims: Annotated[str, typer.Option(help=f"With --every-phase: only these of {', '.join(VICTIMS)}.")] = "",
) -> None:
    """Inject faults into real processes under load: killing, stopping, cutting off or slowing one must lose no result.

    An orchestrator, a gateway and three sites; keys move all the time, by all protocols, and faults are injected in the
    phases of their moves. Then all work must finish, every result and dead letter is compared with the output of plain
    Python for the same rows, and no process may be left over: exit status 0 only if all of that holds. Ctrl-C ends it,
    and every process it has started.

    Example: whimbrel chaos --minutes 5 --seed 7 --faults kill,stop,cut
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM also ends all it has started
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    if (protocols or phases or victims) and not every_phase:
        raise Refused("--protocols, --phases and --victims select cases of --every-phase; give that as well")
    wanted = cases(_names(protocols), _names(phases), _names(victims)) if every_phase else []
    options = scene.Options(seed, rate, data, out)
    console.print(f"[bold]whimbrel chaos[/], seed {seed}")
    with _Progress(console) as progress:
        if every_phase:
            figures = scene.run_every_phase(options, wanted, progress.show)
        else:
            figures = scene.run(options, minutes, _names(faults), progress.show)
    report.write(figures, out / "report.json")
    if json is not None:
        report.write(figures, json)
    console.print(_phases(figures) if every_phase else _faults(figures))
    console.print(_moves(figures))
    counts = figures["records"]
    console.print(
        f"sent {counts['sent']:,}, delivered {counts['delivered']:,} of {counts['expected']:,}; "
        + ", ".join(f"{name} {counts[name]}" for name in (*FAULTS, "dead_lettered", "refused"))
        + f"; processes left over: {figures['left_over']}"
    )
    letters = counts["dead_letters"]
    console.print("dead letters: " + ", ".join(f"{name} {count}" for name, count in letters.items()))
    recovered = [one["ms"] for one in figures["recoveries"] if one["ms"] is not None]
    if recovered:
        after = [one["after_ms"] for one in figures["recoveries"] if one["after_ms"] is not None]
        console.print(
            f"median recovery: {median(recovered) / 1000:.1f} s after a fault began, "
            f"{median(after) / 1000:.1f} s after it ended, of {len(recovered)} faults"
        )
    console.print(f"picture: {figures['picture']}\nreport:  {out / 'report.json'}")
    if not figures["held"]:
        for line in figures["broken"]:
            console.print(f"[bold red]broken[/]: {escape(line)}")
        console.print(f"all files of the run are in {figures['data']}")
        raise typer.Exit(1)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _faults(figures: dict[str, Any]) -> Table:
    table = Table(title="Faults, and recovery from them")
    for column in ("at s", "fault", "target", "in phase", "lasted s", "results again after s", "back after s"):
        table.add_column(column, justify="left" if column in ("fault", "target", "in phase") else "right")
    for fault, recovery in zip(figures["faults"], figures["recoveries"], strict=True):
        after = [recovery[name] for name in ("flow_ms", "back_ms")]
        table.add_row(
            f"{fault['at_ms'] / 1000:.1f}",
            fault["kind"],
            fault["target"],
            fault["phase"],
            f"{fault['seconds']:.1f}" if fault["seconds"] else "",
            *("-" if ms is None else f"{ms / 1000:.1f}" for ms in after),
        )
    return table


def _phases(figures: dict[str, Any]) -> Table:
    table = Table(title="Killed process by phase, and the outcome of the move")
    for column in ("protocol", "phase", *VICTIMS):
        table.add_column(column)
    outcomes = figures["phases"]
    for protocol, phase in dict.fromkeys((one["case"]["protocol"], one["case"]["phase"]) for one in outcomes):
        cells = []
        for victim in VICTIMS:
            case = {"protocol": protocol, "phase": phase, "victim": victim}
            found = next((one for one in outcomes if one["case"] == case), None)
            hit = found and (found["ended"] if found["hit"] else f"[yellow]not hit[/]: {', '.join(found['found'])}")
            cells.append(hit or "-")
        table.add_row(protocol, phase, *cells)
    return table


def _moves(figures: dict[str, Any]) -> Table:
    table = Table(title="What moved")
    for column in ("protocol", "done", "aborted", "reasons"):
        table.add_column(column, justify="right" if column in ("done", "aborted") else "left")
    for protocol in dict.fromkeys(move["protocol"] for move in figures["migrations"]):
        mine = [move for move in figures["migrations"] if move["protocol"] == protocol]
        reasons = sorted({str(move["reason"]) for move in mine if move["outcome"] == "aborted"})
        counts = [str(sum(move["outcome"] == outcome for move in mine)) for outcome in ("done", "aborted")]
        table.add_row(protocol, *counts, escape("\n".join(reasons)))
    return table


class _Progress:
    """Prints a line per event; on a terminal also a status line below."""

    def __init__(self, console: Console) -> None:
        self._console, self._start = console, time.monotonic()
        self._status = console.status("") if sys.stdout.isatty() else None

    def __enter__(self) -> _Progress:
        if self._status is not None:
            self._status.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._status is not None:
            self._status.__exit__(*error)

    def show(self, line: str) -> None:
        self._console.print(f"{time.monotonic() - self._start:6.1f} s  {escape(line)}")
        if self._status is not None:
            self._status.update(escape(line))
