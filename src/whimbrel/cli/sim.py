"""`whimbrel sim`: run the real core in the deterministic simulator, for many seeds."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.pool import AsyncResult
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from whimbrel.lab.bench import report
from whimbrel.lab.sim.run import CHOICES, Outcome, search
from whimbrel.lab.sim.sabotage import SABOTAGES, SEEN_IN

SLICE = 5
"""Seeds that a worker runs at a time."""

Job = tuple[tuple[str, ...], range, str | None]
Workers = Callable[[Iterable[Job]], Iterator[Outcome]]
"""Run jobs, and return their outcomes in the order of the jobs."""


def sim(
    protocol: Annotated[str, typer.Option(help=f"{', '.join(CHOICES)}, or all of them.")] = "all",
    seeds: Annotated[int, typer.Option(min=1, help="How many histories per protocol.")] = 2000,
    sabotage: Annotated[
        str | None,
        typer.Option(help=f"Switch off a safeguard: {', '.join(SABOTAGES)}, or all in turn. Success: it is detected."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", "--first-seed", min=0, help="The first seed.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the report here.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Worker processes.")] = os.cpu_count() or 1,
) -> None:
    """Simulate thousands of histories with crashes, delays and repeated messages: is any guarantee ever violated?

    Examples: whimbrel sim --protocol all --seeds 2000
              whimbrel sim --sabotage all --seeds 300
    """
    protocols = tuple(_chosen("protocol", protocol, CHOICES))
    safeguards: list[str | None] = [*_chosen("sabotage", sabotage, list(SABOTAGES))] if sabotage else [None]
    soonest = SEEN_IN if protocol == "all" else {}
    start = time.monotonic()
    with _workers(min(jobs, seeds)) as workers:
        some = range(seed, seed + seeds)
        outcomes = {off: _search(workers, soonest.get(off or "", protocols), some, off) for off in safeguards}
    seconds = round(time.monotonic() - start, 1)
    total = Outcome()
    for outcome in outcomes.values():
        total += outcome
    schedules, steps = total.total("schedules"), total.total("steps")
    violation = None if sabotage else total.found
    held = all(outcome.found for outcome in outcomes.values()) if sabotage else violation is None

    console = Console()
    console.print(_sabotage_table(outcomes) if sabotage else _table(total))
    console.print(f"{schedules:,} histories, {steps:,} steps in {seconds} s: {_verdict(outcomes)}")
    if json is not None:
        figures = {
            **report.heading(seed),
            "schedules": schedules,
            "steps": steps,
            "violations": int(violation is not None),
            "first_violation": msgspec.to_builtins(violation),
            "seconds": seconds,
            "sabotages": {off: _described(outcome) for off, outcome in outcomes.items() if off},
            "seen": {name: dict(sorted(tally.items())) for name, tally in total.tallies.items()},
        }
        report.write(figures, json)
    if not held:
        raise typer.Exit(1)


# ── Searching ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _search(workers: Workers, protocols: tuple[str, ...], seeds: range, sabotage: str | None) -> Outcome:
    """Search up to the violation with the lowest seed: slices return in order, so the first is the lowest."""
    slices: list[Job] = [(protocols, seeds[at : at + SLICE], sabotage) for at in range(0, len(seeds), SLICE)]
    whole = Outcome()
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        doing = f"without {sabotage}" if sabotage else "histories"
        for outcome in progress.track(workers(slices), total=len(slices), description=doing):
            whole += outcome
            if whole.found is not None:
                break
    return whole


@contextmanager
def _workers(count: int) -> Iterator[Workers]:
    """Worker processes that leave Ctrl-C to this process, from their start on, and end when the context ends."""
    resource_tracker.ensure_running()  # it runs next to the workers; starting it later would unblock the signal
    pressed: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    # A new process inherits the blocked signals, so that none of them can die with a traceback while it starts.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        pool = multiprocessing.get_context("spawn").Pool(count, _settle_down)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)

    def in_order(slices: Iterable[Job]) -> Iterator[Outcome]:
        """Few jobs are submitted ahead: when a violation is found, few are left to finish."""
        pending: deque[AsyncResult[Outcome]] = deque()
        for job in slices:
            pending.append(pool.apply_async(search, job))
            if len(pending) > 2 * count:
                yield pending.popleft().get()
        while pending:
            yield pending.popleft().get()

    with pool:
        if pressed:
            raise KeyboardInterrupt
        yield in_order


def _settle_down() -> None:
    """Collect garbage rarely: a worker produces hardly any, and imported objects need not be scanned."""
    gc.freeze()
    gc.set_threshold(100_000)


def _chosen(kind: str, name: str, known: list[str]) -> list[str]:
    if name == "all":
        return known
    if name not in known:
        typer.echo(f"whimbrel: unknown {kind} {name!r}; there is: {', '.join(known)}, all", err=True)
        raise typer.Exit(2)
    return [name]


# ── Reporting ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _described(outcome: Outcome) -> str:
    return f"caught at seed {outcome.found.seed}" if outcome.found else "not caught"


def _verdict(outcomes: dict[str | None, Outcome]) -> str:
    if None in outcomes:
        found = outcomes[None].found
        if found is None:
            return "no guarantee violated"
        again = f"whimbrel sim --protocol {found.protocol} --seed {found.seed} --seeds 1"
        return f"[bold red]{escape(found.what)}[/]\nReproduce with: {again}"
    missed = [str(name) for name, outcome in outcomes.items() if not outcome.found]
    return f"[bold red]not caught: {', '.join(missed)}[/]" if missed else "every sabotage was caught"


def _table(outcome: Outcome) -> Table:
    """By protocol: how much was run, and which events occurred."""
    seen = {"schedules": "histories", "steps": "steps", "migrations done": "moved", "migrations aborted": "aborted"}
    table = Table("protocol", *seen.values(), "deaths", "zombies refused", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, tally in outcome.tallies.items():
        deaths = sum(count for what, count in tally.items() if what.endswith(" died"))
        table.add_row(name, *(f"{n:,}" for n in (*(tally[what] for what in seen), deaths, tally["zombies refused"])))
    return table


def _sabotage_table(outcomes: dict[str | None, Outcome]) -> Table:
    table = Table("without", "", "protocol", "by", box=None)
    for name, outcome in outcomes.items():
        found = outcome.found
        table.add_row(
            name, _described(outcome), found.protocol if found else "", escape(found.what[:80]) if found else ""
        )
    return table
