"""`whimbrel sim`: run the real core in the deterministic world, for many seeds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from whimbrel.bench import report
from whimbrel.core.protocols import PROTOCOLS
from whimbrel.sim.run import Found, search
from whimbrel.sim.sabotage import SABOTAGES

SLICE = 25
"""Seeds a worker takes at a time."""

Job = tuple[tuple[str, ...], range, str | None]
Outcome = tuple[Found | None, int, int, float]


def sim(
    protocol: Annotated[str, typer.Option(help="A protocol's name, or all.")] = "all",
    seeds: Annotated[int, typer.Option(min=1, help="How many histories of each protocol.")] = 2000,
    sabotage: Annotated[
        str | None, typer.Option(help="Switch one safeguard off, or all in turn: success means it is noticed.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the report here.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Worker processes.")] = os.cpu_count() or 1,
) -> None:
    """Thousands of histories with crashes, delays and repeated messages: is any promise ever broken?

    Examples: whimbrel sim --protocol all --seeds 2000
              whimbrel sim --sabotage all
    """
    protocols = _chosen("protocol", protocol, list(PROTOCOLS))
    sabotages = _chosen("sabotage", sabotage, list(SABOTAGES)) if sabotage else []
    console = Console()
    start = time.monotonic()
    figures: dict[str, Any] = {**report.heading(seed), "schedules": 0, "steps": 0, "violations": 0}
    figures["first_violation"] = None
    with multiprocessing.get_context("spawn").Pool(jobs, _ignore_interrupts) as processes:
        pool = Pool(processes, 2 * jobs)
        if sabotages:
            figures["sabotages"] = {}
            for name in sabotages:
                found = _search(pool, protocols, range(seed, seed + seeds), name, console, figures)
                told = f"caught at seed {found.seed}" if found else "not caught"
                figures["sabotages"][name] = told
                console.print(f"{name:10} {told}" + (f" ({found.protocol}: {found.what[:100]})" if found else ""))
            held = all(told != "not caught" for told in figures["sabotages"].values())
        else:
            found = _search(pool, protocols, range(seed, seed + seeds), None, console, figures)
            held = found is None
            if found:
                figures |= {"violations": 1, "first_violation": msgspec.to_builtins(found)}
                console.print(f"[bold red]{found.protocol}, seed {found.seed}[/]: {found.what}")
    figures["seconds"] = round(time.monotonic() - start, 1)
    console.print(
        f"{figures['schedules']:,} histories, {figures['steps']:,} steps in {figures['seconds']} s: "
        + (
            "every sabotage was caught"
            if sabotages and held
            else "no promise broken"
            if held
            else "[bold red]failed[/]"
        )
    )
    if json is not None:
        report.write(figures, json)
    if not held:
        raise typer.Exit(1)


class Pool:
    """Worker processes that are given little ahead: when something is found, nothing is left to be done for nothing."""

    def __init__(self, processes: Any, ahead: int) -> None:
        self._processes, self._ahead = processes, ahead

    def run(self, work: list[Job]) -> Iterator[Outcome]:
        """The outcomes, in the order of the work."""
        pending: deque[Any] = deque()
        for job in work:
            pending.append(self._processes.apply_async(_run, (job,)))
            if len(pending) >= self._ahead:
                yield pending.popleft().get()
        while pending:
            yield pending.popleft().get()


def _search(
    pool: Pool, protocols: list[str], seeds: range, sabotage: str | None, console: Console, figures: dict[str, Any]
) -> Found | None:
    """The violation with the lowest seed; slices come back in order, so the first is the lowest."""
    work: list[Job] = [(tuple(protocols), seeds[at : at + SLICE], sabotage) for at in range(0, len(seeds), SLICE)]
    with Progress(console=console, transient=True, disable=not sys.stdout.isatty()) as progress:
        task = progress.add_task(f"sabotage: {sabotage}" if sabotage else "histories", total=len(work))
        for found, schedules, steps, _ in pool.run(work):
            figures["schedules"] += schedules
            figures["steps"] += steps
            progress.advance(task)
            if found is not None:
                return found
    return None


def _run(job: Job) -> Outcome:
    return search(*job)


def _ignore_interrupts() -> None:
    """Ctrl-C is for the parent, which ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _chosen(kind: str, name: str, known: list[str]) -> list[str]:
    if name == "all":
        return known
    if name not in known:
        typer.echo(f"whimbrel: unknown {kind} {name!r}; there is: {', '.join(known)}, all", err=True)
        raise typer.Exit(2)
    return [name]
